"""Under automatic sharding, the products of one x and several weights, and all their gradients: each one call, if the
shardings select the same collective matmul for all of them.

What several products share comes once for each of them, since the partitioner may find that they want it to lie in
different ways. Operands are in the order of their products, two each, and so are results.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.custom_partitioning import custom_partitioning

from . import _partitioned_pairs, _partitioning, _shards, _spread
from ._selection import Layout
from ._spread import Call


def products(calls: Sequence[Call], x: jax.Array, ws: Sequence[jax.Array], biases: Sequence[Any]) -> Any:
    """y of each weight."""
    biased = tuple(b is not None for b in biases)
    pairs = [v for w in ws for v in (x, w)]
    return _partitioned(x.ndim - 2, biased)(*pairs, *(b for b in biases if b is not None), *calls)


@functools.cache
def _partitioned(leading: int, biased: tuple[bool, ...]) -> Any:
    count = len(biased)
    operands = 2 * count + sum(biased)

    def all_of(*given: Any) -> tuple[jax.Array, ...]:
        arrays, calls = given[:operands], given[operands:]
        biases = in_places(biased, arrays[2 * count :])
        pairs = zip(calls, arrays[: 2 * count : 2], arrays[1 : 2 * count : 2], biases, strict=True)
        return tuple(_spread.whole(call, x, w, bias) for call, x, w, bias in pairs)

    factors = [_partitioning.factors_of(leading, f"n{i}") for i in range(count)]
    inputs = [each[name] for each in factors for name in "xw"]
    inputs += [f"n{i}" for i, has in enumerate(biased) if has]
    results = [each["y"] for each in factors]
    made: Any = custom_partitioning(all_of, static_argnums=tuple(range(operands, operands + count)))
    made.def_partition(
        functools.partial(_partition, biased),
        sharding_rule=f"{', '.join(inputs)} -> {', '.join(results)}",
        reduction_factors=("k",),
        need_replication_factors=("s",),
    )
    return made


def in_places(biased: Sequence[bool], given: Sequence[Any]) -> list[Any]:
    """Biases, with None for those that there aren't."""
    rest = iter(given)
    return [next(rest) if has else None for has in biased]


def _partition(biased: tuple[bool, ...], *given: Any) -> Any:
    *calls, mesh, args, results = given
    count, of = len(calls), _partitioning.sharding_of
    pairs = [args[2 * i : 2 * i + 2] for i in range(count)]
    layouts = [_partitioning.layout_of(c, mesh, p, y) for c, p, y in zip(calls, pairs, results, strict=True)]
    first = layouts[0]
    team = _spread.team_of(first, mesh)
    made = tuple(of(mesh, layout.result) for layout in layouts)
    wanted = [of(mesh, spec) for layout in layouts for spec in layout.operands]
    wanted += [of(mesh, layout.result[-1:]) for layout, has in zip(layouts, biased, strict=True) if has]
    shards = [_partitioning.shard(y, sharding) for y, sharding in zip(results, made, strict=True)]
    if all((m.op, m.team, m.operands[0]) == ("all_gather_matmul", first.team, first.operands[0]) for m in layouts):
        request = _spread.request(calls[0], first, team, args[1])

        def together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
            biases, activations = in_places(biased, arrays[2 * count :]), [c.activation for c in calls]
            return _shards.several(request, arrays[0], arrays[1 : 2 * count : 2], biases, activations)

        _partitioning.tell(calls[0], first, mesh, together, args, wanted, shards[0])
        types = [_partitioning.shard(v, lies) for v, lies in zip(args, wanted, strict=True)]
        if _shards.several_ours(request, types[: 2 * count : 2], types[1 : 2 * count : 2]):
            return mesh, together, made, (*wanted,)
        layouts = [_spread.of_gathered_rows(layout) for layout in layouts]
        for i, layout in enumerate(layouts):
            wanted[2 * i] = of(mesh, layout.operands[0])
        return mesh, _apart(biased, calls, layouts, mesh), made, (*wanted,)
    for i, (call, layout) in enumerate(zip(calls, layouts, strict=True)):
        two, work = slice(2 * i, 2 * i + 2), _spread.one_rank(call, layout, _spread.team_of(layout, mesh))
        _partitioning.tell(call, layout, mesh, work, args[two], wanted[two], shards[i])
    for i, (call, layout) in enumerate(zip(calls, layouts, strict=True)):
        if layout.op == "all_gather_matmul" and _partitioning.by_xla(call, layout, mesh, pairs[i]):
            layouts[i] = _spread.of_gathered_rows(layout)
            wanted[2 * i] = of(mesh, layouts[i].operands[0])
    return mesh, _apart(biased, calls, layouts, mesh), made, (*wanted,)


