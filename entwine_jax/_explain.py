"""explain: which collective matmuls a function holds, and what becomes of each."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxprs_in_params

from . import _operands, _partitioning, _strategy
from ._lowering import collective_matmul_p, note_p
from ._lowering import gathered as gathered_type
from ._partitioning import Partitioned
from ._strategy import Choice, Plan, Request

_OURS = (collective_matmul_p, note_p)


@dataclasses.dataclass(frozen=True)
class Product:
    """One of several in a call. Products that are added have one y, and one epilogue, which all of them name; gated
    ones have one y."""

    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    bias: bool = False
    activation: str | None = None


@dataclasses.dataclass(frozen=True)
class CollectiveMatmul:
    """One collective matmul of a traced function. Shapes are those of one rank, with leading dimensions flattened.

    Of a `collective_matmul` that became a plain dot, op is "dot", and there is no axis and a team of one.
    """

    op: str
    x: tuple[int, ...]
    w: tuple[int, ...]
    y: tuple[int, ...]
    dtype: np.dtype[Any]  # of x, and of w but for w_dtype
    result_dtype: np.dtype[Any]
    transpose_w: bool  # w is used transposed, as the backward pass does
    axis_name: tuple[str, ...]
    team_size: int
    strategy: str
    reason: str
    plan: Plan | None  # of strategy "fused", "resident" or "signal"
    arena_bytes: int  # peer memory that the call needs on each rank; calls of one team share it
    gathered: tuple[int, ...] | None = None  # of a gathered array that the call gives beside y, if it does
    w_dtype: np.dtype[Any] | None = None  # of w where it isn't that of x: float8_e4m3fn beside float8_e5m2
    bias: bool = False  # whether the call adds one
    activation: str | None = None  # that the call applies
    # Of a call of several products, all of them; x, w, y, bias and activation are those of the first.
    products: tuple[Product, ...] = ()
    gated: bool = False  # whether y is the product of two of these, the first one activated
    # Of strategy "signal": memory that XLA allocates for the call beside its results, and how many tiles of a chunk
    # (sums) or row blocks of one (all-gather) each of its groups has.
    scratch_bytes: int = 0
    groups: tuple[int, ...] = ()
    transpose_x: bool = False  # x is used transposed: its shape is (batch, k, rows)


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
        rows = [("op", "x", "w", "y", "gathered", "axis", "strategy", "arena", "plan", "why"), *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def explain(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Explanation:
    """The collective matmuls of ``fn(*args, **kwargs)``, their shapes, strategies, and why.

    Traces ``fn`` and runs nothing. It sees into jit, shard_map, scan, cond, remat and so on, once for each place in the
    program (a matmul in a scan is listed once), and in what ``jax.grad`` made, the backward pass too::

        print(entwine_jax.explain(jax.grad(loss), params, batch))

    A `collective_matmul` under automatic sharding is settled only as XLA partitions the program. Then ``fn`` is
    compiled too, for the shardings of its arguments, and these matmuls follow the others, in the partitioner's order.
    Weight gradients aren't listed: they are XLA's own.

    Args:
      fn: any function that JAX can trace, jitted or not.
      *args, **kwargs: its arguments, arrays or ``jax.ShapeDtypeStruct``.

    Returns:
      A sequence of `CollectiveMatmul` that prints as a table.
    """
    ours, heard, waiting = _trace(fn, args, kwargs)
    found = [_describe(equation) for equation in ours]
    found += [_describe_partitioned(each) for each in heard]
    if not heard:
        found += [one for equation in waiting for one in _describe_whole(equation)]
    return Explanation(found)


@dataclasses.dataclass(frozen=True)
class Call:
    """A collective matmul as it was traced on one rank: operands are types."""

    request: Request
    choice: Choice
    pairs: tuple[tuple[Any, Any], ...]  # x and w of each product
    z: Any = None  # what a reduce-scatter gathers beside


def calls(fn: Callable[..., Any], args: Sequence[Any]) -> list[Call]:
    """Those of ``fn(*args)`` that `explain` lists, plain dots aside."""
    ours, heard, _ = _trace(fn, args, {})
    partitioned = (next((e for e in _equations(each.work.jaxpr) if e.primitive in _OURS), None) for each in heard)
    found = (_call(equation) for equation in (*ours, *partitioned) if equation is not None)
    return [call for call in found if not isinstance(call, str)]


def _trace(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[list[Any], list[Partitioned], list[Any]]:
    """Our equations in a traced function, what XLA's partitioner made of its products, and the equations of these."""
    # A function of its own, so that no cache has it and partitioning is seen.
    traced = jax.jit(lambda args, kwargs: fn(*args, **kwargs)).trace(args, kwargs)
    equations = list(_equations(traced.jaxpr.jaxpr))
    waiting = [equation for equation in equations if _partitioning.holds_product(equation)]
    heard: list[Partitioned] = []
    if waiting:
        with _partitioning.listen() as heard:
            traced.lower().compile()
    return [equation for equation in equations if equation.primitive in _OURS], heard, waiting


