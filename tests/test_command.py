"""The command line: `entwine explain`, `predict`, `trace` and `bench`, in this process and in one of its own."""

import json
import os
import pathlib
import subprocess
import sys
import textwrap
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from entwine_jax import _trace
from entwine_jax._command import _function, main
from entwine_jax._command import _trace as trace_command
from entwine_jax._command._usage import UsageError

ROOT = pathlib.Path(__file__).parents[1]
MODEL = """
    import jax, jax.numpy as jnp
    import entwine_jax
    from jax.sharding import PartitionSpec as P

    def mlp(x, w_up, w_down, strategy="fused"):
        h = entwine_jax.collective_matmul(x, w_up, strategy=strategy)
        return entwine_jax.collective_matmul(jnp.tanh(h), w_down, out_sharding=P("tp", None), strategy=strategy)

    def on_xla(*args):
        return mlp(*args, strategy="xla")

    class nested:
        sine = staticmethod(jnp.sin)
        number = 3

    def manual(x, w):
        mesh = jax.make_mesh((2,), ("t",), (jax.sharding.AxisType.Auto,))
        op = lambda x, w: entwine_jax.matmul_all_reduce(x, w, "t", strategy="fused")
        return jax.shard_map(op, mesh=mesh, in_specs=(P(None, "t"), P("t")), out_specs=P())(x, w)

    def example_args():
        return jax.ShapeDtypeStruct((16, 8), jnp.float32), jnp.ones((8, 8))

    one_arg = jnp.ones(3)
"""
ARGS = ["--arg", "f32[16,8]@(tp,None)", "--arg", "f32[8,16]@(None,tp)", "--arg", "f32[16,8]@(tp,None)"]


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    """A module `layers_of_mine` in the working directory, and nowhere else."""
    (tmp_path / "layers_of_mine.py").write_text(textwrap.dedent(MODEL))
    (tmp_path / "broken_module.py").write_text("import there_is_no_such_thing\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in ("layers_of_mine", "broken_module"):
        sys.modules.pop(name, None)


def explained(capsys, *arguments, status=0):
    assert main(["explain", *arguments, "--json"]) == status
    return json.loads(capsys.readouterr().out)["matmuls"]


@pytest.mark.parametrize("auto", [[], ["--auto"]], ids=["explicit", "auto"])
def test_explain(capsys, auto):
    found = explained(capsys, "layers_of_mine:mlp", "--mesh", "tp=4", *auto, *ARGS)
    assert [(each["op"], each["team_size"], each["strategy"]) for each in found] == [
        ("all_gather_matmul", 4, "fused"),
        ("matmul_reduce_scatter", 4, "fused"),
    ]
    assert found[0]["x"] == [1, 4, 8] and found[0]["dtype"] == "float32" and found[0]["plan"]["target"] == "host"
    assert jax.sharding.get_mesh().empty
    assert main(["explain", "layers_of_mine:mlp", "--mesh", "tp=4", *auto, *ARGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0].startswith("op ") and lines[1].split()[:2] == ["all_gather_matmul", "float32[4,8]"] and len(lines) == 3
    )


def test_explain_a_gradient(capsys):
    found = explained(capsys, "layers_of_mine:mlp", "--mesh", "data=2,tp=4", "--grad", *ARGS)
    assert len(found) == 4 and [each["transpose_w"] for each in found] == [False, False, True, True]


def test_explain_requires(capsys):
    """For a check of a model in CI."""
    call = ("--mesh", "tp=2", *ARGS)
    explained(capsys, "layers_of_mine:mlp", *call, "--require", "fused", status=0)
    explained(capsys, "layers_of_mine:mlp", *call, "--require", "xla", status=1)
    explained(capsys, "layers_of_mine:on_xla", *call, "--require", "fused", status=1)
    explained(capsys, "layers_of_mine:on_xla", *call, "--require", "xla", status=0)
    assert explained(capsys, "layers_of_mine:nested.sine", "--arg", "f32[]", "--require", "xla", status=1) == []


def test_explain_example_args(capsys):
    """Of a function that has a mesh of its own."""
    (found,) = explained(capsys, "layers_of_mine:manual", "--args", "layers_of_mine:example_args")
    assert (found["op"], found["axis_name"], found["y"]) == ("matmul_all_reduce", ["t"], [1, 16, 8])
    assert explained(capsys, "layers_of_mine:nested.sine", "--args", "layers_of_mine:one_arg") == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["layers_of_mine"], "layers_of_mine: must be module:name"),
        (["nowhere_at_all:f"], "nowhere_at_all:f: there is no module 'nowhere_at_all' in /"),
        (["layers_of_mine:f"], "layers_of_mine:f: layers_of_mine has no 'f'"),
        (["layers_of_mine:nested.g"], "layers_of_mine:nested.g: nested has no 'g'"),
        (["layers_of_mine:nested.number"], "layers_of_mine:nested.number is no function but int"),
        (["layers_of_mine:mlp", "--arg", "f32[2]", "--args", "a:b"], "by --arg or by --args, not both"),
        (["layers_of_mine:mlp", "--arg", "f32"], "--arg f32: must be like 'bf16[8192,4096]'"),
        (["layers_of_mine:mlp", "--arg", "f33[2]"], "--arg f33[2]: there is no dtype 'f33'"),
        (
            ["layers_of_mine:mlp", "--arg", "f32[2]@(tp)"],
            "is sharded over no mesh; give --mesh, or have the module call",
        ),
        (["layers_of_mine:mlp", "--mesh", "tp=2", "--arg", "f32[2]@(xy)"], "--arg f32[2]@(xy): "),
        (["layers_of_mine:mlp", "--mesh", "tp=2", "--arg", "f32[3]@tp"], "--arg f32[3]@tp: "),
        (["layers_of_mine:mlp", "--mesh", "tp=2", "--arg", "f32[2]@f()"], "must be a partition spec like (tp,None)"),
        (["layers_of_mine:mlp", "--mesh", "tp=2", "--arg", "f32[2]@(tp"], "--arg f32[2]@(tp: "),
        (["layers_of_mine:mlp", "--mesh", "tp"], "--mesh tp: must be different axes with their sizes"),
        (["layers_of_mine:mlp", "--mesh", "tp=2,tp=2"], "--mesh tp=2,tp=2: must be different axes"),
        (["layers_of_mine:mlp", "--mesh", "tp=4096"], "--mesh tp=4096: needs 4096 devices, JAX has "),
    ],
)
def test_wrong_usage(capsys, arguments, message):
    assert main(["explain", *arguments]) == 2
    told = capsys.readouterr()
    assert told.out == "" and told.err.startswith("entwine explain: ") and message in told.err


