"""Markdown tables and plots from the JSON of a benchmark, for README.md and docs/performance.md.

python -m benchmarks.report FILE.json                             prints the tables
python -m benchmarks.report FILE.json --update README.md ...      rewrites what is between the markers in these files
python -m benchmarks.report FILE.json --check README.md ...       fails if that isn't what it would write
python -m benchmarks.report FILE.json --plots docs                writes PNG plots (needs matplotlib: the extra `bench`)

What lies beside FILE.json is reported too: FILE_peers.json (a run with peers), FILE_epilogues.json and
FILE_strategies.json (of these suites), FILE_mlp.json, FILE_several.json, FILE_gemm.json, FILE_timeline.json and
FILE_transformer.json (of examples/transformer.py).

A file has one or more of the blocks, each between <!-- NAME:begin --> and <!-- NAME:end -->: `benchmark` (the ten
shapes), `benchmark-suites` (the other suites, and strategy "auto"), `benchmark-losing`, `epilogues` and `strategies`
(these suites), and `peers`, `mlp`, `several`, `gemm` and `transformer` for the other files.
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks import mlp_fwd_bwd, plots, several_weights, timeline
from benchmarks.rounds import geometric_mean
from benchmarks.rows import (
    SUITE_TITLES,
    TITLES,
    Row,
    best_over_ours,
    bound_over_ours,
    headline,
    label,
    link_is_modelled,
    normalised,
    of_strategy,
    ours_over_gemm,
    over_ours,
    peer_title,
    widest_spread,
    xla_over_ours,
)


def markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


BEGIN, END = markers("benchmark")


def markdown_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def milliseconds(value: float) -> str:
    return f"{value:.3f}" if value >= 0.1 else f"{value:.4f}"


def speed(ratio: float) -> str:
    return f"**{ratio:.2f}**" if ratio >= 1 else f"{ratio:.2f} (slower)"


def table(rows: Sequence[Row]) -> list[str]:
    """One op's rows, all of them, in the order they were measured."""
    peers = sorted({peer for row in rows for peer in row["peers"]})
    best = ["best / ours"] if peers else []
    bf16 = any("ours_over_bf16" in row for row in rows)
    headings = [
        "m, n, k of one rank",
        "ours",
        "XLA",
        *map(peer_title, peers),
        *(["ours in bfloat16"] if bf16 else []),
        "GEMM alone",
        "link alone",
        "XLA / ours",
        *best,
        *(["bfloat16 / float8"] if bf16 else []),
        "ours / GEMM",
        "bound / ours",
    ]
    lines = [markdown_row(headings), markdown_row(["---", *["---:"] * (len(headings) - 1)])]
    for row in rows:
        cells = [
            label(row),
            milliseconds(row["ours_ms"]),
            milliseconds(row["xla_ms"]),
            *(milliseconds(row["peers"][peer]) if peer in row["peers"] else "" for peer in peers),
            *([milliseconds(row["bf16_ms"]) if "bf16_ms" in row else ""] if bf16 else []),
            milliseconds(row["gemm_ms"]),
            milliseconds(row["link_ms"]) + ("\\*" if link_is_modelled(row) else ""),
            speed(xla_over_ours(row)),
            *([speed(best_over_ours(row))] if peers else []),
            *([speed(1 / row["ours_over_bf16"]) if "bf16_ms" in row else ""] if bf16 else []),
            f"{ours_over_gemm(row):.2f}",
            f"{bound_over_ours(row):.2f}",
        ]
        lines.append(markdown_row(cells))
    return lines


def tables(rows: Sequence[Row]) -> list[str]:
    lines = []
    for op, title in TITLES.items():
        of_op = [row for row in rows if row["op"] == op]
        if of_op:
            lines += ["", f"**{title}**", "", *table(of_op)]
    return lines


def summary(rows: Sequence[Row]) -> str:
    over_xla = [xla_over_ours(row) for row in rows]
    text = (
        f"faster than XLA on {sum(ratio > 1 for ratio in over_xla)} of {len(rows)} shapes, geometric mean"
        f" {geometric_mean(over_xla):.2f}x XLA's speed"
    )
    if any(row["peers"] for row in rows):
        best = [best_over_ours(row) for row in rows]
        text += (
            f" and {geometric_mean(best):.2f}x that of the fastest other on each shape ({min(best):.2f}x at the least)"
        )
    return f"{text}, {geometric_mean([ours_over_gemm(row) for row in rows]):.2f}x the time of the GEMM alone."


