"""The benchmark and its report from end to end, on tiny shapes."""

import dataclasses
import json
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

# Behind everything else: the package under test is the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks import (
    chains,
    collective_matmul,
    epilogues,
    link,
    mlp_fwd_bwd,
    plots,
    report,
    several_weights,
    shapes,
    strategy_picture,
    timeline,
    tuned_table,
)
from benchmarks.shapes import Shape
from entwine_jax import Config, _tuned

# As the first version of the benchmark wrote it: reports must go on reading these.
OLD_ROW = {
    "suite": "ten",
    "op": "all_gather_matmul",
    "m": 8192,
    "n": 4096,
    "k": 7168,
    "ranks": 2,
    "dtype": "bfloat16",
    "strategy": "fused",
    "ours_ms": 0.5,
    "xla_ms": 1.0,
    "gemm_ms": 0.4,
    "link_ms": 0.152,
    "peers": {"pallas": 0.75},
    "spread": {"ours": 0.01, "xla": 0.02, "gemm": 0.005},
}
ROW = OLD_ROW | {
    "chosen": "fused",
    "reason": "asked for",
    "plan": {"lead": 58},
    "link_source": "copy engine",
    "bound_ms": 0.4,
    "bound_over_ours": 0.79,
    "ours_over_gemm": 1.26,
    "ours_over_xla": 0.48,
    "error": 2e-3,
    "peer_details": {"pallas": {"ms": 0.75, "spread": 0.01, "gemm_ms": 0.41, "over_gemm": 1.83}},
}


def results_of(*rows):
    machine = {"accelerator": "NVIDIA H200", "platform": "gpu", "devices": 2}
    return {"machine": machine, "versions": {"jax": "0.11.2"}, "notes": [], "rows": list(rows)}


OLD = results_of(OLD_ROW, OLD_ROW | {"m": 2048, "ours_ms": 2.0, "peers": {}})


def test_strategies_side_by_side(tmp_path, capsys):
    """All strategies of a shape in one line, from one run, and in no other table."""
    out = tmp_path / "tiny.json"
    arguments = ["--out", str(out), "--tiny", "--platform", "cpu", "--suite", "strategies"]
    collective_matmul.main(arguments)
    rows = json.loads(out.read_text())["rows"]
    named = (("fused", "fused"), ("resident", "resident"), ("signal", "signal"), ("auto", "xla"))
    assert [(row["suite"], row["strategy"], row["chosen"]) for row in rows] == [
        ("strategies", *both) for _ in shapes.TINY for both in named
    ]
    assert all((row["strategy"] == "auto") == (row.get("over_best", 0) > 0) for row in rows)
    found = report.blocks(json.loads(out.read_text()))
    assert found.keys() == {"strategies"} and found["strategies"].count("| 96, 40, 24 |") == 3
    row = ROW | {"suite": "strategies"}
    results = results_of(ROW, row, row | {"strategy": "signal", "ours_ms": 0.45, "ours_over_xla": 0.4})
    table = report.blocks(results)["strategies"]
    assert "| 0.500 | **0.450** | 1.000 | 0.400 | 0.152 | **2.08** | **2.50** |" in table
    assert "fused 2.08x, signal 2.50x" in table and "*auto*" not in table
    auto = row | {"strategy": "auto", "best": "fused", "over_best": 1.015}
    table = report.blocks(results_of(row, auto))["strategies"]
    assert "*auto* over the fastest of the others in the same rounds: 1.015 in the mean, 1.015 at" in table
    assert "| **0.500** | 0.500 |" in table
    assert report.blocks(results)["benchmark"] == report.blocks(results_of(ROW))["benchmark"]
    assert "signal" not in report.blocks(results)["benchmark-losing"]


