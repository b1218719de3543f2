"""The GPU tests: real GPUs, all of them as one team unless a test says otherwise, nothing emulated.

This is one process with all GPUs; lockstep.py runs the same tests in many.

Every test has a limit: a kernel that waits for ever can't be interrupted, so the watchdog prints all stacks and ends
the process, and a child is killed. Run with --capture=sys to see those stacks.
"""

from __future__ import annotations

import faulthandler
import os
import pathlib
import sys
from collections.abc import Iterator

import pytest
from lockstep import join

# Read when JAX first touches the GPUs: children run beside this process and need memory too.
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.25")
# For benchmarks/, behind everything else: the package under test is the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[2]))

LIMIT_S = 100

join()


@pytest.fixture(autouse=True)
def _limits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ENTWINE_TIMEOUT_S", "20")
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=2)
    yield
    faulthandler.cancel_dump_traceback_later()
