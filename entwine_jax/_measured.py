"""By which keys tables know calls, and what they hold of one that can run."""

import jax

from . import _core, _obstacles, _tuned
from ._request import TARGETS, Plan, Request, all_rows, sizes, wants_tiles

# True while `autotune` looks for what it could measure: "auto" is then fused wherever that can run, and tables are left
# alone. JAX traces a function anew where this differs, jitted ones too.
seeking = jax.make_user_context(default_value=False)


def key(request: Request, x: jax.Array, w: jax.Array) -> str:
    """By which tables know a call: all that its time depends on. An epilogue costs next to nothing, with either
    strategy, and is left out."""
    rows = [1, x.shape[0] * x.shape[1]] if request.op == "matmul_all_reduce" else [*x.shape[:2]]
    x_text, w_text = f"{x.dtype}{[*rows, x.shape[2]]}", f"{w.dtype}{[*w.shape]}{'.T' if request.transpose_w else ''}"
    link = {"cpu": "shared memory", "cuda": "peer access"}.get(request.team.platform, "no link")
    if request.team.platform == "cuda" and _obstacles.no_peers() is not None:
        link = "no peer access"
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
    if entry is not None and entry.signal_plan is not None:
        signal = Plan(**entry.signal_plan)
        fits = signal.target == TARGETS[team.platform] and signal.strategy == "signal"
        if not fits or (signal.target == "sm90" and (signal.tile_m, signal.tile_n) not in _core.SIGNAL_TILES):
            return None
    if entry is not None and entry.resident_plan is not None:
        resident = Plan(**entry.resident_plan)
        fits = resident.target == TARGETS[team.platform] and resident.strategy == "resident" and not resident.few_rows
        if not fits or (resident.target == "sm90" and (resident.tile_m, resident.tile_n) not in _core.SM90_TILES):
            return None
    if entry is None or entry.plan is None:
        return entry
    made = Plan(**entry.plan)
    fits = made.target == TARGETS[team.platform]
    if made.target == "sm90":
        few = not wants_tiles(request) and all_rows(request, sizes(request, x.shape, w.shape)) <= _core.FEW_ROWS_MOST
        fits = fits and (made.tile_m, made.tile_n) in _core.SM90_TILES and (few or not made.few_rows)
    return entry if fits and not (made.few_rows and made.target == "host") else None
