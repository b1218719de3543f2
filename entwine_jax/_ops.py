"""The per-shard ops as users call them: what they compute."""

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import jax
from jax.typing import ArrayLike, DTypeLike

from . import _config, _gate_checks, _on_ranks
from ._config import Config
from ._float8_checks import Scales
from ._team import AxisName as AxisName


@overload
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    return_gathered: Literal[False] = False,
    transpose_w: bool = ...,
    bias: ArrayLike | None = ...,
    activation: str | None = ...,
    residuals: str = ...,
    scales: Scales | None = ...,
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
    transpose_w: bool = ...,
    bias: ArrayLike | None = ...,
    activation: str | None = ...,
    residuals: str = ...,
    scales: Scales | None = ...,
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
    transpose_w: bool = ...,
    bias: Sequence[ArrayLike | None] | None = ...,
    activation: Sequence[str | None] | None = ...,
    residuals: str = ...,
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = ...,
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
    transpose_w: bool = ...,
    bias: Sequence[ArrayLike | None] | None = ...,
    activation: Sequence[str | None] | None = ...,
    residuals: str = ...,
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[tuple[jax.Array, ...], jax.Array]: ...
@overload
def all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    gated: Literal[True],
    return_gathered: Literal[False] = False,
    transpose_w: bool = ...,
    bias: Sequence[ArrayLike | None] | None = ...,
    activation: str | None = ...,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> jax.Array: ...
