"""The products of one x and several weights under automatic sharding, differentiable: dx is one sum of all."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _partitioned_several, _products, _reference
from ._spread import Call

Calls = tuple[Call, ...]
Arrays = tuple[jax.Array, ...]


def _primal(calls: Calls, x: jax.Array, ws: Arrays, biases: tuple[jax.Array | None, ...]) -> Arrays:
    """y of each, with its bias and activation."""
    has = [b is not None for b in biases]

    @jax.custom_batching.custom_vmap
    def partitioned(x: jax.Array, *rest: jax.Array) -> Any:
        return _partitioned_several.products(calls, x, *_split(has, rest))

    # One by one they have batching rules.
    @partitioned.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> Any:
        def each(x: jax.Array, *rest: jax.Array) -> Arrays:
            pairs = zip(calls, *_split(has, rest), strict=True)
            return tuple(_products.primal(call, None, x, w, bias=b) for call, w, b in pairs)

        return jax.vmap(each, [0 if b else None for b in is_batched], axis_size=size)(*operands), (True,) * len(calls)

    ys: Arrays = partitioned(x, *ws, *(b for b in biases if b is not None))
    return ys


def _split(has: Sequence[bool], rest: Sequence[jax.Array]) -> tuple[Arrays, list[jax.Array | None]]:
    """Weights, and biases in their places."""
    return (*rest[: len(has)],), _partitioned_several.in_places(has, rest[len(has) :])


products: Any = jax.custom_vjp(_primal, nondiff_argnums=(0,))


def _forward(calls: Calls, x: Any, ws: Any, biases: Any) -> Any:
    """What is kept of each is what `_products` keeps."""
    outside = [c.activation if c.activation != "relu" else None for c in calls]
    inner = tuple(
        c if a is None else dataclasses.replace(c, activation=None) for c, a in zip(calls, outside, strict=True)
    )
    values = x.value, tuple(w.value for w in ws), tuple(None if b is None else b.value for b in biases)
    ys = products(inner, *values)
    wanted = jnp.zeros((int(x.perturbed),)), tuple(jnp.zeros((int(w.perturbed),)) for w in ws)
    epilogues = tuple(_products.kept_of_epilogue(c, y, b) for c, y, b in zip(calls, ys, biases, strict=True))
    made = tuple(_reference.finish(y, None, a) for y, a in zip(ys, outside, strict=True))
    return made, (*values[:2], wanted, epilogues)


def _backward(calls: Calls, kept: Any, dys: Any) -> Any:
    x, ws, (wants_x, wants_ws), epilogues = kept
    live = [not isinstance(dy, jax.custom_derivatives.SymbolicZero) for dy in dys]
    dys = [*dys]
    dbiases: list[Any] = [None] * len(dys)
    for i, (call, (activated, wants_bias)) in enumerate(zip(calls, epilogues, strict=True)):
        if not live[i]:
            continue
        if call.activation is not None:
            dys[i] = _reference.pull_back(dys[i], activated, call.activation)
        if wants_bias.size:
            dbiases[i] = _reference.bias_gradient(dys[i], wants_bias.dtype)
    dx: Any = None
    dws: list[Any] = [None] * len(ws)
    if all(live) and wants_x.size and all(v.size for v in wants_ws):
        dx, dws = gradients(calls, (*dys,), ws, x)
        return dx, (*dws,), (*dbiases,)
    for i, call in enumerate(calls):
        if live[i] and wants_x.size:
            one = _made(call, "x", x, dys[i], ws[i])
            dx = one if dx is None else dx + one
        if live[i] and wants_ws[i].size:
            dws[i] = _made(call, "w", ws[i], x, dys[i])
    return dx, (*dws,), (*dbiases,)


products.defvjp(_forward, _backward, symbolic_zeros=True)


def _made(call: Call, name: str, like: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    y: jax.Array = _products.product(_products.to(call, name, like), None, a, b, like)
    return y


def _all(calls: Calls, dys: Arrays, ws: Arrays, x: jax.Array) -> tuple[jax.Array, Arrays]:
    count = len(ws)
    pairs = [(_products.to(c, "x", x), _products.to(c, "w", w)) for c, w in zip(calls, ws, strict=True)]

    @jax.custom_batching.custom_vmap
    def together(*operands: jax.Array) -> Any:
        return _partitioned_several.gradients(pairs, operands[:count], operands[count:-1], operands[-1])

    @together.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> Any:
        def each(*operands: jax.Array) -> tuple[jax.Array, Arrays]:
            dys, ws, x = operands[:count], operands[count:-1], operands[-1]
            of_x, of_w = [], []
            for (to_x, to_w), dy, w in zip(pairs, dys, ws, strict=True):
                of_x.append(_products.primal(to_x, None, dy, w, x))
                of_w.append(_products.primal(to_w, None, x, dy, w))
            return functools.reduce(jnp.add, of_x), (*of_w,)

        axes = [0 if batch else None for batch in is_batched]
        return jax.vmap(each, axes, axis_size=size)(*operands), (True, (True,) * count)

    made: tuple[jax.Array, Arrays] = together(*dys, *ws, x)
    return made


gradients: Any = jax.custom_vjp(_all, nondiff_argnums=(0,))


def _forward_all(calls: Calls, dys: Arrays, ws: Arrays, x: jax.Array) -> Any:
    return gradients(calls, dys, ws, x), (dys, ws, x)


def _backward_all(calls: Calls, kept: Any, cotangents: Any) -> Any:
    (dys, ws, x), (d_dx, d_dws) = kept, cotangents
    d_dys, d_ws, d_x = [], [], []
    for call, dy, w, d_dw in zip(calls, dys, ws, d_dws, strict=True):
        d_dy, d_w, by_dw, _ = _products.backward_both(call, None, (dy, w, x), (d_dx, d_dw))
        d_dys.append(d_dy)
        d_ws.append(d_w)
        d_x.append(by_dw)
    return (*d_dys,), (*d_ws,), functools.reduce(jnp.add, d_x)


gradients.defvjp(_forward_all, _backward_all)
