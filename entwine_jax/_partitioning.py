"""Products under automatic sharding: Shardy propagates through them, and each picks its op when XLA partitions it.

The rule is that of a matmul, with rows as a "need replication" factor. That changes only which axis wins where rows of
x and columns of w want the same one: columns do, so that a sequence-sharded x and a column-sharded w mean all-gather.
A gradient has a third operand, what it is a gradient of: it isn't read, but the result lies where it lies.
"""

import contextlib
import dataclasses
import functools
import string
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _selection, _spread
from ._selection import OPERANDS, Layout, Spec
from ._spread import Call


@dataclasses.dataclass(frozen=True)
class Partitioned:
    """What became of a product, on one rank."""

    work: Any  # its jaxpr
    layout: Layout
    operands: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    result: jax.ShapeDtypeStruct
    transpose_w: bool


_listeners: list[list[Partitioned]] = []


@contextlib.contextmanager
def listen() -> Iterator[list[Partitioned]]:
    """Collects what the partitioner does meanwhile, weight gradients aside."""
    heard: list[Partitioned] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        _listeners.remove(heard)


def holds_product(equation: Any) -> bool:
    """Whether an equation of a jaxpr is a product that XLA will partition."""
    return equation.primitive.name == "custom_partitioning" and any(
        isinstance(value, Call) for value in equation.params.get("static_args", ())
    )


def product(call: Call, a: jax.Array, b: jax.Array, like: jax.Array | None) -> jax.Array:
    """A product of global arrays, without its gradient."""
    operands = (a, b) if like is None else (a, b, like)

    # custom_partitioning has no batching rule.
    @jax.custom_batching.custom_vmap
    def partitioned(*operands: jax.Array) -> Any:
        leading = operands[0].ndim - 2
        return _partitioned(call.product, leading, len(operands))(*operands, call)

    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        return _batch(call, size, is_batched, operands), True

    y: jax.Array = partitioned(*operands)
    return y


def _batch(call: Call, size: int, is_batched: Sequence[bool], operands: Sequence[jax.Array]) -> jax.Array:
    """A batch of x and y is one more leading dimension; with one of w, the products are taken one by one."""
    names = (*OPERANDS[call.product], call.product)[: len(operands)]
    w_is_batched = any(name == "w" and batch for name, batch in zip(names, is_batched, strict=True))
    if call.product != "w" and not w_is_batched:
        operands = [
            v if name == "w" or batch else jnp.broadcast_to(v, (size, *v.shape))
            for name, v, batch in zip(names, operands, is_batched, strict=True)
        ]
        return product(call, operands[0], operands[1], operands[2] if len(operands) > 2 else None)

    def one(batches: list[jax.Array]) -> jax.Array:
        rest = iter(batches)
        each = [next(rest) if batch else v for v, batch in zip(operands, is_batched, strict=True)]
        return product(call, each[0], each[1], each[2] if len(each) > 2 else None)

    y: jax.Array = lax.map(one, [v for v, batch in zip(operands, is_batched, strict=True) if batch])
    return y


