"""What `autotune` has measured, and where that is kept: this process, the user's files, tables that are shipped.

A file holds one kind of device, and one version of this package, since kernels change between them::

    {"format": 1, "library": "0.1.0", "device": "NVIDIA H200",
     "entries": {KEY: {"strategy": "fused", "fused_ms": 0.213, "xla_ms": 0.301, "plan": {"tile_m": 256, ...},
                       "signal_ms": 0.244, "signal_plan": {...}, "resident_ms": 0.221, "resident_plan": {...},
                       "measured": {"when": ..., "jax": ..., ...}}}}

What is said of strategies "resident" and "signal" may be left out.

A shipped table is such a file. Files are read once a process, while JAX traces; nothing here measures.
"""

import contextlib
import dataclasses
import fcntl
import functools
import importlib.metadata
import json
import os
import re
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from ._config import OURS, TRANSPORTS

FORMAT = 1
# Of an entry's plan: the fields of _strategy.Plan.
_NUMBERS = {"tile_m": 1, "tile_n": 1, "raster": 1, "lead": 0, "pushers": 1, "copiers": 1}
_MORE = {"comm_sms": 0, "group_waves": 0, "movers": 0}  # may be left out, as far and engines may be
_SHIPPED = Path(__file__).parent / "tuned"

Table = dict[str, dict[str, Any]]  # entries as in the file, by key


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was measured of one product: the strategy that won, and the best fused plan even if XLA did."""

    strategy: str
    fused_ms: float | None  # None if no fused plan ran
    xla_ms: float
    plan: dict[str, Any] | None
    source: str  # the file, or this process
    signal_ms: float | None = None  # the same of strategy "signal"
    signal_plan: dict[str, Any] | None = None
    resident_ms: float | None = None  # and of "resident"
    resident_plan: dict[str, Any] | None = None

    def __str__(self) -> str:
        fused = "nothing fused" if self.fused_ms is None else f"{self.fused_ms:.3g} ms fused"
        if self.strategy == "signal":
            fused += f", {self.signal_ms:.3g} ms as signal"
        if self.strategy == "resident":
            fused += f", {self.resident_ms:.3g} ms resident"
        return f"tuned: {fused}, {self.xla_ms:.3g} ms on XLA ({self.source})"


def installed(package: str) -> str | None:
    """The version of a package, None where its metadata isn't."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def version() -> str:
    """Of this package; "unknown" where its files were put without its metadata."""
    return installed("entwine_jax") or "unknown"


@functools.cache
def device_kind(platform: str) -> str | None:
    """None if there is no such device: then nothing was measured on one."""
    try:
        return str(jax.devices(platform)[0].device_kind)
    except RuntimeError:
        return None


def find(kind: str, key: str, files: bool) -> Entry | None:
    """What this process has measured, else what the user's file holds (with `files`), else what is shipped."""
    user = path_of(kind)
    for source in ("this process", user if files else None, _SHIPPED / shipped_name(kind)):
        table = _of_process(kind) if isinstance(source, str) else {} if source is None else _read(source, kind)
        if (found := table.get(key)) is not None:
            known: dict[str, Any] = {name: found[name] for name in ("strategy", "fused_ms", "xla_ms", "plan")}
            more = ("signal_ms", "signal_plan", "resident_ms", "resident_plan")
            others: dict[str, Any] = {name: found.get(name) for name in more}
            return Entry(**known, **others, source=str(source))
    return None


def remember(kind: str, entries: Mapping[str, dict[str, Any]]) -> None:
    """Keeps entries for this process."""
    with _lock:
        _memory.setdefault(kind, {}).update(entries)


