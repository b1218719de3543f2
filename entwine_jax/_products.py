"""The products y = x @ w, x = y @ w.T and w = x.T @ y, differentiable: the gradients of each are the other two."""

import dataclasses
from typing import Any

import jax

from . import _partitioning, _placed
from ._placed import Place
from ._selection import OPERANDS
from ._spread import Call


def _primal(call: Call, place: Place | None, a: jax.Array, b: jax.Array, like: jax.Array | None) -> jax.Array:
    """`place` says where arrays lie. Without it only the partitioner will know, and a gradient brings what it is a
    gradient of, `like`, to lie where that lies."""
    if place is None:
        return _partitioning.product(call, a, b, like)
    return _placed.product(call, place, a, b)


product: Any = jax.custom_vjp(_primal, nondiff_argnums=(0, 1))


def _forward(call: Call, place: Place | None, a: jax.Array, b: jax.Array, like: jax.Array | None) -> Any:
    return product(call, place, a, b, like), (a, b)


def _backward(call: Call, place: Place | None, saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
    operands = OPERANDS[call.product]
    known = dict(zip(operands, saved, strict=True)) | {call.product: cotangent}

    def gradient(name: str) -> jax.Array:
        to = dataclasses.replace(call, product=name, dtype=known[name].dtype)
        a, b = (known[other] for other in OPERANDS[name])
        made: jax.Array = product(to, place, a, b, None if place is not None else known[name])
        return made

    return gradient(operands[0]), gradient(operands[1]), None


product.defvjp(_forward, _backward)
