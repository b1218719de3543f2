"""collective_matmul of float8 operands, in each of JAX's modes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, collectives, setup
from helpers import integers, product
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
OPTIONS = {"scales": (jnp.float32(0.5), jnp.float32(0.25)), "preferred_element_type": jnp.bfloat16}


def whole(s, x, w, **options):
    """A row-parallel product that every rank has."""
    if s.mode in ("manual", "partial"):
        options |= {"axis_name": "t", "out_sharding": P(None, None, None)}
    else:
        spec = P(s.data, None, None)
        options["out_sharding"] = spec if s.mode == "explicit" else NamedSharding(s.mesh, spec)
    return entwine_jax.collective_matmul(x, w, **{"strategy": "fused", **options})


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["fused", "xla"])
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_ops(mode, strategy, x_dtype):
    x, w = integers((8, 16, 24), 1, x_dtype), integers((24, 32), 2, E4M3)
    with setup(mode) as s:
        rows, up, down, columns = s.specs
        both = P(s.data, None, "t")
        cases = (
            (lambda x, w: s.up(x, w, strategy=strategy, **OPTIONS), (rows, up), columns, "all_gather_matmul"),
            (lambda x, w: s.down(x, w, strategy=strategy, **OPTIONS), (both, down), rows, "matmul_reduce_scatter"),
            (lambda x, w: whole(s, x, w, strategy=strategy, **OPTIONS), (both, down), P(s.data), "matmul_all_reduce"),
        )
        for f, specs, out, op in cases:
            f = jax.jit(s.spread(f, specs, out))
            args = s.place(x, w, specs=specs)
            y = f(*args)
            assert y.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)
            (matmul,) = entwine_jax.explain(f, *args)
            assert (matmul.op, matmul.strategy) == (op, strategy)
            assert (matmul.dtype, matmul.w_dtype) == (x_dtype, E4M3 if x_dtype == E5M2 else None)
            if strategy == "fused":
                assert "copy" in matmul.reason and matmul.arena_bytes > 0
                assert collectives(f.lower(*args).compile().as_text()) == {f"entwine_{op}": 1}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_plain_dot(mode):
    x, w = integers((8, 16, 24), 1, E5M2), integers((24, 32), 2, E4M3)
    with setup(mode) as s:
        args = s.place(x, w, specs=(P(s.data), P()))
        y = jax.jit(lambda x, w: entwine_jax.collective_matmul(x, w, **OPTIONS))(*args)
        np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)
    np.testing.assert_array_equal(
        np.asarray(entwine_jax.collective_matmul(x, w, **OPTIONS), np.float64), product(x, w) / 8
    )


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_vmap(mode):
    xs, ws = integers((2, 16, 24), 1, E4M3), integers((2, 24, 32), 2, E4M3)
    with setup(mode, "1x8") as s:
        f = lambda x, w: entwine_jax.collective_matmul(x, w, strategy="fused", **OPTIONS)  # noqa: E731
        for axes, (x, w) in (((0, None), (xs, ws[0])), ((None, 0), (xs[0], ws)), ((0, 0), (xs, ws))):
            specs = (P(*[None] * (x.ndim - 2), "t", None), P(*[None] * (w.ndim - 2), None, "t"))
            y = jax.jit(jax.vmap(f, axes))(*s.place(x, w, specs=specs))
            np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)


@pytest.mark.parametrize("mode", MODES)
def test_errors(mode):
    x, w = integers((8, 16, 24), 1, E4M3), integers((24, 32), 2, E4M3)
    with setup(mode) as s:
        args = s.place(x, w, specs=s.specs[:2])

        def f(x, w, **options):
            return s.spread(lambda x, w: s.up(x, w, **{**OPTIONS, **options}), s.specs[:2], s.specs[3])(x, w)

        with pytest.raises(TypeError, match=r"the gradient of a float8 array would be float8.*float8_all_gather"):
            jax.eval_shape(jax.grad(lambda x, w: f(x, w).astype(jnp.float32).sum()), *args)
        with pytest.raises(TypeError, match=r"collective_matmul: x is float8_e4m3fn.*need scales=\(x_scale, w_scale\)"):
            jax.eval_shape(lambda x, w: f(x, w, scales=None), *args)
        with pytest.raises(TypeError, match="collective_matmul: preferred_element_type=None"):
            jax.eval_shape(lambda x, w: f(x, w, preferred_element_type=None), *args)
        with pytest.raises(TypeError, match="collective_matmul: scales are for float8 operands"):
            jax.eval_shape(lambda x, w: f(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), *args)
