"""Products of one x that are asked for one by one under automatic sharding.

Fused, each of them gathers x; XLA gathers it once for all that it runs. So which is faster depends on the others, and
the first isn't known to have any when it is traced. But all are traced before the partitioner decides: products of the
same tracer share a list of their columns, which fills meanwhile.
"""

import dataclasses
import weakref
from typing import Any

import jax


class Group:
    """What is known of the products of one tracer."""

    def __init__(self) -> None:
        self.columns: list[int] = []


@dataclasses.dataclass(frozen=True)
class Shared:
    """One of a group's products, or its gradient."""

    group: Group
    columns: int  # its own, of all ranks
    op: str = "all_gather_matmul"  # if that is what it comes to, XLA would move bytes once for the whole group

    def gradient(self) -> "Shared | None":
        """Of the product's dx, of which XLA adds up the whole group's before it scatters them."""
        gathers = self.op == "all_gather_matmul"
        return dataclasses.replace(self, op="matmul_reduce_scatter") if gathers else None

    def beside(self, op: str, columns: int) -> tuple[int, ...]:
        """One rank's columns of each other product, where it has so many of this one's."""
        if op != self.op:
            return ()
        others = [*self.group.columns]
        others.remove(self.columns)
        return tuple(max(1, each * columns // self.columns) for each in others)


# By the tracer's id. Tracers don't compare, so there is no weak dictionary of them.
_groups: dict[int, tuple[weakref.ref[Any], Group]] = {}


def of(x: Any, columns: int) -> Shared | None:
    """A product of x, if that is traced."""
    if not isinstance(x, jax.core.Tracer):
        return None
    at = id(x)
    known = _groups.get(at)
    if known is None or known[0]() is not x:
        known = weakref.ref(x, lambda ref: _forget(at, ref)), Group()
        _groups[at] = known
    known[1].columns.append(columns)
    return Shared(known[1], columns)


def _forget(at: int, ref: weakref.ref[Any]) -> None:
    known = _groups.get(at)
    if known is not None and known[0] is ref:
        del _groups[at]
