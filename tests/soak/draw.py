"""Random programs: what a seed stands for. Plain data, and nothing here knows JAX but the names of dtypes."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import jax.numpy as jnp

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
KINDS = ("one", "independent", "chain", "chain", "loop", "gradient")


@dataclasses.dataclass(frozen=True)
class Machine:
    """What programs are drawn for."""

    platform: str  # "cpu" or "gpu"
    devices: int
    types: tuple[tuple[str, str], ...]  # (of operands, of results) that strategy "fused" takes
    tiles: dict[tuple[int, bool], tuple[tuple[int, int], ...]]  # by bytes of a result, and whether it is gated
    few_rows: int  # the most that the kernels for few rows take, 0 without them
    timeout_s: float


@dataclasses.dataclass(frozen=True)
class Call:
    """One op. m_shard, n and k are of one rank, as in the benchmark; all-reduce has `odd` rows fewer in all.

    `more` are n of an all-gather's other weights, or k of the other pairs whose products are added.
    """

    op: str
    batch: tuple[int, ...]
    m_shard: int
    n: int
    k: int
    config: tuple[tuple[str, Any], ...]
    odd: int = 0
    more: tuple[int, ...] = ()
    gathered: bool = False  # is a result
    transpose_w: bool = False
    bias: bool = False
    activation: str | None = None
    gated: bool = False  # an all-gather's two products have one result

    def rows(self, ranks: int) -> int:
        return ranks * self.m_shard - self.odd

    @property
    def gathers(self) -> bool:
        return self.op == "all_gather_matmul"

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """k and n of each product."""
        return [(self.k, self.n), *((self.k, size) if self.gathers else (size, self.n) for size in self.more)]

    @property
    def xs(self) -> int:
        return 1 if self.gathers else len(self.sizes)

    @property
    def sums(self) -> int:
        """Each may have a bias."""
        return len(self.sizes) if self.gathers else 1

    @property
    def ys(self) -> int:
        return 1 if self.gated else self.sums


@dataclasses.dataclass(frozen=True)
class Program:
    """A jitted function of calls over one team axis."""

    kind: str
    order: tuple[int, ...]  # of devices
    shape: tuple[int, ...]  # of the mesh
    names: tuple[str, ...]
    axis: tuple[str, ...]  # the team's
    other: str | None  # leads the batch
    dtype: str
    result: str
    check_vma: bool
    calls: tuple[Call, ...]
    turns: int = 1  # of a loop

    @property
    def float8(self) -> bool:
        return self.dtype.startswith("float8")

    @property
    def ranks(self) -> int:
        return math.prod(self.shape[self.names.index(name)] for name in self.axis)


def exact(dtype: str) -> int:
    """Integers up to here are numbers of this dtype."""
    return int(2 ** (jnp.finfo(jnp.dtype(dtype)).nmant + 1))


def program(machine: Machine, rng: random.Random) -> Program:
    order, shape, names, axis, other = _mesh(machine, rng)
    ranks = math.prod(shape[names.index(name)] for name in axis)
    dtype, result = rng.choice(machine.types)
    float8 = dtype.startswith("float8")
    # Those have no gradient; one of float16 with a float32 cotangent is a product of float32, which no kernel takes.
    no_gradient = float8 or (machine.platform == "gpu" and (dtype, result) == ("float16", "float32"))
    kind = rng.choice([kind for kind in KINDS if not (no_gradient and kind == "gradient")])
    draw = _Calls(machine, rng, ranks, jnp.dtype(dtype).itemsize, jnp.dtype(result).itemsize, float8)
    batch = _batch(rng, shape[names.index(other)] if other else 1, bool(other))
    turns = 1
    if kind in ("one", "gradient"):
        calls = [draw.any(batch, results=kind == "one")]
    elif kind == "independent":
        calls = [draw.any(batch, results=True) for _ in range(rng.randint(2, 4))]
    else:
        turns = rng.randint(2, 4) if kind == "loop" else 1
        calls = draw.chain(batch, closed=kind == "loop")
    # An all-reduce's cotangents come in shares without it.
    check_vma = kind == "gradient" or rng.random() < 0.7
    return Program(kind, order, shape, names, axis, other, dtype, result, check_vma, tuple(calls), turns)


def _mesh(
    machine: Machine, rng: random.Random
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str, ...], tuple[str, ...], str | None]:
    """Teams of the whole mesh or along some of its axes, on some of the devices in any order."""
    shapes: list[tuple[int, ...]] = [(size,) for size in range(2, min(machine.devices, 8) + 1)]
    shapes += [(a, b) for a in range(1, 5) for b in range(1, 5) if 2 <= a * b <= min(machine.devices, 8)]
    shape = rng.choice(shapes)
    order = tuple(rng.sample(range(machine.devices), math.prod(shape)))
    if len(shape) == 1:
        return order, shape, ("t",), ("t",), None
    names = ("a", "b")
    whole = rng.random() < 0.4 or min(shape) == 1
    if whole:  # one team, from major to minor or the other way round
        return order, shape, names, rng.choice([names, names[::-1]]), None
    team = rng.randrange(2)
    return order, shape, names, (names[team],), names[1 - team]


def _batch(rng: random.Random, multiple: int, led: bool) -> tuple[int, ...]:
    batch = rng.choice([(), (), (1,), (2,), (3,), (2, 2)])
    if not led:
        return batch
    return (multiple * rng.randint(1, 2), *batch[1:])


class _Calls:
    def __init__(
        self, machine: Machine, rng: random.Random, ranks: int, itemsize: int, out_bytes: int, float8: bool
    ) -> None:
        self.machine, self.rng, self.ranks, self.out_bytes, self.float8 = machine, rng, ranks, out_bytes, float8
        self.gpu = machine.platform == "gpu"
        self.unit = 16 // itemsize if self.gpu else 1  # of row lengths

    def any(self, batch: tuple[int, ...], results: bool) -> Call:
        op = self.rng.choice(OPS)
        m_shard, n, k = self.rows(), self.columns(), self.columns()
        odd = self.rng.randrange(min(m_shard, self.ranks)) if op == "matmul_all_reduce" else 0
        gather = op == "all_gather_matmul" and results
        more = tuple(self.columns() for _ in range(self.rng.choice([0, 0, 0, 1, 2, 3])))
        gated = gather and not self.float8 and self.rng.random() < 0.3
        more = (n,) if gated else more
        gathered = gather and self.rng.random() < 0.4
        tiled = bool(more) or gathered  # the kernels for few rows take one product and gather nothing for others
        config = self.config(batch, m_shard, n, odd, tiled, gated)
        return Call(op, batch, m_shard, n, k, config, odd, more, gathered, **self.finish(results), gated=gated)

    def chain(self, batch: tuple[int, ...], closed: bool) -> list[Call]:
        """Up, down, up, down ...; `closed` ends as wide as it begins."""
        m_shard, width = self.rows(), self.columns()
        layers, calls = 1 if closed else self.rng.randint(1, 3), []
        for _ in range(layers):
            hidden, narrow = self.columns(), width if closed else self.columns()
            down = "matmul_reduce_scatter" if self.rng.random() < 0.6 else "matmul_all_reduce"
            up = self.config(batch, m_shard, hidden)
            calls.append(Call("all_gather_matmul", batch, m_shard, hidden, width, up, **self.finish()))
            config = self.config(batch, m_shard, narrow)
            calls.append(Call(down, batch, m_shard, narrow, hidden, config, **self.finish()))
            width = narrow
        return calls

    def finish(self, activated: bool = True) -> dict[str, Any]:
        """How w lies, and what becomes of the sums; the one activation that keeps integers."""
        rng = self.rng
        return {
            "transpose_w": rng.random() < 0.3,
            "bias": rng.random() < 0.3,
            "activation": rng.choice([None, None, "relu"]) if activated else None,
        }

    def rows(self) -> int:
        """Few ones, tile tails, and edges."""
        if not self.gpu:
            return self.rng.choice([1, 2, 3, 7, 31, 32, 33, self.rng.randint(1, 100)])
        edge = self.rng.choice([64, 128, 256]) * self.rng.randint(1, 3) + self.rng.randint(-2, 2)
        return self.rng.choice([1, 3, 8, 16, edge, edge, self.rng.randint(1, 1100)])

    def columns(self) -> int:
        if not self.gpu:
            return self.rng.choice([1, 31, 32, 33, self.rng.randint(1, 90)])
        edge = self.rng.choice([128, 256, 512]) * self.rng.randint(1, 3) + self.unit * self.rng.randint(-1, 1)
        return self.rng.choice([self.unit, edge, self.unit * self.rng.randint(1, 1400 // self.unit)])

    def config(
        self,
        batch: tuple[int, ...],
        m_shard: int,
        n: int,
        odd: int = 0,
        tiled: bool = False,
        gated: bool = False,
    ) -> tuple[tuple[str, Any], ...]:
        """Of what a user may set, some."""
        rng, most = self.rng, 70 if self.gpu else 8
        drawn: dict[str, Any] = {
            "lead": rng.randint(0, most),
            "raster": rng.choice([1, 2, 3, 8, 100]),
            "transport": rng.choice(["pull", "push"]),
            "pushers": rng.randint(1, most),
            "copiers": rng.randint(1, most),
        }
        config = {name: value for name, value in drawn.items() if rng.random() < 0.4}
        if self.machine.few_rows:
            few = not tiled and math.prod(batch) * (self.ranks * m_shard - odd) <= self.machine.few_rows
            config["few_rows"] = rng.choice([True, False]) if few else False
        if rng.random() < 0.5:
            config["tile_m"], config["tile_n"] = rng.choice(self.machine.tiles[self.out_bytes, gated])
        config["timeout_s"] = self.machine.timeout_s
        if not self.gpu:
            config["workers"] = rng.randint(1, 3)
            tile_m, tile_n = config.get("tile_m", 32), config.get("tile_n", 32)
            count = self.ranks * math.prod(batch) * -(-m_shard // tile_m) * -(-n // tile_n)
            config["stall_us"] = min(rng.choice([0, 0, 100, 1000]), 10000 // count)  # milliseconds a call
            config["stall_seed"] = rng.randrange(1000)
        return tuple(sorted(config.items()))
