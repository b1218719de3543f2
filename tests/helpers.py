"""What the CPU tests share: meshes, operands, and each op three times: fused, in lax, and in NumPy.

`fused` and `in_lax` are one rank's work; `spread` makes them functions of *global* arrays, sharded as the op wants them
over a mesh's team axis, with leading dimensions over other axes, so that several teams work on different data.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
PUBLIC = {op: getattr(entwine_jax, op) for op in OPS}


def mesh_of(shape: Sequence[int], names: Sequence[str] = ("t",), order: Sequence[int] | None = None) -> Mesh:
    devices = np.array(jax.devices("cpu")[: int(np.prod(shape))])
    return Mesh(devices[list(order)].reshape(shape) if order is not None else devices.reshape(shape), names)


def in_lax(op: str, x: Any, w: Any, axis: Any) -> Any:
    """The op on one rank's shards, in lax."""
    rows = x.ndim - 2
    if op == "all_gather_matmul":
        return lax.all_gather(x, axis, axis=rows, tiled=True) @ w
    if op == "matmul_all_reduce":
        return lax.psum(x @ w, axis)
    return lax.psum_scatter(x @ w, axis, scatter_dimension=rows, tiled=True)


def fused(op: str, x: Any, w: Any, axis: Any, **options: Any) -> Any:
    return PUBLIC[op](x, w, axis, **{"strategy": "fused", **options})


def specs(op: str, axis: Any = "t", leading: Sequence[Any] = ()) -> tuple[P, P, P]:
    """Of x, w and y."""
    rows, columns, whole = P(*leading, axis, None), P(*leading, None, axis), P(*leading, None, None)
    if op == "all_gather_matmul":
        return rows, P(None, axis), columns
    return columns, P(axis, None), whole if op == "matmul_all_reduce" else rows


def spread(
    rank: Callable[..., Any], op: str, mesh: Mesh, axis: Any = "t", leading: Sequence[Any] = (), check_vma: bool = True
) -> Callable[..., Any]:
    """`rank(op, x, w, axis)`, a rank's work, as a function of global x and w."""
    x, w, y = specs(op, axis, leading)
    local = functools.partial(rank, op, axis=axis)
    return jax.shard_map(local, mesh=mesh, in_specs=(x, w), out_specs=y, check_vma=check_vma)


# Operands are arrays of NumPy's: a jax.Array on one device is cast and cut into shards by programs that XLA has to
# compile first, shape by shape, which was a fifth of all that these tests compile.


def integers(shape: Sequence[int], seed: int, dtype: Any = jnp.float32, low: int = -2, high: int = 2) -> np.ndarray:
    """Small enough that all sums are exact, so that a lost tile or signal shows as a wrong bit."""
    return np.random.default_rng(seed).integers(low, high, shape, endpoint=True).astype(dtype)


def normal(shape: Sequence[int], seed: int, dtype: Any = jnp.float32) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def product(x: Any, w: Any) -> np.ndarray:
    """What all ops compute, seen globally."""
    return np.asarray(x, np.float64) @ np.asarray(w, np.float64)


def assert_close(got: Any, wanted: Any, bound: float = 1e-5) -> None:
    """Every leaf: ||got - wanted|| <= bound ||wanted||."""
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        assert np.linalg.norm(a - b) <= bound * np.linalg.norm(b) + 1e-30
