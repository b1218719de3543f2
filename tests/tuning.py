"""What the tests of autotune share: measurements that are what a test says. Their fixtures are in conftest.py."""

import dataclasses
from collections.abc import Callable
from typing import Any


@dataclasses.dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclasses.dataclass
class Measurements:
    """In place of a Bench: `seconds(product, plan)` of a call, plan None for XLA. To compile takes a second."""

    seconds: Callable[[Any, Any], float]
    clock: Clock = dataclasses.field(default_factory=Clock)
    products: list[Any] = dataclasses.field(default_factory=list)
    plans: list[Any] = dataclasses.field(default_factory=list)
    samples: list[Any] = dataclasses.field(default_factory=list)

    def __call__(self, product: Any) -> Any:
        self.products.append(product)
        outer = self

        class Bench:
            def sampler(self, plan: Any) -> Callable[[int], float]:
                outer.clock.now += 1
                outer.plans.append(plan)

                def sample(repeats: int) -> float:
                    outer.samples.append(plan)
                    seconds = repeats * outer.seconds(product, plan)
                    outer.clock.now += seconds
                    return seconds

                return sample

        return Bench()


def entry(
    strategy: str = "fused", fused_ms: float | None = 0.213, xla_ms: float = 0.301, **plan: Any
) -> dict[str, Any]:
    """As files hold it, of the host executor's plan."""
    base = {"target": "host", "tile_m": 64, "tile_n": 64, "raster": 4, "lead": 8, "transport": "pull"}
    base |= {"pushers": 1, "copiers": 1, "few_rows": False}
    return {"strategy": strategy, "fused_ms": fused_ms, "xla_ms": xla_ms, "plan": base | plan}
