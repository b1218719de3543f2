"""collective_matmul(residuals="save"), in each mode: x is gathered once; and what becomes of it where nothing is."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from global_view import MESHES, MODES, collectives, operands, plain_mlp, setup
from helpers import assert_close, normal
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax

GATHER, SCATTER = "entwine_all_gather_matmul", "entwine_matmul_reduce_scatter"
saves = functools.partial(entwine_jax.collective_matmul, residuals="save")


def square_sum(f):
    return lambda *args: jnp.sum(jnp.square(f(*args)))


def mlp(s, residuals, **options):
    up, down = functools.partial(s.up, residuals=residuals, **options), functools.partial(s.down, **options)
    return lambda x, w_up, w_down: x + down(jnp.sin(up(x, w_up)), w_down)


def compiled_gradient(f, argnums, args):
    """Without those of collectives that only sum weight gradients over data."""
    compiled = jax.jit(jax.value_and_grad(square_sum(f), argnums)).lower(*args).compile()
    found = collectives(compiled.as_text())
    found.pop("all-reduce", None)
    return compiled, found


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mesh", MESHES)
def test_what_is_saved_is_not_gathered_again(mode, mesh):
    if mode == "partial" and mesh in ("8", "1x8"):
        pytest.skip("no other axis that could be manual, or no gradient: test_data_axis_of_one")
    wanted = jax.value_and_grad(square_sum(plain_mlp), (0, 1, 2))(*operands())
    with setup(mode, mesh) as s:
        args = s.place(*operands())
        for residuals in ("regather", "save"):
            f = s.spread(mlp(s, residuals))
            compiled, found = compiled_gradient(f, (0, 1, 2), args)
            assert_close(compiled(*args), wanted)
            assert found == {GATHER: 2, SCATTER: 2}
            matmuls = entwine_jax.explain(jax.grad(square_sum(f), (0, 1, 2)), *args)
            beside = [(m.op, m.transpose_w) for m in matmuls if m.gathered]
            # dy of w_down comes with the product that is its dx, in either.
            again = ("matmul_reduce_scatter", True) if residuals == "regather" else ("all_gather_matmul", False)
            assert sorted(beside) == sorted([("all_gather_matmul", True), again])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_only_what_is_wanted(mode, residuals):
    """dx alone keeps nothing. For dw alone the gathered x is kept unasked where JAX knows that it is gathered; no other
    product runs."""
    x, w, _ = operands()
    with setup(mode) as s:
        specs = s.specs[:2]
        f = s.spread(functools.partial(s.up, residuals=residuals), specs, s.specs[3])
        args = s.place(x, w)
        again = {"all-gather": 1} if mode == "auto" and residuals == "regather" else {}
        for argnums, calls in ((0, {GATHER: 1, SCATTER: 1}), (1, {GATHER: 1} | again)):
            compiled, found = compiled_gradient(f, argnums, args)
            assert found == calls
            assert_close(compiled(*args), jax.value_and_grad(square_sum(jnp.matmul), argnums)(x, w))
        matmuls = entwine_jax.explain(jax.grad(square_sum(f), 0), *args)
        assert [m.gathered for m in matmuls] == [None, None]


@pytest.mark.parametrize("mode", MODES)
def test_on_xla(mode):
    """One gather less: without it the global view gathers once for each product."""
    wanted = jax.value_and_grad(square_sum(plain_mlp), (0, 1, 2))(*operands())
    with setup(mode) as s:
        args, gathers = s.place(*operands()), {}
        for residuals in ("regather", "save"):
            f = s.spread(mlp(s, residuals, strategy="xla"))
            compiled, found = compiled_gradient(f, (0, 1, 2), args)
            assert_close(compiled(*args), wanted)
            gathers[residuals] = found["all-gather"]
    # x, dy of w_down.
    assert gathers["save"] == 2 <= gathers["regather"]


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("residuals", ["regather", "save"])
@pytest.mark.parametrize("policy", ["nothing", "gathered"])
def test_remat(mode, residuals, policy):
    """Layers in a scan, each rematerialised; what a policy saves by name is saved indeed."""
    x, ups, downs = normal((4, 8, 12), 1), normal((3, 12, 16), 2) / 4, normal((3, 16, 12), 3) / 4
    policies = {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "gathered": jax.checkpoint_policies.save_only_these_names("entwine_gathered"),
    }

    def stack(layer):
        body = jax.checkpoint(lambda x, weights: (layer(x, *weights), None), policy=policies[policy])
        return lambda x, ups, downs: lax.scan(body, x, (ups, downs))[0]

    wanted = jax.value_and_grad(square_sum(stack(plain_mlp)), (0, 1, 2))(x, ups, downs)
    with setup(mode) as s:
        specs = s.specs[0], P(None, None, "t"), P(None, "t", None)
        args = s.place(x, ups, downs, specs=specs)
        compiled, found = compiled_gradient(s.spread(stack(mlp(s, residuals)), specs, s.specs[0]), (0, 1, 2), args)
        assert_close(compiled(*args), wanted)
    assert found.keys() == {GATHER, SCATTER}
    # A rank's gathered rows of two sequences, of three layers, are kept only if it is told to.
    kept = re.search(r"f32\[3,(1,)?2,8,12\]", compiled.as_text()) is not None
    assert kept == (residuals == "save" and policy == "gathered")


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("batched", ["x", "w", "both"])
@pytest.mark.parametrize("argnums", [1, (0, 1)], ids=str)
def test_vmap(mode, batched, argnums):
    x, w = normal((3, 4, 8, 12), 1), normal((3, 12, 16), 2)
    x_dim, w_dim = None if batched == "w" else 0, None if batched == "x" else 0
    x, w = x if x_dim == 0 else x[0], w if w_dim == 0 else w[0]

    def spec(dim, spec):
        return spec if dim is None else P(None, *spec)

    wanted = jax.value_and_grad(square_sum(jax.vmap(jnp.matmul, (x_dim, w_dim))), argnums)(x, w)
    with setup(mode) as s:
        specs = spec(x_dim, s.specs[0]), spec(w_dim, s.specs[1])
        rank = jax.vmap(functools.partial(s.up, residuals="save"), (x_dim, w_dim))
        args = s.place(x, w, specs=specs)
        compiled, _ = compiled_gradient(s.spread(rank, specs, P(None, *s.specs[3])), argnums, args)
        assert_close(compiled(*args), wanted)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("wanted", [(1,), (0, 1, 2)], ids=str)
def test_second_order(mode, wanted):
    def norm_of_gradient(f):
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in jax.grad(square_sum(f), wanted)(*args))

    plain = jax.grad(norm_of_gradient(plain_mlp), (0, 1, 2))(*operands())
    with setup(mode) as s:
        args = s.place(*operands())
        got = jax.jit(jax.grad(norm_of_gradient(s.spread(mlp(s, "save"))), (0, 1, 2)))(*args)
    assert_close(got, plain, 3e-5)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("argnums", [1, (0, 1)], ids=str)
def test_rows_over_data_too(mode, argnums):
    """Rows of a matrix over both axes: the team gathers its own, and the partitioner must not gather the rest."""
    x, w = normal((16, 24), 1), normal((24, 32), 2)
    wanted = jax.value_and_grad(square_sum(jnp.matmul), argnums)(x, w)
    with setup(mode) as s:
        args = s.place(x, w, specs=(P(("d", "t")), P(None, "t")))
        f = functools.partial(saves, strategy="fused")
        compiled, found = compiled_gradient(f, argnums, args)
        assert_close(compiled(*args), wanted)
    assert found == {GATHER: 1} | ({SCATTER: 1} if argnums == (0, 1) else {})


# Of "partial" XLA's CPU compiler can't add up the gradient of w, with or without us: docs/sharp_bits.md.
@pytest.mark.parametrize("mode", ["auto", "explicit", "manual"])
def test_bfloat16(mode):
    """A float32 cotangent is rounded for both gradients, as it is for what is gathered again."""
    x, w = (v.astype(jnp.bfloat16) for v in operands()[:2])
    with setup(mode) as s:

        def pull(x, w, dy, **options):
            f = s.spread(
                functools.partial(s.up, preferred_element_type=jnp.float32, **options), s.specs[:2], s.specs[3]
            )
            y, back = jax.vjp(f, x, w)
            return y, *back(dy)

        args = s.place(x, w, normal((8, 16, 32), 3), specs=(*s.specs[:2], s.specs[3]))
        saved = jax.jit(functools.partial(pull, residuals="save"))(*args)
        again = jax.jit(pull)(*args)
    assert [v.dtype for v in saved] == [jnp.float32, jnp.bfloat16, jnp.bfloat16]
    assert_close(saved, again, 0)


# What gathers nothing: where x, w and y lie.
OTHERS = {
    "matmul_reduce_scatter": (P("d", None, "t"), P("t"), P("d", "t")),
    "matmul_all_reduce": (P("d", None, "t"), P("t"), P("d")),
    "dot": (P("d"), P(None, "t"), P("d", None, "t")),
}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("op", OTHERS)
@pytest.mark.parametrize("argnums", [1, (0, 1)], ids=str)
def test_ignored_where_nothing_is_gathered(mode, op, argnums):
    """The same collectives, also of a forward pass that is compiled apart."""
    x, w, y = OTHERS[op]
    with setup(mode) as s:
        args = s.place(*operands()[:2], specs=(x, w))
        found = []
        for residuals in ("regather", "save"):
            out = y if mode == "explicit" else jax.NamedSharding(s.mesh, y)
            f = functools.partial(
                entwine_jax.collective_matmul, strategy="fused", out_sharding=out, residuals=residuals
            )
            assert [m.op for m in entwine_jax.explain(f, *args)] == [op]
            forward = jax.jit(lambda *args, f=f: jax.vjp(f, *args)).lower(*args).compile().as_text()
            found.append((compiled_gradient(f, argnums, args)[1], collectives(forward)))
        assert found[0] == found[1]
        assert_close(
            compiled_gradient(f, argnums, args)[0](*args),
            jax.value_and_grad(square_sum(jnp.matmul), argnums)(*operands()[:2]),
        )


@pytest.mark.parametrize("shape, n", [((8, 18, 24), 32), ((8, 16, 24), 30), ((3, 16, 24), 32), ((8, 0, 24), 32)])
@pytest.mark.parametrize("argnums", [1, (0, 1)], ids=str)
def test_sizes_that_do_not_divide(shape, n, argnums):
    """What is kept then lies in padded shards, or is empty."""
    x, w = normal(shape, 1), normal((24, n), 2)
    with setup("auto") as s:

        def f(x, w):
            x, w = (
                lax.with_sharding_constraint(v, jax.NamedSharding(s.mesh, spec))
                for v, spec in zip((x, w), s.specs, strict=False)
            )
            return saves(x, w, out_sharding=jax.NamedSharding(s.mesh, s.specs[3]))

        got = jax.jit(jax.value_and_grad(square_sum(f), argnums))(x, w)
    assert_close(got, jax.value_and_grad(square_sum(jnp.matmul), argnums)(x, w))


@pytest.mark.parametrize("mode", ["manual", "partial"])
def test_an_error_where_the_op_is_named(mode):
    with setup(mode) as s:
        _, _, w_down = s.place(*operands())
        message = r"entwine_jax.collective_matmul: residuals='save'.*out_sharding=.*means matmul_reduce_scatter here"
        f = s.spread(functools.partial(s.down, residuals="save"), (s.specs[3], s.specs[2]), s.specs[0])
        (hidden,) = s.place(normal((8, 16, 32), 1), specs=(s.specs[3],))
        with pytest.raises(ValueError, match=message):
            f(hidden, w_down)
        whole = functools.partial(saves, axis_name="t", out_sharding=P(None, None, None))
        with pytest.raises(ValueError, match="means matmul_all_reduce here"):
            s.spread(whole, (s.specs[3], s.specs[2]), P(s.data))(hidden, w_down)


@pytest.mark.parametrize("mode", MODES)
def test_unknown(mode):
    x, w, _ = operands()
    with setup(mode) as s:
        f = s.spread(functools.partial(s.up, residuals="keep"), s.specs[:2], s.specs[3])
        with pytest.raises(
            ValueError, match=r"collective_matmul: residuals='keep' is unknown; use one of .*'regather'"
        ):
            f(*s.place(x, w))
