"""Programs that time one collective matmul, by any strategy and plan, on the devices at hand.

A program holds several calls in a row, each with random operands of its own; an element of each call's result goes into
the operands of the next, so that XLA can neither merge nor drop nor overlap them.
"""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from . import _lowering, _operands, _reference, _team
from ._agreed import agreed
from ._race import Sampler
from ._strategy import Choice, Plan, Request

_TEAMS, _TEAM = "entwine_teams", "entwine_team"
_CALLS, _CALLS_OF_FEW_ROWS, _FEW_ROWS = 4, 8, 512
_MOST_BYTES = 2 << 30  # of a rank's operands


@dataclasses.dataclass(frozen=True)
class Product:
    """A collective matmul without its epilogue. Types of one rank's x, w and, if a reduce-scatter gathers that beside,
    z."""

    request: Request
    x: Any  # jax.ShapeDtypeStruct
    w: Any
    z: Any = None


class Bench:
    """The programs of one product, which share their operands. All devices take part, in teams as `fn` has them."""

    def __init__(self, product: Product) -> None:
        self._product, self._mesh = product, _mesh(product.request)
        each = [product.x, product.w, *filter(None, [product.z])]
        size = sum(v.size * v.dtype.itemsize for v in each)
        rows = product.x.shape[0] * product.x.shape[2 if product.request.transpose_x else 1]
        calls = _CALLS_OF_FEW_ROWS if rows <= _FEW_ROWS else _CALLS
        calls = max(1, min(calls, _MOST_BYTES // size))
        # Those that are handed from program to program are donated: the link is written in place.
        self._moving: Any = [self._random(v, 1.0, calls, i) for i, v in enumerate(each) if v is not product.w]
        scale = 1.0 if product.request.scaled else product.w.shape[1 if product.request.transpose_w else 0] ** -0.5
        self._ws = self._random(product.w, scale, calls, len(each))
        spread = NamedSharding(self._mesh, P((_TEAMS, _TEAM)))
        self._link = jax.jit(lambda: jnp.zeros(self._mesh.size), out_shardings=spread)()

    @property
    def calls(self) -> int:
        """Of one program."""
        return len(self._ws)

    def compiled(self, plan: Plan | None) -> jax.stages.Compiled:
        """A program by the fused plan, or on XLA."""
        spread = P((_TEAMS, _TEAM))
        mapped = jax.shard_map(
            lambda moving, ws, link: self._rank(plan, moving, ws, link),
            mesh=self._mesh,
            in_specs=(spread, spread, spread),
            out_specs=(spread, spread),
            check_vma=False,
        )
        return jax.jit(mapped, donate_argnums=(0,)).lower(self._moving, self._ws, self._link).compile()

    def sampler(self, plan: Plan | None) -> Sampler:
        """Seconds of a call, by the slowest rank."""
        compiled = self.compiled(plan)

        def sample(repeats: int) -> float:
            moving, link = self._moving, self._link
            start = time.perf_counter()
            for _ in range(repeats):
                moving, link = compiled(moving, self._ws, link)
            jax.block_until_ready((moving, link))
            seconds = time.perf_counter() - start
            self._moving, self._link = moving, link
            mine: float = agreed(seconds) / self.calls
            return mine

        return sample

    def _random(self, like: Any, scale: float, calls: int, seed: int) -> list[jax.Array]:
        """A matrix for every call, of all ranks' rows: what has a batch of one lies in memory as a user's would, or XLA
        would copy it for the sake of its layout."""
        shape = (self._mesh.size * math.prod(like.shape[:-1]), like.shape[-1])

        def draw(key: jax.Array) -> jax.Array:
            return (jax.random.normal(key, shape, jnp.float32) * scale).astype(like.dtype)

        spread = jax.jit(draw, out_shardings=NamedSharding(self._mesh, P((_TEAMS, _TEAM))))
        return [spread(key) for key in jax.random.split(jax.random.key(seed), calls)]

    def _rank(self, plan: Plan | None, moving: Any, ws: Any, link: jax.Array) -> Any:
        request = self._product.request
        request = dataclasses.replace(request.bare(), team=_team.resolve(request.op, _TEAM), saves=False)
        scale = jnp.float32(self._product.x.shape[-1] ** -0.5)
        likes = [v for v in (self._product.x, self._product.z) if v is not None]
        moved: list[list[jax.Array]] = [[] for _ in moving]
        for i, w in enumerate(ws):
            operands = lax.optimization_barrier([_linked(v[i], link) for v in moving])
            shaped = [v.reshape(like.shape) for v, like in zip(operands, likes, strict=True)]
            results = lax.optimization_barrier(_call(request, plan, shaped, w, scale))
            link = sum((v[:1, 0, 0].astype(jnp.float32) for v in results), jnp.float32(0))
            for all_of, v in zip(moved, operands, strict=True):
                all_of.append(v)
        return moved, link


def _call(request: Request, plan: Plan | None, operands: Any, w: jax.Array, scale: jax.Array) -> list[jax.Array]:
    x, *z = operands
    scales = [scale] if request.scaled else []
    if plan is not None:
        choice = Choice(plan.strategy, "measured", plan)
        made: list[jax.Array] = _lowering.collective_matmul_p.bind(x, w, *scales, *z, request=request, choice=choice)
        return made
    gathers = request.gathers and not z
    alone = dataclasses.replace(request, gathers=gathers)
    operands = _operands.Operands((x,), (w,), (None,), *scales)
    ys, whole = _lowering.on_xla(alone, Choice("xla", "measured"), operands)
    return [v for v in (*ys, whole, *(_reference.gather(v, (_TEAM,)) for v in z)) if v is not None]


def _linked(x: jax.Array, link: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(x, jnp.clip(link, -1, 1).astype(x.dtype).reshape(1, 1), (0, 0))


def _mesh(request: Request) -> Mesh:
    """All devices in teams: as they lie in the program, if that has all devices, else one after the other.

    ValueError if there are too few.
    """
    team = request.team
    devices = jax.devices(team.platform)
    if len(devices) < team.size:
        raise ValueError(f"there are {len(devices)} {team.platform} devices, fewer than the team's {team.size}")
    order = team.groups if len(team.groups) == len(devices) else range(len(devices) // team.size * team.size)
    return Mesh(np.array([devices[i] for i in order]).reshape(-1, team.size), (_TEAMS, _TEAM))
