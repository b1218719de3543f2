"""Two products of one x, gate and up, in one call that writes activation(gate) * up alone, as JAX differentiates it.

The gradient needs gate and up themselves. So a forward pass that is differentiated is the call of both products, whose
gradients it has, and XLA makes one of the two.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from . import _lowering, _operands, _reference, _several, _strategy
from ._operands import Operands
from ._several import Biases, Ys
from ._strategy import Choice, Request


def multiply(
    request: Request, x: jax.Array, ws: Sequence[jax.Array], biases: Biases, activation: str | None
) -> tuple[jax.Array, jax.Array | None]:
    """activation(gate) * up by an all-gather, and all of x if `request.gathers`. All vary over the same axes."""
    request = request.finished([b is not None for b in biases], [activation, None])
    request = dataclasses.replace(request, products=2, gated=True)
    pairs = _operands.pairs((x,), ws)
    few = not (request.gathers or _strategy.takes_one(request)) and _strategy.apart(request, pairs)
    if few:
        both = dataclasses.replace(request, gated=False)
        ys, _ = _several.multiply(both, x, ws, biases, [activation, None])
        return _reference.gate(ys, None), None
    choice = _strategy.choose_of(request, pairs)
    if choice.ours:
        results: tuple[jax.Array, jax.Array | None] = _gated_inline(request, choice, x, (*ws,), (*biases,))
        return results
    (h,), rows = _lowering.on_xla(request, choice, Operands((x,), (*ws,), (*biases,)))
    return h, rows


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gated(
    request: Request, choice: Choice, x: jax.Array, ws: Ys, biases: tuple[jax.Array | None, ...]
) -> tuple[jax.Array, jax.Array | None]:
    (h,), gathered = _several.bind(request, choice, Operands((x,), ws, biases))
    return h, gathered


def _both(request: Request) -> Request:
    """For gate and up, biases added, each a result."""
    return dataclasses.replace(request.finished(request.biases, [None, None]), gated=False)


def _forward(request: Request, choice: Choice, x: Any, ws: Any, biases: Any) -> Any:
    both = _both(request)
    plan = _strategy.plan(both, *_strategy.joined(both, [(x.value, w.value) for w in ws]))
    choice = dataclasses.replace(choice, plan=plan)
    (ys, gathered), kept = _several.products_forward(both, choice, x, ws, biases)
    return (_reference.gate(ys, request.activation), gathered), (kept, ys)


def _backward(request: Request, choice: Choice, kept: Any, cotangents: Any) -> Any:
    kept, ys = kept
    dh, d_gathered = cotangents
    dys = (dh, dh)  # both zero, if it is
    if not _several.is_zero(dh):
        (dys,) = jax.vjp(functools.partial(_reference.gate, activation=request.activation), ys)[1](dh)
    return _several.products_backward(_both(request), choice, kept, (dys, d_gathered))


_gated.defvjp(_forward, _backward, symbolic_zeros=True)


# In a trace of its own, since shard_map outside of jit knows no symbolic zeros.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _gated_inline(request: Request, choice: Choice, *operands: Any) -> Any:
    return _gated(request, choice, *operands)
