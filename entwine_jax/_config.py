"""What a user may set, and where from: argument, then environment (ENTWINE_*), then default.

Everything is resolved while JAX traces and becomes attributes of the custom call: a function that is already compiled
keeps the settings it was traced with.
"""

import dataclasses
import math
import os
from collections.abc import Callable

STRATEGIES = ("auto", "fused", "resident", "signal", "xla")
# Those that are this library's.
OURS = ("fused", "resident", "signal")
TRANSPORTS = ("pull", "push")
RESIDUALS = ("regather", "save")
FLOAT8_RESIDUALS = ("float8", "operands")
# In the order of cc/schedule/activation.h, which begins with none.
ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")


@dataclasses.dataclass(frozen=True)
class Config:
    """Overrides for one collective matmul. ``None`` leaves a value to the environment, the plan or the default.

    Args:
      lead: reduce-scatter, all-reduce: how many tiles of other ranks' chunks are computed before the first own one.
      raster: how many row blocks of tiles are walked together.
      transport: reduce-scatter, all-reduce: ``"pull"`` (the owner fetches partial sums) or ``"push"`` (the producer
        stores them).
      pushers: all-gather: how many workers (CPU) or clusters (GPU) push the own chunk beside the matmul; partial sums
        by push, on GPUs: how many tiles may be on the link at once.
      copiers: how many workers or clusters copy the peers' chunks to the gathered array, where that is a result;
        reduce-scatter: and push the own chunk of it.
      few_rows: whether to use the GPU kernels for few rows, which take up to 128: they read w once for all rows. The
        settings above and tiles mean nothing to them, and they gather nothing beside: calls that do have tiles.
      tile_m, tile_n: tile shape; on GPUs 256 and 256, 256 and 128, or 128 and 128; of 16-bit results that aren't
        gated 256 and 160, 192 or 224, too.
      comm_sms: how many multiprocessors the matmul leaves to NCCL (strategy "signal", on GPUs; with 0 copy engines move
        in its place, where GPUs see each other's memory), or has only move tiles and rows while there are some to move
        (strategy "resident"; they come in pairs, so an odd number is rounded up; on CPU devices each pair is a worker).
      group_waves: strategy "signal": how many waves of tiles each group has, in place of what a search over predictions
        finds.
      workers: threads a rank; CPU only (``ENTWINE_WORKERS``, default 1).
      timeout_s: bound on any one wait for a peer, 0 for none (``ENTWINE_TIMEOUT_S``, default 60).
      tuned: whether what `autotune` has measured is looked up (``ENTWINE_TUNED``, 0 or 1; by default it is, but in a
        program of several processes not in the user's files, which may differ between them). It isn't for a config that
        sets any number of the plan.
      stall_us, stall_seed: random stalls of up to ``stall_us`` microseconds before each step of the schedule, to test
        orders that a quiet machine never shows; CPU only (``ENTWINE_STALL_US``, ``ENTWINE_STALL_SEED``, default 0).

    Raises:
      ValueError: a value is out of range.
    """

    lead: int | None = None
    raster: int | None = None
    transport: str | None = None
    pushers: int | None = None
    copiers: int | None = None
    few_rows: bool | None = None
    tile_m: int | None = None
    tile_n: int | None = None
    comm_sms: int | None = None
    group_waves: int | None = None
    workers: int | None = None
    timeout_s: float | None = None
    stall_us: int | None = None
    stall_seed: int | None = None
    tuned: bool | None = None

    def __post_init__(self) -> None:
        if self.transport is not None and self.transport not in TRANSPORTS:
            raise ValueError(f"entwine_jax.Config: transport={self.transport!r} must be one of {TRANSPORTS}")
        if self.few_rows not in (None, True, False):
            raise ValueError(f"entwine_jax.Config: few_rows={self.few_rows!r} must be True, False or None")
        if self.tuned not in (None, True, False):
            raise ValueError(f"entwine_jax.Config: tuned={self.tuned!r} must be True, False or None")
        for name in ("raster", "pushers", "copiers", "tile_m", "tile_n", "workers"):
            _integer(f"entwine_jax.Config: {name}", getattr(self, name), 1)
        for name, least in (("comm_sms", 0), ("group_waves", 1)):
            _integer(f"entwine_jax.Config: {name}", getattr(self, name), least, 4096)
        for name in ("lead", "stall_us", "stall_seed"):
            _integer(f"entwine_jax.Config: {name}", getattr(self, name), 0)
        if self.timeout_s is not None:
            _milliseconds("entwine_jax.Config: timeout_s", self.timeout_s)

    def __repr__(self) -> str:  # short: it is printed in every jaxpr
        fields = ((field.name, getattr(self, field.name)) for field in dataclasses.fields(self))
        return f"Config({', '.join(f'{name}={value!r}' for name, value in fields if value is not None)})"

    @property
    def sets_plan(self) -> bool:
        """Whether it sets any number of the plan."""
        numbers = (self.tile_m, self.tile_n, self.raster, self.lead, self.transport, self.pushers, self.copiers)
        signal = (self.comm_sms, self.group_waves)
        return self.few_rows is not None or any(value is not None for value in (*numbers, *signal))


