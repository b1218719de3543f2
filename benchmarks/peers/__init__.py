"""Peers that need a process of their own: other XLA flags, another framework, kernels that take all devices.

Each peer is a module that is run with one argument, a `Job` as JSON, and rewrites `job.out` after every shape, so that
what it has measured survives whatever ends it. Its samples can't be interleaved with those of the main process. So it
measures the GEMM alone too, interleaved with its own samples: `over_gemm` is the peer's time over that of the GEMM in
the same rounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.shapes import Shape

MODULES = {
    "xla_windowed": "benchmarks.peers.xla_windowed",
    "pallas": "benchmarks.peers.pallas",
    "torch": "benchmarks.peers.torch_symm_mem",
}

# See xla_windowed.py.
_WINDOWED_FLAGS = "--xla_gpu_threshold_for_windowed_einsum_mib=0 --xla_gpu_multi_streamed_windowed_einsum=true"


@dataclasses.dataclass(frozen=True)
class Job:
    shapes: tuple[Shape, ...]
    out: str
    ranks: int
    rounds: int
    calls: int  # in one program, at the most
    sample_seconds: float
    seconds: float  # when to stop
    platform: str | None

    def dump(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def load(text: str) -> Job:
        fields = json.loads(text)
        return Job(**{**fields, "shapes": tuple(Shape(**shape) for shape in fields["shapes"])})


class Results:
    """What a peer process has found so far, written to a file after each change."""

    def __init__(self, job: Job, versions: dict[str, str], notes: Sequence[str] = ()) -> None:
        self._job, self._start = job, time.monotonic()
        self._found: dict[str, Any] = {"versions": versions, "notes": list(notes), "rows": []}
        self._write()

    def left(self) -> float:
        return self._job.seconds - (time.monotonic() - self._start)

    def shapes(self, op: str | None = None) -> Iterator[Shape]:
        """The shapes to measure, as long as there is time; the rest is noted."""
        wanted = [shape for shape in self._job.shapes if op in (None, shape.op)]
        for done, shape in enumerate(wanted):
            # The first shape pays for what all need, so it is no measure.
            if done and self.left() < 0:
                self.note(
                    f"out of time ({self._job.seconds:.0f} s) before {shape}, {len(wanted) - done} shapes left out"
                )
                return
            yield shape

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)
        self._found["notes"].append(text)
        self._write()

    def add(self, shape: Shape, peers: dict[str, dict[str, Any]]) -> None:
        """For each peer: ms, spread, gemm_ms, over_gemm and whatever else is worth keeping."""
        times = "  ".join(
            f"{name} {found['ms']:.3f} ms, {found['over_gemm']:.3f} GEMM" for name, found in peers.items()
        )
        print(f"{shape}: {times}", file=sys.stderr, flush=True)
        self._found["rows"].append({**dataclasses.asdict(shape), "peers": peers})
        self._write()

    def _write(self) -> None:
        pathlib.Path(self._job.out).write_text(json.dumps(self._found))


def environment(name: str) -> dict[str, str]:
    """The caller's, with no more than a peer can't do without."""
    found = dict(os.environ)
    if name == "xla_windowed":
        found["XLA_FLAGS"] = f"{found.get('XLA_FLAGS', '')} {_WINDOWED_FLAGS}".strip()
    # The main process has most of the memory already.
    found["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    return found


def run(name: str, job: Job) -> dict[str, Any]:
    """Runs one peer to its end, its error or its time, and returns what it left; a peer's faults don't raise."""
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "results.json"
        command = [sys.executable, "-m", MODULES[name], dataclasses.replace(job, out=str(out)).dump()]
        # A grace of its own beyond the time the peer knows of: start-up, and the shape it is at.
        failure = _supervise(name, command, job.seconds + 30)
        found: dict[str, Any] = {"versions": {}, "notes": [], "rows": []}
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(out.read_text())
    found["notes"] = [f"{name}: {note}" for note in found["notes"]]
    if failure:
        found["notes"].append(f"{name}: {failure}")
    return found


def _supervise(name: str, command: Sequence[str], seconds: float) -> str:
    """What went wrong, "" if nothing."""
    process = subprocess.Popen(
        command,
        cwd=pathlib.Path(__file__).parents[2],
        env=environment(name),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that it can be ended with all its children
    )
    lines: list[str] = []

    def forward() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.strip())
            print(f"[{name}] {line.rstrip()[:400]}", file=sys.stderr, flush=True)

    reader = threading.Thread(target=forward, daemon=True)
    reader.start()
    try:
        status = process.wait(seconds)
        failure = f"ended with status {status}: {_last_words(lines)}" if status else ""
    except subprocess.TimeoutExpired:
        failure = f"stopped after {seconds:.0f} s; its last words: {_last_words(lines)}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        reader.join(10)
    return failure


def _last_words(lines: Sequence[str]) -> str:
    """The exception if there is one, else the last line."""
    said = [line for line in lines if line]
    errors = [line for line in said if "Error" in line or "error:" in line]
    return (errors or said or ["nothing"])[-1][:500]


def merge(rows: Sequence[dict[str, Any]], found: dict[str, Any]) -> None:
    """Puts what a peer found into the main process's rows of the same shape, under `peers` and `peer_details`."""
    for theirs in found["rows"]:
        for row in rows:
            if all(row[key] == theirs[key] for key in ("op", "m", "n", "k")):
                row["peers"].update({peer: details["ms"] for peer, details in theirs["peers"].items()})
                row["peer_details"].update(theirs["peers"])
