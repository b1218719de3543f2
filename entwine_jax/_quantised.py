"""Products of wider operands that are rounded to float8 on the way: what has gradients.

Of one x and several w (all-gather), or the sum of the products of pairs; as in `_several`, each is what the gradients
of the other need. Rounding is taken for the identity: the first derivative is made of float8 products, higher ones are
those of the product that isn't rounded.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from . import _lowering, _reference, _scaled
from ._differentiable import OTHER, of_every_rank
from ._operands import Operands
from ._strategy import Choice, Request

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
Arrays = tuple[jax.Array, ...]


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


def quantised(
    request: Request,
    xs: Sequence[jax.Array],
    ws: Sequence[jax.Array],
    x_scale: jax.Array | None,
    w_scales: Sequence[jax.Array] | None,
    wide: bool,
) -> Arrays:
    """All y of x (batch, rows, k), an all-gather's, or their one sum; by these scales, or by what largest numbers ask
    for. With `wide` it keeps x and w for derivatives after the first.

    What is gathered has one scale on all ranks; what isn't has each rank's own: a partial sum is multiplied by it
    before it travels. All x have one, and so have all w whose products are added.
    """
    gather = request.op == "all_gather_matmul"
    x_values, w_values = (tuple(lax.stop_gradient(v) for v in each) for each in (xs, ws))
    if x_scale is None or w_scales is None:
        names = request.team.axis_name if gather else ()
        x_scale = _common(amax_scale(x, FORWARD, names) for x in x_values)
        w_scales = [amax_scale(w, FORWARD) for w in w_values]
        if not gather:
            w_scales = [_common(w_scales)] * len(ws)
    x_scale, w_scales = lax.stop_gradient(x_scale), tuple(lax.stop_gradient(s) for s in w_scales)
    rounded = Rounded(
        tuple(quantise(x, x_scale, FORWARD) for x in x_values),
        tuple(quantise(w, s, FORWARD) for w, s in zip(w_values, w_scales, strict=True)),
        x_scale,
        w_scales,
    )
    ys: Arrays = _product_inline(request, (wide, False), (*xs,), (*ws,), rounded)[0]
    return ys


def _common(scales: Any) -> jax.Array:
    most: jax.Array = functools.reduce(jnp.maximum, scales)
    return most


class Rounded(NamedTuple):
    """x and w in float8, and the scales that they are to be multiplied by, one of x and one for each w."""

    xs: Arrays
    ws: Arrays
    x_scale: jax.Array
    w_scales: Arrays


class Kept(NamedTuple):
    """Of the forward pass, for the backward one. What isn't wanted is an empty array in its place: JAX may trace this
    once more, with other gradients wanted, and mixes up residuals of different structure."""

    rounded: Rounded
    gathered: jax.Array  # all of an all-gather's x
    wants: Arrays  # for each w, not empty if its gradient is wanted
    xs: Arrays  # as they came, or empty
    ws: Arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(
    request: Request, how: tuple[bool, bool], xs: Arrays, ws: Arrays, rounded: Rounded
) -> tuple[Arrays, jax.Array | None]:
    """All y, and with the second flag all of x, rounded; the first one is whether derivatives after the first are
    wanted. xs and ws are what `rounded` is of: only gradients look at them."""
    request = dataclasses.replace(request, transpose_w=True, gathers=how[1])
    x_scale, many = rounded.x_scale, len(ws)
    # Their transposes are made as they are quantised.
    operands = [*rounded.xs, *(w.T for w in rounded.ws), *(x_scale * s for s in rounded.w_scales)]
    operands = _scaled.varied(request.team.axis_name, *operands)
    x8s, w8s, scales = operands[: len(xs)], operands[len(xs) : len(xs) + many], operands[len(xs) + many :]
    if request.op == "all_gather_matmul":
        return _scaled.multiply(request, x8s[0], w8s, scales, [None] * many, [None] * many)
    y, _ = _scaled.add(request, x8s, w8s, scales[0])
    return (y,), None


def _forward(request: Request, how: tuple[bool, bool], xs: Any, ws: Any, rounded: Any) -> Any:
    """As in `_differentiable`."""
    rounded = _values(rounded)
    gather, wants_w = request.op == "all_gather_matmul", [w.perturbed for w in ws]
    # Without dx there is nothing beside which to gather x once more.
    whole = gather and any(wants_w) and not xs[0].perturbed
    ys, gathered = _product_inline(request, (how[0], how[1] or whole), _values(xs), _values(ws), rounded)
    nothing = jnp.zeros((0,), FORWARD)
    wants_x = [x.perturbed for x in xs]
    if gather:
        keeps_x, wants_x = [any(wants_w) and not whole], wants_x * len(ws)
    else:
        keeps_x = wants_w
    # Of an operand that isn't kept an empty part, whose dtype counts, and that a second derivative can be told by.
    likes = (tuple(v.value if how[0] else v.value.reshape(-1)[:0] for v in each) for each in (xs, ws))
    kept = Kept(
        rounded._replace(
            xs=tuple(v if keep else nothing for v, keep in zip(rounded.xs, keeps_x, strict=True)),
            ws=tuple(v if keep else nothing for v, keep in zip(rounded.ws, wants_x, strict=True)),
        ),
        gathered if whole and gathered is not None else nothing,
        tuple(jnp.zeros((int(wanted),)) for wanted in wants_w),
        *likes,
    )
    return (ys, gathered if how[1] else None), kept


def _values(tree: Any) -> Any:
    """What `symbolic_zeros` has wrapped."""
    return jax.tree.map(lambda leaf: leaf.value, tree, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))


def _backward(request: Request, how: tuple[bool, bool], kept: Kept, cotangents: Any) -> Any:
    dys, _ = cotangents
    live = [i for i, dy in enumerate(dys) if not isinstance(dy, jax.custom_derivatives.SymbolicZero)]
    dxs: Any = (None,) * len(kept.xs)
    dws: Any = [None] * len(kept.ws)
    if live:
        gather, some = request.op == "all_gather_matmul", kept
        if gather:  # of the products whose y counts
            pick = lambda each: tuple(each[i] for i in live)  # noqa: E731
            rounded = kept.rounded._replace(ws=pick(kept.rounded.ws), w_scales=pick(kept.rounded.w_scales))
            some = kept._replace(rounded=rounded, wants=pick(kept.wants), ws=pick(kept.ws))
        dxs, made = _pulled_inline(request, how[0], tuple(dys[i] for i in live), some)
        for i, dw in zip(live if gather else range(len(made)), made, strict=True):
            dws[i] = dw
    return (*dxs,), (*dws,), jax.tree.map(lambda _: None, kept.rounded)


_product.defvjp(_forward, _backward, symbolic_zeros=True)

Gradients = tuple[tuple[jax.Array | None, ...], tuple[jax.Array | None, ...]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _pulled(request: Request, wide: bool, dys: Arrays, kept: Kept) -> Gradients:
    """All dx and dw that are wanted, None for the others."""
    op, axis_name = request.op, request.team.axis_name
    (x8s, w8s, x_scale, w_scales), rows = kept.rounded, kept.gathered
    to_x, to_w = ([i for i, v in enumerate(each) if v.size] for each in (w8s, kept.wants))
    dxs: list[Any] = [None] * len(kept.xs)
    dws: list[Any] = [None] * len(kept.ws)
    if op == "matmul_all_reduce":
        likeness = w8s[to_x[0]] if to_x else x8s[to_w[0]]
        dys = (of_every_rank(dys[0], likeness, axis_name),)
    scales = [amax_scale(dy, BACKWARD, axis_name if op == "matmul_reduce_scatter" else ()) for dy in dys]
    factors = [d * w for d, w in zip(scales * (len(w8s) // len(dys)), w_scales, strict=True)]
    if len(dys) > 1 and to_x:  # of products that are added all have one scale: what w's is short of, dy's makes up for
        factors = [_common(factors)]
        scales = [factors[0] / w for w in w_scales]
    dy8s = [quantise(dy, scale, BACKWARD) for dy, scale in zip(dys, scales, strict=True)]
    narrow = all(x.dtype == jnp.bfloat16 for x in kept.xs)
    to_dx = dataclasses.replace(
        request, op=OTHER.get(op, op), transpose_w=True, dtype=jnp.dtype(jnp.bfloat16 if narrow else jnp.float32)
    )
    if op == "all_gather_matmul":
        if to_x:
            z = x8s[0] if x8s[0].size else None
            *operands, factor = _scaled.varied(axis_name, *dy8s, *w8s, factors[0])
            dy8s, w = operands[: len(dy8s)], operands[len(dy8s) :]
            dxs[0], beside = _scaled.add(dataclasses.replace(to_dx, gathers=z is not None), dy8s, w, factor, z)
            rows = rows if beside is None else beside
        operands_of_dw = [(rows, dy8, x_scale * scale) for dy8, scale in zip(dy8s, scales, strict=True)]
    else:
        all_dy: Any = dy8s[0]
        if op == "matmul_all_reduce":
            for i in to_x:
                dxs[i] = _dot(all_dy, w8s[i], (2,), (1,), factors[i])
        elif to_x:
            given = [w8s[i] for i in to_x], [factors[i] for i in to_x]
            dy8, *operands = _scaled.varied(axis_name, dy8s[0], *given[0], *given[1])
            options: Any = operands[: len(to_x)], operands[len(to_x) :], [None] * len(to_x), [None] * len(to_x)
            made, all_dy = _scaled.multiply(dataclasses.replace(to_dx, gathers=bool(to_w)), dy8, *options)
            for i, dx in zip(to_x, made, strict=True):
                dxs[i] = dx
        else:  # without a product to hide behind, the gather is XLA's own
            all_dy = _reference.gather(all_dy, axis_name)
        operands_of_dw = [(x8, all_dy, x_scale * scales[0]) for x8 in x8s]
    for i in to_w:
        a, b, scale = operands_of_dw[i]
        dws[i] = _dot(a, b, (0, 1), (0, 1), scale)
    return tuple(map(_cast, dxs, kept.xs)), tuple(map(_cast, dws, kept.ws))


def _cast(gradient: jax.Array | None, like: jax.Array) -> jax.Array | None:
    return None if gradient is None else gradient.astype(like.dtype)


def _dot(a: jax.Array, b: jax.Array, of_a: Any, of_b: Any, scale: jax.Array) -> jax.Array:
    """XLA's own product of float8, in float32."""
    return lax.dot_general(a, b, ((of_a, of_b), ((), ())), preferred_element_type=jnp.float32) * scale


