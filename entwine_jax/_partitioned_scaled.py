"""Under automatic sharding, a product of float8 operands and its scale."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from . import _partitioning, _spread
from ._spread import Call


def product(call: Call, x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    """y = (x @ w) * scale of global arrays."""

    @jax.custom_batching.custom_vmap
    def partitioned(x: jax.Array, w: jax.Array, scale: jax.Array) -> Any:
        return _partitioned(x.ndim - 2)(x, w, scale, call)

    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Any, bool]:
        """One of x is one more leading dimension; with one of w or scales, the products are taken one by one."""
        if is_batched == [True, False, False]:
            return product(call, *operands), True
        all_batched = (
            v if batch else jnp.broadcast_to(v, (size, *v.shape)) for v, batch in zip(operands, is_batched, strict=True)
        )
        return lax.map(lambda each: product(call, *each), (*all_batched,)), True

    y: jax.Array = partitioned(x, w, scale)
    return y


@functools.cache
def _partitioned(leading: int) -> Any:
    def whole(x: jax.Array, w: jax.Array, scale: jax.Array, call: Call) -> jax.Array:
        return _spread.whole_scaled(call, x, w, scale)

    factors = _partitioning.factors_of(leading)
    made: Any = custom_partitioning(whole, static_argnums=(3,))
    made.def_partition(
        _partition,
        sharding_rule=f"{factors['x']}, {factors['w']}, -> {factors['y']}",
        reduction_factors=("k",),
        need_replication_factors=("s",),
    )
    return made


def _partition(call: Call, mesh: Mesh, args: Sequence[Any], result: Any) -> Any:
    layout = _partitioning.layout_of(call, mesh, args[:2], result)
    work = _spread.one_rank_scaled(
        call, layout, _spread.team_of(layout, dict(mesh.shape), mesh.devices.flat[0].platform)
    )

    def lower(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
        return work(x, w, scale)

    operands = (_partitioning.sharding_of(mesh, spec) for spec in layout.operands)
    wanted = *operands, NamedSharding(mesh, PartitionSpec())
    made = _partitioning.sharding_of(mesh, layout.result)
    _partitioning.tell(call, layout, mesh, lower, args, wanted, _partitioning.shard(result, made))
    return mesh, lower, made, wanted
