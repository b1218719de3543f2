"""collective_matmul in its four modes: values, gradients, and that the compiled program holds our calls and no more."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MESHES, MODES, all_reduce_sizes, collectives, operands, plain_mlp, setup, size
from helpers import assert_close, integers, normal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

CASES = [(mode, mesh) for mode in MODES for mesh in MESHES if mesh != "1x8" and (mode, mesh) != ("partial", "8")]


@pytest.mark.each_value
@pytest.mark.parametrize("mode, mesh", CASES)
def test_mlp(mode, mesh):
    """All-gather, then reduce-scatter; their gradients are each other. Only dW's data sums are XLA's own."""
    with setup(mode, mesh) as s:
        args = s.place(*operands())
        f = s.spread(s.mlp)
        forward = jax.jit(f).lower(*args).compile()
        assert collectives(forward.as_text()) == {"entwine_all_gather_matmul": 1, "entwine_matmul_reduce_scatter": 1}
        assert_close(forward(*args), plain_mlp(*operands()))

        def pull(args, dy):
            return jax.vjp(f, *args)[1](dy)

        (dy,) = s.place(normal((8, 16, 24), 4))
        backward = jax.jit(pull).lower(args, dy).compile()
        found = collectives(backward.as_text())
        assert bool(found.pop("all-reduce", 0)) == bool(s.data)
        # The forward reduce-scatter is dead: its result is used by no gradient.
        assert found == {"entwine_all_gather_matmul": 2, "entwine_matmul_reduce_scatter": 1}
        assert all_reduce_sizes(backward.as_text()) <= {size(s.mesh, s.data)}
        got = backward(args, dy)
        for v, gradient in zip(args, got, strict=True):
            assert gradient.sharding.is_equivalent_to(v.sharding, v.ndim) or mode == "partial"
    assert_close(got, jax.vjp(plain_mlp, *operands())[1](normal((8, 16, 24), 4)))


@pytest.mark.each_value
@pytest.mark.parametrize("strategy", ["fused", "xla"])
@pytest.mark.parametrize("mode", MODES)
def test_data_axis_of_one(mode, strategy):
    """Data parallelism switched off. XLA has no sum over a manual axis of one beside automatic ones: an error there."""
    with setup(mode, "1x8") as s:
        args = s.place(*operands())

        def mlp(x, w_up, w_down):
            return x + s.down(jnp.sin(s.up(x, w_up, strategy=strategy)), w_down, strategy=strategy)

        f = s.spread(mlp)
        (dy,) = s.place(normal((8, 16, 24), 4))
        if mode == "partial":
            assert_close(jax.jit(f)(*args), plain_mlp(*operands()))
            with pytest.raises(NotImplementedError, match=r"leave .'d',. out of shard_map's axis_names"):
                jax.jit(jax.grad(lambda *args: jnp.sum(f(*args)), 1)).lower(*args)
            return
        y, gradients = jax.jit(lambda args, dy: (f(*args), jax.vjp(f, *args)[1](dy)))(args, dy)
        curvature = jax.jit(jax.grad(lambda *args: jnp.sum(jax.grad(lambda *a: jnp.sum(f(*a) ** 2), 1)(*args) ** 2)))(
            *args
        )
    assert_close(y, plain_mlp(*operands()))
    assert_close(gradients, jax.vjp(plain_mlp, *operands())[1](normal((8, 16, 24), 4)))
    wanted = jax.grad(lambda *args: jnp.sum(jax.grad(lambda *a: jnp.sum(plain_mlp(*a) ** 2), 1)(*args) ** 2))(
        *operands()
    )
    assert_close(curvature, wanted)


@pytest.mark.parametrize("mode", MODES)
def test_second_gradient(mode):
    """Reverse over reverse: the backward pass is made of the same three products."""
    with setup(mode) as s:
        args = s.place(*operands(batch=2, rows=8, k=8, n=12))
        f = s.spread(s.mlp)

        def norm_of_gradient(f):
            gradient = jax.grad(lambda *args: jnp.sum(jnp.square(f(*args))), (0, 1, 2))
            return lambda *args: sum(jnp.sum(jnp.square(g)) for g in gradient(*args))

        got = jax.jit(jax.value_and_grad(norm_of_gradient(f), (0, 1, 2)))(*args)
    wanted = jax.value_and_grad(norm_of_gradient(plain_mlp), (0, 1, 2))(*operands(batch=2, rows=8, k=8, n=12))
    assert_close(got, wanted)


def test_residual_asks_for_rows():
    """Without out_sharding the residual connection does: sharding propagates backwards through the sum."""
    with setup("auto") as s:

        def f(x, w_up, w_down):
            h = entwine_jax.collective_matmul(x, w_up, strategy="fused")
            return x + entwine_jax.collective_matmul(h, w_down, strategy="fused")

        text = jax.jit(f).lower(*s.place(*operands())).compile().as_text()
        assert collectives(text) == {"entwine_all_gather_matmul": 1, "entwine_matmul_reduce_scatter": 1}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [6, 7])
def test_all_reduce(mode, rows):
    """k over t, and y not: our call in place of XLA's all-reduce, and gradients without any along t."""
    with setup(mode) as s:
        x_spec, w_spec, y_spec = P("d", None, "t"), P("t", None), P("d", None, None)
        x, w = normal((4, rows, 16), 1), normal((16, 10), 2)

        def of(strategy):
            options = {"strategy": strategy}
            if mode in ("manual", "partial"):
                options |= {"axis_name": "t", "out_sharding": P()}
            return s.spread(lambda x, w: entwine_jax.collective_matmul(x, w, **options), (x_spec, w_spec), y_spec)

        def loss(f):
            return lambda x, w: (jnp.sum(jnp.sin(f(x, w))), f(x, w))

        args = s.place(x, w, specs=(x_spec, w_spec))
        gradient = jax.jit(jax.grad(loss(of("fused")), (0, 1), has_aux=True)).lower(*args).compile()
        assert_close(gradient(*args), jax.grad(loss(jnp.matmul), (0, 1), has_aux=True)(x, w))
        text = gradient.as_text()
        # dW is summed over the data axis, by XLA.
        assert collectives(text) == {"entwine_matmul_all_reduce": 1, "all-reduce": 1} and all_reduce_sizes(text) == {2}

        for strategy, kept in (("fused", "entwine_matmul_all_reduce"), ("xla", "all-reduce"), ("auto", "all-reduce")):
            assert collectives(jax.jit(of(strategy)).lower(*args).compile().as_text()) == {kept: 1}
            (found,) = entwine_jax.explain(of(strategy), *args)
            assert (found.op, found.x, found.w, found.y) == ("matmul_all_reduce", (2, rows, 4), (4, 10), (2, rows, 10))
            assert (found.strategy, found.team_size) == ("fused" if strategy == "fused" else "xla", 4)


