"""A bar on stderr, where that is a terminal."""

import sys
import time
from typing import Self, TextIO

_CELLS = 24


class Progress:
    """Of so many things; `done` may be a fraction. With `lines`, a line for each thing where there is no terminal."""

    def __init__(self, total: int, lines: bool = False, out: TextIO | None = None) -> None:
        self._total, self._out = max(1, total), out or sys.stderr
        self._bar, self._lines = self._out.isatty(), lines
        self._start, self._width = time.monotonic(), 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar and self._width:
            self._write("\n")

    def show(self, done: float, text: str) -> None:
        if self._bar:
            full = round(_CELLS * done / self._total)
            line = f"[{'#' * full}{'.' * (_CELLS - full)}] {time.monotonic() - self._start:3.0f} s  {text}"
            self._write("\r" + line.ljust(self._width))
            self._width = len(line)

    def finish(self, done: int, text: str) -> None:
        """One of them is done."""
        self.show(done, text)
        if self._lines and not self._bar:
            self._write(f"[{done}/{self._total}] {text}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()
