"""Under automatic sharding, two results of the same operands at once: y and what to keep of x, dx and dw."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh

from . import _partitioning, _spread
from ._partitioning import Program
from ._selection import Layout
from ._spread import Call


def saving(call: Call, x: jax.Array, w: jax.Array, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """y = x @ w (+ bias), and x once more: if this turns out to gather x, then as it was gathered."""
    biased = bias is not None

    @jax.custom_batching.custom_vmap
    def partitioned(*operands: jax.Array) -> Any:
        return _partitioned_saving(operands[0].ndim - 2, biased)(*operands, call)

    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> tuple[Any, tuple[bool, bool]]:
        return _partitioning.batch_of(call, saving, size, is_batched, operands, biased), (True, True)

    both: tuple[jax.Array, jax.Array] = partitioned(*(v for v in (x, w, bias) if v is not None))
    return both


@functools.cache
def _partitioned_saving(leading: int, biased: bool) -> Any:
    def two(x: jax.Array, w: jax.Array, call: Call) -> tuple[jax.Array, jax.Array]:
        return _spread.whole(call, x, w), x

    def three(x: jax.Array, w: jax.Array, bias: jax.Array, call: Call) -> tuple[jax.Array, jax.Array]:
        return _spread.whole(call, x, w, bias), x

    factors = _partitioning.factors_of(leading)
    made: Any = custom_partitioning(three if biased else two, static_argnums=(2 + biased,))
    # Rows of what is kept of x need not lie as x's do: who uses it tells.
    kept = " ".join([*_partitioning.batch_factors(leading), "g", "k"])
    made.def_partition(
        _partition_saving,
        sharding_rule=f"{factors['x']}, {factors['w']}{', n' if biased else ''} -> {factors['y']}, {kept}",
        need_replication_factors=("s",),
    )
    return made


def _partition_saving(call: Call, mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
    def program(layout: Layout) -> Program:
        work = _spread.one_rank_saving(call, layout, _spread.team_of(layout, mesh))

        def lower(x: jax.Array, w: jax.Array, *bias: jax.Array) -> tuple[jax.Array, jax.Array]:
            return work(x, w, *bias)

        kept = layout.operands[0]
        if layout.op == "all_gather_matmul":
            kept = _spread.gathered(kept, layout.team)
        specs = (*layout.operands, layout.result[-1:])[: len(args)]
        wanted = tuple(_partitioning.sharding_of(mesh, spec) for spec in specs)
        made = tuple(_partitioning.sharding_of(mesh, spec) for spec in (layout.result, kept))
        return mesh, lower, made, wanted

    return _partitioning.settled(call, mesh, args, results[0], program, gathers=True)


def gradients(
    calls: tuple[Call, Call], dy: jax.Array, w: jax.Array, x: jax.Array, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """dx and dw of y = x @ w, the products of the calls. dy comes twice, once for each, since they may want it to lie
    in different ways. `rows` is x once more, as the forward pass has kept it."""
    saved = () if rows is None else (rows,)
    both: tuple[jax.Array, jax.Array] = _partitioned_gradients(x.ndim - 2, len(saved))(dy, w, x, dy, *saved, *calls)
    return both


@functools.cache
def _partitioned_gradients(leading: int, saved: int) -> Any:
    def four(
        dy: jax.Array, w: jax.Array, x: jax.Array, dy_too: jax.Array, to_x: Call, to_w: Call
    ) -> tuple[jax.Array, jax.Array]:
        return _spread.whole(to_x, dy, w), _spread.whole(to_w, x, dy_too)

    def five(
        dy: jax.Array, w: jax.Array, x: jax.Array, dy_too: jax.Array, rows: jax.Array, to_x: Call, to_w: Call
    ) -> tuple[jax.Array, jax.Array]:
        return _spread.whole(to_x, dy, w), _spread.whole(to_w, x, dy_too)

    factors = _partitioning.factors_of(leading)
    inputs = [factors[name] for name in "ywx"] + (_partitioning.saved_factors(leading) if saved else [factors["y"]])
    made: Any = custom_partitioning(five if saved else four, static_argnums=(4 + saved, 5 + saved))
    made.def_partition(
        partition_gradients,
        sharding_rule=f"{', '.join(inputs)} -> {factors['x']}, {factors['w']}",
        need_replication_factors=("s",),
    )
    return made


def partition_gradients(to_x: Call, to_w: Call, mesh: Mesh, args: Sequence[Any], results: Sequence[Any]) -> Any:
    of_x = _partitioning.layout_of(to_x, mesh, args[:2], results[0])
    of_w = _partitioning.layout_of(to_w, mesh, args[2:4], results[1])
    team = _spread.team_of(of_x, mesh)
    saved = _partitioning.lies_there(args[4:], of_w, mesh)
    made = tuple(_partitioning.sharding_of(mesh, layout.result) for layout in (of_x, of_w))

    def program(of_x: Layout, together: _spread.Gradients | None) -> Program:
        if together is None:
            work_x, work_w = _spread.one_rank(to_x, of_x, team), _spread.one_rank(to_w, of_w, None)
            operands = (*of_x.operands, *of_w.operands)
        else:
            operands = (*of_x.operands, of_x.result, of_x.operands[0])

        def lower(dy: jax.Array, w: jax.Array, x: jax.Array, dy_too: jax.Array, *rows: jax.Array) -> Any:
            x = rows[0] if saved else x
            return (work_x(dy, w), work_w(x, dy_too)) if together is None else together(dy, w, x)

        wanted = [*(_partitioning.sharding_of(mesh, spec) for spec in operands), *(v.sharding for v in args[4:])]
        if saved:
            wanted[2] = args[2].sharding
        return mesh, lower, made, (*wanted,)

    found = program(of_x, _spread.gradients_of_rank(to_x, to_w, of_x, of_w, team, saved))
    _partitioning.tell(to_x, of_x, mesh, found[1], args, found[3], _partitioning.shard(results[0], made[0]))
    if _partitioning.by_xla(to_x, of_x, mesh, args, gathers=not saved):
        # Rows that either gradient wants are for the partitioner to gather: where others want them too, that is once.
        return program(_spread.of_gathered_rows(of_x), None)
    return found
