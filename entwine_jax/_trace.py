"""What happened to every tile of a call, and when: `trace_tiles`."""

import dataclasses
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from . import _core, _spans
from ._spans import ROLES, SPAN, Drawing, Spans

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
    "moving",
    "moved",
    "sending",
    "sent",
    "copying",
    "copied",
)
_RAW = np.dtype([("ns", "<u8"), ("tile", "<u4"), ("mark", "<u4")])
_EVENT = np.dtype(
    [("us", "f8"), ("cta", "i4"), ("writer", "i4"), ("mark", "i4"), ("owner", "i4"), ("row", "i4"), ("column", "i4")]
)
# cc/schedule/trace_event.h: bits of a packed tile.
_ROW_BITS, _COLUMN_BITS = 15, 14
# Role, and the marks at which it begins and ends.
_SPANS = (
    ("multiply", "first_load", "multiplied"),
    ("wait for rows", "claimed", "posted"),
    ("wait for partial sums", "awaited", "arrived"),
    ("transfer", "sending", "sent"),
    ("copy to y", "copying", "copied"),
)


@dataclasses.dataclass(frozen=True)
class TracedCall:
    """One rank's part of one call.

    ``events`` is a structured array in order of time, a row for each thing that happened: ``us`` since the call's
    first event, ``cta``, ``writer`` (of a GPU the warp: 0 loader, 1 and 2 storers, 3 scheduler, pusher, collector or
    mover; of a CPU device 0, and a ``cta`` is a worker), ``mark`` (an index of `MARKS`), and the tile's ``owner``,
    ``row`` block and ``column``. A push and a move have their destination as owner. What happens to a group under
    strategy "signal" has the group as its row, and on GPUs, where copy engines or NCCL do it, the CTA after the last.
    """

    op: str
    strategy: str
    device: int
    rank: int
    ranks: int
    m_shard: int
    n: int
    k: int
    tile_bytes: int  # of y
    parts: int  # of a tile that land one by one
    unit_bytes: int  # of a push
    group_bytes: tuple[int, ...]  # strategy "signal": what this rank sends of each group
    events: np.ndarray[Any, Any]

    def at(self, mark: str) -> np.ndarray[Any, Any]:
        """The events of one kind."""
        found: np.ndarray[Any, Any] = self.events[self.events["mark"] == MARKS.index(mark)]
        return found

    @property
    def us(self) -> float:
        """When the last thing happened."""
        return float(self.events["us"].max(initial=0.0))

    def sent(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """When, in microseconds, something of this rank's landed at a peer, and how many bytes."""
        _, ends, sizes = self._sent()
        return ends, sizes

    def _sent(self) -> tuple[Spans, Spans, Spans]:
        """From when to when so many bytes were on their way."""
        if self.strategy == "signal":
            transfers = self.of("transfer")
            return transfers["begin"], transfers["end"], np.array(self.group_bytes, int)[transfers["row"]]
        if self.op == "all_gather_matmul":
            pushed = self.at("pushed")["us"]
            return pushed, pushed, np.full(len(pushed), self.unit_bytes)
        if self.strategy == "resident":
            moves = self.of("move")
            return moves["begin"], moves["end"], np.full(len(moves), self.tile_bytes)
        landed = self.at("landed")
        # A finished part of an all-reduce goes to all peers.
        copies = np.where(landed["owner"] == self.rank, self.ranks - 1, 1)
        return landed["us"], landed["us"], copies * (self.tile_bytes // self.parts)

    def link_rate(self, window_us: float = 10.0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Times in microseconds, and the GB/s that this rank sent in the window that ends there."""
        edges = np.arange(0.0, self.us + window_us, window_us)
        carried = np.zeros(max(len(edges) - 1, 0))
        for begin, end, size in zip(*self._sent(), strict=True):
            shares = np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], begin), 0, None)
            if shares.sum() > 0:
                carried += size * shares / shares.sum()
            elif len(carried):  # at once
                carried[min(int(end / window_us), len(carried) - 1)] += size
        return edges[1:], carried / window_us * 1e-3

    @functools.cached_property
    def spans(self) -> np.ndarray[Any, Any]:
        """Who did what from when to when, as `SimulatedCall.spans` has it: an array of ``begin`` and ``end`` in
        microseconds, ``worker`` (the event's CTA), ``role`` (an index of ``("multiply", "wait for rows", "wait for
        partial sums", "move", "transfer", "copy to y")``) and the tile."""
        spans = [
            (first, last, cta, ROLES.index(role), *tile)
            for role, begin, end in _SPANS
            for (cta, tile), (first, last) in _paired(self, begin, end).items()
        ]
        begun, moved = self.at("moving"), self.at("moved")
        for cta in np.unique(moved["cta"]):  # what a mover has begun first lands first
            for first, last in zip(begun[begun["cta"] == cta], moved[moved["cta"] == cta], strict=False):
                tile = (first["owner"], first["row"], first["column"])
                spans.append((first["us"], last["us"], cta, ROLES.index("move"), *tile))
        return np.sort(np.array(spans, SPAN), order=["begin", "worker"])

    def of(self, role: str) -> np.ndarray[Any, Any]:
        """The spans of one role."""
        return _spans.of_role(self.spans, role)

    def drawing(self) -> Drawing:
        """What a picture has of this call."""
        return Drawing(self.rank, self.us, self.spans, self.link_rate(max(self.us / 100, 0.1)))


@dataclasses.dataclass(frozen=True)
class Trace:
    """The calls of one run, in order of launch."""

    calls: tuple[TracedCall, ...]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the Chrome trace format, for chrome://tracing or ui.perfetto.dev: a process a rank, a thread a CTA.

        The clocks of two GPUs aren't compared: every call starts at its own zero, one after the other.
        """
        events: list[dict[str, Any]] = []
        starts: dict[int, float] = {}
        for call in self.calls:
            start = starts.get(call.rank, 0.0)
            events += _spans.chrome_events(call.op, call.rank, call.spans, call.link_rate(), start)
            starts[call.rank] = start + call.us + 20.0
        events += [_spans.process_name(rank, f"rank {rank}") for rank in starts]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

    def draw(self, path: str | os.PathLike[str], rank: int | None = None) -> None:
        """Draws one rank's calls into a PNG file, one beneath the other: its CTAs over time, coloured by role and
        by whose the tile is, and the link's rate.

        Args:
          path: of the file.
          rank: whose calls; by default the first's that has any here.

        Raises:
          ImportError: matplotlib isn't installed (``pip install 'entwine-jax[bench]'``).
          ValueError: the trace has no call of that rank.
        """
        ranks = sorted({call.rank for call in self.calls})
        whose = ranks[0] if rank is None and ranks else rank
        calls = [call for call in self.calls if call.rank == whose]
        if not calls:
            raise ValueError(f"Trace.draw: rank={rank} has no traced call; those of ranks {ranks} are here")
        names = {f"{i}: {call.op}, {call.strategy}": call.drawing() for i, call in enumerate(calls, 1)}
        _spans.draw(names, f"rank {whose} of {calls[0].ranks}", path, workers="CTA")


def _paired(call: TracedCall, begin: str, end: str) -> dict[tuple[int, tuple[int, int, int]], tuple[float, float]]:
    """(cta, tile) -> when it first began and first ended there; of waits, of which a CTA has two, when the last
    ended."""

    def by_tile(mark: str, latest: bool) -> dict[tuple[int, tuple[int, int, int]], float]:
        found: dict[tuple[int, tuple[int, int, int]], float] = {}
        for event in call.at(mark):
            place = int(event["cta"]), (int(event["owner"]), int(event["row"]), int(event["column"]))
            if latest or place not in found:
                found[place] = float(event["us"])
        return found

    begins, ends = by_tile(begin, latest=False), by_tile(end, latest=end == "arrived")
    return {key: (begins[key], ends[key]) for key in begins if key in ends}


def require_traces() -> str:
    """The platform; NotImplementedError where nothing can be traced."""
    platform = jax.default_backend()
    if platform == "cpu" or (platform == "gpu" and _core.cuda_built()):
        return platform
    why = "entwine_jax was built without CUDA" if platform == "gpu" else f"jax.default_backend() is {platform!r}"
    raise NotImplementedError(
        f"entwine_jax.trace_tiles: {why}; notes are taken on GPUs, by a build with CUDA, and on CPU devices"
    )


def trace_tiles(fn: Callable[..., Any], *args: Any, megabytes: int = 256) -> Trace:
    """Runs ``fn(*args)`` and returns what its collective matmuls did, tile by tile.

    ``fn`` is compiled and run once as usual, then compiled again and run with notes: on GPUs by kernels that take
    them (some 2 % slower; the usual kernels have no code for it), on CPU devices by the executor. To see a warm call
    among others, call an op several times in ``fn``::

        trace = entwine_jax.trace_tiles(mlp, x, w1, w2)
        trace.save("mlp.json")  # for ui.perfetto.dev
        trace.draw("mlp.png")

    Args:
      fn: a function that JAX can jit and that calls ops of this library with strategy "fused", "resident" or "signal".
      *args: its arguments, arrays already where they belong.
      megabytes: host memory for the notes, of GPUs pinned and kept by the process: some 5 a call and rank for a
        thousand tiles. Calls that find no room aren't traced, nor on GPUs are calls with small tiles or operands other
        than bfloat16.

    Returns:
      A `Trace`. In a program of several processes, that of this process's ranks. Of copies that copy engines or NCCL
      make (strategy "signal"), times are of CUDA's events, within some 5 us of the kernels' own.

    Raises:
      NotImplementedError: the platform is neither GPUs nor CPU devices, or the package was built without CUDA.
      RuntimeError: a trace is being taken already, or no pinned memory is left.
    """
    platform = require_traces()

    def compiled() -> Any:
        # A function of its own, so that nothing that was compiled or captured before is used again.
        return jax.jit(lambda *values: fn(*values)).lower(*args).compile()

    jax.block_until_ready(compiled()(*args))
    traced = compiled()
    _core.start_trace(platform, megabytes << 20)
    try:
        jax.block_until_ready(traced(*args))
    finally:
        launches = _core.stop_trace(platform)
    return Trace(tuple(_call(launch) for launch in launches))


def _call(launch: dict[str, Any]) -> TracedCall:
    writers, capacity, ctas = launch.pop("writers"), launch.pop("capacity"), launch.pop("ctas")
    raw, moments = np.frombuffer(launch.pop("events"), _RAW), np.frombuffer(launch.pop("moments"), _RAW)
    place = np.flatnonzero(raw["ns"])
    writer = place // max(capacity, 1)
    # Launches of one call have the same CTAs; what no CTA has noted is of one more.
    cta = np.concatenate([writer // writers % max(ctas, 1), np.full(len(moments), ctas)])
    raw = np.concatenate([raw[place], moments])
    events = np.zeros(len(raw), _EVENT)
    events["us"] = (raw["ns"] - raw["ns"].min(initial=np.iinfo(np.uint64).max)) * 1e-3
    events["cta"], events["mark"] = cta, raw["mark"]
    events["writer"][: len(writer)] = writer % writers
    events["owner"] = raw["tile"] >> (_ROW_BITS + _COLUMN_BITS)
    events["row"] = raw["tile"] >> _COLUMN_BITS & ((1 << _ROW_BITS) - 1)
    events["column"] = raw["tile"] & ((1 << _COLUMN_BITS) - 1)
    pushed = events["mark"] == MARKS.index("pushed")
    events["owner"][pushed], events["row"][pushed], events["column"][pushed] = (
        raw["tile"][pushed] >> 24,
        raw["tile"][pushed] & 0xFFFFFF,
        0,
    )
    launch["group_bytes"] = tuple(launch["group_bytes"])
    return TracedCall(**launch, events=events[np.argsort(events["us"], kind="stable")])
