"""Several products in one call, as JAX differentiates them: of one x and several w, and sums of the products of pairs.

Each is what the gradients of the other need. Products of one x: dx is the sum of all dy_i w_i.T, and beside it x is
gathered once more for all dw. A sum: dx_i are the products of one dy, which is gathered for them and for all dw.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from . import _differentiable, _lowering, _operands, _reference, _strategy
from ._differentiable import gradient_request, of_every_rank, operand_dtype
from ._operands import Operands
from ._strategy import Choice, Request

Ys = tuple[jax.Array, ...]
Biases = Sequence[jax.Array | None]


def multiply(
    request: Request, x: jax.Array, ws: Sequence[jax.Array], biases: Biases, activations: Sequence[str | None]
) -> tuple[Ys, jax.Array | None]:
    """y of each w by an all-gather, and all of x if `request.gathers`. All vary over the same axes."""
    request = request.finished([b is not None for b in biases], activations)
    if len(ws) == 1:
        y, rows = _differentiable.run(request, x, ws[0], bias=biases[0])
        return (y,), rows
    request = dataclasses.replace(request, products=len(ws))
    pairs = _operands.pairs((x,), ws)
    if _strategy.takes_one(request) or (not request.gathers and _strategy.apart(request, pairs)):
        alone = [dataclasses.replace(request.alone(i), gathers=request.gathers and i == 0) for i in range(len(ws))]
        each = [_differentiable.run(r, x, w, bias=b) for r, w, b in zip(alone, ws, biases, strict=True)]
        return tuple(y for y, _ in each), each[0][1]
    choice = _strategy.choose_of(request, pairs)
    results: tuple[Ys, jax.Array | None]
    if choice.ours:
        results = _products_inline(request, choice, x, (*ws,), (*biases,))
    else:
        results = _lowering.on_xla(request, choice, Operands((x,), (*ws,), (*biases,)))
    return results


def add(
    request: Request,
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    z: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None]:
    """The sum of the products of all pairs by a reduce-scatter or an all-reduce, and all of z if `request.gathers`."""
    if len(xs) == 1:
        return _differentiable.run(request, xs[0], ws[0], z, bias)
    request = dataclasses.replace(request, products=len(xs), biased=bias is not None)
    pairs = _operands.pairs(xs, ws)
    if z is not None and _strategy.takes_one(request):
        y = add(dataclasses.replace(request, products=1, gathers=False), xs, ws, bias=bias)[0]
        return y, _reference.gather(z, request.team.axis_name)
    if z is None and _strategy.apart(request, pairs):
        each = (_differentiable.run(request.alone(i), *pair)[0] for i, pair in enumerate(pairs))
        return _reference.finish(functools.reduce(jnp.add, each), bias, request.activation), None
    choice = _strategy.choose_of(request, pairs)
    if z is not None and (not choice.gathers_beside or _strategy.gather_obstacle(request, z) is not None):
        y = add(dataclasses.replace(request, gathers=False), xs, ws, bias=bias)[0]
        return y, _reference.gather(z, request.team.axis_name)
    if choice.ours:
        results: tuple[jax.Array, jax.Array | None] = _sum_inline(request, choice, (*xs,), (*ws,), z, bias)
        return results
    (y,), _ = _lowering.on_xla(request, choice, Operands((*xs,), (*ws,), (bias,)))
    return y, None


def bind(request: Request, choice: Choice, operands: Operands) -> tuple[Ys, jax.Array | None]:
    """With biases of any dtype, so that their gradients have it."""
    biases = tuple(None if b is None else b.astype(jnp.float32) for b in operands.biases)
    flat = operands._replace(biases=biases).flat()
    results = _lowering.collective_matmul_p.bind(*flat, request=request, choice=choice)
    return (*results[: request.results],), results[request.results] if request.gathers else None


def _values(tree: Any) -> Any:
    """What `symbolic_zeros` has wrapped."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))


