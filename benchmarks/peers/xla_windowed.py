"""XLA's windowed einsum: its partitioner splits matmul and collective into steps that overlap.

It acts only in a program that XLA partitions (jit with shardings, not `jax.shard_map`), and only with flags, so this
peer has a process of its own; `benchmarks.peers` sets the flags.
"""

from __future__ import annotations

import sys

import jax.numpy as jnp

from benchmarks import chains
from benchmarks.peers import Job, Results, common


def main(job: Job) -> None:
    mesh = common.mesh_of(job)
    results = Results(job, common.versions("jax", "jaxlib"))
    for shape in results.shapes():
        try:
            programs = common.with_references(shape, mesh, job.calls)
            layout = chains.collective_layout(shape, mesh.size)
            programs.add("xla_windowed", layout, chains.global_program(layout, mesh, programs.calls, jnp.matmul))
            results.add(shape, {"xla_windowed": common.timed("xla_windowed", programs, job)})
        except Exception as error:  # a peer's fault is a note
            results.note(f"{shape}: {type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main(Job.load(sys.argv[1]))
