"""Under automatic sharding, a product of float8 operands, its scale and its epilogue."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _partitioning, _spread
from ._partitioning import Program
from ._selection import OPERANDS, Layout
from ._spread import Call


def product(call: Call, a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """A product of global arrays times `scale`."""

    @jax.custom_batching.custom_vmap
    def partitioned(*operands: jax.Array) -> Any:
        return _partitioned(call.product, operands[0].ndim - 2, len(operands) == 4)(*operands, call)

    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        """One of a is one more leading dimension; with one of any other, the products are taken one by one."""
        if not any(is_batched[1:]):
            return product(call, *operands), True
        all_batched = (
            v if batch else jnp.broadcast_to(v, (size, *v.shape)) for v, batch in zip(operands, is_batched, strict=True)
        )
        return lax.map(lambda each: product(call, *each), (*all_batched,)), True

    y: jax.Array = partitioned(*(v for v in (a, b, scale, bias) if v is not None))
    return y


@functools.cache
def _partitioned(product: str, leading: int, biased: bool) -> Any:
    def without(a: jax.Array, b: jax.Array, scale: jax.Array, call: Call) -> jax.Array:
        return _spread.whole_scaled(call, a, b, scale)

    def with_bias(a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array, call: Call) -> jax.Array:
        return _spread.whole_scaled(call, a, b, scale, bias)

    factors, (summed, columns) = _partitioning.factors_of(leading), {"y": ("k", "n"), "x": ("n", "k")}[product]
    made: Any = custom_partitioning(with_bias if biased else without, static_argnums=(3 + biased,))
    inputs = [*(factors[name] for name in OPERANDS[product]), "", *[columns] * biased]
    made.def_partition(
        _partition,
        sharding_rule=f"{', '.join(inputs)} -> {factors[product]}",
        reduction_factors=(summed,),
        need_replication_factors=("s",),
    )
    return made


def _partition(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Any:
    def program(layout: Layout) -> Program:
        work = _spread.one_rank_scaled(call, layout, _spread.team_of(layout, mesh))

        def with_bias(a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
            return work(a, b, scale, bias)

        def without(a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
            return work(a, b, scale)

        a, b, made, columns = (
            _partitioning.sharding_of(mesh, spec) for spec in (*layout.operands, layout.result, layout.result[-1:])
        )
        wanted = (a, b, NamedSharding(mesh, PartitionSpec()), columns)[: len(args)]
        return mesh, with_bias if len(args) == 4 else without, made, wanted

    return _partitioning.settled(call, mesh, args, result, program)
