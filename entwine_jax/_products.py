"""The products y = x @ w, x = y @ w.T and w = x.T @ y, differentiable: the gradients of each are the other two."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _partitioned_pairs, _partitioned_scaled, _partitioning, _placed, _reference, _scaled
from ._placed import Place
from ._selection import OPERANDS
from ._spread import Call


def primal(
    call: Call,
    place: Place | None,
    a: jax.Array,
    b: jax.Array,
    like: jax.Array | None = None,
    rows: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`place` says where arrays lie. Without it only the partitioner will know, and a gradient brings what it is a
    gradient of, `like`, to lie where that lies. A weight gradient may bring the `rows` that `saving` has kept: they are
    x once more, and its own gradient is that of x. What isn't a gradient may have an epilogue: `bias`, and the
    call's activation."""
    if place is None:
        return _partitioning.product(call, a, b, like, rows, bias)
    return _placed.product(call, place, a, b, rows, bias)


product: Any = jax.custom_vjp(primal, nondiff_argnums=(0, 1))


def _primal_saving(
    call: Call, place: Place | None, x: jax.Array, w: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """y = x @ w, and what the weight gradient is to use: x as the product gathers it, where it does."""
    return _partitioned_pairs.saving(call, x, w, bias) if place is None else _placed.saving(call, place, x, w, bias)


saving: Any = jax.custom_vjp(_primal_saving, nondiff_argnums=(0, 1))


def _forward(call: Call, place: Place | None, a: Any, b: Any, like: Any, rows: Any, bias: Any) -> Any:
    """Whether a gradient is wanted at all goes with the residuals, as the size of an empty or non-empty array: JAX may
    trace this once more with others wanted, and mixes up residuals of different structure.

    XLA applies an activation here, to what is kept for its gradient; but relu's is a function of y."""
    outside = call.activation if call.activation != "relu" else None
    inner = dataclasses.replace(call, activation=None) if outside is not None else call
    # Without dx there is nothing beside which to gather x once more. But nobody asked, and where only the partitioner
    # will know whether it is gathered, a forward pass that is compiled apart might gather the rows of a plain dot.
    if call.product == "y" and b.perturbed and (call.saves or (place is not None and not a.perturbed)):
        (y, _), kept = _forward_saving(inner, place, a, b, bias)
    else:
        y = product(inner, place, *(v if v is None else v.value for v in (a, b, like, rows, bias)))
        kept = a.value, b.value, _wanted(a, b), jnp.zeros((0,), a.value.dtype)
    return _reference.finish(y, None, outside), (*kept[:4], *kept_of_epilogue(call, y, bias))


def _forward_saving(call: Call, place: Place | None, x: Any, w: Any, bias: Any) -> Any:
    y, rows = saving(call, place, *(v if v is None else v.value for v in (x, w, bias)))
    rows = lax.stop_gradient(rows)
    kept = _reference.named(rows) if rows.size else rows
    return (y, rows), (x.value, w.value, _wanted(x, w), kept, *kept_of_epilogue(call, y, bias))


def kept_of_epilogue(call: Call, y: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array]:
    """What the activation's gradient is a function of; and whether the bias' is wanted, in its dtype."""
    nothing = jnp.zeros((0,), y.dtype)
    wanted = nothing if bias is None else jnp.zeros((int(bias.perturbed),), bias.value.dtype)
    return (nothing if call.activation is None else y), wanted


def _primal_scaled(
    call: Call, place: Place | None, a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array | None
) -> jax.Array:
    """A product of float8 times `scale`, and its epilogue: it has no gradient."""
    if place is None:
        return _partitioned_scaled.product(call, a, b, scale, bias)
    return _placed.scaled(call, place, a, b, scale, bias)


scaled: Any = jax.custom_vjp(_primal_scaled, nondiff_argnums=(0, 1))
scaled.defvjp(*[lambda *_: _scaled.no_gradient("collective_matmul")] * 2)


def _wanted(a: Any, b: Any) -> tuple[jax.Array, ...]:
    return tuple(jnp.zeros((int(v.perturbed),)) for v in (a, b))


def _backward(call: Call, place: Place | None, kept: Any, cotangent: Any) -> Any:
    a, b, wanted, rows, activated, wants_bias = kept
    if isinstance(cotangent, jax.custom_derivatives.SymbolicZero):
        return None, None, None, None, None
    if call.activation is not None and activated.size:
        cotangent = _reference.pull_back(cotangent, activated, call.activation)
    dbias = _reference.bias_gradient(cotangent, wants_bias.dtype) if wants_bias.size else None
    operands = OPERANDS[call.product]
    known = {operands[0]: a, operands[1]: b, call.product: cotangent}
    rows = rows if rows.size else None
    if call.product == "y" and all(v.size for v in wanted):
        return *gradients(call, place, cotangent, b, a, rows), None, None, dbias

    def gradient(name: str) -> jax.Array:
        like = None if place is not None else known[name]
        made: jax.Array = product(
            to(call, name, known[name]),
            place,
            *(known[v] for v in OPERANDS[name]),
            like,
            rows if name == "w" else None,
        )
        return made

    made = (gradient(name) if v.size else None for name, v in zip(operands, wanted, strict=True))
    return *made, None, None, dbias


def _backward_saving(call: Call, place: Place | None, kept: Any, cotangents: Any) -> Any:
    """No gradient comes by way of the rows."""
    dx, dw, _, _, dbias = _backward(call, place, kept, cotangents[0])
    return dx, dw, dbias


# Symbolic zeros tell which gradients are wanted: one call that gives both isn't dead while one is used.
product.defvjp(_forward, _backward, symbolic_zeros=True)
saving.defvjp(_forward_saving, _backward_saving, symbolic_zeros=True)


def to(call: Call, name: str, like: Any) -> Call:
    shared = call.shared.gradient() if call.shared is not None and name != "w" else None
    return dataclasses.replace(call, product=name, dtype=like.dtype, saves=False, activation=None, shared=shared)


def _both(
    call: Call, place: Place | None, dy: jax.Array, w: jax.Array, x: jax.Array, rows: jax.Array | None = None
) -> Any:
    """dx and dw of y = x @ w: what dw needs of the team's rows is gathered beside dx, where shardings allow that, or
    has been kept: `rows`."""
    calls = to(call, "x", x), to(call, "w", w)

    @jax.custom_batching.custom_vmap
    def both(dy: jax.Array, w: jax.Array, x: jax.Array, *rows: jax.Array) -> Any:
        if place is None:
            return _partitioned_pairs.gradients(calls, dy, w, x, *rows)
        return _placed.gradients(calls, place, dy, w, x, *rows)

    # One by one they have batching rules. Both results are batched: vmap of a custom_vjp sums the cotangent of one that
    # isn't once too often (JAX 0.11.2).
    @both.def_vmap
    def batched(size: int, is_batched: list[bool], *operands: jax.Array) -> Any:
        def each(dy: jax.Array, w: jax.Array, x: jax.Array, *rows: jax.Array) -> Any:
            like = (None, None) if place is not None else (x, w)
            return primal(calls[0], place, dy, w, like[0]), primal(calls[1], place, x, dy, like[1], *rows)

        axes = tuple(0 if batch else None for batch in is_batched)
        return jax.vmap(each, axes, axis_size=size)(*operands), (True, True)

    return both(dy, w, x, *(() if rows is None else (rows,)))


gradients: Any = jax.custom_vjp(_both, nondiff_argnums=(0, 1))


def _forward_both(
    call: Call, place: Place | None, dy: jax.Array, w: jax.Array, x: jax.Array, rows: jax.Array | None = None
) -> Any:
    return gradients(call, place, dy, w, x, rows), (dy, w, x)


def backward_both(call: Call, place: Place | None, kept: Any, cotangents: Any) -> Any:
    """Of dx = dy @ w.T and dw = x.T @ dy, by x and not by its rows."""
    (dy, w, x), (d_dx, d_dw) = kept, cotangents

    def made(name: str, like: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
        result: jax.Array = product(to(call, name, like), place, a, b, None if place is not None else like)
        return result

    d_dy = made("y", dy, d_dx, w) + made("y", dy, x, d_dw)
    return d_dy, made("w", w, d_dx, dy), made("x", x, dy, d_dw), None


gradients.defvjp(_forward_both, backward_both)