@overload
def all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    gated: Literal[True],
    return_gathered: Literal[True],
    transpose_w: bool = ...,
    bias: Sequence[ArrayLike | None] | None = ...,
    activation: str | None = ...,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[jax.Array, jax.Array]: ...
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    gated: bool = False,
    return_gathered: bool = False,
    transpose_w: bool = False,
    bias: ArrayLike | Sequence[ArrayLike | None] | None = None,
    activation: str | Sequence[str | None] | None = None,
    residuals: str = "regather",
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = None,
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

    Several products of the same rows are one kernel: with a tuple or list of weights x is gathered once, and ``dx``,
    the sum of all ``dy_i @ w_i.T``, is one ``matmul_reduce_scatter`` of pairs. (Up to four; more are several calls, and
    few rows a call each.)::

        gate, up = all_gather_matmul(x, (w_gate, w_up), axis_name)

    The hidden features of a SwiGLU or GeGLU MLP are the product of two of these, which ``gated=True`` writes alone::

        h = all_gather_matmul(x, (w_gate, w_up), axis_name, gated=True, activation="silu")

        rows = lax.all_gather(x, axis_name, axis=x.ndim - 2, tiled=True)  # the same in lax
        h = jax.nn.silu(rows @ w_gate) * (rows @ w_up)

    Args:
      x: the rank's rows; leading dimensions are a batch.
      w: the rank's columns, a matrix; or several.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      gated: of two weights (w_gate, w_up), of as many columns, there is one result, h of shape (..., m, n / t):
        ``activation(all_gather(x) @ w_gate + b_gate) * (all_gather(x) @ w_up + b_up)``, with ``bias=(b_gate, b_up)``
        and one activation. The fused kernel multiplies float32 sums and rounds the product, where no gradient is taken,
        as in inference; the backward pass needs gate and up, so there the kernel writes both, rounded, and XLA makes h
        of them. Not for float8, nor under ``"signal"``.
      return_gathered: return ``(y, all_gather(x))``; the fused kernel copies what it gathers on the way. It is
        differentiable as well.
      transpose_w: whether w is stored as ``(n / t, k)``, as an embedding table tied to the last layer is:
        ``all_gather(x) @ w.T``. It is read as it lies, without a copy, and ``dw`` lies so too.
      bias: added to every row of y, of shape (n / t,): the rank's shard of it, as of w. y is then ``activation(
        all_gather(x) @ w + bias)``; the fused kernels do both to the float32 sums, before these are rounded, at next to
        no cost. With several weights a sequence, with None for those without.
      activation: None, ``"relu"``, ``"gelu"`` (exact, by erf), ``"gelu_tanh"`` (``jax.nn.gelu``'s default) or
        ``"silu"``. It is fused where no gradient is taken, as in inference (``"relu"`` always): the backward pass needs
        what it is a function of, so there XLA applies it to what the kernel has rounded. With several weights a
        sequence: ``activation=("silu", None)``.
      residuals: what the backward pass takes ``dw`` from. ``"regather"`` keeps x, the rank's own rows; ``"save"`` keeps
        the gathered x, t times as large, which spares the backward pass the link (and is done anyway where x has no
        gradient, as in a first layer). It is named ``"entwine_gathered"`` for policies of ``jax.checkpoint``, as what
        is gathered on XLA always is. With ``return_gathered=True`` the gathered x is there anyway, and kept.
      scales: of float8 operands, which must have them: (x_scale, w_scale), float32 scalars that x and w are multiplied
        by: ``y = activation((all_gather(x) @ w) * (x_scale * w_scale) + bias)``. x_scale must be the same on all ranks
        of the axis. Several weights may have a scale each, ``scales=(x_scale, (gate_scale, up_scale))``. See *float8*
        below.
      preferred_element_type: dtype of the result; by default that of the operands, which promote as in ``jnp.matmul``.
        float8 operands need it, bfloat16 or float32.
      precision: as in ``jnp.matmul``.
      strategy: ``"fused"`` (one kernel overlaps both; on CPU devices an executor of the same schedule), ``"resident"``
        (the same kernel, of which some thread blocks only move tiles and rows to the peers, while there are some; an
        executor too), ``"signal"`` (NCCL moves groups of tiles on a second stream while a kernel multiplies, which
        needs no peer access; an executor too), ``"xla"`` (the lax line above) or ``"auto"`` (fused where it can run on
        GPUs and is predicted to win, or measured to by `autotune`, as resident and signal may be; signal too where
        there is no peer access; else xla; `explain` says which and why). ``None`` reads ``ENTWINE_STRATEGY`` while
        tracing, and without it means ``"auto"``.
      config: overrides for the schedule.

    Returns:
      y, a tuple of one y for each of several weights, or h; or ``(y, all_gather(x))``. Products are summed in float32
      under ``"fused"`` and rounded to y's dtype once.

    With ``"fused"`` on GPUs, operands are bfloat16 or float16, the result the same or float32, and row lengths (k, n) a
    multiple of 16 bytes; on CPU devices operands may be float32, too. In the backward pass of bfloat16 operands a
    float32 ``dy`` is rounded to bfloat16 first; of float16 operands it isn't, since float16 has not the range for that,
    and the product is one of float32, which on GPUs is XLA's. Each team keeps peer-mapped memory for all its calls:
    twice ``(t - 1)`` chunks of ``x`` for the largest call, plus one word a row block; `explain` tells the bytes.

    ``"resident"`` takes what ``"fused"`` does, few rows as tiles. Its partial sums, and an all-reduce's finished tiles,
    are kept once more, where they are made: some twice the peer-mapped memory; all-gather's is the same.

    ``"signal"`` returns x's dtype, takes no float8, and not so few rows that there is nothing to group (128); each of
    several weights is a call. XLA allocates what it needs beside the results, all of x once more unless that is one.

    *float8*: x is float8_e4m3fn or float8_e5m2, w float8_e4m3fn. Sums are multiplied by ``x_scale * w_scale``, in
    float32, before they are rounded or travel; bias and activation come after that, in float32 too. The tensor cores
    take such operands only if they are contiguous in k: a ``w`` of (k, n) is transposed by XLA first, a copy that
    `explain` names. There is none with ``transpose_w=True``, or if ``w`` is itself a transpose of an (n, k) array.
    There is no gradient, which would be float8 as well (nor one of the bias): `float8_all_gather_matmul` has one, and
    ``residuals="save"``, which would be for it, is an error.

    Raises:
      TypeError: operands aren't arrays, have no matching contraction, or dtypes that don't promote; a bias of another
        length, rank or kind of number; gated weights of different columns; scales that are missing, of another form
        than a pair of float32 scalars, or of operands that aren't float8; a gradient of float8 operands is asked for.
      ValueError: the axis isn't a manual axis of the mesh; unknown activation, residuals, strategy, precision or
        setting; an x_scale that varies over the axis; residuals of float8 operands; as many biases, activations or
        scales as weights are wanted, but aren't given; gated, other than two weights or more than one activation.
      NotImplementedError: a named strategy but ``"xla"`` can't run these types, shapes or devices; gated float8.

    The algorithm is FLUX's (arXiv 2406.06858), with the tile-by-tile schedule of Entwine (arXiv 2609.11562).
    """
    op = "all_gather_matmul"
    saves = _config.saves(op, residuals)
    if gated:
        _gate_checks.weights(op, x, w, scales)
    if isinstance(w, tuple | list):
        ys, rows = _on_ranks.several(
            x,
            w,
            axis_name,
            preferred_element_type,
            precision,
            strategy,
            config,
            gathers=bool(return_gathered),
            saves=saves,
            transpose_w=transpose_w,
            bias=bias,
            activation=activation,
            scales=scales,
            gated=bool(gated),
        )
        made = ys[0] if gated else ys
        return made if rows is None else (made, rows)
    y, gathered = _on_ranks.on_ranks(
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
        transpose_w=transpose_w,
        bias=cast(Any, bias),
        activation=cast(Any, activation),
        scales=cast(Any, scales),
    )
    return y if gathered is None else (y, gathered)
