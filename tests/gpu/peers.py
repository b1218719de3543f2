"""Two processes of one team (lockstep.py): one is killed, or stopped, or its program lacks calls that the other makes,
be it one for which the team's memory must grow.

The other must end with an error that names op, rank, peer, and tile or group with its epoch or what was to grow, no
later than the bound on waits and what it takes to notice. `python tests/gpu/peers.py --times 6 --out peers.json` does
each so often and counts. No JAX in here.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time

import lockstep

# And what each counts as.
FATES = {"killed": "peers_killed", "stopped": "peers_stopped", "lacking": "peers_absent", "growing": "peers_absent"}
# The kernels' own waits, the one that copy engines' signals are awaited by, and "signal" by NCCL, whose waits a thread
# ends.
STRATEGIES = ("fused", "signal", "nccl")
SCENARIOS = pathlib.Path(__file__).parent / "scenarios.py"
BOUND_S = 2.0  # ENTWINE_TIMEOUT_S of both
NOTICE_S = 15.0  # for the call under way, the error's way through XLA, and the end of the process
START_S = 60.0
SAID = re.compile(
    r"entwine_jax\.(all_gather_matmul|matmul_reduce_scatter|matmul_all_reduce): "
    r"rank \d+ waited too long for rank \d+: "
    r"((row block \d+, column \d+|group \d+), epoch \d+|the (arena of a call|first collectives))"
)


@dataclasses.dataclass(frozen=True)
class Outcome:
    fate: str
    in_time: bool  # an error, in time, with all of these words
    seconds: float  # from the deed to the end of the other process
    output: str  # of both

    def __str__(self) -> str:
        return f"peer {self.fate}: {'reported' if self.in_time else 'NOT reported'} after {self.seconds:.1f} s"


class Process:
    """A child whose output is read as it comes."""

    def __init__(self, environment: dict[str, str], *arguments: object) -> None:
        environment = environment | {"ENTWINE_TIMEOUT_S": str(BOUND_S)}
        command = [sys.executable, str(SCENARIOS), *map(str, arguments)]
        self.child = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.output: list[str] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.output.append(line)
            self.lines.put(line)
        self.lines.put(None)

    def says(self, word: str, limit_s: float) -> bool:
        """Whether it says so in time."""
        end = time.monotonic() + limit_s
        while (left := end - time.monotonic()) > 0:
            try:
                line = self.lines.get(timeout=left)
            except queue.Empty:
                return False
            if line is None:
                return False
            if word in line:
                return True
        return False

    def ends(self, limit_s: float) -> bool:
        try:
            self.child.wait(limit_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def kill(self) -> None:
        self.child.kill()  # SIGKILL ends a stopped one too
        self.child.wait()


def meet(fate: str, strategy: str = "fused") -> Outcome:
    """One of two processes meets with its fate while both make calls."""
    processes = [Process(environment, "peer", fate, strategy) for environment in lockstep.environments(2)]
    left, victim = processes
    try:
        ready = all(process.says("making calls", START_S) for process in processes)
        time.sleep(random.uniform(0.2, 1.5))
        if fate in ("killed", "stopped") and ready:
            victim.child.send_signal(signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
        start = time.monotonic()
        # One that lacks calls makes its last ones up to some seconds from now.
        ended = ready and left.ends(BOUND_S + NOTICE_S)
        seconds = time.monotonic() - start
        if not ended:
            left.child.send_signal(signal.SIGUSR1)  # it says where it is
            time.sleep(1)
    finally:
        for process in processes:
            process.kill()
    time.sleep(0.2)  # for the readers
    said = "".join(left.output)
    in_time = ended and left.child.returncode == 0 and "raised" in said and SAID.search(said) is not None
    return Outcome(f"{fate} ({strategy})", in_time, seconds, f"{said}\n--- the other:\n{''.join(victim.output)}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="of each fate, of all strategies by turns")
    parser.add_argument("--out", type=pathlib.Path, help="for the counts, as JSON")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # children end first: they would go on using the GPUs
    counts = {"peers_killed": 0, "peers_stopped": 0, "peers_absent": 0, "reported_in_time": 0, "slowest_report_s": 0.0}
    for i in range(arguments.times):
        strategy = STRATEGIES[i % len(STRATEGIES)]
        for fate, name in FATES.items():
            outcome = meet(fate, strategy)
            print(outcome, flush=True)
            if not outcome.in_time:
                print(outcome.output[-6000:], flush=True)
            counts[name] += 1
            counts["reported_in_time"] += outcome.in_time
            counts["slowest_report_s"] = round(max(counts["slowest_report_s"], outcome.seconds), 1)
            if arguments.out is not None:
                arguments.out.write_text(json.dumps(counts) + "\n")
    return 0 if counts["reported_in_time"] == len(FATES) * arguments.times else 1


if __name__ == "__main__":
    sys.exit(main())