def test_tiny_run(tmp_path, capfd):
    """With every peer: one works on any machine, the others are missing here, which is a note and no error."""
    out = tmp_path / "new" / "tiny.json"
    named = ",".join(collective_matmul.PEERS)
    arguments = ["--out", str(out), "--tiny", "--platform", "cpu", "--strategy", "fused,auto", "--peers", named]
    collective_matmul.main(arguments)
    results = json.loads(out.read_text())
    assert set(results) == {"machine", "versions", "notes", "rows"}
    assert [(row["op"], row["strategy"], row["chosen"]) for row in results["rows"]] == [
        (shape.op, *both) for shape in shapes.TINY for both in (("fused", "fused"), ("auto", "xla"))
    ]
    for row in results["rows"]:
        assert set(row) == set(ROW)
        assert all(row[f"{name}_ms"] > 0 for name in ("ours", "xla", "gemm", "link", "bound"))
        assert set(row["spread"]) == {"ours", "xla", "gemm"}
        assert row["link_source"] == "model"
        assert set(row["peers"]) == {"xla_windowed"}
        assert row["peer_details"]["xla_windowed"]["over_gemm"] > 0
    notes = "\n".join(results["notes"])
    assert "no copy engine on platform cpu" in notes
    assert "pallas: " in notes  # no whole tiles, or a JAX without this kernel
    assert "torch: ended with status 1" in notes
    assert "geomean" in capfd.readouterr().err
    assert "GEMM alone" in report.report(results) and "### Under" in report.suites(results)


def test_tiny_float8(tmp_path, capfd):
    """Ours in bfloat16 beside it, and a column for it in the report."""
    out = tmp_path / "tiny.json"
    collective_matmul.main(["--out", str(out), "--tiny", "--platform", "cpu", "--suite", "fp8", "--peers", "xla"])
    results = json.loads(out.read_text())
    assert [row["op"] for row in results["rows"]] == [shape.op for shape in shapes.TINY_FLOAT8]
    for row in results["rows"]:
        assert set(row) == {*ROW, "bf16_ms", "ours_over_bf16"}
        assert row["dtype"] == "float8_e4m3fn" and row["chosen"] == "fused" and row["bf16_ms"] > 0
    assert "bf16/ours" in capfd.readouterr().err
    text = report.report(results)
    assert "float8_e4m3fn, milliseconds" in text and "| ours in bfloat16 |" in text and "| bfloat16 / float8 |" in text


def test_epilogues(tmp_path):
    """With and without, ours and XLA's, in one run; a run of that suite alone has no other rows, and is reported."""
    out = tmp_path / "epilogues.json"
    collective_matmul.main(["--out", str(out), "--tiny", "--platform", "cpu", "--suite", "epilogues", "--rounds", "2"])
    results = json.loads(out.read_text())
    assert not results["rows"] and [row["op"] for row in results["epilogues"]] == [each.op for each in shapes.TINY]
    for row in results["epilogues"]:
        assert set(row["epilogues"]) == set(epilogues.EPILOGUES)
        for each in row["epilogues"].values():
            assert each["ours_ms"] > 0 and each["xla_ms"] > 0 and each["error"] < 8e-3
        assert row["epilogues"]["none"]["ours_over_none"] == row["epilogues"]["none"]["xla_over_none"] == 1
    (block,) = report.blocks(results).values()
    assert block.count("\n") == 2 + len(shapes.TINY) * len(epilogues.EPILOGUES) and "| bias, gelu |" in block
    assert set(report.blocks(results | {"rows": [ROW]})) == {
        "epilogues",
        "benchmark",
        "benchmark-suites",
        "benchmark-losing",
    }


def test_rows_that_do_not_divide_are_noted(tmp_path, monkeypatch):
    odd = shapes.Shape(shapes.ALL_GATHER, 90, 40, 24)
    monkeypatch.setattr(collective_matmul, "TINY", (odd, shapes.TINY[1]))
    out = tmp_path / "odd.json"
    collective_matmul.main(["--out", str(out), "--tiny", "--platform", "cpu"])
    results = json.loads(out.read_text())
    assert len(results["rows"]) == 1
    assert any(str(odd) in note and "no multiple of 8" in note for note in results["notes"])


