"""Which collective matmul the shardings of x, w and y select. Pure: axis names in, axis names out.

A product is known by the one of ``y = x @ w`` that it computes: "y" from (x, w), "x" = y w.T from (y, w), and
"w" = x.T y from (x, y). The gradients of each are the other two, so these three are all that a model ever needs.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Axes = tuple[str, ...]
Spec = tuple[Axes, ...]  # the mesh axes of each dimension, major to minor

OPERANDS = {"y": ("x", "w"), "x": ("y", "w"), "w": ("x", "y")}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a product is computed: which op, and how operands and result lie while it runs."""

    op: str  # "dot" if no collective matmul fits
    team: Axes
    operands: tuple[Spec, Spec]
    result: Spec
    summed: Axes  # op "dot": axes over which the ranks' products are added
    moves: bool  # op "dot": needs a collective, of XLA's own
    reason: str


def of_dims(entries: Iterable[Any], ndim: int, sizes: Mapping[str, int]) -> Spec:
    """A PartitionSpec as tuples, without axes of size one, which shard nothing."""
    dims = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]
    return tuple(tuple(a for a in axes if sizes[a] > 1) for axes in (*dims, *[()] * (ndim - len(dims))))


def default_result(x: Spec, w: Spec) -> Spec:
    """Where y lies if nobody says: columns as w's; rows as x's, without what columns or the contraction use."""
    used = {*w[1], *(x[-1] if x[-1] == w[0] else ())}
    return (*(tuple(a for a in axes if a not in used) for axes in x[:-1]), w[1])


def select(
    product: str,
    a: Spec,
    b: Spec,
    result: Spec,
    shapes: Sequence[Sequence[int]],
    sizes: Mapping[str, int],
    axis_name: Axes | None = None,
) -> Layout:
    """The layout of a product. `shapes` are a's, b's and the result's, global; `axis_name` the only team allowed."""
    for name in axis_name or ():
        if name not in sizes:
            raise ValueError(
                f"entwine_jax.collective_matmul: axis_name={name!r} is not an axis of the mesh, which has {(*sizes,)}"
            )
    given = (a, b, result)
    if all(_divides(spec, shape, sizes) for spec, shape in zip(given, shapes, strict=True)):
        if product == "w":
            return _weights(a, b, result)
        found = _collective(product, a, b, result)
        if found is None:
            return _dot(product, a, b, result, _why_not(product, a, b, result))
        if axis_name is not None and found.team != axis_name:
            reason = f"the shardings select {found.op} over axis {_show(found.team)}, not axis_name={_show(axis_name)}"
            return _dot(product, a, b, result, reason)
        return found
    # XLA would pad such shards, with garbage that a contraction must not see.
    a, b, result = (_divisible(spec, shape, sizes) for spec, shape in zip(given, shapes, strict=True))
    reason = f"a size doesn't divide by its mesh axes: {_table(product, given)} of {[tuple(s) for s in shapes]}"
    made = _weights(a, b, result) if product == "w" else _dot(product, a, b, result, reason)
    return dataclasses.replace(made, moves=True, reason=reason)


def _collective(product: str, a: Spec, b: Spec, result: Spec) -> Layout | None:
    """None if no op fits. An operand that is less sharded than the op wants fits too: slicing costs nothing."""
    *leading, rows, columns = result
    team = _common(a[-1], _as_matrix(product, b)[0])
    matrix: tuple[Axes, Axes]
    if columns:
        # The team is then that of the columns, and rows are gathered.
        op, team, wanted, matrix = "all_gather_matmul", columns, (*leading, rows + columns, ()), ((), columns)
        fits = a[-2] == rows + columns
    elif team and rows[-len(team) :] == team:
        op, wanted, matrix = "matmul_reduce_scatter", (*leading, rows[: -len(team)], team), (team, ())
        fits = True
    else:
        op, wanted, matrix = "matmul_all_reduce", (*leading, rows, team), (team, ())
        fits = bool(team) and not {*team} & {axis for axes in result for axis in axes}
    b_wanted = matrix if product == "y" else matrix[::-1]
    if fits and _sliced(a, wanted) and _sliced(b, b_wanted):
        return Layout(op, team, (wanted, b_wanted), result, (), False, "the shardings select it")
    return None


