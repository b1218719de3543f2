"""Which strategy and plan a call gets, and why: by argument, environment, what was measured, or the cost model.

A function of what is known while JAX traces, the tables of `_tuned` among it; it never measures anything.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from . import _checks, _core, _obstacles, _signal, _tuned
from ._config import OURS, TRANSPORTS
from ._measured import key as key
from ._measured import measured as measured
from ._measured import seeking as seeking
from ._obstacles import gather_obstacle as gather_obstacle
from ._request import TARGETS, alike, geometry, wants_tiles
from ._request import Choice as Choice
from ._request import Plan as Plan
from ._request import Request as Request
from ._request import Sizes as Sizes
from ._request import joined as joined
from ._request import sizes as sizes

# cc/schedule: kHostParts, kSm90Parts.
_PARTS = {"host": 1, "sm90": 4}
# By how much fused must be predicted to win under "auto": about what the prediction is good to for few rows.
_MARGIN = 1.05


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
    test = _obstacles.OBSTACLES.get(wanted, _obstacles.obstacle)
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
    if wanted == "resident":
        how = "" if entry is None or entry.resident_plan is None else f"; plan {entry}"
        return Choice("resident", f"asked for{how}{_copy(request, x, w)}", resident_plan(request, x, w), asked)
    if wanted == "auto" and (instead := _instead(request, x, w, entry, asked, problem)) is not None:
        return instead
    # A user who names "fused" vouches for what can't be seen while tracing.
    problem = problem or (_obstacles.span_obstacle(team) if wanted == "auto" and team.platform == "cuda" else None)
    if problem is not None:
        return Choice("xla", problem)
    copy = _copy(request, x, w)
    if request.beside and wanted == "auto" and not seeking.value and (shared := _moved_once(request, x, w)) is not None:
        return shared
    if wanted == "fused" or seeking.value:
        how = "" if entry is None else f"; plan {entry}"
        return Choice("fused", f"asked for{how}{copy}", plan(request, x, w), asked)
    if entry is not None and entry.strategy == "xla":
        return Choice("xla", str(entry), asked=asked)
    if entry is not None and entry.strategy == "resident":
        return Choice("resident", f"{entry}{copy}", resident_plan(request, x, w), asked)
    if entry is not None:
        return Choice("fused", f"{entry}{copy}", plan(request, x, w), asked)
    fused_us, xla_us = predict(request, x, w)
    reason = f"predicted {fused_us:.0f} us fused, {xla_us:.0f} us on XLA"
    if fused_us * _MARGIN > xla_us:
        return Choice("xla", reason, asked=asked)
    return Choice("fused", reason + copy, plan(request, x, w), asked)


def _copy(request: Request, x: Any, w: Any) -> str:
    """What XLA copies before the call, as a reason says it."""
    if request.transpose_x and request.op == "matmul_all_reduce" and x.shape[0] > 1:
        return f"; x's batches are laid side by side first, a copy of {x.size * x.dtype.itemsize} bytes"
    if not request.scaled or request.transpose_w:
        return ""
    return f"; w is transposed first, a copy of {w.size} bytes unless it is a transpose itself"


def _moved_once(request: Request, x: jax.Array, w: jax.Array) -> Choice | None:
    """XLA, where it wins because it moves once for all calls with the same x what each fused one would move."""
    each = dataclasses.replace(request, beside=())
    pairs = [(x, w), *(alike(each, x, w, columns) for columns in request.beside)]
    ours, xla = _one_by_one(each, pairs)
    if request.op == "matmul_reduce_scatter" and request.gathers and _rows_are_there(each, pairs):
        xla = _one_by_one(dataclasses.replace(each, gathers=False), pairs)[1]
    if ours * _MARGIN <= xla:
        return None
    return Choice(
        "xla",
        f"predicted {ours:.0f} us for the {len(pairs)} products of this x in calls of their own, {xla:.0f} us on XLA, "
        "which moves bytes once for all: so would collective_matmul(x, (w1, w2, ...))",
    )


def _one_by_one(request: Request, pairs: Sequence[tuple[Any, Any]]) -> tuple[float, float]:
    """What calls of such products should take, and XLA for all of them."""
    return sum(min(predict(request, *pair)) for pair in pairs), predict(request, *joined(request, pairs))[1]


def _rows_are_there(request: Request, pairs: Sequence[tuple[Any, Any]]) -> bool:
    """Whether XLA has gathered the rows that these gradients want when it went forward."""
    forward = dataclasses.replace(request, op="all_gather_matmul", transpose_w=not request.transpose_w, gathers=False)
    (dy, w), ranks = pairs[0], request.team.size
    x = jax.ShapeDtypeStruct((dy.shape[0], dy.shape[1] // ranks, sizes(request, dy.shape, w.shape).n), dy.dtype)
    ours, xla = _one_by_one(forward, [(x, w) for _, w in pairs])
    return ours * _MARGIN > xla


def _instead(
    request: Request, x: jax.Array, w: jax.Array, entry: _tuned.Entry | None, asked: str, problem: str | None
) -> Choice | None:
    """Strategy "signal" under "auto": where it was measured to win, or where there is no peer access, which it can do
    without, and it is predicted to."""
    wins = entry is not None and entry.strategy == "signal" and not seeking.value
    alone = problem is not None and request.team.platform == "cuda" and problem == _obstacles.no_peers()
    if not (wins or alone) or _obstacles.signal_obstacle(request, x, w) is not None:
        return None
    made = Choice("signal", str(entry), signal_plan(request, x, w), asked)
    if wins:
        return made
    if seeking.value:
        return dataclasses.replace(made, reason=f"looked for, since {problem}")
    if entry is not None:
        return None
    us, xla_us = _signal.predict(request.op, geometry(request, x, w), True, x.dtype.itemsize)
    if us * _MARGIN > xla_us:
        return None
    reason = f"{problem}; predicted {us:.0f} us by NCCL in groups (signal), {xla_us:.0f} us on XLA"
    return dataclasses.replace(made, reason=reason)


def plan(request: Request, x: jax.Array, w: jax.Array) -> Plan:
    """Of strategy "fused"."""
    target = TARGETS[request.team.platform]
    entry = measured(request, x, w)
    if entry is not None and entry.plan is not None:
        return Plan(**entry.plan)
    about = {"out_bytes": request.dtype.itemsize, "in_bytes": _in_bytes(request)}
    made = _core.make_plan(request.op, target, **geometry(request, x, w), **about, gated=request.gated)
    return _tiles(request, made)


def resident_plan(request: Request, x: jax.Array, w: jax.Array) -> Plan:
    """Of strategy "resident"."""
    entry = measured(request, x, w)
    if entry is not None and entry.resident_plan is not None:
        return Plan(**entry.resident_plan)
    sms, (made, _) = request.settings.config.comm_sms, _resident(request, x, w)
    movers = made["movers"] if sms is None else -(-sms // 2)  # two thread blocks a cluster
    return dataclasses.replace(_tiles(request, made), transport="push", few_rows=False, movers=movers)


def predict_resident(request: Request, x: jax.Array, w: jax.Array) -> float:
    """What a call on GPUs should take by the plan of the cost model's: cc/schedule/cost.h."""
    return _resident(request, x, w)[1]


