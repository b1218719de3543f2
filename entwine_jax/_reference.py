"""What the ops are made of in lax: for strategy "xla", and for the weight gradients."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

# What policies of jax.checkpoint know the gathered x by.
GATHERED = "entwine_gathered"

AxisNames = tuple[str, ...]


def matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    transpose_w: bool,
    dtype: Any,
    precision: Any,
    scale: jax.Array | None = None,
    transpose_x: bool = False,
) -> jax.Array:
    """x (batch, rows, k), or (batch, k, rows) transposed, times w (k, n), or (n, k) transposed; times `scale`, in
    float32, if they are float8."""
    contracted = (((1 if transpose_x else 2,), (1 if transpose_w else 0,)), ((), ()))
    if scale is None:
        return lax.dot_general(x, w, contracted, precision=precision, preferred_element_type=dtype)
    y = lax.dot_general(x, w, contracted, precision=precision, preferred_element_type=jnp.float32)
    return (y * scale).astype(dtype)


def scatter(partial: jax.Array, axis_name: AxisNames) -> jax.Array:
    """The rank's rows of the sum over ranks; the gradient of what `gather` gathers, too."""
    if partial.size == 0:
        return partial.reshape(partial.shape[0], partial.shape[1] // lax.axis_size(axis_name), partial.shape[2])
    scattered: jax.Array = lax.psum_scatter(partial, axis_name, scatter_dimension=1, tiled=True)
    return scattered


def finish(y: jax.Array, bias: jax.Array | None, activation: str | None) -> jax.Array:
    """activation(y + bias), in float32 at least, rounded to y's dtype once."""
    if bias is None and activation is None:
        return y
    wide = jnp.promote_types(y.dtype, jnp.float32) if jnp.issubdtype(y.dtype, jnp.floating) else y.dtype
    made = y.astype(wide)
    if bias is not None:
        made = made + bias.astype(wide)
    return activate(made, activation).astype(y.dtype)


def gate(
    ys: Sequence[jax.Array], activation: str | None, biases: Sequence[jax.Array | None] = (None, None)
) -> jax.Array:
    """activation(gate + bias) * (up + bias) of the two ys, in float32 at least, rounded to their dtype once."""
    dtype = ys[0].dtype
    wide = jnp.promote_types(dtype, jnp.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
    gate, up = (y.astype(wide) for y in ys)
    return (finish(gate, biases[0], activation) * finish(up, biases[1], None)).astype(dtype)


def activate(x: jax.Array, activation: str | None) -> jax.Array:
    made: jax.Array
    if activation is None:
        return x
    if activation == "relu":
        made = jax.nn.relu(x)
    elif activation == "silu":
        made = jax.nn.silu(x)
    elif activation == "gelu_tanh":
        made = jax.nn.gelu(x, approximate=True)
    else:
        made = 0.5 * x * _erfc(-x * np.sqrt(0.5).astype(x.dtype))
    return made


@jax.custom_jvp
def _erfc(x: jax.Array) -> jax.Array:
    """lax.erfc, whose own derivative JAX 0.12.0 can't take inside a shard_map that checks types."""
    return lax.erfc(x)


@_erfc.defjvp
def _erfc_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    (x,), (dx,) = primals, tangents
    return _erfc(x), dx * np.asarray(-2 / np.sqrt(np.pi), x.dtype) * jnp.exp(-x * x)


def pull_back(dy: jax.Array, kept: jax.Array, activation: str) -> jax.Array:
    """The cotangent of x from that of y = activate(x), whose type it has; `kept` is x, or of relu y itself."""
    if activation == "relu":
        return lax.select(kept > 0, dy, jnp.zeros_like(dy))
    wide = jnp.promote_types(kept.dtype, jnp.float32)
    dx: jax.Array
    (dx,) = jax.vjp(functools.partial(activate, activation=activation), kept.astype(wide))[1](dy.astype(wide))
    return dx.astype(dy.dtype)


def bias_gradient(dy: jax.Array, dtype: Any) -> jax.Array:
    """Of a bias that is added to every row."""
    wide = jnp.promote_types(dy.dtype, jnp.float32)
    summed: jax.Array = jnp.sum(dy.astype(wide), axis=tuple(range(dy.ndim - 1)))
    return summed.astype(dtype)


def named(gathered: jax.Array) -> jax.Array:
    """So that policies of jax.checkpoint know it."""
    known: jax.Array = checkpoint_name(gathered, GATHERED)
    return known


def gather(x: jax.Array, axis_name: AxisNames) -> jax.Array:
    """The team's rows; XLA's own collectives refuse empty arrays."""
    if x.size == 0:
        return x.reshape(x.shape[0], x.shape[1] * lax.axis_size(axis_name), x.shape[2])
    gathered: jax.Array = lax.all_gather(x, axis_name, axis=1, tiled=True)
    return gathered


def weight_gradient(x: jax.Array, g: jax.Array, *, precision: Any, transpose_x: bool = False) -> jax.Array:
    """dw (k, n) of y = x @ w from all rows of x, or of x stored (..., k, rows), and of y's cotangent; in their dtype,
    as JAX's own dot."""
    rows = tuple(range(g.ndim - 1))
    of_x = (*rows[:-1], x.ndim - 1) if transpose_x else rows
    dtype = jnp.promote_types(x.dtype, g.dtype)
    return lax.dot_general(
        x.astype(dtype), g.astype(dtype), ((of_x, rows), ((), ())), precision=precision, preferred_element_type=dtype
    )
