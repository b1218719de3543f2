"""Products of float8 operands, which the kernel multiplies by a scale; and those of wider operands, quantised on the
way, which have gradients."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax import lax

from . import _lowering, _operands, _reference, _strategy
from ._differentiable import OTHER, of_every_rank
from ._operands import Operands
from ._strategy import Choice, Request

Scales = tuple[jax.Array, jax.Array]
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


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
        f"none; use entwine_jax.float8_{use}, which quantises x and w and has a first derivative, or "
        "jax.lax.stop_gradient on x, w, scales and bias"
    )


def _refuse(request: Request, *_: Any) -> Any:
    no_gradient(request.op)


_bound.defvjp(_refuse, _refuse)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _bound_inline(request: Request, choice: Choice, operands: Operands) -> Any:
    return _bound(request, choice, operands)


def amax_scale(x: jax.Array, dtype: Any, axis_name: tuple[str, ...] = ()) -> jax.Array:
    """That brings the largest of |x|, on all ranks of the axes, to the largest number of `dtype`. If that isn't finite,
    neither will anything be that is quantised by it: an overflow shows."""
    amax = jnp.max(jnp.abs(x), initial=0).astype(jnp.float32)
    if axis_name:
        amax = lax.pmax(amax, axis_name)
    scale = amax / float(jnp.finfo(dtype).max)
    return jnp.where(scale == 0, jnp.float32(1), scale)


def quantise(x: jax.Array, scale: jax.Array, dtype: Any) -> jax.Array:
    """x / scale; what is past the largest number of `dtype` becomes that."""
    most = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32) / scale, -most, most).astype(dtype)


def quantised(request: Request, x: jax.Array, w: jax.Array, scales: Scales | None) -> jax.Array:
    """y of x (batch, rows, k) and w (k, n), quantised by `scales`, or by what their largest numbers ask for.

    What is gathered has one scale on all ranks; what isn't has each rank's own: a partial sum is multiplied by it
    before it travels.
    """
    if scales is None:
        gathered = request.team.axis_name if request.op == "all_gather_matmul" else ()
        scales = amax_scale(lax.stop_gradient(x), FORWARD, gathered), amax_scale(lax.stop_gradient(w), FORWARD)
    y: jax.Array = _quantised_inline(request, x, w, *(lax.stop_gradient(v) for v in scales))
    return y


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantised(request: Request, x: jax.Array, w: jax.Array, x_scale: jax.Array, w_scale: jax.Array) -> jax.Array:
    return _product(request, quantise(x, x_scale, FORWARD), quantise(w, w_scale, FORWARD), x_scale * w_scale)[0]


def _product(request: Request, x: jax.Array, w: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """w is (k, n), and its transpose is made as it is quantised."""
    return run(dataclasses.replace(request, transpose_w=True), *varied(request.team.axis_name, x, w.T, scale))


def _forward(request: Request, x: Any, w: Any, x_scale: Any, w_scale: Any) -> Any:
    """As in `_differentiable`: keeps what the gradients that are wanted need, and empty arrays for the rest."""
    x8, w8 = quantise(x.value, x_scale.value, FORWARD), quantise(w.value, w_scale.value, FORWARD)
    # Without dx there is nothing beside which to gather x once more.
    whole = w.perturbed and not x.perturbed and request.op == "all_gather_matmul"
    y, rows = _product(dataclasses.replace(request, gathers=whole), x8, w8, x_scale.value * w_scale.value)
    nothing = jnp.zeros((0,), FORWARD)
    kept = x8 if w.perturbed and not whole else nothing, w8 if x.perturbed else nothing, rows if whole else nothing
    likes = tuple(jnp.zeros((0,), v.value.dtype) for v in (x, w))
    return y, (kept, likes, x_scale.value, w_scale.value)


def _backward(request: Request, residuals: Any, dy: Any) -> Any:
    if isinstance(dy, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None
    kept, likes, x_scale, w_scale = residuals
    x8, w8, rows = (v if v.size else None for v in kept)
    op, axis_name = request.op, request.team.axis_name
    if op == "matmul_all_reduce":
        likeness: Any = x8 if w8 is None else w8
        dy = of_every_rank(dy, likeness, axis_name)
    dy_scale = amax_scale(dy, BACKWARD, axis_name if op == "matmul_reduce_scatter" else ())
    dy8, dx = quantise(dy, dy_scale, BACKWARD), None
    to_dx = dataclasses.replace(
        request,
        op=OTHER.get(op, op),
        transpose_w=True,
        dtype=jnp.dtype(jnp.bfloat16 if likes[0].dtype == jnp.bfloat16 else jnp.float32),
        gathers=x8 is not None,
    )
    if op == "matmul_all_reduce":
        if w8 is not None:
            dx = _dot(dy8, w8, (2,), (1,), dy_scale * w_scale)
    elif w8 is not None:
        dy8, w8, scale = varied(axis_name, dy8, w8, dy_scale * w_scale)
        dx, beside = run(to_dx, dy8, w8, scale, x8 if op == "all_gather_matmul" else None)
        if op == "all_gather_matmul":
            rows = beside if rows is None else rows
        elif beside is not None:
            dy8 = beside
    elif op == "matmul_reduce_scatter":
        dy8 = _reference.gather(dy8, axis_name)
    rows, dw = x8 if rows is None else rows, None
    if rows is not None:
        dw = _dot(rows, dy8, (0, 1), (0, 1), x_scale * dy_scale)
    return *(None if v is None else v.astype(like.dtype) for v, like in zip((dx, dw), likes, strict=True)), None, None


def _dot(a: jax.Array, b: jax.Array, of_a: Any, of_b: Any, scale: jax.Array) -> jax.Array:
    """XLA's own product of float8, in float32."""
    return lax.dot_general(a, b, ((of_a, of_b), ((), ())), preferred_element_type=jnp.float32) * scale


_quantised.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0,), inline=True)
def _quantised_inline(request: Request, *operands: jax.Array) -> jax.Array:
    y: jax.Array = _quantised(request, *operands)
    return y
