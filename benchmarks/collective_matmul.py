"""Times entwine_jax against XLA, with XLA's GEMM alone beside them, and writes JSON for benchmarks/report.py.

    python -m benchmarks.collective_matmul --out FILE.json [--rounds N] [--suite ten] [--tiny]

All devices of this process are one team. What is timed, and why it is a fair time:

* A *program* is one jitted `shard_map` with several calls of one variant in it, and a *sample* is enough programs in a
  row to last tens of milliseconds, dispatched without waiting. So Python and dispatch run ahead of the devices.
* The calls are a chain: before each call one element of its x is set to an element of the result before it. So XLA can
  neither merge nor drop nor hoist them, and no call starts before the one before it has ended, as in a model's layers.
  This costs one tiny kernel a call (about 2 us, the same for every variant), which brings all ratios a little closer to
  one. Every call has its own x and w, random normal bfloat16; x and the last result are donated and handed on, so the
  element is set in place and addresses don't change from program to program (captured CUDA graphs stay valid).
* Optimization barriers around each call keep XLA from computing only the one element that the chain reads.
* Variants take turns in every round, in rotating order, for the clocks drift by percents. A sample ends when all
  devices are done, so it is the slowest rank's; the number is the median over the rounds, its spread the interquartile
  range over the median.
* Before and after timing, ours is compared with XLA's, on results of the very programs that are timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import math
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import entwine_jax
from benchmarks.shapes import ALL_GATHER, LINK_BYTES_PER_SECOND, SUITES, TINY, Shape

AXIS = "t"
SAMPLE_SECONDS = 0.025
# Both round to bfloat16, XLA's partial sums too: each is within 4e-3 of the exact result.
TOLERANCE = 8e-3

Arrays = tuple[jax.Array, ...]


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Variant:
    """How one of the timed things lies on the mesh: specs and global sizes of x (rows, k), w (k, n) and y."""

    name: str
    x_spec: PartitionSpec
    w_spec: PartitionSpec
    y_spec: PartitionSpec
    x_shape: tuple[int, int]
    w_shape: tuple[int, int]
    y_shape: tuple[int, int]


def variants(shape: Shape, ranks: int) -> dict[str, Variant]:
    m, n, k = shape.m, shape.n, shape.k
    rows, columns = PartitionSpec(AXIS, None), PartitionSpec(None, AXIS)
    if shape.op == ALL_GATHER:
        fused = Variant("ours", rows, columns, columns, (m, k), (k, n * ranks), (m, n * ranks))
        # The gathered x, the rank's own copy of it.
        gemm = Variant("gemm", rows, columns, columns, (m * ranks, k), (k, n * ranks), (m, n * ranks))
    else:
        fused = Variant("ours", columns, rows, rows, (m, k * ranks), (k * ranks, n), (m, n))
        # The partial sums, unreduced.
        gemm = Variant("gemm", columns, rows, rows, (m, k * ranks), (k * ranks, n), (m * ranks, n))
    return {"ours": fused, "xla": dataclasses.replace(fused, name="xla"), "gemm": gemm}


def one_call(shape: Shape, name: str) -> Callable[[jax.Array, jax.Array], jax.Array]:
    if name == "gemm":
        return jnp.matmul
    op = getattr(entwine_jax, shape.op)
    strategy = {"ours": "fused", "xla": "xla"}[name]
    return lambda x, w: op(x, w, AXIS, strategy=strategy)


def build(shape: Shape, variant: Variant, mesh: Mesh, calls: int) -> jax.stages.Wrapped:
    """(xs, ws, last result) -> (xs, last result), every array global."""
    call = one_call(shape, variant.name)

    def body(xs: Sequence[jax.Array], ws: Sequence[jax.Array], y: jax.Array) -> tuple[Arrays, jax.Array]:
        handed_on = []
        for x, w in zip(xs, ws, strict=True):
            link = jnp.clip(y[:1, :1], -1, 1)
            x = jax.lax.optimization_barrier(jax.lax.dynamic_update_slice(x, link, (0, 0)))
            y = jax.lax.optimization_barrier(call(x, w))
            handed_on.append(x)
        return tuple(handed_on), y

    xs, ws = (variant.x_spec,) * calls, (variant.w_spec,) * calls
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(xs, ws, variant.y_spec), out_specs=(xs, variant.y_spec))
    return jax.jit(mapped, donate_argnums=(0, 2))


def random_arrays(
    mesh: Mesh, spec: PartitionSpec, shape: tuple[int, int], scale: float, count: int, seed: int
) -> Arrays:
    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(jnp.bfloat16)

    sharded = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))
    return tuple(sharded(key) for key in jax.random.split(jax.random.key(seed), count))


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """||got - want|| / ||want||; NaN stays NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((got - want) ** 2) / jnp.sum(want**2))


