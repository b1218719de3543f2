"""The per-shard ops: what they compute, their gradients, and their batching."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

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


def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
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
    of times in reverse: ``dx`` is ``matmul_reduce_scatter(dy, w.T)`` without a copy of ``w``, ``dw`` is XLA's own
    ``all_gather(x).T @ dy``. Under ``vmap`` a batch of ``x`` joins the leading dimensions and a batch of ``w`` its
    columns.

    For policies of ``jax.checkpoint``: on XLA the gathered x is named ``"entwine_gathered"``; fused, it is nowhere
    whole, and x itself is what to save.

    Args:
      x: the rank's rows; leading dimensions are a batch.
      w: the rank's columns, a matrix.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      preferred_element_type: dtype of the result; by default that of the operands, which promote as in ``jnp.matmul``.
      precision: as in ``jnp.matmul``.
      strategy: ``"fused"`` (one kernel overlaps both; on CPU devices an executor of the same schedule), ``"xla"`` (the
        lax line above) or ``"auto"`` (fused where it can run on GPUs, else xla; `explain` says which and why). ``None``
        reads ``ENTWINE_STRATEGY`` while tracing, and without it means ``"auto"``.
      config: overrides for the fused schedule.

    Returns:
      y. Products are summed in float32 under ``"fused"`` and rounded to y's dtype once.

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
    return on_ranks("all_gather_matmul", x, w, axis_name, preferred_element_type, precision, strategy, config)


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
    ``all_gather_matmul(dy, w.T)`` without a copy of ``w``, ``dw`` is XLA's own ``x.T @ all_gather(dy)``. Under ``vmap``
    a batch of ``x`` joins the leading dimensions and a batch of ``w`` its columns.

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
    return on_ranks("matmul_reduce_scatter", x, w, axis_name, preferred_element_type, precision, strategy, config)


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
    return on_ranks("matmul_all_reduce", x, w, axis_name, preferred_element_type, precision, strategy, config)


def on_ranks(
    op: str,
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
) -> jax.Array:
    """An op by its name, inside a manual shard_map."""
    x, w = _checks.arrays(op, x, w)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name)
    operand, dtype = _checks.types(op, x, w, preferred_element_type, precision)
    request = Request(op, team, False, dtype, precision, settings)
    x, w = _lowering.vary(x.astype(operand), w.astype(operand), team.axis_name)
    leading, matrix = x.shape[:-2], x.shape[-2:]
    y = _matmul(request, x.reshape(math.prod(leading), *matrix), w)
    return y.reshape(*leading, *y.shape[1:])


def of_shards(
    op: str, team: Team, a: jax.Array, b: jax.Array, transpose_b: bool, dtype: Any, precision: Any, settings: Settings
) -> jax.Array:
    """An op without its gradient, on a rank's shards as a front end has spread them; a may have leading dimensions.

    If a and b are of different dtypes, `dtype` is what a gradient is wanted in, and the product is taken in theirs.
    """
    leading, matrix = a.shape[:-2], a.shape[-2:]
    a = a.reshape(math.prod(leading), *matrix)
    request = Request(op, team, transpose_b, dtype, precision, settings)
    if a.dtype != b.dtype:
        operand = _operand(_strategy.choose(request, a.astype(b.dtype), b), b, a.dtype)
        a, b, request = a.astype(operand), b.astype(operand), dataclasses.replace(request, dtype=operand)
    y = _matmul(request, a, b)
    return y.reshape(*leading, *y.shape[1:]).astype(dtype)


def _matmul(request: Request, x: jax.Array, w: jax.Array) -> jax.Array:
    """x (batch, rows, k), w (k, n) or (n, k), of one dtype and varying over the same axes."""
    choice = _strategy.choose(request, x, w)
    if choice.strategy == "fused":
        y: jax.Array = _fused(request, choice, x, w)
        return y
    return _lowering.on_xla(request, choice, x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(request: Request, choice: Choice, x: jax.Array, w: jax.Array) -> jax.Array:
    y: jax.Array = _lowering.collective_matmul_p.bind(x, w, request=request, choice=choice)
    return y


def _forward(
    request: Request, choice: Choice, x: jax.Array, w: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _fused(request, choice, x, w), (x, w)


# The op that is dx of another.
_OTHER = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}


def _backward(
    request: Request, choice: Choice, saved: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    operand = _operand(choice, w, dy.dtype)
    dy = dy.astype(operand)
    if request.op == "matmul_all_reduce":
        dy = _of_every_rank(dy, x, request.team.axis_name)
        dx = _reference.matmul(
            dy, w.astype(operand), transpose_w=not request.transpose_w, dtype=operand, precision=request.precision
        )
    else:
        to_dx = dataclasses.replace(request, op=_OTHER[request.op], transpose_w=not request.transpose_w, dtype=operand)
        dx = _matmul(to_dx, dy, w.astype(operand))
    dw = _reference.weight_gradient(
        request.op, x.astype(operand), dy, request.team.axis_name, precision=request.precision
    )
    return dx.astype(x.dtype), (dw.T if request.transpose_w else dw).astype(w.dtype)


_fused.defvjp(_forward, _backward)


def _of_every_rank(dy: jax.Array, x: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """The cotangent of a sum over ranks, for each of them. This is psum's transpose: y is the same on all ranks, and if
    types know it (x varies, y doesn't), so is dy; if not, dy comes in shares that must be added."""
    if {*axis_name} <= jax.typeof(x).manual_axis_type.varying:
        return _lowering.vary(dy, x, axis_name)[0]
    summed: jax.Array = lax.psum(dy, axis_name)
    return summed


def _operand(choice: Choice, w: jax.Array, cotangent: Any) -> Any:
    """What a gradient's product is taken in. The fused kernels multiply bfloat16: a float32 cotangent is rounded for
    them. (float16 has not the range for that.)"""
    rounds = w.dtype == jnp.bfloat16 and choice.strategy == "fused"
    return w.dtype if rounds else jnp.promote_types(cotangent, w.dtype)


def _batch(args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any) -> tuple[jax.Array, int]:
    """A batch of x joins x's own; a batch of w joins its columns; batches of both are taken one by one."""
    (x, w), (x_dim, w_dim) = args, dims
    bind = functools.partial(_lowering.collective_matmul_p.bind, **params)
    if w_dim is None:
        x = jnp.moveaxis(x, x_dim, 0)  # type: ignore[arg-type]
        y = bind(x.reshape(-1, *x.shape[2:]), w)
        return y.reshape(*x.shape[:2], *y.shape[1:]), 0
    if x_dim is None:
        columns = 0 if params["request"].transpose_w else 1
        w = jnp.moveaxis(w, w_dim, columns)
        many, n = w.shape[columns : columns + 2]
        y = bind(x, lax.collapse(w, columns, columns + 2))
        return y.reshape(*y.shape[:2], many, n), 2
    x, w = jnp.moveaxis(x, x_dim, 0), jnp.moveaxis(w, w_dim, 0)
    return lax.map(lambda pair: bind(*pair), (x, w)), 0


batching.primitive_batchers[_lowering.collective_matmul_p] = _batch
