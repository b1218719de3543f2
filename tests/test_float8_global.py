"""collective_matmul of float8 operands, in each of JAX's modes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, collectives, setup
from helpers import assert_close, integers, normal, product
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
            compiled = f.lower(*args).compile()
            y = compiled(*args)
            assert y.dtype == jnp.bfloat16
            np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)
            (matmul,) = entwine_jax.explain(f, *args)
            assert (matmul.op, matmul.strategy) == (op, strategy)
            assert (matmul.dtype, matmul.w_dtype) == (x_dtype, E4M3 if x_dtype == E5M2 else None)
            if strategy == "fused":
                assert "copy" in matmul.reason and matmul.arena_bytes > 0
                assert collectives(compiled.as_text()) == {f"entwine_{op}": 1}


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("strategy", ["fused", "xla"])
def test_epilogues(mode, strategy):
    """In the kernel too, and w as it lies: there is no copy of it. The result is rounded to bfloat16 once."""
    x, w = integers((8, 16, 24), 1, E4M3), integers((24, 32), 2, E4M3)
    bias = normal((32,), 3)
    with setup(mode) as s:
        rows, up, down, columns = s.specs
        both, all_columns = P(s.data, None, "t"), P(None)
        cases = (
            (s.up, (rows, up, P("t")), columns, "all_gather_matmul"),
            (s.down, (both, down, all_columns), rows, "matmul_reduce_scatter"),
            (functools.partial(whole, s), (both, down, all_columns), P(s.data), "matmul_all_reduce"),
        )
        epilogues = ((True, True, "relu"), (True, False, None), (False, True, None))[: 3 if strategy == "fused" else 1]
        for (made, specs, out, op), (transpose_w, biased, activation) in itertools.product(cases, epilogues):
            options = OPTIONS | {"strategy": strategy, "transpose_w": transpose_w, "activation": activation}

            def rank(x, w, *bias, made=made, options=options):
                return made(x, w, bias=next(iter(bias), None), **options)

            specs_ = [specs[0], P(*specs[1][::-1]) if transpose_w else specs[1], specs[2]][: 2 + biased]
            f = jax.jit(s.spread(rank, (*specs_,), out))
            args = s.place(*(x, w.T if transpose_w else w, bias)[: 2 + biased], specs=specs_)
            compiled = f.lower(*args).compile()
            y = compiled(*args)
            assert y.dtype == jnp.bfloat16
            wanted = np.asarray(product(x, w) / 8, np.float32) + (np.asarray(bias) if biased else 0)
            wanted = np.asarray(np.maximum(wanted, 0) if activation else wanted)
            if strategy == "fused":
                wanted = wanted.astype(jnp.bfloat16).astype(np.float32)
            assert_close(y, wanted, 0 if strategy == "fused" else 1e-2)
            (matmul,) = entwine_jax.explain(f, *args)
            assert (matmul.op, matmul.strategy, matmul.transpose_w) == (op, strategy, transpose_w)
            if strategy == "fused":
                assert (matmul.bias, matmul.activation) == (biased, activation)
                assert ("copy" in matmul.reason) != transpose_w
                assert collectives(compiled.as_text()) == {f"entwine_{op}": 1}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_plain_dot(mode):
    x, w = integers((8, 16, 24), 1, E5M2), integers((24, 32), 2, E4M3)
    with setup(mode) as s:
        args = s.place(x, w, specs=(P(s.data), P()))
        y = jax.jit(lambda x, w: entwine_jax.collective_matmul(x, w, **OPTIONS))(*args)
        np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)
        args = s.place(x, w.T, integers((32,), 3), specs=(P(s.data), P(), P()))
        y = jax.jit(
            lambda x, w, b: entwine_jax.collective_matmul(x, w, bias=b, activation="relu", transpose_w=True, **OPTIONS)
        )(*args)
        wanted = np.maximum(product(x, w) / 8 + np.asarray(args[2]), 0)
        np.testing.assert_array_equal(np.asarray(y, np.float64), wanted)
    np.testing.assert_array_equal(
        np.asarray(entwine_jax.collective_matmul(x, w, **OPTIONS), np.float64), product(x, w) / 8
    )


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_vmap(mode):
    """Over any of x, w, scales and bias."""
    many = {
        "x": integers((2, 16, 24), 1, E4M3),
        "w": integers((2, 24, 32), 2, E4M3),
        "scales": jnp.float32([[0.5, 0.25], [1, 0.5]]),
        "bias": integers((2, 32), 3),
    }
    with setup(mode, "1x8") as s:

        def f(x, w, scales, bias):
            options = OPTIONS | {"scales": (scales[0], scales[1]), "strategy": "fused"}
            return entwine_jax.collective_matmul(x, w, bias=bias, activation="relu", **options)

        for batched in (["x"], ["w"], ["scales"], ["bias"], ["x", "bias"], [*many]):
            given = [v if name in batched else v[0] for name, v in many.items()]
            specs = P("t", None), P(None, "t"), P(None), P("t")
            specs = [P(None, *p) if name in batched else p for name, p in zip(many, specs, strict=True)]
            y = jax.jit(jax.vmap(f, [0 if name in batched else None for name in many]))(*s.place(*given, specs=specs))
            x, w, scales, bias = (v if name in batched else np.stack([v[0]] * 2) for name, v in many.items())
            sums = product(x, w) * np.prod(np.asarray(scales), 1)[:, None, None] + np.asarray(bias)[:, None]
            np.testing.assert_array_equal(np.asarray(y, np.float64), np.maximum(sums, 0))


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
        with pytest.raises(
            ValueError, match="collective_matmul: residuals='save' is for the weight gradient, which fl"
        ):
            jax.eval_shape(lambda x, w: f(x, w, residuals="save"), *args)
        with pytest.raises(TypeError, match=r"collective_matmul: bias has shape \(5,\)"):
            jax.eval_shape(lambda x, w: f(x, w, bias=jnp.ones(5)), *args)
        with pytest.raises(TypeError, match="collective_matmul: preferred_element_type=None"):
            jax.eval_shape(lambda x, w: f(x, w, preferred_element_type=None), *args)
        with pytest.raises(TypeError, match="collective_matmul: scales are for float8 operands"):
            jax.eval_shape(lambda x, w: f(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), *args)
