"""What the GPU tests do in this process and in child processes: `python scenarios.py NAME [ARGUMENT ...]`.

A scenario raises on failure. XLA's flags, the first call of a process, and one process a GPU need children.
"""

from __future__ import annotations

import ctypes
import faulthandler
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import company
import jax
import jax.numpy as jnp
import lockstep
import numpy as np
from epilogues import by_turns
from foreign import foreign_kernel
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    OPS,
    REDUCE_SCATTER,
    Case,
    assert_close,
    assert_equal,
    assert_shards_equal,
    delayed,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    per_shard,
    placed,
    program,
    put,
    reference,
    team_size,
)
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

# Several tiles each way, with tails.
RAGGED = {op: Case(op, 392, 1032, 520, odd=1 if op == ALL_REDUCE else 0) for op in OPS}


def check_exact(case: Case, mesh: Mesh, seed: int, **options: Any) -> None:
    """One call on fresh integers, compared by every process with its part of the float64 product."""
    ranks = team_size(mesh)
    x, w = integers(case, ranks, seed)
    y = program(case, mesh, **options)(*placed(case, mesh, x, w))
    assert_shards_equal(case, y, exact_product(case, ranks, x, w))


def cold(op: str) -> None:
    """The first thing that this process does on its devices is a fused call."""
    check_exact(RAGGED[op], mesh_of(), seed=1)


def stress(op: str, launches: str = "100") -> None:
    """Launches without a pause between them, on changing inputs, one rank late: bit for bit as when run alone."""
    count, case, mesh = int(launches), RAGGED[op], mesh_of()
    ranks, kinds = team_size(mesh), (10, 7)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    inputs = [gaussians(case, ranks, seed) for seed in range(max(kinds))]
    xs = put(np.stack([x for x, _ in inputs[: kinds[0]]]), mesh, P(None, *x_spec))
    ws = put(np.stack([w for _, w in inputs[: kinds[1]]]), mesh, P(None, *w_spec))
    call = per_shard(case)

    def body(xs: jax.Array, ws: jax.Array, i: jax.Array, slow_rank: jax.Array, steps: jax.Array) -> jax.Array:
        return call(delayed(xs[i % kinds[0]], AXIS, slow_rank, steps), ws[i % kinds[1]])

    specs = (P(None, *x_spec), P(None, *w_spec), P(), P(), P())
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=y_spec))
    launch = [np.int32(i) for i in range(count)]
    alone = [jax.block_until_ready(run(xs, ws, i, np.int32(0), np.int32(0))) for i in launch]
    for i in (0, 1, count - 1):
        x, w = put(inputs[i % kinds[0]][0], mesh, x_spec), put(inputs[i % kinds[1]][1], mesh, w_spec)
        assert_close(case, alone[i], reference(case, mesh)(x, w)[0], 4e-3)

    rng = np.random.default_rng(0)
    slow = rng.integers(0, ranks, count, np.int32)
    # Half of the launches are on time; the others are late by up to some milliseconds.
    steps = rng.integers(0, 200, count, np.int32) * rng.integers(0, 2, count, np.int32)
    together = [run(xs, ws, i, slow[i], steps[i]) for i in launch]
    bits = jax.jit(lambda a, b: jnp.sum(a.view(jnp.uint16) != b.view(jnp.uint16)))
    different = [int(bits(a, b)) for a, b in zip(alone, together, strict=True)]
    bad = [i for i in range(count) if different[i]]
    assert not bad, f"{case}: launches {bad[:20]} of {count} differ, in {[different[i] for i in bad[:20]]} elements"


def graphs(launches: str = "100") -> None:
    """Everything that captured graphs could get wrong, in one child; its XLA_FLAGS say whether XLA may capture."""
    for op in OPS:
        stress(op, launches)
    interleaved()
    independent()
    chained()
    by_turns()


