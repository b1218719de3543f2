"""The per-shard ops in float8, of operands that they quantise themselves: what has gradients."""

import functools
from collections.abc import Sequence
from typing import Any, cast, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _config, _float8_checks, _lowering, _on_ranks, _quantised, _team
from ._config import Config
from ._differentiable import flat
from ._float8_checks import Scales
from ._strategy import Request
from ._team import AxisName


@overload
def float8_all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    scales: Scales | None = ...,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> jax.Array: ...
@overload
def float8_all_gather_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = ...,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[jax.Array, ...]: ...
def float8_all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = None,
    residuals: str = "float8",
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """`all_gather_matmul` of x and w that are rounded to float8 first: half the bytes on the link, twice the FLOPs.

    With x8 = round(x / x_scale) and w8 = round(w / w_scale), of float8_e4m3fn (numbers past its largest, 448, become
    that)::

        y = (all_gather(x8) @ w8) * (x_scale * w_scale)

    Its derivative takes rounding for the identity. The cotangent is rounded to float8_e5m2 by the scale that its
    largest number asks for (dy8, dy_scale), and with t for the transpose::

        dx = reduce_scatter((dy8 @ w8.t) * (dy_scale * w_scale))
        dw = (all_gather(x8).t @ dy8) * (x_scale * dy_scale)

    dx in one kernel, beside which x8 is gathered once more, dw a dot of XLA's own, in float32; both in the dtypes of x
    and w. What is kept for it is x8 and w8, in place of x and w.

    Several weights are one kernel, each with a scale of its own, and so is dx, the sum over them. What is summed has
    one scale, dy_scale * w_scale, for all: the largest that any of them asks for.

    Args:
      x, w, axis_name: as in `all_gather_matmul`; of any floating dtypes, which need not be the same. w may be several.
      scales: (x_scale, w_scale), float32 scalars, which get no gradient; x_scale must be the same on all ranks of the
        axis. Several weights may have a scale each, ``scales=(x_scale, (gate_scale, up_scale))``. None takes those that
        bring the largest numbers of x and w to the largest of float8: a pass over each, and for what is gathered a
        ``pmax`` over the axis.
      residuals: what is kept for derivatives: ``"float8"``, x8 and w8, has a first one only. ``"operands"`` keeps x and
        w too and has them of any order; those after the first are of ``all_gather(x) @ w`` as it is, in float32, XLA's.
        (A step that is compiled as a whole and takes one derivative keeps neither: nothing reads them.)
      preferred_element_type: dtype of y, bfloat16 or float32; by default that of x and w, if they have one of these.
      precision, strategy, config: as in `all_gather_matmul`; strategy ``"xla"`` is a dot of float8 too.

    Returns:
      y, a tuple of one for each of several weights.

    Raises:
      TypeError: x or w aren't floating, or float8 already; no dtype for y; scales aren't a pair of float32 scalars.
      ValueError: unknown residuals; and as `all_gather_matmul` with scales.
      NotImplementedError: a second derivative of what has kept float8 alone; and as `all_gather_matmul` with scales.
    """
    return _of_float8(
        "all_gather_matmul", x, w, axis_name, scales, residuals, preferred_element_type, precision, strategy, config
    )


