"""`memory_stats`: what arenas take, as they are made, grow, and are dropped after a failure."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, fused, integers, mesh_of, product, spread

import entwine_jax
from entwine_jax import Config


def of_teams(ranks):
    """Of the teams of this size on CPU devices, {places: arenas}."""
    teams = [each for each in entwine_jax.memory_stats().teams if (each.platform, each.ranks) == ("cpu", ranks)]
    return {tuple(m.device for m in teams[i : i + ranks]): teams[i : i + ranks] for i in range(0, len(teams), ranks)}


def run(op, mesh, m, axis="t", leading=(), batch=()):
    size = mesh.shape[axis]
    x, w = integers((*batch, size * m, 2 * size), m), integers((2 * size, 4 * size), m + 1)
    y = jax.jit(spread(fused, op, mesh, axis, leading))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))
    (call,) = entwine_jax.explain(spread(fused, op, mesh, axis, leading), x, w)
    return call.arena_bytes


@pytest.mark.parametrize("op", OPS)
def test_arenas_as_they_grow(op):
    """A team of seven is nobody else's here; what is there already another op has left."""
    mesh = mesh_of((7,))
    place = tuple(range(7))
    before = of_teams(7)[place][0] if place in of_teams(7) else None
    for m in (1, 40, 40, 9000 * (1 + OPS.index(op)), 2):
        needed = run(op, mesh, m)
        now = of_teams(7)[place]
        assert [each.rank for each in now] == [*range(7)]
        assert all(each.arenas == now[0].arenas and each.bytes == sum(each.arenas) for each in now)
        # One that fits, each larger than the one before it.
        assert max(now[0].arenas) >= needed
        assert list(now[0].arenas) == sorted({*now[0].arenas})
        assert now[0].grown == len(now[0].arenas) - 1
        if before is not None:
            assert now[0].arenas[: len(before.arenas)] == before.arenas
        before = now[0]
    assert before.grown >= 1


def test_several_teams_and_meshes():
    """Each team of a mesh has its own, meshes whose teams lie at the same places share them."""
    run(OPS[0], mesh_of((2, 3), ("d", "t")), 5, leading=("d",), batch=(2,))
    teams = of_teams(3)
    assert {(0, 1, 2), (3, 4, 5)} <= teams.keys()
    run(OPS[1], mesh_of((2, 3), ("d", "t"), [5, 4, 3, 1, 0, 2]), 5, leading=("d",), batch=(2,))
    assert of_teams(3) == teams
    run(OPS[1], mesh_of((3, 2), ("t", "d")), 5, leading=("d",), batch=(2,))
    assert {(0, 2, 4), (1, 3, 5)} <= of_teams(3).keys()
    total = entwine_jax.memory_stats()
    assert total.bytes == sum(each.bytes for each in total.teams) > 0


def test_after_a_failure():
    """Ranks disagree on what their arenas hold then: all of the team's are dropped, and the next call has new ones."""
    mesh, place = mesh_of((5,)), tuple(range(5))
    run(OPS[0], mesh, 5000)
    assert of_teams(5)[place][0].bytes > 0

    def rank(op, x, w, axis):
        def call():
            return fused(op, x, w, axis, config=Config(timeout_s=0.2))

        y = jax.eval_shape(call)
        return jax.lax.cond(jax.lax.axis_index(axis) == 2, lambda: jnp.zeros(y.shape, y.dtype), call)

    with pytest.raises(jax.errors.JaxRuntimeError, match="rank 2"):
        jax.jit(spread(rank, OPS[0], mesh, check_vma=False))(jnp.ones((10, 8)), jnp.ones((8, 10))).block_until_ready()
    assert of_teams(5)[place][0].bytes == 0
    run(OPS[0], mesh, 1)
    assert of_teams(5)[place][0].grown == 0 < of_teams(5)[place][0].bytes


def test_cpu_devices_have_no_memory_of_their_own():
    with pytest.raises(ValueError, match=r"MemoryStats\.on: device=.* has no memory of its own"):
        entwine_jax.memory_stats().on(jax.devices("cpu")[0])


def test_nothing_before_the_first_call():
    assert entwine_jax.MemoryStats(()).bytes == 0
