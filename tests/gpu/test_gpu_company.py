"""Our ops beside XLA's own collectives, callbacks, other programs, other meshes.

Threads, graphs, a foreign kernel and other backends need processes of their own: test_gpu_children.py.
"""

import company
import jax
import numpy as np
import pytest
from harness import AXIS, mesh_of
from jax.sharding import Mesh

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


def test_gradients_are_summed_meanwhile():
    """By asynchronous collectives: there are calls of ours between their starts and their ends."""
    scheduled = company.beside_collectives(mesh_of())
    assert company.overlaps(scheduled), scheduled[-6000:]


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
