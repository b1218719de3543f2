"""Where the tiles and the bytes of one fused call are over time, for a paced and for a naive order of tiles.

python -m benchmarks.timeline --out FILE.json       traces calls on two or more GPUs and writes what one rank noted
python -m benchmarks.timeline FILE.json --plot PNG  draws it (needs matplotlib: the extra `bench`)

The shape is bound by the link, so that what the order does to it shows. *Paced* is the library's own plan. *Free* is
the same order without bounding how many tiles are on the link at once. *Naive* computes all tiles of other ranks first
and the own ones last. The picture has a row for each CTA, what it multiplies coloured by whose the tile is, and the
link's rate beneath.
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
from benchmarks.shapes import REDUCE_SCATTER, Shape
from entwine_jax import Config, TracedCall

SHAPE = Shape(REDUCE_SCATTER, 8192, 8192, 1024)
ORDERS = {
    "paced": Config(),
    "free": Config(pushers=1 << 20),
    "naive": Config(lead=1 << 20, pushers=1 << 20),
}
# Of the calls in a chain the last one is shown: warm, and both ranks in step.
CALLS = 4
WINDOW_US = 5.0


def traced(order: str, mesh: Mesh) -> TracedCall:
    """Rank 0's last call."""
    layout = chains.collective_layout(SHAPE, mesh.size)
    xs = chains.random_arrays(mesh, layout.x_spec, layout.x_shape, 1.0, CALLS, 1)
    ws = chains.random_arrays(mesh, layout.w_spec, layout.w_shape, SHAPE.k**-0.5, CALLS, 2)
    y = jax.device_put(jnp.zeros(layout.y_shape, jnp.bfloat16), jax.NamedSharding(mesh, layout.y_spec))
    op = getattr(entwine_jax, SHAPE.op)

    def call(x: jax.Array, w: jax.Array) -> jax.Array:
        product: jax.Array = op(x, w, chains.AXIS, strategy="fused", config=ORDERS[order])
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
    """A call's part of the JSON: for each CTA its tiles as [first load, first image done, owner]; the link's rate."""
    key = ["cta", "owner", "row", "column"]
    multiplied = {
        tuple(event[key].tolist()): float(event["us"]) for event in call.at("multiplied") if event["writer"] == 1
    }
    tiles: dict[int, list[list[float]]] = {}
    for event in call.at("first_load"):
        place = tuple(event[key].tolist())
        if place in multiplied:
            span = [round(float(event["us"]), 1), round(multiplied[place], 1), int(event["owner"])]
            tiles.setdefault(int(event["cta"]), []).append(span)
    times, rate = call.link_rate(WINDOW_US)
    return {
        "us": round(float(call.events["us"].max()), 1),
        "tiles": [tiles[cta] for cta in sorted(tiles)],
        "link_us": times.tolist(),
        "link_gb_per_s": np.round(rate, 1).tolist(),
    }


def plot(results: dict[str, Any], path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the plot needs matplotlib: pip install 'entwine-jax[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    orders = results["orders"]
    longest = max(order["us"] for order in orders.values())
    figure = Figure(figsize=(10, 2.6 * len(orders)))
    axes = figure.subplots(2 * len(orders), 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1] * len(orders)})
    for number, (name, order) in enumerate(orders.items()):
        ctas, link = axes[2 * number], axes[2 * number + 1]
        for whose, color in (("other ranks'", "#c98b5e"), ("own", "#1b6ca8")):
            spans = [
                (cta, begin, end)
                for cta, tiles in enumerate(order["tiles"])
                for begin, end, owner in tiles
                if (owner == results["rank"]) == (whose == "own")
            ]
            places, begins, ends = np.array(spans).T
            ctas.barh(
                places, ends - begins, 0.9, left=begins, color=color, edgecolor="white", linewidth=0.15, label=whose
            )
        ctas.set_ylabel("CTA", fontsize=7)
        ctas.set_title(f"{name} order: {order['us']:.0f} us", fontsize=9, loc="left")
        link.fill_between(order["link_us"], order["link_gb_per_s"], step="pre", color="#5f9e7c")
        link.set_ylabel("link GB/s", fontsize=7)
        link.set_ylim(0, 800)
        for each in (ctas, link):
            each.tick_params(labelsize=6)
            each.set_xlim(0, longest)
    axes[0].legend(fontsize=7, loc="upper right", title="tiles", title_fontsize=7)
    axes[-1].set_xlabel("microseconds", fontsize=8)
    shape = results["shape"]
    figure.suptitle(f"{results['machine']}: {shape['op']} {shape['m']}, {shape['n']}, {shape['k']}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline", description=__doc__.split("\n")[0])
    parser.add_argument("results", nargs="?", type=pathlib.Path, help="JSON of an earlier run, to draw")
    parser.add_argument("--out", type=pathlib.Path, help="trace now and write this JSON file")
    parser.add_argument("--plot", type=pathlib.Path, help="the PNG file to draw")
    given = parser.parse_args(arguments)
    if (given.results is None) == (given.out is None):
        parser.error("give either the JSON of an earlier run or --out FILE.json for a new one")
    if given.results is not None:
        results = json.loads(given.results.read_text())
    else:
        devices = jax.devices()
        mesh = Mesh(np.array(devices), (chains.AXIS,))
        shape = {"op": SHAPE.op, "m": SHAPE.m, "n": SHAPE.n, "k": SHAPE.k}
        results = {"machine": f"{len(devices)} x {devices[0].device_kind}", "shape": shape, "rank": 0, "orders": {}}
        for order in ORDERS:
            results["orders"][order] = described(traced(order, mesh))
            print(f"{order}: {results['orders'][order]['us']:.0f} us", file=sys.stderr, flush=True)
        given.out.write_text(json.dumps(results, separators=(",", ":")) + "\n")
    if given.plot is not None:
        plot(results, given.plot)
    return 0


if __name__ == "__main__":
    sys.exit(main())