def footnote(results: dict[str, Any], rows: Sequence[Row]) -> str:
    largest, middle = widest_spread(rows)
    named = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    modelled = "\\* Modelled, the rest is measured. " if any(map(link_is_modelled, rows)) else ""
    return (
        f"{modelled}Bound: the larger of GEMM alone and link alone. Interquartile range: {100 * middle:.1f} % of the"
        f" median in the middle, {100 * largest:.1f} % at most. {named}."
    )


def report(results: dict[str, Any]) -> str:
    """The block `benchmark`."""
    rows, machine = headline(results["rows"]), results["machine"]
    dtypes = ", ".join(sorted({row["dtype"] for row in rows}))
    lines = [f"{machine['devices']} x {machine['accelerator']}, {dtypes}, milliseconds (medians): {summary(rows)}"]
    return "\n".join([*lines, *tables(rows), "", footnote(results, rows)]) + "\n"


def auto_table(rows: Sequence[Row]) -> list[str]:
    headings = ["op", "m, n, k of one rank", "auto takes", "auto", "XLA", "XLA / auto"]
    lines = [markdown_row(headings), markdown_row(["---", "---", "---", "---:", "---:", "---:"])]
    for row in rows:
        times = [milliseconds(row["ours_ms"]), milliseconds(row["xla_ms"])]
        taken = row.get("chosen", "")
        lines.append(markdown_row([TITLES[row["op"]], label(row), taken, *times, f"{xla_over_ours(row):.2f}"]))
    return lines


def suites(results: dict[str, Any]) -> str:
    """The block `benchmark-suites`: all that `benchmark` doesn't have."""
    shown, every = headline(results["rows"]), results["rows"]
    lines: list[str] = []
    rest = [row for row in of_strategy(every, "fused") if row not in shown]
    for suite in dict.fromkeys(row["suite"] for row in rest):
        rows = [row for row in rest if row["suite"] == suite]
        text = summary(rows)
        lines += ["", f"### {SUITE_TITLES.get(suite, suite)}", "", text[:1].upper() + text[1:], *tables(rows)]
        lines += ["", footnote(results, rows)]
    auto = of_strategy(every, "auto")
    if auto:
        ratios = [xla_over_ours(row) for row in auto]
        lines += [
            "",
            '### Under `strategy="auto"`',
            "",
            f"XLA's time over that of `auto`: {min(ratios):.3f} at the least, {geometric_mean(ratios):.3f} in the"
            f" geometric mean of {len(auto)} rows.",
            "",
            *auto_table(auto),
        ]
    return "\n".join(lines[1:] or ["Only the ten shapes were measured."]) + "\n"


def circumstances(row: Row, title: str, ratio: float) -> str:
    """What the numbers themselves say about why."""
    if title == "XLA" and row.get("chosen") == "xla":
        return "the same program twice, so this is noise"
    link_share = row["link_ms"] / row["gemm_ms"]
    parts = [
        f"ours is {ours_over_gemm(row):.2f}x the GEMM alone and the bound, the"
        f" {'link' if link_share > 1 else 'GEMM'}, is {bound_over_ours(row):.2f} of it"
    ]
    if 1 - ratio < row["spread"]["ours"]:
        parts.append(f"less apart than our samples are spread ({100 * row['spread']['ours']:.1f} %)")
    if link_share > 0.8:
        parts.append(f"the link alone needs {link_share:.2f} of the GEMM's time, so there is little to hide it behind")
    if row["m"] <= 512:
        parts.append("few rows: reading w and fixed costs weigh more than what can be overlapped")
    return "; ".join(parts)