def test_wrong_results_are_not_timed(tmp_path, monkeypatch):
    right = collective_matmul.op_call
    monkeypatch.setattr(
        collective_matmul,
        "op_call",
        lambda shape, strategy: lambda x, w: right(shape, strategy)(x, w) * (1.05 if strategy == "fused" else 1.0),
    )
    with pytest.raises(SystemExit, match="before timing"):
        collective_matmul.main(["--out", str(tmp_path / "wrong.json"), "--tiny", "--platform", "cpu"])


def test_no_copy_engine():
    with pytest.raises(link.LinkError):
        link.CopyEngine([0, 1], 1024, 2)


def test_suites():
    assert [len(suite) for suite in shapes.SUITES["all"].values()] == [10, 24, 16, 5, 7]
    assert shapes.SUITES["all_reduce"] == {"all_reduce": shapes.ALL_REDUCE}
    every = [shape for suite in shapes.SUITES["all"].values() for shape in suite]
    assert len(set(every)) == len(every)
    assert {shape.m for shape in shapes.TP8} == {1024, 2048, 4096, 8192, 16384}
    assert {shape.m for shape in shapes.SMALL} == {16, 32, 64, 128, 256, 512}
    for suite in (shapes.TP8, shapes.SMALL):
        assert statistics.mean(shape.op == shapes.ALL_GATHER for shape in suite) == 0.5
    # What the kernels ask of row lengths.
    assert all(size % 8 == 0 for shape in every for size in (shape.n, shape.k))


def test_layouts():
    for shape in shapes.TINY:
        layout, gemm = chains.collective_layout(shape, 4), chains.gemm_layout(shape, 4)
        assert (layout.x_shape[1], layout.w_shape) == (layout.w_shape[0], gemm.w_shape)
        assert (layout.x_shape[0], layout.w_shape[1]) == layout.y_shape


def test_ten_shapes():
    by_time = [shape.link_ms(2) for shape in shapes.TEN]
    # An all-reduce of the same product moves every byte of a reduce-scatter twice.
    assert [shape.link_ms(2) for shape in shapes.ALL_REDUCE] == pytest.approx([2 * ms for ms in by_time[:5]])
    # The design's own numbers for two GPUs.
    wanted = [0.174, 0.087, 0.523, 0.174, 0.044, 0.152, 0.044, 0.523, 0.044, 0.038]
    assert by_time == pytest.approx(wanted, abs=6e-4)


def test_float8_shapes():
    for shape in (*shapes.FLOAT8, *shapes.DECODE_FLOAT8):
        assert shape.n % 8 == shape.k % 16 == 0
        wide = dataclasses.replace(shape, float8=False)
        # Rows of x have half the bytes, partial sums as many.
        share = 0.5 if shape.op == shapes.ALL_GATHER else 1
        assert shape.link_bytes(2) == share * wide.link_bytes(2)
        layout, same = chains.collective_layout(shape, 2), chains.collective_layout(wide, 2)
        assert (layout.w_shape, layout.w_spec) == (same.w_shape[::-1], PartitionSpec(*same.w_spec[::-1]))
        assert (layout.x_shape, layout.y_spec) == (same.x_shape, same.y_spec)


def test_report_of_an_old_file():
    text = report.report(OLD)
    assert "| 8192, 4096, 7168 | 0.500 | 1.000 | 0.750 | 0.400 | 0.152\\* | **2.00** | **1.50** | 1.25 | 0.80 |" in text
    assert (
        "| 2048, 4096, 7168 | 2.000 | 1.000 |  | 0.400 | 0.152\\* | 0.50 (slower) | 0.50 (slower) | 5.00 | 0.20 |"
        in text
    )
    assert "faster than XLA on 1 of 2 shapes" in text
    assert report.suites(OLD) == "Only the ten shapes were measured.\n"
    assert "2048, 4096, 7168: XLA takes 0.500 of our time" in report.losing(OLD)


