"""The Flax layers on GPUs: our kernels in them, and the values and gradients of XLA's path with the same parameters."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import ALL_GATHER, AXIS, REDUCE_SCATTER, mesh_of, team_size, whole
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", minversion="0.12", reason="needs Flax")

from flax import linen, nnx

import entwine_jax.flax as ours

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

BATCH, ROWS, WIDTH, HIDDEN = 2, 192, 256, 512  # rows and hidden columns of one rank
KERNELS = (f"entwine_{ALL_GATHER}", f"entwine_{REDUCE_SCATTER}")


class Mlp(nnx.Module):
    def __init__(self, hidden, strategy, rngs):
        options = {"axis_name": AXIS, "strategy": strategy, "rngs": rngs}
        types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        self.up = ours.ColumnParallelLinear(WIDTH, hidden, **options, **types)
        self.down = ours.RowParallelLinear(hidden, WIDTH, **options, **types)

    def __call__(self, x):
        return x + self.down(jnp.tanh(self.up(x)))


class LinenMlp(linen.Module):
    hidden: int
    strategy: str

    @linen.compact
    def __call__(self, x):
        options = {"axis_name": AXIS, "strategy": self.strategy}
        types = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}
        h = jnp.tanh(ours.ColumnParallelDense(self.hidden, **options, **types)(x))
        return x + ours.RowParallelDense(WIDTH, **options, **types)(h)


def operand(mesh):
    x = np.random.default_rng(0).standard_normal((BATCH, team_size(mesh) * ROWS, WIDTH)).astype(jnp.bfloat16)
    return jax.device_put(x, NamedSharding(mesh, P(None, AXIS, None)))


def assert_near(ours, theirs):
    for got, wanted in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        got, wanted = whole(got).astype(np.float64), whole(wanted).astype(np.float64)
        assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted)


def loss(y):
    return jnp.mean(jnp.square(y.astype(jnp.float32)))


def test_nnx():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        x, results = operand(mesh), {}
        for strategy in ("fused", "xla"):
            model = nnx.jit(lambda strategy=strategy: Mlp(team_size(mesh) * HIDDEN, strategy, nnx.Rngs(0)))()
            graphdef, state = nnx.split(model)

            def run(state, x, graphdef=graphdef):
                return loss(nnx.merge(graphdef, state)(x))

            step = jax.jit(jax.value_and_grad(run, (0, 1)))
            if strategy == "fused":
                text = step.lower(state, x).compile().as_text()
                assert all(kernel in text for kernel in KERNELS)
            results[strategy] = jax.tree.leaves(step(state, x))
    assert_near(results["fused"], results["xla"])


def test_linen():
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        x, results = operand(mesh), {}
        for strategy in ("fused", "xla"):
            model = LinenMlp(team_size(mesh) * HIDDEN, strategy)
            params = linen.meta.unbox(jax.jit(model.init)(jax.random.key(0), x))
            step = jax.jit(jax.value_and_grad(lambda params, x, model=model: loss(model.apply(params, x)), (0, 1)))
            if strategy == "fused":
                text = step.lower(params, x).compile().as_text()
                assert all(kernel in text for kernel in KERNELS)
            results[strategy] = jax.tree.leaves(step(params, x))
    assert_near(results["fused"], results["xla"])
