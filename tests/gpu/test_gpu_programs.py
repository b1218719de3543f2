"""Calls in company: back to back, interleaved, independent, donated, ever larger."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scenarios
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    OPS,
    REDUCE_SCATTER,
    Case,
    assert_equal,
    exact_product,
    integers,
    mesh_of,
    per_shard,
    placed,
    poison,
    put,
    spread,
    team_size,
)

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


@pytest.mark.parametrize("op", OPS)
def test_bitwise_repeatable(op):
    scenarios.stress(op)


def test_interleaved_executables():
    scenarios.interleaved()


def test_independent_calls():
    scenarios.independent()


def test_chained_calls():
    scenarios.chained()


def test_growing_shapes():
    scenarios.growing()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("donated", [(0,), (1,), (0, 1)], ids=str)
@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_donated_arguments(op, donated):
    """Results as before, and the memory of the arguments is free to become a result's."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    # x, w and y of one size, so that their memory can change roles.
    case = Case(op, 264, 264 * ranks, 264 * ranks)
    run = jax.jit(spread(case, mesh, per_shard(case)), donate_argnums=donated)
    poison(case, mesh)
    for seed in range(6):
        x, w = integers(case, ranks, seed)
        assert_equal(case, run(*placed(case, mesh, x, w)), exact_product(case, ranks, x, w))


@pytest.mark.parametrize("op", OPS)
def test_donated_carry(op):
    """A result that is written where a donated argument lay, which the call itself reads."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    case = Case(op, 136, 256 * (ranks if op == REDUCE_SCATTER else 1), 256)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    call = per_shard(case)

    def body(x, w, y):
        return call(jnp.sign(x + y.max()), w)

    run = jax.jit(
        jax.shard_map(body, mesh=mesh, in_specs=(x_spec, w_spec, y_spec), out_specs=y_spec), donate_argnums=(2,)
    )
    x, w = integers(case, ranks, 0)
    ones = np.ones(case.y_shape(ranks), jnp.bfloat16)
    y, want = put(ones, mesh, y_spec), ones.astype(np.float64)
    on_mesh = put(x, mesh, x_spec), put(w, mesh, w_spec)
    for _ in range(4):
        y = run(*on_mesh, y)
        # y.max() is a rank's own.
        slices = [want] * ranks if op == ALL_REDUCE else np.split(want, ranks, axis=-1 if op == ALL_GATHER else -2)
        parts = np.split(x.astype(np.float64), ranks, axis=-2 if op == ALL_GATHER else -1)
        moved = [np.sign(part + piece.max()) for part, piece in zip(parts, slices, strict=True)]
        want = exact_product(case, ranks, np.concatenate(moved, axis=-2 if op == ALL_GATHER else -1), w)
    assert_equal(case, y, want)
