"""The ops on one rank's shards, by their names: checks, and the way of operands to the product."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _config, _float8_checks, _gate_checks, _gated, _lowering, _reference, _scaled, _several, _team
from ._config import Config
from ._differentiable import flat, run
from ._float8_checks import Scales
from ._strategy import Request
from ._team import AxisName


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
    *,
    transpose_w: bool = False,
    transpose_x: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    scales: Scales | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """An op by its name, inside a manual shard_map.

    With `gathers`, an all-gather's gathered x too; with `saves` it keeps that for the weight gradient.
    """
    x, w = _checks.arrays(op, x, w)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name, transpose_w, transpose_x=transpose_x)
    pair = _float8_checks.scales(op, x, w, scales)
    if pair is None:
        operand, dtype = _checks.types(op, x, w, preferred_element_type, precision)
        x, w = x.astype(operand), w.astype(operand)
    else:
        _float8_checks.float8_residuals(op, saves)
        _float8_checks.float8_rows(op, transpose_x)
        if op == "all_gather_matmul":
            _float8_checks.common_scale(op, pair[0], team.axis_name)
        dtype = _float8_checks.float8_types(op, preferred_element_type, precision, f"x {x.dtype} and w {w.dtype}")
    request = Request(
        op,
        team,
        bool(transpose_w),
        dtype,
        precision,
        settings,
        gathers,
        saves,
        scaled=pair is not None,
        activation=_config.activation(op, activation),
        transpose_x=bool(transpose_x),
    )
    b = _checks.bias(op, bias, w.shape[0 if transpose_w else 1], dtype)
    x, w, b = _lowering.vary_bias(op, x, w, b, team.axis_name)
    leading = x.shape[:-2]
    _checks.activated(op, activation, dtype)
    if pair is None:
        results = run(request, flat(x), w, bias=b)
    else:
        x, w, scale = _scaled.varied(team.axis_name, x, w, pair[0] * pair[1])
        results = _scaled.run(request, flat(x), w, scale, bias=b)
    y, gathered = (v if v is None else v.reshape(*leading, *v.shape[1:]) for v in results)
    assert y is not None
    return y, gathered


# How many products a kernel takes: kMaxProducts in cc/schedule/products.h.
MOST = 4


def several(
    x: ArrayLike,
    ws: Sequence[ArrayLike],
    axis_name: AxisName,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
    *,
    gathers: bool,
    saves: bool,
    transpose_w: bool,
    bias: Any,
    activation: Any,
    scales: Any,
    gated: bool,
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """all_gather_matmul of several weights, or the one result of two that are gated; and the gathered x if it
    `gathers`."""
    op = "all_gather_matmul"
    _checks.several(op, ws)
    if gated:
        activation = _gate_checks.activation(op, activation), None
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    pairs = [_checks.arrays(op, x, w) for w in ws]
    x = pairs[0][0]
    for _, w in pairs:
        _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name, transpose_w)
    if gated:
        _gate_checks.columns(op, *(w.shape[0 if transpose_w else 1] for _, w in pairs))
    each = _float8_checks.several_scales(op, scales, len(ws))
    checked = [_float8_checks.scales(op, x, w, given) for (_, w), given in zip(pairs, each, strict=True)]
    found = [pair for pair in checked if pair is not None]
    factors = [pair[0] * pair[1] for pair in found]
    arrays = [w for _, w in pairs]
    if factors:
        _float8_checks.float8_residuals(op, saves)
        _float8_checks.common_scale(op, found[0][0], team.axis_name)
        dtype = _float8_checks.float8_types(op, preferred_element_type, precision, "float8 operands")
    else:
        operand = jnp.result_type(*(_checks.types(op, x, w, preferred_element_type, precision)[0] for w in arrays))
        x, arrays = x.astype(operand), [w.astype(operand) for w in arrays]
        dtype = _checks.types(op, x, x, preferred_element_type, precision)[1]
    activations = [_config.activation(op, a) for a in _checks.one_each(op, "activation", activation, len(ws))]
    for a in activations:
        _checks.activated(op, a, dtype)
    given = _checks.one_each(op, "bias", bias, len(ws))
    biases = [
        _checks.bias(op, b, w.shape[0 if transpose_w else 1], dtype, f"bias[{i}]")
        for i, (b, (_, w)) in enumerate(zip(given, pairs, strict=True))
    ]
    request = Request(op, team, bool(transpose_w), dtype, precision, settings, saves=saves, scaled=bool(factors))
    for _ in range(2):  # the second time with all axes that any of them varies over
        for i, w in enumerate(arrays):
            x, arrays[i], biases[i] = _lowering.vary_bias(op, x, w, biases[i], team.axis_name)
        for i, factor in enumerate(factors):
            x, factors[i] = _lowering.vary(x, factor, team.axis_name)
    leading, x = x.shape[:-2], flat(x)
    ys: list[jax.Array] = []
    whole = None
    if gated:
        h, whole = _gated.multiply(dataclasses.replace(request, gathers=gathers), x, arrays, biases, activations[0])
        ys = [h]
    for first in range(0, 0 if gated else len(ws), MOST):
        some = slice(first, first + MOST)
        run = dataclasses.replace(request, gathers=gathers and first == 0)
        options = biases[some], activations[some]
        if factors:
            made, rows = _scaled.multiply(run, x, arrays[some], factors[some], *options)
        else:
            made, rows = _several.multiply(run, x, arrays[some], *options)
        ys += made
        whole = rows if first == 0 else whole
    shaped = tuple(y.reshape(*leading, *y.shape[1:]) for y in ys)
    return shaped, None if whole is None else whole.reshape(*leading, *whole.shape[1:])


def sum_of(
    op: str,
    xs: Sequence[ArrayLike],
    ws: Sequence[ArrayLike],
    axis_name: AxisName,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
    *,
    transpose_w: bool,
    transpose_x: bool,
    bias: ArrayLike | None,
    activation: str | None,
    scales: Scales | None,
) -> jax.Array:
    """matmul_reduce_scatter or matmul_all_reduce of the sum of the products of several pairs."""
    _checks.pairs(op, xs, ws)
    _checks.summed_rows(op, transpose_x)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    pairs = [_checks.arrays(op, x, w) for x, w in zip(xs, ws, strict=True)]
    for x, w in pairs:
        _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name, transpose_w)
    columns = pairs[0][1].shape[0 if transpose_w else 1]
    _checks.summands(op, [(x.shape, w.shape[0 if transpose_w else 1]) for x, w in pairs])
    _float8_checks.sum_scales(op, scales)
    scale, found = None, [_float8_checks.scales(op, x, w, scales) for x, w in pairs]
    if found[0] is None:
        operand = jnp.result_type(*(_checks.types(op, x, w, preferred_element_type, precision)[0] for x, w in pairs))
        pairs = [(x.astype(operand), w.astype(operand)) for x, w in pairs]
        dtype = _checks.types(op, *pairs[0], preferred_element_type, precision)[1]
    else:
        _float8_checks.one_dtype(op, [x.dtype for x, _ in pairs])
        scale = found[0][0] * found[0][1]
        dtype = _float8_checks.float8_types(op, preferred_element_type, precision, "float8 operands")
    b = _checks.bias(op, bias, columns, dtype)
    _checks.activated(op, activation, dtype)
    made = _config.activation(op, activation)
    request = Request(op, team, bool(transpose_w), dtype, precision, settings, scaled=scale is not None)
    operands = [*(x for x, _ in pairs), *(w for _, w in pairs), *([] if scale is None else [scale])]
    operands = _scaled.varied(team.axis_name, *operands)
    if b is not None:
        operands[0], operands[1], b = _lowering.vary_bias(op, operands[0], operands[1], b, team.axis_name)
        operands = _scaled.varied(team.axis_name, *operands)
    count, leading = len(pairs), operands[0].shape[:-2]
    pairs, scale = [*zip(operands[:count], operands[count : 2 * count], strict=True)], [*operands[2 * count :], None][0]
    groups = [pairs[i : i + MOST] for i in range(0, len(pairs), MOST)]
    whole = len(groups) == 1  # else the epilogue is of the sum of several calls
    given = b if whole else None
    request = dataclasses.replace(request, activation=made if whole else None)
    ys = []
    for group in groups:
        some = [flat(x) for x, _ in group], [w for _, w in group]
        if scale is None:
            ys.append(_several.add(request, *some, bias=given)[0])
        else:
            ys.append(_scaled.add(request, *some, scale, bias=given)[0])
    y = functools.reduce(jnp.add, ys)
    y = y if whole else _reference.finish(y, b, made)
    return y.reshape(*leading, *y.shape[1:])