def _dot(product: str, a: Spec, b: Spec, result: Spec, reason: str) -> Layout:
    """A product of shards, each axis at one dimension only: a contraction that both operands share, else where the
    result wants it, else where an operand has it."""
    b_contracted, b_columns = _as_matrix(product, b)
    contracted = _shared(a[-1], b_contracted)
    used = {*contracted}
    made = []
    for wanted in result:
        made.append(_free(wanted, used))
        used |= {*made[-1]}
    if not contracted:
        contracted = _free(_common(a[-1], b_contracted), used)
        used |= {*contracted}
    for i, axes in enumerate((*a[:-1], b_columns)):
        made[i] = made[i] or _free(axes, used)
        used |= {*made[i]}
    *rows, columns = made
    matrix = (contracted, columns) if product == "y" else (columns, contracted)
    operands = (*rows, contracted), matrix
    moves = bool(contracted) or not (_sliced(a, operands[0]) and _sliced(b, matrix) and _sliced((*made,), result))
    if not moves:
        reason = "shards multiply without any collective"
    return Layout("dot", (), operands, (*made,), contracted, moves, reason)


def _weights(x: Spec, y: Spec, w: Spec) -> Layout:
    """x.T y: rows are contracted, first those that x and y share. An axis that w has is gathered from rows of the
    other operand."""
    rows = [_shared(*axes) for axes in zip(x[:-1], y[:-1], strict=True)]
    used = {axis for axes in rows for axis in axes}
    k = _free(w[0], used) or _free(x[-1], used | {*w[1]})
    used |= {*k}
    n = _free(w[1], used) or _free(y[-1], used)
    used |= {*n}
    for i, (x_axes, y_axes) in enumerate(zip(x[:-1], y[:-1], strict=True)):
        rows[i] = rows[i] or _free(_common(x_axes, y_axes), used)
        used |= {*rows[i]}
    summed = tuple(axis for axes in rows for axis in axes)
    return Layout("dot", (), ((*rows, k), (*rows, n)), (k, n), summed, True, "a weight gradient is XLA's own")


def _as_matrix(product: str, w: Spec) -> tuple[Axes, Axes]:
    """w's contracted axes and its columns', as the product uses it."""
    return (w[0], w[1]) if product == "y" else (w[1], w[0])


def _why_not(product: str, a: Spec, b: Spec, result: Spec) -> str:
    (b_contracted, columns), contracted = _as_matrix(product, b), a[-1]
    first = OPERANDS[product][0]
    if b_contracted and columns:
        hint = "w is sharded on both dimensions: constrain it to the tensor axis alone"
    elif contracted != b_contracted:
        hint = (
            f"{first}'s and w's shards of the contraction disagree, {_show(contracted)} and {_show(b_contracted)}: "
            "constrain one to the other's"
        )
    else:
        hint = f"constrain {first} or {product}, with out_sharding= say, to a row of the table in collective_matmul"
    return f"no collective matmul has {_table(product, (a, b, result))}; {hint}"


def _table(product: str, specs: Sequence[Spec]) -> str:
    return ", ".join(f"{name} {show(spec)}" for name, spec in zip((*OPERANDS[product], product), specs, strict=True))


def show(spec: Spec) -> str:
    return f"P({', '.join(map(_show, spec))})"


def _show(axes: Axes) -> str:
    return "None" if not axes else repr(axes[0] if len(axes) == 1 else axes)


def _shared(a: Axes, b: Axes) -> Axes:
    """The major axes that two operands both have at one dimension."""
    same = 0
    while same < min(len(a), len(b)) and a[same] == b[same]:
        same += 1
    return a[:same]


def _common(a: Axes, b: Axes) -> Axes:
    """The same, where an operand that isn't sharded there will be sliced."""
    return _shared(a, b) if a and b else a or b


def _free(axes: Axes, used: set[str]) -> Axes:
    """The major axes that are still to be had."""
    free = next((i for i, axis in enumerate(axes) if axis in used), len(axes))
    return axes[:free]


def _sliced(old: Spec, new: Spec) -> bool:
    """Whether resharding takes no more than slices."""
    return all(after[: len(before)] == before for before, after in zip(old, new, strict=True))


def _divides(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    return all(n % math.prod(sizes[a] for a in axes) == 0 for axes, n in zip(spec, shape, strict=True))


def _divisible(spec: Spec, shape: Sequence[int], sizes: Mapping[str, int]) -> Spec:
    return tuple(
        axes if n % math.prod(sizes[a] for a in axes) == 0 else () for axes, n in zip(spec, shape, strict=True)
    )