def store(kind: str, entries: Mapping[str, dict[str, Any]]) -> Path | None:
    """Keeps entries for this process, and merges them into the user's file: its path, or None, with a warning, if it
    can't be written."""
    remember(kind, entries)
    path = path_of(kind)
    try:
        if path is None:
            raise OSError("there is no home directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        with _alone(path):
            with _lock:
                _files.pop(path, None)  # others may have written since it was read
            merged = {**_read(path, kind), **entries}
            _replace(path, json.dumps(file_of(kind, merged), indent=1, sort_keys=True) + "\n")
        with _lock:
            _files[path] = merged
    except OSError as error:
        _warn(
            path,
            f"entwine_jax: can't write {path or 'a cache of what was tuned'}: {error}; what was measured is for this "
            "process only; set ENTWINE_CACHE_DIR to a directory that can be written",
        )
        return None
    return path


def path_of(kind: str) -> Path | None:
    """The user's file, None if there is nowhere to keep one."""
    named, base = os.environ.get("ENTWINE_CACHE_DIR"), os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        folder = Path(named).expanduser() if named else Path(base).expanduser() / "entwine_jax"
    except RuntimeError:  # no home
        return None
    return folder / f"{_slug(kind)}-{version()}.json"


def shipped_name(kind: str) -> str:
    """Of the file in entwine_jax/tuned."""
    return f"{_slug(kind)}.json"


def forget() -> None:
    """Of this process: what it has measured and read."""
    with _lock:
        _memory.clear()
        _files.clear()
        _warned.clear()


# By kind of device; by path.
_memory: dict[str, Table] = {}
_files: dict[Path, Table] = {}
_warned: set[Path | None] = set()
_lock = threading.Lock()


def _of_process(kind: str) -> Table:
    with _lock:
        return _memory.get(kind, {})


def _slug(kind: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", kind.lower()).strip("_")


def file_of(kind: str, entries: Table) -> dict[str, Any]:
    """What a file of these holds."""
    return {"format": FORMAT, "library": version(), "device": kind, "entries": entries}


def _read(path: Path, kind: str) -> Table:
    """A file's entries, none if there is no such file; read once."""
    with _lock:
        if path in _files:
            return _files[path]
    try:
        found = _parse(path.read_text(), kind)
    except FileNotFoundError:
        found = {}
    except (OSError, ValueError) as error:
        _warn(
            path,
            f"entwine_jax: ignoring {path}, which isn't a cache of {version()} for {kind}: {error}; delete it, or set "
            "ENTWINE_CACHE_DIR to another directory",
        )
        found = {}
    with _lock:
        return _files.setdefault(path, found)


def _parse(text: str, kind: str) -> Table:
    """ValueError (as json's own errors are) if it is anything else."""
    found = json.loads(text)
    wanted = file_of(kind, {})
    for name in ("format", "library", "device"):
        if not isinstance(found, dict) or found.get(name) != wanted[name]:
            value = found.get(name) if isinstance(found, dict) else None
            raise ValueError(f"its {name} is {value!r}, not {wanted[name]!r}")
    entries: Table = found.get("entries")
    if not isinstance(entries, dict) or not all(map(_is_entry, entries.values())):
        raise ValueError("it has entries of another form")
    return entries


def _is_entry(value: Any) -> bool:
    if not isinstance(value, dict) or value.get("strategy") not in (*OURS, "xla"):
        return False
    fused = value.get("fused_ms", ""), value.get("plan", "")
    others = [(value.get(f"{name}_ms"), value.get(f"{name}_plan")) for name in OURS[1:]]
    for strategy, (ms, plan) in zip(OURS, (fused, *others), strict=True):
        if ms is None or plan is None:  # none of its plans ran
            if ms is not plan or value["strategy"] == strategy:
                return False
        elif not (_is_time(ms) and _is_plan(plan)):
            return False
    return _is_time(value.get("xla_ms"))


def _is_plan(plan: Any) -> bool:
    if not isinstance(plan, dict):
        return False
    plan = {**dict.fromkeys(_MORE, 0), "far": False, "engines": False, **plan}
    numbers = _NUMBERS | _MORE
    return (
        plan.keys() == {*numbers, "target", "transport", "few_rows", "far", "engines"}
        and all(type(plan[name]) is int and least <= plan[name] < 2**31 for name, least in numbers.items())
        and plan["transport"] in TRANSPORTS
        and type(plan["few_rows"]) is bool
        and type(plan["far"]) is bool
        and type(plan["engines"]) is bool
        and type(plan["target"]) is str
    )


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _warn(path: Path | None, text: str) -> None:
    """Once for each file."""
    if path not in _warned:
        _warned.add(path)
        warnings.warn(text, stacklevel=3)


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """One writer at a time, where the file system has locks: what two measure at once is merged."""
    with path.with_suffix(".lock").open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _replace(path: Path, text: str) -> None:
    """A reader sees the old file or the new one."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=path.name, suffix=".new", delete=False) as file:
        try:
            file.write(text)
            file.close()
            Path(file.name).replace(path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise
