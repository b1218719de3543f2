"""Times a sequence-parallel SwiGLU MLP, forward and forward with backward, at Llama-3-70B's widths split 8 ways; writes
JSON and prints a table.

    python -m benchmarks.mlp_fwd_bwd --out FILE.json [--tokens 4096,8192] [--rounds 20]

All devices of this process are one team. Every variant computes the same from the same arrays:

* `ours`: one gated kernel writes silu(gate) * up alone; differentiated, one kernel writes gate and up, and the backward
  pass gathers rows again, beside the one kernel that gives dx
* `ours_save`: the same with the gathered rows kept for the weight gradients, as XLA keeps them
* `ours_both`: one kernel that writes gate and up, also where no gradient is taken
* `ours_each`: a kernel for each product and for each one's dx, which XLA adds
* `xla`: one all_gather, dots, a psum_scatter; JAX's derivatives of these lines
* `alone`: the same dots without any collective, of a gathered x and to a result that isn't summed: what is left of the
  time if communication is free

A program is a chain of layers, each with weights of its own and its gradients, so that nothing can be merged or
hoisted; variants take turns in rounds of balanced random orders, and ratios are taken within a round (rounds.py).
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
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from benchmarks import chains, collective_matmul, rounds
from benchmarks.chains import AXIS, relative_error

KINDS = ("forward", "forward_backward")
VARIANTS = ("ours", "ours_save", "ours_both", "ours_each", "xla", "alone")
# Each rounds its own intermediate results to bfloat16.
TOLERANCE = 3e-2

Weights = tuple[jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Sizes:
    tokens: int
    width: int = 8192
    hidden: int = 3584  # of one rank
    layers: int = 2


def layer(variant: str, x: jax.Array, weights: Weights) -> jax.Array:
    """One rank's part."""
    gate, up, down = weights
    if variant in ("ours", "ours_save"):
        options: dict[str, Any] = {"residuals": "save" if variant == "ours_save" else "regather", "strategy": "fused"}
        h = entwine_jax.all_gather_matmul(x, (gate, up), AXIS, gated=True, activation="silu", **options)
        return entwine_jax.matmul_reduce_scatter(h, down, AXIS, strategy="fused")
    if variant == "ours_both":
        a, b = entwine_jax.all_gather_matmul(x, (gate, up), AXIS, strategy="fused")
    elif variant == "ours_each":
        a, b = (entwine_jax.all_gather_matmul(x, w, AXIS, strategy="fused") for w in (gate, up))
    else:
        rows = lax.all_gather(x, AXIS, axis=0, tiled=True) if variant == "xla" else x
        a, b = rows @ gate, rows @ up
    h = jax.nn.silu(a) * b
    if variant.startswith("ours"):
        return entwine_jax.matmul_reduce_scatter(h, down, AXIS, strategy="fused")
    y: jax.Array = h @ down
    if variant == "xla":
        y = lax.psum_scatter(y, AXIS, scatter_dimension=0, tiled=True)
    return y


def program(kind: str, variant: str, sizes: Sizes, mesh: Mesh) -> jax.stages.Wrapped:
    """(x, weights of all layers, cotangent) -> (x for the next program, gradients of all layers' weights)."""

    def rank(x: jax.Array, layers: Sequence[Weights], dy: jax.Array) -> Any:
        if kind == "forward":
            for weights in layers:
                x = lax.optimization_barrier(layer(variant, x, weights))
            return x, ()
        backwards = []
        for weights in layers:
            x, backward = jax.vjp(functools.partial(layer, variant), x, weights)
            x = lax.optimization_barrier(x)
            backwards.append(backward)
        gradients = []
        for backward in reversed(backwards):
            dy, dw = lax.optimization_barrier(backward(dy))
            gradients.append(dw)
        return dy, gradients

    rows = P(AXIS, None)
    weights = ((P(None, AXIS), P(None, AXIS), rows),) * sizes.layers
    gradients: Any = () if kind == "forward" else list(weights)
    mapped = jax.shard_map(rank, mesh=mesh, in_specs=(rows, weights, rows), out_specs=(rows, gradients))
    return jax.jit(mapped)


def operands(sizes: Sizes, mesh: Mesh) -> dict[str, Any]:
    """By name; x and dy as ranks have them, and as all of them have the whole."""
    ranks, rows, columns = mesh.size, P(AXIS, None), P(None, AXIS)

    def draw(seed: int, shape: tuple[int, int], spec: P, scale: float) -> jax.Array:
        def make(key: jax.Array) -> jax.Array:
            return (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)

        drawn: jax.Array = jax.jit(make, out_shardings=NamedSharding(mesh, spec))(jax.random.key(seed))
        return drawn

    wide, narrow = (sizes.width, sizes.hidden * ranks), (sizes.hidden * ranks, sizes.width)
    # A scale that keeps activations of all layers alike.
    made: dict[str, Any] = {
        "weights": tuple(
            (
                draw(3 * i + 10, wide, columns, sizes.width**-0.5),
                draw(3 * i + 11, wide, columns, sizes.width**-0.5),
                draw(3 * i + 12, narrow, rows, 2 * (sizes.hidden * ranks) ** -0.5),
            )
            for i in range(sizes.layers)
        ),
    }
    for name, seed in (("x", 1), ("dy", 2)):
        made[name] = draw(seed, (sizes.tokens, sizes.width), rows, 1.0)
        made[f"{name}_alone"] = draw(seed, (sizes.tokens * ranks, sizes.width), rows, 1.0)
    return made