# x, w, y, op or None for a plain dot without any collective
SELECTIONS = [
    (P("t"), P(None, "t"), P(None, "t"), "all_gather_matmul"),
    (P(("d", "t")), P(None, "t"), P("d", "t"), "all_gather_matmul"),
    (P(("d", "t")), P(None, ("d", "t")), P(None, ("d", "t")), "all_gather_matmul"),
    (P(("t", "d")), P(None, ("t", "d")), P(None, ("t", "d")), "all_gather_matmul"),
    (P(None, "t"), P("t"), P("t"), "matmul_reduce_scatter"),
    (P("d", "t"), P("t"), P(("d", "t")), "matmul_reduce_scatter"),
    (P(None, ("t", "d")), P(("t", "d")), P(("t", "d")), "matmul_reduce_scatter"),
    (P("d"), P(), P("d"), None),
    (P("d"), P(None, "t"), P("d", "t"), None),
    (P(), P(), P(), None),
]


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("x_spec, w_spec, y_spec, op", SELECTIONS)
def test_selection(mode, x_spec, w_spec, y_spec, op):
    """Two-dimensional x, rows over more axes than the tensor one, teams of two axes."""
    x, w = integers((16, 24), 1), integers((24, 32), 2)
    with setup(mode, "2x4") as s:
        args = s.place(x, w, specs=(x_spec, w_spec))
        # Columns need nobody to ask for them.
        out = NamedSharding(s.mesh, y_spec) if op == "matmul_reduce_scatter" else None
        f = jax.jit(lambda x, w: entwine_jax.collective_matmul(x, w, out_sharding=out, strategy="fused"))
        compiled = f.lower(*args).compile()
        assert collectives(compiled.as_text()) == ({f"entwine_{op}": 1} if op else {})
        y = f(*args)
        assert y.sharding.is_equivalent_to(NamedSharding(s.mesh, y_spec), 2)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(x) @ np.asarray(w))
        (found,) = entwine_jax.explain(f, *args)
        assert found.op == (op or "dot")
        got = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(*args)
    assert_close(got, jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w))


