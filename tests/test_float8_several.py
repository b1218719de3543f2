"""Several float8 products in one call: of one x and several w with a scale each, and sums with one pair of scales."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, integers, mesh_of, product, specs
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
AG, RS, AR = OPS
STRATEGIES = ("fused", "xla")
X_SCALE, W_SCALES = jnp.float32(0.5), jnp.float32([0.25, 2, 1, 0.125])
TILES = Config(tile_m=8, tile_n=16)


def multiply(x, ws, axis="t", scales=None, **options):
    given = (X_SCALE, tuple(W_SCALES[: len(ws)])) if scales is None else scales
    options = {"strategy": "fused", "config": TILES, "preferred_element_type": jnp.float32, **options}
    return entwine_jax.all_gather_matmul(x, ws, axis, scales=given, **options)


def spread(rank, count, ranks=2, leading=(), transposed=False, check_vma=True):
    """`rank(x, ws)` of global x and w, count of them."""
    x, w, y = specs(AG, "t", leading)
    w = P(*w[::-1]) if transposed else w
    mesh = mesh_of((ranks,))
    return jax.shard_map(rank, mesh=mesh, in_specs=(x, (w,) * count), out_specs=(y,) * count, check_vma=check_vma)


def operands(widths, ranks=2, rows=13, k=12, batch=(), x_dtype=E4M3):
    x = integers((*batch, rows * ranks, k), 1, x_dtype)
    return x, tuple(integers((k, n * ranks), 2 + i, E4M3) for i, n in enumerate(widths))


def wanted(x, ws):
    return [product(x, w) * float(X_SCALE * s) for w, s in zip(ws, W_SCALES, strict=False)]


def equal(ys, want):
    for y, right in zip(ys, want, strict=True):
        np.testing.assert_array_equal(np.asarray(y, np.float64), right)


CONFIGS = TILES, Config(tile_m=4, tile_n=8, workers=3, stall_us=60, pushers=2), Config(tile_m=32, tile_n=32, workers=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_has_its_scale(ranks):
    """Widths below, at and above a tile's; two to four; either type of x and layout of w."""
    for config, widths in zip(CONFIGS, ((5, 40), (33, 1, 16), (16, 16, 7, 24)), strict=True):
        transposed = len(widths) != 3
        x, ws = operands(widths, ranks, batch=(2,), x_dtype=E5M2 if transposed else E4M3)
        given = tuple(w.T for w in ws) if transposed else ws
        rank = functools.partial(multiply, config=config, transpose_w=transposed)
        f = spread(rank, len(ws), ranks, (None,), transposed, check_vma=transposed)
        equal(jax.jit(f)(x, given), wanted(x, ws))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_epilogues_and_the_gathered_x(strategy):
    x, ws = operands((10, 3, 8), rows=8, k=6)
    bias = integers((16,), 7)

    def rank(x, ws, bias):
        return multiply(
            x,
            ws,
            bias=(None, None, bias),
            activation=("relu", None, "relu"),
            return_gathered=True,
            strategy=strategy,
            preferred_element_type=jnp.bfloat16,
        )

    columns = P(None, "t")
    mesh, in_specs, out_specs = mesh_of((2,)), (P("t"), columns, P("t")), (columns, P(None))
    run = jax.shard_map(rank, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    ys, rows = jax.jit(run)(x, ws, bias)
    right = wanted(x, ws)
    for y, want in zip(ys, (right[0].clip(0), right[1], (right[2] + np.asarray(bias)).clip(0)), strict=True):
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.asarray(want, jnp.bfloat16).astype(np.float32))
    assert rows.dtype == E4M3
    np.testing.assert_array_equal(np.asarray(rows, np.float32), np.asarray(x, np.float32))


def test_more_than_a_kernel_takes_and_one_scale_for_all():
    x, ws = operands((4,) * 6)
    scales = tuple(jnp.float32(2.0**-i) for i in range(6))
    ys = jax.jit(spread(functools.partial(multiply, scales=(X_SCALE, scales)), 6))(x, ws)
    equal(ys, [product(x, w) * 2.0 ** -(i + 1) for i, w in enumerate(ws)])
    f = spread(functools.partial(multiply, scales=(X_SCALE, jnp.float32(4))), 6)
    equal(jax.jit(f)(x, ws), [product(x, w) * 2 for w in ws])
    assert [matmul.products for matmul in entwine_jax.explain(f, x, ws)].count(()) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("batched", ["x", "w", "scales", "x w"])
