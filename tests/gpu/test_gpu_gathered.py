"""Gathered operands on GPUs: as a result of all_gather_matmul, beside the backward products, and as residuals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    AXIS,
    REDUCE_SCATTER,
    Case,
    assert_equal,
    delayed,
    exact_product,
    integers,
    mesh_of,
    per_shard,
    placed,
    put,
    relative_error,
    team_size,
    whole,
)
from jax.sharding import PartitionSpec as P

import entwine_jax

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


@functools.cache
def gathering(case, mesh, config=None):
    """(y, gathered) of global x and w; every rank's copy of what is gathered stands behind the others'."""
    x, w, y = case.specs(AXIS)
    rank = per_shard(case, return_gathered=True, config=config)
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x, w), out_specs=(y, y)))


def poison_gathered(case, mesh):
    """Frees NaNs of the gathered array's size, for the allocator to hand out next."""
    ranks = team_size(mesh)
    shape = (*case.x_shape(ranks)[:-1], case.k * ranks)
    fill = jax.jit(
        lambda: jnp.full(shape, jnp.nan, jnp.bfloat16), out_shardings=jax.NamedSharding(mesh, case.specs(AXIS)[2])
    )
    for array in [jax.block_until_ready(fill()) for _ in range(2)]:
        array.delete()


def check(case, seed, **options):
    mesh = mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, seed)
    poison_gathered(case, mesh)
    y, gathered = gathering(case, mesh, **options)(*placed(case, mesh, x, w))
    assert_equal(case, y, exact_product(case, ranks, x, w))
    for copy in np.split(whole(gathered), ranks, axis=-1):
        assert_equal(case, copy, x)


@pytest.mark.parametrize("m_shard", [1, 100, 129, 600])
@pytest.mark.parametrize("n, k", [(8, 8), (136, 4104), (520, 72)])
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_exact(m_shard, n, k, batch):
    for seed in range(3):
        check(Case(ALL_GATHER, m_shard, n, k, batch), seed)


@pytest.mark.parametrize("pushers, copiers", [(1, 1), (1, 66), (66, 1), (24, 66)])
def test_any_number_of_clusters_moves_it(pushers, copiers):
    config = entwine_jax.Config(pushers=pushers, copiers=copiers)
    for seed in range(3):
        check(Case(ALL_GATHER, 1000, 520, 1032), seed, config=config)


