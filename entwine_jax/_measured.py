"""By which keys tables know calls, and what they hold of one that can run."""

from typing import Any

import jax

from . import _core, _obstacles, _tuned
from ._config import OURS
from ._request import TARGETS, Plan, Request, all_rows, sizes, wants_tiles

# True while `autotune` looks for what it could measure: "auto" is then fused wherever that can run, and tables are left
# alone. JAX traces a function anew where this differs, jitted ones too.
seeking = jax.make_user_context(default_value=False)


def key(request: Request, x: jax.Array, w: jax.Array) -> str:
    """By which tables know a call: all that its time depends on. An epilogue costs next to nothing, with either
    strategy, and is left out."""
    link = {"cpu": "shared memory", "cuda": "peer access"}.get(request.team.platform, "no link")
    if request.team.platform == "cuda" and _obstacles.no_peers() is not None:
        link = "no peer access"
    return spelled(request, x, w, link)


def spelled(request: Request, x: Any, w: Any, link: str) -> str:
    """The same with a link between the ranks that is known already."""
    rows = [1, x.shape[0] * x.shape[1]] if request.op == "matmul_all_reduce" else [*x.shape[:2]]
    x_text, w_text = f"{x.dtype}{[*rows, x.shape[2]]}", f"{w.dtype}{[*w.shape]}{'.T' if request.transpose_w else ''}"
    if request.transpose_x:  # several batches of an all-reduce cost a copy
        x_text = f"{x.dtype}{[*x.shape]}.T"
    gathers = ", gathers" if request.gathers else ""
    text = f"{request.op} {x_text} @ {w_text} -> {request.dtype}, {request.team.size} ranks, {link}{gathers}"
    return text.replace("[", "(").replace("]", ")")


def measured(request: Request, x: jax.Array, w: jax.Array) -> _tuned.Entry | None:
    """What tables hold of a call, if it wants to know and they fit: a plan that can't run (any more) is none."""
    settings, team = request.settings, request.team
    if settings.tuned is False or settings.config.sets_plan or seeking.value or team.platform not in TARGETS:
        return None
    kind = _tuned.device_kind(team.platform)
    if kind is None:
        return None
    files = settings.tuned is True or jax.process_count() == 1
    entry = _tuned.find(kind, key(request, x, w), files)
    if entry is None:
        return None
    few = not wants_tiles(request) and all_rows(request, sizes(request, x.shape, w.shape)) <= _core.FEW_ROWS_MOST
    target, plans = TARGETS[team.platform], (entry.plan, entry.resident_plan, entry.signal_plan)
    for strategy, plan in zip(OURS, plans, strict=True):
        if plan is not None and not _fits(request, Plan(**plan), strategy, target, few):
            return None
    return entry


def _fits(request: Request, plan: Plan, strategy: str, target: str, few: bool) -> bool:
    """Whether a plan is one of the strategy's on the target; `few`: which has kernels for so few rows."""
    tiles = _core.SIGNAL_TILES if strategy == "signal" else request.sm90_tiles
    if plan.target != target or (target == "sm90" and (plan.tile_m, plan.tile_n) not in tiles):
        return False
    if strategy == "fused":
        return not plan.few_rows or (few and target == "sm90")
    return plan.strategy == strategy and not (strategy == "resident" and plan.few_rows)
