"""What happened to every tile of a fused call, and when: `trace_tiles`."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import _core

# cc/schedule/trace_event.h
MARKS = (
    "claimed",
    "posted",
    "first_load",
    "last_load",
    "awaited",
    "arrived",
    "multiplied",
    "rounded",
    "landed",
    "pushed",
    "collected",
)
_RAW = np.dtype([("ns", "<u8"), ("tile", "<u4"), ("mark", "<u4")])
_EVENT = np.dtype(
    [("us", "f8"), ("cta", "i4"), ("writer", "i4"), ("mark", "i4"), ("owner", "i4"), ("row", "i4"), ("column", "i4")]
)
# cc/kernel/sm90/shape.h: bits of a packed tile; bytes of what a storer lands and a pusher pushes at once.
_ROW_BITS, _COLUMN_BITS = 15, 14
_PART_ELEMENTS, _UNIT_BYTES = 64 * 256, 98304


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One rank's launch of one fused call.

    ``events`` is a structured array in order of time, a row for each thing that happened to a tile: ``us`` since the
    launch's first event, ``cta``, ``writer`` (the warp: 0 loader, 1 and 2 storers, 3 scheduler, pusher or collector),
    ``mark`` (an index of `MARKS`), and the tile's ``owner``, ``row`` block and ``column``. A push has its destination
    as owner.
    """

    op: str
    device: int
    rank: int
    ranks: int
    m_shard: int
    n: int
    k: int
    out_bytes: int
    events: np.ndarray[Any, Any]

    def at(self, mark: str) -> np.ndarray[Any, Any]:
        """The events of one kind."""
        found: np.ndarray[Any, Any] = self.events[self.events["mark"] == MARKS.index(mark)]
        return found

    def sent(self) -> tuple[np.ndarray[Any, Any], int]:
        """When, in microseconds, something landed at a peer, and how many bytes each time."""
        if self.op == "all_gather_matmul":
            return self.at("pushed")["us"], _UNIT_BYTES
        landed = self.at("landed")
        # A finished part of an all-reduce goes to all peers.
        copies = np.where(landed["owner"] == self.rank, self.ranks - 1, 1)
        return np.repeat(landed["us"], copies), _PART_ELEMENTS * self.out_bytes

    def link_rate(self, window_us: float = 10.0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Times in microseconds, and the GB/s that this rank sent in the window that ends there."""
        landed, each = self.sent()
        edges = np.arange(0.0, self.events["us"].max(initial=0.0) + window_us, window_us)
        counts, _ = np.histogram(landed, edges)
        return edges[1:], counts * each / window_us * 1e-3


@dataclasses.dataclass(frozen=True)
class Trace:
    """The fused calls of one run, in order of launch."""

    calls: tuple[TracedCall, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the Chrome trace format, for chrome://tracing or ui.perfetto.dev: a process a rank, a thread a CTA.

        The clocks of two GPUs aren't compared: every call starts at its own zero, one after the other.
        """
        events: list[dict[str, Any]] = []
        starts: dict[int, float] = {}
        for call in self.calls:
            start = starts.get(call.rank, 0.0)
            for name, begin, end in _spans(call):
                for (cta, tile), (first, last) in _paired(call, begin, end).items():
                    events.append(
                        {"name": name, "cat": call.op, "ph": "X", "pid": call.rank, "tid": cta, "ts": start + first}
                        | {"dur": last - first, "args": {"owner": tile[0], "row": tile[1], "column": tile[2]}}
                    )
            for us, rate in zip(*call.link_rate(), strict=True):
                events.append(
                    {"name": "link GB/s", "ph": "C", "pid": call.rank, "ts": start + us, "args": {"sent": rate}}
                )
            starts[call.rank] = start + float(call.events["us"].max(initial=0.0)) + 20.0
        for rank in starts:
            events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


def _spans(call: TracedCall) -> tuple[tuple[str, str, str], ...]:
    if call.op == "all_gather_matmul":
        return (("wait for rows", "claimed", "posted"), ("load", "first_load", "last_load"))
    return (("load", "first_load", "last_load"), ("wait for partial sums", "awaited", "arrived"))


def _paired(call: TracedCall, begin: str, end: str) -> dict[tuple[int, tuple[int, int, int]], tuple[float, float]]:
    """(cta, tile) -> when it began and ended there."""

    def by_tile(mark: str) -> dict[tuple[int, tuple[int, int, int]], float]:
        return {
            (int(e["cta"]), (int(e["owner"]), int(e["row"]), int(e["column"]))): float(e["us"]) for e in call.at(mark)
        }

    begins, ends = by_tile(begin), by_tile(end)
    return {key: (begins[key], ends[key]) for key in begins if key in ends}


def require_gpus() -> None:
    """NotImplementedError where nothing can be traced."""
    if not _core.cuda_built() or jax.default_backend() != "gpu":
        raise NotImplementedError(
            "entwine_jax.trace_tiles: only the GPU kernels take notes; run it where jax.default_backend() is 'gpu' and"
            " entwine_jax was built with CUDA"
        )


def trace_tiles(fn: Callable[..., Any], *args: Any, megabytes: int = 256) -> Trace:
    """Runs ``fn(*args)`` on GPUs and returns what its fused calls did, tile by tile.

    ``fn`` is compiled and run once as usual, then compiled again and run with kernels that take notes (some 2 % slower;
    the usual kernels have no code for it). To see a warm call among others, call an op several times in ``fn``.

    Args:
      fn: a function that JAX can jit and that calls ops of this library with strategy "fused".
      *args: its arguments, arrays already where they belong.
      megabytes: pinned host memory for the notes, kept by the process: some 5 a call and rank for a thousand tiles.
        Calls that find no room aren't traced, nor are calls with small tiles or operands other than bfloat16.

    Returns:
      A `Trace`. In a program of several processes, that of this process's ranks.

    Raises:
      NotImplementedError: there is no GPU, or the package was built without CUDA.
      RuntimeError: a trace is being taken already, or no pinned memory is left.
    """
    require_gpus()

    def compiled() -> Any:
        # A function of its own, so that nothing that was compiled or captured before is used again.
        return jax.jit(lambda *values: fn(*values)).lower(*args).compile()

    jax.block_until_ready(compiled()(*args))
    traced = compiled()
    _core.start_trace(megabytes << 20)
    try:
        jax.block_until_ready(traced(*args))
    finally:
        launches = _core.stop_trace()
    return Trace(tuple(_call(launch) for launch in launches))


def _call(launch: dict[str, Any]) -> TracedCall:
    writers, capacity = launch.pop("writers"), launch.pop("capacity")
    raw = np.frombuffer(launch.pop("events"), _RAW)
    place = np.flatnonzero(raw["ns"])
    raw, writer = raw[place], place // capacity
    events = np.zeros(len(raw), _EVENT)
    events["us"] = (raw["ns"] - raw["ns"].min(initial=np.iinfo(np.uint64).max)) * 1e-3
    events["cta"], events["writer"], events["mark"] = writer // writers, writer % writers, raw["mark"]
    events["owner"] = raw["tile"] >> (_ROW_BITS + _COLUMN_BITS)
    events["row"] = raw["tile"] >> _COLUMN_BITS & ((1 << _ROW_BITS) - 1)
    events["column"] = raw["tile"] & ((1 << _COLUMN_BITS) - 1)
    pushed = events["mark"] == MARKS.index("pushed")
    events["owner"][pushed], events["row"][pushed], events["column"][pushed] = (
        raw["tile"][pushed] >> 24,
        raw["tile"][pushed] & 0xFFFFFF,
        0,
    )
    del launch["ctas"]
    return TracedCall(**launch, events=events[np.argsort(events["us"], kind="stable")])
