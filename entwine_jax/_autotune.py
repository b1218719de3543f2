"""autotune: measures the collective matmuls of a function, and keeps what is fastest for the next trace."""

import dataclasses
import datetime
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, cast

import jax

from . import _candidates, _explain, _obstacles, _strategy, _tuned
from ._agreed import agreed
from ._config import OURS
from ._measure import Bench, Product
from ._progress import Progress
from ._race import Sampler, Samples, race
from ._strategy import Choice, Plan
from ._tuning import Tuned, Tuning

# XLA that takes less time than this share of any fused plan's will not be caught up with by another lead.
_HOPELESS = 0.7
# Where an entry has the best plan of each of our strategies.
_PLANS = {"fused": "plan", "resident": "resident_plan", "signal": "signal_plan"}
XLA = "xla"


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
    found: Sequence["_Found"],
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
            row = _known(each, again) or (_planned(each) if dry_run else None)
            if row is None and clock() >= until:
                row = each.row("there was no time left for it")
            if row is None:
                now = clock()
                share = now + (until - now) / (len(found) - i)

                def tell(done: float, text: str, i: int = i, each: "_Found" = each) -> None:
                    if progress is not False:
                        bar.show(i + done, f"{each.key}: {text}")

                row = _measured(each, clock, share, tell)
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


@dataclasses.dataclass(frozen=True)
class _Found:
    """A distinct product of the function: as measured, and by which keys it is known."""

    key: str
    asked: str
    product: Product
    choice: Choice  # as sought: fused, or why that can't be

    def row(self, status: str, **found: Any) -> Tuned:
        request = self.product.request
        plans = {name: found.get(_PLANS[name]) for name in OURS}
        shown = plans.get(found.get("strategy") or "") or next(filter(None, plans.values()), None)
        return Tuned(
            op=request.op,
            key=self.key,
            asked=self.asked,
            team_size=request.team.size,
            platform=request.team.platform,
            status=status,
            shown="" if shown is None else _candidates.show(request.op, shown, request.gathers),
            **found,
        )


def _distinct(calls: Sequence[_explain.Call]) -> list[_Found]:
    made: dict[str, _Found] = {}
    for call in calls:
        request, count, choice = call.request.bare(), len(call.pairs), call.choice
        operands: list[Any] = [v for v in (*_strategy.joined(request, call.pairs), call.z) if v is not None]
        x, w, *z = (jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands)
        key = _strategy.key(request, cast(Any, x), cast(Any, w))
        if count > 1:  # no table is asked for these
            key = f"{count} products at once, together {key}"
            choice = dataclasses.replace(choice, plan=None, reason="several products at once aren't tuned")
        made.setdefault(key, _Found(key, choice.asked, Product(request, x, w, *z), choice))
    return list(made.values())


def _known(found: _Found, again: bool) -> Tuned | None:
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
    plans = {name: None if entry[name] is None else Plan(**entry[name]) for name in _PLANS.values()}
    about = {name: entry[name] for name in ("strategy", *(f"{each}_ms" for each in OURS), "xla_ms")}
    return found.row(f"known already ({entry['source']})", **about, **plans)


def _signals(found: _Found) -> list[Plan]:
    """Plans of strategy "signal" that may be tried."""
    request, x, w = found.product.request, cast(Any, found.product.x), cast(Any, found.product.w)
    if request.settings.strategy in ("fused", "resident") or found.product.z is not None:
        return []
    problem = _obstacles.signal_obstacle(request, x, w)
    return _candidates.signals(None if problem is not None else _strategy.signal_plan(request, x, w))


def _residents(found: _Found) -> list[Plan]:
    """The same of "resident"."""
    request, x, w = found.product.request, cast(Any, found.product.x), cast(Any, found.product.w)
    if request.settings.strategy in ("fused", "signal"):
        return []
    problem = _obstacles.resident_obstacle(request, x, w)
    return _candidates.residents(None if problem is not None else _strategy.resident_plan(request, x, w))


def _forms(found: _Found, base: Plan) -> list[Plan]:
    shape = _strategy.sizes(found.product.request, found.product.x.shape, found.product.w.shape)
    fused = _candidates.forms(found.product.request, shape, base) if base.strategy == "fused" else []
    return [*fused, *(plan for plan in (*_residents(found), *_signals(found)) if plan != base)]


def _planned(found: _Found) -> Tuned:
    request, base = found.product.request, found.choice.plan
    assert base is not None
    plans = [base, *_forms(found, base), *_candidates.numbers(request, base)]
    names = (XLA, *(_candidates.show(request.op, plan, request.gathers) for plan in plans))
    return found.row("would be measured", tried=dict.fromkeys(names))


