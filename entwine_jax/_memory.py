"""What the teams' arenas take: `memory_stats`."""

import dataclasses

import jax

from . import _core


@dataclasses.dataclass(frozen=True)
class ArenaMemory:
    """What one rank of one team has.

    ``device`` is on GPUs the device's ordinal in this process (``jax.Device.local_hardware_id``); of a virtual CPU
    device it is the place in the mesh, since meshes whose teams lie at the same places share arenas there. ``arenas``
    are the bytes of each, in the order in which they were made: a call that fits into none makes one more.
    """

    platform: str  # "cuda" or "cpu"
    device: int
    rank: int
    ranks: int
    arenas: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return sum(self.arenas)

    @property
    def grown(self) -> int:
        """How often the team outgrew an arena."""
        return max(len(self.arenas) - 1, 0)


@dataclasses.dataclass(frozen=True)
class MemoryStats:
    """What all arenas of this process take."""

    teams: tuple[ArenaMemory, ...]  # an entry for each rank that this process has

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.teams)

    def on(self, device: jax.Device) -> int:
        """The bytes that arenas take of a GPU's memory."""
        if device.platform != "gpu":
            raise ValueError(
                f"entwine_jax.MemoryStats.on: device={device} has no memory of its own: arenas of virtual CPU devices "
                "lie in the process's; see .teams, or .bytes for all"
            )
        mine = ("cuda", device.local_hardware_id)
        return sum(each.bytes for each in self.teams if (each.platform, each.device) == mine)


def memory_stats() -> MemoryStats:
    """What the arenas of this process take now, rank by rank.

    An arena is a team's peer-mapped memory: signals, and staging for what is on its way between ranks, twice. The first
    call that fits into none makes one, with at least twice the staging of the last, and it is kept until the process
    ends, since captured CUDA graphs hold its address. `explain` tells the bytes that a call needs.

    On GPUs arenas lie outside the pool that XLA takes at start (three quarters of the memory, unless
    ``XLA_PYTHON_CLIENT_MEM_FRACTION`` says otherwise), so ``jax.Device.memory_stats()`` doesn't have them. On CPU
    devices they are the process's own memory, and after a call that was given up a team's are freed. What NCCL takes
    for itself and what `trace_tiles` keeps isn't counted.

    Returns:
      A `MemoryStats`: ``.teams``, ``.bytes`` in all, ``.on(device)`` of one GPU. In a program of several processes,
      what this one's ranks have. Nothing before a call by strategy "fused" has run.
    """
    found = [
        ArenaMemory(platform, device, rank, ranks, tuple(arenas))
        for platform, device, rank, ranks, arenas in _core.memory()
    ]
    # The host executor's come team by team, GPUs' in no order.
    found.sort(key=lambda m: (m.platform, m.ranks, m.device if m.platform == "cuda" else 0))
    return MemoryStats(tuple(found))