def test_large():
    """More bytes than the rings hold many times over, compared on the device."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    case = Case(ALL_GATHER, 8192 // ranks, 3584, 8192)
    draw = jax.jit(
        lambda key: jax.random.normal(key, case.x_shape(ranks), jnp.bfloat16),
        out_shardings=jax.NamedSharding(mesh, case.specs(AXIS)[0]),
    )
    w = put(integers(case, ranks, 1)[1], mesh, case.specs(AXIS)[1])
    everywhere = jax.jit(lambda x: jnp.tile(x, (1, ranks)), out_shardings=jax.NamedSharding(mesh, case.specs(AXIS)[2]))
    for seed in range(4):
        x = draw(jax.random.key(seed))
        _, gathered = gathering(case, mesh)(x, w)
        assert int(jnp.sum(gathered != everywhere(x))) == 0


def test_stress():
    """Launches without a pause, on changing inputs and with one rank late; each checked on the device."""
    mesh = mesh_of()
    ranks, case, kinds = team_size(mesh), Case(ALL_GATHER, 392, 520, 1032), 7
    x_spec, w_spec, y_spec = case.specs(AXIS)
    inputs = [integers(case, ranks, seed) for seed in range(kinds)]
    xs = put(np.stack([x for x, _ in inputs]), mesh, P(None, *x_spec))
    ws = put(np.stack([w for _, w in inputs]), mesh, P(None, *w_spec))
    wants = put(np.stack([exact_product(case, ranks, *pair) for pair in inputs]), mesh, P(None, *y_spec))
    rank = per_shard(case, return_gathered=True)

    def body(xs, ws, wants, rows, i, slow, steps):
        y, gathered = rank(delayed(xs[i], AXIS, slow, steps), ws[i])
        return jnp.stack([jnp.sum(y != wants[i].astype(y.dtype)), jnp.sum(gathered != rows[i])])[None]

    specs = (P(None, *x_spec), P(None, *w_spec), P(None, *y_spec), P(), P(), P(), P())
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(AXIS)))
    rows = put(np.stack([x for x, _ in inputs]), mesh, P())
    rng = np.random.default_rng(0)
    wrong = [
        run(xs, ws, wants, rows, np.int32(i % kinds), np.int32(rng.integers(ranks)), np.int32(rng.integers(2) * 100))
        for i in range(100)
    ]
    assert not np.any([whole(each) for each in wrong])


def mlp(mesh, strategy, form, policy=None):
    """The loss of a sequence-parallel SwiGLU MLP, in which up and gate share one gather."""

    def rank(x, gate, up, down):
        if form == "several":
            a, b = entwine_jax.all_gather_matmul(x, (gate, up), AXIS, strategy=strategy)
        else:
            a, rows = entwine_jax.all_gather_matmul(x, gate, AXIS, return_gathered=True, strategy=strategy)
            b = rows @ up
        h = jax.nn.silu(a) * b
        return x + entwine_jax.matmul_reduce_scatter(h, down, AXIS, strategy=strategy)

    if policy is not None:
        rank = jax.checkpoint(rank, policy=policy)
    run = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(P(None, AXIS), P(None, AXIS), P(None, AXIS), P(AXIS)),
        out_specs=P(None, AXIS),
    )
    return lambda *args: jnp.mean(jnp.square(run(*args).astype(jnp.float32)))


@pytest.mark.parametrize("form", ["rows", "several"])
@pytest.mark.parametrize("policy", ["none", "nothing", "gathered"])
def test_gradient_of_a_shared_gather(policy, form):
    policies = {
        "none": None,
        "nothing": jax.checkpoint_policies.nothing_saveable,
        "gathered": jax.checkpoint_policies.save_only_these_names("entwine_gathered"),
    }
    mesh = mesh_of()
    ranks, d, hidden = team_size(mesh), 520, 1032
    rng = np.random.default_rng(0)

    def array(shape, spec, scale=1.0):
        return put((rng.standard_normal(shape) * scale).astype(jnp.bfloat16), mesh, spec)

    args = (
        array((2, 264 * ranks, d), P(None, AXIS)),
        array((d, hidden * ranks), P(None, AXIS), d**-0.5),
        array((d, hidden * ranks), P(None, AXIS), d**-0.5),
        array((hidden * ranks, d), P(AXIS), (hidden * ranks) ** -0.5),
    )
    (ours, gradients), (theirs, wanted) = (
        jax.jit(jax.value_and_grad(mlp(mesh, strategy, form, policies[policy]), (0, 1, 2, 3)))(*args)
        for strategy in ("fused", "xla")
    )
    assert abs(float(ours) - float(theirs)) <= 1e-3 * abs(float(theirs))
    for name, got, want in zip(("x", "gate", "up", "down"), gradients, wanted, strict=True):
        assert float(relative_error(got, want)) <= 3e-2, name


@pytest.mark.parametrize("residuals", ["regather", "save"])
@pytest.mark.parametrize("op", [ALL_GATHER, REDUCE_SCATTER])
def test_the_backward_pass_has_no_other_collective(op, residuals):
    case, mesh = Case(op, 264, 520, 392), mesh_of()
    ranks = team_size(mesh)
    options = {"residuals": residuals} if op == ALL_GATHER else {}
    x_spec, w_spec, y_spec = case.specs(AXIS)
    run = jax.shard_map(per_shard(case, **options), mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec)
    x, w = placed(case, mesh, *integers(case, ranks, 1))
    gradient = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(run(x, w).astype(jnp.float32))), (0, 1)))
    text = gradient.lower(x, w).compile().as_text()
    for op_name in (ALL_GATHER, REDUCE_SCATTER):
        assert f'custom_call_target="entwine_{op_name}"' in text
    for collective in ("all-gather", "reduce-scatter", "all-reduce", "collective-permute"):
        assert f" {collective}(" not in text and f" {collective}-start(" not in text, collective
