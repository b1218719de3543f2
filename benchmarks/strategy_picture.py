"""Where a call's tiles and bytes are over time by each of the three strategies, as the cost model goes through it.

python -m benchmarks.strategy_picture docs/strategies.png       draws it (needs matplotlib: the extra `bench`)

No GPU is needed: it is `entwine_jax.simulate_tiles`, by the plans of the cost model. Each strategy has a row for each
cluster of two multiprocessors, coloured by what it does and whose the tile is; one for what moves groups (copy
engines), where that isn't a cluster; and the link's rate beneath. benchmarks/timeline.py draws the like of GPUs.
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Sequence

import entwine_jax
from benchmarks.rows import TITLES
from benchmarks.shapes import REDUCE_SCATTER, Shape
from entwine_jax import _spans

SHAPE, RANKS = Shape(REDUCE_SCATTER, 4096, 8192, 2048), 2
STRATEGIES = ("fused", "resident", "signal")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("picture", type=pathlib.Path, help="the PNG file to draw")
    options = parser.parse_args(arguments)
    sizes = (SHAPE.op, SHAPE.m, SHAPE.n, SHAPE.k, RANKS)
    calls = {name: entwine_jax.simulate_tiles(*sizes, strategy=name).drawing() for name in STRATEGIES}
    title = f"{TITLES[SHAPE.op]}, {SHAPE.m}, {SHAPE.n}, {SHAPE.k}, {RANKS} GPUs, simulated"
    _spans.draw(calls, title, options.picture, workers="cluster", most_gb_per_s=400)


if __name__ == "__main__":
    main()
