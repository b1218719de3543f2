"""The table of measured plans that ships with the package, from suite `strategies` of a benchmark.

    python -m benchmarks.tuned_table benchmarks/results/h200x2_strategies.json           rewrites a file in
        entwine_jax/tuned; with --check it fails if that isn't what it would write

An entry has each strategy's plan and time from rounds that all of them took part in. "auto" stays with "fused" unless
another one was faster by more than these rounds can be wrong, MARGIN.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.rows import Row
from entwine_jax import _config, _measured, _request, _team, _tuned

MARGIN = 1.02
FOLDER = pathlib.Path(__file__).parents[1] / "entwine_jax" / "tuned"


def key(row: Row) -> str:
    """By which a trace on such GPUs asks for the row's call."""
    ranks, op, dtype = row["ranks"], row["op"], jnp.dtype(row["dtype"])
    team = _team.Team(("t",), ranks, tuple(range(ranks)), (), (), "cuda")
    settings = _config.resolve(op, "auto", None)
    request = _request.Request(op, team, False, dtype, None, settings)
    rows = row["m"] // ranks if op == "all_gather_matmul" else row["m"]
    x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((1, rows, row["k"]), (row["k"], row["n"])))
    return _measured.spelled(request, x, w, "peer access")


def entry(rows: Sequence[Row], measured: dict[str, Any]) -> dict[str, Any]:
    """Of one shape's rows, one a strategy."""
    ms = {row["strategy"]: row["ours_ms"] for row in rows}
    plans = {row["strategy"]: row["plan"] for row in rows}
    xla = rows[0]["xla_ms"]
    fastest = min(ms, key=lambda name: float(ms[name]))
    strategy = fastest if ms[fastest] * MARGIN < ms["fused"] else "fused"
    found = {"strategy": "xla" if xla < ms[strategy] else strategy, "xla_ms": xla, "measured": measured}
    for name in ms:
        found |= {f"{name}_ms": ms[name], "plan" if name == "fused" else f"{name}_plan": plans[name]}
    return found


def table(results: dict[str, Any]) -> str:
    """The file's text."""
    versions = results["versions"]
    names = ("jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-cublas")
    measured = {"devices": results["machine"]["devices"], **{name: versions[name] for name in names}}
    shapes: dict[str, list[Row]] = {}
    for row in results["rows"]:
        if row["suite"] == "strategies" and row["strategy"] != "auto":
            shapes.setdefault(key(row), []).append(row)
    entries = {name: entry(rows, measured) for name, rows in shapes.items()}
    return json.dumps(_tuned.file_of(results["machine"]["accelerator"], entries), indent=1, sort_keys=True) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("results", type=pathlib.Path, help="JSON written by benchmarks.collective_matmul")
    parser.add_argument("--check", action="store_true", help="fail if the table isn't what these results make")
    options = parser.parse_args(arguments)
    results = json.loads(options.results.read_text())
    path, text = FOLDER / _tuned.shipped_name(results["machine"]["accelerator"]), table(results)
    if not options.check:
        path.write_text(text)
    elif path.read_text() != text:
        sys.exit(f"stale: {path}; run python -m benchmarks.tuned_table {options.results}")


if __name__ == "__main__":
    main()
