"""Where measurements are kept: files, their merging and their faults; and which of them a call gets."""

import json
import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import pytest
from helpers import mesh_of, spread
from tuning import entry

import entwine_jax
from entwine_jax import Config, _config, _core, _obstacles, _strategy, _team, _tuned

SHAPES = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
KEY = "all_gather_matmul float32(1, 16, 32) @ float32(32, 16) -> float32, 4 ranks, shared memory"


def traced(**options):
    f = spread(
        lambda op, x, w, axis: getattr(entwine_jax, op)(x, w, axis, **options), "all_gather_matmul", mesh_of((4,))
    )
    (matmul,) = entwine_jax.explain(f, *SHAPES)
    return matmul


def test_round_trip(tuned_cache, measure):
    measured = measure(lambda _, plan: 2e-3 if plan is None else 1e-3)
    f = spread(lambda op, x, w, axis: entwine_jax.all_gather_matmul(x, w, axis), "all_gather_matmul", mesh_of((4,)))
    found = entwine_jax.autotune(f, *SHAPES)
    assert found.path == tuned_cache / f"cpu-{_tuned.version()}.json" and [row.key for row in found] == [KEY]
    written = json.loads(found.path.read_text())
    assert (written["format"], written["library"], written["device"]) == (1, _tuned.version(), "cpu")
    assert written["entries"][KEY]["measured"]["jax"] == jax.__version__
    _tuned.forget()  # as another process
    assert traced().reason == f"tuned: 1 ms fused, 2 ms on XLA ({found.path})"
    plans = len(measured.plans)
    (row,) = again = entwine_jax.autotune(f, *SHAPES)
    assert row.status == f"known already ({found.path})" and row.plan == found[0].plan
    assert (row.fused_ms, row.xla_ms, row.strategy, again.path) == (found[0].fused_ms, found[0].xla_ms, "fused", None)
    assert len(measured.plans) == plans
    assert entwine_jax.autotune(f, *SHAPES, again=True)[0].status == "measured" and len(measured.plans) == 2 * plans