def _apart(biased: tuple[bool, ...], calls: Sequence[Call], layouts: Sequence[Layout], mesh: Any) -> Any:
    """One rank's products, each for itself."""
    count = len(calls)
    works = [
        _spread.one_rank(c, layout, _spread.team_of(layout, mesh)) for c, layout in zip(calls, layouts, strict=True)
    ]

    def apart(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        biases = in_places(biased, arrays[2 * count :])
        return tuple(
            work(*arrays[2 * i : 2 * i + 2], *([] if biases[i] is None else [biases[i]]))
            for i, work in enumerate(works)
        )

    return apart


def gradients(
    calls: Sequence[tuple[Call, Call]], dys: Sequence[jax.Array], ws: Sequence[jax.Array], x: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """dx, the sum of those of all y_i = x @ w_i, and each dw_i: the products of the calls, two for each weight."""
    operands = [v for dy, w in zip(dys, ws, strict=True) for v in (dy, w, x, dy)]
    made = _partitioned_gradients(x.ndim - 2, len(ws))(*operands, *(call for pair in calls for call in pair))
    # One call gives the whole sum as the first of these, and zeros, which XLA adds for nothing, as the others.
    return functools.reduce(jnp.add, made[::2]), tuple(made[1::2])


@functools.cache
def _partitioned_gradients(leading: int, count: int) -> Any:
    def all_of(*given: Any) -> tuple[jax.Array, ...]:
        arrays, calls = given[: 4 * count], given[4 * count :]
        return tuple(_spread.whole(call, *arrays[2 * i : 2 * i + 2]) for i, call in enumerate(calls))

    factors = [_partitioning.factors_of(leading, f"n{i}") for i in range(count)]
    inputs = [each[name] for each in factors for name in "ywxy"]
    results = [each[name] for each in factors for name in "xw"]
    made: Any = custom_partitioning(all_of, static_argnums=tuple(range(4 * count, 6 * count)))
    made.def_partition(
        _partition_gradients,
        sharding_rule=f"{', '.join(inputs)} -> {', '.join(results)}",
        need_replication_factors=("s",),
    )
    return made


def _partition_gradients(*given: Any) -> Any:
    *calls, mesh, args, results = given
    of = _partitioning.sharding_of
    layouts = [_partitioning.layout_of(call, mesh, args[2 * i : 2 * i + 2], results[i]) for i, call in enumerate(calls)]
    first, team = layouts[0], _spread.team_of(layouts[0], mesh)
    shared = [
        (of_x.op, of_x.team, of_x.result) == ("matmul_reduce_scatter", first.team, first.result)
        and of_w.operands == (_spread.gathered(first.result, first.team), of_x.operands[0])
        for of_x, of_w in zip(layouts[::2], layouts[1::2], strict=True)
    ]
    if all(shared):
        specs = [s for of_x in layouts[::2] for s in (*of_x.operands, of_x.result, of_x.operands[0])]
        wanted, made = [of(mesh, spec) for spec in specs], tuple(of(mesh, layout.result) for layout in layouts)
        request = _spread.request(calls[0], first, team, args[1])

        def program(saved: bool) -> Any:
            def together(*arrays: jax.Array) -> tuple[jax.Array, ...]:
                dx, dws = _shards.gradients_of_several(request, arrays[::4], arrays[1::4], arrays[2], saved)
                made = []
                for i, (dw, of_w) in enumerate(zip(dws, layouts[1::2], strict=True)):
                    made += [jnp.zeros_like(dx) if i else dx, jax.lax.psum(dw, of_w.summed) if of_w.summed else dw]
                return (*made,)

            return together

        lower, types = program(False), [_partitioning.shard(v, lies) for v, lies in zip(args, wanted, strict=True)]
        _partitioning.tell(calls[0], first, mesh, lower, args, wanted, _partitioning.shard(results[0], made[0]))
        if not _shards.several_ours(request, types[::4], types[1::4]):  # rows of x are for the partitioner to gather
            lower = program(True)
            wanted[2::4] = [of(mesh, of_w.operands[0]) for of_w in layouts[1::2]]
        return mesh, lower, made, (*wanted,)
    of_pair = _partitioned_pairs.partition_gradients
    each = [
        of_pair(to_x, to_w, mesh, args[4 * i : 4 * i + 4], results[2 * i : 2 * i + 2])
        for i, (to_x, to_w) in enumerate(zip(calls[::2], calls[1::2], strict=True))
    ]

    def apart(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(v for i, (_, lower, _, _) in enumerate(each) for v in lower(*arrays[4 * i : 4 * i + 4]))

    return mesh, apart, tuple(v for _, _, made, _ in each for v in made), tuple(v for *_, w in each for v in w)
