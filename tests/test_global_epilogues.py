"""collective_matmul with bias and activation: fused in all four modes, with its gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, collectives, operands, setup
from helpers import assert_close, integers, normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

NN = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "silu": jax.nn.silu,
}
BIASES = P("t"), P(None)


def arrays(s, make=None):
    x, w_up, w_down = make or operands()
    return s.place(
        x, w_up, w_down, normal((w_up.shape[1],), 4), normal((w_down.shape[1],), 5), specs=(*s.specs[:3], *BIASES)
    )


def mlp(s, up="gelu", down="silu", **options):
    def f(x, w_up, w_down, b, c):
        h = s.up(x, w_up, bias=b, activation=up, **options)
        return x + s.down(h, w_down, bias=c, activation=down)

    return s.spread(f, in_specs=(*s.specs[:3], *BIASES))


def plain(up="gelu", down="silu"):
    return lambda x, w_up, w_down, b, c: x + NN[down](NN[up](x @ w_up + b) @ w_down + c)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", ["8", "2x2x2 middle"])
def test_exact(mode, mesh):
    if mode == "partial" and mesh == "8":
        pytest.skip("no other axis that could be manual")
    with setup(mode, mesh) as s:
        x, w_up, w_down = integers((8, 16, 24), 1), integers((24, 32), 2), integers((32, 24), 3)
        args = s.place(x, w_up, w_down, integers((32,), 4), integers((24,), 5), specs=(*s.specs[:3], *BIASES))
        y = jax.jit(mlp(s, "relu", "relu"))(*args)
        wide = [np.asarray(v, np.float64) for v in args]
        np.testing.assert_array_equal(np.asarray(y), np.asarray(plain("relu", "relu")(*wide)))


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "up, down, residuals", [("gelu", None, "regather"), ("relu", "silu", "save"), (None, "relu", "save")]
)
def test_gradient(mode, up, down, residuals):
    with setup(mode) as s:
        args = arrays(s)

        def loss(f):
            return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3, 4)))

        got, wanted = loss(mlp(s, up, down, residuals=residuals))(*args), loss(plain(up, down))(*map(np.asarray, args))
        assert_close(got, wanted, 2e-5)
        if mode == "explicit":
            for a, b in zip(got[1], args, strict=True):
                assert jax.typeof(a).sharding.spec == jax.typeof(b).sharding.spec


@pytest.mark.parametrize("mode", MODES)
def test_second_gradient(mode):
    with setup(mode) as s:
        args = arrays(s)

        def norm_of_gradient(f):
            gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3, 4))
            return lambda *args: sum(jnp.sum(jnp.square(g)) for g in gradient(*args))

        got = jax.jit(jax.grad(norm_of_gradient(mlp(s)), (0, 1, 2, 3, 4)))(*args)
        assert_close(got, jax.jit(jax.grad(norm_of_gradient(plain()), (0, 1, 2, 3, 4)))(*map(np.asarray, args)), 5e-5)


@pytest.mark.parametrize("mode", MODES)
def test_each_is_one_call(mode):
    """Bias and activation are in the kernels, the backward pass keeps its shape, and any subset of gradients comes."""
    with setup(mode) as s:
        args = arrays(s)
        f = mlp(s)
        assert [(m.op, m.bias, m.activation) for m in entwine_jax.explain(f, *args)] == [
            ("all_gather_matmul", True, "gelu"),
            ("matmul_reduce_scatter", True, "silu"),
        ]

        def loss(*args):
            return jnp.sum(jnp.sin(f(*args)))

        found = entwine_jax.explain(jax.grad(loss, (0, 1, 2)), *args)
        assert [(m.bias, m.activation) for m in found] == [(True, None)] * 2 + [(False, None)] * 2
        calls = collectives(jax.jit(jax.grad(loss, (0, 1, 2, 3, 4))).lower(*args).compile().as_text())
        assert calls.pop("all-reduce") and calls == {"entwine_all_gather_matmul": 2, "entwine_matmul_reduce_scatter": 2}
        wanted = jax.grad(lambda *args: jnp.sum(jnp.sin(plain()(*args))), (0, 1, 2, 3, 4))(*map(np.asarray, args))
        for argnums in ((3,), (2, 4)):
            got = jax.jit(jax.grad(loss, argnums))(*args)
            assert_close(got, tuple(wanted[i] for i in argnums), 2e-5)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_all_reduce_and_plain_dots(mode):
    """What is whole on every rank, and what selects no op: the same numbers, and gradients."""
    with setup(mode) as s:
        spec = P("d", None, None)
        x, w, c = s.place(
            normal((8, 6, 16), 1), normal((16, 10), 2), normal((10,), 3), specs=(P("d", None, "t"), P("t"), P())
        )
        out = spec if mode == "explicit" else NamedSharding(s.mesh, spec)
        dots = s.place(
            normal((8, 6, 16), 1), normal((16, 12), 2), normal((12,), 3), specs=(P("d"), P(None, "t"), P("t"))
        )
        for operands, options, op in (((x, w, c), {"out_sharding": out}, "matmul_all_reduce"), (dots, {}, "dot")):

            def f(x, w, b, options=options):
                return entwine_jax.collective_matmul(x, w, bias=b, activation="gelu", strategy="fused", **options)

            assert entwine_jax.explain(f, *operands)[0].op == op
            loss = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2)))  # noqa: E731
            wanted = loss(lambda x, w, b: NN["gelu"](x @ w + b))(*map(np.asarray, operands))
            assert_close(loss(f)(*operands), wanted, 2e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("dims", [(0, None, None), (None, None, 0), (None, 0, None), (0, 0, 0), (0, None, 0)], ids=str)
def test_vmap(mode, dims):
    with setup(mode) as s:
        x_spec, w_spec, b_spec = s.specs[0], s.specs[1], P("t")
        many = [normal((2, *v.shape), i) for i, v in enumerate((operands()[0], operands()[1], normal((32,), 1)))]
        args = [v[0] if d is None else v for v, d in zip(many, dims, strict=True)]
        specs = [p if d is None else P(None, *p) for p, d in zip((x_spec, w_spec, b_spec), dims, strict=True)]
        args = s.place(*args, specs=specs)

        def loss(one):
            return jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(jax.vmap(one, dims)(*a))), (0, 1, 2)))

        def ours(x, w, b):
            return entwine_jax.collective_matmul(x, w, bias=b, activation="silu", strategy="fused")

        wanted = loss(lambda x, w, b: jax.nn.silu(x @ w + b))(*map(np.asarray, args))
        assert_close(loss(ours)(*args), wanted, 2e-5)


def test_bad_input():
    x, w = np.ones((8, 6), np.float32), np.ones((6, 8), np.float32)
    for options, error, match in (
        ({"activation": "tanh"}, ValueError, r"collective_matmul: activation='tanh' is unknown"),
        ({"bias": np.ones(3, np.float32)}, TypeError, r"collective_matmul: bias has shape \(3,\)"),
        ({"bias": np.ones(8, np.int32)}, TypeError, r"collective_matmul: bias is int32 but the result float32"),
    ):
        with pytest.raises(error, match=match):
            entwine_jax.collective_matmul(x, w, **options)