def gradients(calls: tuple[Call, Call], dy: jax.Array, w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dx and dw of y = x @ w, the products of the calls. dy comes twice, once for each, since they may want it to lie
    in different ways."""
    both: tuple[jax.Array, jax.Array] = _partitioned_gradients(x.ndim - 2)(dy, w, x, dy, *calls)
    return both


@functools.cache
def _partitioned_gradients(leading: int) -> Any:
    def both(
        dy: jax.Array, w: jax.Array, x: jax.Array, dy_too: jax.Array, to_x: Call, to_w: Call
    ) -> tuple[jax.Array, jax.Array]:
        return _spread.whole(to_x, dy, w), _spread.whole(to_w, x, dy_too)

    factors = _factors(leading)
    made: Any = custom_partitioning(both, static_argnums=(4, 5))
    made.def_partition(
        _partition_gradients,
        sharding_rule=f"{', '.join(factors[name] for name in 'ywxy')} -> {factors['x']}, {factors['w']}",
        need_replication_factors=("s",),
    )
    return made


def _partition_gradients(to_x: Call, to_w: Call, mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
    of_x = _layout(to_x, mesh, args[:2], results[0])
    of_w = _layout(to_w, mesh, args[2:], results[1])
    team = _spread.team_of(of_x, dict(mesh.shape), mesh.devices.flat[0].platform)
    together = _spread.gradients_of_rank(to_x, to_w, of_x, of_w, team)
    if together is None:
        work_x, work_w = _spread.one_rank(to_x, of_x, team), _spread.one_rank(to_w, of_w, None)
        operands = (*of_x.operands, *of_w.operands)
    else:
        operands = (*of_x.operands, of_x.result, of_x.operands[0])

    def lower(dy: jax.Array, w: jax.Array, x: jax.Array, dy_too: jax.Array) -> tuple[jax.Array, jax.Array]:
        return (work_x(dy, w), work_w(x, dy_too)) if together is None else together(dy, w, x)

    wanted = tuple(_sharding(mesh, spec) for spec in operands)
    made = _sharding(mesh, of_x.result), _sharding(mesh, of_w.result)
    _tell(to_x, of_x, mesh, lower, args, wanted, _shard(results[0], made[0]))
    return mesh, lower, made, wanted


def _factors(leading: int) -> dict[str, str]:
    """Of the dimensions of x, w and y."""
    batch = [f"b{letter}" for letter in string.ascii_letters[:leading]]
    return {"x": " ".join([*batch, "s", "k"]), "w": "k n", "y": " ".join([*batch, "s", "n"])}


@functools.cache
def _partitioned(product: str, leading: int, operands: int) -> Any:
    """The custom_partitioning function of a product with so many leading dimensions."""

    def two(a: jax.Array, b: jax.Array, call: Call) -> jax.Array:
        return _spread.whole(call, a, b)

    def three(a: jax.Array, b: jax.Array, like: jax.Array, call: Call) -> jax.Array:
        return _spread.whole(call, a, b)

    batch = [f"b{letter}" for letter in string.ascii_letters[:leading]]
    factors = _factors(leading)
    inputs = [factors[name] for name in OPERANDS[product]] + [factors[product]] * (operands - 2)
    made: Any = custom_partitioning(three if operands == 3 else two, static_argnums=(operands,))
    made.def_partition(
        _partition,
        sharding_rule=f"{', '.join(inputs)} -> {factors[product]}",
        reduction_factors={"y": ("k",), "x": ("n",), "w": tuple(batch)}[product],
        need_replication_factors=("s",),
    )
    return made


def _partition(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Any:
    """Called by XLA's partitioner: the mesh, a rank's work, and the shardings that it wants of result and operands."""
    layout = _layout(call, mesh, args[:2], result)
    work = _spread.one_rank(call, layout, _spread.team_of(layout, dict(mesh.shape), mesh.devices.flat[0].platform))

    def lower(a: jax.Array, b: jax.Array, *like: jax.Array) -> jax.Array:
        return work(a, b)

    wanted, made = tuple(_sharding(mesh, spec) for spec in layout.operands), _sharding(mesh, layout.result)
    _tell(call, layout, mesh, lower, args[:2], wanted, _shard(result, made))
    return mesh, lower, made, (*wanted, *(v.sharding for v in args[2:]))


def _layout(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Layout:
    sizes = dict(mesh.shape)
    if not sizes:
        raise ValueError("entwine_jax.collective_matmul: x and w have shardings without a mesh; use jax.NamedSharding")
    a, b, y = (_selection.of_dims(v.sharding.spec, len(v.shape), sizes) for v in (*args, result))
    shapes = [v.shape for v in (*args, result)]
    return _selection.select(call.product, a, b, y, shapes, sizes, call.axis_name)


def _sharding(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))


def _tell(call: Call, layout: Layout, mesh: Mesh, lower: Any, args: Sequence[Any], wanted: Any, result: Any) -> None:
    """Whoever listens what became of a product."""
    if not _listeners or call.product == "w":
        return
    shards = [_shard(v, s) for v, s in zip(args, wanted, strict=True)]
    jaxpr = jax.make_jaxpr(lower, axis_env=list(dict(mesh.shape).items()))(*shards)
    for heard in _listeners:
        heard.append(Partitioned(jaxpr, layout, (shards[0], shards[1]), result, call.product == "x"))


def _shard(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), np.dtype(array.dtype))
