"""What `autotune` reports."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from ._strategy import Plan


@dataclasses.dataclass(frozen=True)
class Tuned:
    """One distinct collective matmul of a tuned function. Times are milliseconds of one call, the slowest rank's."""

    op: str
    key: str  # of the cache: op, one rank's shapes and dtypes, team
    asked: str  # the key that tracing asked for, where a vmap has made the call larger
    team_size: int
    platform: str
    status: str  # "measured", "would be measured", or why it wasn't
    strategy: str | None = None  # that won; None if nothing is known
    plan: Plan | None = None  # the best fused one, even if another strategy won
    shown: str = ""  # the plan of what won, or this one, in a few words
    fused_ms: float | None = None
    signal_plan: Plan | None = None  # the same of strategy "signal"
    signal_ms: float | None = None
    resident_plan: Plan | None = None  # and of "resident"
    resident_ms: float | None = None
    xla_ms: float | None = None
    model_ms: float | None = None  # of the cost model's choice
    tried: dict[str, float | None] = dataclasses.field(default_factory=dict)  # by plan; None of what can't run
    rounds: int = 0

    @property
    def ms(self) -> float | None:
        """Of what won."""
        ours = {"fused": self.fused_ms, "resident": self.resident_ms, "signal": self.signal_ms}
        return ours.get(self.strategy or "", self.xla_ms)

    @property
    def gain(self) -> float | None:
        """The time of the cost model's choice over that of what won. The best of several noisy times looks a bit better
        than it is."""
        return None if self.ms is None or self.model_ms is None else self.model_ms / self.ms


class Tuning(Sequence[Tuned]):
    """The distinct collective matmuls of a function in traced order; `print` shows a table. `path` is the file that has
    what was measured, None if there is none."""

    def __init__(self, rows: Sequence[Tuned], path: Path | None) -> None:
        self._rows, self.path = tuple(rows), path

    @overload
    def __getitem__(self, index: int) -> Tuned: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tuned]: ...
    def __getitem__(self, index: int | slice) -> Tuned | Sequence[Tuned]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        if not self:
            return "no collective matmul"
        titles = (
            "product",
            "takes",
            "fused ms",
            "resident ms",
            "signal ms",
            "XLA ms",
            "cost model's ms",
            "gain",
            "tried",
            "best plan",
            "status",
        )
        rows: list[tuple[str, ...]] = [titles, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, *([f"kept in {self.path}"] if self.path else [])])


def _cells(row: Tuned) -> tuple[str, ...]:
    all_ms = (row.fused_ms, row.resident_ms, row.signal_ms, row.xla_ms, row.model_ms)
    times = ("" if ms is None else f"{ms:.4g}" for ms in all_ms)
    gain = "" if row.gain is None else f"{row.gain:.3f}"
    return row.key, row.strategy or "", *times, gain, str(len(row.tried) or ""), row.shown, row.status
