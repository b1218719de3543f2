"""The process that outlives what it launches: starts children (worker.py), reads what they say, counts."""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import queue
import signal
import subprocess
import sys
import threading
import time
from typing import Any

FAULTS = ("wrong", "hung", "error", "crashed")
# Rounds end with a rank that lacks a call, on CPU, where a process outlives that.
ABSENT = ("peers_absent", "reported_in_time")
# A team's first epochs, by turns: the third and the fourth wrap around soon, as unsigned numbers and as signed ones.
EPOCHS = (0, 1, 2**32 - 40, 2**31 - 40)


class Report:
    """What happened so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.start, self.told = arguments, time.monotonic(), 0.0
        counted = ("launches", "late", "stalled", "programs", "rounds", "wrapping", *FAULTS)
        self.counts = collections.Counter(dict.fromkeys(counted, 0))
        self.epoch = 0  # the first of the child's teams
        self.calls: collections.Counter[str] = collections.Counter()
        self.machine: dict[str, Any] = {}
        self.failures: list[dict[str, Any]] = []

    def take(self, event: dict[str, Any]) -> None:
        name = event.pop("event")
        if name == "machine":
            self.machine = event
        elif name == "round":
            self.counts["rounds"] += 1
            self.counts["wrapping"] += self.epoch > 1
        elif name == "programs":
            self.counts["programs"] += event["programs"]
            self.calls.update(event["calls"])
        elif name == "launched":
            self.counts["launches"] += event["launches"]
            self.counts["late"] += event["late"]
            self.counts["stalled"] += event["stalled"]
        elif name == "absent":
            self.counts["peers_absent"] += 1
            self.counts["reported_in_time"] += event["in_time"]
            if not event["in_time"]:
                self.failures.append({"kind": name, **event})
        elif name in FAULTS:
            self.counts[name] += 1
            self.failures.append({"kind": name, **event})
            if len(self.failures) <= 10:
                print(f"{name}: {event}\n  again: python scripts/soak.py --replay {event['seed']}", file=sys.stderr)
        if time.monotonic() - self.told > 5:
            self.tell()

    def tell(self) -> None:
        self.told = time.monotonic()
        seconds = self.told - self.start
        words = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        print(f"{seconds:.0f} s: {words}, {self.counts['launches'] / seconds:.0f} launches/s", file=sys.stderr)

    def as_json(self) -> dict[str, Any]:
        seconds = round(time.monotonic() - self.start, 1)
        return {
            "seed": self.arguments.seed,
            "seconds": seconds,
            **self.machine,
            **self.counts,
            "calls": dict(self.calls),
            "failures": self.failures[:50],
        }

    def well(self) -> bool:
        """Something was launched, and all went as it should."""
        told = self.counts["peers_absent"] == self.counts["reported_in_time"]
        return self.counts["launches"] > 0 and told and not any(self.counts[name] for name in FAULTS)


def events(child: subprocess.Popen[str]) -> queue.Queue[dict[str, Any] | None]:
    """The child's lines as they come; None at their end."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                lines.put(json.loads(line))
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    return lines


def child_of(report: Report, seed: int, rounds: int, seconds: float) -> subprocess.Popen[str]:
    arguments = report.arguments
    report.epoch = EPOCHS[seed // arguments.rounds % len(EPOCHS)]
    command = [sys.executable, arguments.script, "--worker", "--seed", seed, "--rounds", rounds, "--seconds", seconds]
    for name in ("programs", "launches_each", "timeout_s", "platform"):
        command += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    environment = os.environ | {"ENTWINE_FIRST_EPOCH": str(report.epoch)}
    environment.setdefault("JAX_NUM_CPU_DEVICES", "8")
    return subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment)


def supervise(arguments: argparse.Namespace) -> Report:
    """One child after the other, each for some rounds, until there are launches or seconds enough."""
    report, seed, last = Report(arguments), arguments.seed, None
    once = arguments.replay is not None
    if once:
        seed = last = arguments.replay
    while True:
        left = arguments.seconds - (time.monotonic() - report.start)
        enough = report.counts["launches"] >= arguments.launches or left <= 0
        if (not once and enough) or (once and seed != last):
            return report
        seed = 1 + watch(report, child_of(report, seed, 1 if once else arguments.rounds, max(left, 1)), seed)
        if not report.machine:  # it didn't even begin
            return report


def watch(report: Report, child: subprocess.Popen[str], seed: int) -> int:
    """The seed of the child's last round."""
    lines, finished = events(child), False
    # Nothing for so long: not a compilation, and the bound on waits has passed.
    silence = 60 + 3 * report.arguments.timeout_s
    while True:
        try:
            event = lines.get(timeout=silence)
        except queue.Empty:
            report.take({"event": "hung", "seed": seed, "detail": f"no word for {silence:.0f} s"})
            child.send_signal(signal.SIGABRT)  # its stacks go to stderr
            time.sleep(2)
            child.kill()
            child.wait()
            return seed
        if event is None:
            break
        seed = event.get("seed", seed)
        finished = finished or event["event"] == "done"
        report.take(event)
        if report.counts["launches"] >= report.arguments.launches:
            child.kill()
            finished = True
    try:
        child.wait(silence)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    if not finished:
        report.take({"event": "crashed", "seed": seed, "detail": f"exit status {child.returncode}"})
    return seed


def parse(script: pathlib.Path, description: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--launches", type=int, default=20_000, help="stop after so many")
    parser.add_argument("--seconds", type=float, default=600, help="or so long")
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    parser.add_argument("--replay", type=int, metavar="SEED", help="this round alone")
    parser.add_argument("--programs", type=int, default=4, help="of a round")
    parser.add_argument("--launches-each", type=int, default=100, help="of a program, on average")
    parser.add_argument("--rounds", type=int, default=10, help="of a process")
    parser.add_argument("--timeout-s", type=float, default=20, help="bound on a wait for a peer")
    parser.add_argument("--platform", choices=["any", "cpu"], default="any")
    parser.add_argument(
        "--leaks", action="store_true", help="measure what calls and compilations leave in memory instead"
    )
    parser.add_argument("--leak-calls", type=int, default=10_000, help="in multiples of ten")
    parser.add_argument("--leak-compilations", type=int, default=200, help="in multiples of ten")
    parser.add_argument("--out", type=pathlib.Path, help="for the results, as JSON")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.set_defaults(script=script)
    return parser.parse_args()


def main(script: pathlib.Path, description: str | None) -> int:
    """`script` is what children are started with: it calls this."""
    arguments = parse(script, description)
    if arguments.worker:
        from soak.worker import work

        work(arguments)
        return 0
    if arguments.leaks:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
        from soak import leaks

        return leaks.main(arguments)
    report = supervise(arguments)
    report.tell()
    text = json.dumps(report.as_json(), indent=1)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n")
    return 0 if report.well() else 1
