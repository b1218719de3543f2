"""collective_matmul of one x with several weights, and of two that are gated: one call where shardings are known."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, collectives, setup
from helpers import assert_close, integers, normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

COLUMNS = (24, 16, 8)
TOGETHER = ("auto", "explicit", "manual")  # "partial": each is a product of its own
AG, RS = "entwine_all_gather_matmul", "entwine_matmul_reduce_scatter"


def operands(s, make=normal, columns=COLUMNS, transposed=False):
    x, *ws = make((8, 16, 24), 1), *(make((24, n), 2 + i) for i, n in enumerate(columns))
    ws = [w.T.copy() if transposed else w for w in ws]
    return s.place(x, *ws, specs=specs(s, len(ws), transposed))


def specs(s, weights=3, transposed=False):
    return s.specs[0], *(P("t", None) if transposed else s.specs[1],) * weights


def products(s, weights=3, transposed=False, results=None, **options):
    def f(x, *ws):
        return s.up(x, ws, transpose_w=transposed, **options)

    outs = (s.specs[3],) * weights if results is None else results
    return s.spread(f, in_specs=specs(s, weights, transposed), out_specs=outs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", ["8", "2x4", "2x2x2 middle"])
def test_exact(mode, mesh):
    if mode == "partial" and mesh == "8":
        pytest.skip("no other axis that could be manual")
    with setup(mode, mesh) as s:
        x, *ws = operands(s, integers)
        run = jax.jit(products(s))
        ys = run(x, *ws)
        assert isinstance(ys, tuple)
        for y, w in zip(ys, ws, strict=True):
            np.testing.assert_array_equal(np.asarray(y), np.asarray(x) @ np.asarray(w))
            assert mode != "explicit" or y.sharding.is_equivalent_to(NamedSharding(s.mesh, s.specs[3]), 3)
        assert collectives(run.lower(x, *ws).compile().as_text()) == {AG: 1 if mode in TOGETHER else 3}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_gradients(mode, residuals):
    """One call forward, one backward, of all that share x; what the data axis adds up is XLA's."""
    with setup(mode) as s:
        args = operands(s)

        def loss(f, *args):
            return sum(jnp.sum(jnp.sin(y)) for y in f(*args))

        places = tuple(range(4))
        ours = jax.jit(jax.grad(functools.partial(loss, products(s, residuals=residuals)), places))
        wanted = jax.grad(functools.partial(loss, lambda x, *ws: [x @ w for w in ws]), places)
        assert_close(ours(*args), wanted(*(np.asarray(v) for v in args)))
        found = collectives(ours.lower(*args).compile().as_text())
        once = 1 if mode in TOGETHER and (mode, residuals) != ("auto", "save") else 3
        assert {name: found.get(name) for name in (AG, RS)} == {AG: once, RS: once}
        assert found.keys() <= {AG, RS, "all-reduce"}