def test_errors_of_the_users_own_code_are_theirs():
    with pytest.raises(ModuleNotFoundError, match="there_is_no_such_thing"):
        main(["explain", "broken_module:f"])
    with pytest.raises(TypeError, match="missing"):
        main(["explain", "layers_of_mine:mlp", "--arg", "f32[2,2]"])


@pytest.mark.parametrize(
    "text, dtype, shape",
    [
        ("bf16[8192,4096]", jnp.bfloat16, (8192, 4096)),
        (" float16 [ 2 , 3 ] ", jnp.float16, (2, 3)),
        ("f8e4m3fn[4]", jnp.float8_e4m3fn, (4,)),
        ("f8_e5m2[4]", jnp.float8_e5m2, (4,)),
        ("float8_e4m3fn[4]", jnp.float8_e4m3fn, (4,)),
        ("i32[]", jnp.int32, ()),
        ("s8[1]", jnp.int8, (1,)),
        ("u8[1]", jnp.uint8, (1,)),
        ("bool[3]", jnp.bool_, (3,)),
    ],
)
def test_types(text, dtype, shape):
    found = _function._type(text, None)
    assert found.dtype == dtype and found.shape == shape and found.sharding is None


@pytest.mark.parametrize(
    "text, spec",
    [
        ("(tp,None)", P("tp", None)),
        ("(data,(cp,tp))", P("data", ("cp", "tp"))),
        ("tp", P("tp")),
        ("(tp)", P("tp")),
        ("('tp',)", P("tp")),
        ("()", P()),
    ],
)
def test_specs(text, spec):
    assert _function._spec(text) == spec


def test_arrays_for_shapes():
    """What `entwine trace` runs a function on: where the type says, and arrays as they are."""
    mesh = jax.make_mesh((2,), ("tp",))
    kept = np.arange(3)
    types_of = [_function._type(text, mesh) for text in ("bf16[4,8]@(tp,None)", "i32[2]", "f8e4m3fn[2]")]
    x, i, f, k = _function.Call(lambda: None, (*types_of, kept), mesh).arrays()
    assert x.sharding.spec == P("tp", None) and x.dtype == jnp.bfloat16 and float(jnp.std(x.astype(jnp.float32))) > 0.3
    assert i.tolist() == [0, 0] and f.dtype == jnp.float8_e4m3fn and k is kept