@dataclasses.dataclass(frozen=True)
class Settings:
    """A call's settings, all resolved."""

    strategy: str
    timeout_ms: int
    workers: int
    stall_us: int
    stall_seed: int
    config: Config
    tuned: bool | None = None  # whether to look up what was measured; None if nobody said


def resolve(op: str, strategy: str | None, config: Config | None) -> Settings:
    if config is None:
        config = Config()
    if not isinstance(config, Config):
        raise ValueError(f"entwine_jax.{op}: config={config!r} must be an entwine_jax.Config")
    source = "strategy"
    if strategy is None:
        source, strategy = "ENTWINE_STRATEGY", os.environ.get("ENTWINE_STRATEGY") or "auto"
    if strategy not in STRATEGIES:
        raise ValueError(f"entwine_jax.{op}: {source}={strategy!r} is unknown; use one of {STRATEGIES}")
    timeout_s = _choose(op, config.timeout_s, "ENTWINE_TIMEOUT_S", float, 60.0)
    stall_seed = _choose(op, config.stall_seed, "ENTWINE_STALL_SEED", int, 0)
    return Settings(
        strategy=strategy,
        timeout_ms=_milliseconds(f"entwine_jax.{op}: ENTWINE_TIMEOUT_S", timeout_s),
        workers=_integer(
            f"entwine_jax.{op}: ENTWINE_WORKERS", _choose(op, config.workers, "ENTWINE_WORKERS", int, 1), 1
        ),
        stall_us=_integer(
            f"entwine_jax.{op}: ENTWINE_STALL_US", _choose(op, config.stall_us, "ENTWINE_STALL_US", int, 0), 0
        ),
        stall_seed=_integer(f"entwine_jax.{op}: ENTWINE_STALL_SEED", stall_seed, 0),
        config=config,
        tuned=_tuned(op, config),
    )


def _tuned(op: str, config: Config) -> bool | None:
    chosen = _choose(op, None if config.tuned is None else int(config.tuned), "ENTWINE_TUNED", int, None)
    if chosen not in (None, 0, 1):
        raise ValueError(f"entwine_jax.{op}: ENTWINE_TUNED={chosen!r} must be 0 or 1")
    return None if chosen is None else bool(chosen)


def saves(op: str, residuals: str) -> bool:
    """Whether the gathered operand is kept for the backward pass."""
    if residuals not in RESIDUALS:
        raise ValueError(f"entwine_jax.{op}: residuals={residuals!r} is unknown; use one of {RESIDUALS}")
    return residuals == "save"


def keeps_operands(op: str, residuals: str) -> bool:
    """Whether an op that quantises keeps what it has quantised."""
    if residuals not in FLOAT8_RESIDUALS:
        raise ValueError(f"entwine_jax.{op}: residuals={residuals!r} is unknown; use one of {FLOAT8_RESIDUALS}")
    return residuals == "operands"


def activation(op: str, name: str | None) -> str | None:
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(
            f"entwine_jax.{op}: activation={name!r} is unknown; use None or one of {ACTIVATIONS}, or apply another "
            "function to the result"
        )
    return name


def _choose[T, D](op: str, argument: T | None, variable: str, parse: Callable[[str], T], default: D) -> T | D:
    if argument is not None:
        return argument
    text = os.environ.get(variable, "")
    if not text:
        return default
    try:
        return parse(text)
    except ValueError:
        raise ValueError(f"entwine_jax.{op}: {variable}={text!r} is not a number") from None


# Attributes of the custom calls are 64-bit, the schedule's own numbers 32-bit.
_LARGEST = 2**31 - 1


def _integer[T: int | None](name: str, value: T, least: int, most: int = _LARGEST) -> T:
    if value is None:
        return value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name}={value!r} must be an integer from {least} to {most}")
    return value


def _milliseconds(name: str, seconds: float) -> int:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= _LARGEST / 1000:
        raise ValueError(f"{name}={seconds!r} must be seconds from 0 (no bound) to {_LARGEST // 1000}")
    return math.ceil(seconds * 1000)
