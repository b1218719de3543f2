"""What a bias and an activation cost: the suite `epilogues` of benchmarks/collective_matmul.py.

Each shape without an epilogue and with several, ours and XLA's, all in the same rounds: ratios are taken within each.
XLA applies its own in a kernel that reads what its collective has written, or after the dot in an all-gather's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

import entwine_jax
from benchmarks import chains, rounds
from benchmarks.chains import AXIS
from benchmarks.shapes import Shape

# Whether there is a bias, and the activation.
EPILOGUES: dict[str, tuple[bool, str | None]] = {
    "none": (False, None),
    "bias": (True, None),
    "bias, gelu_tanh": (True, "gelu_tanh"),
    "bias, gelu": (True, "gelu"),
    "bias, silu": (True, "silu"),
}
OURS, XLA = "fused", "xla"


def call_of(shape: Shape, strategy: str, epilogue: str) -> chains.Call:
    op, (biased, activation) = getattr(entwine_jax, shape.op), EPILOGUES[epilogue]

    def call(x: Any, weights: Any) -> Any:
        w, bias = weights
        return op(x, w, AXIS, bias=bias if biased else None, activation=activation, strategy=strategy)

    return call


def measure(
    shape: Shape, mesh: Mesh, count: int, calls: int, sample_seconds: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """One shape's row, of `count` rounds."""
    start = time.perf_counter()
    programs = chains.Chains(shape, mesh, calls)
    layout = chains.with_bias(chains.collective_layout(shape, mesh.size))
    names = {(strategy, each): f"{strategy} {each}" for each in EPILOGUES for strategy in (OURS, XLA)}
    for (strategy, each), name in names.items():
        programs.add(name, layout, chains.per_rank_program(layout, mesh, calls, call_of(shape, strategy, each)))

    def errors(when: str) -> dict[str, float]:
        return {each: programs.compare(names[OURS, each], names[XLA, each], when) for each in EPILOGUES}

    before = errors("before")
    samplers = programs.samplers()
    repeats = {name: rounds.repeats_for(each, sample_seconds) for name, each in samplers.items()}
    samples = rounds.sample_rounds(samplers, repeats, count, str(shape))
    after = errors("after")
    row: dict[str, Any] = {
        **{"op": shape.op, "m": shape.m, "n": shape.n, "k": shape.k, "ranks": mesh.size, "dtype": "bfloat16"},
        "epilogues": {},
    }
    for each in EPILOGUES:
        ours, xla = (samples[names[strategy, each]] for strategy in (OURS, XLA))
        row["epilogues"][each] = {
            "ours_ms": statistics.median(ours) / calls * 1e3,
            "xla_ms": statistics.median(xla) / calls * 1e3,
            "ours_over_none": rounds.paired(ours, samples[names[OURS, "none"]]),
            "xla_over_none": rounds.paired(xla, samples[names[XLA, "none"]]),
            "xla_over_ours": rounds.paired(xla, ours),
            "error": max(before[each], after[each]),
            "spread": {"ours": rounds.spread(ours), "xla": rounds.spread(xla)},
        }
        found = row["epilogues"][each]
        say(
            f"{shape} {each}: ours {found['ours_ms']:.4f}  xla {found['xla_ms']:.4f} ms  ours/none"
            f" {found['ours_over_none']:.3f}  xla/none {found['xla_over_none']:.3f}  xla/ours"
            f" {found['xla_over_ours']:.3f}  error {found['error']:.1e}"
        )
    say(f"{shape}: {time.perf_counter() - start:.1f} s")
    return row
