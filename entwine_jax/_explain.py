"""explain: which collective matmuls a function holds, and what becomes of each."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from . import _strategy
from ._lowering import collective_matmul_p
from ._strategy import Plan


@dataclasses.dataclass(frozen=True)
class CollectiveMatmul:
    """One collective matmul of a traced function. Shapes are those of one rank, with leading dimensions flattened."""

    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    dtype: np.dtype[Any]  # of x and w
    result_dtype: np.dtype[Any]
    transpose_w: bool  # w is used transposed, as the backward pass does
    axis_name: tuple[str, ...]
    team_size: int
    strategy: str
    reason: str
    plan: Plan | None  # of strategy "fused"
    arena_bytes: int  # peer memory that the call needs on each rank; calls of one team share it


class Explanation(Sequence[CollectiveMatmul]):
    """The collective matmuls of a function in traced order; `print` shows a table."""

    def __init__(self, matmuls: Sequence[CollectiveMatmul]):
        self._matmuls = tuple(matmuls)

    @overload
    def __getitem__(self, index: int) -> CollectiveMatmul: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CollectiveMatmul]: ...
    def __getitem__(self, index: int | slice) -> CollectiveMatmul | Sequence[CollectiveMatmul]:
        return self._matmuls[index]

    def __len__(self) -> int:
        return len(self._matmuls)

    def __repr__(self) -> str:
        if not self:
            return "no collective matmul"
        rows = [("op", "x", "w", "y", "axis", "strategy", "arena", "plan", "why"), *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """The collective matmuls of ``fn(*args, **kwargs)``, their shapes, strategies, and why.

    Traces ``fn`` and runs nothing. It sees into jit, shard_map, scan, cond, remat and so on, once for each place in the
    program (a matmul in a scan is listed once), and in what ``jax.grad`` made, the backward pass too::

        print(entwine_jax.explain(jax.grad(loss), params, batch))

    Args:
      fn: any function that JAX can trace, jitted or not.
      *args, **kwargs: its arguments, arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      A sequence of `CollectiveMatmul` that prints as a table.
    """
    jaxpr = jax.make_jaxpr(lambda args, kwargs: fn(*args, **kwargs))(args, kwargs)
    return Explanation(list(_walk(jaxpr.jaxpr)))


def _walk(jaxpr: Jaxpr) -> Iterator[CollectiveMatmul]:
    for equation in jaxpr.eqns:
        if equation.primitive is collective_matmul_p:
            yield _describe(equation)
        for inner in jaxprs_in_params(equation.params):
            yield from _walk(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _describe(equation: Any) -> CollectiveMatmul:
    request, choice = equation.params["request"], equation.params["choice"]
    x, w, y = (variable.aval for variable in (*equation.invars, *equation.outvars))
    return CollectiveMatmul(
        op=request.op,
        x=x.shape,
        w=w.shape,
        y=y.shape,
        dtype=x.dtype,
        result_dtype=y.dtype,
        transpose_w=request.transpose_w,
        axis_name=request.team.axis_name,
        team_size=request.team.size,
        strategy=choice.strategy,
        reason=choice.reason,
        plan=choice.plan,
        arena_bytes=_strategy.arena_bytes(request, choice.plan, x, w) if choice.plan else 0,
    )


def _cells(m: CollectiveMatmul) -> tuple[str, ...]:
    plan = ""
    if m.plan is not None:
        plan = f"{m.plan.tile_m}x{m.plan.tile_n} raster {m.plan.raster} "
        scatter = m.op == "matmul_reduce_scatter"
        plan += f"lead {m.plan.lead} {m.plan.transport}" if scatter else f"pushers {m.plan.pushers}"
    return (
        m.op,
        _array(m.dtype, m.x),
        _array(m.dtype, m.w) + (".T" if m.transpose_w else ""),
        _array(m.result_dtype, m.y),
        f"{','.join(map(str, m.axis_name))}:{m.team_size}",
        m.strategy,
        f"{m.arena_bytes / 2**20:.1f} MiB" if m.plan else "",
        plan,
        m.reason,
    )


def _array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    return f"{dtype}[{','.join(map(str, shape))}]"
