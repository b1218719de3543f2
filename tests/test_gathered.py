"""Gathered operands: as a result of all_gather_matmul, beside the backward products, and as residuals."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import collectives
from helpers import assert_close, fused, in_lax, integers, mesh_of, normal, product, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _config, _differentiable, _strategy, _team

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
OPS = (GATHER, SCATTER)


def gathering(x, w, axis="t", **options):
    return entwine_jax.all_gather_matmul(x, w, axis, return_gathered=True, **{"strategy": "fused", **options})


def in_lax_gathering(x, w, axis="t"):
    rows = lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
    return rows @ w, rows


def pair(rank, mesh, leading=(), check_vma=True):
    """A rank's (y, gathered) of global x and w: every rank's copy of what is gathered, side by side."""
    x, y, w = P(*leading, "t", None), P(*leading, None, "t"), P(None, "t")
    return jax.shard_map(rank, mesh=mesh, in_specs=(x, w), out_specs=(y, y), check_vma=check_vma)


def check_pair(got, x, w, ranks):
    np.testing.assert_array_equal(np.asarray(got[0]), product(x, w))
    copies = np.split(np.asarray(got[1]), ranks, axis=-1)
    for copy in copies:
        np.testing.assert_array_equal(copy, np.asarray(x))


@pytest.mark.parametrize("ranks", range(2, 9))
def test_every_rank_has_every_row(ranks):
    for rows, batch in ((1, ()), (37, (2,)), (70, ())):
        x, w = integers((*batch, rows * ranks, 12), ranks), integers((12, 5 * ranks), 2)
        got = jax.jit(pair(gathering, mesh_of((ranks,)), leading=(None,) * len(batch)))(x, w)
        check_pair(got, x, w, ranks)


@pytest.mark.parametrize("strategy", ["fused", "xla", "auto"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_strategies_and_dtypes(strategy, dtype):
    for ranks in (1, 4):
        x, w = integers((2, 8 * ranks, 12), 1, dtype), integers((12, 4 * ranks), 2, dtype)
        rank = functools.partial(gathering, strategy=strategy, preferred_element_type=jnp.float32)
        y, rows = pair(rank, mesh_of((2, ranks), ("d", "t")), leading=("d",))(x, w)
        assert (y.dtype, rows.dtype) == (jnp.float32, dtype)
        check_pair((y, rows.astype(jnp.float32)), x.astype(jnp.float32), w.astype(jnp.float32), ranks)


@pytest.mark.parametrize("workers", [1, 3])
def test_stalls(workers):
    for seed in range(6):
        config = Config(
            workers=workers, stall_us=300, stall_seed=seed, pushers=1 + seed % 3, copiers=1 + seed % 2, tile_m=16
        )
        f = jax.jit(pair(functools.partial(gathering, config=config), mesh_of((4,))))
        inputs = [(integers((4 * 40, 16), i), integers((16, 4 * 36), i + 9)) for i in range(4)]
        for got, (x, w) in [(f(x, w), (x, w)) for x, w in inputs]:
            check_pair(got, x, w, 4)


def beside(z, y, w, config=None):
    """reduce_scatter(y @ w.T), and all of z gathered beside it: what the backward pass of all_gather_matmul does."""
    settings = _config.resolve(SCATTER, "fused", config)
    request = _strategy.Request(SCATTER, _team.resolve(SCATTER, "t"), True, y.dtype, None, settings, gathers=True)
    return _differentiable.run(request, y, w, z)


def beside_all(mesh, **options):
    return jax.shard_map(
        functools.partial(beside, **options),
        mesh=mesh,
        in_specs=(P(None, "t"), P(None, None, "t"), P(None, "t")),
        out_specs=(P(None, "t"), P(None, None, "t")),
    )


def check_beside(got, z, y, w, ranks):
    np.testing.assert_array_equal(np.asarray(got[0]), product(y, w.T))
    for copy in np.split(np.asarray(got[1]), ranks, axis=-1):
        np.testing.assert_array_equal(copy, np.asarray(z))


@pytest.mark.each_value
@pytest.mark.parametrize("ranks", range(2, 9))
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_reduce_scatter_gathers_beside(ranks, transport):
    """An array of any other shape and type; the two kinds of signals and staging don't meet."""
    for rows, z_shape, z_type in (
        (3, (1, 1, 1), jnp.int8),
        (40, (3, 37, 5), jnp.bfloat16),
        (5, (1, 90, 3), jnp.float32),
    ):
        for seed in range(2):
            y, w = integers((2, rows * ranks, 6 * ranks), seed), integers((33, 6 * ranks), seed + 5)
            z = integers((z_shape[0], z_shape[1] * ranks, z_shape[2]), seed + 9, z_type, -9, 9)
            config = Config(workers=1 + 2 * seed, transport=transport, stall_us=100, stall_seed=seed, lead=seed)
            check_beside(jax.jit(beside_all(mesh_of((ranks,)), config=config))(z, y, w), z, y, w, ranks)


