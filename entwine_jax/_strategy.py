"""Which strategy and plan a call gets, and why: by argument, environment, what was measured, or the cost model.

A function of what is known while JAX traces, the tables of `_tuned` among it; it never measures anything.
"""

import dataclasses
import functools
import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import _checks, _core, _signal, _tuned
from ._config import OURS, TRANSPORTS, Settings
from ._team import Team

# cc/schedule: kMaxRanks, kHostParts, kSm90Parts; the row pitch that TMA needs.
_MAX_RANKS = 8
_PARTS = {"host": 1, "sm90": 4}
_PITCH_BYTES = 16
_TARGETS = {"cpu": "host", "cuda": "sm90"}
# By how much fused must be predicted to win under "auto": about what the prediction is good to for few rows.
_MARGIN = 1.05

# True while `autotune` looks for what it could measure: "auto" is then fused wherever that can run, and tables are left
# alone. JAX traces a function anew where this differs, jitted ones too.
seeking = jax.make_user_context(default_value=False)


@dataclasses.dataclass(frozen=True)
class Request:
    """A collective matmul as asked for: everything but the operands."""

    op: str
    team: Team
    transpose_w: bool  # w is (n, k)
    dtype: np.dtype[Any]  # of the result
    precision: Any
    settings: Settings
    gathers: bool = False  # also returns a gathered array: all of x, or reduce-scatter's third operand
    saves: bool = False  # all-gather keeps the gathered x for its weight gradient
    scaled: bool = False  # float8 operands, and the scale of their product for another one
    biased: bool = False  # has a bias for an operand: float32, one number for each column of the result
    activation: str | None = None  # of _config.ACTIVATIONS
    products: int = 1  # in one call: of one x and several w (all-gather), or of pairs whose products are added
    # All-gather: `biased` and `activation` of the products after the first.
    others: tuple[tuple[bool, str | None], ...] = ()

    def bare(self) -> "Request":
        """Without the epilogue."""
        return self.finished([False] * len(self.biases), [None] * len(self.biases))

    @property
    def biases(self) -> tuple[bool, ...]:
        """Whether each result has a bias."""
        return self.biased, *(biased for biased, _ in self.others)

    @property
    def activations(self) -> tuple[str | None, ...]:
        """Of each result."""
        return self.activation, *(activation for _, activation in self.others)

    def finished(self, biases: Sequence[bool], activations: Sequence[str | None]) -> "Request":
        """With these in place of its own."""
        (biased, activation), *others = zip(biases, activations, strict=True)
        return dataclasses.replace(self, biased=biased, activation=activation, others=(*others,))

    def alone(self, i: int) -> "Request":
        """For one of its products in a call of its own. If their sum has an epilogue, that is left to do."""
        gather = self.op == "all_gather_matmul"
        biased, activation = (self.biases[i], self.activations[i]) if gather else (False, None)
        return dataclasses.replace(self, products=1, others=(), biased=biased, activation=activation)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Schedule and launch shape; cc/schedule/plan.h says what each number means."""

    target: str
    tile_m: int
    tile_n: int
    raster: int
    lead: int
    transport: str
    pushers: int
    copiers: int
    few_rows: bool  # sm90: the kernels for few rows, to which the numbers above mean nothing
    # Strategy "signal", which knows tiles and raster of the above; cc/schedule/group_search.h. 0: a plan of "fused".
    comm_sms: int = 0
    group_waves: int = 0
    far: bool = False

    @property
    def strategy(self) -> str:
        return "signal" if self.comm_sms else "fused"


@dataclasses.dataclass(frozen=True)
class Choice:
    strategy: str
    reason: str
    plan: Plan | None = None
    # The key by which tables were asked: of the call as it was traced, which vmap may make larger.
    asked: str = dataclasses.field(default="", compare=False)

    @property
    def ours(self) -> bool:
        """Whether a call of this library's runs it, or XLA."""
        return self.strategy in OURS


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    m_shard: int
    n: int
    k: int
    missing: int = 0  # all-reduce: rows that the last chunks are short of


