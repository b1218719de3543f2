"""Processes that share a GPU: a team of two where there is only one."""

import lockstep
import pytest
from peers import FATES, meet
from test_gpu_children import finish, start

from entwine_jax import _core

pytestmark = pytest.mark.gpu

OLDEST = (2, 30)  # that has several ranks on a GPU


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch):
    version, library, why = _core.nccl()
    assert not why, why
    if tuple(map(int, version.split(".")[:2])) < OLDEST:
        pytest.skip(f"NCCL {version} at {library} can't have two ranks on a GPU, 2.30 can")
    monkeypatch.setattr(lockstep, "count_gpus", lambda: 1)


@pytest.mark.parametrize("processes", [2, 3, 4, 8])
@pytest.mark.parametrize("strategy", ["fused", "signal"])
def test_team(processes, strategy):
    finish(*(start("distributed", strategy, **environment) for environment in lockstep.environments(processes)))


def test_two_hosts():
    finish(*(start("two_hosts", i, **environment) for i, environment in enumerate(lockstep.environments(2))))


@pytest.mark.parametrize("fate", FATES)
def test_peer_that(fate):
    outcome = meet(fate)
    assert outcome.in_time, f"{outcome}\n{outcome.output[-6000:]}"
