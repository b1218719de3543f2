"""What was done to break it, how often, and what came of that: the table of docs/reliability.md.

python -m benchmarks.reliability collect --logs FOLDER --tests LOG ... --out FILE.json     from what runs have left
python -m benchmarks.reliability collect --with FILE.json --tests LOG ... --out FILE.json  and from tests elsewhere
python -m benchmarks.reliability report FILE.json ...                                      prints the table
python -m benchmarks.reliability report FILE.json ... --update docs/reliability.md         or writes it there
python -m benchmarks.reliability report FILE.json ... --check docs/reliability.md          or fails if it differs

FOLDER may have soak.json and leaks.json (of `python scripts/soak.py`), lost_peers.json (tests/gpu/peers.py), test.log
(`pytest -v`) and sanitize_*.log (compute-sanitizer). LOG is what tests print: C++ tests
(build/cc-address/Testing/Temporary/LastTest.log, or the fuzz test's own output), or `pytest -v`. What isn't there was
not run: null in the JSON.
"""

from __future__ import annotations

import argparse
import collections
import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import collective_matmul
from benchmarks.report import markdown_row, with_report

Found = dict[str, Any]

# A sanitizer's reports in the output of C++ tests, and in which build's.
REPORTS = re.compile(r"ERROR: (Address|Leak)Sanitizer|WARNING: ThreadSanitizer|: runtime error: ")
BUILDS = {"cc-address": ("AddressSanitizer", "UBSan"), "cc-thread": ("ThreadSanitizer",)}
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard")
LAUNCHES = re.compile(r"^count launches (\d+)$", re.MULTILINE)
# Tests of what else runs on the devices, and of what fails there, by pytest.
COMPANY = re.compile(
    r"^\S*tests/(?:gpu/)?test_(?:company|executor|gpu_company|gpu_children)\.py::.* (PASSED|FAILED|ERROR)\b",
    re.MULTILINE,
)
FUZZED, CHECKED = "ok     any input is a problem or an error", "ok     nothing goes wrong"


def add(a: int | None, b: int) -> int:
    return (a or 0) + b


def of_soak(found: Found, soak: Found) -> None:
    found["machine"] = {"platform": soak["platform"], "devices": soak["devices"], "accelerator": soak["kind"]}
    if soak.get("shared"):
        found["machine"]["processes"] = soak["processes"]
    for name in (
        "launches",
        "late",
        "stalled",
        "rounds",
        "wrapping",
        "programs",
        "seconds",
        "wrong",
        "hung",
        "error",
        "crashed",
    ):
        found[{"error": "errors"}.get(name, name)] = soak[name]
    if soak.get("peers_absent"):  # on CPU devices the soak has some
        of_peers(found, soak)


def of_peers(found: Found, peers: Found) -> None:
    for name in ("peers_killed", "peers_stopped", "peers_absent", "reported_in_time"):
        if name in peers:
            found[name] = add(found[name], peers[name])
    if "slowest_report_s" in peers:
        found["slowest_report_s"] = max(found["slowest_report_s"] or 0, peers["slowest_report_s"])


def of_leaks(found: Found, leaks: Found) -> None:
    found["leaks"] = len(leaks["leaks"])
    for name in ("calls", "compilations"):
        found[f"leak_{name}"] = leaks[name]
    for name in LEFT:
        found[name] = leaks[name]


def of_company(found: Found, log: str) -> None:
    for verdict in COMPANY.findall(log):
        found["company_tests"] = add(found["company_tests"], 1)
        found["company_failed"] = add(found["company_failed"], verdict != "PASSED")


def of_tests(found: Found, log: str, build: str) -> None:
    """Of tests' output; of C++ tests that in one build."""
    of_company(found, log)
    counts: collections.Counter[str] = collections.Counter()  # of several models of the protocol together
    for name, value in re.findall(r"^count (\w+) (\d+)$", log, re.MULTILINE):
        counts[name] += int(value)
    if "problem_fuzz_test" in log or "fuzz_inputs" in counts:
        # The inputs are the same in every build.
        found["fuzz_inputs"] = max(found["fuzz_inputs"] or 0, counts.get("fuzz_inputs", 0))
        found["fuzz_crashes"] = add(found["fuzz_crashes"], FUZZED not in log)
    for name in ("states", "programs", "broken_variants", "broken_variants_found"):
        if f"protocol_{name}" in counts and CHECKED in log:
            found[f"protocol_{name}"] = counts[f"protocol_{name}"]
    if build in BUILDS:
        found["sanitizers"] += BUILDS[build]
        found["sanitizer_findings"] = add(found["sanitizer_findings"], len(REPORTS.findall(log)))


