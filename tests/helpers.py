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


def assert_gradients(loss: Any, wanted_loss: Any, x: Any, w: Any, every: bool = True) -> None:
    """A scalar function of x and w and its gradients are another's; with `every`, each gradient by itself and those of
    gradients too."""
    got, wanted = (jax.jit(jax.value_and_grad(f, (0, 1)))(x, w) for f in (loss, wanted_loss))
    assert_close(got, wanted)
    if not every:
        return
    assert_close(jax.jit(jax.grad(loss, 0))(x, w), wanted[1][0])
    assert_close(jax.jit(jax.grad(loss, 1))(x, w), wanted[1][1])

    def norm_of_gradient(f: Any) -> Any:
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in jax.grad(f, (0, 1))(*args))

    got, wanted = (jax.jit(jax.grad(norm_of_gradient(f), (0, 1)))(x, w) for f in (loss, wanted_loss))
    assert_close(got, wanted, 2e-5)


def assert_vmapped(op: str, rank: Any, in_lax: Any, operands: Any, dims: Any, placed: tuple[P, P, P]) -> None:
    """Of one rank's work, `rank(op, x, w, axis)`, under vmap inside shard_map, that values and gradients are in_lax's.

    Operands have their batch in front, of which None in `dims` takes the first; `placed` are the specs of one product.
    """
    given = [v[0] if dim is None else jnp.moveaxis(v, 0, dim) for v, dim in zip(operands, dims, strict=True)]

    def spec(dim: int | None, wanted: P) -> P:
        return wanted if dim is None else P(*wanted[:dim], None, *wanted[dim:])

    def loss(rank: Any) -> Any:
        f = jax.shard_map(
            jax.vmap(lambda x, w: rank(op, x, w, "t"), dims),
            mesh=mesh_of((2,)),
            in_specs=tuple(map(spec, dims, placed[:2])),
            out_specs=spec(0, placed[2]),
        )
        return lambda x, w: (jnp.sum(jnp.sin(f(x, w))), f(x, w))

    got, wanted = (jax.jit(jax.grad(loss(r), (0, 1), has_aux=True))(*given) for r in (rank, in_lax))
    assert_close(got, wanted)
