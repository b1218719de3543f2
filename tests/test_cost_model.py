"""cost_model, and the script that holds it against measurements."""

import itertools
import json
import pathlib
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS

import entwine_jax
from entwine_jax import Config, cost_model

# Behind everything else: the package under test is the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks import model

RESULTS = pathlib.Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.mark.parametrize("op", OPS)
def test_strategies(op):
    for ranks in range(2, 9):
        costs = cost_model(op, 8192 // ranks * ranks, 4096, 4096, ranks)
        assert list(costs) == ["fused", "resident", "signal", "xla"] and all(
            cost.strategy == name for name, cost in costs.items()
        )
        fused, xla = costs["fused"], costs["xla"]
        assert fused.us < xla.us and fused.formula_us < xla.formula_us
        assert fused.plan.target == "sm90" and not fused.plan.few_rows and xla.plan is None
        assert max(fused.link_us, fused.multiply_us) < fused.us < fused.link_us + fused.multiply_us + 150
        assert xla.us >= xla.link_us + xla.multiply_us
        assert fused.wait_rows_us == 0 or op == "all_gather_matmul"
        assert fused.wait_sums_us == 0 or op != "all_gather_matmul"


@pytest.mark.parametrize("strategy", ["fused", "resident", "signal"])
@pytest.mark.parametrize("op", OPS)
def test_simulated_tiles(op, strategy, tmp_path):
    """Every tile is multiplied once, nobody does two things at a time, and what is sent is what the op sends."""
    m, n, k, ranks = 4096, 4096, 512, 4
    call = entwine_jax.simulate_tiles(op, m, n, k, ranks, strategy=strategy)
    cost = cost_model(op, m, n, k, ranks)[strategy]
    assert call.us == cost.us and call.plan == cost.plan
    multiplied = call.of("multiply")
    tiles = {tuple(map(int, span)) for span in multiplied[["owner", "row", "column"]]}
    assert len(tiles) == len(multiplied) == m * n / (call.plan.tile_m * call.plan.tile_n)
    for worker in set(call.spans["worker"].tolist()):
        alone = call.spans[(call.spans["worker"] == worker) & (call.spans["role"] == 0)]
        assert np.all(np.sort(alone["begin"])[1:] >= np.sort(alone["end"])[:-1] - 1e-6)
    assert 0.5 * call.us < call.spans["end"].max() <= call.us + 1e-6
    chunk = m // ranks * (k if op == "all_gather_matmul" else n) * 2
    # Partial sums of an all-reduce go to their owners and back, by copy engines to all. Fetching is a bit slower.
    chunks = {"matmul_all_reduce": ranks if strategy == "signal" else 2}.get(op, 1)
    assert call.link_bytes.sum() == pytest.approx(chunks * chunk * (ranks - 1), rel=0.1)
    assert (len(call.of("move")) > 0) == (strategy == "resident" or (op, strategy) == ("all_gather_matmul", "fused"))
    assert (len(call.of("transfer")) > 0) == (strategy == "signal")
    times, rates = call.link_rate(5)
    assert len(times) == len(rates) and 0 < rates.max() < 362
    call.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == len(call.spans)


@pytest.mark.parametrize(
    "arguments, options, match",
    [
        ((512, 512, 512), {"strategy": "xla"}, "strategy='xla' is unknown; use one of .'fused', 'resident', 'signal'."),
        ((512, 512, 512), {"strategy": "signal", "dtype": "float8_e4m3fn"}, "strategy='signal' can't run this call"),
        ((512, 500, 512), {}, "must be multiples of 16 bytes"),
        (
            (64, 512, 512),
            {"config": Config(few_rows=True)},
            "m=64 rows have kernels without tiles; pass config=Config.few_rows=False.",
        ),
    ],
)
def test_what_has_no_simulated_tiles(arguments, options, match):
    with pytest.raises(ValueError, match=match):
        entwine_jax.simulate_tiles("matmul_reduce_scatter", *arguments, 2, **options)


def test_larger_teams_move_more():
    for op in OPS:
        for costs in zip(*(cost_model(op, 8192, 8192, 1024, ranks).values() for ranks in (2, 4, 8)), strict=True):
            times = [cost.us for cost in costs]
            # Plans differ: how many multiprocessors move, for example.
            assert all(b > 0.93 * a for a, b in itertools.pairwise(times)) and costs[0].link_us < costs[2].link_us


def test_one_schedule_is_simulated():
    """The plan's numbers, and config's, make the time."""

    def us(**config):
        return cost_model("matmul_reduce_scatter", 8192, 8192, 1024, 2, config=Config(**config))["fused"].us

    planned = us()
    assert us(pushers=10, transport="push", lead=44) == planned
    assert us(pushers=3) > 1.3 * planned
    assert us(lead=1 << 20, pushers=1 << 20) > 1.1 * planned
    few = cost_model("all_gather_matmul", 64, 8192, 8192, 2)["fused"]
    tiles = cost_model("all_gather_matmul", 64, 8192, 8192, 2, config=Config(few_rows=False))["fused"]
    assert few.plan.few_rows and not tiles.plan.few_rows and tiles.us > few.us


def test_types():
    def fused(**types):
        return cost_model("matmul_reduce_scatter", 8192, 8192, 8192, 4, **types)["fused"]

    assert fused() == fused(dtype=jnp.float16) == fused(dtype="bfloat16", out_dtype=jnp.bfloat16)
    # Twice the bytes; pushed they are a bit faster than pulled.
    assert fused(out_dtype=jnp.float32).link_us == pytest.approx(2 * fused().link_us, rel=0.08)
    assert fused(dtype="float8_e4m3fn").us < 0.7 * fused().us
    few = [cost_model("all_gather_matmul", 64, 8192, 8192, 2, dtype=t)["fused"] for t in ("float8_e4m3fn", "bfloat16")]
    assert all(cost.plan.few_rows for cost in few) and few[0].us < 0.7 * few[1].us
    assert fused(dtype="float8_e5m2", out_dtype="float16").link_us == pytest.approx(fused().link_us, rel=0.08)


def test_gated_products():
    """Fused as one product of both widths, of tiles of 256 rows; XLA reads gate and up once more, and writes."""
    gated = cost_model("all_gather_matmul", 8192, 3584, 8192, 2, gated=True)
    both = cost_model("all_gather_matmul", 8192, 7168, 8192, 2)
    assert gated["fused"] == both["fused"]
    moved = 3 * 8192 * 3584 * 2
    assert gated["xla"].us - both["xla"].us == pytest.approx(moved / 3.7e6)
    assert gated["xla"].formula_us - both["xla"].formula_us == pytest.approx(moved / 4.2e6)
    assert cost_model("all_gather_matmul", 256, 1024, 8192, 2, gated=True)["fused"].plan.tile_m == 256


def test_rows_that_tma_cannot_take():
    assert list(cost_model("all_gather_matmul", 64, 100, 128, 2)) == ["xla"]
    assert list(cost_model("all_gather_matmul", 64, 104, 128, 2)) == ["fused", "resident", "xla"]
    assert list(cost_model("all_gather_matmul", 640, 104, 128, 2)) == ["fused", "resident", "signal", "xla"]
    assert list(cost_model("all_gather_matmul", 64, 104, 104, 2, dtype="float8_e4m3fn")) == ["xla"]


def test_another_machine():
    def us(strategy, **machine):
        return cost_model("matmul_reduce_scatter", 8192, 8192, 1024, 8, machine=machine)[strategy].us

    assert us("fused", link_bytes_per_us=100e3) > 2 * us("fused") and us("xla", link_bytes_per_us=100e3) == us("xla")
    assert us("xla", nccl_bytes_per_us=361e3) < us("xla") and us("fused", nccl_bytes_per_us=361e3) == us("fused")


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"op": "matmul"}, ValueError, r"op='matmul' is unknown; use one of \('all_gather_matmul'"),
        ({"m": 0}, ValueError, r"m=0 must be an integer from 1 to"),
        ({"n": 1.5}, ValueError, r"n=1.5 must be an integer"),
        ({"ranks": 1}, ValueError, r"ranks=1 must be an integer from 2 to 8"),
        ({"ranks": 9}, ValueError, r"ranks=9 must be"),
        ({"m": 63}, ValueError, r"ranks=2 must divide the rows of all_gather_matmul, m=63"),
        ({"dtype": "float32"}, TypeError, r"dtype=float32 has no kernel; use one of bfloat16, float16, float8_e4m3fn"),
        ({"out_dtype": "float16"}, TypeError, r"out_dtype=float16 of bfloat16 operands has no kernel; use float32"),
        ({"config": Config(tile_m=64)}, ValueError, r"config's tile_m=64, tile_n=\d+ is none of the tiles"),
        ({"config": Config(few_rows=True), "m": 256}, ValueError, r"few_rows=True is for up to 128 rows, not m=256"),
        ({"gated": True, "op": "matmul_all_reduce"}, ValueError, r"gated=True is for all_gather_matmul of 16-bit"),
        ({"gated": True, "dtype": "float8_e4m3fn"}, ValueError, r"gated=True is for all_gather_matmul of 16-bit"),
        (
            {"gated": True, "config": Config(tile_m=128, tile_n=128)},
            ValueError,
            r"tile_n=128 is none of the tiles of the sm_90 kernels for gated bfloat16 results",
        ),
        ({"config": 3}, ValueError, r"config=3 must be an entwine_jax.Config"),
        ({"machine": {"speed": 1.0}}, ValueError, r"machine has no number 'speed'; it has flops_per_us, "),
        ({"machine": {"land_us": "1"}}, ValueError, r"machine\['land_us'\]='1' must be a number"),
        ({"machine": {"link_bytes_per_us": 0}}, ValueError, r"machine: link_bytes_per_us must be from 1000 to 1e12"),
        ({"machine": {"land_us": float("nan")}}, ValueError, r"machine: land_us must be from 0 to 1e12"),
    ],
)
def test_errors(arguments, error, message):
    call = {"op": "all_gather_matmul", "m": 64, "n": 128, "k": 128, "ranks": 2} | arguments
    with pytest.raises(error, match=rf"entwine_jax\.cost_model: .*{message}"):
        cost_model(**call)
    if "op" not in arguments and "m" in arguments and arguments["m"] == 63:
        assert cost_model(**call | {"op": "matmul_all_reduce"})


