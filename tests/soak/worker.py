"""The process that launches: rounds of a few programs each, launched by turns in random order without waiting.

A round is its seed: the programs, their inputs, the order of launches and every delay follow from it. What happens goes
to stdout as lines of JSON, for the supervisor (supervisor.py), which outlives what may happen here.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import faulthandler
import functools
import itertools
import json
import math
import os
import random
import re
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.lockstep import join, shared
from gpu.spinner import Spinner
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _core
from soak import draw
from soak.absent import absent
from soak.program import WS, XS, Built

IN_FLIGHT = 24
# What becomes of a wait past its bound: on CPU an error of ours, on GPUs a kernel that ends itself.
GAVE_UP = re.compile("waited|LAUNCH_FAILED|launch failure|ILLEGAL_INSTRUCTION|illegal instruction")
DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


# What every process of several says for itself.
BY_EACH = ("wrong", "hung", "error", "done")


def emit(event: str, **facts: Any) -> None:
    if event in BY_EACH or jax.process_index() == 0:
        print(json.dumps({"event": event, **facts}), flush=True)


def machine(timeout_s: float) -> draw.Machine:
    gpu = jax.default_backend() == "gpu"
    if len(jax.devices()) < 2:
        raise SystemExit("the soak test needs two devices: --platform cpu has eight virtual ones")
    small = (8, 8), (7, 5), (16, 64), (128, 128)
    calls = itertools.product((2, 4), (False, True))
    pairs = [(a, b) for a in DTYPES for b in DTYPES]
    return draw.Machine(
        platform="gpu" if gpu else "cpu",
        devices=len(jax.devices()),
        types=tuple(pair for pair in pairs if takes(*pair)),
        tiles={(out, gated): _core.sm90_tiles(out_bytes=out, gated=gated) if gpu else small for out, gated in calls},
        few_rows=_core.FEW_ROWS_MOST if gpu else 0,
        timeout_s=timeout_s,
    )


def takes(dtype: str, result: str) -> bool:
    """Whether strategy "fused" runs all ops with these dtypes here."""
    mesh = Mesh(np.array(jax.devices()[:2]), ("t",))
    float8 = dtype.startswith("float8")
    x = jax.ShapeDtypeStruct((64, 64), dtype)
    w = jax.ShapeDtypeStruct((64, 64), "float8_e4m3fn" if float8 else dtype)

    def rank(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        options: dict[str, Any] = {"strategy": "fused", "preferred_element_type": jnp.dtype(result)}
        if float8:
            options["scales"] = (jnp.float32(1), jnp.float32(1))
        return [getattr(entwine_jax, op)(x, w, "t", **options).sum()[None] for op in draw.OPS]

    try:
        jax.eval_shape(jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P("t"), check_vma=False), x, w)
    except (NotImplementedError, TypeError):
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Launch:
    number: int
    which: int
    wrong: jax.Array


@functools.cache
def spinners() -> list[Spinner]:
    """On all GPUs of this process."""
    return [Spinner(device.local_hardware_id) for device in jax.local_devices()]


class Round:
    """Everything that a seed stands for, run once."""

    def __init__(self, seed: int, on: draw.Machine, programs: int, launches: int, end: float) -> None:
        self.seed, self.rng, self.launches, self.on, self.end = seed, random.Random(seed), launches, on, end
        self.drawn = [self.draw() for _ in range(programs)]
        self.built: list[Built | None] = []
        self.failed, self.late, self.stalled = False, 0, 0
        self.spinners = spinners() if on.platform == "gpu" else []

    def draw(self) -> draw.Program:
        """For all devices, where each has a process of its own that must take part."""
        while True:
            program = draw.program(self.on, self.rng)
            if jax.process_count() == 1 or len(program.order) == self.on.devices:
                return program

    def run(self) -> None:
        emit("round", seed=self.seed)
        for i, program in enumerate(self.drawn):
            self.built.append(self.build(program, i))
        ready = [i for i, built in enumerate(self.built) if built is not None]
        calls = collections.Counter(c.op for i in ready for c in self.drawn[i].calls)
        emit("programs", seed=self.seed, programs=len(ready), calls=calls)
        # Compiled and loaded one by one: a GPU can't load a program while kernels wait for one that is to be launched.
        for i in ready:
            self.check(self.launch(-1, i))
            self.tell(1)
            if self.failed:
                return
        flying: collections.deque[Launch] = collections.deque()
        done, told = 0, time.monotonic()
        for number in range(self.launches if ready else 0):
            flying.append(self.launch(number, self.rng.choice(ready)))
            last = number == self.launches - 1 or time.monotonic() > self.end
            while flying and (len(flying) > IN_FLIGHT or last):
                self.check(flying.popleft())
                done += 1
                if self.failed:
                    return
                if time.monotonic() - told > 1:
                    self.tell(done)
                    done, told = 0, time.monotonic()
            if last:
                break
        self.tell(done)

    def tell(self, launches: int) -> None:
        emit("launched", launches=launches, late=self.late, stalled=self.stalled)
        self.late = self.stalled = 0

    def build(self, program: draw.Program, i: int) -> Built | None:
        try:
            return Built(program, self.seed * 100 + i)
        except Exception as error:
            self.report("error", i, 0, f"{type(error).__name__}: {error}")
            return None

    def launch(self, number: int, which: int) -> Launch:
        built = self.built[which]
        assert built is not None
        rng, late = self.rng, self.rng.random() < 0.4
        steps = rng.randint(1, 200 if self.on.platform == "gpu" else 4000) if late else 0
        slow = rng.randrange(self.drawn[which].ranks)
        self.late += late
        self.stalled += self.stall(which)
        return Launch(number, which, built.launch(rng.randrange(XS), rng.randrange(WS), slow, steps))

    def stall(self, which: int) -> bool:
        """Whether some of the launch's CTAs are stalled: on CPU all workers are, at random; on a GPU now and then a
        foreign kernel has multiprocessors for itself."""
        if not self.spinners:
            return any(dict(call.config)["stall_us"] > 0 for call in self.drawn[which].calls)
        if self.rng.random() > 0.05:
            return False
        spinner = self.rng.choice(self.spinners)
        spinner.start(self.rng.uniform(1e-3, 2e-2), self.rng.randint(1, spinner.multiprocessors))
        return True

    def check(self, launch: Launch) -> None:
        try:
            wrong = {shard.index[0].start or 0: np.asarray(shard.data)[0] for shard in launch.wrong.addressable_shards}
        except Exception as error:
            kind = "hung" if GAVE_UP.search(str(error)) else "error"
            self.report(kind, launch.which, launch.number, f"{type(error).__name__}: {error}")
            self.failed = True
            return
        for device, result in [(i, j) for i, results in sorted(wrong.items()) for j in np.flatnonzero(results[:, 0])]:
            count, first, got, want = map(int, wrong[device][result])
            detail = f"device {device}, result {result}: {count} wrong, the first is number {first}: {got}, not {want}"
            self.report("wrong", launch.which, launch.number, detail)
            break

    def report(self, kind: str, which: int, number: int, detail: str) -> None:
        program = str(self.drawn[which])
        emit(kind, seed=self.seed, program=program, which=which, launch=number, detail=detail[:2000])


def work(arguments: argparse.Namespace) -> None:
    faulthandler.enable()
    if arguments.platform == "cpu":
        jax.config.update("jax_platforms", "cpu")
    join()
    on = machine(arguments.timeout_s)
    facts = {"platform": on.platform, "devices": on.devices, "kind": jax.devices()[0].device_kind, "types": on.types}
    emit("machine", **facts, processes=jax.process_count(), shared=shared())
    end = time.monotonic() + arguments.seconds if jax.process_count() == 1 else math.inf  # the supervisor ends several
    for seed in range(arguments.seed, arguments.seed + arguments.rounds):
        each = Round(seed, on, arguments.programs, arguments.programs * arguments.launches_each, end)
        each.run()
        if on.platform == "cpu":
            in_time, seconds, message = absent(seed)
            emit("absent", seed=seed, in_time=in_time, detail=f"after {seconds:.1f} s: {message}"[:1000])
        if each.failed and on.platform == "gpu":
            break  # a kernel that gave up takes the process's devices with it
        if time.monotonic() > end:
            break
    emit("done", seed=seed)
    sys.stdout.flush()
    os._exit(0)  # devices that have failed may keep the interpreter from ending
