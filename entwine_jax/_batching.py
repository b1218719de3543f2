"""The primitive under vmap."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from . import _operands, _reference
from ._strategy import Request


def batch(
    primitive: Primitive, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """A batch of x joins x's own, and one of z z's; a batch of w joins its columns; batches of both x and w, or of
    scales, are taken one by one. A batch of biases needs one of w: without, they are added by XLA."""
    size = next(v.shape[dim] for v, dim in zip(args, dims, strict=True) if dim is not None)
    x, w, *more = (v if dim is None else jnp.moveaxis(v, dim, 0) for v, dim in zip(args, dims, strict=True))
    x_batched, w_batched, *more_batched = (dim is not None for dim in dims)
    request: Request = params["request"]
    if request.products > 1:
        return _several(functools.partial(primitive.bind, **params), request, (x, w, *more), dims, size)
    if request.biased and more_batched[0] and not w_batched:
        bare = functools.partial(primitive.bind, **params | {"request": request.bare()})
        axes = [0 if b else None for b in (x_batched, w_batched, *more_batched[1:])]
        y, *gathered = jax.vmap(bare, axes, axis_size=size)(x, w, *more[1:])
        y = _reference.finish(y, more[0][:, None, None, :], request.activation)
        return [y, *gathered], [0] * (1 + len(gathered))
    bind = functools.partial(primitive.bind, **params)
    if (x_batched and w_batched) or (request.scaled and more_batched[int(request.biased)]):
        all_batched = (
            v if dim is not None else jnp.broadcast_to(v, (size, *v.shape))
            for v, dim in zip((x, w, *more), dims, strict=True)
        )
        results = lax.map(lambda operands: bind(*operands), (*all_batched,))
        return results, [0] * len(results)
    columns = 0 if request.transpose_w else 1
    bias = [more.pop(0)] if request.biased else []
    bias_batched = bool(bias) and more_batched.pop(0)
    scale = [more.pop(0)] if request.scaled else []
    more_batched = more_batched[len(scale) :]
    if w_batched:
        w = lax.collapse(jnp.moveaxis(w, 0, columns), columns, columns + 2)
        bias = [v.reshape(-1) if bias_batched else jnp.tile(v, size) for v in bias]
    rows = ((x, x_batched), *zip(more, more_batched, strict=True))
    x, *z = (v.reshape(-1, *v.shape[2:]) if batched else v for v, batched in rows)
    y, *gathered = bind(x, w, *bias, *scale, *z)
    y_dim = 0
    if x_batched:
        y = y.reshape(size, -1, *y.shape[1:])
    elif w_batched:
        y, y_dim = y.reshape(*y.shape[:2], size, -1), 2
    else:
        y = jnp.broadcast_to(y, (size, *y.shape))
    # All results are batched: vmap of a custom_vjp sums the cotangent of one that isn't once too often (JAX 0.11.2).
    many = rows[-1][1]
    gathered = [v.reshape(size, -1, *v.shape[1:]) if many else jnp.broadcast_to(v, (size, *v.shape)) for v in gathered]
    return [y, *gathered], [y_dim, *[0] * len(gathered)]


def _several(
    bind: Any, request: Request, args: Sequence[jax.Array], dims: Sequence[int | None], size: int
) -> tuple[list[Any], list[int]]:
    """Batches, leading in `args`, of several x join their own, as one of z does; batches of anything else are taken one
    by one."""
    arrays, batched = (_operands.split(request, each) for each in (args, [dim is not None for dim in dims]))
    others = (*batched.ws, *batched.biases, batched.scale)
    spread = lambda v, is_batched: v if is_batched else jnp.broadcast_to(v, (size, *v.shape))  # noqa: E731
    if any(others) or not any(batched.xs):
        results = lax.map(lambda each: bind(*each), (*map(spread, args, (dim is not None for dim in dims)),))
        return results, [0] * len(results)
    join = lambda v: v.reshape(-1, *v.shape[2:])  # noqa: E731
    xs = tuple(join(spread(*each)) for each in zip(arrays.xs, batched.xs, strict=True))
    z = join(arrays.z) if batched.z else arrays.z
    results = bind(*arrays._replace(xs=xs, z=z).flat())
    ys, gathered = results[: request.results], results[request.results :]
    ys = [v.reshape(size, -1, *v.shape[1:]) for v in ys]
    if arrays.z is not None and not batched.z:
        gathered = [jnp.broadcast_to(v, (size, *v.shape)) for v in gathered]
    else:
        gathered = [v.reshape(size, -1, *v.shape[1:]) for v in gathered]
    return [*ys, *gathered], [0] * len(results)