def chained(programs: str = "20", strategy: str = "fused") -> None:
    """Eight calls in a row in one program, most of it one graph, run over and over on what it returned."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    k = 64 * ranks
    up, down = Case(ALL_GATHER, 136, 256, k), Case(REDUCE_SCATTER, 136, k, 256)
    x, w_up = integers(up, ranks, 1)
    _, w_down = integers(down, ranks, 2)
    up_specs, down_specs = up.specs(AXIS), down.specs(AXIS)

    def layers(strategy: str) -> Callable[..., jax.Array]:
        first, second = per_shard(up, strategy=strategy), per_shard(down, strategy=strategy)

        def body(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
            for _ in range(4):
                x = jnp.sign(second(jnp.sign(first(x, w_up)), w_down))
            return x

        specs = (up_specs[0], up_specs[1], down_specs[1])
        return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=down_specs[2]))

    ws = put(w_up, mesh, up_specs[1]), put(w_down, mesh, down_specs[1])
    # Signs of exact integers: both ways must agree to the bit however often they are fed back.
    ours = theirs = put(x, mesh, up_specs[0])
    fused, xla = layers(strategy), layers("xla")
    for _ in range(int(programs)):
        ours = fused(ours, *ws)
    for _ in range(int(programs)):
        theirs = xla(theirs, *ws)
    assert_equal(down, ours, theirs)


def interleaved(turns: int = 30) -> None:
    """Three executables by turns, dispatched without waiting: one team, one sequence of epochs."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    cases = (
        Case(ALL_GATHER, 264, 520, 264),
        Case(REDUCE_SCATTER, 136, 776, 392),
        Case(ALL_REDUCE, 200, 648, 328, odd=1),
    )
    inputs, wants = {}, {}
    for case in cases:
        x_spec, w_spec, _ = case.specs(AXIS)
        for seed in range(3):
            x, w = integers(case, ranks, seed)
            inputs[case, seed] = put(x, mesh, x_spec), put(w, mesh, w_spec)
            wants[case, seed] = exact_product(case, ranks, x, w)
    results = []
    for turn in range(turns):
        for case in cases:
            results.append((case, turn % 3, program(case, mesh)(*inputs[case, turn % 3])))
    for case, seed, y in results:
        assert_equal(case, y, wants[case, seed])


def independent() -> None:
    """Calls of one program that don't depend on each other, in whatever order or side by side as XLA likes."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    cases = [Case(op, 136 * (1 + i), 264, 200) for i in range(3) for op in OPS]
    inputs = [integers(case, ranks, seed) for seed, case in enumerate(cases)]
    specs = [case.specs(AXIS) for case in cases]

    def body(pairs: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
        return [per_shard(case)(x, w) for case, (x, w) in zip(cases, pairs, strict=True)]

    in_specs, out_specs = ([(x, w) for x, w, _ in specs],), [y for _, _, y in specs]
    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    pairs = [(put(x, mesh, s[0]), put(w, mesh, s[1])) for (x, w), s in zip(inputs, specs, strict=True)]
    wants = [exact_product(case, ranks, x, w) for case, (x, w) in zip(cases, inputs, strict=True)]
    for _ in range(10):
        for case, y, want in zip(cases, run(pairs), wants, strict=True):
            assert_equal(case, y, want)


def growing() -> None:
    """All ops on shapes that outgrow the arena several times, older executables called again after each growth."""
    mesh = mesh_of()
    cases = [Case(op, m_shard, 1032, 1032) for m_shard in (8, 700, 2056, 6000) for op in OPS]
    for i, case in enumerate(cases):
        check_exact(case, mesh, seed=i)
        check_exact(cases[i // 2], mesh, seed=100 + i)
    for i, case in enumerate(reversed(cases)):
        check_exact(case, mesh, seed=200 + i)


def distributed(strategy: str = "fused") -> None:
    """One of several processes: see lockstep.py."""
    processes, mesh = lockstep.join(), mesh_of()
    assert processes > 1 and (jax.process_count(), team_size(mesh)) == (processes, processes)
    for seed in range(5):
        for op in OPS:
            check_exact(RAGGED[op], mesh, seed, strategy=strategy)
    for op in OPS:
        check_exact(Case(op, 2056, 1032, 2056), mesh, seed=9, strategy=strategy)
    # The permuted team, in which no process' place is its process index.
    backwards = mesh_of(jax.devices()[::-1])
    for op in OPS:
        check_exact(RAGGED[op], backwards, seed=10, strategy=strategy)
    jax.distributed.shutdown()


class Hog:
    """Takes a GPU's memory by the driver's own allocator, outside of JAX's, down to `keep` bytes."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.held: list[tuple[ctypes.c_void_p, ctypes.c_uint64]] = []

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        assert code == 0, f"{name} returned {code}"

    def take(self, ordinal: int, keep: int) -> None:
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), ordinal)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(free.value - keep))
        self.held.append((context, pointer))

    def free(self) -> None:
        for context, pointer in self.held:
            self.call("cuCtxSetCurrent", context)
            self.call("cuMemFree_v2", pointer)
        self.held.clear()


