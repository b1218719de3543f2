"""The ops for a front end: without checks, on one rank's shards as it has spread them."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from . import _differentiable, _reference, _scaled, _several, _strategy
from ._config import Settings
from ._differentiable import flat, operand_dtype
from ._strategy import Request
from ._team import Team


def product(
    op: str,
    team: Team,
    a: jax.Array,
    b: jax.Array,
    transpose_b: bool,
    dtype: Any,
    precision: Any,
    settings: Settings,
    gathers: bool = False,
    bias: jax.Array | None = None,
    activation: str | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """An op without its gradient, and if it `gathers` all of a; a may have leading dimensions.

    If a and b are of different dtypes, `dtype` is what a gradient is wanted in, and the product is taken in theirs.
    """
    request = Request(op, team, transpose_b, dtype, precision, settings, gathers, activation=activation)
    a, leading = flat(a), a.shape[:-2]
    if a.dtype != b.dtype:
        operand = operand_dtype(_strategy.choose(request, a.astype(b.dtype), b), b.dtype, a.dtype)
        a, b, request = a.astype(operand), b.astype(operand), dataclasses.replace(request, dtype=operand)
    y, rows = _differentiable.run(request, a, b, bias=bias)
    y = y.reshape(*leading, *y.shape[1:]).astype(dtype)
    return y, None if rows is None else rows.reshape(*leading, *rows.shape[1:])


def scaled(
    op: str,
    team: Team,
    a: jax.Array,
    b: jax.Array,
    scale: jax.Array,
    transpose_b: bool,
    dtype: Any,
    precision: Any,
    settings: Settings,
    bias: jax.Array | None = None,
    activation: str | None = None,
) -> jax.Array:
    """An op of float8 a and b, times `scale`."""
    request = Request(op, team, transpose_b, dtype, precision, settings, scaled=True, activation=activation)
    y, _ = _scaled.run(request, flat(a), b, scale, bias=bias)
    return y.reshape(*a.shape[:-2], *y.shape[1:])


def several(
    team: Team,
    x: jax.Array,
    ws: Sequence[jax.Array],
    dtype: Any,
    precision: Any,
    settings: Settings,
    biases: Sequence[jax.Array | None],
    activations: Sequence[str | None],
) -> tuple[jax.Array, ...]:
    """all_gather_matmul of several weights, without its gradient."""
    request = Request("all_gather_matmul", team, False, dtype, precision, settings)
    ys, _ = _several.multiply(request, flat(x), ws, biases, activations)
    return tuple(y.reshape(*x.shape[:-2], *y.shape[1:]) for y in ys)


def gradients_of_several(
    team: Team, dys: Sequence[jax.Array], ws: Sequence[jax.Array], x: jax.Array, precision: Any, settings: Settings
) -> tuple[jax.Array, list[jax.Array]]:
    """Of all x @ w_i at once, in the dtypes of x and w: dx by a matmul_reduce_scatter, which gathers x beside."""
    request = Request("matmul_reduce_scatter", team, True, ws[0].dtype, precision, settings)
    like = flat(dys[0])
    operand = operand_dtype(_strategy.choose(request, like.astype(ws[0].dtype), ws[0]), ws[0].dtype, like.dtype)
    request = dataclasses.replace(request, dtype=operand, gathers=True)
    flats = [flat(dy).astype(operand) for dy in dys]
    dx, rows = _several.add(request, flats, [w.astype(operand) for w in ws], flat(x).astype(operand))
    assert rows is not None
    dws = [
        _reference.weight_gradient(rows, dy, precision=precision).astype(w.dtype)
        for dy, w in zip(flats, ws, strict=True)
    ]
    return dx.reshape(*x.shape[:-2], *dx.shape[1:]).astype(x.dtype), dws


def gradients(
    op: str,
    team: Team,
    y: jax.Array,
    w: jax.Array,
    x: jax.Array,
    precision: Any,
    settings: Settings,
    saved: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of x @ w, in the dtypes of x and w.

    y is the cotangent; `op` takes dx = y @ w.T, and gathers beside it what dw = x.T @ y needs: all the team's rows.
    With `saved`, x is all of them already.
    """
    request = Request(op, team, True, w.dtype, precision, settings)
    operand = operand_dtype(_strategy.choose(request, flat(y).astype(w.dtype), w), w.dtype, y.dtype)
    request = dataclasses.replace(request, dtype=operand)
    leading, dtype = x.shape[:-2], x.dtype
    y, w_, x = (v.astype(operand) for v in (flat(y), w, flat(x)))
    if saved:
        dx, dw = _differentiable.run(request, y, w_)[0], _reference.weight_gradient(x, y, precision=precision)
    else:
        dx, dw = _differentiable.gradients(request, y, w_, x)
    return dx.reshape(*leading, *dx.shape[1:]).astype(dtype), dw.astype(w.dtype)