def float8_matmul_reduce_scatter(
    x: ArrayLike | Sequence[ArrayLike],
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    scales: Scales | None = None,
    residuals: str = "float8",
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`matmul_reduce_scatter` of x and w that are rounded to float8 first; see `float8_all_gather_matmul`.

    ::

        y = reduce_scatter((x8 @ w8) * (x_scale * w_scale))
        dx = (all_gather(dy8) @ w8.t) * (dy_scale * w_scale)
        dw = (x8.t @ all_gather(dy8)) * (x_scale * dy_scale)

    Scales of x and w may differ from rank to rank: a partial sum is multiplied by them before it travels, in y's dtype.
    Of several pairs, whose products are added, all x have one scale and all w have one.
    """
    return cast(
        jax.Array,
        _of_float8(
            "matmul_reduce_scatter",
            x,
            w,
            axis_name,
            scales,
            residuals,
            preferred_element_type,
            precision,
            strategy,
            config,
        ),
    )


def float8_matmul_all_reduce(
    x: ArrayLike | Sequence[ArrayLike],
    w: ArrayLike | Sequence[ArrayLike],
    axis_name: AxisName,
    *,
    scales: Scales | None = None,
    residuals: str = "float8",
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`matmul_all_reduce` of x and w that are rounded to float8 first; see `float8_all_gather_matmul`.

    ::

        y = all_reduce((x8 @ w8) * (x_scale * w_scale))
        dx = (dy8 @ w8.t) * (dy_scale * w_scale)
        dw = (x8.t @ dy8) * (x_scale * dy_scale)

    Scales of x and w may differ from rank to rank. Gradients are products of shards, XLA's own. Several pairs are as in
    `float8_matmul_reduce_scatter`.
    """
    return cast(
        jax.Array,
        _of_float8(
            "matmul_all_reduce", x, w, axis_name, scales, residuals, preferred_element_type, precision, strategy, config
        ),
    )


def _of_float8(
    base: str,
    x: Any,
    w: Any,
    axis_name: AxisName,
    scales: Any,
    residuals: str,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
) -> jax.Array | tuple[jax.Array, ...]:
    op, gather = f"float8_{base}", base == "all_gather_matmul"
    several = isinstance(w, tuple | list) or (not gather and isinstance(x, tuple | list))
    if not several:
        x, w = (x,), (w,)
    elif gather:
        _checks.several(op, w)
        x = (x,)
    else:
        _checks.pairs(op, x, w)
    settings = _config.resolve(op, strategy, config)
    wide = _config.keeps_operands(op, residuals)
    team = _team.resolve(op, axis_name)
    pairs = [_checks.arrays(op, *pair) for pair in zip(x * len(w) if gather else x, w, strict=True)]
    for a, b in pairs:
        _checks.shapes(op, a.shape, b.shape, team.size, team.axis_name, base=base)
    if not gather:
        _checks.summands(op, [(a.shape, b.shape[1]) for a, b in pairs])
        _float8_checks.sum_scales(op, scales)
    given = _float8_checks.several_scales(op, scales, len(w)) if gather else [scales] * len(w)
    found = [None if scales is None else _float8_checks.pair(op, each) for each in given]
    dtypes = [_float8_checks.quantised_types(op, a, b, preferred_element_type, precision) for a, b in pairs]
    if found[0] is not None and gather:
        _float8_checks.common_scale(op, found[0][0], team.axis_name)
    operands = [pairs[0][0], *(b for _, b in pairs)] if gather else [v for pair in pairs for v in pair]
    for _ in range(2):  # the second time with all axes that any of them varies over
        for i in range(1, len(operands)):
            operands[0], operands[i] = _lowering.vary(operands[0], operands[i], team.axis_name)
    xs, ws = (operands[:1], operands[1:]) if gather else (operands[::2], operands[1::2])
    leading = xs[0].shape[:-2]
    request = Request(base, team, False, dtypes[0], precision, settings, scaled=True)
    ys: list[jax.Array] = []
    for first in range(0, len(ws), _on_ranks.MOST):
        some = slice(first, first + _on_ranks.MOST)
        pair = found[first]
        x_scale, w_scales = (None, None) if pair is None else (pair[0], [each[1] for each in found[some] if each])
        rows = [flat(v) for v in (xs if gather else xs[some])]
        ys += _quantised.quantised(request, rows, ws[some], x_scale, w_scales, wide)
    if not gather:
        ys = [functools.reduce(jnp.add, ys)]
    shaped = tuple(y.reshape(*leading, *y.shape[1:]) for y in ys)
    return shaped if several and gather else shaped[0]