def test_it_is_near_what_was_measured():
    """The geometric mean of the errors; a quarter on any row of large tiles."""
    rows = [row for row in json.loads((RESULTS / "h200x2.json").read_text())["rows"] if row["strategy"] == "fused"]
    times = [model.as_measured(row) for row in rows]
    for which, name in enumerate(("ours_ms", "xla_ms")):
        ratios = [each[which] / row[name] * 1e-3 for each, row in zip(times, rows, strict=True)]
        assert model.mean_error(ratios) < (0.06, 0.08)[which], name
        assert all(0.8 < ratio < 1.25 for ratio, row in zip(ratios, rows, strict=True) if row["m"] >= 1024), name


def test_a_call_that_it_was_not_fitted_to():
    """Two H200s took 297 us, when the formula said 202: rows come late, and the tiles of the last ones after that."""
    config = Config(tile_m=256, tile_n=256)
    fused = cost_model("all_gather_matmul", 8192, 1024, 8192, 2, config=config)["fused"]
    assert fused.us == pytest.approx(297, rel=0.1) and fused.wait_rows_us > 20


def test_documents_are_current():
    """docs/performance.md has what the script makes of the results, and these what the model predicts."""
    document = str(RESULTS.parents[1] / "docs" / "performance.md")
    model.main([str(RESULTS / "h200x2.json"), "--check", document])
    written = json.loads((RESULTS / "predicted.json").read_text())
    predicted = json.loads(json.dumps(model.predict()))
    stale = "python -m benchmarks.model benchmarks/results/h200x2.json --predict, then --update docs/performance.md"
    assert written["assumptions"] == predicted["assumptions"], stale
    for old, new in itertools.zip_longest(written["rows"], predicted["rows"]):
        assert old["plan"] == new["plan"], stale
        assert abs(old["fused_us"] - new["fused_us"]) <= 0.11 + 1e-3 * old["fused_us"], stale
        assert abs(old["xla_us"] - new["xla_us"]) <= 0.11 + 1e-3 * old["xla_us"], stale