def _flag(wanted: Any) -> jax.Array:
    """Whether something is wanted, in a shape: values are traced."""
    return jnp.zeros((int(wanted),))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(
    request: Request, choice: Choice, x: jax.Array, ws: Ys, biases: tuple[jax.Array | None, ...]
) -> tuple[Ys, jax.Array | None]:
    return bind(request, choice, Operands((x,), ws, biases))


def products_forward(request: Request, choice: Choice, x: Any, ws: Any, biases: Any) -> Any:
    """Keeps what `_differentiable` does, with an empty array for what isn't wanted."""
    wanted = any(w.perturbed for w in ws)
    whole = wanted and (request.gathers or request.saves or not x.perturbed)
    # Of activations only relu's gradient is a function of y: the others are left to XLA, on what they are functions of.
    outside = [None if a == "relu" else a for a in request.activations]
    inside = [a if a == "relu" else None for a in request.activations]
    run = dataclasses.replace(request.finished(request.biases, inside), gathers=request.gathers or whole)
    if whole:
        joined = _strategy.joined(run, [(x.value, w.value) for w in ws])
        choice = _strategy.replanned(choice, run, *joined)
    inner, gathered = _products_inline(run, choice, *_values((x, ws, biases)))
    if gathered is not None:
        gathered = _reference.named(gathered)
    nothing = jnp.zeros((0,), x.value.dtype)
    kept = (
        x.value if wanted and not whole else nothing,
        tuple(w.value if x.perturbed else nothing for w in ws),
        gathered if whole else nothing,
        tuple(nothing if a is None else y for y, a in zip(inner, request.activations, strict=True)),
        tuple(None if b is None else jnp.zeros((int(b.perturbed),), b.value.dtype) for b in biases),
        tuple(_flag(w.perturbed) for w in ws),
    )
    ys = tuple(_reference.finish(y, None, a) for y, a in zip(inner, outside, strict=True))
    return (ys, gathered if request.gathers else None), kept


def products_backward(request: Request, choice: Choice, kept: Any, cotangents: Any) -> Any:
    x, ws, rows, inner, biases, wants = kept
    dys, d_gathered = jax.tree.map(_nonzero, cotangents, is_leaf=is_zero)
    dtype, axis_name = x.dtype, request.team.axis_name
    count, live = len(ws), [i for i, dy in enumerate(dys) if dy is not None]
    dx, dys = None, [*dys]
    dws: list[Any] = [None] * count
    dbiases: list[Any] = [None] * count
    for i in live:
        if (activation := request.activations[i]) is not None:
            dys[i] = _reference.pull_back(dys[i], inner[i], activation)
        if biases[i] is not None and biases[i].size:
            dbiases[i] = _reference.bias_gradient(dys[i], biases[i].dtype)
    if live:
        operand = operand_dtype(choice, dtype, dys[live[0]].dtype)
        wanted = [i for i in live if wants[i].size]
        rows = rows.astype(operand) if rows.size else None
        if ws[0].size:
            to_dx = gradient_request(request, operand)
            z = x.astype(operand) if wanted and rows is None else None
            given = [dys[i].astype(operand) for i in live], [ws[i].astype(operand) for i in live]
            dx, beside = add(dataclasses.replace(to_dx, gathers=z is not None), *given, z)
            dx, rows = dx.astype(dtype), beside if rows is None else rows
        for i in wanted:
            dws[i] = _weight_gradient(request, rows, dys[i].astype(operand), dtype)
    if d_gathered is not None:
        back = _reference.scatter(d_gathered, axis_name)
        dx = back if dx is None else dx + back
    return dx, (*dws,), (*dbiases,)


def _weight_gradient(request: Request, x: Any, dy: Any, dtype: Any) -> Any:
    dw = _reference.weight_gradient(x, dy, precision=request.precision)
    return (dw.T if request.transpose_w else dw).astype(dtype)


