"""float8 operands with scales: values, types, errors; and ops that quantise, with their gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, integers, mesh_of, normal, product, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
X_SCALE, W_SCALE = jnp.float32(0.5), jnp.float32(0.25)
SCALES = X_SCALE, W_SCALE
AG, RS, AR = OPS
STRATEGIES = ("fused", "xla")


def scaled(op, x, w, axis, scales=SCALES, **options):
    options = {"strategy": "fused", "preferred_element_type": jnp.float32, **options}
    return getattr(entwine_jax, op)(x, w, axis, scales=scales, **options)


def run(op, x, w, ranks=2, leading=(), **options):
    return jax.jit(spread(functools.partial(scaled, **options), op, mesh_of((ranks,)), leading=leading))(x, w)


def operands(rows=72, k=40, n=68, x_dtype=E4M3, leading=()):
    return integers((*leading, rows, k), 1, x_dtype), integers((k, n), 2, E4M3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_exact(op, x_dtype, strategy, dtype):
    for ranks, shape in ((1, (9, 8, 7)), (2, (72, 40, 68)), (3, (99, 24, 36)), (8, (8, 8, 8))):
        x, w = operands(*shape, x_dtype)
        y = run(op, x, w, ranks, strategy=strategy, preferred_element_type=dtype)
        assert y.dtype == dtype
        np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)


@pytest.mark.parametrize("op", OPS)
def test_every_number(op):
    """All finite bit patterns, times one: the executor reads float8 as ml_dtypes does."""
    for dtype in (E4M3, E5M2):
        bits = np.arange(256, dtype=np.uint8).view(dtype)
        x = jnp.asarray(np.where(np.isfinite(bits.astype(np.float32)), bits, np.zeros_like(bits)).reshape(64, 4))
        y = run(op, x, jnp.eye(4, dtype=E4M3), scales=(jnp.float32(1), jnp.float32(1)))
        np.testing.assert_array_equal(np.asarray(y), np.asarray(x, np.float32))
    w = jnp.asarray(np.arange(0x7F, dtype=np.uint8)[None, :].repeat(4, 0)[:, :124].view(E4M3))
    y = run(op, jnp.eye(4, dtype=E5M2), w, scales=(jnp.float32(1), jnp.float32(1)))
    np.testing.assert_array_equal(np.asarray(y), np.asarray(w, np.float32))


@pytest.mark.parametrize("op", OPS)
def test_special_numbers(op):
    x = jnp.zeros((8, 4), E4M3).at[3, 1].set(jnp.nan)
    y = np.asarray(run(op, x, jnp.ones((4, 4), E4M3)))
    assert np.isnan(y[3]).all() and not np.isnan(np.delete(y, 3, 0)).any()
    x = jnp.zeros((8, 4), E5M2).at[3, 1].set(jnp.inf)
    y = np.asarray(run(op, x, jnp.ones((4, 4), E4M3)))
    assert np.isposinf(y[3]).all() and (np.delete(y, 3, 0) == 0).all()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_stalls(op, transport):
    """The scale is applied once, whoever is late; one worker a rank and three."""
    for seed in range(3):
        config = Config(workers=1 + seed, transport=transport, stall_us=200, stall_seed=seed, tile_m=16, tile_n=16)
        x, w = operands(160, 24, 72)
        y = run(op, x, w, 4, config=config, preferred_element_type=jnp.bfloat16)
        np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w) / 8)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batches_and_vmap(op, strategy):
    x, w = operands(24, 16, 20, leading=(2, 3))
    y = run(op, x, w, strategy=strategy, leading=(None, None))
    np.testing.assert_array_equal(np.asarray(y), product(x, w) / 8)
    mesh = mesh_of((2,))
    f = spread(functools.partial(scaled, strategy=strategy), op, mesh, leading=(None,))
    ws, xs = jnp.stack([w, -w]), x
    np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(f, (0, None)))(xs, w)), product(x, w) / 8)
    np.testing.assert_array_equal(
        np.asarray(jax.jit(jax.vmap(f, (None, 0)))(x[0], ws)), np.stack([product(x[0], v) / 8 for v in ws])
    )
    np.testing.assert_array_equal(
        np.asarray(jax.jit(jax.vmap(f))(xs, ws)), np.stack([product(x[i], ws[i]) / 8 for i in range(2)])
    )


def test_a_batch_of_scales():
    x, w = operands(24, 16, 20)

    def one(scale):
        x_spec, w_spec, y_spec = P("t", None), P(None, "t"), P(None, "t")
        return jax.shard_map(
            lambda x, w, s: scaled(AG, x, w, "t", scales=(s, W_SCALE)),
            mesh=mesh_of((2,)),
            in_specs=(x_spec, w_spec, P()),
            out_specs=y_spec,
        )(x, w, scale)

    y = jax.jit(jax.vmap(one))(jnp.float32([1, 2, 4]))
    np.testing.assert_array_equal(np.asarray(y), np.stack([product(x, w) * s / 4 for s in (1, 2, 4)]))


@pytest.mark.parametrize("op", [RS, AR])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_rank_may_have_its_own_scale(op, strategy):
    """Partial sums are multiplied before they travel."""
    x, w = operands(24, 16, 20)

    def rank(op, x, w, axis):
        return scaled(op, x, w, axis, (jnp.float32(1), 1.0 + lax.axis_index(axis)), strategy=strategy)

    y = jax.jit(spread(rank, op, mesh_of((2,))))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x[:, :8], w[:8]) + 2 * product(x[:, 8:], w[8:]))


def test_gathered():
    x, w = operands(24, 16, 20)

    def both(x, w):
        return entwine_jax.all_gather_matmul(
            x, w, "t", scales=SCALES, return_gathered=True, strategy="fused", preferred_element_type=jnp.float32
        )

    specs = (P("t", None), P(None, "t"))
    y, rows = jax.jit(
        jax.shard_map(both, mesh=mesh_of((2,)), in_specs=specs, out_specs=(specs[1], P(None)), check_vma=False)
    )(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w) / 8)
    assert rows.dtype == E4M3
    np.testing.assert_array_equal(np.asarray(rows, np.float32), np.asarray(x, np.float32))


def test_explain_tells_of_the_copy_and_of_both_types():
    x, w = operands(x_dtype=E5M2)
    (matmul,) = entwine_jax.explain(spread(scaled, AG, mesh_of((2,))), x, w)
    assert (matmul.dtype, matmul.w_dtype, matmul.result_dtype) == (E5M2, E4M3, jnp.float32)
    assert (
        matmul.reason
        == f"asked for; w is transposed first, a copy of {40 * 68 // 2} bytes unless it is a transpose itself"
    )
    assert matmul.arena_bytes > 0
    text = repr(entwine_jax.explain(spread(scaled, AG, mesh_of((2,))), x, w))
    assert "float8_e5m2[36,40]" in text and "float8_e4m3fn[40,34]" in text
    (matmul,) = entwine_jax.explain(spread(scaled, AG, mesh_of((2,))), x.astype(E4M3), w)
    assert matmul.w_dtype is None


def fails(error, message, x, w, op=AG, **options):
    with pytest.raises(error, match=message):
        run(op, x, w, **options)


def test_errors():
    x, w = operands()
    one = jnp.float32(1)
    for op in OPS:
        fails(
            TypeError,
            rf"{op}: x is float8_e4m3fn and w is float8_e4m3fn, which need scales=\(x_scale",
            x,
            w,
            op,
            scales=None,
        )
        fails(
            TypeError,
            rf"{op}: preferred_element_type=None, .*pass preferred_element_type=jnp.bfloat16",
            x,
            w,
            op,
            preferred_element_type=None,
        )
    fails(
        TypeError,
        "preferred_element_type=.*float16.*must be bfloat16 or float32",
        x,
        w,
        preferred_element_type=jnp.float16,
    )
    fails(
        TypeError,
        "scales are for float8 operands, but x is bfloat16 and w is bfloat16; leave",
        x.astype(jnp.bfloat16),
        w.astype(jnp.bfloat16),
    )
    fails(TypeError, "x is float8_e4m3fn and w is bfloat16, but .*w float8_e4m3fn; quantise", x, w.astype(jnp.bfloat16))
    fails(TypeError, "x is bfloat16 and w is float8_e4m3fn, but", x.astype(jnp.bfloat16), w)
    fails(TypeError, "w is float8_e5m2, but .*w float8_e4m3fn", x, w.astype(E5M2))
    fails(TypeError, r"scales=.* must be a pair, \(x_scale, w_scale\)", x, w, scales=(one,))
    fails(
        TypeError,
        r"scales\[1\] must be a float32 array of shape \(\), not float; wrap it in jnp.float32",
        x,
        w,
        scales=(one, 1.0),
    )
    fails(TypeError, r"scales\[0\] is bfloat16 but must be float32; cast", x, w, scales=(jnp.bfloat16(1), one))
    fails(TypeError, r"scales\[0\] has shape \(1,\) but .*reshape", x, w, scales=(jnp.ones((1,)), one))


def test_the_scale_of_what_is_gathered_is_common():
    x, w = operands()

    def rank(op, x, w, axis):
        return scaled(op, x, w, axis, (jnp.float32(1) + lax.axis_index(axis), W_SCALE))

    with pytest.raises(ValueError, match=r"scales\[0\] varies over axis 't'.*jax.lax.pmax\(x_scale, 't'\)"):
        jax.eval_shape(spread(rank, AG, mesh_of((2,))), x, w)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_gradient_of_float8(op, strategy):
    x, w = operands()
    f = spread(functools.partial(scaled, strategy=strategy), op, mesh_of((2,)))
    with pytest.raises(TypeError, match=f"{op}: the gradient of a float8 array.*entwine_jax.float8_{op}"):
        jax.eval_shape(jax.grad(lambda x, w: f(x, w).sum(), (0, 1)), x, w)
    # Constants of a larger gradient are no problem.
    assert jax.jit(jax.grad(lambda b: (f(x, w) * b).sum()))(1.0) == product(x, w).sum() / 8


# ---- Ops that quantise


def quantising(op, x, w, axis, **options):
    return getattr(entwine_jax, f"float8_{op}")(x, w, axis, **{"strategy": "fused", **options})


def rounded(x, scale, dtype=E4M3):
    return np.asarray((x.astype(jnp.float32) / scale).astype(dtype), np.float64) * float(scale)


def amax_scale(x, dtype=E4M3):
    return np.float32(np.abs(np.asarray(x, np.float32)).max()) / np.float32(jnp.finfo(dtype).max)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_quantised_value(op, strategy):
    x, w = normal((64, 48), 1), normal((48, 32), 2)
    mesh, scales = mesh_of((2,)), (jnp.float32(2**-6), jnp.float32(2**-7))
    f = jax.jit(spread(functools.partial(quantising, scales=scales, strategy=strategy), op, mesh))
    assert_close(f(x, w), rounded(x, scales[0]) @ rounded(w, scales[1]), 1e-6)
    # Past the largest number: clipped, not NaN.
    small = jnp.float32(2**-10), jnp.float32(2**-7)
    y = jax.jit(spread(functools.partial(quantising, scales=small, strategy=strategy), op, mesh))(x, w)
    clipped = rounded(jnp.clip(x, -448 * 2**-10, 448 * 2**-10), small[0])
    assert_close(y, clipped @ rounded(w, small[1]), 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_current_scales(op):
    """By the largest number: of all ranks for what is gathered, of each rank for what isn't."""
    x, w = normal((64, 48), 1), normal((48, 32), 2)
    x[:32] *= 100
    x[:, :24] *= 10
    w[:, :16] *= 8
    w[:24] *= 50
    y = jax.jit(spread(quantising, op, mesh_of((2,))))(x, w)
    if op == AG:
        x8 = rounded(x, amax_scale(x))
        wanted = np.concatenate([x8 @ rounded(v, amax_scale(v)) for v in (w[:, :16], w[:, 16:])], 1)
    else:
        parts = [(x[:, :24], w[:24]), (x[:, 24:], w[24:])]
        wanted = sum(rounded(a, amax_scale(a)) @ rounded(b, amax_scale(b)) for a, b in parts)
    assert_close(y, wanted, 1e-6)
    zeros = jax.jit(spread(quantising, op, mesh_of((2,))))(x * 0, w)
    np.testing.assert_array_equal(np.asarray(zeros), 0)