def arena_full(devices: str) -> None:
    """An arena that doesn't fit, on all devices or only on the first: an error that says so, then business as usual.

    The small call first gets the small arena, the large one needs 2 x 1 GiB more of each device.
    """
    mesh = mesh_of()
    ranks = team_size(mesh)
    small, large = RAGGED[ALL_GATHER], Case(ALL_GATHER, 32768, 128, 16384)
    check_exact(small, mesh, seed=1)
    x_spec, w_spec, _ = large.specs(AXIS)
    zeros = jax.jit(
        lambda: (jnp.zeros(large.x_shape(ranks), jnp.bfloat16), jnp.zeros(large.w_shape(ranks), jnp.bfloat16)),
        out_shardings=(NamedSharding(mesh, x_spec), NamedSharding(mesh, w_spec)),
    )
    x, w = jax.block_until_ready(zeros())
    hog = Hog()
    for device in jax.devices() if devices == "all" else jax.devices()[:1]:
        hog.take(device.local_hardware_id, keep=1 << 30)
    try:
        jax.block_until_ready(program(large, mesh)(x, w))
    except Exception as error:
        message = str(error)
        print("raised:", message)
        assert "all_gather_matmul" in message, message
        assert any(word in message.lower() for word in ("arena", "memory")), message
    else:
        raise AssertionError("an arena of more memory than there is was no error")
    check_exact(small, mesh, seed=2)
    hog.free()
    jax.block_until_ready(program(large, mesh)(x, w))
    check_exact(small, mesh, seed=3)


def late_peer() -> None:
    """A peer that comes after ENTWINE_TIMEOUT_S: an error, no hang; the parent looks at what was said about it."""
    case, mesh = RAGGED[REDUCE_SCATTER], mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    call = per_shard(case)
    run = jax.jit(
        jax.shard_map(
            lambda x, w, steps: call(delayed(x, AXIS, jnp.int32(1), steps), w),
            mesh=mesh,
            in_specs=(x_spec, w_spec, P()),
            out_specs=y_spec,
        )
    )
    x, w = (put(value, mesh, spec) for value, spec in zip(integers(case, ranks, 1), (x_spec, w_spec), strict=True))
    limit, steps, seconds = float(os.environ["ENTWINE_TIMEOUT_S"]), 1000, 0.0
    while seconds < 4 * limit:
        start = time.monotonic()
        try:
            jax.block_until_ready(run(x, w, np.int32(steps)))
        except Exception as error:
            print(f"raised after {time.monotonic() - start:.1f} s:", error)
            assert time.monotonic() - start > limit
            time.sleep(1)  # what a kernel waited for comes on stderr
            return
        seconds, steps = time.monotonic() - start, min(4 * steps, 2**31 - 1)
    raise AssertionError(f"a peer late by about {seconds:.1f} s was no error")


def options_of(strategy: str) -> dict[str, Any]:
    """Of a call: peers.py has one strategy more, "signal" without copy engines."""
    if strategy != "nccl":
        return {"strategy": strategy}
    return {"strategy": "signal", "config": entwine_jax.Config(comm_sms=24)}


def in_a_row(case: Case, mesh: Mesh, options: dict[str, Any], calls: int = 300) -> Callable[..., jax.Array]:
    """So many calls in one program, enough to fill a stream's queue: when the peer is lost, the host waits for room."""
    x_spec, w_spec, _ = case.specs(AXIS)
    call = per_shard(case, **options)

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.fori_loop(0, calls, lambda _, x: x + 0 * jnp.sum(call(x, w)).astype(x.dtype), x)

    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=x_spec, check_vma=False))


def peer(fate: str, strategy: str) -> None:
    """One of two processes that make calls without end. Process 1 is killed or stopped from outside, or makes no more
    calls after a while (its program lacks them), be it those made before or one that needs a larger arena; process 0
    must hear of it. See peers.py."""
    lockstep.join()
    mesh, options = mesh_of(), options_of(strategy)
    calls = []
    for case in RAGGED.values():
        check_exact(case, mesh, seed=1, **options)
        calls.append((in_a_row(case, mesh, options), *placed(case, mesh, *integers(case, 2, 1))))
        run, x, w = calls[-1]
        jax.block_until_ready(run(x, w))  # while XLA tunes a program, its processes wait for each other without a bound
    print("making calls", flush=True)
    start = time.monotonic()
    for turn in itertools.count():
        if turn == 5 and fate in ("lacking", "growing") and jax.process_index() == 1:
            break
        if turn == 5 and fate == "growing":
            # One that XLA has nothing to tune of.
            large = Case(REDUCE_SCATTER, 2056, 1032, 2056)
            calls = [(program(large, mesh, **options), *placed(large, mesh, *integers(large, 2, 1)))]
        try:
            jax.block_until_ready([run(x, w) for run, x, w in calls])
        except Exception as error:
            print(f"raised {time.monotonic() - start:.1f} s after the first call:", error, flush=True)
            time.sleep(1)  # what a kernel waited for comes on stderr
            return
    time.sleep(60)


