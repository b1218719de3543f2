"""The ops for a front end: without checks, on one rank's shards as it has spread them."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from . import _differentiable, _reference, _scaled, _several, _strategy
from ._differentiable import flat, operand_dtype
from ._strategy import Request


def ours(request: Request, a: Any, b: Any) -> bool:
    """Whether a call of this library's would run a product of shards, or XLA. a and b are types."""
    a = _flat(a)
    if a.dtype != b.dtype and not request.scaled:
        request = _of_one_dtype(request, a, b)
        a, b = _as(a, request.dtype), _as(b, request.dtype)
    return _strategy.choose(request, a, b).ours


def several_ours(request: Request, xs: Sequence[Any], ws: Sequence[Any]) -> bool:
    """The same of several products of one x, or of pairs that are added and beside which an array is gathered."""
    pairs = [(_as(_flat(x), w.dtype), w) for x, w in zip(xs, ws, strict=True)]
    if request.op == "all_gather_matmul":
        request = request.finished([False] * len(pairs), [None] * len(pairs))
        one_by_one = _strategy.apart(request, pairs)
    else:
        request, one_by_one = dataclasses.replace(request, gathers=True), _strategy.takes_one(request)
    if len(pairs) == 1 or one_by_one:
        return _strategy.choose(request.alone(0), *pairs[0]).ours
    return _strategy.choose_of(dataclasses.replace(request, products=len(pairs)), pairs).ours


def _flat(a: Any) -> Any:
    return jax.ShapeDtypeStruct((math.prod(a.shape[:-2]), *a.shape[-2:]), a.dtype)


def _as(v: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(v.shape, dtype)


def _of_one_dtype(request: Request, a: Any, b: Any) -> Request:
    """Of a product that is a gradient, whose cotangent a has another dtype than b: in the one that both are cast to."""
    choice = _strategy.choose(request, _as(a, b.dtype), b)
    return dataclasses.replace(request, dtype=operand_dtype(choice, b.dtype, a.dtype))


def product(
    request: Request, a: jax.Array, b: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """An op without its gradient, and if it gathers all of a; a may have leading dimensions.

    If a and b are of different dtypes, the request's is what a gradient is wanted in, the product is taken in theirs.
    """
    dtype, leading, a = request.dtype, a.shape[:-2], flat(a)
    if a.dtype != b.dtype:
        request = _of_one_dtype(request, a, b)
        a, b = a.astype(request.dtype), b.astype(request.dtype)
    y, rows = _differentiable.run(request, a, b, bias=bias)
    y = y.reshape(*leading, *y.shape[1:]).astype(dtype)
    return y, None if rows is None else rows.reshape(*leading, *rows.shape[1:])


def scaled(request: Request, a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """An op of float8 a and b, times `scale`."""
    y, _ = _scaled.run(request, flat(a), b, scale, bias=bias)
    return y.reshape(*a.shape[:-2], *y.shape[1:])


def several(
    request: Request,
    x: jax.Array,
    ws: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    activations: Sequence[str | None],
) -> tuple[jax.Array, ...]:
    """all_gather_matmul of several weights, without its gradient."""
    ys, _ = _several.multiply(request, flat(x), ws, biases, activations)
    return tuple(y.reshape(*x.shape[:-2], *y.shape[1:]) for y in ys)


def gradients_of_several(
    request: Request, dys: Sequence[jax.Array], ws: Sequence[jax.Array], x: jax.Array, saved: bool = False
) -> tuple[jax.Array, list[jax.Array]]:
    """Of all x @ w_i at once, in the dtypes of x and w: dx by a matmul_reduce_scatter, beside which x is gathered. With
    `saved`, x is all rows already."""
    request = _of_one_dtype(dataclasses.replace(request, dtype=ws[0].dtype), _flat(dys[0]), ws[0])
    operand, z = request.dtype, flat(x).astype(request.dtype)
    flats, narrow = [flat(dy).astype(operand) for dy in dys], [w.astype(operand) for w in ws]
    if saved:
        rows: jax.Array | None = z
        dx, _ = _several.add(request, flats, narrow)
    else:
        dx, rows = _several.add(dataclasses.replace(request, gathers=True), flats, narrow, z)
    assert rows is not None
    dws = [
        _reference.weight_gradient(rows, dy, precision=request.precision).astype(w.dtype)
        for dy, w in zip(flats, ws, strict=True)
    ]
    return dx.reshape(*dys[0].shape[:-2], *dx.shape[1:]).astype(x.dtype), dws


def gradients(
    request: Request, y: jax.Array, w: jax.Array, x: jax.Array, saved: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Both gradients of x @ w, in the dtypes of x and w.

    y is the cotangent; what is requested is dx = y @ w.T, beside which is gathered what dw = x.T @ y needs: all the
    team's rows. With `saved`, x is all of them already.
    """
    leading, dtype, precision = x.shape[:-2], x.dtype, request.precision
    request = _of_one_dtype(dataclasses.replace(request, dtype=w.dtype), _flat(y), w)
    y, w_, x = (v.astype(request.dtype) for v in (flat(y), w, flat(x)))
    if saved:
        dx, dw = _differentiable.run(request, y, w_)[0], _reference.weight_gradient(x, y, precision=precision)
    else:
        dx, dw = _differentiable.gradients(request, y, w_, x)
    return dx.reshape(*leading, *dx.shape[1:]).astype(dtype), dw.astype(w.dtype)
