"""``entwine predict``: what a collective matmul should take by every strategy."""

import argparse
import dataclasses
import json
from typing import Any

from .. import _core
from .._config import OURS
from .._cost_model import Cost, cost_model
from .._simulate import simulate_tiles
from ._usage import UsageError, subcommand, table

_OPS = {"ag": "all_gather_matmul", "rs": "matmul_reduce_scatter", "ar": "matmul_all_reduce"}


def add_to(commands: Any) -> None:
    parser = subcommand(
        commands,
        "predict",
        run,
        "what a collective matmul should take on Hopper GPUs by every strategy; simulated, needs no GPU",
        "entwine predict matmul_reduce_scatter 8192 8192 3584 --ranks 2,4,8",
        "entwine predict ag 4096 3584 8192 --ranks 8 --set link_bytes_per_us=450e3",
        "entwine predict rs 4096 8192 2048 --ranks 2 --trace resident.json --strategy resident",
    )
    parser.add_argument(
        "op",
        choices=(*_OPS.values(), *_OPS),
        metavar="OP",
        help=", ".join(map("{0[1]} or {0[0]}".format, _OPS.items())),
    )
    for name, what in (("m", "the rows that are gathered, or summed"), ("n", "columns"), ("k", "what is contracted")):
        parser.add_argument(name, type=int, metavar=name.upper(), help=f"of one rank's matmul: {what}")
    parser.add_argument("--ranks", required=True, help="the size of the team, 2 to 8, or several: 2,4,8")
    parser.add_argument(
        "--dtype", default="bfloat16", help="of x and w: bfloat16 (default), float16, float8_e4m3fn, ..."
    )
    parser.add_argument("--out-dtype", help="of the result: by default dtype, of float8 bfloat16")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=NUMBER",
        help=f"another number of the machine than the measured one: {', '.join(_core.machine())}",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        help="write what each cluster does when, for ui.perfetto.dev; of one size of the team",
    )
    parser.add_argument("--strategy", choices=OURS, default="fused", help="whose trace; fused by default")


def run(options: argparse.Namespace) -> int:
    op = _OPS.get(options.op, options.op)
    sizes, found = (options.m, options.n, options.k), {}
    machine = dict(_number(text) for text in options.set)
    teams = options.ranks.split(",")
    if options.trace and len(teams) > 1:
        raise UsageError(f"--trace is of one size of the team, not --ranks {options.ranks}")
    for text in teams:
        if not text.strip().isdecimal():
            raise UsageError(f"--ranks {options.ranks}: must be the size of a team, or several: 2,4,8")
        types = {"dtype": options.dtype, "out_dtype": options.out_dtype}
        try:
            found[int(text)] = cost_model(op, *sizes, int(text), **types, machine=machine)
            if options.trace:
                traced = simulate_tiles(op, *sizes, int(text), strategy=options.strategy, **types, machine=machine)
                traced.save(options.trace)
        except (ValueError, TypeError) as error:
            text = str(error).removeprefix("entwine_jax.cost_model: ").removeprefix("entwine_jax.simulate_tiles: ")
            raise UsageError(text) from None
    if options.json:
        call = {"op": op, "m": options.m, "n": options.n, "k": options.k}
        costs = [{"ranks": ranks} | dataclasses.asdict(cost) for ranks, each in found.items() for cost in each.values()]
        print(json.dumps(call | {"costs": costs}, indent=1))
    else:
        print(told(found))
    return 0


def told(found: dict[int, dict[str, Cost]]) -> str:
    rows = [("ranks", "strategy", "us", "", "multiply", "link", "waits: rows, sums, buffers", "by the formula", "plan")]
    for ranks, costs in found.items():
        fastest = min(costs.values(), key=lambda cost: cost.us)
        for cost in costs.values():
            parts = cost.multiply_us + cost.link_us > 0
            waits = f"{cost.wait_rows_us:.1f}, {cost.wait_sums_us:.1f}, {cost.wait_buffers_us:.1f}"
            rows.append(
                (
                    str(ranks),
                    cost.strategy,
                    f"{cost.us:.1f}",
                    "fastest" if cost is fastest and len(costs) > 1 else "",
                    f"{cost.multiply_us:.1f}" if parts else "",
                    f"{cost.link_us:.1f}" if parts else "",
                    waits if parts and cost.plan else "",
                    f"{cost.formula_us:.1f}",
                    _plan(cost),
                )
            )
    return f"{table(rows)}\nMicroseconds, predicted from what two H200s were measured to do: not a measurement."


def _plan(cost: Cost) -> str:
    plan = cost.plan
    if plan is None:
        return ""
    if plan.few_rows:
        return "few rows"
    if plan.strategy == "signal":
        return f"{plan.tile_m}x{plan.tile_n}, raster {plan.raster}, {plan.moved_by}"
    if plan.movers:
        return f"{plan.tile_m}x{plan.tile_n}, raster {plan.raster}, lead {plan.lead}, {2 * plan.movers} SMs move"
    order = f"raster {plan.raster}, lead {plan.lead}, {plan.transport}"
    return f"{plan.tile_m}x{plan.tile_n}, {order}, pushers {plan.pushers}"


def _number(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name.strip(), float(number)
    except ValueError:
        raise UsageError(f"--set {text}: must be NAME=NUMBER, for example link_bytes_per_us=450e3") from None
