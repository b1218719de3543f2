"""JAX's own Pallas kernel for Hopper, all-gather only, at the best of a few of its tuning configurations.

    jax.experimental.pallas.ops.gpu.collective_matmul_mgpu.all_gather_lhs_matmul

The sweep has what was best on two H200s (warpgroups split along n, tiles of 128, m minor) and its neighbours.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from benchmarks import chains, rounds
from benchmarks.peers import Job, Results, common
from benchmarks.shapes import ALL_GATHER, Shape

_NAME = "pallas"


def _configs(kernels: Any, shape: Shape, ranks: int) -> Iterator[tuple[str, Any]]:
    """Best guess first. The kernel takes only whole tiles."""
    dimension = kernels.MatmulDimension
    rows = shape.m // ranks
    tile_m = 128 if rows % 128 == 0 else 64
    for tile_n, split, width, minor in (
        (128, "N", 8, "M"),
        (128, "N", 4, "M"),
        (128, "N", 16, "M"),
        (128, "N", 8, "N"),
        (128, "M", 8, "M"),
        (64, "N", 8, "M"),
    ):
        if rows % (tile_m * (1 + (split == "M"))) or shape.n % (tile_n * (1 + (split == "N"))):
            continue
        yield (
            f"tile {tile_m}x{tile_n}, warpgroups along {split}, width {width}, {minor} minor",
            kernels.TuningConfig(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=64,
                max_concurrent_steps=4,
                grid_minor_dim=dimension[minor],
                grid_tile_width=width,
                wg_dimension=dimension[split],
            ),
        )


def measure(kernels: Any, shape: Shape, mesh: Mesh, job: Job, results: Results, share: float) -> dict[str, Any] | None:
    """`share` of the time that is left is the sweep's."""
    configs = list(_configs(kernels, shape, mesh.size))
    if not configs:
        results.note(f"{shape}: no whole tiles, the kernel doesn't take it")
        return None
    programs = common.with_references(shape, mesh, job.calls)
    layout = chains.collective_layout(shape, mesh.size)
    until = results.left() * (1 - share)
    tried: dict[str, float] = {}
    best: str | None = None
    for text, config in configs:
        if tried and results.left() < until:
            break
        try:
            # Under a jit of its own the kernel is lowered once, not once a call.
            call = jax.jit(
                functools.partial(
                    kernels.all_gather_lhs_matmul, axis_name=chains.AXIS, config=config, dtype=jnp.bfloat16
                )
            )
            program = chains.per_rank_program(layout, mesh, programs.calls, call, check_vma=False)
            programs.add(text, layout, program)
            sampler = programs.samplers()[text]
            repeats = rounds.repeats_for(sampler, job.sample_seconds / 4)
            tried[text] = min(sampler(repeats) / repeats for _ in range(3))
        except Exception as error:
            results.note(f"{shape}: {text}: {type(error).__name__}: {error}"[:500])
            continue
        loser = text if best is not None and tried[text] >= tried[best] else best
        best = min(tried, key=tried.__getitem__)
        if loser is not None:
            programs.drop(loser)
    if best is None:
        return None
    return {**common.timed(best, programs, job), "config": best, "configs_tried": len(tried)}


def main(job: Job) -> None:
    from jax.experimental.pallas.ops.gpu import collective_matmul_mgpu as kernels  # only where Mosaic GPU is

    mesh = common.mesh_of(job)
    results = Results(job, common.versions("jax", "jaxlib"))
    left = sum(shape.op == ALL_GATHER for shape in job.shapes)
    for shape in results.shapes(ALL_GATHER):
        try:
            found = measure(kernels, shape, mesh, job, results, 0.7 / left)
            if found is not None:
                results.add(shape, {_NAME: found})
        except Exception as error:  # a peer's fault is a note
            results.note(f"{shape}: {type(error).__name__}: {error}"[:500])
        left -= 1


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
