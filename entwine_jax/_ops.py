"""The per-shard ops as users call them: what they compute."""

from collections.abc import Sequence
from typing import Any, Literal, cast, overload

import jax
from jax.typing import ArrayLike, DTypeLike

from . import _config, _on_ranks
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
def all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
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

    Args:
      x: the rank's rows; leading dimensions are a batch.
      w: the rank's columns, a matrix; or several.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
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
      strategy: ``"fused"`` (one kernel overlaps both; on CPU devices an executor of the same schedule), ``"signal"``
        (NCCL moves groups of tiles on a second stream while a kernel multiplies, which needs no peer access; on CPU
        devices an executor too), ``"xla"`` (the lax line above) or ``"auto"`` (fused where it can run on GPUs and is
        predicted to win, or measured to by `autotune`, as signal may be; signal too where there is no peer access; else
        xla; `explain` says which and why). ``None`` reads ``ENTWINE_STRATEGY`` while tracing, and without it means
        ``"auto"``.
      config: overrides for the schedule.

    Returns:
      y, a tuple of one y for each of several weights; or ``(y, all_gather(x))``. Products are summed in float32 under
      ``"fused"`` and rounded to y's dtype once.

    With ``"fused"`` on GPUs, operands are bfloat16 or float16, the result the same or float32, and row lengths (k, n) a
    multiple of 16 bytes; on CPU devices operands may be float32, too. In the backward pass of bfloat16 operands a
    float32 ``dy`` is rounded to bfloat16 first; of float16 operands it isn't, since float16 has not the range for that,
    and the product is one of float32, which on GPUs is XLA's. Each team keeps peer-mapped memory for all its calls:
    twice ``(t - 1)`` chunks of ``x`` for the largest call, plus one word a row block; `explain` tells the bytes.

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
        length, rank or kind of number; scales that are missing, of another form than a pair of float32 scalars, or of
        operands that aren't float8; a gradient of float8 operands is asked for.
      ValueError: the axis isn't a manual axis of the mesh; unknown activation, residuals, strategy, precision or
        setting; an x_scale that varies over the axis; residuals of float8 operands; as many biases, activations or
        scales as weights are wanted, but aren't given.
      NotImplementedError: ``strategy="fused"`` or ``"signal"`` can't run these types, shapes or devices.

    The algorithm is FLUX's (arXiv 2406.06858), with the tile-by-tile schedule of Entwine (arXiv 2609.11562).
    """
    op = "all_gather_matmul"
    saves = _config.saves(op, residuals)
    if isinstance(w, tuple | list):
        options = preferred_element_type, precision, strategy, config, bool(return_gathered), saves
        ys, rows = _on_ranks.several(x, w, axis_name, *options, transpose_w, bias, activation, scales)
        return ys if rows is None else (ys, rows)
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


def matmul_reduce_scatter(
    x: ArrayLike | Sequence[ArrayLike],
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    transpose_w: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    scales: Scales | None = None,
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

    The sum of several products, ``reduce_scatter(x1 @ w1 + x2 @ w2)``, is one kernel; x and w are sequences then::

        y = matmul_reduce_scatter((x1, x2), (w1, w2), axis_name)

    Contractions may be of different lengths; sums are taken in float32 throughout. There is one bias, one activation
    and, of float8 operands, one pair of scales for all, since the kernels scale what they have added (a pair for each
    is a NotImplementedError). (Up to four; more are several calls, and few rows a call each.)

    Args:
      x: the rank's part of the contraction; leading dimensions are a batch. Or several.
      w: the rank's part of the contraction, a matrix. Or several.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      transpose_w: whether w is stored as ``(n, k / t)``; it is read as it lies.
      bias, activation: as in `all_gather_matmul`, ``y = activation(reduce_scatter(x @ w) + bias)``; the bias is
        whole on every rank, (n,), and added once.
      scales: as in `all_gather_matmul`, but either may differ from rank to rank: partial sums are multiplied by them,
        and the bias is added to the sum over ranks.
      preferred_element_type, precision, strategy, config: as in `all_gather_matmul`.

    Returns:
      y. Under ``"fused"`` products are summed in float32; partial sums travel in y's dtype, as XLA's do (so with
      bfloat16 each of a peer's is rounded once; ``preferred_element_type=float32`` avoids that for twice the bytes),
      and the ranks' sums are added in float32 in rank order. So the result is the same to the bit in every run.

    Types and row lengths are those of `all_gather_matmul`. Each team keeps peer-mapped memory for all its calls: twice
    ``(t - 1)`` chunks of ``y`` (in whole tiles) for the largest call, plus a few words a tile; `explain` tells the
    bytes.

    Raises:
      ValueError: rows that the team can't share evenly; else what `all_gather_matmul` raises.

    The algorithm is FLUX's (arXiv 2406.06858), with the paced tile order of Entwine (arXiv 2609.11562).
    """
    op = "matmul_reduce_scatter"
    epilogue: Any = {"transpose_w": transpose_w, "bias": bias, "activation": activation, "scales": scales}
    options = axis_name, preferred_element_type, precision, strategy, config
    if isinstance(x, tuple | list) or isinstance(w, tuple | list):
        return _on_ranks.sum_of(op, cast(Any, x), cast(Any, w), *options, **epilogue)
    return _on_ranks.on_ranks(op, cast(ArrayLike, x), cast(ArrayLike, w), *options, **epilogue)[0]