def test_beside_after_other_calls_of_the_team():
    """Calls with and without it share an arena: words of partials in one call are words of rows in another."""
    mesh, ranks = mesh_of((3,)), 3
    plain, with_rows = jax.jit(spread(fused, SCATTER, mesh)), jax.jit(beside_all(mesh))
    gathers = jax.jit(pair(gathering, mesh))
    for seed in range(12):
        rows, cols = (40, 70)[seed % 2], (9, 100)[seed // 2 % 2]
        x, w = integers((rows * ranks, 12), seed), integers((12, cols), seed + 1)
        z, y, v = integers((2, 50 * ranks, 7), seed), integers((2, rows * ranks, 12), seed), integers((cols, 12), seed)
        first, second, third = plain(x, w), with_rows(z, y, v), gathers(x, integers((12, 12), seed))
        np.testing.assert_array_equal(np.asarray(first), product(x, w))
        check_beside(second, z, y, v, ranks)
        check_pair(third, x, integers((12, 12), seed), ranks)


@pytest.mark.parametrize(
    "y_dim, w_dim, z_batched",
    [(y, w, z) for y, w in ((0, None), (None, 1), (1, 0)) for z in (True, False)] + [(None, None, True)],
)
def test_vmap_of_a_gather_beside(y_dim, w_dim, z_batched):
    many, ranks = 3, 2
    y, w, z = integers((many, 2, 4, 6), 1), integers((many, 5, 6), 2), integers((many, 1, 8, 3), 3)
    y = y[0] if y_dim is None else jnp.moveaxis(y, 0, y_dim)
    w = w[0] if w_dim is None else jnp.moveaxis(w, 0, w_dim)
    z, z_dim = (z, 0) if z_batched else (z[0], None)

    def rank(z, y, w):
        return jax.vmap(beside, (z_dim, y_dim, w_dim))(z, y, w)

    def spec(dim, spec):
        return spec if dim is None else P(*spec[:dim], None, *spec[dim:])

    got = jax.jit(
        jax.shard_map(
            rank,
            mesh=mesh_of((ranks,)),
            in_specs=(
                spec(z_dim, P(None, "t", None)),
                spec(y_dim, P(None, None, "t")),
                spec(w_dim, P(None, "t")),
            ),
            out_specs=(P(None, None, "t"), P(None, None, None, "t")),
        )
    )(z, y, w)
    wanted = jax.vmap(lambda y, w: y @ w.T, (y_dim, w_dim), axis_size=many)(y, w)
    np.testing.assert_array_equal(np.asarray(got[0]), np.asarray(wanted))
    for copy in np.split(np.asarray(got[1]), ranks, axis=-1):
        np.testing.assert_array_equal(copy, np.asarray(jnp.broadcast_to(z, (many, *z.shape[-3:]))))


@pytest.mark.parametrize("x_dim, w_dim", [(0, None), (None, 1), (1, 0)])
def test_vmap_with_gathered(x_dim, w_dim):
    many = 3
    x, w = normal((many, 8, 6), 1), normal((many, 6, 4), 2)
    x = x[0] if x_dim is None else jnp.moveaxis(x, 0, x_dim)
    w = w[0] if w_dim is None else jnp.moveaxis(w, 0, w_dim)

    def spec(dim, spec):
        return spec if dim is None else P(*spec[:dim], None, *spec[dim:])

    def loss(matmul):
        f = jax.shard_map(
            lambda x, w: jax.vmap(matmul, (x_dim, w_dim))(x, w),
            mesh=mesh_of((2,)),
            in_specs=(spec(x_dim, P("t", None)), spec(w_dim, P(None, "t"))),
            out_specs=(P(None, None, "t"), P(None, None, "t")),
        )
        return lambda x, w: sum(jnp.sum(jnp.sin(v)) for v in f(x, w))

    got, wanted = (jax.jit(jax.value_and_grad(loss(m), (0, 1)))(x, w) for m in (gathering, in_lax_gathering))
    assert_close(got, wanted)


def swiglu(gathers, mesh, check_vma=True, **options):
    """Gate and up with one gather, and the gradient through what was gathered."""

    def rank(x, gate, up, down):
        a, rows = gathers(x, gate, **options)
        h = jax.nn.silu(a) * (rows @ up)
        if gathers is in_lax_gathering:
            return in_lax(SCATTER, h, down, "t")
        return entwine_jax.matmul_reduce_scatter(h, down, "t", strategy="fused")

    f = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(P("d", "t"), P(None, "t"), P(None, "t"), P("t")),
        out_specs=P("d", "t"),
        check_vma=check_vma,
    )
    return lambda *args: jnp.sum(jnp.square(f(*args)))


