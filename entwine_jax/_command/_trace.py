"""``entwine trace``: what happened to every tile of a function's fused calls, and when."""

import argparse
import json
import sys
from typing import Any

from .._trace import Trace, TracedCall, require_gpus, trace_tiles
from . import _function
from ._usage import subcommand, table


def add_to(commands: Any) -> None:
    parser = subcommand(
        commands,
        "trace",
        run,
        "run a function on GPUs and write what its fused calls did, tile by tile, for ui.perfetto.dev",
        "entwine trace model:mlp --args model:example_args --out trace.json",
    )
    _function.add_options(parser)
    parser.add_argument("--out", required=True, metavar="FILE.json", help="the Chrome trace to write")
    parser.add_argument("--megabytes", type=int, default=256, help="pinned host memory for the notes (default 256)")


def run(options: argparse.Namespace) -> int:
    try:
        require_gpus()
    except NotImplementedError as error:
        print(f"entwine trace: {error}", file=sys.stderr)
        return 1
    call = _function.load(options)
    with call.in_mesh():
        trace = trace_tiles(call.fn, *call.arrays(), megabytes=options.megabytes)
    if not trace.calls:
        print(
            f"entwine trace: {options.function} made no call that takes notes: entwine explain tells what became of its"
            " matmuls; notes are taken by strategy 'fused' with bfloat16 operands and large tiles",
            file=sys.stderr,
        )
        return 1
    trace.save(options.out)
    print(json.dumps({"trace": options.out, "calls": summary(trace)}, indent=1) if options.json else told(trace))
    return 0


def summary(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "op": call.op,
            "rank": call.rank,
            "ranks": call.ranks,
            "m_shard": call.m_shard,
            "n": call.n,
            "k": call.k,
            "us": round(_us(call), 1),
            "sent_mb": round(_sent(call) * 1e-6, 1),
        }
        for call in trace.calls
    ]


def told(trace: Trace) -> str:
    rows = [("op", "rank", "m_shard, n, k", "us", "sent, MB", "GB/s")]
    for call in trace.calls:
        us, sent = _us(call), _sent(call)
        rate = f"{sent / us * 1e-3:.0f}" if us else ""
        sizes = f"{call.m_shard}, {call.n}, {call.k}"
        rows.append((call.op, f"{call.rank} of {call.ranks}", sizes, f"{us:.1f}", f"{sent * 1e-6:.1f}", rate))
    return table(rows)


def _us(call: TracedCall) -> float:
    return float(call.events["us"].max(initial=0.0))


def _sent(call: TracedCall) -> int:
    times, each = call.sent()
    return len(times) * each
