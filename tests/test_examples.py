"""What `make demo` runs, on the CPU devices."""

import os
import subprocess
import sys
from pathlib import Path


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
    assert "OK: all 4 matmuls were fused" in done.stdout
