"""`entwine tune`."""

import json
import sys

import jax
import pytest

from entwine_jax import _command, _tuned

MODULE = """
import jax, numpy as np, jax.numpy as jnp, entwine_jax
from jax.sharding import Mesh, PartitionSpec as P

mesh = Mesh(np.array(jax.devices("cpu")[:2]), ("t",))
rank = lambda x, w: entwine_jax.all_gather_matmul(x, w, "t")
f = jax.shard_map(rank, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t"))
shapes = jax.ShapeDtypeStruct((16, 8), jnp.float32), jax.ShapeDtypeStruct((8, 16), jnp.float32)
number = 3


def args():
    return shapes


def nothing():
    return jnp.ones(3)
"""
OP = ["tune", "matmul_reduce_scatter", "64", "24", "16", "--ranks", "2", "--dtype", "float32"]


@pytest.fixture(autouse=True)
def module(tmp_path, monkeypatch):
    (tmp_path / "tuned_here.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    sys.modules.pop("tuned_here", None)


def test_an_op(measure, capsys):
    measure(lambda _, plan: 2e-3 if plan is None else 1e-3)
    assert _command.main(OP) == 0
    told = capsys.readouterr()
    key = "matmul_reduce_scatter float32(1, 64, 16) @ float32(16, 24) -> float32, 2 ranks, shared memory"
    assert key in told.out and "kept in" in told.out and f"[1/1] {key}: measured" in told.err
    assert _command.main([*OP, "--json"]) == 0  # known by now
    (row,) = json.loads(capsys.readouterr().out)["products"]
    assert (row["key"], row["strategy"], row["plan"]["target"]) == (key, "fused", "host")
    assert row["status"].startswith("known already")
    assert _command.main([*OP, "--json", "--again"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["path"] == str(_tuned.path_of("cpu")) and found["products"][0]["gain"] == pytest.approx(2)


def test_what_would_be_measured(tuned_cache, capsys):
    for arguments, words in (
        (["matmul_all_reduce", "63", "24", "16", "--dtype", "float8_e4m3fn"], "float8_e4m3fn(1, 63, 16)"),
        (["all_gather_matmul", "64", "24", "16", "--transpose-w", "--gathers"], "bfloat16(24, 16).T"),
        (["matmul_all_reduce", "64", "24", "16", "--transpose-x"], "bfloat16(1, 16, 64).T @"),
        (["all_gather_matmul", "64", "24", "16", "--result", "float32"], "-> float32, 2 ranks"),
        (["tuned_here:f", "--args", "tuned_here:shapes"], "float32(1, 8, 8)"),
        (["tuned_here:f", "--args", "tuned_here:args"], "float32(1, 8, 8)"),
    ):
        ranks = ["--ranks", "2"] if ":" not in arguments[0] else []
        assert _command.main(["tune", *arguments, *ranks, "--dry-run"]) == 0
        told = capsys.readouterr().out
        assert words in told and "would be measured" in told
    assert not tuned_cache.exists()


def test_nothing_to_measure(tuned_cache, capsys):
    assert _command.main(["tune", "tuned_here:nothing"]) == 1
    assert "no collective matmul" in capsys.readouterr().out
    assert _command.main([*OP[:-1], "int8"]) == 1
    assert "the host executor takes" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["matmul_reduce_scatter", "64", "24"], "needs three sizes of one rank's matmul"),
        (["matmul_reduce_scatter", "63", "24", "16", "--ranks", "2"], "2 ranks can't share 63 rows evenly; use 64"),
        (["matmul_reduce_scatter", "64", "24", "16", "--ranks", "99"], "not 99; without GPUs"),
        (["matmul_reduce_scatter", "64", "24", "16", "--gathers"], "--gathers is for all_gather_matmul"),
        (["all_gather_matmul", "64", "24", "16", "--transpose-x"], "--transpose-x is for matmul_reduce_scatter"),
        (["matmul_reduce_scatter", "64", "24", "16", "--dtype", "float7"], "there is no dtype 'float7'"),
        (["matmul_reduce_scatter", "64", "24", "16", "--seconds", "0"], "--seconds 0: must be more than 0"),
        (["tuned_here:f", "1"], "only ops take sizes"),
        (["tuned_here:number"], "is no function but int"),
        (["tuned_here:g"], "tuned_here has no 'g'"),
        (["elsewhere:g"], "there is no module 'elsewhere'"),
        (["gather"], "must be module:name, or one of all_gather_matmul"),
    ],
)
def test_asked_in_a_wrong_way(arguments, words, capsys):
    assert _command.main(["tune", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_a_team_needs_two(capsys, monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert _command.main(["tune", "all_gather_matmul", "64", "24", "16"]) == 2
    assert "JAX_NUM_CPU_DEVICES=8" in capsys.readouterr().err