def _pulled_forward(request: Request, wide: bool, dys: Arrays, kept: Kept) -> Any:
    if not wide:
        raise NotImplementedError(
            f"entwine_jax.float8_{request.op}: a second derivative needs x and w, of which only what was rounded to "
            "float8 is kept; pass residuals='operands' to keep them too, or use entwine_jax." + request.op
        )
    return _pulled_inline(request, wide, dys, kept), (dys, kept)


def _pulled_backward(request: Request, wide: bool, saved: Any, cotangents: Any) -> Any:
    """The derivative of the gradients of the product that isn't rounded."""
    dys, kept = saved

    def gradients(dys: Arrays, xs: Arrays, ws: Arrays) -> Gradients:
        ys, back = jax.vjp(functools.partial(_wide, request), xs, ws)
        made = back(tuple(dy.astype(y.dtype) for dy, y in zip(dys, ys, strict=True)))
        # As `_pulled` has them: None where none is wanted.
        return cast(Gradients, tuple(tuple(map(_as_wanted, *each)) for each in zip(made, cotangents, strict=True)))

    ddys, dxs, dws = jax.vjp(gradients, dys, kept.xs, kept.ws)[1](cotangents)
    return ddys, jax.tree.map(lambda _: None, kept)._replace(xs=dxs, ws=dws)


_pulled.defvjp(_pulled_forward, _pulled_backward)


def _as_wanted(gradient: jax.Array, cotangent: jax.Array | None) -> jax.Array | None:
    return None if cotangent is None else gradient


def _wide(request: Request, xs: Arrays, ws: Arrays) -> Arrays:
    """The product that isn't rounded, in float32 and XLA's own."""
    results = len(ws) if request.op == "all_gather_matmul" else 1
    request = dataclasses.replace(request, scaled=False, transpose_w=False, dtype=jnp.dtype(jnp.float32))
    request = dataclasses.replace(request, products=len(ws)).finished([False] * results, [None] * results)
    xs, ws = (tuple(v.astype(jnp.float32) for v in each) for each in (xs, ws))
    operands = Operands(xs, ws, (None,) * results)
    return _lowering.on_xla(request, Choice("xla", "second derivatives of float8 products are XLA's"), operands)[0]


# In traces of their own, since shard_map outside of jit knows no symbolic zeros.
@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _product_inline(request: Request, how: tuple[bool, bool], *operands: Any) -> Any:
    return _product(request, how, *operands)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _pulled_inline(request: Request, wide: bool, *operands: Any) -> Any:
    return _pulled(request, wide, *operands)
