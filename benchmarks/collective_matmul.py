"""Times entwine_jax against XLA and other peers, with the GEMM and the link alone beside them; writes JSON for
benchmarks/report.py.

    python -m benchmarks.collective_matmul --out FILE.json
        [--suite ten|tp8|small|all_reduce|decode|fp8|decode_fp8|epilogues|strategies|all]
        [--peers xla,xla_windowed,pallas,torch] [--strategy fused,resident,signal,auto]

All devices of this process are one team. What is timed, and why it is a fair time:

* Calls are chained in programs, programs are dispatched without waiting, and a sample lasts about 20 ms, from the end
  of a program before it until all devices are done: chains.py.
* Variants take turns in rounds, in random orders in which each comes behind every other equally often, never in a fixed
  or cyclic one: on power-limited GPUs what follows the hot GEMM is clocked lower than what follows the cool,
  communication-bound XLA, so an order that repeats biases ratios by several percent. Times are medians over the rounds,
  with their interquartile range as the spread; ratios are computed within each round, and the median of those is
  reported: rounds.py.
* Interleaved this way, in this process: ours, XLA, XLA's dot alone (`gemm`, cuBLAS where XLA picks that) and the link
  alone (the row's bytes by copy engine, all directions at once: link.py). `bound` is the larger of the last two.
* Suite strategies has a row for each of our strategies, whatever --strategy says, all from the same rounds, and one for
  auto: `over_best` is auto over the one of them that was the fastest.
* Rows of float8 (suites fp8 and decode_fp8) have ours in bfloat16 beside them, in the same rounds: `ours_over_bf16`.
  Their w is stored (n, k), so that nobody transposes; XLA's are dots of float8 too.
* Peers that need a process of their own run afterwards on the same machine, one after the other, and measure the GEMM
  alone themselves. Where clocks differ between processes, compare a peer's `over_gemm` with `ours_over_gemm`: peers/.
* Before and after timing, ours is compared with XLA's, on results of the very programs that are timed; peers' too.

A peer that is missing or fails is a note in the JSON and ends nothing else; a wrong result of ours ends everything.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import pathlib
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

import entwine_jax
from benchmarks import chains, epilogues, link, peers, rounds
from benchmarks.chains import AXIS
from benchmarks.shapes import (
    ALL_REDUCE_OP,
    LINK_BYTES_PER_SECOND,
    MOST_CALLS,
    PROGRAM_MS,
    SUITES,
    TINY,
    TINY_FLOAT8,
    Shape,
)

PEERS = ("xla", *peers.MODULES)
STRATEGIES = ("fused", "resident", "signal", "auto")
# All of them take part in the suite of that name.
SIDE_BY_SIDE = ("fused", "resident", "signal", "auto")


def progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@dataclasses.dataclass(frozen=True)
class Settings:
    rounds: int
    calls: int  # in one program, at the most
    sample_seconds: float
    strategies: tuple[str, ...]


def op_call(shape: Shape, strategy: str) -> chains.Call:
    op = getattr(entwine_jax, shape.op)
    if not shape.float8:
        return lambda x, w: op(x, w, AXIS, strategy=strategy)
    scales = jnp.float32(1), jnp.float32(shape.k**-0.5)
    return lambda x, w: op(x, w.T, AXIS, scales=scales, strategy=strategy, preferred_element_type=jnp.bfloat16)


def gemm_call(shape: Shape) -> chains.Call:
    if not shape.float8:
        return jnp.matmul

    def dot(x: jax.Array, w: jax.Array) -> jax.Array:
        y = jax.lax.dot_general(x, w, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
        scaled: jax.Array = (y * jnp.float32(shape.k**-0.5)).astype(jnp.bfloat16)
        return scaled

    return dot


def choice(shape: Shape, mesh: Mesh, strategy: str) -> dict[str, Any]:
    """What the strategy comes to for this shape, as `entwine_jax.explain` tells it."""
    layout = chains.collective_layout(shape, mesh.size)
    mapped = jax.shard_map(
        op_call(shape, strategy), mesh=mesh, in_specs=(layout.x_spec, layout.w_spec), out_specs=layout.y_spec
    )
    operands = (jax.ShapeDtypeStruct(each, layout.dtype) for each in (layout.x_shape, layout.w_shape))
    (found,) = entwine_jax.explain(mapped, *operands)
    plan = None if found.plan is None else dataclasses.asdict(found.plan)
    return {"chosen": found.strategy, "reason": found.reason, "plan": plan}


class LinkAlone:
    """Measured where it can be, else modelled; says why not once."""

    def __init__(self, devices: Sequence[jax.Device], notes: list[str]) -> None:
        self._ordinals = [device.local_hardware_id for device in devices]
        self._notes = notes
        self._works = devices[0].platform in ("gpu", "cuda")
        if not self._works:
            self._model(f"no copy engine on platform {devices[0].platform}")

    def _model(self, why: str) -> None:
        self._works = False
        note = f"link_ms is modelled at {LINK_BYTES_PER_SECOND / 1e9:.0f} GB/s where link_source says so: {why}"
        self._notes.append(note)
        progress(note)

    def open(self, shape: Shape, buffers: int) -> link.CopyEngine | None:
        if self._works:
            try:
                return link.CopyEngine(self._ordinals, shape.chunk_bytes(len(self._ordinals)), buffers)
            except Exception as error:  # a number to compare with, not worth the run
                self._model(f"{type(error).__name__}: {error}")
        return None


def measure(shape: Shape, suite: str, mesh: Mesh, settings: Settings, link_alone: LinkAlone) -> list[dict[str, Any]]:
    """One row for each strategy, all from the same rounds."""
    start, ranks = time.perf_counter(), mesh.size
    calls = shape.calls(settings.calls)
    programs = chains.Chains(shape, mesh, calls)
    layout, gemm = chains.collective_layout(shape, ranks), chains.gemm_layout(shape, ranks)
    for name in ("xla", *settings.strategies):
        programs.add(name, layout, chains.per_rank_program(layout, mesh, calls, op_call(shape, name)))
    programs.add("gemm", gemm, chains.per_rank_program(gemm, mesh, calls, gemm_call(shape)))
    if shape.float8:
        same = dataclasses.replace(shape, float8=False)
        wide = chains.collective_layout(same, ranks)
        programs.add("bf16", wide, chains.per_rank_program(wide, mesh, calls, op_call(same, settings.strategies[0])))
    errors = {name: programs.compare(name, "xla", "before") for name in settings.strategies}

    with contextlib.ExitStack() as stack:
        samplers = programs.samplers()
        repeats = {name: rounds.repeats_for(each, settings.sample_seconds) for name, each in samplers.items()}
        engine = link_alone.open(shape, calls)
        if engine is not None:
            stack.enter_context(engine)
            samplers["link"] = engine.sample
            # Cool and steady, so short samples do.
            repeats["link"] = rounds.repeats_for(engine.sample, settings.sample_seconds / 4)
        ready = time.perf_counter()
        samples = rounds.sample_rounds(samplers, repeats, settings.rounds, str(shape))
    per_repeat = {name: 1 if name == "link" else calls for name in samples}
    ms = {name: [second / per_repeat[name] * 1e3 for second in seconds] for name, seconds in samples.items()}
    measured_link = "link" in ms
    if not measured_link:
        ms["link"] = [shape.link_ms(ranks)] * settings.rounds
    bound = [max(both) for both in zip(ms["gemm"], ms["link"], strict=True)]
    for name in settings.strategies:
        errors[name] = max(errors[name], programs.compare(name, "xla", "after"))
    done = time.perf_counter()

    spreads = {name: rounds.spread(ms[name]) for name in ("xla", "gemm", "link") if name in samples}
    found: list[dict[str, Any]] = []
    for strategy in settings.strategies:
        ours = ms[strategy]
        found.append(
            {
                "suite": suite,
                "op": shape.op,
                "m": shape.m,
                "n": shape.n,
                "k": shape.k,
                "ranks": ranks,
                "dtype": layout.dtype,
                "strategy": strategy,
                **choice(shape, mesh, strategy),
                "ours_ms": statistics.median(ours),
                **{f"{name}_ms": statistics.median(ms[name]) for name in ("xla", "gemm", "link")},
                "link_source": "copy engine" if measured_link else "model",
                "bound_ms": statistics.median(bound),
                "bound_over_ours": rounds.paired(bound, ours),
                "ours_over_gemm": rounds.paired(ours, ms["gemm"]),
                "ours_over_xla": rounds.paired(ours, ms["xla"]),
                **(_beside_bf16(ours, ms["bf16"]) if shape.float8 else {}),
                **(_beside_best(ms) if suite == "strategies" and strategy == "auto" else {}),
                "error": errors[strategy],
                "peers": {},
                "peer_details": {},
                "spread": {"ours": rounds.spread(ours), **spreads},
            }
        )
    for row in found:
        times = "  ".join(f"{name} {row[f'{name}_ms']:.4f}" for name in ("ours", "xla", "gemm", "link"))
        apart = " ".join(f"{name} {100 * share:.1f}%" for name, share in row["spread"].items())
        progress(
            f"{shape} {row['strategy']} ({row['chosen']}): {times} ms  xla/ours {1 / row['ours_over_xla']:.3f}"
            f"  ours/gemm {row['ours_over_gemm']:.3f}  bound/ours {row['bound_over_ours']:.3f}"
            f"{_over_bf16(row)}  error {row['error']:.1e}  spread {apart}"
            f"  (ready in {ready - start:.1f} s, timed in {done - ready:.1f} s)"
        )
    return found


def _beside_bf16(ours: Sequence[float], bf16: Sequence[float]) -> dict[str, float]:
    return {"bf16_ms": statistics.median(bf16), "ours_over_bf16": rounds.paired(ours, bf16)}


def _beside_best(ms: dict[str, list[float]]) -> dict[str, Any]:
    """Of auto, beside the fastest of our strategies."""
    best = min((name for name in SIDE_BY_SIDE if name != "auto"), key=lambda name: statistics.median(ms[name]))
    return {"best": best, "over_best": rounds.paired(ms["auto"], ms[best])}


def _over_bf16(row: dict[str, Any]) -> str:
    return f"  bf16/ours {1 / row['ours_over_bf16']:.3f}" if "ours_over_bf16" in row else ""


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


def method(settings: Settings) -> list[str]:
    return [
        f"medians of {settings.rounds} rounds, in random orders in which each comes behind every other equally often;"
        f" some {PROGRAM_MS:.0f} ms of chained calls a program, {settings.calls} at the most; samples of"
        f" {settings.sample_seconds * 1e3:.0f} ms, from the end of a program before them",
        "ours_over_xla, ours_over_gemm and bound_over_ours are medians of the ratios within each round",
        "gemm_ms is XLA's dot of one rank's shapes without any collective",
        "link_ms is the time of one rank's bytes with all directions busy",
        "spread is the interquartile range over the median",
        "peers in processes of their own ran after ours; peer_details has the GEMM alone as they measured it",
    ]


def comma_list(allowed: Sequence[str]) -> Any:
    """An argparse type: some of the allowed, comma-separated."""

    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
        wrong = [name for name in names if name not in allowed]
        if wrong or not names:
            raise argparse.ArgumentTypeError(f"{', '.join(wrong) or 'nothing'}: choose from {','.join(allowed)}")
        return names

    return parse


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the JSON file to write")
    parser.add_argument(
        "--suite", type=comma_list(tuple(sorted(SUITES))), default=("ten",), help=f"some of {','.join(sorted(SUITES))}"
    )
    parser.add_argument("--peers", type=comma_list(PEERS), default=("xla",), help=f"some of {','.join(PEERS)}")
    parser.add_argument(
        "--strategy",
        type=comma_list(STRATEGIES),
        default=("fused",),
        help="some of fused (default), resident, signal and auto: a row for each",
    )
    parser.add_argument(
        "--rounds", type=int, default=40, help="samples of each variant and shape; peers take half of it"
    )
    parser.add_argument("--calls", type=int, default=MOST_CALLS, help="calls in one program, at the most")
    parser.add_argument("--peer-seconds", type=float, help="for each peer process; default: 30, and 4 for each shape")
    parser.add_argument("--platform", help="for example cpu; by default JAX's own choice")
    parser.add_argument("--tiny", action="store_true", help="small shapes and few rounds: a smoke test for any machine")
    return parser.parse_args(arguments)


def run_peers(options: argparse.Namespace, settings: Settings, ranks: int, about: dict[str, Any]) -> None:
    """Adds what the peers in processes of their own find to about's rows, versions and notes."""
    names = [name for name in options.peers if name != "xla"]
    rows = [row for row in about["rows"] if row["dtype"] == "bfloat16"]  # what all peers multiply
    shapes = tuple(dict.fromkeys(Shape(*(row[key] for key in ("op", "m", "n", "k"))) for row in rows))
    for name in names if shapes else ():
        start = time.perf_counter()
        job = peers.Job(
            shapes=shapes,
            out="",
            ranks=ranks,
            rounds=max(2, settings.rounds // 2),
            calls=settings.calls,
            sample_seconds=settings.sample_seconds,
            seconds=options.peer_seconds or 30 + 4 * len(shapes),
            platform=options.platform,
        )
        found = peers.run(name, job)
        peers.merge(rows, found)
        about["versions"].update({key: text for key, text in found["versions"].items() if key not in about["versions"]})
        about["notes"] += found["notes"]
        write(options.out, about)
        for note in found["notes"]:
            progress(f"note: {note}")
        progress(f"{name}: {len(found['rows'])} of {len(shapes)} shapes in {time.perf_counter() - start:.0f} s")


def write(out: pathlib.Path, about: dict[str, Any]) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(about, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse(arguments)
    suites = {name: shapes for chosen in options.suite for name, shapes in SUITES[chosen].items()}
    settings = Settings(options.rounds, options.calls, rounds.SAMPLE_SECONDS, options.strategy)
    if options.tiny:
        suites = {
            suite if suite in ("epilogues", "strategies") else "tiny": TINY_FLOAT8 if suite.endswith("fp8") else TINY
            for suite in suites
        }
        settings = dataclasses.replace(
            settings, rounds=min(options.rounds, 2), calls=min(options.calls, 2), sample_seconds=0.0
        )

    devices = jax.devices(options.platform)
    if jax.process_count() > 1 or not 2 <= len(devices) <= 8:
        raise SystemExit(f"needs 2 to 8 devices in one process, found {len(devices)} in {jax.process_count()}")
    mesh = Mesh(np.array(devices), (AXIS,))
    notes = method(settings)
    about: dict[str, Any] = {"machine": machine(devices), "versions": versions(), "notes": notes, "rows": []}
    progress(json.dumps({key: about[key] for key in ("machine", "versions")}))
    link_alone = LinkAlone(devices, notes)
    for suite, shapes in suites.items():
        for shape in shapes:
            if shape.op != ALL_REDUCE_OP and shape.m % len(devices):
                notes.append(f"{shape} left out: m is no multiple of {len(devices)}, the number of devices")
                progress(notes[-1])
                continue
            try:
                if suite == "epilogues":
                    times = settings.rounds, shape.calls(settings.calls), settings.sample_seconds
                    about.setdefault("epilogues", []).append(epilogues.measure(shape, mesh, *times, progress))
                else:
                    names = (*SIDE_BY_SIDE, *settings.strategies) if suite == "strategies" else settings.strategies
                    its = dataclasses.replace(settings, strategies=tuple(dict.fromkeys(names)))
                    about["rows"] += measure(shape, suite, mesh, its, link_alone)
            except chains.WrongResultError as error:
                raise SystemExit(str(error)) from error
            write(options.out, about)  # after every row, so that a run cut short leaves what it has
    rows = about["rows"]
    if not rows and "epilogues" in about:
        return
    if not rows:
        write(options.out, about)
        raise SystemExit("nothing was measured")
    run_peers(options, settings, len(devices), about)
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        over_xla = [1 / row["ours_over_xla"] for row in rows if row["strategy"] == strategy]
        over_gemm = [row["ours_over_gemm"] for row in rows if row["strategy"] == strategy]
        progress(
            f"{strategy}: faster than XLA on {sum(ratio > 1 for ratio in over_xla)} of {len(over_xla)},"
            f" geomean xla/ours {rounds.geometric_mean(over_xla):.3f},"
            f" ours/gemm {rounds.geometric_mean(over_gemm):.3f}, slowest xla/ours {min(over_xla):.3f}"
        )


if __name__ == "__main__":
    main()