@pytest.mark.parametrize("op", OPS)
def test_overflow_shows(op):
    """As whoever scales a loss looks for it: what isn't finite stays so, and isn't clipped."""
    x, w = normal((16, 8), 1), normal((8, 12), 2)
    f = spread(quantising, op, mesh_of((2,)))
    for bad in (jnp.inf, jnp.nan):
        assert not np.isfinite(np.asarray(jax.jit(f)(jnp.asarray(x).at[0, 0].set(bad), w))[0]).any()
        dx, dw = jax.jit(lambda x, w, dy: jax.vjp(f, x, w)[1](dy))(x, w, jnp.ones((16, 12)).at[0, 0].set(bad))
        assert not np.isfinite(np.asarray(dx)[0]).any() and not np.isfinite(np.asarray(dw)[:, 0]).any()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)], ids=str)
def test_gradients(op, strategy, check_vma, wanted):
    """To the bit: whole numbers that float8 holds, and powers of two for scales."""
    mesh, leading = mesh_of((4,)), (None,)
    x, w, dy = integers((2, 32, 24), 1), integers((24, 40), 2), integers((2, 32, 40), 3, low=-1, high=1)
    scales = jnp.float32(0.5), jnp.float32(0.25)
    f = spread(functools.partial(quantising, scales=scales, strategy=strategy), op, mesh, "t", leading, check_vma)
    # The largest cotangent is one, or its share of it: its scale is no power of two, so that dy8 is the largest float8.
    got = jax.jit(lambda x, w, dy: jax.grad(lambda x, w: (f(x, w) * dy).sum(), wanted)(x, w))(x, w, dy)
    x, w, dy = (np.asarray(v, np.float64) for v in (x, w, dy))
    gradients = dy @ w.T, np.einsum("bmk,bmn->kn", x, dy)
    assert_close(got, tuple(gradients[i].astype(np.float32) for i in wanted), 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_a_team_of_one(op):
    x, w = normal((16, 8), 1), normal((8, 12), 2)
    loss = lambda ranks: lambda x, w: jnp.sin(spread(quantising, op, mesh_of((ranks,)))(x, w)).sum()  # noqa: E731
    scaled_alike = jax.jit(jax.grad(loss(1), (0, 1)))(x, w)
    exact = jax.grad(lambda x, w: jnp.sin(x @ w).sum(), (0, 1))(x, w)
    assert_close(scaled_alike, exact, 0.2)


@pytest.mark.parametrize("op", OPS)
def test_gradient_dtypes_and_what_they_are_made_of(op):
    x, w = normal((64, 48), 1, jnp.bfloat16), normal((48, 32), 2)
    f = spread(functools.partial(quantising, preferred_element_type=jnp.bfloat16), op, mesh_of((2,)))
    loss = lambda x, w: jnp.sum(jnp.sin(f(x, w).astype(jnp.float32)))  # noqa: E731
    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert (dx.dtype, dw.dtype) == (jnp.bfloat16, jnp.float32)
    y = x.astype(jnp.float32) @ w
    wanted = jnp.cos(y) @ w.T, x.astype(jnp.float32).T @ jnp.cos(y)
    # cos of a sum of 48 rounded products: what float8 can do.
    for got, want in zip((dx, dw), wanted, strict=True):
        assert_close(np.asarray(got, np.float32), want, 0.3)
    explained = entwine_jax.explain(jax.grad(loss, (0, 1)), x, w)
    kinds = [(m.op, m.dtype, m.w_dtype, m.transpose_w) for m in explained]
    other = {AG: RS, RS: AG}
    backward = [(other[op], E5M2, E4M3, True)] if op in other else []
    assert kinds == [(op, E4M3, None, True), *backward]
    assert not any("copy" in m.reason for m in explained)


def test_training_step_converges():
    """A two-layer MLP learns in float8 what it learns in float32, about as fast."""
    mesh = mesh_of((4,))
    x, target = normal((64, 32), 1), normal((64, 32), 2)
    weights = normal((32, 64), 3) / 6, normal((64, 32), 4) / 8
    specs = (P(None, "t"), P("t", None))

    def losses(op_of):
        @functools.partial(jax.shard_map, mesh=mesh, in_specs=(specs, P("t"), P("t")), out_specs=P("t"))
        def layer(weights, x, target):
            h = jax.nn.relu(op_of(AG)(x, weights[0], "t", strategy="fused"))
            y = op_of(RS)(h, weights[1], "t", strategy="fused")
            return jnp.square(y - target)

        step = jax.jit(jax.value_and_grad(lambda weights: layer(weights, x, target).mean()))
        current, found = weights, []
        for _ in range(25):
            loss, gradient = step(current)
            current = jax.tree.map(lambda v, g: v - 2.0 * g, current, gradient)
            found.append(float(loss))
        return found

    float8 = losses(lambda op: getattr(entwine_jax, f"float8_{op}"))
    float32 = losses(lambda op: getattr(entwine_jax, op))
    assert float32[-1] < 0.8 * float32[0]
    assert abs(float8[-1] - float32[-1]) < 0.03 * float32[-1]


def test_quantised_errors():
    x, w = normal((8, 8), 1), normal((8, 8), 2)

    def fails(message, x, w, error=TypeError, op=AG, **options):
        with pytest.raises(error, match=message):
            jax.eval_shape(spread(functools.partial(quantising, **options), op, mesh_of((2,))), x, w)

    fails(
        "float8_all_gather_matmul: x is float8_e4m3fn already; use entwine_jax.all_gather_matmul with",
        x.astype(E4M3),
        w,
    )
    fails("w is int32 but must be floating", x, w.astype(jnp.int32))
    fails("preferred_element_type=None.*x bfloat16 and w float32 in float8 must be", x.astype(jnp.bfloat16), w)
    fails("float8_matmul_reduce_scatter.*pad the rows to 10", normal((9, 8), 1), w, ValueError, RS)
    fails(r"scales\[1\] is float16", x, w, scales=(jnp.float32(1), jnp.float16(1)))


def test_scan_and_remat():
    mesh = mesh_of((2,))
    x, ws = normal((16, 8), 1), normal((3, 8, 8), 2) / 3

    def total(ws, wrap):
        up = spread(quantising, AG, mesh)

        def layer(x, w):
            return lax.with_sharding_constraint(jnp.tanh(up(x, w)), jax.NamedSharding(mesh, P("t"))), None

        return lax.scan(wrap(layer), x, ws)[0].sum()

    plain, rematerialised = (
        jax.jit(jax.grad(functools.partial(total, wrap=w)))(ws) for w in (lambda f: f, jax.checkpoint)
    )
    np.testing.assert_array_equal(np.asarray(plain), np.asarray(rematerialised))
    assert np.abs(np.asarray(plain)).max() > 0
