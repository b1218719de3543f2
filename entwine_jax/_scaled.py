"""Products of float8 operands, which the kernel multiplies by a scale."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from . import _lowering, _operands, _reference, _strategy
from ._operands import Operands
from ._strategy import Choice, Request


def run(
    request: Request,
    x: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    z: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """As `_differentiable.run`, times `scale`, of float8 x and w: y has no gradient. All vary over the same axes, but a
    bias as y does."""
    return add(request, (x,), (w,), scale, z, bias)


def add(
    request: Request,
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    scale: jax.Array,
    z: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The same of the sum of the products of several pairs."""
    request = dataclasses.replace(request, products=len(xs), biased=bias is not None)
    pairs = _operands.pairs(xs, ws)
    if z is None and len(xs) > 1 and _strategy.apart(request, pairs):
        each = (run(request.alone(i), *pair, scale)[0] for i, pair in enumerate(pairs))
        return _reference.finish(functools.reduce(jnp.add, each), bias, request.activation), None
    choice = _strategy.choose_of(request, pairs)
    if z is not None and (choice.strategy != "fused" or _strategy.gather_obstacle(request, z) is not None):
        y = add(dataclasses.replace(request, gathers=False), xs, ws, scale, bias=bias)[0]
        return y, _reference.gather(z, request.team.axis_name)
    operands = Operands((*xs,), (*ws,), (bias,), scale, z)
    (y,), gathered = _bound_inline(request, choice, operands)
    return y, gathered


def multiply(
    request: Request,
    x: jax.Array,
    ws: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    biases: Sequence[jax.Array | None],
    activations: Sequence[str | None],
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """y of each w by an all-gather, times its own scale, and all of x if `request.gathers`."""
    request = request.finished([b is not None for b in biases], activations)
    if len(ws) == 1:
        y, rows = run(request, x, ws[0], scales[0], bias=biases[0])
        return (y,), rows
    request = dataclasses.replace(request, products=len(ws))
    pairs = _operands.pairs((x,), ws)
    if _strategy.takes_one(request) or (not request.gathers and _strategy.apart(request, pairs)):
        alone = [dataclasses.replace(request.alone(i), gathers=request.gathers and i == 0) for i in range(len(ws))]
        each = [run(r, x, w, s, bias=b) for r, w, s, b in zip(alone, ws, scales, biases, strict=True)]
        return tuple(y for y, _ in each), each[0][1]
    choice = _strategy.choose_of(request, pairs)
    results: tuple[tuple[jax.Array, ...], jax.Array | None]
    results = _bound_inline(request, choice, Operands((x,), (*ws,), (*biases,), jnp.stack(scales)))
    return results


def varied(axis_name: tuple[str, ...], *operands: jax.Array) -> list[jax.Array]:
    """x, w and scale as `run` wants them inside a manual shard_map."""
    made = list(operands)
    for _ in range(2):  # the second time with all axes that any of them varies over
        for i in range(1, len(made)):
            made[0], made[i] = _lowering.vary(made[0], made[i], axis_name)
    return made


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _bound(request: Request, choice: Choice, operands: Operands) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    if choice.strategy != "fused":
        return _lowering.on_xla(request, choice, operands)
    biases = tuple(None if b is None else b.astype(jnp.float32) for b in operands.biases)
    flat = operands._replace(biases=biases).flat()
    results = _lowering.collective_matmul_p.bind(*flat, request=request, choice=choice)
    return (*results[: len(biases)],), results[len(biases)] if request.gathers else None


def no_gradient(op: str) -> NoReturn:
    use = op if op != "collective_matmul" else "all_gather_matmul and its kin inside jax.shard_map"
    raise TypeError(
        f"entwine_jax.{op}: the gradient of a float8 array would be float8 itself, so a product of such has "
        f"none; use entwine_jax.float8_{use}, which quantises x and w and has gradients, or "
        "jax.lax.stop_gradient on x, w, scales and bias"
    )


def _refuse(request: Request, *_: Any) -> Any:
    no_gradient(request.op)


_bound.defvjp(_refuse, _refuse)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _bound_inline(request: Request, choice: Choice, operands: Operands) -> Any:
    return _bound(request, choice, operands)