# XLA's CPU compiler aborts on any bfloat16 psum of a partially manual shard_map, such as the data axes' sum of dW here.
@pytest.mark.parametrize("mode", ["auto", "explicit", "manual"])
def test_dtypes_bias_and_precision(mode):
    x, w, b = normal((4, 8, 16), 1, jnp.bfloat16), normal((16, 8), 2), normal((8,), 3)
    with setup(mode) as s:
        options = {"strategy": "fused", "preferred_element_type": jnp.float32, "precision": "highest"}
        if mode in ("manual", "partial"):
            options |= {"axis_name": "t", "out_sharding": P(None, None, "t")}
        specs = P("d", "t", None), P(None, "t"), P("t")

        def f(x, w, b):
            return entwine_jax.collective_matmul(x, w.astype(x.dtype), bias=b, **options)

        def loss(f):
            return lambda x, w, b: (jnp.sum(jnp.sin(f(x, w, b))), f(x, w, b))

        args = s.place(x, w, b, specs=specs)
        got = jax.jit(jax.grad(loss(s.spread(f, specs, P("d", None, "t"))), (0, 1, 2), has_aux=True))(*args)
        assert [v.dtype for v in (*got[0], got[1])] == [jnp.bfloat16, jnp.float32, jnp.float32, jnp.float32]

    def plain(x, w, b):
        return jnp.matmul(x, w.astype(x.dtype), preferred_element_type=jnp.float32) + b

    wanted = jax.grad(loss(plain), (0, 1, 2), has_aux=True)(x, w, b)
    assert_close(got[1], wanted[1])
    assert_close(got[0], wanted[0], 2e-2)


def test_eager():
    """Outside of jit, with and without an output sharding."""
    for mode in ("auto", "explicit"):
        with setup(mode) as s:
            got = jax.grad(lambda *args: jnp.sum(jnp.square(s.mlp(*args))), (0, 1, 2))(*s.place(*operands()))
        assert_close(got, jax.grad(lambda *args: jnp.sum(jnp.square(plain_mlp(*args))), (0, 1, 2))(*operands()))


def test_one_device_and_no_mesh():
    x, w, _ = operands()
    for f in (entwine_jax.collective_matmul, jax.jit(entwine_jax.collective_matmul)):
        assert_close(f(x, w), jnp.matmul(x, w))
        assert_close(jax.grad(lambda w: jnp.sum(f(x, w)))(w), jax.grad(lambda w: jnp.sum(x @ w))(w))  # noqa: B023
    (found,) = entwine_jax.explain(lambda x, w: entwine_jax.collective_matmul(x, w, strategy="fused"), x, w)
    assert found.op == "dot" and "one device" in found.reason


def test_sizes_that_do_not_divide():
    """XLA pads such shards; the padding must not get into sums."""
    with setup("auto") as s:
        sharding = [NamedSharding(s.mesh, spec) for spec in (P(None, "t"), P("t"), P("t"))]

        @jax.jit
        def f(x, w):
            x, w = (
                jax.lax.with_sharding_constraint(v * 2, place) for v, place in zip((x, w), sharding[:2], strict=True)
            )
            return entwine_jax.collective_matmul(x, w, out_sharding=sharding[2])

        x, w = integers((8, 18), 1), integers((18, 5), 2)
        np.testing.assert_array_equal(np.asarray(f(x, w)), 4 * np.asarray(x) @ np.asarray(w))
        (found,) = entwine_jax.explain(f, x, w)
        assert found.op == "dot" and "divide" in found.reason


