"""No leaks, for a short while; 10,000 calls and 200 compilations with `make soak`. And that a leak would be found."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from soak import leaks

ROOT = Path(__file__).parents[1]


def test_no_leaks(tmp_path):
    """In a process of its own, whose memory nobody else uses."""
    out = tmp_path / "leaks.json"
    command = [sys.executable, ROOT / "scripts" / "soak.py", "--leaks", "--platform", "cpu", "--out", out]
    command += ["--leak-calls", 3000, "--leak-compilations", 30]
    for _ in range(2):  # what leaks does so every time, what allocators take at once comes once
        done = subprocess.run(
            [*map(str, command)], env=os.environ, capture_output=True, text=True, timeout=200, check=False
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert (found["calls"], found["compilations"], found["leaks"]) == (3000, 30, [])
    assert found["arena_bytes"] > 0 and found["host_bytes_a_call"] < 1000


def test_what_is_taken_is_seen():
    memory = leaks.Memory()
    before, _ = memory.look()
    taken = np.ones(32 << 20, np.uint8)
    assert 0.9 * taken.size < memory.look()[0] - before < 1.1 * taken.size
    del taken
    assert memory.look()[0] - before < 4 << 20


def looks(**left):
    """What leaves so many bytes each time, beside noise of a third of a MiB."""
    rng = np.random.default_rng(0)
    made = {}
    for name, number in (("call", 10_000), ("xla_call", 5_000), ("compilation", 200), ("xla_compilation", 50)):
        host, device = left.get(name, (0, 0))
        noise = rng.integers(0, 1 << 18, leaks.LOOKS)
        at = np.arange(leaks.LOOKS) * number // (leaks.LOOKS - 1)
        made[name] = (number, [(int(a * host + n), int(a * device)) for a, n in zip(at, noise, strict=True)])
    return made


@pytest.mark.parametrize(
    "left, leaking",
    [
        ({}, []),
        ({"call": (400, 0)}, ["host_call"]),
        ({"call": (0, 1024)}, ["device_call"]),
        ({"compilation": (50_000, 0)}, ["host_compilation"]),
        ({"compilation": (0, 100_000)}, ["device_compilation"]),
        ({"compilation": (50_000, 100_000), "xla_compilation": (60_000, 110_000)}, []),
        ({"call": (2_000, 0), "xla_call": (1_950, 0)}, []),
        ({"call": (2_000, 0), "xla_call": (1_000, 0)}, ["host_call"]),
    ],
    ids=str,
)
def test_a_leak_is_found(left, leaking):
    found = leaks.judged(looks(**left))
    assert found["leaks"] == leaking
    if "call" in left:
        host, device = left["call"]
        assert abs(found["host_bytes_a_call"] - host) < 60 and found["device_bytes_a_call"] == device


def test_growth():
    assert leaks.growth([*range(0, 1100, 100)]) == 1000
    assert leaks.growth([5] * 11) == leaks.growth([9, 1, 8, 2, 7, 3, 6, 4, 5, 1, 9]) == 0
