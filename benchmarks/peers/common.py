"""What the peers written in JAX share."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh

from benchmarks import chains, rounds
from benchmarks.chains import AXIS
from benchmarks.peers import Job
from benchmarks.shapes import ALL_GATHER, ALL_REDUCE_OP, Shape


def mesh_of(job: Job) -> Mesh:
    devices = jax.devices(job.platform)
    if len(devices) != job.ranks:
        raise SystemExit(f"needs {job.ranks} devices, found {len(devices)}")
    return Mesh(np.array(devices), (AXIS,))


def versions(*packages: str) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def plain_xla(shape: Shape) -> chains.Call:
    if shape.op == ALL_GATHER:
        return lambda x, w: lax.all_gather(x, AXIS, axis=0, tiled=True) @ w
    if shape.op == ALL_REDUCE_OP:
        return lambda x, w: lax.psum(x @ w, AXIS)
    return lambda x, w: lax.psum_scatter(x @ w, AXIS, scatter_dimension=0, tiled=True)


def with_references(shape: Shape, mesh: Mesh, most_calls: int) -> chains.Chains:
    """With plain XLA, to compare results and times with, and the GEMM alone."""
    calls = shape.calls(most_calls)
    programs = chains.Chains(shape, mesh, calls)
    layout, gemm = chains.collective_layout(shape, mesh.size), chains.gemm_layout(shape, mesh.size)
    programs.add("xla", layout, chains.per_rank_program(layout, mesh, calls, plain_xla(shape)))
    programs.add("gemm", gemm, chains.per_rank_program(gemm, mesh, calls, jax.numpy.matmul))
    return programs


def timed(name: str, programs: chains.Chains, job: Job) -> dict[str, Any]:
    """Checks and times what `programs` has under that name, interleaved with its references."""
    error = programs.compare(name, "xla", "before")
    samplers = programs.samplers()
    repeats = {each: rounds.repeats_for(sampler, job.sample_seconds) for each, sampler in samplers.items()}
    samples = rounds.sample_rounds(samplers, repeats, job.rounds, str(programs.shape))
    return rounds.details(samples, name, programs.calls) | {"error": error}