def _equations(jaxpr: Jaxpr) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from _equations(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def _call(equation: Any) -> Call | str:
    """Of an equation of ours; why it is none, if explicit shardings left it to XLA."""
    about = equation.params.get("about")
    if isinstance(about, str):
        return about
    if about is not None:
        request, choice = about
        return Call(request, choice, ((equation.params["x"], equation.params["w"]), *equation.params["more"]))
    request = equation.params["request"]
    operands = _operands.split(request, [variable.aval for variable in equation.invars])
    return Call(request, equation.params["choice"], operands.pairs(), operands.z)


def _describe(equation: Any) -> CollectiveMatmul:
    y, call = equation.outvars[0].aval, _call(equation)
    if isinstance(call, str):
        return _dot(_shard(equation.params["x"]), _shard(equation.params["w"]), _shard(y), False, call)
    request, choice, pairs, z = call.request, call.choice, call.pairs, call.z
    x, w = pairs[0]
    signal = choice.plan is not None and choice.strategy == "signal"
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
        arena_bytes=_strategy.arena_bytes(request, choice.plan, *_strategy.joined(request, pairs), z)
        if choice.plan
        else 0,
        gathered=gathered_type(request, z or x).shape if request.gathers else None,
        w_dtype=None if w.dtype == x.dtype else w.dtype,
        bias=request.biased,
        activation=request.activation,
        products=_products(request, pairs, y) if request.products > 1 else (),
        gated=request.gated,
        scratch_bytes=_strategy.scratch_bytes(request, choice.plan, x, w) if choice.plan and signal else 0,
        groups=(*_strategy.groups(request, choice.plan, x, w),) if choice.plan and signal else (),
        transpose_x=request.transpose_x,
    )


def _products(request: Request, pairs: Sequence[tuple[Any, Any]], y: Any) -> tuple[Product, ...]:
    columns, count = 0 if request.transpose_w else 1, len(pairs)
    sums = count // len(request.biases)  # of how many products one y is
    finishes = zip(request.biases * sums, request.activations * sums, strict=True)
    return tuple(
        Product(x.shape, w.shape, (*y.shape[:-1], w.shape[columns]), *finish)
        for (x, w), finish in zip(pairs, finishes, strict=True)
    )


def _describe_partitioned(each: Partitioned) -> CollectiveMatmul:
    for equation in _equations(each.work.jaxpr):
        if equation.primitive in _OURS:
            return _describe(equation)
    return _dot(*each.operands, each.result, each.transpose_w, each.layout.reason)


def _describe_whole(equation: Any) -> Iterator[CollectiveMatmul]:
    """Products that were lowered for one device: two operands and a result each."""
    for i, call in enumerate(equation.params["static_args"]):
        x, w, y = (variable.aval for variable in (*equation.invars[2 * i : 2 * i + 2], equation.outvars[i]))
        if call.product != "w":
            yield _dot(x, w, y, call.product == "x", "there is one device: a plain dot")


def _shard(aval: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(aval.sharding.shard_shape(aval.shape), aval.dtype)


def _dot(x: Any, w: Any, y: Any, transpose_w: bool, reason: str) -> CollectiveMatmul:
    def flat(shape: tuple[int, ...]) -> tuple[int, ...]:
        return math.prod(shape[:-2]), *shape[-2:]

    return CollectiveMatmul(
        op="dot",
        x=flat(x.shape),
        w=w.shape,
        y=flat(y.shape),
        dtype=x.dtype,
        result_dtype=y.dtype,
        transpose_w=transpose_w,
        axis_name=(),
        team_size=1,
        strategy="xla",
        reason=reason,
        plan=None,
        arena_bytes=0,
    )


def _plan(op: str, plan: Plan, groups: tuple[int, ...]) -> str:
    if plan.strategy == "signal":
        by = f" {plan.moved_by}" if plan.target == "sm90" else ""
        return f"{plan.tile_m}x{plan.tile_n} raster {plan.raster}{by} groups {'+'.join(map(str, groups))}"
    if plan.few_rows:
        return "few rows"
    rest = f"pushers {plan.pushers}" if op == "all_gather_matmul" else f"lead {plan.lead} {plan.transport}"
    if plan.strategy == "resident":
        lead = "" if op == "all_gather_matmul" else f"lead {plan.lead} "
        rest = lead + (f"{2 * plan.movers} SMs move" if plan.target == "sm90" else f"movers {plan.movers}")
    return f"{plan.tile_m}x{plan.tile_n} raster {plan.raster} {rest}"


def _cells(m: CollectiveMatmul) -> tuple[str, ...]:
    plan = ""
    if m.plan is not None:
        plan = _plan(m.op, m.plan, m.groups)
        plan += f" copiers {m.plan.copiers}" if m.gathered and not m.groups else ""
    memory = [f"{m.arena_bytes / 2**20:.1f} MiB"] if m.arena_bytes or not m.groups else []
    memory += [f"{m.scratch_bytes / 2**20:.1f} MiB scratch"] if m.groups else []
    all_ = m.products or (Product(m.x, m.w, m.y, m.bias, m.activation),)

    xs = [_array(m.dtype, p.x) + (".T" if m.transpose_x else "") for p in all_]
    ys = [_array(m.result_dtype, p.y) for p in all_]
    scattered = m.op != "all_gather_matmul"
    ops = dict.fromkeys(" + ".join([m.op, *["bias"] * p.bias, *filter(None, [p.activation])]) for p in all_)
    return (
        ", ".join([*ops, *["gated"] * m.gated]),
        ", ".join(xs if scattered else xs[:1]),
        ", ".join(_array(m.w_dtype or m.dtype, p.w) + (".T" if m.transpose_w else "") for p in all_),
        ", ".join(ys[:1] if scattered or m.gated else ys),
        _array(m.dtype, m.gathered) if m.gathered else "",
        f"{','.join(map(str, m.axis_name))}:{m.team_size}" if m.axis_name else "",
        m.strategy,
        ", ".join(memory) if m.plan else "",
        plan,
        m.reason,
    )


def _array(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    if len(shape) == 3 and shape[0] == 1:
        shape = shape[1:]
    return f"{dtype}[{','.join(map(str, shape))}]"
