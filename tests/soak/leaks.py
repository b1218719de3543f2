"""Whether thousands of calls and hundreds of compilations leave memory behind, on the host and on the devices.

Memory is looked at eleven times, before and after each tenth. What leaks grows all the time, what fluctuates doesn't:
growth is what the lowest of the last three looks has over the highest of the first three. What XLA itself leaves behind
when it compiles and when it launches is measured beside, on programs without our calls, and isn't ours.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.harness import put
from gpu.lockstep import join
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax

LOOKS = 11
# What is no leak yet: bytes for each call or compilation, and for all of them what allocators take at once.
BOUNDS = {"host_call": 128, "device_call": 16, "host_compilation": 32 << 10, "device_compilation": 32 << 10}
AT_ONCE = {"host": 1 << 20, "device": 4 << 20}


class Memory:
    """What this process has taken: of the host; of the devices by the driver's word and in XLA's pool."""

    def __init__(self) -> None:
        self.devices = [device for device in jax.local_devices() if device.platform == "gpu"]
        self.libc = ctypes.CDLL("libc.so.6")
        if self.devices:
            self.cuda = ctypes.CDLL("libcuda.so.1")

    def look(self) -> tuple[int, int]:
        gc.collect()
        self.libc.malloc_trim(0)
        pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE"), sum(self._taken(device) for device in self.devices)

    def _taken(self, device: jax.Device) -> int:
        handle, context = ctypes.c_int(), ctypes.c_void_p()
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        for name, arguments in (
            ("cuDeviceGet", (ctypes.byref(handle), device.local_hardware_id)),
            ("cuDevicePrimaryCtxRetain", (ctypes.byref(context), handle)),
            ("cuCtxPushCurrent_v2", (context,)),
            ("cuMemGetInfo_v2", (ctypes.byref(free), ctypes.byref(total))),
            ("cuCtxPopCurrent_v2", (ctypes.byref(context),)),
            ("cuDevicePrimaryCtxRelease_v2", (handle,)),
        ):
            code = getattr(self.cuda, name)(*arguments)
            if code != 0:
                raise RuntimeError(f"{name} returned {code}")
        return total.value - free.value + device.memory_stats()["bytes_in_use"]


def growth(looks: list[int]) -> int:
    """What was added from the first look to the last, by the robust measure above."""
    least = min(looks[-3:]) - max(looks[:3])
    return max(0, least * (len(looks) - 1) // (len(looks) - 5))


def operands(mesh: Mesh, m: int, n: int, k: int) -> tuple[jax.Array, jax.Array]:
    """x and w, alike on all ranks, so that any op takes them."""
    x, w = np.ones((m * mesh.size, k), jnp.bfloat16), np.ones((k, n), jnp.bfloat16)
    return put(x, mesh, P()), put(w, mesh, P())


def program(mesh: Mesh, kind: int) -> Callable[..., Any]:
    """A jitted function of `operands` that nobody has compiled: each op alone, two of several products."""

    def rank(x: jax.Array, w: jax.Array) -> Any:
        options: dict[str, Any] = {"axis_name": "t", "strategy": "fused"}
        if kind == 0:
            y: Any = entwine_jax.all_gather_matmul(x, w, **options)
        elif kind == 1:
            y = entwine_jax.matmul_reduce_scatter(x, w, **options)
        elif kind == 2:
            y = entwine_jax.matmul_all_reduce(x, w, **options)
        elif kind == 3:
            y = entwine_jax.all_gather_matmul(x, (w, w), return_gathered=True, **options)
        else:
            y = entwine_jax.matmul_reduce_scatter((x, x), (w, w), **options)
        return jax.tree.map(lambda v: v[None], y)

    x = P("t") if kind in (0, 3) else P()
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x, P()), out_specs=P("t"), check_vma=False))


def without_us(mesh: Mesh, kind: int) -> Callable[..., Any]:
    """As `program`, with a collective of XLA's own."""

    def rank(x: jax.Array, w: jax.Array) -> Any:
        return lax.psum((x, w)[kind % 2], "t")

    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P()))


