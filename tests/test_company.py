"""Our ops beside XLA's own collectives, callbacks, other programs and threads, on virtual CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

GPU = Path(__file__).parent / "gpu"
sys.path.append(str(GPU))

import company  # noqa: E402

FOUR = Mesh(np.array(jax.devices("cpu")[:4]), ("t",))
TWO_AXES = Mesh(np.array(jax.devices("cpu")).reshape(2, 4), ("d", "t"))


@pytest.mark.parametrize("mesh, gradients", [(FOUR, "t"), (TWO_AXES, "d"), (TWO_AXES, ("d", "t"))], ids=str)
def test_gradients_are_summed_meanwhile(mesh, gradients):
    company.beside_collectives(mesh, gradients, floats=1 << 10)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_other_programs(ours_first):
    company.beside_programs(FOUR, ours_first, floats=1 << 12)


def test_host_callbacks():
    company.host_callbacks(FOUR)


def test_python_threads():
    company.python_threads(FOUR, turns=15)


def test_programs_by_turns():
    company.graphs_and_eager(FOUR, turns=20)


def test_clear_caches():
    company.cleared_caches(FOUR, turns=2)


def test_several_meshes():
    """Of other devices, the same in another order, two teams in one mesh, one team along two axes."""
    devices = np.array(jax.devices("cpu"))
    company.several_meshes(
        [
            (FOUR, "t"),
            (Mesh(devices[[3, 1, 0, 2]], ("t",)), "t"),
            (Mesh(devices[4:6], ("t",)), "t"),
            (TWO_AXES, "t"),
            (Mesh(devices[[5, 2, 7, 4]].reshape(2, 2), ("a", "b")), ("b", "a")),
        ],
        turns=5,
    )


def child(*arguments):
    command = [sys.executable, str(GPU / "scenarios.py"), *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_backends_made_anew():
    done = child("backends")
    assert done.returncode == 0 and "scenario done" in done.stdout, done.stderr[-3000:]


def test_exit_with_calls_in_flight():
    done = child("exit_in_flight", "60")
    assert done.returncode == 0 and "leaving 60 calls" in done.stdout, f"{done.returncode}: {done.stderr[-3000:]}"
    assert "Fatal" not in done.stderr and "terminate" not in done.stderr, done.stderr[-3000:]
