"""A team: the ranks along one mesh axis, or along several taken as one."""

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import jax.extend.backend
import numpy as np

from . import _checks

AxisName = str | Sequence[str]


@dataclasses.dataclass(frozen=True)
class Team:
    axis_name: tuple[str, ...]  # major to minor
    size: int
    groups: tuple[int, ...]  # logical device ids of every team along the axis, flattened [team][rank]
    other_axes: tuple[str, ...]  # the mesh's other axes: together they tell the teams apart
    loose_axes: tuple[str, ...]  # those of them that aren't manual here
    platform: str  # "cpu", "cuda", ...

    def __repr__(self) -> str:  # short: it is printed in every jaxpr
        return f"{_checks.axis(self.axis_name)}*{self.size}"


def resolve(op: str, axis_name: Any) -> Team:
    """The team that `axis_name` means where JAX is tracing now."""
    names: tuple[str, ...] = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    mesh = jax.sharding.get_abstract_mesh()
    for name in names:
        if name not in mesh.manual_axes:
            raise ValueError(
                f"entwine_jax.{op}: axis_name={name!r} is unbound: the manual mesh axes here are {mesh.manual_axes}; "
                f"call it inside jax.shard_map over a mesh with an axis {name!r}"
            )
    if not names or len(set(names)) < len(names):
        raise ValueError(f"entwine_jax.{op}: axis_name={axis_name!r} must name one mesh axis or several different ones")
    if mesh.explicit_axes:
        # Auto axes XLA partitions by itself; explicit ones would need sharding rules of their own for either op.
        raise NotImplementedError(
            f"entwine_jax.{op}: mesh axes {mesh.explicit_axes} are explicit beside axis_name={axis_name!r}; "
            "make them manual with jax.shard_map's axis_names"
        )
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    device = mesh.abstract_device
    platform = device.platform if device is not None else jax.default_backend()
    return along(names, sizes, mesh.manual_axes, platform)


def along(names: tuple[str, ...], sizes: Mapping[str, int], manual: Collection[str], platform: str) -> Team:
    """The team along some axes of a mesh; `sizes` has all its axes in order."""
    # Axes of size one tell no teams apart, and needn't be manual.
    others = tuple(name for name in sizes if name not in names and sizes[name] > 1)
    ids = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
    ids = ids.transpose([[*sizes].index(name) for name in sorted(sizes, key=lambda n: _place(n, names, others))])
    return Team(
        axis_name=names,
        size=math.prod(sizes[name] for name in names),
        groups=tuple(int(i) for i in ids.flat),
        other_axes=others,
        loose_axes=tuple(name for name in others if name not in manual),
        platform="cuda" if platform == "gpu" and not _is_rocm() else platform,
    )


def _place(name: str, names: tuple[str, ...], others: tuple[str, ...]) -> tuple[int, int]:
    """Sort key: axes of size one, then the other axes in mesh order, then the team's from major to minor."""
    if name in names:
        return (2, names.index(name))
    return (1, others.index(name)) if name in others else (0, 0)


def _is_rocm() -> bool:
    return "rocm" in jax.extend.backend.get_backend("gpu").platform_version.lower()