def test_default_directory(tuned_cache, monkeypatch):
    monkeypatch.delenv("ENTWINE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tuned_cache))
    assert _tuned.path_of("NVIDIA H200") == tuned_cache / "entwine_jax" / f"nvidia_h200-{_tuned.version()}.json"


@pytest.mark.parametrize(
    "change, why",
    [
        (lambda file: "{", "Expecting property name"),
        (lambda file: "[]", "its format is None, not 1"),
        (lambda file: json.dumps(file | {"format": 2}), "its format is 2, not 1"),
        (lambda file: json.dumps(file | {"library": "0.0.1"}), "its library is '0.0.1', not"),
        (lambda file: json.dumps(file | {"device": "NVIDIA H100"}), "its device is 'NVIDIA H100', not 'cpu'"),
        (lambda file: json.dumps(file | {"entries": {KEY: entry(tile_m=0)}}), "entries of another form"),
        (lambda file: json.dumps(file | {"entries": {KEY: entry(tile_m=True)}}), "entries of another form"),
        (lambda file: json.dumps(file | {"entries": {KEY: entry(transport="fly")}}), "entries of another form"),
        (lambda file: json.dumps(file | {"entries": {KEY: entry(more=1)}}), "entries of another form"),
        (lambda file: json.dumps(file | {"entries": {KEY: entry(fused_ms=None)}}), "entries of another form"),
        (lambda file: json.dumps(file | {"entries": {KEY: entry(xla_ms=float("inf"))}}), "entries of another form"),
        (lambda file: json.dumps(file | {"entries": {KEY: {}}}), "entries of another form"),
        (lambda file: "\x80", "can't decode|entries|Expecting"),
    ],
)
def test_files_that_are_ignored(tuned_cache, change, why):
    path = _tuned.store("cpu", {KEY: entry()})
    assert traced().strategy == "fused"
    path.write_text(change(json.loads(path.read_text())), encoding="latin-1")
    _tuned.forget()
    with pytest.warns(UserWarning, match=f"ignoring {path}.*({why}).*delete it, or set ENTWINE_CACHE_DIR"):
        assert traced().reason.startswith("on CPU devices auto means xla")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        assert traced().strategy == "xla"
        # What is measured next takes its place.
        assert _tuned.store("cpu", {KEY: entry()}) == path
    _tuned.forget()
    assert traced().strategy == "fused"


def test_several_writers(tuned_cache):
    """Nothing that either writes is lost."""
    program = (
        "import json, sys; from entwine_jax import _tuned; name, entry = sys.argv[1], json.loads(sys.argv[2])\n"
        "for i in range(25): _tuned.store('cpu', {f'{name} {i}': entry})"
    )
    writers = [
        subprocess.Popen([sys.executable, "-c", program, name, json.dumps(entry())], env=os.environ) for name in "ab"
    ]
    assert [writer.wait(120) for writer in writers] == [0, 0]
    written = json.loads(_tuned.path_of("cpu").read_text())["entries"]
    assert written.keys() == {f"{name} {i}" for name in "ab" for i in range(25)}
    assert {path.suffix for path in tuned_cache.iterdir()} == {".json", ".lock"}


def test_a_directory_that_cannot_be_written(tuned_cache):
    tuned_cache.write_text("a file")
    with pytest.warns(UserWarning, match=f"can't write {tuned_cache}.*for this process only; set ENTWINE_CACHE_DIR"):
        assert _tuned.store("cpu", {KEY: entry()}) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # one warning is enough
        assert _tuned.store("cpu", {KEY: entry()}) is None
    assert traced().reason.endswith("(this process)")


def test_tables_in_order(tuned_cache, tmp_path, monkeypatch):
    """This process, the user's file, what is shipped."""
    monkeypatch.setattr(_tuned, "_SHIPPED", tmp_path / "shipped")
    (tmp_path / "shipped").mkdir()
    shipped = {"format": 1, "library": _tuned.version(), "device": "cpu", "entries": {KEY: entry(raster=1)}}
    (tmp_path / "shipped" / "cpu.json").write_text(json.dumps(shipped))
    assert traced().plan.raster == 1 and traced().reason.endswith("shipped/cpu.json)")
    _tuned.store("cpu", {KEY: entry(raster=2)})
    _tuned.forget()
    assert traced().plan.raster == 2
    _tuned.remember("cpu", {KEY: entry(raster=3)})
    assert traced().plan.raster == 3
    # In several processes files may differ, unless somebody vouches for them.
    _tuned.forget()
    monkeypatch.setattr(_strategy.jax, "process_count", lambda: 2)
    monkeypatch.setattr(_obstacles, "_cpu_obstacle", lambda *_: None)
    assert traced().plan.raster == 1
    assert traced(config=Config(tuned=True)).plan.raster == 2


def test_what_cannot_run_is_ignored(tuned_cache):
    for wrong in ({"target": "sm90"}, {"few_rows": True}):
        _tuned.store("cpu", {KEY: entry(**wrong)})
        assert traced().reason.startswith("on CPU devices auto means xla")
        assert traced(strategy="fused").reason == "asked for"
    # An obstacle is one whatever was measured.
    f = spread(lambda op, x, w, axis: entwine_jax.all_gather_matmul(x, w, axis), "all_gather_matmul", mesh_of((4,)))
    _tuned.store("cpu", {KEY.replace("float32", "int32"): entry()})
    (matmul,) = entwine_jax.explain(f, *(jax.ShapeDtypeStruct(s.shape, jnp.int32) for s in SHAPES))
    assert matmul.strategy == "xla" and "the host executor takes" in matmul.reason


H200 = {"target": "sm90", "tile_m": 256, "tile_n": 128, "raster": 8, "lead": 58, "pushers": 25, "copiers": 48}


def choose(monkeypatch, gathers=False, strategy="auto", m=2048, **options):
    """On GPUs that aren't here."""
    monkeypatch.setattr(_core, "cuda_built", lambda: True)
    for name in ("peer_obstacle", "hopper_obstacle"):
        monkeypatch.setattr(_obstacles, name, lambda: None)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,))
    monkeypatch.setattr(_tuned, "device_kind", lambda platform: "NVIDIA H200")
    team = _team.Team(("t",), 2, (0, 1), (), (), "cuda")
    settings = _config.resolve("all_gather_matmul", strategy, Config(**options) if options else None)
    request = _strategy.Request("all_gather_matmul", team, False, jnp.dtype("bfloat16"), None, settings, gathers)
    x, w = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, m, 4096), (4096, 4096)))
    return _strategy.choose(request, x, w), _strategy.key(request, x, w)


