"""The primitive under vmap."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive

from ._strategy import Request


def batch(
    primitive: Primitive, args: Sequence[jax.Array], dims: Sequence[int | None], **params: Any
) -> tuple[list[Any], list[int]]:
    """A batch of x joins x's own, and one of z z's; a batch of w joins its columns; batches of both x and w, or of
    scales, are taken one by one."""
    size = next(v.shape[dim] for v, dim in zip(args, dims, strict=True) if dim is not None)
    x, w, *z = (v if dim is None else jnp.moveaxis(v, dim, 0) for v, dim in zip(args, dims, strict=True))
    bind = functools.partial(primitive.bind, **params)
    x_batched, w_batched, *z_batched = (dim is not None for dim in dims)
    request: Request = params["request"]
    if (x_batched and w_batched) or (request.scaled and z_batched[0]):
        all_batched = (
            v if dim is not None else jnp.broadcast_to(v, (size, *v.shape))
            for v, dim in zip((x, w, *z), dims, strict=True)
        )
        results = lax.map(lambda operands: bind(*operands), (*all_batched,))
        return results, [0] * len(results)
    scale = [z.pop(0)] if request.scaled else []
    z_batched = z_batched[len(scale) :]
    columns = 0 if request.transpose_w else 1
    if w_batched:
        w = lax.collapse(jnp.moveaxis(w, 0, columns), columns, columns + 2)
    rows = ((x, x_batched), *zip(z, z_batched, strict=True))
    x, *z = (v.reshape(-1, *v.shape[2:]) if batched else v for v, batched in rows)
    y, *gathered = bind(x, w, *scale, *z)
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