@dataclasses.dataclass
class Running:
    """A compiled program with its arguments; its xs are in a pool, for they move from program to program."""

    program: jax.stages.Compiled
    ws: Arrays
    y: jax.Array
    xs_of: str

    def sample(self, pool: dict[str, Arrays], repeats: int) -> float:
        xs, y = pool[self.xs_of], self.y
        start = time.perf_counter()
        for _ in range(repeats):
            xs, y = self.program(xs, self.ws, y)
        jax.block_until_ready((xs, y))
        seconds = time.perf_counter() - start
        pool[self.xs_of], self.y = xs, y
        return seconds


def verify(shape: Shape, running: dict[str, Running], pool: dict[str, Arrays], when: str) -> float:
    """Runs both programs from the same state and compares their results."""
    running["ours"].y = jnp.copy(running["xla"].y)  # each program consumes its own
    for name in ("ours", "xla"):
        running[name].sample(pool, 1)
    error = float(relative_error(running["ours"].y, running["xla"].y))
    if not error <= TOLERANCE:  # also NaN
        raise SystemExit(f"{shape}: {when} timing, ||ours - xla|| / ||xla|| is {error:.2e}, more than {TOLERANCE:.0e}")
    return error


def spread(samples: Sequence[float]) -> float:
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
    return (high - low) / statistics.median(samples)


