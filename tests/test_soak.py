"""The soak test, for a short while; five minutes of it with `-m slow`, and as long as wanted with `make soak`."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from soak import draw
from soak.absent import absent
from soak.program import Built
from soak.worker import machine

ROOT = Path(__file__).parents[1]


def soak(tmp_path, *arguments, limit):
    out = tmp_path / "soak.json"
    command = [sys.executable, ROOT / "scripts" / "soak.py", "--platform", "cpu", "--out", out, *arguments]
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=limit, check=False
    )
    return done, json.loads(out.read_text())


def test_soak(tmp_path):
    done, found = soak(tmp_path, "--launches", 500, "--rounds", 2, limit=200)
    assert done.returncode == 0, f"{found['failures']}\n{done.stderr[-3000:]}"
    assert found["launches"] >= 100 and found["programs"] >= 8, found
    assert found["wrong"] == found["hung"] == found["error"] == found["crashed"] == 0
    assert found["peers_absent"] == found["reported_in_time"] > 0


@pytest.mark.slow
def test_long_soak(tmp_path):
    seed = random.randrange(1_000_000) * 100
    done, found = soak(tmp_path, "--seconds", 300, "--launches", 10**9, "--seed", seed, limit=500)
    assert done.returncode == 0, f"{found['failures']}\n{done.stderr[-3000:]}"


def test_a_wait_past_its_bound_is_counted(tmp_path):
    """And a round can be replayed."""
    done, found = soak(tmp_path, "--replay", 4, "--launches-each", 20, "--timeout-s", 0.001, limit=100)
    assert done.returncode == 1 and found["rounds"] == 1 and found["hung"] > 0, found
    assert found["failures"][0]["seed"] == 4
    assert "--replay 4" in done.stderr
    done, found = soak(tmp_path, "--replay", 4, "--launches-each", 20, limit=100)
    assert done.returncode == 0 and found["launches"] == 84, found


def test_what_is_drawn():
    """The same for the same seed; all ops, kinds and dtypes come."""
    on = machine(20)
    drawn = [draw.program(on, random.Random(seed)) for seed in range(200)]
    assert drawn == [draw.program(on, random.Random(seed)) for seed in range(200)]
    assert {program.kind for program in drawn} == set(draw.KINDS)
    assert {call.op for program in drawn for call in program.calls} == set(draw.OPS)
    assert {(program.dtype, program.result) for program in drawn} == set(on.types)
    assert {program.ranks for program in drawn} == set(range(2, 9))
    several = {(program.kind, call.gathers) for program in drawn for call in program.calls if call.more}
    assert several == {(kind, gathers) for kind in ("one", "independent", "gradient") for gathers in (False, True)}
    assert {len(call.sizes) for program in drawn for call in program.calls} == {1, 2, 3, 4}
    gated = [(program, call) for program in drawn for call in program.calls if call.gated]
    assert {program.kind for program, _ in gated} == {"one", "independent"}
    assert {(call.bias, call.activation, call.gathered) for _, call in gated} >= {
        (True, "relu", False),
        (False, None, True),
    }


@pytest.mark.parametrize("kind", sorted(set(draw.KINDS)))
def test_a_wrong_element_is_found(kind):
    on = machine(20)
    seeds = (seed for seed in range(1000) if draw.program(on, random.Random(seed)).kind == kind)
    seed = next(seeds)
    built = Built(draw.program(on, random.Random(seed)), seed)
    assert not np.asarray(built.launch(1, 1, 0, 0))[..., 0].any()
    assert np.asarray(built.launch(1, 1, 0, 0)).shape[0] == len(built.program.order)
    want = built.data["want"][0]
    # Of the other w, or of the last element alone.
    built.data["want"][0] = want.at[3].set(want[2]).at[(2, *(size - 1 for size in want.shape[1:]))].add(1)
    assert np.asarray(built.launch(1, 1, 0, 0))[..., 0].any() or bool((want[3] == want[2]).all())
    wrong = np.asarray(built.launch(1, 0, 0, 0))[..., 0]
    assert set(np.unique(wrong)) == {0, 1} and wrong[:, 1:].sum() == 0


def test_absent_rank():
    in_time, seconds, message = absent(3)
    assert in_time, f"after {seconds} s: {message}"
