"""An op as JAX differentiates it: the primitive in a `custom_vjp` where it is fused, lax where XLA runs it.

Each gradient of an op is another op or a plain dot, so this serves every order. What a weight gradient needs of the
peers is kept as it was gathered, or gathered beside the product that is dx.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _lowering, _reference, _strategy
from ._operands import Operands
from ._strategy import Choice, Request


def flat(x: jax.Array) -> jax.Array:
    """Leading dimensions as one batch."""
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def run(
    request: Request, x: jax.Array, w: jax.Array, z: jax.Array | None = None, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array | None]:
    """y, and the gathered array if `request.gathers`: all of x (all-gather) or of z (reduce-scatter).

    x (batch, rows, k) or (batch, k, rows), w (k, n) or (n, k), of one dtype and varying over the same axes, as z does.
    A bias (n) varies as y does.
    """
    request = dataclasses.replace(request, biased=bias is not None)
    choice = _strategy.choose(request, x, w)
    if z is not None and (not choice.gathers_beside or _strategy.gather_obstacle(request, z) is not None):
        y = run(dataclasses.replace(request, gathers=False), x, w, bias=bias)[0]
        return y, _reference.gather(z, request.team.axis_name)
    if choice.ours:
        results: tuple[jax.Array, jax.Array | None] = _fused_inline(request, choice, x, w, z, bias)
        return results
    (y,), gathered = _lowering.on_xla(request, choice, Operands((x,), (w,), (bias,)))
    return y, gathered


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _fused(
    request: Request, choice: Choice, x: jax.Array, w: jax.Array, z: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    # A bias is float32 to the kernels; here it has its own dtype, so that its gradient has.
    more = [v for v in (None if bias is None else bias.astype(jnp.float32), z) if v is not None]
    results = _lowering.collective_matmul_p.bind(x, w, *more, request=request, choice=choice)
    return results[0], results[1] if request.gathers else None


def _forward(request: Request, choice: Choice, x: Any, w: Any, z: Any, bias: Any) -> Any:
    """Keeps only what the gradients that are wanted need: w for dx; for dw x, or all of x where that is at hand, or
    where there will be no dx beside which to gather it. And what an activation is a function of, which XLA then
    applies; but relu's gradient is a function of y.

    What isn't kept is an empty array in its place: JAX may trace this once more, with other gradients wanted, and mixes
    up residuals of different structure.
    """
    whole = request.gathers or request.saves or not x.perturbed
    whole = whole and w.perturbed and request.op == "all_gather_matmul"
    outside = request.activation if request.activation != "relu" else None
    run = dataclasses.replace(request, gathers=request.gathers or whole)
    if outside is not None:
        run = dataclasses.replace(run, activation=None)
    if whole:  # the plan was for a call that gathers nothing for others
        choice = _strategy.replanned(choice, run, x.value, w.value)
    y, gathered = _fused_inline(run, choice, *(None if v is None else v.value for v in (x, w, z, bias)))
    inner, y = y, _reference.finish(y, None, outside)
    if request.op == "all_gather_matmul" and gathered is not None:
        gathered = _reference.named(gathered)
    nothing = jnp.zeros((0,), x.value.dtype)
    kept = (
        x.value if w.perturbed and not whole else nothing,
        w.value if x.perturbed else nothing,
        gathered if whole else nothing,
        nothing if request.activation is None else inner,
        nothing if bias is None else jnp.zeros((int(bias.perturbed),), bias.value.dtype),
    )
    return (y, gathered if request.gathers else None), kept


# The op that is dx of another.
OTHER = {"all_gather_matmul": "matmul_reduce_scatter", "matmul_reduce_scatter": "all_gather_matmul"}


def _backward(request: Request, choice: Choice, kept: Any, cotangents: Any) -> Any:
    dy, d_gathered = (None if isinstance(d, jax.custom_derivatives.SymbolicZero) else d for d in cotangents)
    dx = dw = dz = dbias = None
    if dy is not None:
        x, w, gathered, activated, wants_bias = (v if v.size else None for v in kept)
        if activated is not None and request.activation is not None:
            dy = _reference.pull_back(dy, activated, request.activation)
        if (
            wants_bias is not None
        ):  # of an all-reduce before the ranks' shares of dy are added: theirs of dbias will be, too
            dbias = _reference.bias_gradient(dy, wants_bias.dtype)
        dx, dw = from_dy(request, choice, dy, x, w, gathered, kept[0].dtype)
    if d_gathered is not None:
        back = _reference.scatter(d_gathered, request.team.axis_name)
        if request.op == "matmul_reduce_scatter":
            dz = back
        else:
            dx = back if dx is None else dx + back
    return dx, dw, dz, dbias


def from_dy(request: Request, choice: Choice, dy: Any, x: Any, w: Any, gathered: Any, dtype: Any) -> tuple[Any, Any]:
    """dx and dw, in `dtype`, of what `_forward` has kept the operands for."""
    if x is None and w is None and gathered is None:
        return None, None
    operand, axis_name = operand_dtype(choice, dtype, dy.dtype), request.team.axis_name
    dy, x, w, gathered = (None if v is None else v.astype(operand) for v in (dy, x, w, gathered))
    transpose, precision = not request.transpose_w, request.precision
    weight_gradient = functools.partial(
        _reference.weight_gradient, precision=precision, transpose_x=request.transpose_x
    )
    dx = dw = None
    if request.op == "matmul_all_reduce":
        dy = of_every_rank(dy, w if x is None else x, axis_name)
        if w is not None:
            dx = _reference.matmul(dy, w, transpose_w=transpose, dtype=operand, precision=precision)
        if x is not None:
            dw = weight_gradient(x, dy)
    else:
        to_dx = Request(OTHER[request.op], request.team, transpose, operand, precision, request.settings)
        if w is not None and x is not None:
            dx, dw = gradients(to_dx, dy, w, x, request.transpose_x)
        elif w is not None:
            dx = run(to_dx, dy, w)[0]
        elif x is not None:  # of a reduce-scatter; without a product to hide behind, the gather is XLA's own
            dw = weight_gradient(x, _reference.gather(dy, axis_name))
        if gathered is not None:
            dw = weight_gradient(gathered, dy)
    if dw is not None and request.transpose_w:
        dw = dw.T
    if dx is not None and request.transpose_x:
        dx = jnp.swapaxes(dx, 1, 2)
    return None if dx is None else dx.astype(dtype), None if dw is None else dw.astype(dtype)


def of_every_rank(dy: jax.Array, x: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """The cotangent of a sum over ranks, for each of them. This is psum's transpose: y is the same on all ranks, and if
    types know it (x varies, y doesn't), so is dy; if not, dy comes in shares that must be added."""
    if {*axis_name} <= jax.typeof(x).manual_axis_type.varying:
        return _lowering.vary(dy, x, axis_name)[0]
    summed: jax.Array = lax.psum(dy, axis_name)
    return summed


# Symbolic zeros tell which gradients are wanted, and that nobody has used the gathered array.
_fused.defvjp(_forward, _backward, symbolic_zeros=True)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _fused_inline(
    request: Request, choice: Choice, x: jax.Array, w: jax.Array, z: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    """In a trace of its own, since shard_map outside of jit knows no symbolic zeros."""
    results: tuple[jax.Array, jax.Array | None] = _fused(request, choice, x, w, z, bias)
    return results


def gradients(
    to_dx: Request, dy: jax.Array, w: jax.Array, x: jax.Array, transpose_x: bool = False
) -> tuple[jax.Array, jax.Array]:
    """dx, by rows, and dw from one call: what dw needs of the peers is gathered beside dx's product."""
    to_dx = dataclasses.replace(to_dx, gathers=True)
    if to_dx.op == "matmul_reduce_scatter":
        dx, rows = run(to_dx, dy, w, x)
        assert rows is not None
        return dx, _reference.weight_gradient(rows, dy, precision=to_dx.precision)
    dx, rows = run(to_dx, dy, w)
    assert rows is not None
    return dx, _reference.weight_gradient(x, rows, precision=to_dx.precision, transpose_x=transpose_x)


def operand_dtype(choice: Choice, dtype: Any, cotangent: Any) -> Any:
    """What a gradient's product is taken in; `dtype` is the operands'. The fused kernels multiply 16-bit numbers: a
    float32 cotangent is rounded to bfloat16 for them. Not to float16, which has not the range that a gradient needs:
    that product is one of float32."""
    rounds = dtype == jnp.bfloat16 and choice.ours
    return dtype if rounds else jnp.promote_types(cotangent, dtype)
