"""Where a call's tiles and bytes are over time by each of the three strategies, as the cost model goes through it.

python -m benchmarks.strategy_picture docs/strategies.png       draws it (needs matplotlib: the extra `bench`)

No GPU is needed: it is `entwine_jax.simulate_tiles`, by the plans of the cost model. Each strategy has a row for each
cluster of two multiprocessors, coloured by what it does and whose the tile is; one for what moves groups (copy
engines), where that isn't a cluster; and the link's rate beneath.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

import entwine_jax
from benchmarks.rows import TITLES
from benchmarks.shapes import REDUCE_SCATTER, Shape
from entwine_jax import SimulatedCall
from entwine_jax._simulate import ROLES

SHAPE, RANKS = Shape(REDUCE_SCATTER, 4096, 8192, 2048), 2
STRATEGIES = ("fused", "resident", "signal")
COLORS = {
    "tile for another rank": "#c98b5e",
    "own tile": "#1b6ca8",
    "moves": "#5f9e7c",
    "waits": "#b3423a",
    "copies to y": "#8a8a8a",
}
WINDOW_US = 2.0


def kinds(call: SimulatedCall) -> dict[str, np.ndarray[Any, Any]]:
    """The call's spans by what they are coloured as."""
    multiplied = call.of("multiply")
    waits = (call.of("wait for rows"), call.of("wait for partial sums"))
    return {
        "tile for another rank": multiplied[multiplied["owner"] != 0],
        "own tile": multiplied[multiplied["owner"] == 0],
        "moves": np.concatenate([call.of("move"), call.of("transfer")]),
        "waits": np.concatenate(waits),
        "copies to y": call.of("copy to y"),
    }


def draw(calls: dict[str, SimulatedCall], title: str, path: pathlib.Path) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("the picture needs matplotlib: pip install 'entwine-jax[bench]'") from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 2.6 * len(calls)))
    axes = figure.subplots(2 * len(calls), 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1] * len(calls)})
    longest = max(call.us for call in calls.values())
    for number, (name, call) in enumerate(calls.items()):
        clusters, link = axes[2 * number], axes[2 * number + 1]
        for kind, spans in kinds(call).items():
            widths = spans["end"] - spans["begin"]
            # What is no cluster is drawn as wide as four of them, apart.
            transfer = spans["role"] == ROLES.index("transfer")
            places, heights = np.where(transfer, 70.0, spans["worker"]), np.where(transfer, 4.0, 0.9)
            color = COLORS[kind]
            clusters.barh(places, widths, heights, left=spans["begin"], color=color, edgecolor="white", linewidth=0.15)
        clusters.set_ylabel("cluster", fontsize=7)
        clusters.set_title(f"{name}: {call.us:.0f} us", fontsize=9, loc="left")
        times, rates = call.link_rate(WINDOW_US)
        link.fill_between(times, rates, step="pre", color="#5f9e7c")
        link.set_ylabel("link GB/s", fontsize=7)
        link.set_ylim(0, 400)
        for each in (clusters, link):
            each.tick_params(labelsize=6)
            each.set_xlim(0, longest)
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, fontsize=7, loc="upper right", ncols=len(patches))
    axes[-1].set_xlabel("microseconds", fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.02, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("picture", type=pathlib.Path, help="the PNG file to draw")
    options = parser.parse_args(arguments)
    sizes = (SHAPE.op, SHAPE.m, SHAPE.n, SHAPE.k, RANKS)
    calls = {name: entwine_jax.simulate_tiles(*sizes, strategy=name) for name in STRATEGIES}
    draw(calls, f"{TITLES[SHAPE.op]}, {SHAPE.m}, {SHAPE.n}, {SHAPE.k}, {RANKS} GPUs, simulated", options.picture)


if __name__ == "__main__":
    main()
