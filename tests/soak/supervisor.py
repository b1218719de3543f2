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

from gpu import lockstep

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


Children = list[subprocess.Popen[str]]


def events(children: Children) -> queue.Queue[dict[str, Any] | None]:
    """The children's lines as they come; None at the end of each."""
    lines: queue.Queue[dict[str, Any] | None] = queue.Queue()

    def read(child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                lines.put(json.loads(line))
        lines.put(None)

    for child in children:
        threading.Thread(target=read, args=(child,), daemon=True).start()
    return lines


def children_of(report: Report, seed: int, rounds: int, seconds: float) -> Children:
    """One that has all devices, or as many as are asked for, in lockstep."""
    arguments = report.arguments
    report.epoch = EPOCHS[seed // arguments.rounds % len(EPOCHS)]
    command = [sys.executable, arguments.script, "--worker", "--seed", seed, "--rounds", rounds, "--seconds", seconds]
    for name in ("programs", "launches_each", "timeout_s", "platform"):
        command += [f"--{name.replace('_', '-')}", getattr(arguments, name)]
    environment = os.environ | {"ENTWINE_FIRST_EPOCH": str(report.epoch)}
    environment.setdefault("JAX_NUM_CPU_DEVICES", "8")
    many = lockstep.environments(arguments.processes) if arguments.processes > 1 else [{}]
    return [
        subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, text=True, env=environment | own) for own in many
    ]


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
        children = children_of(report, seed, 1 if once else arguments.rounds, max(left, 1))
        seed = 1 + watch(report, children, seed, time.monotonic() + left)
        if not report.machine:  # it didn't even begin
            return report


def watch(report: Report, children: Children, seed: int, end: float) -> int:
    """The seed of the children's last round."""
    lines, running, done = events(children), len(children), 0
    # Nothing for so long: not a compilation, and the bound on waits has passed.
    silence = 60 + 3 * report.arguments.timeout_s
    while True:
        try:
            event = lines.get(timeout=silence)
        except queue.Empty:
            report.take({"event": "hung", "seed": seed, "detail": f"no word for {silence:.0f} s"})
            for child in children:
                child.send_signal(signal.SIGABRT)  # its stacks go to stderr
            time.sleep(2)
            stop(children)
            return seed
        if event is None:
            running -= 1
            if running == 0:
                break
            continue
        seed = event.get("seed", seed)
        done += event["event"] == "done"
        report.take(event)
        # In lockstep none of them may look at a clock of its own.
        late = len(children) > 1 and time.monotonic() > end
        if report.counts["launches"] >= report.arguments.launches or late:
            stop(children)
            return seed
    statuses = [child.returncode for child in stop(children, silence)]
    if done < len(children):
        report.take({"event": "crashed", "seed": seed, "detail": f"exit statuses {statuses}"})
    return seed


def stop(children: Children, patience: float = 0) -> Children:
    """Ends those that don't end by themselves."""
    end = time.monotonic() + patience
    for child in children:
        try:
            child.wait(max(end - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    return children


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
    parser.add_argument(
        "--processes", type=int, default=1, help="on GPUs: so many in lockstep, as tests/gpu/lockstep.py"
    )
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
        if arguments.processes > 1 and lockstep.VARIABLE not in os.environ:
            return lockstep.run([sys.executable, *sys.argv], lockstep.environments(arguments.processes))
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