def of_sanitizer(found: Found, log: str, tool: str) -> None:
    """Of compute-sanitizer. A run that was cut short has no summary, one on a machine that the tool can't do has no
    launches: neither counts."""
    summaries, launches = SUMMARY.findall(log), sum(map(int, LAUNCHES.findall(log)))
    if summaries and launches:
        found["sanitizers"].append(tool)
        found["sanitizer_findings"] = add(found["sanitizer_findings"], sum(int(a or b) for a, b in summaries))
        found["sanitized_launches"] = add(found["sanitized_launches"], launches)


LEFT = tuple(f"{where}_bytes_a_{what}" for what in ("call", "compilation") for where in ("host", "device"))
FIELDS = (
    "machine",
    *("launches", "late", "stalled", "rounds", "wrapping", "programs", "seconds", "wrong", "hung", "errors", "crashed"),
    *("company_tests", "company_failed"),
    *("leak_calls", "leak_compilations", "leaks", *LEFT),
    *("peers_killed", "peers_stopped", "peers_absent", "reported_in_time", "slowest_report_s"),
    *("fuzz_inputs", "fuzz_crashes", "sanitizer_findings", "sanitized_launches"),
    *("protocol_states", "protocol_programs", "protocol_broken_variants", "protocol_broken_variants_found"),
)


def collect(logs: pathlib.Path | None, tests: Sequence[pathlib.Path], before: Found | None = None) -> Found:
    found: Found = dict.fromkeys(FIELDS) | {"sanitizers": [], "versions": collective_matmul.versions()} | (before or {})
    if logs is not None:
        for name, take in (("soak.json", of_soak), ("leaks.json", of_leaks), ("lost_peers.json", of_peers)):
            if (logs / name).exists():
                take(found, json.loads((logs / name).read_text()))
        if (logs / "test.log").exists():
            of_company(found, (logs / "test.log").read_text(errors="replace"))
        for log in sorted(logs.glob("sanitize_*.log")):
            of_sanitizer(found, log.read_text(errors="replace"), log.stem.removeprefix("sanitize_"))
    for log in tests:
        builds = [part for part in log.parts if part in BUILDS]
        of_tests(found, log.read_text(errors="replace"), builds[0] if builds else "")
    found["sanitizers"] = sorted(set(found["sanitizers"]))
    return found


# The table


def machine(found: Found) -> str:
    about = found["machine"]
    if about is None:
        return "elsewhere"
    if about["platform"] == "cpu":
        return f"{about['devices']} virtual CPU devices"
    if "processes" in about:  # as many devices as JAX sees, on fewer GPUs
        return f"{about['processes']} processes on one {about['accelerator']}"
    return f"{about['devices']} x {about['accelerator']}"


def number(*names: str, text: str = "{}") -> Callable[[Found], str]:
    """A cell: these numbers in this text, or that it wasn't run."""

    def cell(found: Found) -> str:
        values = [found[name] for name in names]
        return "not run" if None in values else text.format(*(f"{value:,}" for value in values))

    return cell


def reported(found: Found) -> str:
    fates = [found[f"peers_{name}"] for name in ("killed", "stopped", "absent")]
    if found["reported_in_time"] is None:
        return "not run"
    return f"{found['reported_in_time']:,} of {sum(fate or 0 for fate in fates):,}"


def sanitized(found: Found) -> str:
    if found["sanitizer_findings"] is None:
        return "not run"
    return f"{found['sanitizer_findings']:,} ({', '.join(found['sanitizers'])})"


