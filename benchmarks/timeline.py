"""Where the tiles and the bytes of one call are over time: by a paced and by a naive order, and by each strategy.

python -m benchmarks.timeline --out FILE.json           traces calls on two or more GPUs and writes what one rank noted
python -m benchmarks.timeline FILE.json --plots FOLDER  draws timeline.png and timeline_strategies.png (needs
                                                        matplotlib: the extra `bench`)

*Orders*, of a shape that is bound by the link, so that what the order does to it shows. *Paced* is the library's own
plan. *Free* is the same order without bounding how many tiles are on the link at once. *Naive* computes all tiles of
other ranks first and the own ones last. *Strategies* are all three, by the cost model's plans, of a shape that is bound
by neither. A picture has a row for each cluster of two CTAs, coloured by what it does and whose the tile is, one for
copy engines, and the link's rate beneath.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import entwine_jax
from benchmarks import chains
from benchmarks.rows import TITLES
from benchmarks.shapes import REDUCE_SCATTER, Shape
from entwine_jax import Config, TracedCall, _spans

# Picture -> the shape, and by name strategy and plan.
PICTURES: dict[str, tuple[Shape, dict[str, tuple[str, Config]]]] = {
    "timeline": (
        Shape(REDUCE_SCATTER, 8192, 8192, 1024),
        {
            "paced": ("fused", Config()),
            "free": ("fused", Config(pushers=1 << 20)),
            "naive": ("fused", Config(lead=1 << 20, pushers=1 << 20)),
        },
    ),
    "timeline_strategies": (
        Shape(REDUCE_SCATTER, 4096, 8192, 2048),
        {name: (name, Config()) for name in ("fused", "resident", "signal")},
    ),
}
# Of the calls in a chain the last one is shown: warm, and both ranks in step.
CALLS = 4
WINDOW_US = 5.0


def traced(shape: Shape, strategy: str, config: Config, mesh: Mesh) -> TracedCall:
    """Rank 0's last call."""
    layout = chains.collective_layout(shape, mesh.size)
    xs = chains.random_arrays(mesh, layout.x_spec, layout.x_shape, 1.0, CALLS, 1)
    ws = chains.random_arrays(mesh, layout.w_spec, layout.w_shape, shape.k**-0.5, CALLS, 2)
    y = jax.device_put(jnp.zeros(layout.y_shape, jnp.bfloat16), jax.NamedSharding(mesh, layout.y_spec))
    op = getattr(entwine_jax, shape.op)

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        product: jax.Array = op(x, w, chains.AXIS, strategy=strategy, config=config)
        return product

    def body(xs: chains.Arrays, ws: chains.Arrays, y: jax.Array) -> jax.Array:
        for x, w in zip(xs, ws, strict=True):
            y = jax.lax.optimization_barrier(call(jax.lax.optimization_barrier(chains.linked(x, y)), w))
        return y

    specs = ((layout.x_spec,) * CALLS, (layout.w_spec,) * CALLS, layout.y_spec)
    fn = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=layout.y_spec)
    trace = entwine_jax.trace_tiles(fn, xs, ws, y)
    return next(call for call in reversed(trace.calls) if call.rank == 0)


def described(call: TracedCall) -> dict[str, Any]:
    """A call's part of the JSON: spans as [begin, end, cluster, role, owner], and the link's rate."""
    spans = call.spans
    # A cluster's two CTAs multiply the same tiles.
    twice = (spans["role"] == _spans.ROLES.index("multiply")) & (spans["worker"] % 2 == 1)
    times, rate = call.link_rate(WINDOW_US)
    return {
        "us": round(call.us, 1),
        "rank": call.rank,
        "spans": [
            [round(begin, 1), round(end, 1), worker // 2, role, owner]
            for begin, end, worker, role, owner, *_ in spans[~twice].tolist()
        ],
        "link_us": times.tolist(),
        "link_gb_per_s": np.round(rate, 1).tolist(),
    }


def drawing(call: dict[str, Any]) -> _spans.Drawing:
    spans = np.zeros(len(call["spans"]), _spans.SPAN)
    for field, values in zip(("begin", "end", "worker", "role", "owner"), np.array(call["spans"]).T, strict=True):
        spans[field] = values
    rate = np.array(call["link_us"]), np.array(call["link_gb_per_s"])
    return _spans.Drawing(call["rank"], call["us"], spans, rate)


def plot(results: dict[str, Any], folder: pathlib.Path) -> None:
    for name, picture in results["pictures"].items():
        shape = picture["shape"]
        title = f"{results['machine']}: {TITLES[shape['op']]}, {shape['m']}, {shape['n']}, {shape['k']}"
        calls = {kind: drawing(call) for kind, call in picture["calls"].items()}
        _spans.draw(calls, title, folder / f"{name}.png", workers="cluster")
        print(folder / f"{name}.png", file=sys.stderr)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="?", type=pathlib.Path, help="JSON of an earlier run, to draw")
    parser.add_argument("--out", type=pathlib.Path, help="trace now and write this JSON file")
    parser.add_argument("--plots", type=pathlib.Path, help="the folder to draw into")
    given = parser.parse_args(arguments)
    if (given.results is None) == (given.out is None):
        parser.error("give either the JSON of an earlier run or --out FILE.json for a new one")
    if given.results is not None:
        results = json.loads(given.results.read_text())
    else:
        devices = jax.devices()
        mesh = Mesh(np.array(devices), (chains.AXIS,))
        results = {"machine": f"{len(devices)} x {devices[0].device_kind}", "pictures": {}}
        for name, (shape, kinds) in PICTURES.items():
            calls = {kind: described(traced(shape, *how, mesh)) for kind, how in kinds.items()}
            print(
                *(f"{kind}: {call['us']:.0f} us" for kind, call in calls.items()), sep="\n", file=sys.stderr, flush=True
            )
            sizes = {"op": shape.op, "m": shape.m, "n": shape.n, "k": shape.k}
            results["pictures"][name] = {"shape": sizes, "calls": calls}
        given.out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    if given.plots is not None:
        plot(results, given.plots)
    return 0


if __name__ == "__main__":
    sys.exit(main())
