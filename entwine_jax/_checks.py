"""Errors of the user: operands, types, shapes and meshes. Each names the op, the argument, the values and the fix."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def arrays(op: str, x: Any, w: Any) -> tuple[jax.Array, jax.Array]:
    for name, value in (("x", x), ("w", w)):
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"entwine_jax.{op}: {name} must be a JAX or NumPy array, not {type(value).__name__}")
    return jnp.asarray(x), jnp.asarray(w)


def shapes(op: str, x: tuple[int, ...], w: tuple[int, ...], team: int, axis_name: tuple[str, ...]) -> None:
    """x (..., rows, k), w (k, n); the rows that reduce-scatter divides must be a multiple of the team's size."""
    if len(x) < 2:
        raise TypeError(
            f"entwine_jax.{op}: x has shape {x} but needs rows and a contraction, (..., rows, k); add a dimension"
        )
    if len(w) != 2:
        raise TypeError(
            f"entwine_jax.{op}: w has shape {w} but must be a matrix (k, n); use jax.vmap for a batch of them"
        )
    if x[-1] != w[0]:
        hint = "; w's transpose would fit" if x[-1] == w[1] else ""
        raise TypeError(
            f"entwine_jax.{op}: the last dimension of x {x} has size {x[-1]} but the first of w {w} has size {w[0]}; "
            f"they are contracted and must be equal{hint}"
        )
    if op == "matmul_reduce_scatter" and x[-2] % team:
        raise ValueError(
            f"entwine_jax.{op}: x {x} has {x[-2]} rows, which the {team} ranks of axis {axis(axis_name)} can't share "
            f"evenly; pad the rows to {math.ceil(x[-2] / team) * team}"
        )


def types(op: str, x: Any, w: Any, preferred: Any, precision: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The operands' common dtype and the result's, by the rules of jnp.matmul."""
    try:
        operand = jnp.result_type(x, w)
    except ValueError as error:  # jax.dtypes.TypePromotionError
        raise TypeError(
            f"entwine_jax.{op}: x is {x.dtype} and w is {w.dtype}, which don't promote under "
            f"jax_numpy_dtype_promotion={jax.config.jax_numpy_dtype_promotion!r}; cast one of them"
        ) from error
    if operand == jnp.bool_:
        raise TypeError(
            f"entwine_jax.{op}: x and w are both bool, which can't be summed; cast one of them to a number type"
        )
    # jnp.matmul itself judges precision and preferred_element_type.
    one = jax.ShapeDtypeStruct((1, 1), operand)
    matmul = lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=preferred)  # noqa: E731
    try:
        return operand, jax.eval_shape(matmul, one, one).dtype
    except (TypeError, ValueError, KeyError) as error:
        raise type(error)(
            f"entwine_jax.{op}: preferred_element_type={preferred!r} and precision={precision!r} "
            f"don't suit operands of {operand}: {error}"
        ) from error


def axis(names: tuple[str, ...]) -> str:
    """An axis name as the user wrote it."""
    return repr(names[0] if len(names) == 1 else names)