def test_trace_elsewhere(capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert main(["trace", "layers_of_mine:mlp", "--out", "trace.json"]) == 1
    assert "entwine trace: entwine_jax.trace_tiles: jax.default_backend() is 'tpu'" in capsys.readouterr().err
    assert not pathlib.Path("trace.json").exists()


def test_trace(capsys, monkeypatch):
    """What is told of a call; the call itself is made up here."""
    events = np.zeros(2, _trace._EVENT)
    events["us"], events["mark"] = [1.0, 8.0], _trace.MARKS.index("pushed")
    call = _trace.TracedCall(
        op="all_gather_matmul",
        strategy="fused",
        device=0,
        rank=1,
        ranks=2,
        m_shard=256,
        n=512,
        k=64,
        tile_bytes=131072,
        parts=4,
        unit_bytes=98304,
        group_bytes=(),
        events=events,
    )
    seen = []

    def traced(fn, *args, megabytes):
        seen.append((fn(*args), megabytes))
        return _trace.Trace((call,) if megabytes > 1 else ())

    monkeypatch.setattr(trace_command, "trace_tiles", traced)
    command = ["trace", "layers_of_mine:nested.sine", "--arg", "bf16[4]", "--out", "t.json", "--megabytes"]
    assert main([*command, "64"]) == 0
    assert seen[0][0].shape == (4,) and seen[0][1] == 64
    told = capsys.readouterr().out
    assert told.splitlines()[1].split() == [
        "all_gather_matmul",
        "fused",
        "1",
        "of",
        "2",
        "256,",
        "512,",
        "64",
        "8.0",
        "0.2",
        "25",
    ]
    assert json.loads(pathlib.Path("t.json").read_text())["traceEvents"]
    assert main([*command, "64", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["calls"]
    assert found["us"] == 8.0 and found["op"] == "all_gather_matmul" and found["strategy"] == "fused"
    assert main([*command, "1"]) == 1
    assert "made no call that takes notes: entwine explain tells" in capsys.readouterr().err
    pytest.importorskip("matplotlib")
    assert main([*command, "64", "--png", "t.png"]) == 0
    assert pathlib.Path("t.png").stat().st_size > 1000


def test_predict(capsys):
    assert main(["predict", "rs", "8192", "8192", "3584", "--ranks", "2,8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = ("fused", "resident", "signal", "xla")
    assert [line.split()[:2] for line in lines[1:9]] == [[ranks, name] for ranks in ("2", "8") for name in names]
    assert "fastest" in lines[1] + lines[2] and "pull" in lines[1] and "SMs move" in lines[2]
    assert "copy engines" in lines[3]
    assert "fastest" not in lines[4]
    assert lines[-1].endswith("not a measurement.")
    command = ["predict", "matmul_reduce_scatter", "8192", "8192", "1024", "--ranks", "2", "--json"]
    assert main(command) == 0 and main([*command, "--set", "link_bytes_per_us=100e3"]) == 0
    measured, slow = capsys.readouterr().out.split("}\n{")
    measured, slow = json.loads(measured + "}"), json.loads("{" + slow)
    assert [cost["strategy"] for cost in measured["costs"]] == [*names] and measured["k"] == 1024
    assert slow["costs"][0]["us"] > 2 * measured["costs"][0]["us"] and slow["costs"][3] == measured["costs"][3]
    assert main(["predict", "ag", "64", "8192", "8192", "--ranks", "2"]) == 0
    assert "few rows" in capsys.readouterr().out


def test_predicted_trace(tmp_path, capsys):
    path = tmp_path / "trace.json"
    command = ["predict", "rs", "1024", "1024", "512", "--ranks", "2", "--strategy", "signal", "--trace", str(path)]
    assert main(command) == 0
    assert any(event["name"] == "transfer" for event in json.loads(path.read_text())["traceEvents"])
    command[6] = "2,4"
    assert main(command) == 2 and "--trace is of one size of the team" in capsys.readouterr().err
    few = ["predict", "rs", "64", "8192", "8192", "--ranks", "2", "--trace", str(path), "--strategy", "signal"]
    assert main(few) == 2 and "strategy='signal' can't run this call; use one of" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["ag", "63", "8", "8", "--ranks", "2"], "ranks=2 must divide the rows of all_gather_matmul, m=63"),
        (["ag", "64", "8", "8", "--ranks", "two"], "--ranks two: must be the size of a team, or several"),
        (["ag", "64", "8", "8", "--ranks", "2,"], "--ranks 2,: must be"),
        (["ag", "64", "8", "8", "--ranks", "9"], "ranks=9 must be an integer from 2 to 8"),
        (["ag", "64", "8", "8", "--ranks", "2", "--dtype", "float32"], "dtype=float32 has no kernel"),
        (["ag", "64", "8", "8", "--ranks", "2", "--dtype", "float"], "dtype=float64 has no kernel"),
        (["ag", "64", "8", "8", "--ranks", "2", "--dtype", "nonsense"], "nonsense"),
        (["ag", "64", "8", "8", "--ranks", "2", "--set", "link"], "--set link: must be NAME=NUMBER"),
        (["ag", "64", "8", "8", "--ranks", "2", "--set", "link=1"], "machine has no number 'link'; it has "),
    ],
)
def test_predict_wrong_usage(capsys, arguments, message):
    assert main(["predict", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("entwine predict: ") and message in told


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["explain"], ["predict", "ag"], ["trace", "a:b"]])
def test_argparse_errors(arguments):
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2


@pytest.mark.parametrize("command", ["doctor", "explain", "predict", "trace", "bench"])
def test_help_has_an_example(capsys, command):
    with pytest.raises(SystemExit) as raised:
        main([command, "--help"])
    assert raised.value.code == 0
    told = capsys.readouterr().out
    assert f"example:\n  entwine {command} " in told and "--json" in told


def test_bench_elsewhere(capsys, monkeypatch):
    """The package alone hasn't got the benchmarks."""
    monkeypatch.setattr(
        sys, "path", [path for path in sys.path if not (pathlib.Path(path or ".") / "benchmarks").exists()]
    )
    monkeypatch.setattr(sys, "meta_path", [finder for finder in sys.meta_path if isinstance(finder, type)])
    for name in [name for name in sys.modules if name.partition(".")[0] == "benchmarks"]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["bench"]) == 1
    assert "run this in the root of a checkout of entwine_jax" in capsys.readouterr().err


def test_bench(capsys, monkeypatch, tmp_path):
    """What is run, and what is printed of it; the benchmark itself has tests of its own."""
    results = {"rows": [1]}

    def measure(arguments):
        assert arguments[2:] == ["--suite", "ten,fp8", "--strategy", "fused", "--tiny"]
        pathlib.Path(arguments[1]).write_text(json.dumps(results))

    package = types.ModuleType("benchmarks")
    package.__path__ = [str(tmp_path)]
    fakes = {
        "benchmarks": package,
        "benchmarks.collective_matmul": types.SimpleNamespace(main=measure, __spec__=object()),
        "benchmarks.report": types.SimpleNamespace(blocks=lambda found: {"a": "one", "b": str(found)}),
    }
    for name, fake in fakes.items():
        monkeypatch.setitem(sys.modules, name, fake)
    command = ["bench", "--suite", "ten,fp8", "--tiny"]
    assert main([*command, "--out", str(tmp_path / "kept.json")]) == 0
    assert capsys.readouterr().out == f"one\n{results}"
    assert json.loads((tmp_path / "kept.json").read_text()) == results
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == results


def run(*arguments, cwd, **environment):
    """In a process of its own, on CPU devices that nobody has counted yet."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("JAX_NUM_CPU_DEVICES", "XLA_FLAGS")}
    command = [sys.executable, "-m", "entwine_jax", *arguments]
    env = inherited | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240, check=False)


def test_processes(tmp_path):
    """--mesh makes the devices that it needs."""
    done = run("explain", "layers_of_mine:mlp", "--mesh", "tp=6", "--json", *_sixths(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [each["team_size"] for each in json.loads(done.stdout)["matmuls"]] == [6, 6]
    done = run("explain", "layers_of_mine:mlp", "--mesh", "tp=6", *_sixths(), cwd=tmp_path, JAX_NUM_CPU_DEVICES="2")
    assert done.returncode == 2 and "needs 6 devices, JAX has 2 (cpu)" in done.stderr
    done = run(
        "explain", "layers_of_mine:manual", "--args", "layers_of_mine:example_args", "--cpu-devices", "2", cwd=tmp_path
    )
    assert done.returncode == 0 and "matmul_all_reduce" in done.stdout
    (tmp_path / "with_its_mesh.py").write_text(
        "import jax\njax.set_mesh(jax.make_mesh((4,), ('tp',)))\nfrom layers_of_mine import mlp\n"
    )
    done = run("explain", "with_its_mesh:mlp", "--cpu-devices", "4", *ARGS, "--require", "fused", cwd=tmp_path)
    assert done.returncode == 0 and "tp:4" in done.stdout, done.stderr
    done = run("trace", "with_its_mesh:mlp", "--cpu-devices", "4", *ARGS, "--out", "t.json", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    calls = json.loads(done.stdout)["calls"]
    assert len(calls) % 4 == 0 and {call["rank"] for call in calls} == {0, 1, 2, 3}
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    done = run("predict", "ag", "64", "8", "8", "--ranks", "2,4", "--json", cwd=tmp_path)
    assert done.returncode == 0 and len(json.loads(done.stdout)["costs"]) == 6


def test_bench_process():
    """A small benchmark, for real."""
    done = run("bench", "--tiny", "--platform", "cpu", "--json", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["machine"]["devices"] == 2 and {row["suite"] for row in results["rows"]} == {"tiny"}


def _sixths():
    return ["--arg", "f32[12,6]@(tp,None)", "--arg", "f32[6,12]@(None,tp)", "--arg", "f32[12,6]@(tp,None)"]


def test_usage_errors_are_value_errors():
    assert issubclass(UsageError, ValueError)
