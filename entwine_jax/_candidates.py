"""The plans that `autotune` tries: a few around the cost model's. Pure."""

import dataclasses
from collections.abc import Iterator
from typing import Any, cast

from . import _core
from ._strategy import Plan, Request, Sizes

# cc/schedule/plan.h and make_plan.h: clusters that run at once, and the leads of pull and push.
_CLUSTERS = 66
_LEADS = {"pull": 58, "push": 44}


def forms(request: Request, shape: Sizes, base: Plan) -> list[Plan]:
    """Other tiles, the other transport, few rows or tiles; without `base` itself."""
    made = list(_forms(request, shape, base))
    return [plan for i, plan in enumerate(made) if plan != base and plan not in made[:i]]


def _forms(request: Request, shape: Sizes, base: Plan) -> Iterator[Plan]:
    tiled = dataclasses.replace(base, few_rows=False)
    if base.target == "host":
        for tile in (16, 64):
            yield dataclasses.replace(tiled, tile_m=tile, tile_n=tile)
    else:
        yield tiled
        rows = request.team.size * shape.batch * shape.m_shard - shape.missing
        if rows <= _core.FEW_ROWS_MOST and not (request.gathers or request.transpose_x):
            yield dataclasses.replace(base, few_rows=True)
        for tile_m, tile_n in request.sm90_tiles:
            # As many rows are walked together.
            raster = max(1, base.raster * base.tile_m // tile_m)
            yield dataclasses.replace(tiled, tile_m=tile_m, tile_n=tile_n, raster=raster)
    if request.op != "all_gather_matmul":
        other = "push" if base.transport == "pull" else "pull"
        lead = base.lead if base.target == "host" or base.lead == _CLUSTERS else _LEADS[other]
        yield dataclasses.replace(tiled, transport=other, lead=max(lead, request.team.size - 1))


def signals(base: Plan | None) -> list[Plan]:
    """Plans of strategy "signal": the model's, by copy engines where it may be, and with shares of the GPU for NCCL."""
    if base is None:
        return []
    shares = () if base.target != "sm90" else (8, 16, 24) if base.far else (0, 24)
    others = (dataclasses.replace(base, comm_sms=sms, engines=sms == 0) for sms in shares if sms != base.comm_sms)
    return [base, *others]


def residents(base: Plan | None) -> list[Plan]:
    """Plans of strategy "resident": the model's, and with as many multiprocessors as fill the link, and twice that."""
    if base is None:
        return []
    movers = (4, 8) if base.target == "sm90" else ()
    return [base, *(dataclasses.replace(base, movers=each) for each in movers if each != base.movers)]


def numbers(request: Request, base: Plan) -> list[Plan]:
    """Of a plan's tiles, one number changed at a time."""
    if base.few_rows:
        return []
    if base.strategy == "signal":
        waves = [dataclasses.replace(base, group_waves=waves) for waves in (1, 2, 4)]
        tiles = _core.SIGNAL_TILES if base.target == "sm90" else ()
        others = [dataclasses.replace(base, tile_m=m, tile_n=n) for m, n in tiles]
        return [plan for plan in (*waves, *others) if plan != base]
    values: dict[str, tuple[int, ...]] = {"raster": (max(1, base.raster // 2), base.raster * 2)}
    if base.strategy == "resident":
        values["movers"] = (1, 2) if base.target == "host" else (2, 3, 6)
        if request.op != "all_gather_matmul":
            tried = [0, 4] if base.target == "host" else [_CLUSTERS // 2, 44, 58]
            values["lead"] = tuple(max(lead, request.team.size - 1) for lead in tried)
    elif request.op == "all_gather_matmul":
        values["pushers"] = (1, 2) if base.target == "host" else (12, 18, 25, 33, 44)
    else:
        leads = (0, 4) if base.target == "host" else (_CLUSTERS // 2, 44, 58, _CLUSTERS, 90)
        values["lead"] = tuple(max(lead, request.team.size - 1) for lead in leads)
        if base.transport == "push" and base.target == "sm90":
            values["pushers"] = (6, 16)
    if request.gathers and base.target == "sm90":
        values["copiers"] = (33, 48, _CLUSTERS)
    made: Iterator[Plan] = (
        dataclasses.replace(base, **cast(Any, {name: value})) for name, each in values.items() for value in each
    )
    return [plan for plan in dict.fromkeys(made) if plan != base]


def show(op: str, plan: Plan, gathers: bool) -> str:
    """A plan in a few words; different plans of one call differ in them."""
    if plan.few_rows:
        return "few rows"
    if plan.strategy == "signal":
        waves = f" groups of {plan.group_waves} waves" if plan.group_waves else ""
        return f"signal {plan.tile_m}x{plan.tile_n} raster {plan.raster} {plan.moved_by}{waves}"
    if plan.strategy == "resident":
        lead = "" if op == "all_gather_matmul" else f" lead {plan.lead}"
        rest = f"{lead} {plan.movers} movers" + (f" copiers {plan.copiers}" if gathers else "")
        return f"resident {plan.tile_m}x{plan.tile_n} raster {plan.raster}{rest}"
    rest = f"pushers {plan.pushers}" if op == "all_gather_matmul" else f"lead {plan.lead} {plan.transport}"
    if op != "all_gather_matmul" and plan.transport == "push" and plan.target == "sm90":
        rest += f" {plan.pushers} at once"
    return f"{plan.tile_m}x{plan.tile_n} raster {plan.raster} {rest}" + (f" copiers {plan.copiers}" if gathers else "")
