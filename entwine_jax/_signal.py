"""Strategy "signal": what it can't take, its numbers, and what it should take. Sizes are those of `_strategy.sizes`."""

from collections.abc import Mapping
from typing import Any

from . import _core
from ._config import Config

# Copy engines or XLA's NCCL move groups of tiles; NCCL needs no memory of peers. Products of several are as many calls.
TILES = _core.SIGNAL_TILES


def obstacle(request: Any, dtype: Any, rows: int) -> str | None:
    """Why it can't run what "fused" could on the same devices, None if it can; `rows` are all ranks' together."""
    config: Config = request.settings.config
    if request.scaled:
        return "it takes no float8 operands (strategy='fused' does)"
    if request.products > 1:
        return "it takes one product a call"
    if request.dtype != dtype:
        return (
            f"what NCCL adds up and it returns is of x's dtype {dtype}, not {request.dtype} (leave out "
            "preferred_element_type, or strategy='fused')"
        )
    if config.few_rows:
        return "config's few_rows=True is for strategy='fused'"
    if request.team.platform != "cuda":
        return None
    tile = (config.tile_m, config.tile_n)
    if tile not in ((None, None), *TILES):
        return f"config's tile_m={tile[0]}, tile_n={tile[1]} is none of its tiles {TILES}"
    if rows <= _core.FEW_ROWS_MOST:
        return f"{rows} rows are too few to move in groups (strategy='fused' has kernels for them)"
    return None


def numbers(request: Any, target: str, geometry: Mapping[str, int], far: bool, itemsize: int) -> dict[str, Any]:
    """Of its plan, by the names of `_strategy.Plan`; those of "fused" mean nothing to it."""
    made, config = made_plan(request.op, target, geometry, far, itemsize), request.settings.config
    comm_sms = made["comm_sms"] if config.comm_sms is None or target == "host" else config.comm_sms
    picked: dict[str, Any] = {
        "tile_m": config.tile_m or made["tile_m"],
        "tile_n": config.tile_n or made["tile_n"],
        "raster": config.raster or made["raster"],
        "comm_sms": comm_sms,
        "engines": comm_sms == 0,
    }
    unused = {"lead": 0, "transport": "pull", "pushers": 1, "copiers": 1, "few_rows": False}
    return picked | unused | {"target": target, "group_waves": config.group_waves or 0, "far": far}


def made_plan(op: str, target: str, geometry: Mapping[str, int], far: bool, itemsize: int) -> "_core.SignalDict":
    return _core.make_signal_plan(op, target, **geometry, far=far, element_bytes=itemsize)


def predict(op: str, geometry: Mapping[str, int], far: bool, itemsize: int) -> tuple[float, float]:
    """What a call on GPUs should take, and XLA, in microseconds: cc/schedule/group_search.h."""
    made = made_plan(op, "sm90", geometry, far, itemsize)
    return made["us"], made["xla_us"]


def groups(op: str, plan: Any, geometry: Mapping[str, int], itemsize: int) -> list[int]:
    """Where groups end: in tiles of a chunk (sums), or row blocks of one (all-gather)."""
    return _core.signal_groups(
        op,
        plan.target,
        **geometry,
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        comm_sms=plan.comm_sms,
        group_waves=plan.group_waves,
        far=plan.far,
        element_bytes=itemsize,
    )


def simulate(
    op: str, plan: Any, geometry: Mapping[str, int], itemsize: int, machine: Mapping[str, float], spans: bool = False
) -> "tuple[_core.TimesDict, _core.SpansDict]":
    """Of a call on GPUs by this plan: cc/simulate/groups.h."""
    return _core.simulate_signal(
        op,
        **geometry,
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        raster=plan.raster,
        comm_sms=plan.comm_sms,
        group_waves=plan.group_waves,
        far=plan.far,
        element_bytes=itemsize,
        machine=machine,
        spans=spans,
    )


def scratch_bytes(op: str, plan: Any, geometry: Mapping[str, int], itemsize: int, gathers: bool) -> int:
    """Of the memory that a call has beside its results, from XLA."""
    return _core.signal_scratch_bytes(
        op,
        plan.target,
        **geometry,
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        element_bytes=itemsize,
        gathers=gathers,
    )


def arena_bytes(op: str, plan: Any, geometry: Mapping[str, int], itemsize: int) -> int:
    """Of peer memory that the call needs on each rank: none but where copy engines move."""
    if not plan.engines:
        return 0
    tile = {"tile_m": plan.tile_m, "tile_n": plan.tile_n}
    return _core.signal_arena_bytes(op, **geometry, **tile, element_bytes=itemsize)
