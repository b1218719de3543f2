"""Ops that quantise: derivatives of every order, and several products in one call."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, integers, mesh_of, normal, product, specs
from jax.sharding import PartitionSpec as P

import entwine_jax

AG, RS, AR = OPS
STRATEGIES = ("fused", "xla")


def call(op, x, w, **options):
    return getattr(entwine_jax, f"float8_{op}")(x, w, "t", **{"strategy": "fused", **options})


def spread(op, count=0, check_vma=True, ranks=2, **options):
    """Of global x and w; of several w (all-gather) or pairs if `count` says so."""
    x, w, y = specs(op)
    if count:
        x, w, y = (x if op == AG else (x,) * count, (w,) * count, (y,) * count if op == AG else y)
    rank = functools.partial(call, op, **options)
    return jax.shard_map(rank, mesh=mesh_of((ranks,)), in_specs=(x, w), out_specs=y, check_vma=check_vma)


# A loss whose second derivative has all parts: of x twice, of w twice, and of both.
def loss(f, x, w):
    return jnp.square(f(x, w)).sum() / 64


def second(f):
    """The gradient of a number made of both gradients."""

    def of_gradients(x, w, a, b):
        dx, dw = jax.grad(functools.partial(loss, f), (0, 1))(x, w)
        return (jnp.square(dx) * a).sum() + (dw * b).sum()

    return jax.jit(jax.grad(of_gradients, (0, 1)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivative(op, check_vma):
    """That of the product which isn't rounded, of the same gradients: with numbers that float8 holds, the same."""
    x, w = integers((16, 12), 1), integers((12, 20), 2)
    a, b = integers((16, 12), 3), integers((12, 20), 4)
    scales = jnp.float32(1), jnp.float32(1)
    wanted = second(lambda x, w: x @ w)(x, w, a, b)
    # What dy is rounded to is no integer: e5m2 has two bits of fraction.
    found = []
    for strategy in STRATEGIES:
        f = spread(op, check_vma=check_vma, strategy=strategy, scales=scales, residuals="operands")
        found.append(second(f)(x, w, a, b))
        assert_close(found[-1], wanted, 0.2)
    for one, other in zip(*found, strict=True):
        assert one.dtype == jnp.float32
        assert_close(one, other, 1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("argument", [0, 1], ids=["x", "w"])
def test_linear_loss(op, argument):
    """Only mixed parts are left, exact, whichever gradient is taken first."""
    x, w, dy = integers((16, 12), 1), integers((12, 20), 2), integers((16, 20), 3)
    f = spread(op, residuals="operands")

    def first(x, w):
        return jax.grad(lambda *args: (f(*args) * dy).sum(), argument)(x, w)

    c = integers((x, w)[argument].shape, 5)
    mixed = jax.jit(jax.grad(lambda *args: (first(*args) * c).sum(), 1 - argument))(x, w)
    np.testing.assert_array_equal(np.asarray(mixed), product(c.T, dy) if argument == 0 else product(dy, c.T))
    own = jax.jit(jax.grad(lambda *args: (first(*args) * c).sum(), argument))(x, w)
    np.testing.assert_array_equal(np.asarray(own), 0)


def test_third_derivative_and_bfloat16():
    x, w = normal((8, 8), 1, jnp.bfloat16), normal((8, 12), 2) / 3

    def third(f, x):
        g = lambda x: jnp.sin(f(x, w).astype(jnp.float32)).sum()  # noqa: E731
        for _ in range(2):
            g = lambda x, g=g: jnp.square(jax.grad(g)(x).astype(jnp.float32)).sum()  # noqa: E731
        return jax.grad(g)(x)

    f = spread(AG, residuals="operands", preferred_element_type=jnp.float32)
    got = jax.jit(functools.partial(third, f))(x)
    assert got.dtype == jnp.bfloat16
    wide = third(lambda x, w: x.astype(jnp.float32) @ w, x)
    assert_close(np.asarray(got, np.float32), np.asarray(wide, np.float32), 0.4)


@pytest.mark.parametrize("op", OPS)
def test_without_operands_there_is_a_first_one_only(op):
    x, w = normal((8, 8), 1), normal((8, 8), 2)
    dy = normal((8, 8), 3)
    for argument, f in itertools.product((0, 1), (spread(op), spread(op, strategy="xla"))):
        first = jax.grad(lambda *args, f=f: (f(*args) * dy).sum(), argument)
        with pytest.raises(
            NotImplementedError,
            match=f"float8_{op}: a second derivative needs x and w.*residuals='operands'.*entwine_jax.{op}",
        ):
            jax.eval_shape(jax.grad(lambda *args, first=first: first(*args).sum(), 1 - argument), x, w)
    with pytest.raises(ValueError, match=f"float8_{op}: residuals='save' is unknown; use one of .*'operands'"):
        jax.eval_shape(spread(op, residuals="save"), x, w)


def test_what_operands_cost_a_first_derivative():
    """Nothing, compiled as a whole: also of a loop, whose residuals are stacked."""
    x, ws = normal((64, 64), 1), normal((6, 64, 64), 2) / 8

    def step(residuals):
        up = spread(AG, residuals=residuals, strategy="xla")

        def total(ws):
            layer = lambda x, w: (jnp.tanh(up(x, w).T), None)  # noqa: E731
            return jax.lax.scan(layer, x, ws)[0].sum()

        return jax.jit(jax.grad(total)).lower(ws).compile()

    lean, wide = step("float8"), step("operands")
    np.testing.assert_array_equal(np.asarray(lean(ws)), np.asarray(wide(ws)))
    assert wide.memory_analysis().temp_size_in_bytes <= lean.memory_analysis().temp_size_in_bytes


# ---- Several


def exact_gradients(op, xs, ws, dys):
    """Of all y: of x or of each, and of each w."""
    xs, ws, dys = ([np.asarray(v, np.float64) for v in each] for each in (xs, ws, dys))
    if op == AG:
        return [sum(dy @ w.T for dy, w in zip(dys, ws, strict=True))], [xs[0].T @ dy for dy in dys]
    return [dys[0] @ w.T for w in ws], [x.T @ dys[0] for x in xs]


def drawn(op, make=integers):
    if op == AG:
        xs, ws = [make((16, 12), 1)], [make((12, n), 2 + n) for n in (20, 8, 36)]
        return xs, ws, [make((16, w.shape[1]), 30 + i) for i, w in enumerate(ws)]
    xs = [make((16, k), k) for k in (12, 4, 20)]
    return xs, [make((x.shape[1], 24), 50 + i) for i, x in enumerate(xs)], [make((16, 24), 60)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_several(op, strategy, check_vma):
    """Values and gradients; w's scales differ, and what is added has one all the same."""
    xs, ws, dys = drawn(op)
    w_scales = tuple(jnp.float32(s) for s in (0.25, 4, 1)) if op == AG else jnp.float32(0.5)
    options = {"scales": (jnp.float32(0.5), w_scales), "strategy": strategy, "check_vma": check_vma}
    f = spread(op, len(ws), **options)
    x = xs[0] if op == AG else tuple(xs)

    def run(x, ws, dys):
        ys, back = jax.vjp(f, x, ws)
        return (ys if op == AG else (ys,)), back(dys if op == AG else dys[0])

    ys, (dx, dws) = jax.jit(run)(x, tuple(ws), tuple(dys))
    wanted = [product(xs[0], w) for w in ws] if op == AG else [sum(map(product, xs, ws))]
    for y, want in zip(ys, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(y), want)
    wanted_dxs, wanted_dws = exact_gradients(op, xs, ws, dys)
    for got, want in zip((dx,) if op == AG else dx, wanted_dxs, strict=True):
        assert_close(got, want.astype(np.float32), 1e-6)
    for got, want in zip(dws, wanted_dws, strict=True):
        assert_close(got, want.astype(np.float32), 1e-6)


@pytest.mark.parametrize("op", OPS)
def test_several_by_their_own_scales_in_one_call(op):
    """Random numbers of different sizes: as close to what isn't rounded as one product is; and what travels."""
    xs, ws, dys = drawn(op, normal)
    ws = [w * 10.0**i for i, w in enumerate(ws)] if op == AG else ws
    f = spread(op, len(ws))
    x = xs[0] if op == AG else tuple(xs)
    total = lambda x, ws: jnp.sum(jnp.stack([(y * dy).sum() for y, dy in zip(f(x, ws), dys)]))  # noqa: E731, B905
    if op != AG:
        total = lambda x, ws: (f(x, ws) * dys[0]).sum()  # noqa: E731
    dx, dws = jax.jit(jax.grad(total, (0, 1)))(x, tuple(ws))
    wanted_dxs, wanted_dws = exact_gradients(op, xs, ws, dys)
    for got, want in zip((*((dx,) if op == AG else dx), *dws), (*wanted_dxs, *wanted_dws), strict=True):
        assert_close(got, want.astype(np.float32), 0.25)
    calls = [(m.op, len(m.products)) for m in entwine_jax.explain(jax.grad(total, (0, 1)), x, tuple(ws))]
    assert calls == [(op, 3)] if op == AR else calls == [(op, 3), ({AG: RS, RS: AG}[op], 3)]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_some_gradients_of_several(strategy):
    """One y that nobody uses, one w that is constant; x's alone, w's alone; and derivatives after the first."""
    xs, ws, dys = drawn(AG)
    f = spread(AG, 3, scales=(jnp.float32(1), jnp.float32(1)), residuals="operands", strategy=strategy)

    def run(x, w, dys):
        ys = f(x, (w[0], ws[1], w[1]))
        return (ys[0] * dys[0]).sum() + (ys[1] * dys[1]).sum()

    dx, (d_first, d_last) = jax.jit(jax.grad(run, (0, 1)))(xs[0], (ws[0], ws[2]), dys)
    wide = [np.asarray(v, np.float64) for v in (*ws[:2], *dys[:2])]
    assert_close(dx, (wide[2] @ wide[0].T + wide[3] @ wide[1].T).astype(np.float32), 1e-6)
    assert_close(d_first, product(xs[0].T, dys[0]).astype(np.float32), 1e-6)
    np.testing.assert_array_equal(np.asarray(d_last), 0)
    alone = jax.jit(jax.grad(run, 1))(xs[0], (ws[0], ws[2]), dys)[0]
    assert_close(alone, d_first, 1e-6)
    mixed = jax.jit(jax.grad(lambda x: jax.grad(run, 1)(x, (ws[0], ws[2]), dys)[0].sum()))(xs[0])
    assert_close(mixed, np.asarray(dys[0]).sum(1)[:, None] * np.ones((1, 12), np.float32), 1e-6)


def test_several_errors():
    xs, ws, _ = drawn(AG)
    one = jnp.float32(1)

    def fails(error, message, op, x, w, **options):
        count = len(w) if isinstance(w, tuple) else 0
        with pytest.raises(error, match=f"entwine_jax.float8_{op}: {message}"):
            jax.eval_shape(spread(op, count, **options), x, w)

    fails(ValueError, r"w holds 3 weights, but scales\[1\] 2 scales", AG, xs[0], tuple(ws), scales=(one, (one, one)))
    fails(TypeError, r"scales\[1\] must be a float32 array", AG, xs[0], tuple(ws), scales=(one, (one, one, 1.0)))
    xs, ws, _ = drawn(RS)
    pairs = tuple(xs), tuple(ws)
    fails(NotImplementedError, "scales=.*each of several products", RS, *pairs, scales=(one, (one, one, one)))
    fails(TypeError, r"w\[1\] has 8 columns and w\[0\] 24", RS, *pairs[:1], (ws[0], ws[1][:, :8], ws[2]))
    with pytest.raises(TypeError, match=r"float8_matmul_all_reduce: w is .* and the other operand several"):
        whole = functools.partial(call, AR, w=ws[0])
        f = lambda *xs: whole(xs)  # noqa: E731
        jax.eval_shape(jax.shard_map(f, mesh=mesh_of((2,)), in_specs=P(None, "t"), out_specs=P()), *xs)
