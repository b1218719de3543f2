"""Times products of one x under automatic sharding, queries with keys and values, gate with up; writes JSON and prints
a table.

    python -m benchmarks.several_weights --out FILE.json [--rounds 14]

All devices of this process are one team; x's rows and the columns of each w and y are sharded over it, and a program
computes all products, or also all gradients of a sum of their squares, which lie as what they are gradients of:

* `together`: `collective_matmul` of all weights
* `apart`: `collective_matmul` of each
* `auto`: the same under strategy "auto", which knows of the others
* `xla`: x @ w of each, partitioned by XLA, which gathers x once for all

Variants take turns in rounds of balanced random orders, and ratios are taken within a round (rounds.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import pathlib
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from benchmarks import chains, collective_matmul, mlp_fwd_bwd, rounds
from benchmarks.chains import AXIS

VARIANTS = ("together", "apart", "auto", "xla")


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    m: int
    k: int
    columns: tuple[int, ...]  # of one rank


CASES = (
    Case("q, k, v", 8192, 8192, (1024, 128, 128)),
    Case("gate, up", 8192, 8192, (3584, 3584)),
    Case("q, k, v", 4096, 4096, (2048, 512, 512)),
)
TINY = (Case("q, k, v", 64, 32, (16, 8, 8)),)


def products(variant: str, x: jax.Array, ws: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    if variant == "together":
        return entwine_jax.collective_matmul(x, ws, strategy="fused")
    if variant != "xla":
        strategy = "fused" if variant == "apart" else "auto"
        return tuple(entwine_jax.collective_matmul(x, w, strategy=strategy) for w in ws)
    return tuple(x @ w for w in ws)


def programs(variant: str, mesh: Mesh, count: int) -> dict[str, jax.stages.Wrapped]:
    """Of x and so many weights."""
    rows, columns = (NamedSharding(mesh, spec) for spec in (P(AXIS, None), P(None, AXIS)))

    def spread(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        return [jax.lax.with_sharding_constraint(y, columns) for y in products(variant, x, ws)]

    def loss(x: jax.Array, *ws: jax.Array) -> jax.Array:
        return sum((jnp.sum(y.astype(jnp.float32) ** 2) for y in spread(x, *ws)), jnp.float32(0))

    gradients = jax.grad(loss, tuple(range(1 + count)))
    return {
        "forward": jax.jit(spread),
        "forward_backward": jax.jit(gradients, out_shardings=(rows, *[columns] * count)),
    }


def measure(case: Case, mesh: Mesh, count: int, sample_seconds: float) -> list[dict[str, Any]]:
    draw = functools.partial(chains.random_arrays, mesh, count=1)
    (x,) = draw(P(AXIS, None), (case.m, case.k), 1.0, seed=0)
    ws = [draw(P(None, AXIS), (case.k, mesh.size * n), case.k**-0.5, seed=1 + i)[0] for i, n in enumerate(case.columns)]
    made, rows = {variant: programs(variant, mesh, len(ws)) for variant in VARIANTS}, []
    for kind in mlp_fwd_bwd.KINDS:
        runs = {variant: made[variant][kind].lower(x, *ws).compile() for variant in VARIANTS}
        results = {variant: run(x, *ws) for variant, run in runs.items()}
        ours = [name for name in VARIANTS if name != "xla"]
        errors = {name: mlp_fwd_bwd.check(f"{case.name}, {name}", results[name], results["xla"]) for name in ours}
        results.clear()
        samplers = {
            variant: functools.partial(chains.seconds, functools.partial(run, x, *ws)) for variant, run in runs.items()
        }
        repeats = {name: rounds.repeats_for(each, sample_seconds) for name, each in samplers.items()}
        samples = rounds.sample_rounds(samplers, repeats, count, f"{kind} {case}")
        rows.append(
            {
                "suite": "several_weights",
                "kind": kind,
                **dataclasses.asdict(case),
                "ranks": mesh.size,
                "dtype": "bfloat16",
                "ms": {name: statistics.median(each) * 1e3 for name, each in samples.items()},
                "over_together": {name: 1 / rounds.paired(samples["together"], samples[name]) for name in VARIANTS[1:]},
                "spread": {name: rounds.spread(each) for name, each in samples.items()},
                "error": errors,
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    names = "at once | one by one | the same, auto | XLA | one by one / at once | auto / at once | XLA / at once"
    lines = [f"| products | m, k | columns of one rank | pass | {names} |", f"|{' --- |' * 4}{' ---: |' * 7}"]
    for row in rows:
        ms, over = row["ms"], row["over_together"]
        lines.append(
            f"| {row['name']} | {row['m']}, {row['k']} | {', '.join(map(str, row['columns']))} | "
            f"{row['kind'].replace('_', ' and ')} | {' | '.join(f'{ms[name]:.3f}' for name in VARIANTS)} | "
            f"{over['apart']:.2f} | {over['auto']:.2f} | **{over['xla']:.2f}** |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, default=14)
    parser.add_argument("--platform", help="for example cpu; by default JAX's own choice")
    parser.add_argument("--tiny", action="store_true", help="a small case and few rounds: a smoke test for any machine")
    options = parser.parse_args(arguments)
    devices = jax.devices(options.platform)
    mesh = Mesh(np.array(devices), (AXIS,))
    about: dict[str, Any] = {
        "machine": collective_matmul.machine(devices),
        "versions": collective_matmul.versions(),
        "notes": ["milliseconds of a program, medians; ratios are medians of those within each round"],
        "rows": [],
    }
    for case in TINY if options.tiny else CASES:
        few = options.tiny
        about["rows"] += measure(case, mesh, 2 if few else options.rounds, 0.0 if few else rounds.SAMPLE_SECONDS)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(about, indent=1) + "\n")
        print(f"{case}: {about['rows'][-2]['ms']}, {about['rows'][-1]['ms']}", file=sys.stderr)
    print(table(about["rows"]))


if __name__ == "__main__":
    main()
