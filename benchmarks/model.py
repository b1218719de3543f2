"""How far the cost model is from a benchmark's measurements, and what it predicts for teams that nobody has measured.

python -m benchmarks.model FILE.json                               prints every measured row beside the model's
python -m benchmarks.model FILE.json --predict                     writes predicted.json beside it: all suites, teams
python -m benchmarks.model FILE.json --update docs/performance.md  rewrites the blocks `model` and `predicted` there
python -m benchmarks.model FILE.json --check docs/performance.md   fails if these aren't what it would write

The block `model` is of FILE.json, `strategies-model` of FILE_strategies.json beside it, if that is there, and
`predicted` of predicted.json. No GPU is needed: `entwine_jax.cost_model`
simulates them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import entwine_jax
from benchmarks.report import markdown_row, milliseconds, speed, with_report
from benchmarks.rounds import geometric_mean
from benchmarks.rows import SUITE_TITLES, TITLES, Row, label, of_strategy
from benchmarks.shapes import SUITES, Shape
from entwine_jax import Config

TEAMS = (2, 4, 8)
# Kernels whose plan had 24 pushers moved less with each: docs/design.md.
OLD_PUSHERS = {24: {"pusher_bytes_per_us": 8.8e3, "unit_bytes": 65536.0}}
# XLA if its NCCL had all of the link, which it has not between two GPUs (206 to 258 GB/s).
WHOLE_LINK = dict.fromkeys(("nccl_bytes_per_us", "nccl_long_bytes_per_us", "nccl_all_reduce_bytes_per_us"), 361000.0)

ASSUMPTIONS = (
    "every GPU sends 361 GB/s and receives as much whatever the number of peers (NVSwitch); measured between two H200s",
    "latencies are those of two GPUs",
    "all ranks start together and no other kernel runs",
    "XLA's NCCL moves 206 to 258 GB/s (all-reduce: 289), as between two GPUs; with more it comes closer to the link,"
    " hence the second ratio, in which it has all 361",
    "float8 tiles take what 16-bit ones with half of k take",
)


def as_measured(row: Row) -> tuple[float, float]:
    """Microseconds, of the row's strategy by the row's own plan, and XLA."""
    plan, strategy = row["plan"], row["strategy"]
    machine = OLD_PUSHERS.get(plan["pushers"]) if (row["op"], strategy) == ("all_gather_matmul", "fused") else None
    sizes = (row["m"], row["n"], row["k"], row["ranks"])
    costs = entwine_jax.cost_model(row["op"], *sizes, dtype=row["dtype"], config=_config(plan), machine=machine)
    return costs[strategy].us, costs["xla"].us


def _config(plan: dict[str, Any]) -> Config:
    """That makes this plan."""
    if plan["few_rows"]:
        return Config(few_rows=True)
    tiles: dict[str, Any] = {name: plan[name] for name in ("tile_m", "tile_n", "raster")}
    if plan.get("engines") or plan.get("comm_sms"):
        return Config(**tiles, comm_sms=plan["comm_sms"], group_waves=plan["group_waves"] or None)
    if plan.get("movers"):
        return Config(**tiles, lead=plan["lead"], comm_sms=2 * plan["movers"])
    return Config(**tiles, **{name: plan[name] for name in ("lead", "transport", "pushers", "copiers")})


def mean_error(ratios: Sequence[float]) -> float:
    """The geometric mean of the larger over the smaller, less one."""
    return math.exp(statistics.fmean(abs(math.log(ratio)) for ratio in ratios)) - 1


def percent(ratio: float) -> str:
    return f"{round(100 * (ratio - 1)):+d} %"


def compared(results: dict[str, Any]) -> str:
    """The block `model`."""
    rows = of_strategy(results["rows"], "fused")
    times = [as_measured(row) for row in rows]
    fused = [us / row["ours_ms"] * 1e-3 for (us, _), row in zip(times, rows, strict=True)]
    xla = [us / row["xla_ms"] * 1e-3 for (_, us), row in zip(times, rows, strict=True)]

    def worst(ratios: list[float]) -> str:
        ratio, row = max(zip(ratios, rows, strict=True), key=lambda both: abs(math.log(both[0])))
        return f"{percent(ratio)} at the worst ({TITLES[row['op']]} {label(row)})"

    lines = [
        f"Of {len(rows)} measured rows the model misses ours by {100 * mean_error(fused):.1f} % in the geometric mean,"
        f" {worst(fused)}, and XLA's by {100 * mean_error(xla):.1f} %, {worst(xla)}.",
        "",
        markdown_row(["op", "m, n, k of one rank", "ours", "predicted", "", "XLA", "predicted", ""]),
        markdown_row(["---", "---", *["---:"] * 6]),
    ]
    for row, (ours_us, xla_us), ours_ratio, xla_ratio in zip(rows, times, fused, xla, strict=True):
        ours = [milliseconds(row["ours_ms"]), milliseconds(ours_us * 1e-3), percent(ours_ratio)]
        others = [milliseconds(row["xla_ms"]), milliseconds(xla_us * 1e-3), percent(xla_ratio)]
        lines.append(markdown_row([TITLES[row["op"]], label(row), *ours, *others]))
    return "\n".join(lines) + "\n"


def compared_strategies(results: dict[str, Any]) -> str:
    """The block `strategies-model`: all three by their own plans."""
    shapes: dict[tuple[str, str], dict[str, tuple[float, float]]] = {}  # milliseconds, measured and predicted
    for row in results["rows"]:
        if row["strategy"] != "auto":
            of_shape = shapes.setdefault((TITLES[row["op"]], label(row)), {})
            of_shape[row["strategy"]] = row["ours_ms"], as_measured(row)[0] * 1e-3
    names = list(dict.fromkeys(name for each in shapes.values() for name in each))
    errors = []
    for name in names:
        ratios = {shape: each[name][1] / each[name][0] for shape, each in shapes.items() if name in each}
        worst = max(ratios, key=lambda shape: abs(math.log(ratios[shape])))
        mean = 100 * mean_error([*ratios.values()])
        errors.append(f"*{name}* {mean:.1f} %, {percent(ratios[worst])} at the worst ({' '.join(worst)})")
    lines = [
        f"In the geometric mean of {len(shapes)} shapes the model misses {'; '.join(errors)}.",
        "",
        markdown_row(["op", "m, n, k of one rank", *(each for name in names for each in (name, "predicted", ""))]),
        markdown_row(["---", "---", *["---:"] * (3 * len(names))]),
    ]
    for shape, each in shapes.items():
        cells: list[str] = []
        for name in names:
            ours, us = each[name]
            cells += [milliseconds(ours), milliseconds(us), percent(us / ours)]
        lines.append(markdown_row([*shape, *cells]))
    return "\n".join(lines) + "\n"


def predict() -> dict[str, Any]:
    """All suites for all teams."""
    rows = []
    for suite, shapes in (SUITES["all"] | SUITES["fp8"]).items():
        rows += [_predicted(suite, shape, ranks) for shape in shapes for ranks in TEAMS]
    return {"teams": TEAMS, "assumptions": ASSUMPTIONS, "rows": rows}


def _numbers(plan: Any) -> dict[str, Any]:
    """Of a fused plan, without what only the other strategies know."""
    fields = dataclasses.asdict(plan)
    others = ("comm_sms", "engines", "group_waves", "far", "movers")
    return {name: fields[name] for name in fields if name not in others}


def _predicted(suite: str, shape: Shape, ranks: int) -> Row:
    dtype = "float8_e4m3fn" if shape.float8 else "bfloat16"
    sizes = (shape.op, shape.m, shape.n, shape.k, ranks)
    costs = entwine_jax.cost_model(*sizes, dtype=dtype)
    whole = entwine_jax.cost_model(*sizes, dtype=dtype, machine=WHOLE_LINK)
    fused, xla = costs["fused"], costs["xla"]
    return {
        "suite": suite,
        **{name: getattr(shape, name) for name in ("op", "m", "n", "k")},
        "dtype": dtype,
        "ranks": ranks,
        "fused_us": round(fused.us, 1),
        "xla_us": round(xla.us, 1),
        "xla_whole_link_us": round(whole["xla"].us, 1),
        "formula_us": {"fused": round(fused.formula_us, 1), "xla": round(xla.formula_us, 1)},
        "link_us": round(fused.link_us, 1),
        "multiply_us": round(fused.multiply_us, 1),
        "plan": _numbers(fused.plan) if fused.plan else None,
    }


def predictions(predicted: dict[str, Any]) -> str:
    """The block `predicted`."""
    rows, teams = predicted["rows"], predicted["teams"]
    lines = ["**Predictions, not measurements.** They assume that", ""]
    lines += [f"* {text};" for text in predicted["assumptions"][:-1]] + [f"* {predicted['assumptions'][-1]}."]
    lines += ["", "Milliseconds; then XLA's time over ours, and the same if NCCL had all of the link."]
    for suite in dict.fromkeys(row["suite"] for row in rows):
        of_suite = [row for row in rows if row["suite"] == suite]
        means = [
            f"{geometric_mean([_over(row) for row in of_suite if row['ranks'] == ranks]):.2f} to"
            f" {geometric_mean([_over(row, 'xla_whole_link_us') for row in of_suite if row['ranks'] == ranks]):.2f}"
            f" on {ranks}"
            for ranks in teams
        ]
        lines += [
            "",
            f"**{SUITE_TITLES.get(suite, suite)}**: geometric mean of XLA / ours {', '.join(means)} GPUs.",
            "",
            markdown_row(["op", "m, n, k of one rank", *(f"{ranks} GPUs" for ranks in teams)]),
            markdown_row(["---", "---", *["---:"] * len(teams)]),
        ]
        shapes: dict[tuple[str, str], list[Row]] = {}
        for row in of_suite:
            shapes.setdefault((TITLES[row["op"]], label(row)), []).append(row)
        for names, each in shapes.items():
            cells = [
                f"{milliseconds(row['fused_us'] * 1e-3)}, {speed(_over(row))}, {speed(_over(row, 'xla_whole_link_us'))}"
                for row in each
            ]
            lines.append(markdown_row([*names, *cells]))
    return "\n".join(lines) + "\n"


def _over(row: Row, name: str = "xla_us") -> float:
    return float(row[name] / row["fused_us"])


def disagreements(predicted: dict[str, Any]) -> list[str]:
    """Where the simulation and the closed form, by which strategy "auto" decides, name different winners."""
    found = []
    for row in predicted["rows"]:
        formula = row["formula_us"]
        if (row["fused_us"] < row["xla_us"]) != (formula["fused"] < formula["xla"]):
            found.append(
                f"{row['op']} {label(row)} {row['dtype']} on {row['ranks']}: simulated {row['fused_us']} us against"
                f" XLA's {row['xla_us']}, by the formula {formula['fused']} against {formula['xla']}"
            )
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=pathlib.Path, help="JSON written by benchmarks.collective_matmul")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--predict", action="store_true", help="write predicted.json beside it")
    action.add_argument("--update", type=pathlib.Path, nargs="+", default=[], metavar="FILE.md")
    action.add_argument("--check", type=pathlib.Path, nargs="+", default=[], metavar="FILE.md")
    options = parser.parse_args(arguments)
    beside = options.results.with_name("predicted.json")
    if options.predict:
        predicted = predict()
        beside.write_text(json.dumps(predicted, indent=1) + "\n")
        for text in disagreements(predicted):
            print(text, file=sys.stderr)
        return
    found = {"model": compared(json.loads(options.results.read_text()))}
    strategies = options.results.with_name(f"{options.results.stem}_strategies.json")
    if strategies.exists():
        found["strategies-model"] = compared_strategies(json.loads(strategies.read_text()))
    if beside.exists():
        found["predicted"] = predictions(json.loads(beside.read_text()))
    if not options.update and not options.check:
        print(found["model"], end="")
    for path in options.update:
        path.write_text(with_report(path.read_text(), found, str(path)))
    stale = [str(path) for path in options.check if path.read_text() != with_report(path.read_text(), found, str(path))]
    if stale:
        sys.exit(
            f"stale: {' '.join(stale)}; run python -m benchmarks.model {options.results} --predict, and then --update"
            f" {' '.join(stale)}"
        )


if __name__ == "__main__":
    main()