def swiglu_operands():
    return normal((2, 16, 12), 1), normal((12, 24), 2) / 4, normal((12, 24), 3) / 4, normal((24, 12), 4) / 4


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_gradient_of_what_is_gathered(check_vma, residuals):
    mesh, args = mesh_of((2, 4), ("d", "t")), swiglu_operands()
    wanted = jax.jit(jax.value_and_grad(swiglu(in_lax_gathering, mesh, check_vma), (0, 1, 2, 3)))(*args)
    got = jax.jit(jax.value_and_grad(swiglu(gathering, mesh, check_vma, residuals=residuals), (0, 1, 2, 3)))(*args)
    assert_close(got, wanted)
    on_xla = swiglu(functools.partial(gathering, strategy="xla"), mesh, check_vma, residuals=residuals)
    assert_close(jax.jit(jax.value_and_grad(on_xla, (0, 1, 2, 3)))(*args), wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_second_gradient_of_what_is_gathered(check_vma):
    mesh, args = mesh_of((1, 4), ("d", "t")), swiglu_operands()

    def norm_of_gradient(loss):
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in jax.grad(loss, (0, 1, 2, 3))(*args))

    got, wanted = (
        jax.jit(jax.grad(norm_of_gradient(swiglu(m, mesh, check_vma)), (0, 1, 2, 3)))(*args)
        for m in (gathering, in_lax_gathering)
    )
    assert_close(got, wanted, 3e-5)


def several(x, gate, up, down, strategy="fused", **options):
    a, b = entwine_jax.all_gather_matmul(x, (gate, up), "t", strategy=strategy, **options)
    return entwine_jax.matmul_reduce_scatter(jax.nn.silu(a) * b, down, "t", strategy=strategy)


def several_in_lax(x, gate, up, down):
    rows = lax.all_gather(x, "t", axis=x.ndim - 2, tiled=True)
    return in_lax(SCATTER, jax.nn.silu(rows @ gate) * (rows @ up), down, "t")


def spread_several(rank, mesh, check_vma=True):
    specs = (P("d", "t"), P(None, "t"), P(None, "t"), P("t"))
    return jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=P("d", "t"), check_vma=check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("strategy", ["fused", "xla"])
