"""The README's programs run as they stand."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_programs(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 2
    # Traced only: the widths are those of a GPU.
    program = "\n".join([*blocks, "print(ent.explain(mlp, x, w_up, w_down))"])
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    ops = [line.split()[0] for line in done.stdout.splitlines()]
    assert ops == ["op", "all_gather_matmul", "matmul_reduce_scatter"] * 2
