"""autotune: measures the collective matmuls of a function, and keeps what is fastest for the next trace."""

import dataclasses
import datetime
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from . import _explain, _strategy, _tuned
from ._agreed import agreed
from ._config import OURS
from ._contest import PLANS, Found, contest, planned
from ._measure import Product
from ._progress import Progress
from ._strategy import Plan
from ._tuning import Tuned, Tuning


def autotune(
    fn: Callable[..., Any],
    *args: Any,
    seconds: float = 60.0,
    again: bool = False,
    dry_run: bool = False,
    progress: bool | None = None,
) -> Tuning:
    """Measures the collective matmuls that ``fn(*args)`` would run, and keeps the fastest strategy and plan of each.

    ``fn`` is traced (and, under automatic sharding, compiled), not run. Each collective matmul that it holds, its
    gradients' too if ``fn`` takes any, is measured on its own, with random operands, on all devices at hand: on XLA,
    fused, ``"resident"`` and as ``"signal"``, by the cost model's plan and some around it (tiles, few rows or not,
    transport of partial sums, lead, raster, pushers, multiprocessors that move or are left to NCCL, groups). What wins
    is kept in this process and in a file, and every later trace looks there before it asks the cost model, in other
    processes too; `explain` says so::

        step = jax.value_and_grad(loss)
        print(entwine_jax.autotune(step, params, batch))
        step = jax.jit(step)  # traced from now on: with what was measured

    Differences within the noise count for nothing: then it stays with the cost model's choice. A bias or an activation
    changes nothing either. Calls with ``strategy="xla"``, and those whose ``config`` sets a number of the plan, have
    nothing to choose. ``strategy="fused"``, ``"resident"`` and ``"signal"`` take their best plan.

    Functions that JAX has compiled already keep the plans that they were traced with: tune first, or call
    ``jax.clear_caches()``. In a program of several processes all call it, with the same arguments; process 0's clock
    decides for all. Other programs of several processes look into the user's files only under ``ENTWINE_TUNED=1``, by
    which you say that all processes see the same ones.

    Args:
      fn: a function that JAX can trace, jitted or not.
      *args: its arguments, arrays or ``jax.ShapeDtypeStruct``; `functools.partial` binds keywords.
      seconds: about how long it may take, compilation included; the rest of the products keeps the cost model's choice.
      again: measure also what is known already.
      dry_run: measure nothing, list what would be.
      progress: whether to tell on stderr what is being measured; by default where that is a terminal.

    Returns:
      A `Tuning`, a sequence of `Tuned`, one for each distinct product, that prints as a table.

    Raises:
      ValueError: `seconds` isn't positive.

    The file is ``ENTWINE_CACHE_DIR`` (by default ``$XDG_CACHE_HOME/entwine_jax`` or ``~/.cache/entwine_jax``) / kind of
    device and version of this package ``.json``; ``ENTWINE_TUNED=0`` or ``Config(tuned=False)`` leaves it alone.
    """
    if not seconds > 0:
        raise ValueError(f"entwine_jax.autotune: seconds={seconds!r} must be more than 0")
    clock = _clock()
    until = clock() + seconds
    with _strategy.seeking(True):
        found = _distinct(_explain.calls(fn, args))
    return _tune(found, clock, until, again, dry_run, progress)


def _tune(
    found: Sequence["Found"],
    clock: Callable[[], float],
    until: float,
    again: bool,
    dry_run: bool,
    progress: bool | None,
) -> Tuning:
    rows: list[Tuned] = []
    path: Path | None = None
    keys = {each.key for each in found}
    with Progress(0 if progress is False else len(found), lines=progress is True) as bar:
        for i, each in enumerate(found):
            row = _known(each, again) or (planned(each) if dry_run else None)
            if row is None and clock() >= until:
                row = each.row("there was no time left for it")
            if row is None:
                now = clock()
                share = now + (until - now) / (len(found) - i)

                def tell(done: float, text: str, i: int = i, each: "Found" = each) -> None:
                    if progress is not False:
                        bar.show(i + done, f"{each.key}: {text}")

                row = contest(each, clock, share, tell)
                path = _keep(row, keys) or path
            rows.append(row)
            if progress is not False:
                bar.finish(i + 1, f"{each.key}: {row.status}")
    return Tuning(rows, path)


def _keep(row: Tuned, keys: Collection[str]) -> Path | None:
    """Stores what was measured: also by the key that tracing asked for, unless that is another product's."""
    kind = _tuned.device_kind(row.platform)
    if kind is None or row.status != "measured":
        return None
    entry = agreed(_entry(row))
    return _tuned.store(kind, dict.fromkeys((row.key, *({row.asked} - {*keys, ""})), entry))


def _distinct(calls: Sequence[_explain.Call]) -> list[Found]:
    made: dict[str, Found] = {}
    for call in calls:
        request, count, choice = call.request.bare(), len(call.pairs), call.choice
        operands: list[Any] = [v for v in (*_strategy.joined(request, call.pairs), call.z) if v is not None]
        x, w, *z = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands)
        key = _strategy.key(request, cast(Any, x), cast(Any, w))
        if count > 1:  # no table is asked for these
            key = f"{count} products at once, together {key}"
            choice = dataclasses.replace(choice, plan=None, reason="several products at once aren't tuned")
        made.setdefault(key, Found(key, choice.asked, Product(request, x, w, *z), choice))
    return list(made.values())


def _known(found: Found, again: bool) -> Tuned | None:
    """The row of what needn't or can't be measured."""
    product = found.product
    settings, choice = product.request.settings, found.choice
    if settings.strategy == "xla":
        return found.row("strategy='xla' was asked for")
    if settings.config.sets_plan:
        return found.row("its config sets the plan")
    if choice.plan is None:
        return found.row(choice.reason)
    looking = dataclasses.replace(product.request, settings=dataclasses.replace(settings, tuned=True))
    known = None if again else _strategy.measured(looking, product.x, product.w)
    entry = agreed(None if known is None else dataclasses.asdict(known))
    if entry is None:
        return None
    if jax.process_count() > 1:  # what process 0 has in a file
        kind = _tuned.device_kind(product.request.team.platform)
        assert kind is not None
        _tuned.remember(kind, {found.key: entry})
    plans = {name: None if entry[name] is None else Plan(**entry[name]) for name in PLANS.values()}
    about = {name: entry[name] for name in ("strategy", *(f"{each}_ms" for each in OURS), "xla_ms")}
    return found.row(f"known already ({entry['source']})", **about, **plans)


def _entry(row: Tuned) -> dict[str, Any]:
    """As files hold it."""
    versions = {name: _tuned.installed(name) for name in ("jax", "jaxlib", "nvidia-nccl-cu13", "nvidia-cublas")}
    about = {
        "when": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "devices": jax.device_count(),
        "rounds": row.rounds,
        "cost_model_ms": row.model_ms,
        **{name: version for name, version in versions.items() if version},
    }
    entry = {"strategy": row.strategy, "fused_ms": row.fused_ms, "xla_ms": row.xla_ms, "plan": _plain(row.plan)}
    if row.signal_plan is not None:
        entry |= {"signal_ms": row.signal_ms, "signal_plan": _plain(row.signal_plan)}
    if row.resident_plan is not None:
        entry |= {"resident_ms": row.resident_ms, "resident_plan": _plain(row.resident_plan)}
    return entry | {"measured": about}


def _plain(plan: Plan | None) -> dict[str, Any] | None:
    return None if plan is None else dataclasses.asdict(plan)


def _clock() -> Callable[[], float]:
    return lambda: float(agreed(time.monotonic()))
