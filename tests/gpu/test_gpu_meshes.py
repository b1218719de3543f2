"""Meshes: permuted devices, several axes, several teams, a part of the devices."""

import jax
import numpy as np
import pytest
from harness import AXIS, OPS, Case, assert_equal, exact_product, integers, mesh_of, placed, program, team_size
from jax.sharding import Mesh

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


def check(mesh, axis=AXIS, **options):
    """Every team of the mesh computes the same here, replicated over the mesh's other axes."""
    ranks = team_size(mesh, axis)
    for seed, op in enumerate(OPS):
        case = Case(op, 136, 520, 264)
        x, w = integers(case, ranks, seed)
        y = program(case, mesh, axis, **options)(*placed(case, mesh, x, w, axis))
        want = exact_product(case, ranks, x, w)
        assert_equal(case, y, want)
        for shard in y.addressable_shards:
            assert_equal(case, shard.data, want[shard.index])


def test_reversed():
    check(mesh_of(jax.devices()[::-1]))


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)])
@pytest.mark.parametrize("axis", ["a", "b", ("a", "b"), ("b", "a")], ids=str)
def test_two_axes(shape, axis):
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(shape), ("a", "b"))
    # For a team of one the op is a plain dot.
    check(mesh, axis, strategy="fused" if team_size(mesh, axis) > 1 else "auto")


@pytest.mark.multigpu(4)
@pytest.mark.parametrize("axis", ["a", "b", ("b", "a")], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 0, 3, 1)], ids=str)
def test_teams(axis, order):
    devices = np.array(jax.devices()[:4])[list(order)]
    check(Mesh(devices.reshape(2, 2), ("a", "b")), axis)


@pytest.mark.parametrize("ranks", [pytest.param(n, marks=pytest.mark.multigpu(n)) for n in range(3, 9)])
def test_team_sizes(ranks):
    check(mesh_of(jax.devices()[:ranks]))