def _resident(request: Request, x: jax.Array, w: jax.Array) -> tuple["_core.PlanDict", float]:
    target = TARGETS[request.team.platform]
    about = {"out_bytes": request.dtype.itemsize, "in_bytes": _in_bytes(request)}
    return _core.make_resident_plan(request.op, target, **geometry(request, x, w), **about, gated=request.gated)


def _tiles(request: Request, made: "_core.PlanDict") -> Plan:
    """The cost model's plan with what the config sets."""
    config = request.settings.config

    def pick(override: int | None, planned: int) -> int:
        return planned if override is None else override

    return Plan(
        target=TARGETS[request.team.platform],
        tile_m=pick(config.tile_m, made["tile_m"]),
        tile_n=pick(config.tile_n, made["tile_n"]),
        raster=pick(config.raster, made["raster"]),
        lead=pick(config.lead, made["lead"]),
        transport=config.transport or TRANSPORTS[made["transport"]],
        pushers=pick(config.pushers, made["pushers"]),
        copiers=pick(config.copiers, made["copiers"]),
        few_rows=bool(config.few_rows or made["few_rows"]) and not wants_tiles(request),
    )


def signal_plan(request: Request, x: jax.Array, w: jax.Array) -> Plan:
    """Of strategy "signal"."""
    entry = measured(request, x, w)
    if entry is not None and entry.signal_plan is not None:
        return Plan(**entry.signal_plan)
    far = request.team.platform == "cuda" and _obstacles.peer_obstacle() is not None
    target = TARGETS[request.team.platform]
    return Plan(**_signal.numbers(request, target, geometry(request, x, w), far, x.dtype.itemsize))


