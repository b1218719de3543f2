"""Whether thousands of calls and hundreds of compilations leave memory behind, on the host and on the devices.

Memory is looked at eleven times, before and after each tenth. What leaks grows all the time, what fluctuates doesn't:
growth is what the lowest of the last three looks has over the highest of the first three. What XLA itself leaves behind
when it compiles is measured beside, on programs without our calls, and isn't ours.
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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax

LOOKS = 11
# More than that is a leak: bytes a call, bytes a compilation.
CALL_HOST, CALL_DEVICE = 128, 16
COMPILATION_HOST, COMPILATION_DEVICE = 64 << 10, 64 << 10


class Memory:
    """What this process has taken: of the host; of the devices by the driver's word and in XLA's pool."""

    def __init__(self) -> None:
        self.devices = [device for device in jax.devices() if device.platform == "gpu"]
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
    return jnp.ones((m * mesh.size, k), jnp.bfloat16), jnp.ones((k, n), jnp.bfloat16)


def program(mesh: Mesh, kind: int, strategy: str) -> Callable[..., Any]:
    """A jitted function of `operands` that nobody has compiled; of the kinds one is each op alone, and two are several
    products."""

    def rank(x: jax.Array, w: jax.Array) -> Any:
        options: dict[str, Any] = {"strategy": strategy}
        mine = x[: x.shape[0] // mesh.size]
        if kind == 0:
            y: Any = entwine_jax.all_gather_matmul(mine, w, "t", **options)
        elif kind == 1:
            y = entwine_jax.matmul_reduce_scatter(x, w, "t", **options)
        elif kind == 2:
            y = entwine_jax.matmul_all_reduce(x, w, "t", **options)
        elif kind == 3:
            y = entwine_jax.all_gather_matmul(mine, (w, w), "t", return_gathered=True, **options)
        else:
            y = entwine_jax.matmul_reduce_scatter((x, x), (w, w), "t", **options)
        return jax.tree.map(lambda v: v[None], y)

    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P("t"), check_vma=False))


KINDS = 5


def calls(mesh: Mesh, memory: Memory, count: int) -> Iterator[tuple[int, int]]:
    """Launched some at a time, as a training loop does."""
    x, w = operands(mesh, 32, 64, 64)
    programs = [program(mesh, kind, "fused") for kind in range(KINDS)]

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


def compilations(mesh: Mesh, memory: Memory, count: int, strategy: str) -> Iterator[tuple[int, int]]:
    """Each of a new function, called twice and dropped."""
    sizes = itertools.cycle(range(8, 72, 8))

    def compile_some(number: int) -> None:
        for i in range(number):
            x, w = operands(mesh, 32, 64, next(sizes))
            run = program(mesh, i % KINDS, strategy)
            run(x, w)
            jax.block_until_ready(run(x, w))
        jax.clear_caches()

    compile_some(max(count // 10, KINDS))
    yield memory.look()
    for _ in range(LOOKS - 1):
        compile_some(count // (LOOKS - 1))
        yield memory.look()


def measure(count: int, compiled: int) -> dict[str, Any]:
    mesh, memory = Mesh(np.array(jax.devices()[:2]), ("t",)), Memory()
    found: dict[str, Any] = {
        "platform": jax.devices()[0].platform,
        "devices": len(jax.devices()),
        "kind": jax.devices()[0].device_kind,
        "calls": count,
        "compilations": compiled,
    }
    start = time.monotonic()
    looks = {
        "call": [*calls(mesh, memory, count)],
        "compilation": [*compilations(mesh, memory, compiled, "fused")],
        "xla_compilation": [*compilations(mesh, memory, compiled, "xla")],
    }
    arenas = entwine_jax.memory_stats().bytes
    for name, each in looks.items():
        for where, values in zip(("host", "device"), zip(*each, strict=True), strict=True):
            number = count if name == "call" else compiled
            found[f"{where}_bytes_a_{name}"] = round(growth([*values]) / number, 1)
            found[f"{where}_looks_{name}"] = values
    found["arenas"] = arenas
    found["seconds"] = round(time.monotonic() - start, 1)
    found["leaks"] = [
        name
        for name, bound in (
            ("host_bytes_a_call", CALL_HOST),
            ("device_bytes_a_call", CALL_DEVICE),
            ("host_bytes_a_compilation", COMPILATION_HOST + found["host_bytes_a_xla_compilation"]),
            ("device_bytes_a_compilation", COMPILATION_DEVICE + found["device_bytes_a_xla_compilation"]),
        )
        if found[name] > bound
    ]
    return found


def main(arguments: argparse.Namespace) -> int:
    if arguments.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    found = measure(arguments.leak_calls, arguments.leak_compilations)
    text = json.dumps(found)
    print(text if arguments.out is None else f"leaks: {found['leaks']}, {found['seconds']} s", file=sys.stderr)
    if arguments.out is not None:
        arguments.out.write_text(text + "\n")
    return 1 if found["leaks"] else 0
