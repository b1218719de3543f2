"""Markdown tables from the JSON of a benchmark, for README.md and the docs.

python -m benchmarks.report FILE.json                             prints them
python -m benchmarks.report FILE.json --update README.md ...      rewrites what is between the markers in these files
python -m benchmarks.report FILE.json --check README.md ...       fails if that isn't what it would write
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

BEGIN, END = "<!-- benchmark:begin -->", "<!-- benchmark:end -->"

TITLES = {
    "all_gather_matmul": "all-gather + matmul",
    "matmul_reduce_scatter": "matmul + reduce-scatter",
    "matmul_all_reduce": "matmul + all-reduce",
}


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table(rows: Sequence[dict[str, Any]], peers: Sequence[str]) -> list[str]:
    """One op's rows, all of them, in the order they were measured."""
    headings = ["m, n, k of one rank", "ours", "XLA", *peers, "GEMM alone", "link alone*", "XLA / ours", "ours / GEMM"]
    lines = [markdown_row(headings), markdown_row(["---", *["---:"] * (len(headings) - 1)])]
    for row in rows:
        ratio = row["xla_ms"] / row["ours_ms"]
        cells = [
            f"{row['m']}, {row['n']}, {row['k']}",
            f"{row['ours_ms']:.3f}",
            f"{row['xla_ms']:.3f}",
            *(f"{row['peers'][peer]:.3f}" if peer in row["peers"] else "" for peer in peers),
            f"{row['gemm_ms']:.3f}",
            f"{row['link_ms']:.3f}",
            f"**{ratio:.2f}**" if ratio > 1 else f"{ratio:.2f} (slower)",
            f"{row['ours_ms'] / row['gemm_ms']:.2f}",
        ]
        lines.append(markdown_row(cells))
    return lines


def report(results: dict[str, Any]) -> str:
    rows: list[dict[str, Any]] = results["rows"]
    machine, versions = results["machine"], results["versions"]
    faster = sum(row["ours_ms"] < row["xla_ms"] for row in rows)
    over_xla = geometric_mean([row["xla_ms"] / row["ours_ms"] for row in rows])
    over_gemm = geometric_mean([row["ours_ms"] / row["gemm_ms"] for row in rows])
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    lines = [
        f"{machine['devices']} x {machine['accelerator']}, {dtypes}, milliseconds (medians):"
        f" faster than XLA on {faster} of {len(rows)} shapes, geometric mean {over_xla:.2f}x XLA's speed,"
        f" {over_gemm:.2f}x the time of the GEMM alone.",
    ]
    for op, title in TITLES.items():
        of_op = [row for row in rows if row["op"] == op]
        if of_op:
            peers = sorted({peer for row in of_op for peer in row["peers"]})
            lines += ["", f"**{title}**", "", *table(of_op, peers)]
    named = ", ".join(f"{name} {version}" for name, version in versions.items())
    widest = max(spread for row in rows for spread in row["spread"].values())
    lines += [
        "",
        f"\\* Modelled, the rest is measured. Interquartile range at most {100 * widest:.1f} % of the median. {named}.",
    ]
    return "\n".join(lines) + "\n"


def with_report(text: str, block: str, name: str) -> str:
    """`text` with everything between its markers replaced."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise SystemExit(f"{name}: needs one {BEGIN} and, after it, one {END}")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{block}{END}{rest.split(END)[1]}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=pathlib.Path, help="JSON written by benchmarks.collective_matmul")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--update", type=pathlib.Path, nargs="+", default=[], metavar="FILE.md")
    action.add_argument("--check", type=pathlib.Path, nargs="+", default=[], metavar="FILE.md")
    options = parser.parse_args(arguments)
    block = report(json.loads(options.results.read_text()))
    if not options.update and not options.check:
        print(block, end="")
    for path in options.update:
        path.write_text(with_report(path.read_text(), block, str(path)))
    stale = [str(path) for path in options.check if path.read_text() != with_report(path.read_text(), block, str(path))]
    if stale:
        sys.exit(
            f"stale: {' '.join(stale)}; run python -m benchmarks.report {options.results} --update {' '.join(stale)}"
        )


if __name__ == "__main__":
    main()