def test_vmap(strategy, batched, many=2):
    x, ws = operands((5, 12), rows=4, k=8)
    xs = jnp.stack([x, -x]) if "x" in batched.split() else x
    many_ws = tuple(jnp.stack([w, w[::-1]]) for w in ws) if "w" in batched.split() else ws
    scales = jnp.stack([W_SCALES, W_SCALES * 2]) if batched == "scales" else W_SCALES
    dims = [0 if name in batched.split() else None for name in ("x", "w", "scales")]

    def rank(x, ws, scales):
        call = lambda x, ws, s: multiply(x, ws, scales=(X_SCALE, (s[0], s[1])), strategy=strategy)  # noqa: E731
        return jax.vmap(call, dims)(x, ws, scales)

    x_spec, w_spec, y_spec = specs(AG)
    lead = lambda spec, dim: spec if dim is None else P(None, *spec)  # noqa: E731
    in_specs = (lead(x_spec, dims[0]), (lead(w_spec, dims[1]),) * 2, P())
    f = jax.shard_map(rank, mesh=mesh_of((2,)), in_specs=in_specs, out_specs=(P(None, *y_spec),) * 2)
    ys = jax.jit(f)(xs, many_ws, scales)
    for i, p in itertools.product(range(many), range(2)):
        one_x, one_w = xs[i] if dims[0] == 0 else xs, many_ws[p][i] if dims[1] == 0 else many_ws[p]
        scale = float(scales[i][p] if dims[2] == 0 else scales[p]) * float(X_SCALE)
        np.testing.assert_array_equal(np.asarray(ys[p][i]), product(one_x, one_w) * scale)


def test_signal_takes_no_float8():
    x, ws = operands((5, 40))
    with pytest.raises(NotImplementedError, match="strategy='signal' can't run x float8"):
        jax.eval_shape(spread(functools.partial(multiply, strategy="signal"), 2), x, ws)


def test_explain_tells_of_one_call():
    x, ws = operands((5, 40))
    (matmul,) = entwine_jax.explain(spread(multiply, 2), x, ws)
    assert (matmul.op, matmul.dtype, len(matmul.products)) == (AG, E4M3, 2)
    assert f"a copy of {12 * 45} bytes" in matmul.reason


@pytest.mark.parametrize("op", [RS, AR])
def test_sums_have_one_pair(op):
    x, w = integers((16, 8), 1, E4M3), integers((8, 12), 2, E4M3)
    x_spec, w_spec, y_spec = specs(op)

    def run(scales, strategy="fused"):
        call = functools.partial(
            getattr(entwine_jax, op), axis_name="t", strategy=strategy, preferred_element_type=jnp.float32
        )
        mesh, in_specs = mesh_of((2,)), (x_spec, w_spec)
        f = lambda x, w: call((x, x[:, :2]), (w, w[:2]), scales=scales)  # noqa: E731
        return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=y_spec)

    total = product(x, w) + sum(product(x[:, i : i + 2], w[i : i + 2]) for i in (0, 4))
    for strategy in STRATEGIES:
        y = jax.jit(run((X_SCALE, W_SCALES[0]), strategy))(x, w)
        np.testing.assert_array_equal(np.asarray(y), total / 8)
    for wrong in ((X_SCALE, (W_SCALES[0], W_SCALES[1])), ((X_SCALE, W_SCALES[0]), (X_SCALE, W_SCALES[1]))):
        with pytest.raises(
            NotImplementedError, match=f"{op}: scales=.*each of several products.*quantise all x by one"
        ):
            jax.eval_shape(run(wrong), x, w)


def test_errors():
    x, ws = operands((5, 40))
    one = jnp.float32(1)

    def fails(error, message, x=x, ws=ws, **options):
        with pytest.raises(error, match=f"entwine_jax.all_gather_matmul: {message}"):
            jax.eval_shape(spread(functools.partial(multiply, **options), 2), x, ws)

    fails(ValueError, r"w holds 2 weights, but scales\[1\] 3 scales; pass one for each", scales=(one, (one,) * 3))
    fails(TypeError, r"scales\[1\] must be a float32 array of shape \(\), not float", scales=(one, (one, 1.0)))
    fails(TypeError, r"scales=.* must be a pair, \(x_scale, w_scale\)", scales=(one, one, one))
    wide = tuple(w.astype(jnp.bfloat16) for w in ws)
    fails(TypeError, "scales are for float8 operands, but x is bfloat16", x=x.astype(jnp.bfloat16), ws=wide)
    fails(TypeError, "x is float8_e4m3fn and w is bfloat16, but", ws=(ws[0], wide[1]))
    fails(ValueError, "residuals='save' is for the weight gradient", residuals="save")
    fails(TypeError, "preferred_element_type=None.*must be bfloat16 or float32", preferred_element_type=None)
    with pytest.raises(ValueError, match=r"scales\[0\] varies over axis 't'"):
        varying = lambda x, ws: multiply(x, ws, scales=(one + lax.axis_index("t"), (one, one)))  # noqa: E731
        jax.eval_shape(spread(varying, 2), x, ws)
    for strategy in STRATEGIES:
        f = spread(functools.partial(multiply, strategy=strategy), 2)
        with pytest.raises(TypeError, match="all_gather_matmul: the gradient of a float8 array"):
            jax.eval_shape(jax.grad(lambda x, f=f: f(x, ws)[0].sum()), x)