def left(what: str) -> Callable[[Found], str]:
    """A cell: what a call or a compilation has left in memory."""

    def cell(found: Found) -> str:
        host, device = (found[f"{where}_bytes_a_{what}"] for where in ("host", "device"))
        if host is None:
            return "not run"
        about = found["machine"]
        return f"{host:,.0f} B" if about and about["platform"] == "cpu" else f"{host:,.0f} B, devices {device:,.0f} B"

    return cell


ROWS: tuple[tuple[str, Callable[[Found], str]], ...] = (
    ("launches of random programs", number("launches", "programs", text="{} of {}")),
    ("&emsp;of these with a rank that is late, with stalled workers", number("late", "stalled", text="{}, {}")),
    ("&emsp;rounds, and of these with epochs that wrap around", number("rounds", "wrapping", text="{}, {}")),
    ("&emsp;launches with a wrong element", number("wrong")),
    ("&emsp;hung: a wait past its bound, or silence", number("hung")),
    ("&emsp;other errors, crashes", number("errors", "crashed", text="{}, {}")),
    ("tests in company: other programs, threads, graphs, callbacks ...", number("company_tests")),
    ("&emsp;failed", number("company_failed")),
    ("calls and compilations, memory watched", number("leak_calls", "leak_compilations", text="{} and {}")),
    ("&emsp;leaks", number("leaks")),
    ("&emsp;left by a call", left("call")),
    ("&emsp;left by a compilation", left("compilation")),
    ("processes killed while their peer waits", number("peers_killed")),
    ("processes stopped", number("peers_stopped")),
    ("ranks whose program lacks a call", number("peers_absent")),
    ("&emsp;an error in time that names op, rank, peer, tile and epoch", reported),
    ("&emsp;the slowest, s", number("slowest_report_s")),
    ("random inputs to what decodes calls", number("fuzz_inputs")),
    ("&emsp;crashes, and what decoded but can't be planned", number("fuzz_crashes")),
    ("findings of sanitizers", sanitized),
    ("&emsp;launches under compute-sanitizer", number("sanitized_launches")),
    (
        "states of the protocol's model, none wrong",
        number("protocol_states", "protocol_programs", text="{} of {} programs"),
    ),
    (
        "&emsp;broken variants that it finds",
        number("protocol_broken_variants_found", "protocol_broken_variants", text="{} of {}"),
    ),
)


def table(every: Sequence[Found]) -> str:
    lines = [markdown_row(["", *map(machine, every)]), markdown_row(["---", *["---:"] * len(every)])]
    lines += [markdown_row([title, *(cell(found) for found in every)]) for title, cell in ROWS]
    lines.append("")
    for found in every:
        named = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
        lines.append(f"{machine(found)}: {named}.")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    actions = parser.add_subparsers(dest="action", required=True)
    collecting = actions.add_parser("collect", help="what runs have left, in one JSON file")
    collecting.add_argument("--logs", type=pathlib.Path, metavar="FOLDER")
    collecting.add_argument("--with", dest="before", type=pathlib.Path, metavar="FILE.json", help="what was collected")
    collecting.add_argument("--tests", type=pathlib.Path, nargs="+", default=[], metavar="LOG")
    collecting.add_argument("--out", type=pathlib.Path, required=True)
    reporting = actions.add_parser("report", help="the table")
    reporting.add_argument("results", type=pathlib.Path, nargs="+")
    how = reporting.add_mutually_exclusive_group()
    how.add_argument("--update", type=pathlib.Path, metavar="FILE.md")
    how.add_argument("--check", type=pathlib.Path, metavar="FILE.md")
    options = parser.parse_args(arguments)
    if options.action == "collect":
        before = None if options.before is None else json.loads(options.before.read_text())
        options.out.write_text(json.dumps(collect(options.logs, options.tests, before), indent=1) + "\n")
        return
    text = table([json.loads(path.read_text()) for path in options.results])
    path = options.update or options.check
    if path is None:
        print(text, end="")
        return
    had = path.read_text()
    new = with_report(had, {"reliability": text}, str(path))
    if options.update is not None:
        path.write_text(new)
    elif new != had:
        sys.exit(f"{path}: not what `python -m benchmarks.reliability report ... --update {path}` would write")


if __name__ == "__main__":
    main()
