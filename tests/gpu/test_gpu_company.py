"""Our ops beside XLA's own collectives, callbacks, other programs, other meshes.

Threads, graphs, a foreign kernel and other backends need processes of their own: test_gpu_children.py.
"""

import company
import jax
import numpy as np
import pytest
from harness import ALL_GATHER, AXIS, Case, integers, mesh_of, placed, program, team_size
from jax.sharding import Mesh

import entwine_jax

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


def test_gradients_are_summed_meanwhile():
    company.beside_collectives(mesh_of())


@pytest.mark.multigpu(4)
@pytest.mark.parametrize("gradients", ["d", ("d", AXIS)], ids=str)
def test_gradients_of_several_teams(gradients):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("d", AXIS))
    company.beside_collectives(mesh, gradients)


@pytest.mark.parametrize("ours_first", [True, False])
def test_beside_other_programs(ours_first):
    company.beside_programs(mesh_of(), ours_first)


def test_host_callbacks():
    company.host_callbacks(mesh_of())


def test_clear_caches():
    company.cleared_caches(mesh_of())


def test_several_meshes():
    company.several_meshes([(mesh_of(), AXIS), (mesh_of(jax.devices()[::-1]), AXIS)])


@pytest.mark.multigpu(4)
def test_several_teams():
    devices = np.array(jax.devices()[:4])
    company.several_meshes(
        [
            (Mesh(devices, (AXIS,)), AXIS),
            (Mesh(devices.reshape(2, 2), ("d", AXIS)), AXIS),
            (Mesh(devices[[2, 0, 3, 1]].reshape(2, 2), (AXIS, "d")), AXIS),
        ]
    )


def test_memory_stats():
    """A call that outgrows the arenas adds one to each device of its team, outside of XLA's pool."""
    mesh = mesh_of()
    for rows in (64, 3000, 20000):
        case = Case(ALL_GATHER, rows, 264, 264)
        run = program(case, mesh)
        x, w = placed(case, mesh, *integers(case, team_size(mesh), 1))
        (call,) = entwine_jax.explain(run, x, w)
        before = entwine_jax.memory_stats()
        run(x, w).block_until_ready()
        after = entwine_jax.memory_stats()
        for device in mesh.local_devices:
            mine = [m for m in after.teams if (m.platform, m.device) == ("cuda", device.local_hardware_id)]
            assert max(max(m.arenas) for m in mine if m.ranks == mesh.size) >= call.arena_bytes
            assert after.on(device) == sum(m.bytes for m in mine) >= before.on(device)
    assert any(m.grown for m in after.teams if m.platform == "cuda")