def losing(results: dict[str, Any]) -> str:
    """The block `benchmark-losing`: every row in which somebody is faster, and by how much."""
    lines, rows = [], results["rows"]
    for row in rows:
        for title, ratio in over_ours(row).items():
            if ratio >= 1:
                continue
            own = normalised(row, title)
            aside = "" if own is None else f" ({own:.3f} with each divided by the GEMM of its own process)"
            how = "" if row["strategy"] == "fused" else f', `strategy="{row["strategy"]}"` (took {row["chosen"]})'
            lines.append(
                f"* {TITLES[row['op']]} {label(row)}{how}: {title} takes {ratio:.3f} of our time{aside};"
                f" {circumstances(row, title, ratio)}."
            )
    compared = ["XLA", *map(peer_title, sorted({peer for row in rows for peer in row["peers"]}))]
    against = f"Of {len(rows)} rows, against {', '.join(compared)}"
    return "\n".join([f"{against}: {'none.' if not lines else ''}".rstrip(), *(["", *lines] if lines else [])]) + "\n"


def transformer(results: dict[str, Any]) -> str:
    """The block `transformer`, from the JSON of examples/transformer.py: a step of a model, ours and XLA's."""
    timing, devices = results["timing"], math.prod(results["mesh"].values())
    sizes = timing["sizes"]
    lines = [
        f"{sizes['layers']} layers of Llama-3-70B's width, {sizes['width']} x {sizes['hidden']} hidden a GPU,"
        f" {sizes['batch']} x {sizes['length']} tokens, {sizes['dtype']}, tensor and sequence parallel over"
        f" {devices} x {results['device']}; medians of {timing['rounds']} interleaved rounds:",
        "",
        markdown_row(["", "ours, ms", "XLA, ms", "XLA / ours"]),
        markdown_row(["---", "---:", "---:", "---:"]),
    ]
    for row in timing["rows"]:
        ms = row["median_ms"]
        lines.append(markdown_row([row["pass"], f"{ms['fused']:.2f}", f"{ms['xla']:.2f}", f"**{row['speedup']:.2f}**"]))
    return "\n".join(lines) + "\n"


def mlp(results: dict[str, Any]) -> str:
    """The block `mlp`, from the JSON of benchmarks/mlp_fwd_bwd.py."""
    return f"{mlp_fwd_bwd.table(results['rows'])}\n"


def several(results: dict[str, Any]) -> str:
    """The block `several`, from the JSON of benchmarks/several_weights.py."""
    return f"{several_weights.table(results['rows'])}\n"


def gemm(results: dict[str, Any]) -> str:
    """The block `gemm`, from the JSON of benchmarks/gemm.cu."""
    lines = [
        markdown_row(["m, n, k", "tile", "ours", "cuBLAS", "cuBLAS / ours", "TFLOP/s"]),
        markdown_row(["---", "---", "---:", "---:", "---:", "---:"]),
    ]
    for row in results["rows"]:
        tile = "few rows" if row["few_rows"] else f"{row['tile_m']} x {row['tile_n']}"
        ms = [milliseconds(row["ours_ms"]), milliseconds(row["cublas_ms"])]
        shape = f"{row['m']}, {row['n']}, {row['k']}"
        lines.append(markdown_row([shape, tile, *ms, speed(row["cublas_over_ours"]), f"{row['tflops']:.0f}"]))
    return "\n".join(lines) + "\n"


def epilogues(results: dict[str, Any]) -> str:
    """The block `epilogues`, of that suite."""
    headings = ["op", "m, n, k of one rank", "epilogue", "ours", "ours / none", "XLA", "XLA / none", "XLA / ours"]
    lines = [markdown_row(headings), markdown_row(["---"] * 3 + ["---:"] * 5)]
    for row in results["epilogues"]:
        for name, found in row["epilogues"].items():
            ours, xla = (
                [milliseconds(found[f"{who}_ms"]), f"{found[f'{who}_over_none']:.3f}"] for who in ("ours", "xla")
            )
            lines.append(
                markdown_row([TITLES[row["op"]], label(row), name, *ours, *xla, speed(found["xla_over_ours"])])
            )
    return "\n".join(lines) + "\n"