def test_script(tmp_path, capsys):
    row = next(
        row
        for row in json.loads((RESULTS / "h200x2.json").read_text())["rows"]
        if row["op"] == "matmul_reduce_scatter" and row["strategy"] == "fused"
    )
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps({"rows": [row, row | {"strategy": "auto"}, row | {"ours_ms": 2 * row["ours_ms"]}]}))
    model.main([str(results)])
    told = capsys.readouterr().out
    assert told.startswith("Of 2 measured rows") and told.count("8192, 8192, 3584 |") == 2
    half = model.percent(model.as_measured(row)[0] * 1e-3 / (2 * row["ours_ms"]))
    assert half.startswith(("-4", "-5")) and f"| {half} |" in told
    page.write_text("<!-- model:begin -->\n<!-- model:end -->\n")
    with pytest.raises(SystemExit, match=r"stale: .*page\.md; run python -m benchmarks.model"):
        model.main([str(results), "--check", str(page)])
    model.main([str(results), "--update", str(page)])
    assert told in page.read_text()
    model.main([str(results), "--check", str(page)])


def test_predictions_table():
    """All of it is marked as predicted, and who loses says so."""
    rows = [
        {"suite": "ten", "op": OPS[0], "m": 1, "n": 2, "k": 3, "ranks": ranks, "fused_us": 100.0, "xla_us": xla_us}
        | {"xla_whole_link_us": xla_us / 2}
        for ranks, xla_us in ((2, 300.0), (4, 150.0))
    ]
    found = model.predictions({"teams": [2, 4], "assumptions": ["one", "two"], "rows": rows})
    assert found.startswith("**Predictions, not measurements.**") and "* one;\n* two.\n" in found
    assert "| all-gather + matmul | 1, 2, 3 | 0.100, **3.00**, **1.50** | 0.100, **1.50**, 0.75 (slower) |" in found
    assert "XLA / ours 3.00 to 1.50 on 2, 1.50 to 0.75 on 4 GPUs" in found


def test_disagreements():
    row = {"op": OPS[1], "m": 1, "n": 2, "k": 3, "dtype": "bfloat16", "ranks": 8, "fused_us": 5.0, "xla_us": 4.0}
    agree, differ = ({"fused": fused, "xla": 4.0} for fused in (4.5, 3.0))
    found = model.disagreements({"rows": [row | {"formula_us": agree}, row | {"formula_us": differ}]})
    simulated = "simulated 5.0 us against XLA's 4.0, by the formula 3.0 against 4.0"
    assert found == [f"matmul_reduce_scatter 1, 2, 3 bfloat16 on 8: {simulated}"]


def test_public():
    assert entwine_jax.cost_model is cost_model and entwine_jax.Cost.__doc__
