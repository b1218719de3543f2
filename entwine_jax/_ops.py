"""The per-shard ops: what they compute, their gradients, and their batching."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _config, _lowering, _reference, _strategy, _team
from ._config import Config, Settings
from ._strategy import Choice, Request
from ._team import Team

AxisName = str | Sequence[str]


@overload
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> jax.Array: ...
@overload
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    return_gathered: Literal[True],
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
@overload
def all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[jax.Array, ...]: ...
@overload
def all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    return_gathered: Literal[True],
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[tuple[jax.Array, ...], jax.Array]: ...
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    return_gathered: bool = False,
    residuals: str = "regather",
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, ...] | tuple[jax.Array | tuple[jax.Array, ...], jax.Array]:
    """``y = all_gather(x) @ w``, the gather running while the product does. For use inside ``jax.shard_map``.

    The column-parallel matmul of a tensor-parallel layer, in lax::

        lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True) @ w

    ======  ====================  ==================================  =====================
    array   local shape           global shape over a team of t       sharded
    ======  ====================  ==================================  =====================
    ``x``   ``(..., m / t, k)``   ``(..., m, k)``                     rows
    ``w``   ``(k, n / t)``        ``(k, n)``                          columns
    ``y``   ``(..., m, n / t)``   ``(..., m, n)``                     columns
    ======  ====================  ==================================  =====================

    ``x`` and ``w`` may also be replicated over the axis, or vary over other axes of the mesh. Differentiable any number
    of times in reverse: ``dx`` is ``matmul_reduce_scatter(dy, w.T)`` without a copy of ``w``, and the same kernel
    gathers x again beside it, so that ``dw = all_gather(x).T @ dy`` is a plain dot without a collective of its own.
    Under ``vmap`` a batch of ``x`` joins the leading dimensions and a batch of ``w`` its columns.

    Several products of the same rows need one gather: with a tuple or list of weights, x is gathered beside the first
    product, the others are plain dots of what has come, and each dx is a ``matmul_reduce_scatter``::

        gate, up = all_gather_matmul(x, (w_gate, w_up), axis_name)

    Args:
      x: the rank's rows; leading dimensions are a batch.
      w: the rank's columns, a matrix; or several.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      return_gathered: return ``(y, all_gather(x))``; the fused kernel copies what it gathers on the way. It is
        differentiable as well.
      residuals: what the backward pass takes ``dw`` from. ``"regather"`` keeps x, the rank's own rows; ``"save"`` keeps
        the gathered x, t times as large, which spares the backward pass the link (and is done anyway where x has no
        gradient, as in a first layer). It is named ``"entwine_gathered"``
        for policies of ``jax.checkpoint``, as what is gathered on XLA always is. With ``return_gathered=True`` or
        several weights the gathered x is there anyway, and kept.
      preferred_element_type: dtype of the result; by default that of the operands, which promote as in ``jnp.matmul``.
      precision: as in ``jnp.matmul``.
      strategy: ``"fused"`` (one kernel overlaps both; on CPU devices an executor of the same schedule), ``"xla"`` (the
        lax line above) or ``"auto"`` (fused where it can run on GPUs, else xla; `explain` says which and why). ``None``
        reads ``ENTWINE_STRATEGY`` while tracing, and without it means ``"auto"``.
      config: overrides for the fused schedule.

    Returns:
      y, a tuple of one y for each of several weights; or ``(y, all_gather(x))``. Products are summed in float32 under
      ``"fused"`` and rounded to y's dtype once.

    With ``"fused"`` on GPUs, operands are bfloat16, the result bfloat16 or float32, and row lengths (k, n) a multiple
    of 16 bytes; on CPU devices operands are bfloat16, float16 or float32, the result the same or float32. In the
    backward pass of bfloat16 operands a float32 ``dy`` is rounded to bfloat16 first. Each team keeps peer-mapped memory
    for all its calls: twice ``(t - 1)`` chunks of ``x`` for the largest call, plus one word a row block; `explain`
    tells the bytes.

    Raises:
      TypeError: operands aren't arrays, have no matching contraction, or dtypes that don't promote.
      ValueError: the axis isn't a manual axis of the mesh; an unknown strategy, precision or setting.
      NotImplementedError: ``strategy="fused"`` can't run these types, shapes or devices.

    The algorithm is FLUX's (arXiv 2406.06858), with the tile-by-tile schedule of Entwine (arXiv 2609.11562).
    """
    op = "all_gather_matmul"
    saves = _config.saves(op, residuals)
    if isinstance(w, tuple | list):
        ys, rows = _several(x, w, axis_name, preferred_element_type, precision, strategy, config)
        return (ys, rows) if return_gathered else ys
    y, gathered = on_ranks(
        op,
        x,
        cast(ArrayLike, w),
        axis_name,
        preferred_element_type,
        precision,
        strategy,
        config,
        bool(return_gathered),
        saves,
    )
    return y if gathered is None else (y, gathered)


def matmul_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """``y = reduce_scatter(x @ w)``, the scatter running while the product does. For use inside ``jax.shard_map``.

    The row-parallel matmul of a tensor-parallel layer, in lax::

        lax.psum_scatter(x @ w, axis_name, scatter_dimension=x.ndim - 2, tiled=True)

    ======  ====================  ==================================  =====================
    array   local shape           global shape over a team of t       sharded
    ======  ====================  ==================================  =====================
    ``x``   ``(..., m, k / t)``   ``(..., m, k)``                     columns
    ``w``   ``(k / t, n)``        ``(k, n)``                          rows
    ``y``   ``(..., m / t, n)``   ``(..., m, n)``                     rows
    ======  ====================  ==================================  =====================

    ``m`` must be a multiple of ``t``. ``x`` and ``w`` may also be replicated over the axis (each rank then adds the
    same), or vary over other axes of the mesh. Differentiable any number of times in reverse: ``dx`` is
    ``all_gather_matmul(dy, w.T)`` without a copy of ``w``, and ``dw = x.T @ all_gather(dy)`` a plain dot with what that
    has gathered. Under ``vmap`` a batch of ``x`` joins the leading dimensions and a batch of ``w`` its columns.

    Args:
      x: the rank's part of the contraction; leading dimensions are a batch.
      w: the rank's part of the contraction, a matrix.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      preferred_element_type: dtype of the result; by default that of the operands, which promote as in ``jnp.matmul``.
      precision: as in ``jnp.matmul``.
      strategy: ``"fused"`` (one kernel overlaps both; on CPU devices an executor of the same schedule), ``"xla"`` (the
        lax line above) or ``"auto"`` (fused where it can run on GPUs, else xla; `explain` says which and why). ``None``
        reads ``ENTWINE_STRATEGY`` while tracing, and without it means ``"auto"``.
      config: overrides for the fused schedule.

    Returns:
      y. Under ``"fused"`` products are summed in float32; partial sums travel in y's dtype, as XLA's do (so with
      bfloat16 each of a peer's is rounded once; ``preferred_element_type=float32`` avoids that for twice the bytes),
      and the ranks' sums are added in float32 in rank order. So the result is the same to the bit in every run.

    With ``"fused"`` on GPUs, operands are bfloat16, the result bfloat16 or float32, and row lengths (k, n) a multiple
    of 16 bytes; on CPU devices operands are bfloat16, float16 or float32, the result the same or float32. In the
    backward pass of bfloat16 operands a float32 ``dy`` is rounded to bfloat16 first. Each team keeps peer-mapped memory
    for all its calls: twice ``(t - 1)`` chunks of ``y`` (in whole tiles) for the largest call, plus a few words a tile;
    `explain` tells the bytes.

    Raises:
      TypeError: operands aren't arrays, have no matching contraction, or dtypes that don't promote.
      ValueError: the axis isn't a manual axis of the mesh; rows that the team can't share evenly; an unknown strategy,
        precision or setting.
      NotImplementedError: ``strategy="fused"`` can't run these types, shapes or devices.

    The algorithm is FLUX's (arXiv 2406.06858), with the paced tile order of Entwine (arXiv 2609.11562).
    """
    op = "matmul_reduce_scatter"
    return on_ranks(op, x, w, axis_name, preferred_element_type, precision, strategy, config)[0]


def matmul_all_reduce(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """``y = all_reduce(x @ w)``, the sum over ranks running while the product does. For use inside ``jax.shard_map``.

    The row-parallel matmul of a tensor-parallel layer whose result every rank needs whole, in lax::

        lax.psum(x @ w, axis_name)

    ======  ====================  ==================================  =====================
    array   local shape           global shape over a team of t       sharded
    ======  ====================  ==================================  =====================
    ``x``   ``(..., m, k / t)``   ``(..., m, k)``                     columns
    ``w``   ``(k / t, n)``        ``(k, n)``                          rows
    ``y``   ``(..., m, n)``       ``(..., m, n)``                     not
    ======  ====================  ==================================  =====================

    Any ``m`` will do. ``x`` and ``w`` may also be replicated over the axis (each rank then adds the same), or vary over
    other axes of the mesh. Where the rows of y may stay sharded, `matmul_reduce_scatter` moves half of the bytes.

    Differentiable any number of times in reverse, as psum is. With ``check_vma=True``, y is typed as the same on every
    rank of the axis, and so is ``dy``: ``dx = dy @ w.T`` and ``dw = x.T @ dy`` are products of shards, without any
    collective. With ``check_vma=False`` JAX can't know that and hands each rank a share of ``dy``, which a psum adds
    first. Under ``vmap`` a batch of ``x`` joins the leading dimensions and a batch of ``w`` its columns.

    Args:
      x: the rank's part of the contraction; leading dimensions are a batch.
      w: the rank's part of the contraction, a matrix.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      preferred_element_type: dtype of the result; by default that of the operands, which promote as in ``jnp.matmul``.
      precision: as in ``jnp.matmul``.
      strategy: ``"fused"`` (one kernel overlaps both; on CPU devices an executor of the same schedule), ``"xla"`` (the
        lax line above) or ``"auto"`` (fused where it can run on GPUs, else xla; `explain` says which and why). ``None``
        reads ``ENTWINE_STRATEGY`` while tracing, and without it means ``"auto"``.
      config: overrides for the fused schedule.

    Returns:
      y. Under ``"fused"`` products are summed in float32; partial sums travel in y's dtype, as XLA's do (so with
      bfloat16 each of a peer's is rounded once; ``preferred_element_type=float32`` avoids that for twice the bytes).
      Each element is summed by one rank, in float32 and in rank order, rounded once and sent to all. So the result is
      the same to the bit on every rank and in every run.

    With ``"fused"`` on GPUs, operands are bfloat16, the result bfloat16 or float32, and row lengths (k, n) a multiple
    of 16 bytes; on CPU devices operands are bfloat16, float16 or float32, the result the same or float32. In the
    backward pass of bfloat16 operands a float32 ``dy`` is rounded to bfloat16 first. Each team keeps peer-mapped memory
    for all its calls: four times ``(t - 1) / t`` of ``y`` (in whole tiles) for the largest call, plus a few words a
    tile; `explain` tells the bytes.

    Raises:
      TypeError: operands aren't arrays, have no matching contraction, or dtypes that don't promote.
      ValueError: the axis isn't a manual axis of the mesh; an unknown strategy, precision or setting.
      NotImplementedError: ``strategy="fused"`` can't run these types, shapes or devices.

    The algorithm is FLUX's (arXiv 2406.06858), with the paced tile order of Entwine (arXiv 2609.11562).
    """
    op = "matmul_all_reduce"
    return on_ranks(op, x, w, axis_name, preferred_element_type, precision, strategy, config)[0]


def on_ranks(
    op: str,
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
    gathers: bool = False,
    saves: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """An op by its name, inside a manual shard_map.

    With `gathers`, an all-gather's gathered x too; with `saves` it keeps that for the weight gradient.
    """
    x, w = _checks.arrays(op, x, w)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name)
    operand, dtype = _checks.types(op, x, w, preferred_element_type, precision)
    request = Request(op, team, False, dtype, precision, settings, gathers, saves)
    x, w = _lowering.vary(x.astype(operand), w.astype(operand), team.axis_name)
    leading = x.shape[:-2]
    y, gathered = _run(request, _flat(x), w)
    return y.reshape(*leading, *y.shape[1:]), gathered if gathered is None else gathered.reshape(
        *leading, *gathered.shape[1:]
    )


def _several(
    x: ArrayLike,
    ws: Sequence[ArrayLike],
    axis_name: AxisName,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """all_gather_matmul of several weights: the first product gathers, the others use what it has gathered."""
    op = "all_gather_matmul"
    _checks.several(op, ws)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    pairs = [_checks.arrays(op, x, w) for w in ws]
    x = pairs[0][0]
    for _, w in pairs:
        _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name)
    operand = jnp.result_type(*(_checks.types(op, x, w, preferred_element_type, precision)[0] for _, w in pairs))
    x = x.astype(operand)
    dtype = _checks.types(op, x, x, preferred_element_type, precision)[1]
    request = Request(op, team, False, dtype, precision, settings, gathers=True, saves=True)
    arrays = [w.astype(operand) for _, w in pairs]
    for _ in range(2):  # the second time with all axes that any of them varies over
        for i, w in enumerate(arrays):
            x, arrays[i] = _lowering.vary(x, w, team.axis_name)
    leading, x = x.shape[:-2], _flat(x)
    y, rows = _run(request, x, arrays[0])
    assert rows is not None
    ys = [y, *(_of_rows(request, x, w, rows) for w in arrays[1:])]
    shaped = [v.reshape(*leading, *v.shape[1:]) for v in (*ys, rows)]
    return tuple(shaped[:-1]), shaped[-1]


def of_shards(
    op: str, team: Team, a: jax.Array, b: jax.Array, transpose_b: bool, dtype: Any, precision: Any, settings: Settings
) -> jax.Array:
    """An op without its gradient, on a rank's shards as a front end has spread them; a may have leading dimensions.

    If a and b are of different dtypes, `dtype` is what a gradient is wanted in, and the product is taken in theirs.
    """
    request = Request(op, team, transpose_b, dtype, precision, settings)
    a, leading = _flat(a), a.shape[:-2]
    if a.dtype != b.dtype:
        operand = _operand(_strategy.choose(request, a.astype(b.dtype), b), b.dtype, a.dtype)
        a, b, request = a.astype(operand), b.astype(operand), dataclasses.replace(request, dtype=operand)
    y = _run(request, a, b)[0]
    return y.reshape(*leading, *y.shape[1:]).astype(dtype)


def gradients_of_shards(
    op: str, team: Team, y: jax.Array, w: jax.Array, x: jax.Array, precision: Any, settings: Settings
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of x @ w, on a rank's shards as a front end has spread them, in the dtypes of x and w.

    y is the cotangent; `op` takes dx = y @ w.T, and gathers beside it what dw = x.T @ y needs: all the team's rows.
    """
    request = Request(op, team, True, w.dtype, precision, settings)
    operand = _operand(_strategy.choose(request, _flat(y).astype(w.dtype), w), w.dtype, y.dtype)
    request = dataclasses.replace(request, dtype=operand)
    dx, dw = _gradients(request, *(v.astype(operand) for v in (_flat(y), w, _flat(x))))
    return dx.reshape(x.shape).astype(x.dtype), dw.astype(w.dtype)


def _flat(x: jax.Array) -> jax.Array:
    """Leading dimensions as one batch."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _run(
    request: Request, x: jax.Array, w: jax.Array, z: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """y, and the gathered array if `request.gathers`: all of x (all-gather) or of z (reduce-scatter).

    x (batch, rows, k), w (k, n) or (n, k), of one dtype and varying over the same axes, as z does.
    """
    choice = _strategy.choose(request, x, w)
    if z is not None and (choice.strategy != "fused" or _strategy.gather_obstacle(request, z) is not None):
        y = _run(dataclasses.replace(request, gathers=False), x, w)[0]
        return y, _reference.gather(z, request.team.axis_name)
    if choice.strategy == "fused":
        results: tuple[jax.Array, jax.Array | None] = _fused_inline(request, choice, x, w, z)
        return results
    return _lowering.on_xla(request, choice, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    request: Request, choice: Choice, x: jax.Array, w: jax.Array, z: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    operands = (x, w) if z is None else (x, w, z)
    results = _lowering.collective_matmul_p.bind(*operands, request=request, choice=choice)
    return results[0], results[1] if request.gathers else None


def _forward(request: Request, choice: Choice, x: Any, w: Any, z: Any) -> Any:
    """Keeps only what the gradients that are wanted need: w for dx; for dw x, or all of x where that is at hand, or
    where there will be no dx beside which to gather it.

    What isn't kept is an empty array in its place: JAX may trace this once more, with other gradients wanted, and mixes
    up residuals of different structure.
    """
    whole = request.gathers or request.saves or not x.perturbed
    whole = whole and w.perturbed and request.op == "all_gather_matmul"
    run = dataclasses.replace(request, gathers=request.gathers or whole)
    if run.gathers and choice.plan is not None:
        choice = dataclasses.replace(choice, plan=dataclasses.replace(choice.plan, few_rows=False))
    y, gathered = _fused_inline(run, choice, x.value, w.value, None if z is None else z.value)
    if request.op == "all_gather_matmul" and gathered is not None:
        gathered = _reference.named(gathered)
    nothing = jnp.zeros((0,), x.value.dtype)
    kept = (
        x.value if w.perturbed and not whole else nothing,
        w.value if x.perturbed else nothing,
        gathered if whole else nothing,
    )
    return (y, gathered if request.gathers else None), kept


# The op that is dx of another.
_OTHER = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}


def _backward(request: Request, choice: Choice, kept: Any, cotangents: Any) -> Any:
    dy, d_gathered = (None if isinstance(d, jax.custom_derivatives.SymbolicZero) else d for d in cotangents)
    dx = dw = dz = None
    if dy is not None:
        x, w, gathered = (v if v.size else None for v in kept)
        dx, dw = _from_dy(request, choice, dy, x, w, gathered, kept[0].dtype)
    if d_gathered is not None:
        back = _reference.gather_gradient(d_gathered, request.team.axis_name)
        if request.op == "matmul_reduce_scatter":
            dz = back
        else:
            dx = back if dx is None else dx + back
    return dx, dw, dz


def _from_dy(request: Request, choice: Choice, dy: Any, x: Any, w: Any, gathered: Any, dtype: Any) -> tuple[Any, Any]:
    """dx and dw, in `dtype`, of what `_forward` has kept the operands for."""
    operand, axis_name = _operand(choice, dtype, dy.dtype), request.team.axis_name
    dy, x, w, gathered = (None if v is None else v.astype(operand) for v in (dy, x, w, gathered))
    transpose, precision = not request.transpose_w, request.precision
    dx = dw = None
    if request.op == "matmul_all_reduce":
        dy = _of_every_rank(dy, w if x is None else x, axis_name)
        if w is not None:
            dx = _reference.matmul(dy, w, transpose_w=transpose, dtype=operand, precision=precision)
        if x is not None:
            dw = _reference.weight_gradient(x, dy, precision=precision)
    else:
        to_dx = Request(_OTHER[request.op], request.team, transpose, operand, precision, request.settings)
        if w is not None and x is not None:
            dx, dw = _gradients(to_dx, dy, w, x)
        elif w is not None:
            dx = _run(to_dx, dy, w)[0]
        elif x is not None:  # of a reduce-scatter; without a product to hide behind, the gather is XLA's own
            dw = _reference.weight_gradient(x, _reference.gather(dy, axis_name), precision=precision)
        if gathered is not None:
            dw = _reference.weight_gradient(gathered, dy, precision=precision)
    if dw is not None and request.transpose_w:
        dw = dw.T
    return None if dx is None else dx.astype(dtype), None if dw is None else dw.astype(dtype)


def _of_every_rank(dy: jax.Array, x: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """The cotangent of a sum over ranks, for each of them. This is psum's transpose: y is the same on all ranks, and if
    types know it (x varies, y doesn't), so is dy; if not, dy comes in shares that must be added."""
    if {*axis_name} <= jax.typeof(x).manual_axis_type.varying:
        return _lowering.vary(dy, x, axis_name)[0]
    summed: jax.Array = lax.psum(dy, axis_name)
    return summed


# Symbolic zeros tell which gradients are wanted, and that nobody has used the gathered array.
_fused.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _fused_inline(
    request: Request, choice: Choice, x: jax.Array, w: jax.Array, z: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """In a trace of its own, since shard_map outside of jit knows no symbolic zeros."""
    results: tuple[jax.Array, jax.Array | None] = _fused(request, choice, x, w, z)
    return results


def _of_rows(request: Request, x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """all_gather_matmul where all of x is at hand: `rows`."""
    choice = _strategy.choose(request, x, w)
    if choice.strategy == "fused":
        y: jax.Array = _dot_of_rows_inline(request, choice, x, w, rows)
        return y
    return _reference.matmul(rows, w, transpose_w=request.transpose_w, dtype=request.dtype, precision=request.precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot_of_rows(request: Request, choice: Choice, x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """A plain dot, whose gradient of x is the fused one: rows are taken to be what they are, not to depend on x."""
    return _reference.matmul(rows, w, transpose_w=request.transpose_w, dtype=request.dtype, precision=request.precision)


def _forward_of_rows(request: Request, choice: Choice, x: Any, w: Any, rows: Any) -> Any:
    nothing = jnp.zeros((0,), w.value.dtype)  # as in _forward
    kept = w.value if x.perturbed else nothing, rows.value if w.perturbed else nothing
    return _dot_of_rows_inline(request, choice, x.value, w.value, rows.value), kept


def _backward_of_rows(request: Request, choice: Choice, kept: Any, dy: Any) -> Any:
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    w, rows = (v if v.size else None for v in kept)
    dx, dw = _from_dy(request, choice, dy, None, w, rows, kept[0].dtype)
    return dx, dw, None


_dot_of_rows.defvjp(_forward_of_rows, _backward_of_rows, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _dot_of_rows_inline(request: Request, choice: Choice, x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    y: jax.Array = _dot_of_rows(request, choice, x, w, rows)
    return y


def _gradients(to_dx: Request, dy: jax.Array, w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dx and dw from one call: what dw needs of the peers is gathered beside dx's product."""
    to_dx = dataclasses.replace(to_dx, gathers=True)
    if to_dx.op == "matmul_reduce_scatter":
        dx, rows = _run(to_dx, dy, w, x)
        assert rows is not None
        return dx, _reference.weight_gradient(rows, dy, precision=to_dx.precision)
    dx, rows = _run(to_dx, dy, w)
    assert rows is not None
    return dx, _reference.weight_gradient(x, rows, precision=to_dx.precision)


def _operand(choice: Choice, dtype: Any, cotangent: Any) -> Any:
    """What a gradient's product is taken in; `dtype` is the operands'. The fused kernels multiply bfloat16: a float32
    cotangent is rounded for them. (float16 has not the range for that.)"""
    rounds = dtype == jnp.bfloat16 and choice.strategy == "fused"
    return dtype if rounds else jnp.promote_types(cotangent, dtype)


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[list[Any], list[int]]:
    """A batch of x joins x's own, and one of z z's; a batch of w joins its columns; batches of both x and w are taken
    one by one."""
    size = next(v.shape[dim] for v, dim in zip(args, dims, strict=True) if dim is not None)
    x, w, *z = (v if dim is None else jnp.moveaxis(v, dim, 0) for v, dim in zip(args, dims, strict=True))
    bind = functools.partial(_lowering.collective_matmul_p.bind, **params)
    x_batched, w_batched, *z_batched = (dim is not None for dim in dims)
    if x_batched and w_batched:
        z = [v if batched else jnp.broadcast_to(v, (size, *v.shape)) for v, batched in zip(z, z_batched, strict=True)]
        results = lax.map(lambda operands: bind(*operands), (x, w, *z))
        return results, [0] * len(results)
    request: Request = params["request"]
    columns = 0 if request.transpose_w else 1
    if w_batched:
        w = lax.collapse(jnp.moveaxis(w, 0, columns), columns, columns + 2)
    rows = ((x, x_batched), *zip(z, z_batched, strict=True))
    x, *z = (v.reshape(-1, *v.shape[2:]) if batched else v for v, batched in rows)
    y, *gathered = bind(x, w, *z)
    y_dim = 0
    if x_batched:
        y = y.reshape(size, -1, *y.shape[1:])
    elif w_batched:
        y, y_dim = y.reshape(*y.shape[:2], size, -1), 2
    else:
        y = jnp.broadcast_to(y, (size, *y.shape))
    # All results are batched: vmap of a custom_vjp sums the cotangent of one that isn't once too often (JAX 0.11.2).
    many = rows[-1][1]
    gathered = [v.reshape(size, -1, *v.shape[1:]) if many else jnp.broadcast_to(v, (size, *v.shape)) for v in gathered]
    return [y, *gathered], [y_dim, *[0] * len(gathered)]


batching.primitive_batchers[_lowering.collective_matmul_p] = _batch