def test_report():
    """Ratios are the paired ones, and a row in which anybody is faster is named with what the numbers say about it."""
    lost = {"m": 64, "suite": "small", "ours_ms": 0.8, "ours_over_xla": 0.8, "ours_over_gemm": 2.0, "link_ms": 0.5}
    auto = {"strategy": "auto", "chosen": "xla", "plan": None, "ours_over_xla": 1.005, "peers": {}, "peer_details": {}}
    results = results_of(ROW, ROW | lost, ROW | auto)
    assert "| 0.152 | **2.08** | **1.50** | 1.26 | 0.79 |" in report.report(results)
    assert "Modelled" not in report.report(results)
    suites = report.suites(results)
    assert "### Few rows" in suites and "### Under" in suites
    assert "| all-gather + matmul | 8192, 4096, 7168 | xla | 0.500 | 1.000 | 1.00 |" in suites
    losing = report.losing(results)
    assert losing.startswith("Of 3 rows, against XLA, Pallas:\n")
    assert "64, 4096, 7168: Pallas takes 0.938 of our time (0.915 with each divided by the GEMM of its own" in losing
    assert "the link alone needs 1.25 of the GEMM's time" in losing and "few rows" in losing
    assert "(took xla): XLA takes 0.995 of our time; the same program twice, so this is noise." in losing
    assert report.losing(results_of(ROW)) == "Of 1 rows, against XLA, Pallas: none.\n"


def test_update_and_check(tmp_path, capsys):
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps(OLD))
    losing = report.markers("benchmark-losing")
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n{losing[0]}\n{losing[1]}\n")
    with pytest.raises(SystemExit, match=r"stale: .*page\.md"):
        report.main([str(results), "--check", str(page)])
    report.main([str(results), "--update", str(page)])
    report.main([str(results), "--check", str(page)])
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and f"{report.END}\nafter\n{losing[0]}\nOf 2 rows" in text
    assert "old" not in text
    report.main([str(results)])
    printed = capsys.readouterr().out
    assert all(block in printed for block in report.blocks(OLD).values())
    for wrong, message in (
        ("no markers\n", "needs one <!-- benchmark:begin -->"),
        (f"{losing[1]}{losing[0]}", "needs one <!-- benchmark-losing:begin -->"),
    ):
        page.write_text(wrong)
        with pytest.raises(SystemExit, match=message):
            report.main([str(results), "--update", str(page)])


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    lost = ROW | {"m": 64, "ours_ms": 0.9, "peers": {}, "peer_details": {}}
    for number, results in enumerate((results_of(ROW, lost), OLD)):
        paths = plots.write(results, tmp_path / str(number))
        assert [path.name for path in paths] == [plots.BOUND, plots.BEST]
        assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_plots_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=r"entwine-jax\[bench\]"):
        plots.write(OLD, tmp_path)


def test_the_documents_have_their_blocks():
    root = pathlib.Path(__file__).parents[1]
    for name, block in (
        ("README.md", "benchmark"),
        ("docs/performance.md", "benchmark"),
        ("docs/performance.md", "benchmark-suites"),
        ("docs/performance.md", "benchmark-losing"),
    ):
        text = (root / name).read_text()
        assert all(text.count(marker) == 1 for marker in report.markers(block))


def test_documents_are_current():
    """README and docs hold what the report makes of the committed results."""
    root = pathlib.Path(__file__).parents[1]
    results = root / "benchmarks" / "results"
    files = [str(root / "README.md"), str(root / "docs" / "performance.md")]
    report.main([str(results / "h200x2.json"), "--check", *files])