def replanned(choice: Choice, request: Request, x: Any, w: Any) -> Choice:
    """The same strategy for a request that gathers where another one didn't."""
    if choice.strategy == "signal":
        return choice
    made = (resident_plan if choice.strategy == "resident" else plan)(request, x, w)
    return dataclasses.replace(choice, plan=made)


def predict(request: Request, x: jax.Array, w: jax.Array) -> tuple[float, float]:
    """What a call on GPUs should take, fused and on XLA, in microseconds: cc/schedule/cost.h. A reduce-scatter that
    gathers is a gradient: beside dx it gathers what dx is a gradient of."""
    shape = geometry(request, x, w)
    beside = request.gathers and request.op == "matmul_reduce_scatter"
    return _core.predict(
        request.op,
        **shape,
        out_bytes=request.dtype.itemsize,
        tiles_only=wants_tiles(request),
        in_bytes=_in_bytes(request),
        gated=request.gated,
        beside=shape["batch"] * shape["m_shard"] * shape["n"] * x.dtype.itemsize if beside else 0,
    )


def _in_bytes(request: Request) -> int:
    """Of an operand's element, for the cost model."""
    return 1 if request.scaled else 2


def arena_bytes(request: Request, plan: Plan, x: jax.Array, w: jax.Array, z: jax.Array | None = None) -> int:
    """Peer memory that the call needs on each rank; calls of one team share it. z is gathered beside."""
    if plan.strategy == "signal":
        return _signal.arena_bytes(request.op, plan, geometry(request, x, w), x.dtype.itemsize)
    return _core.arena_bytes(
        request.op,
        **geometry(request, x, w),
        tile_m=plan.tile_m,
        tile_n=plan.tile_n,
        few_rows=plan.few_rows,
        moved=plan.movers > 0,
        element_bytes=(x.dtype if request.op == "all_gather_matmul" else request.dtype).itemsize,
        parts=_PARTS[plan.target],
        beside=(0, 0, 0) if z is None else (z.shape[0], z.shape[1], z.shape[2] * z.dtype.itemsize),
    )


def scratch_bytes(request: Request, plan: Plan, x: Any, w: Any) -> int:
    """What a call of strategy "signal" has XLA allocate beside its results, on each rank."""
    return _signal.scratch_bytes(request.op, plan, geometry(request, x, w), x.dtype.itemsize, request.gathers)


def groups(request: Request, plan: Plan, x: Any, w: Any) -> list[int]:
    """The sizes of the groups of a call of strategy "signal"."""
    ends = _signal.groups(request.op, plan, geometry(request, x, w), x.dtype.itemsize)
    return [end - begin for begin, end in zip([0, *ends[:-1]], ends, strict=True)]
