"""JAX's transformations around and inside: remat, scan, cond, vmap, donation, several calls in one program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, fused, in_lax, integers, mesh_of, normal, product, specs, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax


@pytest.mark.parametrize("check_vma", [True, False])
def test_remat_and_scan(check_vma):
    """Eight layers in a scan, each rematerialised in the backward pass."""
    mesh, x = mesh_of((4,)), normal((8, 12), 1)
    layers = normal((6, 12, 16), 2) * 0.3, normal((6, 16, 12), 3) * 0.3

    def loss(matmul):
        @jax.checkpoint
        def layer(x, weights):
            h = jnp.tanh(matmul("all_gather_matmul", x, weights[0], "t"))
            return x + matmul("matmul_reduce_scatter", h, weights[1], "t"), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(layer, x, layers)[0],
            mesh=mesh,
            in_specs=(P("t"), (P(None, None, "t"), P(None, "t"))),
            out_specs=P("t"),
            check_vma=check_vma,
        )
        return lambda x, layers: jnp.sum(jnp.square(f(x, layers)))

    got, wanted = (jax.jit(jax.value_and_grad(loss(m), (0, 1)))(x, layers) for m in (fused, in_lax))
    assert_close(got, wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_remat_and_scan_of_all_reduce(check_vma):
    mesh, x = mesh_of((4,)), normal((7, 12), 1)
    layers = normal((6, 12, 16), 2) * 0.3, normal((6, 16, 12), 3) * 0.3

    def loss(matmul):
        @jax.checkpoint
        def layer(x, weights):
            return x + matmul("matmul_all_reduce", jnp.tanh(x @ weights[0]), weights[1], "t"), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(layer, x, layers)[0],
            mesh=mesh,
            in_specs=(P(), (P(None, None, "t"), P(None, "t"))),
            out_specs=P(),
            check_vma=check_vma,
        )
        return lambda x, layers: jnp.sum(jnp.square(f(x, layers)))

    got, wanted = (jax.jit(jax.value_and_grad(loss(m), (0, 1)))(x, layers) for m in (fused, in_lax))
    assert_close(got, wanted)


def test_the_gathered_operand_has_a_name():
    """A policy may save what was gathered on XLA, rather than gather it again in the backward pass."""

    def gathers(policy):
        def rank(x, w):
            return jax.checkpoint(
                lambda x, w: jnp.tanh(entwine_jax.all_gather_matmul(x, w, "t", strategy="xla")), policy=policy
            )(x, w)

        f = jax.shard_map(rank, mesh=mesh_of((4,)), in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t"))
        gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.square(f(x, w))), (0, 1)))
        return gradient.lower(normal((8, 12), 1), normal((12, 16), 2)).as_text().count("stablehlo.all_gather")

    assert gathers(None) == 2
    assert gathers(jax.checkpoint_policies.save_only_these_names("entwine_gathered")) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dim, w_dim", [(0, None), (2, None), (None, 0), (None, 2), (0, 0), (1, 2)])
def test_vmap(op, x_dim, w_dim):
    """Inside shard_map, with gradients: over x, over w, over both."""
    mesh, many = mesh_of((2,)), 3
    x, w = normal((4, 8, 6), 1)[:many], normal((4, 6, 10), 2)[:many]
    x, w = (v[0] if dim is None else jnp.moveaxis(v, 0, dim) for v, dim in ((x, x_dim), (w, w_dim)))

    def spec(dim, wanted):
        return wanted if dim is None else P(*wanted[:dim], None, *wanted[dim:])

    x_spec, w_spec, y_spec = specs(op)

    def loss(matmul):
        rank = jax.vmap(lambda x, w: matmul(op, x, w, "t"), (x_dim, w_dim))
        f = jax.shard_map(
            rank, mesh=mesh, in_specs=(spec(x_dim, x_spec), spec(w_dim, w_spec)), out_specs=spec(0, y_spec)
        )
        return lambda x, w: (jnp.sum(jnp.sin(f(x, w))), f(x, w))

    got, wanted = (jax.jit(jax.grad(loss(m), (0, 1), has_aux=True))(x, w) for m in (fused, in_lax))
    assert_close(got, wanted)


def test_vmap_around_shard_map():
    x, w = integers((3, 8, 12), 1), integers((3, 12, 4), 2)
    for op in OPS:
        f = spread(fused, op, mesh_of((4,)))
        np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(f, (0, None)))(x, w[0])), product(x, w[0]))
        np.testing.assert_array_equal(np.asarray(jax.jit(jax.vmap(f))(x, w)), product(x, w))


def test_nested_vmap():
    x, w = integers((2, 3, 8, 6), 1), integers((5, 6, 4), 2)
    for op in OPS:
        f = spread(fused, op, mesh_of((2,)))
        both = jax.vmap(jax.vmap(f, (None, 0)), (0, None))
        got = jax.jit(jax.vmap(both, (1, None)))(x, w)  # (3, 2, 5, 8, 4)
        np.testing.assert_array_equal(np.asarray(got), product(x.swapaxes(0, 1)[:, :, None], w))


def test_cond_and_while():
    """Control flow that all ranks take alike."""
    mesh, x, w = mesh_of((2,)), integers((8, 6), 1), integers((6, 6), 2, low=0, high=1)

    def rank(times, x, w):
        def body(carry):
            i, x = carry
            y = fused("all_gather_matmul", x, w, "t")
            return i + 1, lax.cond(i % 2 == 0, lambda: y[:4], lambda: y[4:])

        return lax.while_loop(lambda carry: carry[0] < times, body, (0, x))[1]

    f = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(P(), P("t"), P()), out_specs=P("t"), check_vma=False))
    wanted = np.asarray(x, np.float64)
    for i in range(3):
        half = (wanted @ np.asarray(w))[4 * (i % 2) :][:4]
        wanted = np.concatenate([half, half])
    np.testing.assert_array_equal(np.asarray(f(3, x, w)), wanted)


def test_independent_calls_in_one_program():
    """Nothing orders them: XLA may run them in any order, on each device in another."""
    mesh = mesh_of((2, 4), ("d", "t"))
    pairs = [(integers((4, 32, 8), seed), integers((8, 12 + 4 * seed), 50 + seed)) for seed in range(6)]

    def rank(pairs):
        return [fused(OPS[i % 3], x, w, "t") for i, (x, w) in enumerate(pairs)]

    every = [specs(OPS[i % 3], leading=("d",)) for i in range(len(pairs))]
    f = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=([s[:2] for s in every],), out_specs=[s[2] for s in every]))
    for _ in range(5):
        for y, (x, w) in zip(f(pairs), pairs, strict=True):
            np.testing.assert_array_equal(np.asarray(y), product(x, w))


def test_both_axes_of_a_mesh_are_teams():
    mesh, x, w = mesh_of((2, 4), ("a", "b")), integers((16, 8), 1), integers((8, 12), 2)

    def rank(x, w):
        return fused("all_gather_matmul", x, w, "a"), fused("matmul_reduce_scatter", x, w, "b")

    def lax_rank(x, w):
        return in_lax("all_gather_matmul", x, w, "a"), in_lax("matmul_reduce_scatter", x, w, "b")

    got, wanted = (
        jax.jit(jax.shard_map(r, mesh=mesh, in_specs=P(), out_specs=P(("a", "b"))))(x, w) for r in (rank, lax_rank)
    )
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_executables_interleaved():
    """Of different shapes, over the same devices: they share arenas and epochs."""
    mesh = mesh_of((4,))
    small, large, odd = (jax.jit(spread(fused, op, mesh)) for op in OPS)
    outputs = []
    for seed in range(20):
        a = integers((8, 8), seed), integers((8, 12), seed + 40)
        b = integers((144, 16), seed), integers((16, 72), seed + 40)
        c = integers((77, 16), seed), integers((16, 40), seed + 40)
        outputs += [(small(*a), a), (large(*b), b), (odd(*c), c)]
    for y, (x, w) in outputs:
        np.testing.assert_array_equal(np.asarray(y), product(x, w))


def test_donation():
    mesh = mesh_of((2,))
    for op in OPS:
        f = jax.jit(spread(fused, op, mesh), donate_argnums=0)
        x_spec = jax.NamedSharding(mesh, specs(op)[0])
        for seed in range(3):
            x, w = integers((8, 8), seed), integers((8, 8), seed + 1)
            wanted = product(x, w)
            y = f(jax.device_put(x, x_spec), w)
            np.testing.assert_array_equal(np.asarray(y), wanted)


def test_nested_shard_map():
    """The outer one makes the data axis manual, the inner one the team's."""
    mesh, x, w = mesh_of((2, 4), ("d", "t")), integers((2, 8, 12), 1), integers((12, 12), 2)
    for op in OPS:
        x_spec, w_spec, y_spec = specs(op, leading=(None,))
        inner = jax.shard_map(
            functools.partial(fused, op, axis="t"), in_specs=(x_spec, w_spec), out_specs=y_spec, axis_names={"t"}
        )
        outer = jax.shard_map(inner, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d"), axis_names={"d"})
        np.testing.assert_array_equal(np.asarray(jax.jit(outer)(x, w)), product(x, w))


def test_explicit_mesh():
    """jax.make_mesh's default axis types; inside shard_map all are manual."""
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    x, w = integers((2, 8, 12), 1), integers((12, 12), 2)
    for op in OPS:
        x_spec, w_spec, _ = specs(op, leading=("d",))
        with jax.set_mesh(mesh):
            f = jax.jit(jax.grad(lambda x, w, op=op: spread(fused, op, mesh, leading=("d",))(x, w).sum(), (0, 1)))
            dx, dw = f(jax.device_put(x, x_spec), jax.device_put(w, w_spec))
        np.testing.assert_array_equal(np.asarray(dx), product(np.ones((2, 8, 12)), w.T))
        np.testing.assert_array_equal(np.asarray(dw), product(x.reshape(-1, 12).T, np.ones((16, 12))))


def test_mesh_from_context():
    mesh, x, w = mesh_of((4,)), integers((8, 12), 1), integers((12, 12), 2)
    for op in OPS:
        x_spec, w_spec, y_spec = specs(op)
        with jax.set_mesh(mesh):
            f = jax.shard_map(functools.partial(fused, op, axis="t"), in_specs=(x_spec, w_spec), out_specs=y_spec)
            np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w)), product(x, w))