KINDS = 5


def calls(mesh: Mesh, memory: Memory, count: int, make: Callable[..., Any]) -> Iterator[tuple[int, int]]:
    """Launched some at a time, as a training loop does."""
    x, w = operands(mesh, 32, 64, 64)
    programs = [make(mesh, kind) for kind in range(KINDS)]

    def launch(number: int) -> None:
        for i in range(number):
            y = programs[i % KINDS](x, w)
            if i % 25 == 24:
                jax.block_until_ready(y)
        jax.block_until_ready(y)

    launch(max(count // 5, 10 * KINDS))  # pools and caches fill up
    yield memory.look()
    for _ in range(LOOKS - 1):
        launch(count // (LOOKS - 1))
        yield memory.look()


def compilations(mesh: Mesh, memory: Memory, count: int, make: Callable[..., Any]) -> Iterator[tuple[int, int]]:
    """Each of a new function, called twice and dropped."""
    sizes = itertools.cycle(range(8, 72, 8))

    def compile_some(number: int) -> None:
        for i in range(number):
            x, w = operands(mesh, 32, 64, next(sizes))
            run = make(mesh, i % KINDS)
            run(x, w)
            jax.block_until_ready(run(x, w))
        jax.clear_caches()

    compile_some(max(count // 10, KINDS))
    yield memory.look()
    for _ in range(LOOKS - 1):
        compile_some(count // (LOOKS - 1))
        yield memory.look()


def measure(launches: int, compiled: int) -> dict[str, Any]:
    """Multiples of ten."""
    mesh, memory, start = Mesh(np.array(jax.devices()[:2]), ("t",)), Memory(), time.monotonic()
    others, other_launches = max(compiled // 40, 1) * 10, max(launches // 20, 1) * 10  # XLA's own
    looks = {
        "call": (launches, [*calls(mesh, memory, launches, program)]),
        "xla_call": (other_launches, [*calls(mesh, memory, other_launches, without_us)]),
        "compilation": (compiled, [*compilations(mesh, memory, compiled, program)]),
        "xla_compilation": (others, [*compilations(mesh, memory, others, without_us)]),
    }
    return {
        "platform": jax.devices()[0].platform,
        "devices": len(jax.devices()),
        "kind": jax.devices()[0].device_kind,
        "arena_bytes": entwine_jax.memory_stats().bytes,
        "seconds": round(time.monotonic() - start, 1),
        **judged(looks),
    }


def judged(looks: dict[str, tuple[int, list[tuple[int, int]]]]) -> dict[str, Any]:
    """Of so many calls and compilations, and the memory at each look: what each left behind, and which leak."""
    found: dict[str, Any] = {"calls": looks["call"][0], "compilations": looks["compilation"][0], "leaks": []}
    left: dict[str, float] = {}
    for name, (number, each) in looks.items():
        for where, values in zip(AT_ONCE, zip(*each, strict=True), strict=True):
            left[f"{where}_{name}"] = growth([*values]) / number
    for name, bound in BOUNDS.items():
        where, what = name.split("_")
        found[f"{where}_bytes_a_{what}"] = round(left[name], 1)
        if left[name] > bound + left[f"{where}_xla_{what}"] + AT_ONCE[where] / looks[what][0]:
            found["leaks"].append(name)
    for what in ("call", "compilation"):
        found[f"bytes_a_{what}_of_xla"] = {where: round(left[f"{where}_xla_{what}"], 1) for where in AT_ONCE}
    return found | {"looks": {name: each for name, (_, each) in looks.items()}}


def main(arguments: argparse.Namespace) -> int:
    if arguments.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    join()
    found = measure(arguments.leak_calls, arguments.leak_compilations)
    if jax.process_index() > 0:
        return 0
    text = json.dumps(found)
    if arguments.out is None:
        print(text)
    else:
        arguments.out.write_text(text + "\n")
    words = {name: value for name, value in found.items() if name != "looks"}
    print(f"leaks: {words}", file=sys.stderr)
    return 1 if found["leaks"] else 0