def sizes(request: Request, x: tuple[int, ...], w: tuple[int, ...]) -> Sizes:
    """Of x (batch, rows, k) and w (k, n) or (n, k). An all-reduce takes the rows of all batches as one matrix."""
    scatter = request.op == "matmul_reduce_scatter"
    n = w[0] if request.transpose_w else w[1]
    if request.op == "matmul_all_reduce":
        target = _TARGETS[request.team.platform]
        m_shard, missing = _core.chunk_rows(target, ranks=request.team.size, rows=x[0] * x[1])
        return Sizes(1, m_shard, n, x[2], missing)
    return Sizes(x[0], x[1] // request.team.size if scatter else x[1], n, x[2])


def joined(request: Request, pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """x and w, as types, of one product with all columns of all-gather's w, or all of the others' contraction."""
    if len(pairs) == 1:
        return pairs[0]
    (x, w), gather = pairs[0], request.op == "all_gather_matmul"
    dim = 0 if gather == request.transpose_w else 1  # of w
    shape = list(w.shape)
    shape[dim] = sum(each.shape[dim] for _, each in pairs)
    k = x.shape[2] if gather else shape[dim]
    return jax.ShapeDtypeStruct((*x.shape[:2], k), x.dtype), jax.ShapeDtypeStruct((*shape,), w.dtype)


def apart(request: Request, pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether each of several products is to have a call of its own: kernels for few rows take one, and "signal"."""
    if takes_one(request):
        return True
    if request.team.platform != "cuda" or request.settings.strategy == "xla" or request.team.size == 1:
        return False
    plans = [choose(request.alone(i), *pair).plan for i, pair in enumerate(pairs)]
    return all(plan is not None and plan.few_rows for plan in plans)


def takes_one(request: Request) -> bool:
    """Whether the strategy that is asked for takes one product a call."""
    return request.settings.strategy == "signal" and request.team.size > 1


def choose(request: Request, x: jax.Array, w: jax.Array) -> Choice:
    """NotImplementedError if the strategy was named and can't run."""
    return choose_of(request, [(x, w)])


def choose_of(request: Request, pairs: Sequence[tuple[Any, Any]]) -> Choice:
    """The same of several products, x and w each."""
    wanted, team = request.settings.strategy, request.team
    if team.size == 1:
        return Choice("xla", "a team of one has nothing to move: a plain dot")
    if wanted == "xla":
        return Choice("xla", "asked for")
    # Tables hold calls of one product.
    entry, asked = (measured(request, *pairs[0]), key(request, *pairs[0])) if len(pairs) == 1 else (None, "")
    if wanted == "auto" and team.platform == "cpu" and entry is None and not seeking.value:
        return Choice("xla", "on CPU devices auto means xla; strategy='fused' runs the host executor", asked=asked)
    test = signal_obstacle if wanted == "signal" else obstacle
    found = [(test(request, x, w), x, w) for x, w in pairs]
    problem, x, w = next((each for each in found if each[0] is not None), (None, *joined(request, pairs)))
    if problem is not None and wanted in OURS:
        raise NotImplementedError(
            f"entwine_jax.{request.op}: strategy={wanted!r} can't run x {x.dtype}{list(x.shape)}, "
            f"w {w.dtype}{list(w.shape)}, result {request.dtype}, over axis {_checks.axis(team.axis_name)} "
            f"of {team.size} {team.platform} devices: {problem}; change that or use strategy='auto' or 'xla'"
        )
    if wanted == "signal":
        how = "" if entry is None or entry.signal_plan is None else f"; plan {entry}"
        return Choice("signal", f"asked for{how}", signal_plan(request, x, w), asked)
    if wanted == "auto" and (instead := _instead(request, x, w, entry, asked, problem)) is not None:
        return instead
    # A user who names "fused" vouches for what can't be seen while tracing.
    problem = problem or (span_obstacle() if wanted == "auto" and team.platform == "cuda" else None)
    if problem is not None:
        return Choice("xla", problem)
    copy = ""
    if request.scaled and not request.transpose_w:
        copy = f"; w is transposed first, a copy of {w.size} bytes unless it is a transpose itself"
    if wanted == "fused" or seeking.value:
        how = "" if entry is None else f"; plan {entry}"
        return Choice("fused", f"asked for{how}{copy}", plan(request, x, w), asked)
    if entry is not None and entry.strategy == "xla":
        return Choice("xla", str(entry), asked=asked)
    if entry is not None:
        return Choice("fused", f"{entry}{copy}", plan(request, x, w), asked)
    fused_us, xla_us = predict(request, x, w)
    reason = f"predicted {fused_us:.0f} us fused, {xla_us:.0f} us on XLA"
    if fused_us * _MARGIN > xla_us:
        return Choice("xla", reason, asked=asked)
    return Choice("fused", reason + copy, plan(request, x, w), asked)


def _instead(
    request: Request, x: jax.Array, w: jax.Array, entry: _tuned.Entry | None, asked: str, problem: str | None
) -> Choice | None:
    """Strategy "signal" under "auto": where it was measured to win, or where there is no peer access, which it can do
    without, and it is predicted to."""
    wins = entry is not None and entry.strategy == "signal" and not seeking.value
    alone = problem is not None and request.team.platform == "cuda" and problem == _no_peers()
    if not (wins or alone) or signal_obstacle(request, x, w) is not None:
        return None
    made = Choice("signal", str(entry), signal_plan(request, x, w), asked)
    if wins:
        return made
    if seeking.value:
        return dataclasses.replace(made, reason=f"looked for, since {problem}")
    if entry is not None:
        return None
    us, xla_us = _signal.predict(request.op, _geometry(request, x, w), True, x.dtype.itemsize)
    if us * _MARGIN > xla_us:
        return None
    reason = f"{problem}; predicted {us:.0f} us by NCCL in groups (signal), {xla_us:.0f} us on XLA"
    return dataclasses.replace(made, reason=reason)


def _no_peers() -> str | None:
    return peer_obstacle() if _core.cuda_built() else None


def key(request: Request, x: jax.Array, w: jax.Array) -> str:
    """By which tables know a call: all that its time depends on. An epilogue costs next to nothing, with either
    strategy, and is left out."""
    rows = [1, x.shape[0] * x.shape[1]] if request.op == "matmul_all_reduce" else [*x.shape[:2]]
    x_text, w_text = f"{x.dtype}{[*rows, x.shape[2]]}", f"{w.dtype}{[*w.shape]}{'.T' if request.transpose_w else ''}"
    link = {"cpu": "shared memory", "cuda": "peer access"}.get(request.team.platform, "no link")
    if request.team.platform == "cuda" and _no_peers() is not None:
        link = "no peer access"
    gathers = ", gathers" if request.gathers else ""
    text = f"{request.op} {x_text} @ {w_text} -> {request.dtype}, {request.team.size} ranks, {link}{gathers}"
    return text.replace("[", "(").replace("]", ")")


def measured(request: Request, x: jax.Array, w: jax.Array) -> _tuned.Entry | None:
    """What tables hold of a call, if it wants to know and they fit: a plan that can't run (any more) is none."""
    settings, team = request.settings, request.team
    if settings.tuned is False or settings.config.sets_plan or seeking.value or team.platform not in _TARGETS:
        return None
    kind = _tuned.device_kind(team.platform)
    if kind is None:
        return None
    files = settings.tuned is True or jax.process_count() == 1
    entry = _tuned.find(kind, key(request, x, w), files)
    if entry is not None and entry.signal_plan is not None:
        signal = Plan(**entry.signal_plan)
        fits = signal.target == _TARGETS[team.platform] and signal.strategy == "signal"
        if not fits or (signal.target == "sm90" and (signal.tile_m, signal.tile_n) not in _core.SIGNAL_TILES):
            return None
    if entry is None or entry.plan is None:
        return entry
    made = Plan(**entry.plan)
    fits = made.target == _TARGETS[team.platform]
    if made.target == "sm90":
        few = not _wants_tiles(request) and _rows(request, sizes(request, x.shape, w.shape)) <= _core.FEW_ROWS_MOST
        fits = fits and (made.tile_m, made.tile_n) in _core.SM90_TILES and (few or not made.few_rows)
    return entry if fits and not (made.few_rows and made.target == "host") else None


def obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """Why strategy "fused" can't run, None if it can."""
    problem = _obstacle(request, x, w)
    return peer_obstacle() if problem is None and request.team.platform == "cuda" else problem


def signal_obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """Why strategy "signal" can't run, None if it can: it needs no peer access."""
    if (problem := _obstacle(request, x, w)) is not None:
        return problem
    rows = _rows(request, sizes(request, x.shape, w.shape))
    if (problem := _signal.obstacle(request, x.dtype, rows)) is not None:
        return problem
    return hopper_obstacle() if request.team.platform == "cuda" else None


def _obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """What is in the way of either."""
    team, platform = request.team, request.team.platform
    if platform not in _TARGETS:
        return f"platform {platform!r} has no fused implementation, only cpu and cuda have"
    if team.size > _MAX_RANKS:
        return f"a team has at most {_MAX_RANKS} ranks, not {team.size}"
    if team.loose_axes:
        return f"mesh axes {team.loose_axes} aren't manual here (make them so with jax.shard_map's axis_names)"
    if _names_algorithm(request.precision):
        return (
            f"precision={request.precision} names an algorithm (it multiplies in the operands' dtype, sums in float32)"
        )
    if 0 in x.shape or 0 in w.shape:
        return "there is nothing to compute in an empty array"
    return _cpu_obstacle(request, x) if platform == "cpu" else _cuda_obstacle(request, x, w)


def _names_algorithm(precision: Any) -> bool:
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def _cpu_obstacle(request: Request, x: jax.Array) -> str | None:
    if jax.process_count() > 1:
        return f"the host executor works within one process, not across the {jax.process_count()} of jax.distributed"
    if not request.scaled and x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the host executor takes bfloat16, float16 and float32 operands, not {x.dtype}"
    if request.settings.config.few_rows:
        return "the host executor knows tiles only, not config's few_rows=True"
    if not request.scaled and request.dtype not in (x.dtype, jnp.float32):
        return f"the host executor returns {x.dtype} or float32 here, not {request.dtype}"
    return None


def _cuda_obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    if not _core.cuda_built():
        return "entwine_jax was built without CUDA (reinstall it where nvcc is to be found)"
    if not request.scaled and x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the sm_90 kernels take bfloat16 and float16 operands, not {x.dtype}"
    if not request.scaled and request.dtype not in (x.dtype, jnp.float32):
        return f"the sm_90 kernels return {x.dtype} or float32 here, not {request.dtype}"
    if request.scaled and _is_precise(request.precision):
        return (
            f"precision={request.precision} asks for more than the tensor cores' sums of float8 products have, which "
            "are cut to some 14 bits"
        )
    shape = sizes(request, x.shape, w.shape)
    w_columns = shape.k if request.scaled else w.shape[1]  # float8 are transposed if they must be
    rows = (("x", shape.k, x.dtype), ("w", w_columns, w.dtype), ("the result", shape.n, request.dtype))
    for name, columns, dtype in rows:
        if columns * dtype.itemsize % _PITCH_BYTES:
            return (
                f"a row of {name} is {columns} x {dtype.itemsize} = {columns * dtype.itemsize} bytes, "
                f"not a multiple of {_PITCH_BYTES} (pad to {_padded(columns, _PITCH_BYTES // dtype.itemsize)} columns)"
            )
    config = request.settings.config
    tile = (config.tile_m, config.tile_n)
    if tile not in ((None, None), *_core.SM90_TILES):
        return f"config's tile_m={tile[0]}, tile_n={tile[1]} is none of the sm_90 kernels' tiles {_core.SM90_TILES}"
    if config.few_rows and request.scaled:
        return "config's few_rows=True is for 16-bit operands"
    if config.few_rows and _rows(request, shape) > _core.FEW_ROWS_MOST:
        return f"config's few_rows=True is for up to {_core.FEW_ROWS_MOST} rows, not {_rows(request, shape)}"
    return None


def _padded(columns: int, multiple: int) -> int:
    return -(-columns // multiple) * multiple


def _is_precise(precision: Any) -> bool:
    """Whether any operand's precision is more than the default."""
    each = precision if isinstance(precision, tuple | list) else (precision,)
    return any(p is not None and lax.Precision(p) != lax.Precision.DEFAULT for p in each)


def _rows(request: Request, shape: Sizes) -> int:
    return request.team.size * shape.batch * shape.m_shard - shape.missing


def gather_obstacle(request: Request, z: jax.Array) -> str | None:
    """Why a fused reduce-scatter can't gather z beside its product, None if it can."""
    if z.size == 0:
        return "it is empty"
    if request.team.platform == "cuda" and z.shape[-1] * z.dtype.itemsize % _PITCH_BYTES:
        return f"a row of it is {z.shape[-1]} x {z.dtype.itemsize} bytes, not a multiple of {_PITCH_BYTES}"
    return None


@functools.cache
def hopper_obstacle() -> str | None:
    return _core.hopper([device.local_hardware_id for device in jax.local_devices(backend="cuda")]) or None


@functools.cache
def peer_obstacle() -> str | None:
    if os.environ.get("ENTWINE_PEER_ACCESS") == "0":
        return "ENTWINE_PEER_ACCESS=0 says that the GPUs don't see each other's memory"
    return _core.peer_access([device.local_hardware_id for device in jax.local_devices(backend="cuda")]) or None


@functools.cache
def span_obstacle() -> str | None:
    """Whether some team may reach beyond one NVLink domain: a traced mesh doesn't tell which devices it is made of."""
    slices = {getattr(device, "slice_index", 0) for device in jax.devices("cuda")}
    if len(slices) > 1:
        return f"the GPUs lie in {len(slices)} NVLink domains (strategy='fused' if each team keeps within one)"
    return None


def plan(request: Request, x: jax.Array, w: jax.Array) -> Plan:
    target, config = _TARGETS[request.team.platform], request.settings.config
    entry = measured(request, x, w)
    if entry is not None and entry.plan is not None:
        return Plan(**entry.plan)
    made = _core.make_plan(
        request.op,
        target,
        **_geometry(request, x, w),
        out_bytes=request.dtype.itemsize,
        in_bytes=_in_bytes(request),
    )

    def pick(override: int | None, planned: int) -> int:
        return planned if override is None else override

    return Plan(
        target=target,
        tile_m=pick(config.tile_m, made["tile_m"]),
        tile_n=pick(config.tile_n, made["tile_n"]),
        raster=pick(config.raster, made["raster"]),
        lead=pick(config.lead, made["lead"]),
        transport=config.transport or TRANSPORTS[made["transport"]],
        pushers=pick(config.pushers, made["pushers"]),
        copiers=pick(config.copiers, made["copiers"]),
        few_rows=bool(config.few_rows or made["few_rows"]) and not _wants_tiles(request),
    )


def signal_plan(request: Request, x: jax.Array, w: jax.Array) -> Plan:
    """Of strategy "signal"."""
    entry = measured(request, x, w)
    if entry is not None and entry.signal_plan is not None:
        return Plan(**entry.signal_plan)
    far = request.team.platform == "cuda" and peer_obstacle() is not None
    target = _TARGETS[request.team.platform]
    return Plan(**_signal.numbers(request, target, _geometry(request, x, w), far, x.dtype.itemsize))


def replanned(choice: Choice, request: Request, x: Any, w: Any) -> Choice:
    """The same strategy for a request that gathers where another one didn't."""
    return choice if choice.strategy == "signal" else dataclasses.replace(choice, plan=plan(request, x, w))


def _wants_tiles(request: Request) -> bool:
    """Whether a call can't be for the kernels for few rows: these gather nothing for others and take 16-bit operands,
    and who sets a number of the tiles' schedule means tiles."""
    config = request.settings.config
    numbers = (config.tile_m, config.tile_n, config.raster, config.lead, config.transport, config.pushers)
    meant = config.few_rows is None and any(value is not None for value in numbers)
    return request.gathers or request.scaled or request.products > 1 or config.few_rows is False or meant


def predict(request: Request, x: jax.Array, w: jax.Array) -> tuple[float, float]:
    """What a call on GPUs should take, fused and on XLA, in microseconds: cc/schedule/cost.h."""
    return _core.predict(
        request.op,
        **_geometry(request, x, w),
        out_bytes=request.dtype.itemsize,
        tiles_only=_wants_tiles(request),
        in_bytes=_in_bytes(request),
    )


def _in_bytes(request: Request) -> int:
    """Of an operand's element, for the cost model."""
    return 1 if request.scaled else 2


def arena_bytes(request: Request, plan: Plan, x: jax.Array, w: jax.Array, z: jax.Array | None = None) -> int:
    """Peer memory that the call needs on each rank; calls of one team share it. z is gathered beside."""
    return _core.arena_bytes(
        request.op,
        **_geometry(request, x, w),
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        few_rows=plan.few_rows,
        element_bytes=(x.dtype if request.op == "all_gather_matmul" else request.dtype).itemsize,
        parts=_PARTS[plan.target],
        beside=(0, 0, 0) if z is None else (z.shape[0], z.shape[1], z.shape[2] * z.dtype.itemsize),
    )


def scratch_bytes(request: Request, plan: Plan, x: Any, w: Any) -> int:
    """What a call of strategy "signal" has XLA allocate beside its results, on each rank."""
    return _signal.scratch_bytes(request.op, plan, _geometry(request, x, w), x.dtype.itemsize, request.gathers)


def groups(request: Request, plan: Plan, x: Any, w: Any) -> list[int]:
    """The sizes of the groups of a call of strategy "signal"."""
    ends = _signal.groups(request.op, plan, _geometry(request, x, w), x.dtype.itemsize)
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def _geometry(request: Request, x: jax.Array, w: jax.Array) -> dict[str, int]:
    return {"ranks": request.team.size} | dataclasses.asdict(sizes(request, x.shape, w.shape))