def absent(op: str, strategy: str = "fused", rows: str = "many") -> None:
    """One process: rank 1's program lacks the call that rank 0 makes."""
    case, mesh, options = RAGGED[op], mesh_of(), options_of(strategy)
    if rows == "few":
        case, options = Case(op, 4, 1032, 1032), options | {"config": entwine_jax.Config(few_rows=True)}
    ranks = team_size(mesh)
    check_exact(case, mesh, seed=1, **options)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    call = per_shard(case, **options)

    def body(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.eval_shape(call, x, w)
        return lax.cond(lax.axis_index(AXIS) == 1, lambda: jnp.zeros(y.shape, y.dtype), lambda: call(x, w))

    run = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=False))
    x, w = (put(value, mesh, spec) for value, spec in zip(integers(case, ranks, 1), (x_spec, w_spec), strict=True))
    start = time.monotonic()
    try:
        jax.block_until_ready(run(x, w))
    except Exception as error:
        print(f"raised after {time.monotonic() - start:.1f} s:", error)
        time.sleep(1)
        return
    raise AssertionError("a call that a rank lacks was no error")


def no_peer_access() -> None:
    """ENTWINE_PEER_ACCESS=0: nothing can be fused; "signal" can run, and auto takes it where it should win."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    for case in (*RAGGED.values(), *(Case(op, 2048, 1032, 1032, (2,)) for op in OPS)):
        x, w = integers(case, ranks, 1)
        operands, want = placed(case, mesh, x, w), exact_product(case, ranks, x, w)
        for config in (None, entwine_jax.Config(comm_sms=120, group_waves=1)):
            for _ in range(3):
                y = program(case, mesh, strategy="signal", config=config)(*operands)
                assert_shards_equal(case, y, want)
        try:
            program(case, mesh)(*operands)
        except NotImplementedError as error:
            assert "ENTWINE_PEER_ACCESS=0" in str(error)
        else:
            raise AssertionError("fused ran without peer access")
    large = Case(REDUCE_SCATTER, 4096, 8192, 8192)
    shapes = [jax.ShapeDtypeStruct(shape(ranks), jnp.bfloat16) for shape in (large.x_shape, large.w_shape)]
    (found,) = entwine_jax.explain(program(large, mesh, strategy="auto"), *shapes)
    assert found.strategy == "signal" and found.plan is not None and found.plan.far, found


def two_hosts(process: str) -> None:
    """Each process takes itself for a host of its own: auto leaves teams of both to XLA, and says why; a call that was
    to be fused all the same is an error."""
    os.environ |= {"JAX_PARTITION_INDEX": process, "NCCL_HOSTID": f"host{process}", "NCCL_SOCKET_IFNAME": "lo"}
    lockstep.join()
    mesh = mesh_of()
    case = Case(REDUCE_SCATTER, 1024, 1024, 4096)
    x, w = placed(case, mesh, *integers(case, team_size(mesh), 1))
    (found,) = entwine_jax.explain(program(case, mesh, strategy="auto"), x, w)
    assert found.strategy == "xla" and "spans 2 NVLink domains" in found.reason, found
    check_exact(case, mesh, 1, strategy="auto")
    check_exact(case, mesh, 2, strategy="signal")
    try:
        jax.block_until_ready(program(case, mesh)(x, w))
    except Exception as error:
        print("raised:", error)
        assert "not in one NVLink domain" in str(error), error
        return
    raise AssertionError("GPUs of two hosts were fused")


SCENARIOS: dict[str, Callable[..., None]] = {
    "absent": absent,
    "arena_full": arena_full,
    "chained": chained,
    "cold": cold,
    "distributed": distributed,
    "foreign_kernel": foreign_kernel,
    "graphs": graphs,
    "late_peer": late_peer,
    "no_peer_access": no_peer_access,
    "peer": peer,
    "two_hosts": two_hosts,
    **company.SCENARIOS,
}

if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)  # peers.py asks so where one is that doesn't end
    if sys.argv[1] == "exit_in_flight":
        company.exit_in_flight(*map(int, sys.argv[2:]))
        sys.exit()  # as any program ends
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
    print("scenario done", flush=True)
    sys.stdout.flush()
    # A device that still waits for a peer would keep the interpreter from ending; the parent has its answer.
    os._exit(0)