def is_zero(cotangent: Any) -> bool:
    return isinstance(cotangent, jax.custom_derivatives.SymbolicZero)


def _nonzero(cotangent: Any) -> Any:
    return None if is_zero(cotangent) else cotangent


_products.defvjp(products_forward, products_backward, symbolic_zeros=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(
    request: Request, choice: Choice, xs: Ys, ws: Ys, z: jax.Array | None, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array | None]:
    (y,), gathered = bind(request, choice, Operands(xs, ws, (bias,), z=z))
    return y, gathered


def _sum_forward(request: Request, choice: Choice, xs: Any, ws: Any, z: Any, bias: Any) -> Any:
    outside = None if request.activation == "relu" else request.activation
    run = request if outside is None else dataclasses.replace(request, activation=None)
    inner, gathered = _sum_inline(run, choice, *_values((xs, ws, z, bias)))
    nothing = jnp.zeros((0,), xs[0].value.dtype)
    kept = (
        tuple(x.value if w.perturbed else nothing for x, w in zip(xs, ws, strict=True)),
        tuple(w.value if x.perturbed else nothing for x, w in zip(xs, ws, strict=True)),
        nothing if request.activation is None else inner,
        None if bias is None else jnp.zeros((int(bias.perturbed),), bias.value.dtype),
    )
    return (_reference.finish(inner, None, outside), gathered), kept


def _sum_backward(request: Request, choice: Choice, kept: Any, cotangents: Any) -> Any:
    xs, ws, inner, bias = kept
    dy, d_gathered = (_nonzero(d) for d in cotangents)
    axis_name, dtype, count = request.team.axis_name, xs[0].dtype, len(xs)
    dxs: list[Any] = [None] * count
    dws: list[Any] = [None] * count
    dz = dbias = None
    wants_x, wants_w = ([i for i, v in enumerate(each) if v.size] for each in (ws, xs))
    if dy is not None and request.activation is not None:
        dy = _reference.pull_back(dy, inner, request.activation)
    if dy is not None and bias is not None and bias.size:
        # Of an all-reduce before the ranks' shares of dy are added, as in _differentiable.
        dbias = _reference.bias_gradient(dy, bias.dtype)
    if dy is not None and (wants_x or wants_w):
        operand = operand_dtype(choice, dtype, dy.dtype)
        dy, rows = dy.astype(operand), None
        made: Sequence[jax.Array] = ()
        given = [ws[i].astype(operand) for i in wants_x]
        transpose, precision = not request.transpose_w, request.precision
        if request.op == "matmul_all_reduce":
            rows = of_every_rank(dy, ws[wants_x[0]] if wants_x else xs[wants_w[0]], axis_name)
            made = [
                _reference.matmul(rows, w, transpose_w=transpose, dtype=operand, precision=precision) for w in given
            ]
        elif wants_x:
            to_dx = dataclasses.replace(gradient_request(request, operand), gathers=bool(wants_w))
            made, rows = multiply(to_dx, dy, given, [None] * len(given), [None] * len(given))
        else:  # without a product to hide behind, the gather is XLA's own
            rows = _reference.gather(dy, axis_name)
        for i, dx in zip(wants_x, made, strict=True):
            dxs[i] = dx.astype(dtype)
        for i in wants_w:
            dws[i] = _weight_gradient(request, xs[i].astype(operand), rows, dtype)
    if d_gathered is not None:
        dz = _reference.scatter(d_gathered, axis_name)
    return (*dxs,), (*dws,), dz, dbias


_sum.defvjp(_sum_forward, _sum_backward, symbolic_zeros=True)


# In traces of their own, since shard_map outside of jit knows no symbolic zeros.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _products_inline(request: Request, choice: Choice, *operands: Any) -> Any:
    return _products(request, choice, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _sum_inline(request: Request, choice: Choice, *operands: Any) -> Any:
    return _sum(request, choice, *operands)
