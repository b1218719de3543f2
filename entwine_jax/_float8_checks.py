"""Errors of the user about float8 operands and their scales; as in `_checks`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from . import _checks

# Of x and w, where they are float8.
Scales = tuple[ArrayLike, ArrayLike]

FLOAT8 = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_FLOAT8_RESULTS = (jnp.bfloat16, jnp.float32)


def scales(op: str, x: jax.Array, w: jax.Array, given: Any) -> tuple[jax.Array, jax.Array] | None:
    """x's and w's, where they are float8; None where they aren't."""
    if x.dtype not in FLOAT8 and w.dtype not in FLOAT8:
        if given is not None:
            raise TypeError(
                f"entwine_jax.{op}: scales are for float8 operands, but x is {x.dtype} and w is {w.dtype}; leave "
                "scales out, or quantise both: x / x_scale to float8_e4m3fn, w / w_scale likewise"
            )
        return None
    if x.dtype not in FLOAT8 or w.dtype != jnp.float8_e4m3fn:
        raise TypeError(
            f"entwine_jax.{op}: x is {x.dtype} and w is {w.dtype}, but where one is float8, x must be float8_e4m3fn or "
            "float8_e5m2 and w float8_e4m3fn; quantise the other one to that"
        )
    if given is None:
        raise TypeError(
            f"entwine_jax.{op}: x is {x.dtype} and w is {w.dtype}, which need scales=(x_scale, w_scale), float32 "
            "scalars that x and w are multiplied by; scales=(jnp.float32(1), jnp.float32(1)) takes them as they are"
        )
    return pair(op, given)


def float8_residuals(op: str, saves: bool) -> None:
    """Of a product of float8 operands."""
    if saves:
        raise ValueError(
            f"entwine_jax.{op}: residuals='save' is for the weight gradient, which float8 operands don't have; leave "
            "residuals out"
        )


def float8_rows(op: str, transpose_x: bool) -> None:
    """Of a float8 x."""
    if transpose_x:
        raise NotImplementedError(
            f"entwine_jax.{op}: transpose_x=True of a float8 x, which the tensor cores take only if it is contiguous "
            "in the contraction; pass it as (..., m, k), or cast it to bfloat16"
        )


def pair(op: str, given: Any) -> tuple[jax.Array, jax.Array]:
    """The scales of x and w."""
    if not isinstance(given, tuple | list) or len(given) != 2:
        raise TypeError(f"entwine_jax.{op}: scales={given!r} must be a pair, (x_scale, w_scale)")
    for i, value in enumerate(given):
        if not isinstance(value, jax.Array | np.ndarray | np.float32):
            raise TypeError(
                f"entwine_jax.{op}: scales[{i}] must be a float32 array of shape (), not {type(value).__name__}; "
                "wrap it in jnp.float32(...)"
            )
        if value.dtype != jnp.float32:
            raise TypeError(f"entwine_jax.{op}: scales[{i}] is {value.dtype} but must be float32; cast it")
        if value.shape != ():
            raise TypeError(
                f"entwine_jax.{op}: scales[{i}] has shape {value.shape} but must be one number for the whole array, of "
                "shape (); reshape it, or quantise by one scale"
            )
    return jnp.asarray(given[0]), jnp.asarray(given[1])


def one_dtype(op: str, dtypes: list[Any]) -> None:
    """Of the float8 x of products that are added."""
    if len({*dtypes}) > 1:
        raise TypeError(
            f"entwine_jax.{op}: x are of {', '.join(map(str, dtypes))}, but those of products that are added must have "
            "one dtype; quantise all to float8_e4m3fn or all to float8_e5m2"
        )


def float8_types(op: str, preferred: Any, precision: Any, operands: str) -> np.dtype[Any]:
    """The result's dtype, which must be named for float8 operands."""
    if preferred is None or jnp.dtype(preferred) not in _FLOAT8_RESULTS:
        raise TypeError(
            f"entwine_jax.{op}: preferred_element_type={preferred!r}, but the product of {operands} must be bfloat16 "
            "or float32; pass preferred_element_type=jnp.bfloat16 or jnp.float32"
        )
    return _checks.result_type(op, jnp.dtype(jnp.float8_e4m3fn), preferred, precision)


def quantised_types(op: str, x: jax.Array, w: jax.Array, preferred: Any, precision: Any) -> np.dtype[Any]:
    """The result's dtype where x and w will be quantised."""
    for name, value in (("x", x), ("w", w)):
        if value.dtype in FLOAT8:
            raise TypeError(
                f"entwine_jax.{op}: {name} is {value.dtype} already; use entwine_jax.{op.removeprefix('float8_')} with "
                "scales="
            )
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise TypeError(f"entwine_jax.{op}: {name} is {value.dtype} but must be floating to be quantised; cast it")
    if preferred is None and x.dtype == w.dtype and x.dtype in _FLOAT8_RESULTS:
        preferred = x.dtype
    return float8_types(op, preferred, precision, f"x {x.dtype} and w {w.dtype} in float8")


def common_scale(op: str, scale: jax.Array, names: tuple[str, ...]) -> None:
    """That the scale of what is gathered is the same on all ranks, as far as types tell."""
    varying = jax.typeof(scale).manual_axis_type.varying & {*names}
    if varying:
        axis = _checks.axis(names)
        raise ValueError(
            f"entwine_jax.{op}: scales[0] varies over axis {axis}, over which x is gathered, but all of x must have "
            f"one scale; quantise x by jax.lax.pmax(x_scale, {axis})"
        )


def several_scales(op: str, given: Any, weights: int) -> list[Any]:
    """scales=(x_scale, (w_scale, ...)) as a pair for each weight, not yet looked at; w_scale may be one for all."""
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], tuple | list):
        return [given] * weights
    if len(given[1]) != weights:
        raise ValueError(
            f"entwine_jax.{op}: w holds {weights} weights, but scales[1] {len(given[1])} scales; pass one for each, "
            f"scales=(x_scale, ({', '.join(['w_scale'] * weights)})), or one for all"
        )
    return [(given[0], each) for each in given[1]]


def sum_scales(op: str, given: Any) -> None:
    """Of a sum of products, which has one pair."""
    if isinstance(given, tuple | list) and any(isinstance(each, tuple | list) for each in given):
        raise NotImplementedError(
            f"entwine_jax.{op}: scales={given!r} holds scales for each of several products, but these are added before "
            "they are scaled, so that they have one pair, (x_scale, w_scale); quantise all x by one scale and all w by "
            "one, the larger of theirs, or add the results of a call for each"
        )
