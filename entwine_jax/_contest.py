"""Which plan of one product is the fastest: what `autotune` tries, races, and makes of it."""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax

from . import _candidates, _obstacles, _strategy
from ._agreed import agreed
from ._config import OURS
from ._measure import Bench, Product
from ._race import Sampler, Samples, race
from ._strategy import Choice, Plan
from ._tuning import Tuned

# XLA that takes less time than this share of any fused plan's will not be caught up with by another lead.
_HOPELESS = 0.7
# Where an entry has the best plan of each of our strategies.
PLANS = {"fused": "plan", "resident": "resident_plan", "signal": "signal_plan"}
XLA = "xla"


@dataclasses.dataclass(frozen=True)
class Found:
    """A distinct product of the function: as measured, and by which keys it is known."""

    key: str
    asked: str
    product: Product
    choice: Choice  # as sought: fused, or why that can't be

    def row(self, status: str, **found: Any) -> Tuned:
        request = self.product.request
        plans = {name: found.get(PLANS[name]) for name in OURS}
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


def _signals(found: Found) -> list[Plan]:
    """Plans of strategy "signal" that may be tried."""
    request, x, w = found.product.request, cast(Any, found.product.x), cast(Any, found.product.w)
    if request.settings.strategy in ("fused", "resident") or found.product.z is not None:
        return []
    problem = _obstacles.signal_obstacle(request, x, w)
    return _candidates.signals(None if problem is not None else _strategy.signal_plan(request, x, w))


def _residents(found: Found) -> list[Plan]:
    """The same of "resident"."""
    request, x, w = found.product.request, cast(Any, found.product.x), cast(Any, found.product.w)
    if request.settings.strategy in ("fused", "signal"):
        return []
    problem = _obstacles.resident_obstacle(request, x, w)
    return _candidates.residents(None if problem is not None else _strategy.resident_plan(request, x, w))


def _forms(found: Found, base: Plan) -> list[Plan]:
    shape = _strategy.sizes(found.product.request, found.product.x.shape, found.product.w.shape)
    fused = _candidates.forms(found.product.request, shape, base) if base.strategy == "fused" else []
    return [*fused, *(plan for plan in (*_residents(found), *_signals(found)) if plan != base)]


def planned(found: Found) -> Tuned:
    """The row of what would be measured."""
    request, base = found.product.request, found.choice.plan
    assert base is not None
    plans = [base, *_forms(found, base), *_candidates.numbers(request, base)]
    names = (XLA, *(_candidates.show(request.op, plan, request.gathers) for plan in plans))
    return found.row("would be measured", tried=dict.fromkeys(names))


def contest(found: Found, clock: Callable[[], float], until: float, tell: Callable[[float, str], None]) -> Tuned:
    """The row of a product that is measured until then; `tell` hears how much is done, and of what."""
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


def _by_model(found: Found) -> Any:
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
    found: Found,
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
    return {} if mine is None else {PLANS[strategy]: entrants[mine][0], f"{strategy}_ms": medians[mine]}
