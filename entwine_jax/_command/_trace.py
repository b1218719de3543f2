"""``entwine trace``: what happened to every tile of a function's collective matmuls, and when."""

import argparse
import json
import sys
from typing import Any

from .._trace import Trace, TracedCall, require_traces, trace_tiles
from . import _function
from ._usage import subcommand, table


def add_to(commands: Any) -> None:
    parser = subcommand(
        commands,
        "trace",
        run,
        "run a function and write what its collective matmuls did, tile by tile, for ui.perfetto.dev",
        "entwine trace model:mlp --args model:example_args --out trace.json",
    )
    _function.add_options(parser)
    parser.add_argument("--out", required=True, metavar="FILE.json", help="the Chrome trace to write")
    parser.add_argument("--png", metavar="FILE.png", help="draw one rank's calls, too (needs matplotlib)")
    parser.add_argument("--megabytes", type=int, default=256, help="host memory for the notes (default 256)")


def run(options: argparse.Namespace) -> int:
    call = _function.load(options)  # before JAX is asked for anything: it may make CPU devices
    try:
        require_traces()
    except NotImplementedError as error:
        print(f"entwine trace: {error}", file=sys.stderr)
        return 1
    with call.in_mesh():
        trace = trace_tiles(call.fn, *call.arrays(), megabytes=options.megabytes)
    if not trace.calls:
        print(
            f"entwine trace: {options.function} made no call that takes notes: entwine explain tells what became of its"
            " matmuls; on GPUs notes are taken of bfloat16 operands and large tiles",
            file=sys.stderr,
        )
        return 1
    trace.save(options.out)
    if options.png is not None:
        try:
            trace.draw(options.png)
        except ImportError as error:
            print(f"entwine trace: {error}", file=sys.stderr)
            return 1
    print(json.dumps({"trace": options.out, "calls": summary(trace)}, indent=1) if options.json else told(trace))
    return 0


def summary(trace: Trace) -> list[dict[str, Any]]:
    return [
        {
            "op": call.op,
            "strategy": call.strategy,
            "rank": call.rank,
            "ranks": call.ranks,
            "m_shard": call.m_shard,
            "n": call.n,
            "k": call.k,
            "us": round(call.us, 1),
            "sent_mb": round(_sent(call) * 1e-6, 1),
        }
        for call in trace.calls
    ]


def told(trace: Trace) -> str:
    rows = [("op", "strategy", "rank", "m_shard, n, k", "us", "sent, MB", "GB/s")]
    for call in trace.calls:
        us, sent = call.us, _sent(call)
        rate = f"{sent / us * 1e-3:.0f}" if us else ""
        sizes = f"{call.m_shard}, {call.n}, {call.k}"
        rows.append(
            (call.op, call.strategy, f"{call.rank} of {call.ranks}", sizes, f"{us:.1f}", f"{sent * 1e-6:.1f}", rate)
        )
    return table(rows)


def _sent(call: TracedCall) -> int:
    return int(call.sent()[1].sum())
