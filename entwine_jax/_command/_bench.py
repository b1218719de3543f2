"""``entwine bench``: the benchmark, where its sources are."""

import argparse
import importlib
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from . import _function
from ._usage import subcommand


def add_to(commands: Any) -> None:
    parser = subcommand(
        commands,
        "bench",
        run,
        "time the ops against XLA, the GEMM alone and the link alone; run it in a checkout of the sources",
        "entwine bench --suite ten,all_reduce --out results.json",
        "entwine bench --tiny --platform cpu",
    )
    parser.add_argument("--suite", default="ten", help="suites of benchmarks/shapes.py, comma-separated (default ten)")
    parser.add_argument("--strategy", default="fused", help="some of fused (default), signal and auto")
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="keep the results there")
    parser.add_argument("--platform", help="for example cpu; by default JAX's own choice")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes and few rounds: whether it works, not how fast"
    )


def run(options: argparse.Namespace) -> int:
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        there = importlib.util.find_spec("benchmarks.collective_matmul") is not None
    except ModuleNotFoundError:
        there = False
    if not there:
        print(
            "entwine bench: the benchmarks aren't part of the package but of its sources: run this in the root of a"
            " checkout of entwine_jax, where benchmarks/ is",
            file=sys.stderr,
        )
        return 1
    if options.platform == "cpu":
        _function.provide_cpu_devices(2)
    with tempfile.TemporaryDirectory() as scratch:
        out = options.out or Path(scratch) / "results.json"
        arguments = ["--out", str(out), "--suite", options.suite, "--strategy", options.strategy]
        arguments += ["--platform", options.platform] if options.platform else []
        importlib.import_module("benchmarks.collective_matmul").main(arguments + ["--tiny"] * options.tiny)
        results = json.loads(out.read_text())
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        print("\n".join(importlib.import_module("benchmarks.report").blocks(results).values()), end="")
    return 0