def test_several_weights(check_vma, strategy):
    """One gather forward; backward dx is one reduce-scatter, and nothing else travels."""
    mesh, args, dy = mesh_of((2, 4), ("d", "t")), swiglu_operands(), normal((2, 16, 12), 7)

    def pull(rank):
        f = spread_several(rank, mesh, check_vma)
        return lambda *args: (f(*args), jax.vjp(f, *args)[1](dy))

    compiled = jax.jit(pull(functools.partial(several, strategy=strategy))).lower(*args).compile()
    assert_close(compiled(*args), jax.jit(pull(several_in_lax))(*args))
    found = collectives(compiled.as_text())
    found.pop("all-reduce")  # weight gradients over d
    if strategy == "fused":
        # x, dy of w_down; the result, dx of gate and up together.
        assert found == {f"entwine_{GATHER}": 2, f"entwine_{SCATTER}": 2}
    else:
        assert not any(name.startswith("entwine") for name in found)


def test_several_weights_again():
    """Gradients of gradients, and eagerly; several dtypes; one weight; the gathered x as well."""
    mesh, args = mesh_of((2, 4), ("d", "t")), swiglu_operands()

    def norm_of_gradient(rank):
        loss = lambda *args: jnp.sum(jnp.square(spread_several(rank, mesh)(*args)))  # noqa: E731
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in jax.grad(loss, (0, 1, 2, 3))(*args))

    got, wanted = (jax.jit(jax.grad(norm_of_gradient(rank), (0, 1, 2, 3)))(*args) for rank in (several, several_in_lax))
    assert_close(got, wanted, 3e-5)
    assert_close(spread_several(several, mesh)(*args), spread_several(several_in_lax, mesh)(*args))

    def dtypes(x, w):
        ys, rows = gathering(x, (w, w.astype(jnp.float32), w), preferred_element_type=jnp.float32)
        (only,) = entwine_jax.all_gather_matmul(x, [w], "t", strategy="fused")
        return *ys, rows, only

    x, w = integers((8, 6), 1, jnp.bfloat16), integers((6, 8), 2, jnp.bfloat16)
    f = jax.shard_map(dtypes, mesh=mesh_of((2,)), in_specs=(P("t"), P(None, "t")), out_specs=(P(None, "t"),) * 5)
    *ys, rows, only = jax.jit(f)(x, w)
    assert [v.dtype for v in (*ys, rows, only)] == [jnp.float32] * 4 + [jnp.bfloat16]
    for y in (*ys, only):
        np.testing.assert_array_equal(np.asarray(y, np.float64), product(x, w))
    with pytest.raises(TypeError, match="w=\\(\\) is empty"):
        jax.shard_map(
            lambda x: entwine_jax.all_gather_matmul(x, (), "t"), mesh=mesh_of((2,)), in_specs=P("t"), out_specs=P("t")
        )(x)


def gradient_text(rank, op, argnums, **options):
    f = spread(rank, op, mesh_of((4,)), **options)
    x, w = normal((16, 12), 1), normal((12, 24), 2)
    if op == SCATTER:
        x, w = normal((16, 24), 1), normal((24, 12), 2)
    compiled = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), argnums)).lower(x, w).compile()
    return collectives(compiled.as_text())


def test_the_backward_pass_has_no_other_collective():
    """Each weight gradient is a plain dot of what its neighbour has gathered; and what nobody wants costs nothing."""
    calls = {f"entwine_{op}": 1 for op in OPS}
    for op in OPS:
        for check_vma in (True, False):
            assert gradient_text(fused, op, (0, 1), check_vma=check_vma) == calls
        assert gradient_text(fused, op, 0) == calls
    # Without dx there is nothing to hide behind: x is kept as it was gathered forward, dy is gathered by XLA.
    assert gradient_text(fused, GATHER, 1) == {f"entwine_{GATHER}": 1}
    assert gradient_text(fused, SCATTER, 1) == {f"entwine_{SCATTER}": 1, "all-gather": 1}