def test_gradient_chooses_too():
    """A column-parallel product of unsharded rows needs nothing forward, and a sum backward."""
    with setup("auto") as s:
        args = s.place(*operands(), specs=(P("d"), P(None, "t")))

        def loss(x, w):
            return jnp.sum(jnp.sin(entwine_jax.collective_matmul(x, w)))

        found = entwine_jax.explain(jax.grad(loss, (0, 1)), *args)
        assert [m.op for m in found] == ["dot", "matmul_all_reduce"]
        assert found[1].transpose_w


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_fsdp(mode):
    """Weights sharded over the data axis too, gathered first: the product is fused."""
    x, w, _ = operands()
    with setup(mode) as s:
        args = s.place(x, w, specs=(s.specs[0], P("d", "t")))

        def f(x, w):
            gather = jax.sharding.reshard if mode == "explicit" else jax.lax.with_sharding_constraint
            return s.up(x, gather(w, NamedSharding(s.mesh, P(None, "t"))))

        text = jax.jit(f).lower(*args).compile().as_text()
        assert collectives(text) == {"entwine_all_gather_matmul": 1, "all-gather": 1}
        got = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)))(*args)
        # Under automatic sharding that is for the caller to ask for.
        assert mode == "auto" or got[1].sharding.is_equivalent_to(args[1].sharding, 2)
    assert_close(got, jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), (0, 1))(x, w))


def test_cotangent_that_is_whole():
    """Somebody gathers what y became. Its cotangent then comes whole, and is sliced, rather than w gathered."""
    with setup("auto") as s:
        args = s.place(*operands()[:2])

        def loss(x, w):
            y = jax.lax.with_sharding_constraint(jnp.sin(s.up(x, w)), NamedSharding(s.mesh, P()))
            return jnp.sum(jnp.square(y))

        found = entwine_jax.explain(jax.grad(loss, (0, 1)), *args)
        assert [m.op for m in found] == ["all_gather_matmul", "matmul_reduce_scatter"]
        got = jax.jit(jax.grad(loss, (0, 1)))(*args)
    assert_close(got, jax.grad(lambda x, w: jnp.sum(jnp.square(jnp.sin(x @ w))), (0, 1))(*operands()[:2]))


def test_unconstrained_dimensions():
    """out_sharding may leave dimensions to Shardy."""
    with setup("auto") as s:
        x, _, w = operands()
        args = s.place(s.up(*s.place(*operands()[:2])), w, specs=(s.specs[3], s.specs[2]))
        out = P(P.UNCONSTRAINED, "t", None)
        f = jax.jit(lambda x, w: entwine_jax.collective_matmul(x, w, out_sharding=out, strategy="fused"))
        assert f(*args).sharding.is_equivalent_to(NamedSharding(s.mesh, s.specs[0]), 3)
    assert_close(f(*args), x @ operands()[1] @ w)


def test_control_flow():
    """In both branches of a cond and in a while loop."""
    with setup("auto") as s:
        x, *weights = s.place(*operands())

        def f(x, up, down):
            def body(carry):
                i, x = carry
                return i + 1, jax.lax.cond(i % 2 == 0, lambda: s.mlp(x, up, down), lambda: x - s.mlp(x, up, down))

            return jax.lax.while_loop(lambda carry: carry[0] < 2, body, (0, x))[1]

        y = jax.jit(f)(x, *weights)
        calls = collectives(jax.jit(f).lower(x, *weights).compile().as_text())
        assert calls == {"entwine_all_gather_matmul": 2, "entwine_matmul_reduce_scatter": 2}
    once = plain_mlp(*operands())
    assert_close(y, once - plain_mlp(once, *operands()[1:]))
