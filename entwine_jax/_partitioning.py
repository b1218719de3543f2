"""Products under automatic sharding: Shardy propagates through them, and each picks its op when XLA partitions it.

The rule is that of a matmul, with rows as a "need replication" factor. That changes only which axis wins where rows of
x and columns of w want the same one: columns do, so that a sequence-sharded x and a column-sharded w mean all-gather.
A gradient has a third operand, what it is a gradient of: it isn't read, but the result lies where it lies.
"""

import contextlib
import dataclasses
import functools
import string
from collections.abc import Callable, Iterator, Sequence
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


# What the partitioner asks for: the mesh, a rank's work, and the shardings of its results and operands.
Program = tuple[Mesh, Callable[..., Any], Any, tuple[NamedSharding, ...]]
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


def product(
    call: Call,
    a: jax.Array,
    b: jax.Array,
    like: jax.Array | None = None,
    rows: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """A product of global arrays, without its gradient. A weight gradient may bring `rows`: x once more, as the forward
    pass has kept it, which may lie where the product wants it. One that isn't a gradient may bring a bias."""
    if bias is not None:
        return _product_and_bias(call, a, b, bias)

    # custom_partitioning has no batching rule.
    @jax.custom_batching.custom_vmap
    def partitioned(*operands: jax.Array) -> Any:
        if len(operands) == 4:
            # y twice: what it tells of rows is what lies beside its columns, not where x lies.
            a, b, like, rows = operands
            return _partitioned(call.product, a.ndim - 2, 5)(a, b, like, b, rows, call)
        return _partitioned(call.product, operands[0].ndim - 2, len(operands))(*operands, call)

    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        return batch_of(call, product, size, is_batched, operands), True

    y: jax.Array = partitioned(*(v for v in (a, b, like, rows) if v is not None))
    return y


def _product_and_bias(call: Call, a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
    @jax.custom_batching.custom_vmap
    def partitioned(a: jax.Array, b: jax.Array, bias: jax.Array) -> Any:
        return _partitioned_with_bias(call.product, a.ndim - 2)(a, b, bias, call)

    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        return batch_of(call, _product_and_bias, size, is_batched, operands, biased=True), True

    y: jax.Array = partitioned(a, b, bias)
    return y


def batch_of(
    call: Call,
    made: Callable[..., Any],
    size: int,
    is_batched: Sequence[bool],
    operands: Sequence[jax.Array],
    biased: bool = False,
) -> Any:
    """What `made`, which is `product` or takes its operands, gives for a batch. One of x and y is one more leading
    dimension; with one of w or of biases, the products are taken one by one."""
    names = (*OPERANDS[call.product], *(("bias",) if biased else (call.product, "rows")))[: len(operands)]
    w_is_batched = any(name in ("w", "bias") and batch for name, batch in zip(names, is_batched, strict=True))
    if call.product != "w" and not w_is_batched:
        operands = [
            v if name in ("w", "bias") or batch else jnp.broadcast_to(v, (size, *v.shape))
            for name, v, batch in zip(names, operands, is_batched, strict=True)
        ]
        return made(call, *operands)

    def one(batches: list[jax.Array]) -> Any:
        rest = iter(batches)
        return made(call, *(next(rest) if batch else v for v, batch in zip(operands, is_batched, strict=True)))

    return lax.map(one, [v for v, batch in zip(operands, is_batched, strict=True) if batch])


def lies_there(rows: Sequence[Any], of_w: Layout, mesh: Mesh) -> bool:
    """Whether what the forward pass has kept of x, if it has, lies where a weight gradient wants x."""
    return any(_selection.of_dims(v.sharding.spec, len(v.shape), dict(mesh.shape)) == of_w.operands[0] for v in rows)


def factors_of(leading: int, columns: str = "n") -> dict[str, str]:
    """Of the dimensions of x, w and y."""
    batch = batch_factors(leading)
    return {"x": " ".join([*batch, "s", "k"]), "w": f"k {columns}", "y": " ".join([*batch, "s", columns])}


def saved_factors(leading: int) -> list[str]:
    """Of y and of all rows of x, beside x's and y's own: rows lie as y's do, whatever x's."""
    batch = batch_factors(leading)
    return [" ".join([*batch, "g", "n"]), " ".join([*batch, "g", "k"])]


def batch_factors(leading: int) -> list[str]:
    return [f"b{letter}" for letter in string.ascii_letters[:leading]]


@functools.cache
def _partitioned(product: str, leading: int, operands: int) -> Any:
    """The custom_partitioning function of a product with so many leading dimensions."""

    def two(a: jax.Array, b: jax.Array, call: Call) -> jax.Array:
        return _spread.whole(call, a, b)

    def three(a: jax.Array, b: jax.Array, like: jax.Array, call: Call) -> jax.Array:
        return _spread.whole(call, a, b)

    def five(x: jax.Array, y: jax.Array, like: jax.Array, y_too: jax.Array, rows: jax.Array, call: Call) -> jax.Array:
        return _spread.whole(call, x, y)

    batch, factors = batch_factors(leading), factors_of(leading)
    inputs = [factors[name] for name in (*OPERANDS[product], product)[:operands]]
    if operands == 5:
        inputs += saved_factors(leading)
    made: Any = custom_partitioning({2: two, 3: three, 5: five}[operands], static_argnums=(operands,))
    made.def_partition(
        _partition,
        sharding_rule=f"{', '.join(inputs)} -> {factors[product]}",
        reduction_factors={"y": ("k",), "x": ("n",), "w": tuple(batch)}[product],
        need_replication_factors=("s",),
    )
    return made


@functools.cache
def _partitioned_with_bias(product: str, leading: int) -> Any:
    """The same with a bias, which lies as the result's columns do."""

    def biased(a: jax.Array, b: jax.Array, bias: jax.Array, call: Call) -> jax.Array:
        return _spread.whole(call, a, b, bias)

    factors, columns = factors_of(leading), {"y": "n", "x": "k"}[product]
    made: Any = custom_partitioning(biased, static_argnums=(3,))
    made.def_partition(
        _partition_with_bias,
        sharding_rule=f"{', '.join(factors[name] for name in OPERANDS[product])}, {columns} -> {factors[product]}",
        reduction_factors={"y": ("k",), "x": ("n",)}[product],
        need_replication_factors=("s",),
    )
    return made


def _partition_with_bias(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Any:
    def program(layout: Layout) -> Program:
        work = _spread.one_rank(call, layout, _spread.team_of(layout, mesh))

        def lower(a: jax.Array, b: jax.Array, bias: jax.Array) -> jax.Array:
            return work(a, b, bias)

        wanted = tuple(sharding_of(mesh, spec) for spec in (*layout.operands, layout.result[-1:]))
        return mesh, lower, sharding_of(mesh, layout.result), wanted

    return settled(call, mesh, args, result, program)


def _partition(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Any:
    """Called by XLA's partitioner: the mesh, a rank's work, and the shardings that it wants of result and operands."""

    def program(layout: Layout) -> Program:
        work = _spread.one_rank(call, layout, _spread.team_of(layout, mesh))
        saved = lies_there(args[4:], layout, mesh)

        def lower(a: jax.Array, b: jax.Array, *rest: jax.Array) -> jax.Array:
            return work(rest[-1] if saved else a, b)

        wanted = [sharding_of(mesh, spec) for spec in layout.operands]
        if saved:
            wanted[0] = args[0].sharding
        return mesh, lower, sharding_of(mesh, layout.result), (*wanted, *(v.sharding for v in args[2:]))

    return settled(call, mesh, args, result, program)


def settled(
    call: Call,
    mesh: Mesh,
    args: Sequence[Any],
    result: Any,
    program: Callable[[Layout], Program],
    gathers: bool = False,
) -> Program:
    """What becomes of a product, whose program for a layout is `program(layout)`."""
    layout = layout_of(call, mesh, args[:2], result)
    found = _, lower, made, wanted = program(layout)
    tell(call, layout, mesh, lower, args, wanted, shard(result, made[0] if isinstance(made, tuple) else made))
    if layout.op == "all_gather_matmul" and by_xla(call, layout, mesh, args, gathers):
        return program(_spread.of_gathered_rows(layout))
    return found


def by_xla(call: Call, layout: Layout, mesh: Mesh, args: Sequence[Any], gathers: bool = False) -> bool:
    """Whether XLA is to run a collective matmul of the first two of `args`."""
    a, b = (shard(v, sharding_of(mesh, spec)) for v, spec in zip(args, layout.operands, strict=False))
    return _spread.by_xla(call, layout, _spread.team_of(layout, mesh), a, b, gathers)


def layout_of(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Layout:
    sizes = dict(mesh.shape)
    if not sizes:
        raise ValueError("entwine_jax.collective_matmul: x and w have shardings without a mesh; use jax.NamedSharding")
    a, b, y = (_selection.of_dims(v.sharding.spec, len(v.shape), sizes) for v in (*args, result))
    shapes = [v.shape for v in (*args, result)]
    return _selection.select(call.product, a, b, y, shapes, sizes, call.axis_name)


def sharding_of(mesh: Mesh, spec: Spec) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(axes or None for axes in spec)))


def tell(call: Call, layout: Layout, mesh: Mesh, lower: Any, args: Sequence[Any], wanted: Any, result: Any) -> None:
    """Whoever listens what became of a product."""
    if not _listeners or call.product == "w":
        return
    shards = [shard(v, s) for v, s in zip(args, wanted, strict=True)]
    jaxpr = jax.make_jaxpr(lower, axis_env=list(dict(mesh.shape).items()))(*shards)
    for heard in _listeners:
        heard.append(Partitioned(jaxpr, layout, (shards[0], shards[1]), result, call.product == "x"))


def shard(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sharding.shard_shape(array.shape), np.dtype(array.dtype))