def measure(shape: Shape, suite: str, mesh: Mesh, rounds: int, calls: int, sample_seconds: float) -> dict[str, Any]:
    ranks = mesh.devices.size
    if shape.m % ranks:
        raise SystemExit(f"{shape}: m={shape.m} is no multiple of {ranks}, the number of devices")
    start = time.perf_counter()
    plan = variants(shape, ranks)
    pool: dict[str, Arrays] = {}
    weights: dict[str, Arrays] = {}
    running: dict[str, Running] = {}
    for name, variant in plan.items():
        # What has the same layout shares its arrays.
        xs_of = f"{variant.x_shape} {variant.x_spec}"
        ws_of = f"{variant.w_shape} {variant.w_spec}"
        if xs_of not in pool:
            pool[xs_of] = random_arrays(mesh, variant.x_spec, variant.x_shape, 1.0, calls, 1)
        if ws_of not in weights:
            weights[ws_of] = random_arrays(mesh, variant.w_spec, variant.w_shape, shape.k**-0.5, calls, 2)
        y = jax.device_put(jnp.zeros(variant.y_shape, jnp.bfloat16), NamedSharding(mesh, variant.y_spec))
        program = build(shape, variant, mesh, calls).lower(pool[xs_of], weights[ws_of], y).compile()
        running[name] = Running(program, weights[ws_of], y, xs_of)

    error = verify(shape, running, pool, "before")
    repeats = {}
    for name, run in running.items():
        run.sample(pool, 1)
        seconds = run.sample(pool, 1)
        repeats[name] = max(1, min(64, math.ceil(sample_seconds / seconds)))
    ready = time.perf_counter()

    samples: dict[str, list[float]] = {name: [] for name in running}
    order = list(running)
    for turn in range(rounds):
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            seconds = running[name].sample(pool, repeats[name])
            samples[name].append(seconds / (repeats[name] * calls) * 1e3)
    error = max(error, verify(shape, running, pool, "after"))

    row: dict[str, Any] = {
        "suite": suite,
        "op": shape.op,
        "m": shape.m,
        "n": shape.n,
        "k": shape.k,
        "ranks": ranks,
        "dtype": "bfloat16",
        "strategy": "fused",
        **{f"{name}_ms": statistics.median(samples[name]) for name in ("ours", "xla", "gemm")},
        "link_ms": shape.link_ms(ranks),
        "peers": {},
        "spread": {name: spread(samples[name]) for name in ("ours", "xla", "gemm")},
    }
    times = "  ".join(f"{name} {row[name + '_ms']:.3f}" for name in ("ours", "xla", "gemm", "link"))
    spreads = " ".join(f"{100 * share:.1f}%" for share in row["spread"].values())
    progress(
        f"{shape}: {times} ms  xla/ours {row['xla_ms'] / row['ours_ms']:.3f}"
        f"  ours/gemm {row['ours_ms'] / row['gemm_ms']:.3f}  error {error:.1e}  spread {spreads}"
        f"  (ready in {ready - start:.1f} s, timed in {time.perf_counter() - ready:.1f} s)"
    )
    return row


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def nvidia_smi(query: str) -> str:
    """One value of the first GPU, or "" where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return ""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def machine(devices: Sequence[jax.Device]) -> dict[str, Any]:
    return {"accelerator": devices[0].device_kind, "platform": devices[0].platform, "devices": len(devices)}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    packages = ("entwine_jax", "jax", "jaxlib", "jax-cuda13-plugin", "nvidia-nccl-cu13", "nvidia-cublas")
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if driver := nvidia_smi("driver_version"):
        found["driver"] = driver
    return found


def notes(rounds: int, calls: int) -> list[str]:
    return [
        f"link_ms is modelled, not measured: the bytes one rank must send, over {LINK_BYTES_PER_SECOND / 1e9:.0f} GB/s",
        "gemm_ms is XLA's dot of one rank's shapes without any collective",
        f"medians of {rounds} interleaved rounds, {calls} chained calls a program",
        "spread is the interquartile range over the median",
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument("--rounds", type=int, default=20, help="samples of each variant and shape")
    parser.add_argument("--suite", choices=sorted(SUITES), default="ten")
    parser.add_argument("--calls", type=int, default=8, help="calls in one program")
    parser.add_argument("--platform", help="for example cpu; by default JAX's own choice")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rounds: a smoke test for any machine")
    options = parser.parse_args(arguments)
    shapes: tuple[Shape, ...] = SUITES[options.suite]
    suite, rounds, calls, sample_seconds = options.suite, options.rounds, options.calls, SAMPLE_SECONDS
    if options.tiny:
        shapes, suite, rounds, calls, sample_seconds = TINY, "tiny", min(rounds, 2), min(calls, 2), 0.0

    devices = jax.devices(options.platform)
    if jax.process_count() > 1 or not 2 <= len(devices) <= 8:
        raise SystemExit(f"needs 2 to 8 devices in one process, found {len(devices)} in {jax.process_count()}")
    mesh = Mesh(np.array(devices), (AXIS,))
    about = {"machine": machine(devices), "versions": versions(), "notes": notes(rounds, calls)}
    progress(json.dumps({key: about[key] for key in ("machine", "versions")}))
    rows = []
    for shape in shapes:
        rows.append(measure(shape, suite, mesh, rounds, calls, sample_seconds))
        # After every row, so that a run cut short leaves what it has.
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")
    faster = sum(row["ours_ms"] < row["xla_ms"] for row in rows)
    over_xla = geometric_mean([row["xla_ms"] / row["ours_ms"] for row in rows])
    over_gemm = geometric_mean([row["ours_ms"] / row["gemm_ms"] for row in rows])
    progress(f"faster than XLA on {faster} of {len(rows)}, geomean xla/ours {over_xla:.3f}, ours/gemm {over_gemm:.3f}")


if __name__ == "__main__":
    main()