def test_mlp_fwd_bwd(tmp_path, capsys):
    """Each of ours is XLA's result, and what is written is what is printed."""
    out = tmp_path / "mlp.json"
    mlp_fwd_bwd.main(["--out", str(out), "--tiny", "--platform", "cpu"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["forward", "forward_backward"]
    for row in rows:
        assert row["ms"].keys() == row["spread"].keys() == {*mlp_fwd_bwd.VARIANTS}
        assert all(0 < error < mlp_fwd_bwd.TOLERANCE for error in row["error"].values())
    printed = capsys.readouterr().out
    assert f"| {rows[1]['tokens']} | forward and backward | {rows[1]['ms']['ours']:.3f} |" in printed


def test_several_weights(tmp_path, capsys):
    out = tmp_path / "several.json"
    several_weights.main(["--out", str(out), "--tiny", "--platform", "cpu"])
    rows = json.loads(out.read_text())["rows"]
    assert [row["kind"] for row in rows] == ["forward", "forward_backward"]
    for row in rows:
        assert row["ms"].keys() == {*several_weights.VARIANTS}
        assert all(error < mlp_fwd_bwd.TOLERANCE for error in row["error"].values())
    assert f"| q, k, v | 64, 32 | 16, 8, 8 | forward | {rows[0]['ms']['together']:.3f} |" in capsys.readouterr().out


def test_mlp_fwd_bwd_checks_results():
    x = jnp.ones((4, 4))
    with pytest.raises(SystemExit, match=r"ours: a result is 1\.00e\+00 from XLA's"):
        mlp_fwd_bwd.check("ours", [x, 2 * x], [x, x])


def test_timeline(tmp_path):
    """From notes to JSON to pictures, of calls on CPU devices."""
    if jax.default_backend() != "cpu":
        pytest.skip("of the host executor")
    mesh = jax.make_mesh((2,), (chains.AXIS,), devices=jax.devices()[:2])
    shape = Shape("matmul_reduce_scatter", 64, 32, 16)
    tiles = Config(tile_m=16, tile_n=16)
    described = timeline.described(timeline.traced(shape, "signal", tiles, mesh))
    assert described["rank"] == 0 and described["link_gb_per_s"] and len(described["spans"]) > 4
    drawn = timeline.drawing(described)
    assert len(drawn.spans) == len(described["spans"]) and set(drawn.spans["owner"]) == {0, 1}

    calls = {"one": described, "another": described}
    sizes = {"op": shape.op, "m": shape.m, "n": shape.n, "k": shape.k}
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps({"machine": "2 x test", "pictures": {"name": {"shape": sizes, "calls": calls}}}))
    pytest.importorskip("matplotlib")
    assert timeline.main([str(path), "--plots", str(tmp_path)]) == 0
    assert (tmp_path / "name.png").stat().st_size > 1000


def test_table_that_ships():
    """It is what the committed rounds make, and its keys are those that a trace asks for."""
    path = pathlib.Path(__file__).parents[1] / "benchmarks" / "results" / "h200x2_strategies.json"
    tuned_table.main([str(path), "--check"])
    rows = [row for row in json.loads(path.read_text())["rows"] if row["strategy"] != "auto"]
    table = json.loads(tuned_table.table(json.loads(path.read_text())))["entries"]
    assert len(table) == len(rows) / 3
    assert "all_gather_matmul bfloat16(1, 2048, 4096) @ bfloat16(4096, 4096) -> bfloat16, 2 ranks, peer access" in table
    assert all(map(_tuned._is_entry, table.values()))

    def entry(**ms):
        rows = [{"strategy": name, "ours_ms": each, "xla_ms": 2.0, "plan": {}} for name, each in ms.items()]
        return tuned_table.entry(rows, {})["strategy"]

    assert entry(fused=1.0, resident=0.99, signal=1.1) == "fused" and entry(fused=1.0, resident=0.97) == "resident"
    assert entry(fused=3.0, resident=2.5, signal=2.1) == "xla"


def test_picture_of_strategies(tmp_path):
    pytest.importorskip("matplotlib")
    strategy_picture.main([str(tmp_path / "picture.png")])
    assert (tmp_path / "picture.png").stat().st_size > 1000
