"""The ops on one rank's shards, by their names: checks, and the way of operands to the product."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from . import _checks, _config, _lowering, _of_rows, _reference, _scaled, _team
from ._checks import Scales
from ._config import Config
from ._differentiable import flat, run
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
    _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name, transpose_w)
    pair = _checks.scales(op, x, w, scales)
    if pair is None:
        operand, dtype = _checks.types(op, x, w, preferred_element_type, precision)
        x, w = x.astype(operand), w.astype(operand)
    else:
        _checks.float8_residuals(op, saves)
        if op == "all_gather_matmul":
            _checks.common_scale(op, pair[0], team.axis_name)
        dtype = _checks.float8_types(op, preferred_element_type, precision, f"x {x.dtype} and w {w.dtype}")
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


def several(
    x: ArrayLike,
    ws: Sequence[ArrayLike],
    axis_name: AxisName,
    preferred_element_type: DTypeLike | None,
    precision: Any,
    strategy: str | None,
    config: Config | None,
    transpose_w: bool,
    bias: Any,
    activation: Any,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """all_gather_matmul of several weights: the first product gathers, the others use what it has gathered."""
    op = "all_gather_matmul"
    _checks.several(op, ws)
    settings = _config.resolve(op, strategy, config)
    team = _team.resolve(op, axis_name)
    pairs = [_checks.arrays(op, x, w) for w in ws]
    x = pairs[0][0]
    for _, w in pairs:
        _checks.shapes(op, x.shape, w.shape, team.size, team.axis_name, transpose_w)
    operand = jnp.result_type(*(_checks.types(op, x, w, preferred_element_type, precision)[0] for _, w in pairs))
    x = x.astype(operand)
    dtype = _checks.types(op, x, x, preferred_element_type, precision)[1]
    activations = [_config.activation(op, a) for a in _checks.one_each(op, "activation", activation, len(ws))]
    for a in activations:
        _checks.activated(op, a, dtype)
    given = _checks.one_each(op, "bias", bias, len(ws))
    biases = [
        _checks.bias(op, b, w.shape[0 if transpose_w else 1], dtype, f"bias[{i}]")
        for i, (b, (_, w)) in enumerate(zip(given, pairs, strict=True))
    ]
    request = Request(op, team, bool(transpose_w), dtype, precision, settings, gathers=True, saves=True)
    arrays = [w.astype(operand) for _, w in pairs]
    for _ in range(2):  # the second time with all axes that any of them varies over
        for i, w in enumerate(arrays):
            x, arrays[i], biases[i] = _lowering.vary_bias(op, x, w, biases[i], team.axis_name)
    leading, x = x.shape[:-2], flat(x)
    y, rows = run(dataclasses.replace(request, activation=activations[0]), x, arrays[0], bias=biases[0])
    assert rows is not None
    ys = [y]
    for w, b, a in zip(arrays[1:], biases[1:], activations[1:], strict=True):
        ys.append(_reference.finish(_of_rows.product(request, x, w, rows), b, a))
    shaped = [v.reshape(*leading, *v.shape[1:]) for v in (*ys, rows)]
    return tuple(shaped[:-1]), shaped[-1]