def matmul_all_reduce(
    x: ArrayLike | Sequence[ArrayLike],
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    transpose_w: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    scales: Scales | None = None,
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
    first. Under ``vmap`` a batch of ``x`` joins the leading dimensions and a batch of ``w`` its columns. The sum of
    several products is one kernel, as in `matmul_reduce_scatter`.

    Args:
      x: the rank's part of the contraction; leading dimensions are a batch. Or several.
      w: the rank's part of the contraction, a matrix. Or several.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor.
      transpose_w: whether w is stored as ``(n, k / t)``; it is read as it lies.
      bias, activation: as in `all_gather_matmul`, ``y = activation(all_reduce(x @ w) + bias)``; the bias is whole
        on every rank, (n,), the same on all, and added once.
      scales: as in `all_gather_matmul`, but either may differ from rank to rank: partial sums are multiplied by them,
        and the bias is added to the sum over ranks.
      preferred_element_type, precision, strategy, config: as in `all_gather_matmul`.

    Returns:
      y. Under ``"fused"`` products are summed in float32; partial sums travel in y's dtype, as XLA's do (so with
      bfloat16 each of a peer's is rounded once; ``preferred_element_type=float32`` avoids that for twice the bytes).
      Each element is summed by one rank, in float32 and in rank order, rounded once and sent to all; of few rows (up to
      128, on GPUs) every rank adds all ranks' sums itself, its own rounded like the others'. Either way the result is
      the same to the bit on every rank and in every run.

    Types and row lengths are those of `all_gather_matmul`. Each team keeps peer-mapped memory for all its calls: four
    times ``(t - 1) / t`` of ``y`` (in whole tiles) for the largest call, plus a few words a tile; `explain` tells the
    bytes.

    It raises what `all_gather_matmul` does, and ValueError if a bias varies over the axis.

    The algorithm is FLUX's (arXiv 2406.06858), with the paced tile order of Entwine (arXiv 2609.11562).
    """
    op = "matmul_all_reduce"
    epilogue: Any = {"transpose_w": transpose_w, "bias": bias, "activation": activation, "scales": scales}
    options = axis_name, preferred_element_type, precision, strategy, config
    if isinstance(x, tuple | list) or isinstance(w, tuple | list):
        return _on_ranks.sum_of(op, cast(Any, x), cast(Any, w), *options, **epilogue)
    return _on_ranks.on_ranks(op, cast(ArrayLike, x), cast(ArrayLike, w), *options, **epilogue)[0]
