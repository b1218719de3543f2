"""Gradients: exact ones of each op through the transposed kernels, and those of a two-layer MLP against XLA's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    AXIS,
    OPS,
    REDUCE_SCATTER,
    Case,
    assert_equal,
    mesh_of,
    per_shard,
    placed,
    put,
    relative_error,
    spread,
    team_size,
)
from jax.sharding import PartitionSpec as P

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


def sparse(rng, shape, terms):
    """-1, 0 and 1, so sparse that a sum of `terms` products of two of them stays within what bfloat16 holds."""
    value = rng.integers(-1, 2, shape, np.int8)
    value[rng.random(shape) > min(1.0, (2000 / terms) ** 0.5)] = 0
    return value.astype(jnp.bfloat16)


SHAPES = [(1, 8, 8), (129, 136, 4104), (100, 4104, 72), (256, 512, 256), (600, 776, 520)]


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma, m_shard, n, k", [(True, *shape) for shape in SHAPES] + [(False, *SHAPES[-1])])
def test_exact(op, check_vma, m_shard, n, k):
    case, mesh = Case(op, m_shard, n, k, (2,)), mesh_of()
    ranks = team_size(mesh)
    rng = np.random.default_rng(1)
    y_spec = case.specs(AXIS)[2]
    terms = max(case.x_shape(ranks)[-1], case.w_shape(ranks)[1], 2 * ranks * m_shard)
    x, w, dy = (sparse(rng, s(ranks), terms) for s in (case.x_shape, case.w_shape, case.y_shape))
    run = spread(case, mesh, per_shard(case), check_vma=check_vma)

    @jax.jit
    def backward(x, w, dy):
        return jax.vjp(run, x, w)[1](dy)

    dx, dw = backward(*placed(case, mesh, x, w), put(dy, mesh, y_spec))
    x, w, dy = (value.astype(np.float64) for value in (x, w, dy))
    assert_equal(case, dx, dy @ w.T)
    assert_equal(case, dw, np.einsum("bmk,bmn->kn", x, dy, optimize=True))


def mlp(mesh, strategy, check_vma):
    """The loss of a sequence-parallel two-layer MLP."""
    first, second = (per_shard(Case(op, 0, 0, 0), strategy=strategy) for op in (ALL_GATHER, REDUCE_SCATTER))
    run = jax.shard_map(
        lambda x, w1, w2: second(jax.nn.gelu(first(x, w1)), w2),
        mesh=mesh,
        in_specs=(P(None, AXIS, None), P(None, AXIS), P(AXIS, None)),
        out_specs=P(None, AXIS, None),
        check_vma=check_vma,
    )
    return lambda x, w1, w2: jnp.mean(jnp.square(run(x, w1, w2).astype(jnp.float32)))


@pytest.mark.parametrize(
    "check_vma, rows, d, hidden", [(True, 264, 520, 1032), (False, 264, 520, 1032), (True, 1024, 1024, 4096)]
)
def test_mlp(check_vma, rows, d, hidden):
    mesh = mesh_of()
    ranks = team_size(mesh)
    rng = np.random.default_rng(0)
    x = put(rng.standard_normal((2, rows * ranks, d)).astype(jnp.bfloat16), mesh, P(None, AXIS, None))
    w1 = put((rng.standard_normal((d, hidden * ranks)) * d**-0.5).astype(jnp.bfloat16), mesh, P(None, AXIS))
    w2 = put((rng.standard_normal((hidden * ranks, d)) / (hidden * ranks) ** 0.5).astype(jnp.bfloat16), mesh, P(AXIS))
    (ours, gradients), (theirs, wanted) = (
        jax.jit(jax.value_and_grad(mlp(mesh, strategy, check_vma), (0, 1, 2)))(x, w1, w2)
        for strategy in ("fused", "xla")
    )
    assert abs(float(ours) - float(theirs)) <= 1e-3 * abs(float(theirs))
    # Each gradient passes four roundings to bfloat16 on each side.
    for name, got, want in zip(("x", "w1", "w2"), gradients, wanted, strict=True):
        assert float(relative_error(got, want)) <= 1.5e-2, name
