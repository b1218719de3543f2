"""Tunes the ten shapes, then times what autotune found against the cost model's plans; writes JSON.

    python -m benchmarks.tune --out FILE.json [--suite ten] [--seconds 100]

The gain isn't autotune's own number, which is the best of several noisy ones, but that of rounds run afterwards, in
which both plans and XLA take turns. What was found is kept where ENTWINE_CACHE_DIR says; that file has the format of
the tables that ship with the package (entwine_jax/tuned).
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import entwine_jax
from benchmarks import chains, rounds
from benchmarks.chains import AXIS
from benchmarks.collective_matmul import machine, progress, versions, write
from benchmarks.shapes import MOST_CALLS, SUITES, TINY, Shape
from entwine_jax import Config


def call(shape: Shape, strategy: str, tuned: bool) -> chains.Call:
    op, config = getattr(entwine_jax, shape.op), Config(tuned=tuned)
    return lambda x, w: op(x, w, AXIS, strategy=strategy, config=config)


def tune(shape: Shape, mesh: Mesh, seconds: float) -> tuple[entwine_jax.Tuned, float]:
    """What autotune found, and how long it took."""
    layout = chains.collective_layout(shape, mesh.size)
    specs = layout.x_spec, layout.w_spec
    mapped = jax.shard_map(call(shape, "auto", True), mesh=mesh, in_specs=specs, out_specs=layout.y_spec)
    operands = (jax.ShapeDtypeStruct(each, layout.dtype) for each in (layout.x_shape, layout.w_shape))
    start = time.perf_counter()
    (row,) = entwine_jax.autotune(mapped, *operands, seconds=seconds, again=True)
    return row, time.perf_counter() - start


def compare(shape: Shape, mesh: Mesh, count: int, sample_seconds: float) -> dict[str, Any]:
    """The cost model's plan, the tuned one and XLA in turns, all checked against XLA."""
    layout, calls = chains.collective_layout(shape, mesh.size), shape.calls(MOST_CALLS)
    programs = chains.Chains(shape, mesh, calls)
    for name, each in (
        ("xla", call(shape, "xla", False)),
        ("model", call(shape, "fused", False)),
        ("tuned", call(shape, "fused", True)),
    ):
        programs.add(name, layout, chains.per_rank_program(layout, mesh, calls, each))
    error = max(programs.compare(name, "xla", "before") for name in ("model", "tuned"))
    samplers = programs.samplers()
    repeats = {name: rounds.repeats_for(sampler, sample_seconds) for name, sampler in samplers.items()}
    samples = rounds.sample_rounds(samplers, repeats, count, str(shape))
    found = {f"{name}_ms": statistics.median(each) / calls * 1e3 for name, each in samples.items()}
    return {
        **found,
        "gain": rounds.paired(samples["model"], samples["tuned"]),
        "xla_over_tuned": rounds.paired(samples["xla"], samples["tuned"]),
        "spread": {name: rounds.spread(each) for name, each in samples.items()},
        "error": error,
    }


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--suite", choices=("ten", "small", "all_reduce", "decode"), default="ten")
    parser.add_argument("--seconds", type=float, default=100.0, help="for autotune, of all shapes together")
    parser.add_argument("--rounds", type=int, default=20, help="of the comparison; 0 leaves it out")
    parser.add_argument("--platform", help="for example cpu; by default JAX's own choice")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rounds: a smoke test for any machine")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    shapes = TINY if options.tiny else SUITES[options.suite][options.suite]
    devices = jax.devices(options.platform)
    mesh = Mesh(np.array(devices), (AXIS,))
    shapes = tuple(shape for shape in shapes if shape.op == "matmul_all_reduce" or shape.m % mesh.size == 0)
    about: dict[str, Any] = {"machine": machine(devices), "versions": versions(), "rows": []}
    left = options.seconds
    for i, shape in enumerate(shapes):
        row, took = tune(shape, mesh, max(1.0, left / (len(shapes) - i)))
        left -= took
        plan = None if row.plan is None else dataclasses.asdict(row.plan)
        about["rows"].append(
            {"op": shape.op, "m": shape.m, "n": shape.n, "k": shape.k, "ranks": mesh.size, "seconds": took}
            | {"status": row.status, "strategy": row.strategy, "plan": plan, "shown": row.shown, "tried": row.tried}
        )
        progress(f"{shape}: {row.strategy} {row.shown}, {len(row.tried)} tried in {took:.1f} s ({row.status})")
    about["seconds"] = sum(row["seconds"] for row in about["rows"])
    write(options.out, about)
    progress(f"tuned {len(shapes)} shapes in {about['seconds']:.0f} s")
    for shape, row in zip(shapes, about["rows"] if options.rounds else (), strict=False):
        count, sample_seconds = (2, 0.0) if options.tiny else (options.rounds, rounds.SAMPLE_SECONDS)
        row.update(compare(shape, mesh, count, sample_seconds))
        write(options.out, about)
        times = "  ".join(f"{name} {row[f'{name}_ms']:.4f}" for name in ("model", "tuned", "xla"))
        progress(f"{shape}: {times} ms  gain {row['gain']:.3f}  xla/tuned {row['xla_over_tuned']:.3f}  {row['shown']}")
    if options.rounds:
        gains = [row["gain"] for row in about["rows"]]
        about["geometric_mean_gain"] = rounds.geometric_mean(gains)
        write(options.out, about)
        progress(
            f"tune: {len(gains)} shapes in {about['seconds']:.0f} s, gain over the cost model's plans"
            f" {about['geometric_mean_gain']:.3f} (geomean), {min(gains):.3f} to {max(gains):.3f}"
        )


if __name__ == "__main__":
    main()
