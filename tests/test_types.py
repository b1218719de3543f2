"""dtypes: promotion as in jnp.matmul, results, accumulation, precision."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, fused, integers, mesh_of, normal, product, spread

import entwine_jax


def run(op, x, w, **options):
    return jax.jit(spread(lambda op, x, w, axis: fused(op, x, w, axis, **options), op, mesh_of((2,))))(x, w)


FUSED = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FUSED, ids=lambda d: jnp.dtype(d).name)
@pytest.mark.parametrize("preferred", [None, jnp.float32], ids=["own", "float32"])
def test_fused_types(op, dtype, preferred):
    x, w = integers((72, 40), 1, dtype), integers((40, 68), 2, dtype)
    y = run(op, x, w, preferred_element_type=preferred)
    assert y.dtype == (preferred or dtype)
    np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_promotion_as_in_matmul(op):
    """Every pair, whichever strategy it takes: the dtype of jnp.matmul."""
    names = ("float32", "bfloat16", "float16", "int8", "uint8", "int32", "complex64", "bool")
    for a, b in itertools.combinations_with_replacement(names, 2):
        if a == b == "bool":
            continue  # an error of its own
        x, w = jax.ShapeDtypeStruct((4, 6), a), jax.ShapeDtypeStruct((6, 4), b)
        f = spread(lambda op, x, w, axis: getattr(entwine_jax, op)(x, w, axis), op, mesh_of((2,)))
        assert jax.eval_shape(f, x, w).dtype == jax.eval_shape(jnp.matmul, x, w).dtype, (a, b)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["int8", "int32", "complex64"])
def test_other_types_take_xla_under_auto(op, dtype):
    x, w = integers((8, 6), 1, dtype), integers((6, 4), 2, dtype)
    y = run(op, x, w, strategy="auto")
    assert y.dtype == dtype
    np.testing.assert_array_equal(np.asarray(y).real, product(np.asarray(x).real, np.asarray(w).real))


@pytest.mark.parametrize("op", OPS)
def test_float64(op):
    with jax.enable_x64(True):
        x, w = normal((8, 6), 1, jnp.float64), normal((6, 4), 2, jnp.float64)
        y = run(op, x, w, strategy="auto")
        assert y.dtype == jnp.float64
        assert_close(y, product(x, w), 1e-14)
        # The fused ops themselves don't mind 64-bit mode.
        x, w = integers((8, 6), 1), integers((6, 4), 2)
        np.testing.assert_array_equal(np.asarray(run(op, x, w)), product(x, w))


def test_weak_types_and_strict_promotion():
    x, w = integers((8, 6), 1, jnp.bfloat16), integers((6, 4), 2)
    assert run("all_gather_matmul", x, w).dtype == jnp.float32
    weak = jnp.full((6, 4), 1.0)  # like a Python number, it takes the other operand's dtype
    assert run("all_gather_matmul", x, weak).dtype == jnp.matmul(x, weak).dtype
    with jax.numpy_dtype_promotion("strict"):
        y = run("all_gather_matmul", x, w.astype(jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        with pytest.raises(TypeError, match=r"all_gather_matmul: x is bfloat16 and w is float32.*strict.*cast"):
            run("all_gather_matmul", x, w)
    np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w))


def test_bfloat16_accumulates_in_float32():
    """Random bfloat16: close to the product of the same numbers, summed exactly and rounded once (or once a peer)."""
    x, w = normal((64, 512), 1, jnp.bfloat16), normal((512, 64), 2, jnp.bfloat16)
    for op in OPS:
        assert_close(run(op, x, w), product(x, w), 4e-3)
        assert_close(run(op, x, w, preferred_element_type=jnp.float32), product(x, w), 1e-6)


@pytest.mark.parametrize("precision", ["highest", jax.lax.Precision.HIGH, ("default", "highest")], ids=str)
def test_precision(precision):
    x, w = integers((8, 6), 1), integers((6, 4), 2)
    for op in OPS:
        for strategy in ("fused", "xla"):
            y = run(op, x, w, precision=precision, strategy=strategy)
            np.testing.assert_array_equal(np.asarray(y), product(x, w))
