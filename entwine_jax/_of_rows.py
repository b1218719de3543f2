"""all_gather_matmul where all of x is at hand already: a plain dot, whose gradient of x is the fused one."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from . import _differentiable, _reference, _strategy
from ._strategy import Choice, Request


def product(request: Request, x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """all_gather_matmul where all of x is at hand: `rows`."""
    choice = _strategy.choose(request, x, w)
    if choice.strategy == "fused":
        y: jax.Array = _dot_inline(request, choice, x, w, rows)
        return y
    return _reference.matmul(rows, w, transpose_w=request.transpose_w, dtype=request.dtype, precision=request.precision)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _dot(request: Request, choice: Choice, x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """A plain dot, whose gradient of x is the fused one: rows are taken to be what they are, not to depend on x."""
    return _reference.matmul(rows, w, transpose_w=request.transpose_w, dtype=request.dtype, precision=request.precision)


def _forward(request: Request, choice: Choice, x: Any, w: Any, rows: Any) -> Any:
    nothing = jnp.zeros((0,), w.value.dtype)  # as in _differentiable
    kept = w.value if x.perturbed else nothing, rows.value if w.perturbed else nothing
    return _dot_inline(request, choice, x.value, w.value, rows.value), kept


def _backward(request: Request, choice: Choice, kept: Any, dy: Any) -> Any:
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return None, None, None
    w, rows = (v if v.size else None for v in kept)
    dx, dw = _differentiable.from_dy(request, choice, dy, None, w, rows, kept[0].dtype)
    return dx, dw, None


_dot.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _dot_inline(request: Request, choice: Choice, x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    y: jax.Array = _dot(request, choice, x, w, rows)
    return y
