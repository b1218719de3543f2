"""Dispatch that runs far ahead of execution, where XLA alone hangs on machines with few CPUs: _threads.py says why."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from entwine_jax import _threads


def work(devices, threads, rounds, **environment):
    """Runs dispatch/worker.py as if nobody had imported entwine_jax before."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("PJRT_NPROC", "NPROC", "XLA_FLAGS")}
    command = [sys.executable, Path(__file__).parent / "dispatch" / "worker.py", *map(str, (devices, threads, rounds))]
    return subprocess.run(command, capture_output=True, text=True, timeout=90, env=inherited | environment)


@pytest.mark.parametrize(("devices", "threads"), [(2, 1), (2, 5), (3, 2), (8, 2)])
def test_far_ahead(devices, threads):
    """Every op, dependent and independent, executables interleaved, from one thread and from several."""
    done = work(devices, threads, 60)
    assert done.returncode == 0, done.stderr


def test_too_few_threads():
    """Where the user has taken the cure away, an error names it."""
    for _ in range(3):  # it takes bad luck, which this many dispatches have nearly always
        done = work(2, 1, 40, PJRT_NPROC="2", ENTWINE_TIMEOUT_S="0.5", ENTWINE_STALL_US="300")
        if done.returncode:
            break
    assert done.returncode == 1, done.stderr
    assert "has not come to this call at all" in done.stderr
    assert "set PJRT_NPROC to (1 + threads that dispatch) x CPU devices" in done.stderr


@pytest.mark.parametrize(
    ("nproc", "pjrt_nproc", "cpus", "wanted"),
    [
        (None, None, 2, "64"),
        ("3", None, 128, "64"),
        ("none", "", 8, "64"),
        (None, None, 64, None),
        ("96", None, 2, None),
        (None, "5", 2, "5"),
    ],
)
def test_pool(monkeypatch, nproc, pjrt_nproc, cpus, wanted):
    """What is set, or large enough already, stays."""
    for name, value in (("NPROC", nproc), ("PJRT_NPROC", pjrt_nproc)):
        # setenv first: then monkeypatch restores what provide() changes.
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cpus)), raising=False)
    _threads.provide()
    assert os.environ.get("PJRT_NPROC") == wanted