def test_on_gpus(tuned_cache, tmp_path, monkeypatch):
    shipped, key = choose(monkeypatch)
    table = json.loads((_tuned._SHIPPED / "nvidia_h200.json").read_text())["entries"]
    assert shipped.strategy == shipped.plan.strategy == table[key]["strategy"]
    assert shipped.reason.endswith("nvidia_h200.json)")
    assert choose(monkeypatch, strategy="signal")[0].plan.engines
    monkeypatch.setattr(_tuned, "_SHIPPED", tmp_path / "nothing")
    choice, key = choose(monkeypatch)
    assert choice.reason.startswith("predicted") and choice.asked == key
    assert key == "all_gather_matmul bfloat16(1, 2048, 4096) @ bfloat16(4096, 4096) -> bfloat16, 2 ranks, peer access"
    path = _tuned.store("NVIDIA H200", {key: entry(**H200)})
    assert path.name.startswith("nvidia_h200-")
    choice, _ = choose(monkeypatch)
    assert choice.reason == "tuned: 0.213 ms fused, 0.301 ms on XLA (this process)"
    assert (choice.plan.tile_n, choice.plan.pushers) == (128, 25)
    assert choose(monkeypatch, strategy="fused")[0].plan == choice.plan
    # Another call: it copies what it gathers. Another plan: config's.
    gathering, other_key = choose(monkeypatch, gathers=True)
    assert other_key == f"{key}, gathers" and gathering.reason.startswith("predicted")
    assert choose(monkeypatch, raster=4)[0].plan.tile_n == 256
    _tuned.store("NVIDIA H200", {key: entry("xla", 0.4, 0.3, **H200)})
    assert choose(monkeypatch)[0].strategy == "xla"
    # A tile that the kernels don't have any more, rows that are too many.
    for wrong in ({"tile_m": 192}, {"few_rows": True}, {"target": "host"}):
        _tuned.store("NVIDIA H200", {key: entry(**(H200 | wrong))})
        assert choose(monkeypatch)[0].reason.startswith("predicted")
    few, few_key = choose(monkeypatch, m=32)
    _tuned.store("NVIDIA H200", {few_key: entry(**(H200 | {"few_rows": not few.plan.few_rows}))})
    assert choose(monkeypatch, m=32)[0].plan.few_rows != few.plan.few_rows


def test_shipped_tables():
    """They are files as autotune writes them, of plans that the kernels can run."""
    tables = sorted(_tuned._SHIPPED.glob("*.json"))
    assert [path.name for path in tables] == ["nvidia_h200.json"]
    for path in tables:
        kind = json.loads(path.read_text())["device"]
        assert path.stem == _tuned._slug(kind)
        for key, each in _tuned._parse(path.read_text(), kind).items():
            assert each["plan"]["target"] == "sm90" and "peer access" in key and each["measured"]["devices"] > 1
            assert (each["plan"]["tile_m"], each["plan"]["tile_n"]) in _core.sm90_tiles(out_bytes=2)
