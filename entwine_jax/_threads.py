"""Enough threads for XLA's CPU client, so that programs of several virtual devices can't lock each other out.

The client has one pool of threads, as many as there are CPUs or devices. A program on d devices is first *launched*, d
parts on that pool, and a launch sleeps there while 32 programs of its device are unfinished. Then it *runs*, d parts on
the same pool, one program at a time, and a part that waits for its peers, in our custom call as in XLA's own
collectives, keeps its thread. So one Python thread that dispatches on and on can put d threads to sleep in launches; if
fewer than d are left then some part of the running program gets no thread, its peers wait for it, and the launches for
them: a deadlock. With p threads that dispatch, a pool of (p + 1) d leaves d to the running program, which then ends.

Several threads that dispatch have a limit of their own, which no pool widens: a device may have 32 programs before it
that another device can't launch, because it has 32 before it that wait for the first. So they must not be 32 programs
ahead in all: then a call ends in an error, after ``ENTWINE_TIMEOUT_S``.

The pool's size is read from the environment, once, when JAX makes its CPU devices.
"""

import os

# For 7 threads that dispatch to 8 devices, or for 1 to 32. An idle thread costs next to nothing.
_ENOUGH = 64


def provide() -> None:
    """Sets ``PJRT_NPROC``, unless it is set or the machine has CPUs enough. Before the first use of a device."""
    if os.environ.get("PJRT_NPROC"):
        return
    if _pool() < _ENOUGH:
        os.environ["PJRT_NPROC"] = str(_ENOUGH)


def _pool() -> int:
    """What XLA would take: ``NPROC``, which build scripts set for reasons of their own, or the CPUs it may run on."""
    try:
        return int(os.environ["NPROC"])
    except (KeyError, ValueError):
        pass
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