@pytest.mark.parametrize("mode", MODES)
def test_epilogues(mode):
    with setup(mode) as s:
        x, *ws = operands(s)
        biases = s.place(normal((24,), 7), normal((8,), 8), specs=[P("t")] * 2)

        def f(x, b, c, *ws):
            return s.up(x, ws, bias=(b, None, c), activation=("gelu", "silu", None))

        def plain(x, b, c, *ws):
            first, second, third = (x @ w for w in ws)
            return jax.nn.gelu(first + b, approximate=False), jax.nn.silu(second), third + c

        in_specs, out_specs = (s.specs[0], P("t"), P("t"), *specs(s)[1:]), (s.specs[3],) * 3
        run = jax.jit(s.spread(f, in_specs=in_specs, out_specs=out_specs))
        arrays = [np.asarray(v) for v in (x, *biases, *ws)]
        assert_close(run(x, *biases, *ws), plain(*arrays))
        loss = [lambda *v, g=g: sum(jnp.sum(jnp.cos(y)) for y in g(*v)) for g in (run, plain)]
        assert_close(
            *(jax.grad(g, tuple(range(6)))(*v) for g, v in zip(loss, ((x, *biases, *ws), arrays), strict=True))
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("transposed", [False, True])
def test_gated(mode, transposed):
    with setup(mode) as s:
        args = operands(s, columns=(24, 24), transposed=transposed)
        run = jax.jit(products(s, 2, transposed, s.specs[3], gated=True, activation="silu"))

        def plain(x, gate, up):
            gate, up = (gate.T, up.T) if transposed else (gate, up)
            return jax.nn.silu(x @ gate) * (x @ up)

        once = 1 if mode in TOGETHER and (mode, transposed) != ("auto", True) else 2
        arrays = [np.asarray(v) for v in args]
        assert_close(run(*args), plain(*arrays))
        assert collectives(run.lower(*args).compile().as_text()) == {AG: once}
        slopes = [jax.grad(lambda *v, g=g: jnp.sum(jnp.sin(g(*v))), (0, 1, 2)) for g in (run, plain)]
        assert_close(slopes[0](*args), slopes[1](*arrays))


@pytest.mark.parametrize("mode", MODES)
def test_float8(mode):
    narrow = jnp.float8_e4m3fn
    with setup(mode) as s:
        x, *ws = (v.astype(narrow) for v in operands(s))
        scales = jnp.float32(0.5), tuple(map(jnp.float32, (1, 2, 4)))

        def f(x, *ws):
            return s.up(x, ws, scales=scales, preferred_element_type=jnp.float32)

        ys = jax.jit(s.spread(f, in_specs=specs(s), out_specs=(s.specs[3],) * 3))(x, *ws)
        wide = [np.asarray(v, np.float32) for v in (x, *ws)]
        assert_close(ys, tuple(0.5 * by * (wide[0] @ w) for by, w in zip((1, 2, 4), wide[1:], strict=True)), 1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_transforms(mode):
    """vmap over x and over a weight, scan with remat, second order; eagerly too."""
    with setup(mode) as s:
        x, *ws = operands(s, columns=(24, 24))

        def gated(x, *ws):
            return s.up(x, ws, gated=True, activation="gelu_tanh")

        def plain(x, gate, up):
            return jax.nn.gelu(x @ gate) * (x @ up)

        run = s.spread(gated, in_specs=specs(s, 2), out_specs=s.specs[3])
        arrays = [np.asarray(v) for v in (x, *ws)]
        assert_close(run(x, *ws), plain(*arrays))

        def penalty(f, *args):
            return jnp.sum(jax.grad(lambda x: jnp.sum(jnp.sin(f(x, *args[1:]))))(args[0]) ** 2)

        assert_close(
            jax.jit(jax.grad(functools.partial(penalty, run), (0, 1, 2)))(x, *ws),
            jax.grad(functools.partial(penalty, plain), (0, 1, 2))(*arrays),
            1e-4,
        )


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_scan_and_remat(mode):
    with setup(mode) as s:
        x, *ws = operands(s, columns=(24, 24))

        def layers(gated, x, *ws):
            def layer(carry, _):
                return carry + jnp.sum(gated(x * (1 + carry), *ws)), None

            return jax.lax.scan(jax.checkpoint(layer), jnp.float32(0), length=2)[0]

        def ours(x, *ws):
            return s.up(x, ws, gated=True, activation="gelu_tanh", bias=(None, None))

        def plain(x, gate, up):
            return jax.nn.gelu(x @ gate) * (x @ up)

        x, *ws = (v * 0.1 for v in (x, *ws))
        got = jax.jit(jax.grad(functools.partial(layers, ours), (0, 1, 2)))(x, *ws)
        arrays = [np.asarray(v) for v in (x, *ws)]
        assert_close(got, jax.grad(functools.partial(layers, plain), (0, 1, 2))(*arrays), 1e-4)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_vmap(mode):
    with setup(mode) as s:
        x, *ws = operands(s)
        xs = jax.device_put(normal((3, 8, 16, 24), 5), NamedSharding(s.mesh, P(None, *s.specs[0])))
        batch = jax.device_put(normal((3, 24, 16), 6), NamedSharding(s.mesh, P(None, None, "t")))

        def three(x, w):
            return s.up(x, (ws[0], w))

        for axes, args in (((0, None), (xs, ws[1])), ((None, 0), (x, batch)), ((0, 0), (xs, batch))):
            got = jax.jit(jax.vmap(three, axes))(*args)
            first, second = (np.asarray(v) for v in args)
            second = second[:, None] if second.ndim == 3 else second
            wanted = np.broadcast_to(first @ np.asarray(ws[0]), (3, 8, 16, 24)), first @ second
            assert_close(got, tuple(wanted))

        def slopes(up):
            return jax.grad(lambda x, w: sum(jnp.sum(jnp.sin(y)) for y in up(x, w)), (0, 1))

        got = jax.jit(jax.vmap(slopes(three)))(xs, batch)
        plain = slopes(lambda x, w: (x @ np.asarray(ws[0]), x @ w))
        assert_close(got, jax.vmap(plain)(np.asarray(xs), np.asarray(batch)))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_where_they_differ(mode):
    """Weights whose shardings select different ops, or none, are products of their own; and of different dtypes."""
    with setup(mode) as s:
        x, *ws = operands(s)
        ws[1] = jax.device_put(ws[1], NamedSharding(s.mesh, P(None, None)))
        check_with_gradients(products(s, strategy="auto"), x, ws)
        x, *ws = operands(s)
        ws[0] = ws[0].astype(jnp.bfloat16)
        ys = jax.jit(lambda x, *ws: s.up(x, ws))(x.astype(jnp.bfloat16), *ws)
        assert [y.dtype for y in ys] == [jnp.bfloat16, jnp.float32, jnp.float32]


def check_with_gradients(run, x, ws):
    places = tuple(range(len(ws) + 1))
    arrays = [np.asarray(v) for v in (x, *ws)]
    ys, plain = jax.jit(run)(x, *ws), [arrays[0] @ w for w in arrays[1:]]
    assert_close([*ys], plain)

    def loss(f, *args):
        return sum(jnp.sum(jnp.sin(y)) for y in f(*args))

    wanted = jax.grad(functools.partial(loss, lambda x, *ws: [x @ w for w in ws]), places)(*arrays)
    assert_close(jax.jit(jax.grad(functools.partial(loss, run), places))(x, *ws), wanted)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("rows", ["t", None])
def test_sums_are_calls_of_their_own(mode, rows):
    """k-sharded operands: reduce-scatters, or all-reduces."""
    with setup(mode) as s:
        x, *ws = normal((8, 16, 24), 1), normal((24, 16), 2), normal((24, 32), 3)
        k = P("t", None)
        x, *ws = s.place(x, *ws, specs=(P("d", None, "t"), k, k))
        where = P("d", rows, None) if mode == "explicit" else NamedSharding(s.mesh, P("d", rows, None))

        def run(x, *ws):
            return entwine_jax.collective_matmul(x, ws, out_sharding=where, strategy="fused")

        check_with_gradients(run, x, ws)
        found = collectives(jax.jit(run).lower(x, *ws).compile().as_text())
        assert found == {RS if rows else "entwine_matmul_all_reduce": 2}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_wide_results_of_narrow_operands(mode):
    """bfloat16 to float32: gradients are bfloat16."""
    with setup(mode) as s:
        args = [v.astype(jnp.bfloat16) for v in operands(s)]
        run = products(s, preferred_element_type=jnp.float32)

        def slopes(f):
            return jax.jit(jax.grad(lambda *v: sum(jnp.sum(jnp.sin(y)) for y in f(*v)), range(4)))

        got = slopes(run)(*args)
        assert [y.dtype for y in run(*args)] == [jnp.float32] * 3 and [v.dtype for v in got] == [jnp.bfloat16] * 4
        wide = [np.asarray(v, np.float32) for v in args]
        assert_close(got, slopes(lambda x, *ws: [x @ w for w in ws])(*wide), 2e-2)


def test_more_than_a_call_takes():
    with setup("auto") as s:
        args = operands(s, columns=(16,) * 6)
        check_with_gradients(products(s, 6), args[0], args[1:])
        assert collectives(jax.jit(products(s, 6)).lower(*args).compile().as_text()) == {AG: 2}


def test_one_device():
    x, *ws = normal((8, 16, 24), 1), normal((24, 16), 2), normal((24, 32), 3)

    def run(x, *ws):
        return entwine_jax.collective_matmul(x, ws)

    check_with_gradients(run, x, ws)
    first, second = entwine_jax.explain(run, x, *ws)
    assert (first.op, first.y, second.op, second.y) == ("dot", (8, 16, 16), "dot", (8, 16, 32))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_explain_shows_one_call(mode):
    with setup(mode) as s:
        args = operands(s)
        (found,) = entwine_jax.explain(products(s), *args)
        assert found.op == "all_gather_matmul" and len(found.products) == 3 and found.strategy == "fused", found
        slopes = jax.grad(lambda *v: sum(jnp.sum(jnp.sin(y)) for y in products(s)(*v)), range(4))
        found = entwine_jax.explain(slopes, *args)
        assert [one.op for one in found] == ["all_gather_matmul", "matmul_reduce_scatter"], found
        assert [len(one.products) for one in found] == [3, 3] and found[1].gathered is not None, found


def test_errors():
    with setup("explicit") as s:
        x, *ws = operands(s)
        for error, words, args, options in (
            (TypeError, r"collective_matmul: w=\(\) is empty", (x, ()), {}),
            (ValueError, "gated=True multiplies the products of two weights", (x, ws), {"gated": True}),
            (ValueError, "gated=True multiplies the products of two weights", (x, ws[0]), {"gated": True}),
            (TypeError, r"w\[0\] has 24 columns and w\[1\] 16", (x, ws[:2]), {"gated": True}),
            (ValueError, "bias of 2 must be a sequence of 3", (x, ws), {"bias": (None, None)}),
            (ValueError, "one activation", (x, ws[:2]), {"gated": True, "activation": ("silu", None)}),
            (ValueError, "sequence of 3", (x, ws), {"activation": "silu"}),
            (ValueError, "q", (x, ws), {"axis_name": "q"}),
            (ValueError, "q", (x, ws), {"out_sharding": P(None, None, "q")}),
            (TypeError, r"bias\[1\] has shape \(3,\)", (x, ws), {"bias": (None, np.zeros(3, np.float32), None)}),
        ):
            with pytest.raises(error, match=words) as raised:
                entwine_jax.collective_matmul(*args, **options)
            assert "entwine_jax.collective_matmul" in str(raised.value)
