"""The per-shard ops in float8, of operands that they quantise themselves: what has gradients."""

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _config, _lowering, _scaled, _team
from ._checks import Scales
from ._config import Config
from ._differentiable import flat
from ._strategy import Request
from ._team import AxisName


def float8_all_gather_matmul(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    scales: Scales | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """`all_gather_matmul` of x and w that are rounded to float8 first: half the bytes on the link, twice the FLOPs.

    With x8 = round(x / x_scale) and w8 = round(w / w_scale), of float8_e4m3fn (numbers past its largest, 448, become
    that)::

        y = (all_gather(x8) @ w8) * (x_scale * w_scale)

    It has a first derivative, which takes rounding for the identity. The cotangent is rounded to float8_e5m2 by the
    scale that its largest number asks for (dy8, dy_scale), and with t for the transpose::

        dx = reduce_scatter((dy8 @ w8.t) * (dy_scale * w_scale))
        dw = (all_gather(x8).t @ dy8) * (x_scale * dy_scale)

    dx in one kernel, beside which x8 is gathered once more, dw a dot of XLA's own, in float32; both in the dtypes of x
    and w. What is kept for it is x8 and w8, in place of x and w.

    Args:
      x, w, axis_name: as in `all_gather_matmul`; of any floating dtypes, which need not be the same.
      scales: (x_scale, w_scale), float32 scalars, which get no gradient; x_scale must be the same on all ranks of the
        axis. None takes those that bring the largest numbers of x and w to the largest of float8: a pass over each, and
        for what is gathered a ``pmax`` over the axis.
      preferred_element_type: dtype of y, bfloat16 or float32; by default that of x and w, if they have one of these.
      precision, strategy, config: as in `all_gather_matmul`; strategy ``"xla"`` is a dot of float8 too.

    Returns:
      y.

    Raises:
      TypeError: x or w aren't floating, or float8 already; no dtype for y; scales aren't a pair of float32 scalars.
      ValueError, NotImplementedError: as `all_gather_matmul` with scales.
    """
    return _quantised("all_gather_matmul", x, w, axis_name, scales, preferred_element_type, precision, strategy, config)


def float8_matmul_reduce_scatter(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    scales: Scales | None = None,
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
    """
    return _quantised(
        "matmul_reduce_scatter", x, w, axis_name, scales, preferred_element_type, precision, strategy, config
    )


def float8_matmul_all_reduce(
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    *,
    scales: Scales | None = None,
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

    Scales of x and w may differ from rank to rank. Gradients are products of shards, XLA's own.
    """
    return _quantised("matmul_all_reduce", x, w, axis_name, scales, preferred_element_type, precision, strategy, config)


def _quantised(
    base: str,
    x: ArrayLike,
    w: ArrayLike,
    axis_name: AxisName,
    scales: Scales | None,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
) -> jax.Array:
    op = f"float8_{base}"
    x, w = _checks.arrays(op, x, w)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name, base=base)
    pair = None if scales is None else _checks.pair(op, scales)
    dtype = _checks.quantised_types(op, x, w, preferred_element_type, precision)
    if pair is not None and base == "all_gather_matmul":
        _checks.common_scale(op, pair[0], team.axis_name)
    request = Request(base, team, False, dtype, precision, settings, scaled=True)
    x, w = _lowering.vary(x, w, team.axis_name)
    y = _scaled.quantised(request, flat(x), w, pair)
    return y.reshape(*x.shape[:-2], *y.shape[1:])
