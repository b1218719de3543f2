"""Calls with a bias and an activation, for the GPU tests and their child processes."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import (
    ALL_GATHER,
    AXIS,
    OPS,
    Case,
    assert_equal,
    exact_product,
    integers,
    mesh_of,
    per_shard,
    placed,
    put,
    team_size,
)
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P


def bias_spec(case: Case) -> P:
    return P(AXIS) if case.op == ALL_GATHER else P(None)


def bias_of(case: Case, ranks: int, seed: int) -> np.ndarray:
    return np.random.default_rng([seed, 2]).integers(-32, 33, case.w_shape(ranks)[1]).astype(np.float32)


def finished(sums: np.ndarray, bias: np.ndarray, activation: str | None, dtype: Any = jnp.bfloat16) -> np.ndarray:
    """What becomes of exact sums, rounded once."""
    y = sums + bias
    return (y if activation is None else np.maximum(y, 0)).astype(np.float32).astype(dtype).astype(np.float64)


@functools.lru_cache(maxsize=256)
def _finishing(case: Case, mesh: Mesh, activation: str | None, biased: bool, options: Any) -> Callable[..., jax.Array]:
    x, w, y = case.specs(AXIS)
    given = dict(options)
    w = P(*w[::-1]) if given.get("transpose_w") else w

    def rank(x: jax.Array, w: jax.Array, bias: jax.Array) -> jax.Array:
        made: jax.Array = per_shard(case, bias=bias if biased else None, activation=activation, **given)(x, w)
        return made

    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x, w, bias_spec(case)), out_specs=y))


def finishing(
    case: Case, mesh: Mesh, activation: str | None, biased: bool = True, **options: Any
) -> Callable[..., jax.Array]:
    """The jitted op of global x, w and bias."""
    return _finishing(case, mesh, activation, biased, tuple(sorted(options.items())))


def by_turns(turns: int = 20) -> None:
    """Programs with a bias and relu and without, tiles and few rows, by turns and without waiting: captured graphs keep
    which is which, and follow a bias that changes."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    cases = [Case(op, m_shard, 648, 328) for op in OPS for m_shard in (16, 200)]
    inputs, wants, results = {}, {}, []
    for case, seed in itertools.product(cases, range(3)):
        x, w = integers(case, ranks, seed)
        bias = bias_of(case, ranks, seed)
        inputs[case, seed] = *placed(case, mesh, x, w), put(bias, mesh, bias_spec(case))
        sums = exact_product(case, ranks, x, w)
        for biased, activation in ((False, None), (True, "relu")):
            wants[case, seed, biased] = finished(sums, bias if biased else bias * 0, activation)
    for turn in range(turns):
        for case, (biased, activation) in itertools.product(cases, ((False, None), (True, "relu"))):
            run = finishing(case, mesh, activation, biased)
            results.append(((case, turn % 3, biased), run(*inputs[case, turn % 3])))
    for key, y in results:
        assert_equal(key[0], y, wants[key])
