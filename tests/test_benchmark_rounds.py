"""How the benchmark samples, and the peers that it starts."""

import collections
import dataclasses
import itertools
import json
import pathlib
import sys
import time
import types

import jax
import numpy as np
import pytest
from jax import lax

# Behind everything else: the package under test is the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks import peers, rounds, shapes
from benchmarks.peers import common, pallas, torch_symm_mem


@pytest.mark.parametrize("count", range(1, 10))
def test_orders_are_balanced(count):
    """Behind every variant comes every other equally often within a round, and all take part in each."""
    names = [str(i) for i in range(count)]
    block = count * (1 + count % 2)
    orders = [*itertools.islice(rounds.orders(names, "seed"), 3 * block)]
    assert all(sorted(order) == names for order in orders)
    behind = collections.Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(behind) == count * (count - 1) and set(behind.values()) <= {3 * (1 + count % 2)}
    assert count < 4 or orders[:block] != orders[block : 2 * block]
    assert orders == [*itertools.islice(rounds.orders(names, "seed"), 3 * block)]


def test_sample_rounds():
    """Every variant follows every other about equally often; a rotation would give each one predecessor."""
    ran = []

    def sampler(name):
        return lambda repeats: ran.append((name, repeats)) or float(repeats)

    names, many = ("ours", "xla", "gemm", "link"), 400
    samplers = {name: sampler(name) for name in names}
    samples = rounds.sample_rounds(samplers, {**dict.fromkeys(names, 3), "link": 7}, many, "seed")
    assert samples == {name: [1.0] * many for name in names}
    assert set(ran) == {("ours", 3), ("xla", 3), ("gemm", 3), ("link", 7)}
    order = [name for name, _ in ran]
    for start in range(0, len(order), len(names)):
        assert sorted(order[start : start + len(names)]) == sorted(names)
    before_ours = collections.Counter(first for first, second in itertools.pairwise(order) if second == "ours")
    assert all(before_ours[name] > many / 5 for name in ("xla", "gemm", "link"))
    first, ran[:] = list(ran), []
    rounds.sample_rounds(samplers, {**dict.fromkeys(names, 3), "link": 7}, many, "seed")
    assert ran == first


def test_ratios_are_paired():
    """Clocks that fall from round to round change times and not ratios."""
    gemm = [1.0, 2.0, 4.0, 8.0, 16.0]
    ours = [1.1, 2.2, 4.4, 9.6, 16.0]
    assert rounds.paired(ours, gemm) == pytest.approx(1.1)
    details = rounds.details({"peer": ours, "gemm": gemm}, "peer", 2)
    assert details["over_gemm"] == pytest.approx(1.1)
    assert details["ms"] == pytest.approx(2200)
    assert rounds.spread([1.0]) == 0


def test_samples_are_long_enough():
    took = []

    def sampler(repeats):
        took.append(repeats)
        return 1e-3 + repeats * 1e-4  # a latency that one alone can't hide

    repeats = rounds.repeats_for(sampler, 0.04)
    assert 300 <= repeats <= 400 and max(took) < 250
    assert rounds.repeats_for(lambda repeats: repeats * 1.0, 0.04) == 1


def job(tmp_path, seconds=20.0):
    return peers.Job(shapes.TINY, str(tmp_path / "out.json"), 8, 2, 2, 0.0, seconds, "cpu")


@pytest.mark.parametrize(
    ("code", "seconds", "message"),
    [
        ("print('some'); raise ValueError('of its own')", 20, "ended with status 1: ValueError: of its own"),
        ("import time; print('slow', flush=True); time.sleep(60)", 1, "stopped after 1 s; its last words: slow"),
        ("print('fine')", 20, ""),
    ],
)
def test_a_failing_peer_is_a_message(code, seconds, message):
    assert peers._supervise("peer", [sys.executable, "-c", code], seconds) == message


def test_peer_results(tmp_path):
    results = peers.Results(job(tmp_path), {"torch": "2"})
    results.add(shapes.TINY[0], {"torch_symm_mem": {"ms": 2.0, "over_gemm": 1.5}})
    results.note("said")
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["notes"] == ["said"]
    rows = [vars(shape) | {"peers": {}, "peer_details": {}} for shape in (*shapes.TINY, shapes.TINY[0])]
    peers.merge(rows, found)
    assert [row["peers"] for row in rows] == [{"torch_symm_mem": 2.0}, {}, {}, {"torch_symm_mem": 2.0}]
    assert rows[0]["peer_details"]["torch_symm_mem"]["over_gemm"] == 1.5
    assert peers.Job.load(job(tmp_path).dump()) == job(tmp_path)
    late = peers.Results(job(tmp_path, seconds=-1.0), {})
    assert list(late.shapes()) == [shapes.TINY[0]]


def test_environment(monkeypatch):
    """What forbids multicast stays as it is, and only the peer that needs flags gets them, behind the caller's."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    assert all(peers.environment(name)["NCCL_NVLS_ENABLE"] == "0" for name in peers.MODULES)
    assert peers.environment("torch")["XLA_FLAGS"] == "--xla_gpu_autotune_level=0"
    flags = peers.environment("xla_windowed")["XLA_FLAGS"].split()
    assert flags[0] == "--xla_gpu_autotune_level=0" and len(flags) == 3


def test_pallas_sweep(tmp_path):
    """On stand-ins for the kernels: the fastest configuration that works is timed, failures are notes."""

    def late(y):
        time.sleep(0.1)
        return np.asarray(y)

    def matmul(x, w, *, axis_name, config, dtype):
        if config["grid_tile_width"] == 4:
            raise ValueError("too wide")
        y = (lax.all_gather(x, axis_name, axis=0, tiled=True) @ w).astype(dtype)
        if config["grid_tile_width"] == 8:  # the first one, so that it is dropped
            return jax.pure_callback(late, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
        return y

    kernels = types.SimpleNamespace(
        MatmulDimension={"M": 0, "N": 1}, TuningConfig=lambda **fields: fields, all_gather_lhs_matmul=matmul
    )
    shape = shapes.Shape(shapes.ALL_GATHER, 512, 256, 64)
    work = dataclasses.replace(job(tmp_path), shapes=(shape,), calls=1)
    results = peers.Results(work, {})
    found = pallas.measure(kernels, shape, common.mesh_of(work), work, results, 0.9)
    assert found["configs_tried"] == 4 and "width 16" in found["config"]
    assert found["ms"] > 0 and found["over_gemm"] > 0
    notes = json.loads((tmp_path / "out.json").read_text())["notes"]
    assert len(notes) == 1 and "width 4" in notes[0] and "too wide" in notes[0]
    ragged = shapes.Shape(shapes.ALL_GATHER, 512, 40, 64)
    assert pallas.measure(kernels, ragged, common.mesh_of(work), work, results, 0.9) is None


def test_a_dead_rank_ends_the_others(tmp_path, monkeypatch):
    program = "import os, sys, time; time.sleep(60 * (os.environ['RANK'] != '1')); sys.exit(3)"
    monkeypatch.setattr(torch_symm_mem, "_rank_command", lambda job: [sys.executable, "-c", program])
    assert torch_symm_mem.launch(job(tmp_path)) == 3