def _measured(found: _Found, clock: Callable[[], float], until: float, tell: Callable[[float, str], None]) -> Tuned:
    request, product = found.product.request, found.product
    base, start = found.choice.plan, clock()
    assert base is not None
    try:
        bench = Bench(product)
    except (ValueError, jax.errors.JaxRuntimeError) as error:  # too few devices, no memory
        return found.row(str(error).partition("\n")[0])
    model = _strategy.choose(_by_model(found), product.x, product.w)
    entrants: dict[str, tuple[Plan | None, Sampler]] = {}
    failed: dict[str, str] = {}
    share = until - start

    def enter(plan: Plan | None, least: bool, latest: float) -> None:
        """Compiles, if there is time."""
        name = XLA if plan is None else _candidates.show(request.op, plan, request.gathers)
        if name in entrants or name in failed or not (least or clock() < start + latest * share):
            return
        tell(min(0.99, (clock() - start) / share), name)
        error = None
        try:
            entrants[name] = plan, bench.sampler(plan)
        except jax.errors.JaxRuntimeError as raised:  # no memory, say
            error = str(raised).partition("\n")[0]
        everywhere = agreed(error)
        if everywhere is not None:
            failed[name] = everywhere
            entrants.pop(name, None)
        elif error is not None:
            raise RuntimeError(f"entwine_jax.autotune: {name} failed in process {jax.process_index()} alone: {error}")

    enter(None, True, 0)
    enter(base, True, 0)
    for plan in _forms(found, base):
        enter(plan, False, 0.4)
    first = _race(entrants, clock, start + 0.55 * share, found.key)
    # The best of these, and its numbers one by one; the cost model's plan and XLA if they are still in it.
    best = _best(entrants, first)
    if best is not None and not (XLA in entrants and first.median(XLA) < _HOPELESS * first.median(best)):
        others = (_best(entrants, first, strategy) for strategy in OURS)
        keep = [name for name in entrants if name in (best, *others) or not first.slower(name, best)]
        seen, fastest = set(entrants), entrants[best][0]
        assert fastest is not None
        for other in _candidates.numbers(request, fastest):
            enter(other, False, 0.8)
        again = {name: each for name, each in entrants.items() if name in keep or name not in seen}
        second = _race(again, clock, until, found.key + " numbers") if len(again) > 1 else first
        best = _best(again, second)
    else:
        second = first
    return _row(found, model, entrants, failed, first, second, best)


def _by_model(found: _Found) -> Any:
    """The request as the cost model alone sees it."""
    request = found.product.request
    settings = dataclasses.replace(request.settings, strategy="auto", tuned=False)
    return dataclasses.replace(request, settings=settings)


def _race(
    entrants: dict[str, tuple[Plan | None, Sampler]], clock: Callable[[], float], until: float, seed: str
) -> Samples:
    return race({name: sampler for name, (_, sampler) in entrants.items()}, clock, until, seed)


def _best(
    entrants: dict[str, tuple[Plan | None, Sampler]], samples: Samples, strategy: str | None = None
) -> str | None:
    """Of our strategies' plans, or one's, which are in order of their distance from the cost model's."""
    names = [name for name, (plan, _) in entrants.items() if plan is not None and strategy in (None, plan.strategy)]
    return samples.choose(names) if names else None


def _row(
    found: _Found,
    model: Choice,
    entrants: dict[str, tuple[Plan | None, Sampler]],
    failed: dict[str, str],
    first: Samples,
    second: Samples,
    best: str | None,
) -> Tuned:
    medians = {name: (second if name in second.seconds else first).median(name) * 1e3 for name in entrants}
    if XLA not in medians:
        return found.row(f"XLA failed: {failed[XLA]}", tried=medians | dict.fromkeys(failed))
    strategy = XLA
    winner = None if best is None else entrants[best][0]
    if winner is not None and best is not None:
        # XLA is in the second race, or was slower in the first than what is best since.
        if XLA in second.seconds:
            order = [XLA, best] if model.strategy == XLA else [best, XLA]
            strategy = "xla" if second.choose(order) == XLA else winner.strategy
        else:
            strategy = winner.strategy
    base = found.choice.plan
    assert base is not None
    name = _candidates.show(found.product.request.op, base, found.product.request.gathers)
    by_model = medians[XLA] if model.strategy == XLA else medians.get(name)
    return found.row(
        "measured",
        strategy=strategy,
        **_ours("fused", entrants, first, second, best, medians),
        **_ours("resident", entrants, first, second, best, medians),
        **_ours("signal", entrants, first, second, best, medians),
        xla_ms=medians[XLA],
        model_ms=by_model,
        tried=medians | dict.fromkeys(failed),
        rounds=max(len(each) for each in second.seconds.values()),
    )


def _ours(
    strategy: str,
    entrants: dict[str, tuple[Plan | None, Sampler]],
    first: Samples,
    second: Samples,
    best: str | None,
    medians: dict[str, float],
) -> dict[str, Any]:
    """A strategy's best plan and its time, as `Tuned` has them."""
    if best is None or (winner := entrants[best][0]) is None:
        return {}
    in_first = {each: entrants[each] for each in first.seconds}
    mine = best if winner.strategy == strategy else _best(in_first, first, strategy)
    return {} if mine is None else {_PLANS[strategy]: entrants[mine][0], f"{strategy}_ms": medians[mine]}


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
