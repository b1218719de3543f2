"""transpose_w: w stored (n, k), read as it lies; its gradient lies so too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, setup
from helpers import (
    OPS,
    PUBLIC,
    assert_close,
    assert_gradients,
    assert_vmapped,
    fused,
    in_lax,
    integers,
    mesh_of,
    normal,
    product,
    specs,
)
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

GATHER, SCATTER, REDUCE = OPS


def ours(op, x, w, axis, **options):
    return fused(op, x, w, axis, transpose_w=True, **options)


def lines(op, x, w, axis):
    return in_lax(op, x, w.T, axis)


def spread(rank, op, mesh, leading=(), check_vma=True):
    x, w, y = specs(op, leading=leading)
    return jax.shard_map(
        functools.partial(rank, op, axis="t"), mesh=mesh, in_specs=(x, P(*w[::-1])), out_specs=y, check_vma=check_vma
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_exact(op, ranks):
    for rows, k, n in ((1, 3, 1), (33, 7, 40), (70, 5, 33)):
        x, w = integers((2, rows * ranks, k * ranks), 1), integers((n * ranks, k * ranks), 2)
        y = jax.jit(spread(ours, op, mesh_of((ranks,)), (None,)))(x, w)
        np.testing.assert_array_equal(np.asarray(y), product(x, w.T))


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", ["fused", "xla"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(op, strategy, check_vma):
    mesh, x, w = mesh_of((2, 4), ("d", "t")), normal((2, 8, 12), 1), normal((16, 12), 2)

    def loss(rank):
        f = spread(rank, op, mesh, ("d",), check_vma)
        return lambda x, w: jnp.sum(jnp.sin(f(x, w)))

    rank = functools.partial(ours, strategy=strategy)
    # Under "xla" the rest is JAX's own.
    assert_gradients(loss(rank), loss(lines), x, w, every=strategy != "xla")


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dim, w_dim", [(0, None), (None, 2), (0, 1)])
def test_vmap(op, x_dim, w_dim):
    x, w = normal((3, 8, 6), 1), normal((3, 10, 6), 2)
    x_spec, w_spec, y_spec = specs(op)
    assert_vmapped(op, ours, lines, (x, w), (x_dim, w_dim), (x_spec, P(*w_spec[::-1]), y_spec))


@pytest.mark.parametrize("check_vma", [True, False])
def test_several_weights_and_the_gathered_x(check_vma):
    x, a, b, c = normal((8, 6), 1), normal((10, 6), 2), normal((10, 6), 3), normal((10,), 4)

    def rank(x, a, b, c):
        (h, u), rows = entwine_jax.all_gather_matmul(
            x,
            (a, b),
            "t",
            transpose_w=True,
            bias=(c, None),
            activation=("silu", None),
            return_gathered=True,
            strategy="fused",
        )
        return h * u, rows @ b.T

    def rank_in_lax(x, a, b, c):
        rows = lax.all_gather(x, "t", axis=0, tiled=True)
        return jax.nn.silu(rows @ a.T + c) * (rows @ b.T), rows @ b.T

    def loss(rank):
        f = jax.shard_map(rank, mesh=mesh_of((2,)), in_specs=P("t"), out_specs=P(None, "t"), check_vma=check_vma)
        return lambda *args: sum(jnp.sum(jnp.sin(v)) for v in f(*args))

    got, wanted = (jax.jit(jax.value_and_grad(loss(r), (0, 1, 2, 3)))(x, a, b, c) for r in (rank, rank_in_lax))
    assert_close(got, wanted)


@pytest.mark.parametrize("op", OPS)
def test_explain_and_no_copy(op):
    f = spread(ours, op, mesh_of((2,)))
    x, w = normal((8, 12), 1), normal((16, 12), 2)
    (found,) = entwine_jax.explain(f, x, w)
    assert found.transpose_w and found.op == op and ".T" in repr(entwine_jax.explain(f, x, w))
    assert "stablehlo.transpose" not in jax.jit(f).lower(x, w).as_text()


@pytest.mark.parametrize("op", OPS)
def test_bad_input(op):
    x, w = np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)

    def call(w, transpose_w):
        jax.shard_map(
            lambda x, w: PUBLIC[op](x, w, "t", transpose_w=transpose_w),
            mesh=mesh_of((2,)),
            in_specs=P(),
            out_specs=P("t"),
        )(x, w)

    for args, match in (
        (
            (w, True),
            r"last dimension of x \(4, 6\) has size 6 but the last of w \(6, 8\) has size 8.*without transpose_w",
        ),
        ((w.T, False), r"but the first of w \(8, 6\) has size 8.*transpose would fit: pass transpose_w=True"),
        ((w[None], True), r"w has shape \(1, 6, 8\) but must be a matrix \(n, k\)"),
    ):
        with pytest.raises(TypeError, match=rf"entwine_jax.{op}: .*{match}"):
            call(*args)


def tied(s, **options):
    """An embedding table (n, k) as the last layer, and a layer back: all-gather and reduce-scatter."""

    def f(x, table, back, b):
        h = s.up(x, table, transpose_w=True, bias=b, activation="relu", **options)
        return s.down(h, back, transpose_w=True, **options)

    rows, up, down, _ = s.specs
    return s.spread(f, in_specs=(rows, P(*up[::-1]), P(*down[::-1]), P("t")))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_global_view(mode, residuals):
    with setup(mode) as s:
        rows, up, down, _ = s.specs
        args = s.place(
            normal((8, 16, 24), 1),
            normal((32, 24), 2) / 5,
            normal((24, 32), 3) / 5,
            normal((32,), 4),
            specs=(rows, P(*up[::-1]), P(*down[::-1]), P("t")),
        )
        f = tied(s, **({"residuals": residuals} if residuals == "save" and mode in ("auto", "explicit") else {}))
        assert [(m.op, m.transpose_w, m.bias) for m in entwine_jax.explain(f, *args)] == [
            (GATHER, True, True),
            (SCATTER, True, False),
        ]

        def loss(f):
            return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3)))

        wanted = loss(lambda x, table, back, b: jax.nn.relu(x @ table.T + b) @ back.T)(*map(np.asarray, args))
        assert_close(loss(f)(*args), wanted, 2e-5)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_global_view_of_other_products(mode):
    """An all-reduce, and a plain dot."""
    with setup(mode) as s:
        x, w = normal((8, 6, 16), 1), normal((10, 16), 2)
        spec = P("d", None, None)
        out = spec if mode == "explicit" else NamedSharding(s.mesh, spec)
        for places, options, op in (
            ((P("d", None, "t"), P(None, "t")), {"out_sharding": out}, REDUCE),
            ((P("d"), P()), {}, "dot"),
        ):
            operands = s.place(x, w, specs=places)
            f = functools.partial(entwine_jax.collective_matmul, transpose_w=True, strategy="fused", **options)
            assert entwine_jax.explain(f, *operands)[0].op == op
            loss = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1)))  # noqa: E731
            assert_close(loss(f)(*operands), loss(lambda x, w: x @ w.T)(x, w), 2e-5)