def test_what_is_saved_is_not_gathered_again():
    def rank(op, x, w, axis, **options):
        return fused(op, x, w, axis, **options)

    saving = functools.partial(rank, residuals="save")
    calls = {f"entwine_{op}": 1 for op in OPS}
    assert gradient_text(saving, GATHER, (0, 1)) == calls
    # And dx alone needs nothing saved, dw alone no product.
    assert gradient_text(saving, GATHER, 0) == calls
    assert gradient_text(saving, GATHER, 1) == {f"entwine_{GATHER}": 1}

    def gathered(residuals):
        f = spread(functools.partial(rank, residuals=residuals), GATHER, mesh_of((4,)))
        found = entwine_jax.explain(
            jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1)), normal((16, 12), 1), normal((12, 24), 2)
        )
        return [m.gathered for m in found]

    assert gathered("regather") == [None, (1, 16, 12)]
    assert gathered("save") == [(1, 16, 12), None]


def test_an_unused_gathered_array_has_no_gradient():
    """No reduce-scatter of zeros."""

    def rank(op, x, w, axis):
        return gathering(x, w, axis)[0]

    assert gradient_text(rank, GATHER, (0, 1)) == {f"entwine_{op}": 1 for op in OPS}


def test_only_what_is_gathered_is_used():
    mesh, x, w = mesh_of((4,)), normal((8, 6), 1), normal((6, 4), 2)
    got, wanted = (
        jax.jit(jax.grad(lambda x, w, m=m: jnp.sum(jnp.sin(pair(m, mesh)(x, w)[1])), (0, 1)))(x, w)
        for m in (gathering, in_lax_gathering)
    )
    assert_close(got, wanted)


@pytest.mark.parametrize("residuals", ["regather", "save"])
@pytest.mark.parametrize("policy", ["nothing", "gathered"])
def test_remat(residuals, policy):
    """Layers in a scan, each rematerialised; what a policy saves by name is saved indeed."""
    mesh, x = mesh_of((4,)), normal((8, 12), 1)
    layers = normal((3, 12, 16), 2) / 4, normal((3, 16, 12), 3) / 4
    policies = {
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "gathered": jax.checkpoint_policies.save_only_these_names("entwine_gathered"),
    }

    def loss(gather, scatter):
        @functools.partial(jax.checkpoint, policy=policies[policy])
        def layer(x, weights):
            return x + scatter(SCATTER, jnp.tanh(gather(GATHER, x, weights[0], "t")), weights[1], "t"), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(layer, x, layers)[0],
            mesh=mesh,
            in_specs=(P("t"), (P(None, None, "t"), P(None, "t"))),
            out_specs=P("t"),
        )
        return lambda x, layers: jnp.sum(jnp.square(f(x, layers)))

    ours = loss(functools.partial(fused, residuals=residuals), fused)
    compiled = jax.jit(jax.value_and_grad(ours, (0, 1))).lower(x, layers).compile()
    assert_close(compiled(x, layers), jax.jit(jax.value_and_grad(loss(in_lax, in_lax), (0, 1)))(x, layers))
    text = compiled.as_text()
    assert "all-gather" not in collectives(text)
    # The scan keeps the gathered rows of its three layers, 8 x 12 on every rank, only if it is told to.
    saved = re.search(r"f32\[3,1,8,12\]", text) is not None
    assert saved == (residuals == "save" and policy == "gathered")


def test_donation():
    mesh = mesh_of((2,))
    f = jax.jit(pair(gathering, mesh), donate_argnums=0)
    for seed in range(3):
        x, w = integers((8, 8), seed), integers((8, 8), seed + 1)
        given = jax.device_put(jnp.array(x), jax.NamedSharding(mesh, P("t", None)))
        check_pair(f(given, w), x, w, 2)


def test_bad_residuals():
    with pytest.raises(ValueError, match=r"all_gather_matmul: residuals='keep' is unknown; use one of .*'regather'"):
        entwine_jax.all_gather_matmul(np.ones((2, 2)), np.ones((2, 2)), "t", residuals="keep")
