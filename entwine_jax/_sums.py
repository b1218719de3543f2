"""The per-shard ops that add over ranks, as users call them: what they compute."""

from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.typing import ArrayLike, DTypeLike

from . import _on_ranks
from ._config import Config
from ._float8_checks import Scales
from ._team import AxisName


def matmul_reduce_scatter(
    x: ArrayLike | Sequence[ArrayLike],
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    transpose_w: bool = False,
    transpose_x: bool = False,
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

    With ``transpose_x=True`` it is the weight gradient of data-parallel training, ``x.T @ dy`` summed over the ranks,
    which have tokens of their own, and shared out by rows as FSDP shards weights and optimizer states::

        # x (tokens, m), dy (tokens, n) -> dw (m / t, n)
        dw = matmul_reduce_scatter(x, dy, "data", transpose_x=True)

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
      transpose_x: whether x is stored as ``(..., k / t, m)``; it is read as it lies. For one product, not of float8.
      bias, activation: as in `all_gather_matmul`, ``y = activation(reduce_scatter(x @ w) + bias)``; the bias is
        whole on every rank, (n,), and added once.
      scales: as in `all_gather_matmul`, but either may differ from rank to rank: partial sums are multiplied by them,
        and the bias is added to the sum over ranks.
      preferred_element_type, precision, strategy, config: as in `all_gather_matmul`.

    Returns:
      y. Under ``"fused"`` products are summed in float32; partial sums travel in y's dtype, as XLA's do (so with
      bfloat16 each of a peer's is rounded once; ``preferred_element_type=float32`` avoids that for twice the bytes),
      and the ranks' sums are added in float32 in rank order. So the result is the same to the bit in every run.

    Types and row lengths are those of `all_gather_matmul` (of x with ``transpose_x=True`` the length of a row is m, of
    which each rank's part must be a multiple of 16 bytes, and few rows take no kernel of their own). Each team keeps
    peer-mapped memory for all its calls: twice ``(t - 1)`` chunks of ``y`` (in whole tiles) for the largest call, plus
    a few words a tile; `explain` tells the bytes.

    Raises:
      ValueError: rows that the team can't share evenly; else what `all_gather_matmul` raises.

    The algorithm is FLUX's (arXiv 2406.06858), with the paced tile order of Entwine (arXiv 2609.11562).
    """
    op = "matmul_reduce_scatter"
    stored = {"transpose_w": transpose_w, "transpose_x": transpose_x}
    given: Any = {**stored, "bias": bias, "activation": activation, "scales": scales}
    options = axis_name, preferred_element_type, precision, strategy, config
    if isinstance(x, tuple | list) or isinstance(w, tuple | list):
        return _on_ranks.sum_of(op, cast(Any, x), cast(Any, w), *options, **given)
    return _on_ranks.on_ranks(op, cast(ArrayLike, x), cast(ArrayLike, w), *options, **given)[0]


def matmul_all_reduce(
    x: ArrayLike | Sequence[ArrayLike],
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    transpose_w: bool = False,
    transpose_x: bool = False,
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

    With ``transpose_x=True`` it is the weight gradient of data-parallel training with replicated weights, ``x.T @ dy``
    summed over the ranks, which have tokens of their own::

        # x (tokens, m), dy (tokens, n) -> dw (m, n)
        dw = matmul_all_reduce(x, dy, "data", transpose_x=True)

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
      transpose_x: whether x is stored as ``(..., k / t, m)``; it is read as it lies, but for several batches,
        which XLA lays side by side first (a copy that `explain` names). For one product, not of float8.
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

    Types and row lengths are those of `matmul_reduce_scatter`, but that no rank has a part of m to itself. Each team
    keeps peer-mapped memory for all its calls: four times ``(t - 1) / t`` of ``y`` (in whole tiles) for the largest
    call, plus a few words a tile; `explain` tells the bytes.

    It raises what `all_gather_matmul` does, and ValueError if a bias varies over the axis.

    The algorithm is FLUX's (arXiv 2406.06858), with the paced tile order of Entwine (arXiv 2609.11562).
    """
    op = "matmul_all_reduce"
    stored = {"transpose_w": transpose_w, "transpose_x": transpose_x}
    given: Any = {**stored, "bias": bias, "activation": activation, "scales": scales}
    options = axis_name, preferred_element_type, precision, strategy, config
    if isinstance(x, tuple | list) or isinstance(w, tuple | list):
        return _on_ranks.sum_of(op, cast(Any, x), cast(Any, w), *options, **given)
    return _on_ranks.on_ranks(op, cast(ArrayLike, x), cast(ArrayLike, w), *options, **given)[0]
