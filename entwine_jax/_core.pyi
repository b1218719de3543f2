"""Types of the compiled module; see cc/python."""

from collections.abc import Mapping
from typing import Any, TypedDict

class PlanDict(TypedDict):
    tile_m: int
    tile_n: int
    raster: int
    lead: int
    transport: int
    pushers: int
    copiers: int
    few_rows: bool
    movers: int

class SignalDict(TypedDict):
    tile_m: int
    tile_n: int
    raster: int
    comm_sms: int
    us: float
    xla_us: float

class TimesDict(TypedDict):
    us: float
    link_us: float
    multiply_us: float
    wait_rows_us: float
    wait_sums_us: float
    wait_buffers_us: float

class SpansDict(TypedDict):
    spans: bytes
    link_bytes: list[float]
    bin_us: float

# cc/schedule/few_rows.h
FEW_ROWS_MOST: int
# cc/schedule/group_search.h
SIGNAL_TILES: tuple[tuple[int, int], ...]

def sm90_tiles(*, out_bytes: int, gated: bool = ...) -> tuple[tuple[int, int], ...]: ...
def registrations() -> dict[str, dict[str, dict[str, Any]]]: ...
def cuda_built() -> bool: ...
def memory() -> list[tuple[str, int, int, int, list[int]]]: ...
def make_plan(
    op: str,
    target: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    out_bytes: int,
    in_bytes: int = 2,
    gated: bool = False,
) -> PlanDict: ...
def make_resident_plan(
    op: str,
    target: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    out_bytes: int,
    in_bytes: int = 2,
    gated: bool = False,
) -> tuple[PlanDict, float]: ...
def predict(
    op: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    out_bytes: int,
    tiles_only: bool = False,
    in_bytes: int = 2,
    gated: bool = False,
    beside: float = 0,
) -> tuple[float, float]: ...
def machine() -> dict[str, float]: ...
def check_machine(numbers: dict[str, float]) -> None: ...
def simulate_fused(
    op: str,
    plan: PlanDict,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    out_bytes: int,
    in_bytes: int = 2,
    machine: Mapping[str, float],
    spans: bool = False,
) -> tuple[TimesDict, SpansDict]: ...
def simulate_xla(
    op: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    out_bytes: int,
    in_bytes: int = 2,
    gated: bool = False,
    machine: dict[str, float],
) -> TimesDict: ...
def chunk_rows(target: str, *, ranks: int, rows: int) -> tuple[int, int]: ...
def simulate_signal(
    op: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    tile_m: int,
    tile_n: int,
    raster: int,
    comm_sms: int,
    group_waves: int,
    far: bool,
    element_bytes: int,
    machine: Mapping[str, float],
    spans: bool = False,
) -> tuple[TimesDict, SpansDict]: ...
def tile_order(
    op: str,
    *,
    ranks: int,
    rank: int,
    batch: int,
    m_shard: int,
    n: int,
    tile_m: int,
    tile_n: int,
    raster: int,
    lead: int,
) -> list[tuple[int, int, int]]: ...
def arena_bytes(
    op: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    tile_m: int,
    tile_n: int,
    few_rows: bool,
    moved: bool = False,
    element_bytes: int,
    parts: int,
    beside: tuple[int, int, int] = (0, 0, 0),
) -> int: ...
def make_signal_plan(
    op: str,
    target: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    far: bool,
    element_bytes: int,
) -> SignalDict: ...
def signal_groups(
    op: str,
    target: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    tile_m: int,
    tile_n: int,
    comm_sms: int,
    group_waves: int,
    far: bool,
    element_bytes: int,
) -> list[int]: ...
def signal_scratch_bytes(
    op: str,
    target: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    tile_m: int,
    tile_n: int,
    element_bytes: int,
    gathers: bool,
) -> int: ...
def signal_arena_bytes(
    op: str,
    *,
    ranks: int,
    batch: int,
    m_shard: int,
    n: int,
    k: int,
    missing: int = 0,
    tile_m: int,
    tile_n: int,
    element_bytes: int,
) -> int: ...
def nccl() -> tuple[str, str, str]: ...
def start_trace(platform: str, bytes: int) -> None: ...
def stop_trace(platform: str) -> list[dict[str, Any]]: ...
def hopper(device_ordinals: list[int]) -> str: ...
def peer_access(device_ordinals: list[int]) -> str: ...