def check(name: str, got: Any, wanted: Any) -> float:
    """The largest relative error of any result."""
    worst = max(float(relative_error(a, b)) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))
    if not worst <= TOLERANCE:  # also NaN
        raise SystemExit(f"{name}: a result is {worst:.2e} from XLA's, more than {TOLERANCE:.0e}")
    return worst


def measure(kind: str, sizes: Sizes, mesh: Mesh, count: int, sample_seconds: float) -> dict[str, Any]:
    arrays = operands(sizes, mesh)
    runs, results, samplers = {}, {}, {}
    for variant in VARIANTS:
        suffix = "_alone" if variant == "alone" else ""
        given = arrays[f"x{suffix}"], arrays["weights"], arrays[f"dy{suffix}"]
        runs[variant] = program(kind, variant, sizes, mesh).lower(*given).compile()
        results[variant] = runs[variant](*given) if variant != "alone" else None
        samplers[variant] = functools.partial(chains.seconds, functools.partial(runs[variant], *given))
    ours = [name for name in VARIANTS if name.startswith("ours")]
    errors = {name: check(f"{kind}, {name}", results[name], results["xla"]) for name in ours}
    results.clear()
    repeats = {name: rounds.repeats_for(each, sample_seconds) for name, each in samplers.items()}
    samples = rounds.sample_rounds(samplers, repeats, count, f"{kind} {sizes}")
    ms = {name: [second / sizes.layers * 1e3 for second in seconds] for name, seconds in samples.items()}
    return {
        "suite": "mlp_fwd_bwd",
        "kind": kind,
        **dataclasses.asdict(sizes),
        "ranks": mesh.size,
        "dtype": "bfloat16",
        "ms": {name: statistics.median(each) for name, each in ms.items()},
        "xla_over": {name: 1 / rounds.paired(ms[name], ms["xla"]) for name in VARIANTS if name != "xla"},
        "over_alone": {name: rounds.paired(ms[name], ms["alone"]) for name in VARIANTS if name != "alone"},
        "spread": {name: rounds.spread(each) for name, each in ms.items()},
        "error": errors,
    }


# Results from before gate and up shared a kernel, or a result, have other variants.
HEADINGS = {
    "ours": "ours",
    "ours_save": "ours, rows kept",
    "ours_both": "ours, not gated",
    "ours_each": "ours, each alone",
    "ours_regather": "ours, gathering again",
    "xla": "XLA",
    "alone": "no collectives",
}


def table(rows: Sequence[dict[str, Any]]) -> str:
    shown = [name for name in HEADINGS if name in rows[0]["ms"]]
    lines = [
        f"| tokens | pass | {' | '.join(HEADINGS[name] for name in shown)} | XLA / ours | ours / none |",
        f"| ---: | --- | {'---: | ' * len(shown)}---: | ---: |",
    ]
    for row in rows:
        ms = row["ms"]
        lines.append(
            f"| {row['tokens']} | {row['kind'].replace('_', ' and ')} | "
            + " | ".join(f"{ms[name]:.3f}" for name in shown)
            + f" | **{row['xla_over']['ours']:.2f}** | {row['over_alone']['ours']:.2f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--tokens", default="4096,8192", help="of all ranks together, comma-separated")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--platform", help="for example cpu; by default JAX's own choice")
    parser.add_argument("--tiny", action="store_true", help="small sizes and few rounds: a smoke test for any machine")
    options = parser.parse_args(arguments)
    devices = jax.devices(options.platform)
    mesh = Mesh(np.array(devices), (AXIS,))
    if options.tiny:
        cases, seconds = [Sizes(8 * len(devices), 32, 16)], 0.0
    else:
        cases, seconds = [Sizes(int(tokens)) for tokens in options.tokens.split(",")], 4 * rounds.SAMPLE_SECONDS
    about: dict[str, Any] = {
        "machine": collective_matmul.machine(devices),
        "versions": collective_matmul.versions(),
        "notes": ["milliseconds of one layer, medians; ratios are medians of those within each round"],
        "rows": [],
    }
    for sizes in cases:
        for kind in KINDS:
            row = measure(kind, sizes, mesh, min(options.rounds, 2) if options.tiny else options.rounds, seconds)
            about["rows"].append(row)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(about, indent=1) + "\n")
            print(json.dumps({name: row[name] for name in ("tokens", "kind", "ms", "xla_over")}), file=sys.stderr)
    print(table(about["rows"]))


if __name__ == "__main__":
    main()