def side_by_side(results: dict[str, Any]) -> str:
    """The block `strategies`, of that suite: each shape's strategies from the same rounds."""
    rows = [row for row in results["rows"] if row["suite"] == "strategies"]
    names = list(dict.fromkeys(row["strategy"] for row in rows))
    ratios = [f"XLA / {name}" for name in names]
    headings = ["op", "m, n, k of one rank", *names, "XLA", "GEMM alone", "link alone", *ratios]
    lines = [markdown_row(headings), markdown_row(["---"] * 2 + ["---:"] * (len(headings) - 2))]
    shapes: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        shapes.setdefault((row["op"], label(row)), {})[row["strategy"]] = row
    for (op, text), found in shapes.items():
        first = next(iter(found.values()))
        best = min((name for name in found if name != "auto"), key=lambda name: float(found[name]["ours_ms"]))
        ours = [
            f"**{milliseconds(row['ours_ms'])}**" if name == best else milliseconds(row["ours_ms"])
            for name, row in ((name, found[name]) for name in names)
        ]
        others = [milliseconds(first[f"{name}_ms"]) for name in ("xla", "gemm", "link")]
        lines.append(
            markdown_row([TITLES[op], text, *ours, *others, *(speed(xla_over_ours(found[name])) for name in names)])
        )
    for op in dict.fromkeys(op for op, _ in shapes):
        means = [
            geometric_mean([xla_over_ours(row) for row in rows if (row["op"], row["strategy"]) == (op, name)])
            for name in names
        ]
        told = ", ".join(f"{name} {mean:.2f}x" for name, mean in zip(names, means, strict=True))
        lines += ["", f"{TITLES[op]}: XLA's speed in the geometric mean, {told}."]
    if over := [float(row["over_best"]) for row in rows if "over_best" in row]:
        lines += [
            "",
            f"*auto* over the fastest of the others in the same rounds: {geometric_mean(over):.3f} in the mean,"
            f" {max(over):.3f} at most.",
        ]
    return "\n".join([*lines, "", footnote(results, rows)]) + "\n"


# Files beside the main one, and what becomes of them; the main one makes the other blocks.
BESIDE = {
    "peers": report,
    "epilogues": epilogues,
    "strategies": side_by_side,
    "mlp": mlp,
    "several": several,
    "gemm": gemm,
    "transformer": transformer,
}


def beside(path: pathlib.Path, kind: str) -> pathlib.Path:
    return path.with_name(f"{path.stem}_{kind}.json")


def blocks(results: dict[str, Any]) -> dict[str, str]:
    found = {"epilogues": epilogues(results)} if results.get("epilogues") else {}
    rows = [row for row in results["rows"] if row["suite"] != "strategies"]
    if len(rows) < len(results["rows"]):
        found |= {"strategies": side_by_side(results)}
    results = results | {"rows": rows}
    if not rows:
        return found
    return found | {
        "benchmark": report(results),
        "benchmark-suites": suites(results),
        "benchmark-losing": losing(results),
    }


def blocks_beside(path: pathlib.Path) -> dict[str, str]:
    others = {kind: beside(path, kind) for kind in BESIDE}
    return {kind: BESIDE[kind](json.loads(other.read_text())) for kind, other in others.items() if other.exists()}


def with_report(text: str, found: dict[str, str], name: str) -> str:
    """`text` with everything between its markers replaced, whichever it has."""
    had = 0
    for block, body in found.items():
        begin, end = markers(block)
        if begin not in text and end not in text:
            continue
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
            raise SystemExit(f"{name}: needs one {begin} and, after it, one {end}")
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{body}{end}{rest.split(end)[1]}"
        had += 1
    if not had:
        raise SystemExit(f"{name}: needs one {BEGIN} and, after it, one {END}, or another block's")
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=pathlib.Path, help="JSON written by benchmarks.collective_matmul")
    parser.add_argument("--plots", type=pathlib.Path, metavar="FOLDER", help="write the plots there, too")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--update", type=pathlib.Path, nargs="+", default=[], metavar="FILE.md")
    action.add_argument("--check", type=pathlib.Path, nargs="+", default=[], metavar="FILE.md")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    found = blocks(results) | blocks_beside(options.results)
    if not options.update and not options.check:
        print("\n".join(found.values()), end="")
    for path in options.update:
        path.write_text(with_report(path.read_text(), found, str(path)))
    if options.plots is not None:
        for path in plots.write(results, options.plots):
            print(path, file=sys.stderr)
        if (traced := beside(options.results, "timeline")).exists():
            timeline.plot(json.loads(traced.read_text()), options.plots)
    stale = [str(path) for path in options.check if path.read_text() != with_report(path.read_text(), found, str(path))]
    if stale:
        sys.exit(
            f"stale: {' '.join(stale)}; run python -m benchmarks.report {options.results} --update {' '.join(stale)}"
        )


if __name__ == "__main__":
    main()
