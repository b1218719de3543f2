"""The examples, on the CPU devices."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_mlp():
    command = [
        sys.executable,
        str(Path(__file__).parents[1] / "examples" / "mlp.py"),
        "--device",
        "cpu",
        "--steps",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: all 3 matmuls were fused" in done.stdout


def test_transformer(tmp_path):
    """A few steps, and the code that times a pass; the losses' plot where there is matplotlib."""
    for package in ("flax", "optax"):
        pytest.importorskip(package, reason="needs the examples' extra: pip install 'entwine-jax[examples]'")
    script, out = Path(__file__).parents[1] / "examples" / "transformer.py", tmp_path / "out.json"
    options = ["--device", "cpu", "--steps", "3", "--time", "yes", "--rounds", "2", "--out", str(out)]
    plot = tmp_path / "losses.png"
    if importlib.util.find_spec("matplotlib") is not None:
        options += ["--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, script, *options], capture_output=True, text=True, timeout=240, env=os.environ
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK: 16 fused collective matmuls a step" in done.stdout
    result = json.loads(out.read_text())
    assert [len(losses) for losses in result["losses"].values()] == [3, 3]
    assert [row["pass"] for row in result["timing"]["rows"]] == ["forward", "forward and backward"]
    assert all(len(times) == 2 for row in result["timing"]["rows"] for times in row["ms"].values())
    assert plot.exists() == ("--plot" in options)
