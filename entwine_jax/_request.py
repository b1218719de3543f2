"""What is asked for, and what comes of it: a request, its sizes, a plan, a choice."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from . import _core
from ._config import OURS, Settings
from ._team import Team

TARGETS = {"cpu": "host", "cuda": "sm90"}


@dataclasses.dataclass(frozen=True)
class Request:
    """A collective matmul as asked for: everything but the operands."""

    op: str
    team: Team
    transpose_w: bool  # w is (n, k)
    dtype: np.dtype[Any]  # of the result
    precision: Any
    settings: Settings
    gathers: bool = False  # also returns a gathered array: all of x, or reduce-scatter's third operand
    saves: bool = False  # all-gather keeps the gathered x for its weight gradient
    scaled: bool = False  # float8 operands, and a scale for another one, or one for each of several products
    biased: bool = False  # has a bias for an operand: float32, one number for each column of the result
    activation: str | None = None  # of _config.ACTIVATIONS
    products: int = 1  # in one call: of one x and several w (all-gather), or of pairs whose products are added
    # All-gather: `biased` and `activation` of the products after the first.
    others: tuple[tuple[bool, str | None], ...] = ()
    gated: bool = False  # all-gather's two products have one result, activation(gate) * up
    # Columns of w (of a reduce-scatter that is a gradient, its contraction) of each other call that has the same x: XLA
    # would move bytes once for all of them.
    beside: tuple[int, ...] = ()
    transpose_x: bool = False  # x is (batch, k, rows): of one product that is summed over ranks, not float8

    def bare(self) -> "Request":
        """Without the epilogue."""
        return self.finished([False] * len(self.biases), [None] * len(self.biases))

    @property
    def results(self) -> int:
        """How many y there are."""
        return 1 if self.gated else len(self.biases)

    @property
    def biases(self) -> tuple[bool, ...]:
        """Whether each result has a bias, or each of two that are gated."""
        return self.biased, *(biased for biased, _ in self.others)

    @property
    def activations(self) -> tuple[str | None, ...]:
        """Of each result."""
        return self.activation, *(activation for _, activation in self.others)

    @property
    def sm90_tiles(self) -> tuple[tuple[int, int], ...]:
        """Those of the kernels that can take it."""
        return _core.sm90_tiles(out_bytes=self.dtype.itemsize, gated=self.gated)

    def finished(self, biases: Sequence[bool], activations: Sequence[str | None]) -> "Request":
        """With these in place of its own."""
        (biased, activation), *others = zip(biases, activations, strict=True)
        return dataclasses.replace(self, biased=biased, activation=activation, others=(*others,))

    def alone(self, i: int) -> "Request":
        """For one of its products in a call of its own. If their sum has an epilogue, that is left to do."""
        gather = self.op == "all_gather_matmul"
        biased, activation = (self.biases[i], self.activations[i]) if gather else (False, None)
        return dataclasses.replace(self, products=1, others=(), biased=biased, activation=activation, gated=False)


@dataclasses.dataclass(frozen=True)
class Plan:
    """Schedule and launch shape; cc/schedule/plan.h says what each number means."""

    target: str
    tile_m: int
    tile_n: int
    raster: int
    lead: int
    transport: str
    pushers: int
    copiers: int
    few_rows: bool  # sm90: the kernels for few rows, to which the numbers above mean nothing
    # Strategy "signal", which knows tiles and raster of the above; cc/schedule/group_search.h. Neither multiprocessors
    # for NCCL nor copy engines: of another one.
    comm_sms: int = 0
    engines: bool = False
    group_waves: int = 0
    far: bool = False
    # Strategy "resident", to which transport means nothing; cc/schedule/movers.h. 0: of another one.
    movers: int = 0

    @property
    def strategy(self) -> str:
        return "signal" if self.comm_sms or self.engines else "resident" if self.movers else "fused"

    @property
    def moved_by(self) -> str:
        """What moves the groups of strategy "signal" on GPUs, in words."""
        return "copy engines" if self.engines else f"{self.comm_sms} SMs for NCCL"


@dataclasses.dataclass(frozen=True)
class Choice:
    strategy: str
    reason: str
    plan: Plan | None = None
    # The key by which tables were asked: of the call as it was traced, which vmap may make larger.
    asked: str = dataclasses.field(default="", compare=False)

    @property
    def ours(self) -> bool:
        """Whether a call of this library's runs it, or XLA."""
        return self.strategy in OURS

    @property
    def gathers_beside(self) -> bool:
        """Whether a reduce-scatter can gather another array beside."""
        return self.strategy in ("fused", "resident")


@dataclasses.dataclass(frozen=True)
class Sizes:
    batch: int
    m_shard: int
    n: int
    k: int
    missing: int = 0  # all-reduce: rows that the last chunks are short of


def sizes(request: Request, x: tuple[int, ...], w: tuple[int, ...]) -> Sizes:
    """Of x (batch, rows, k) or (batch, k, rows) and w (k, n) or (n, k). An all-reduce takes the rows of all batches as
    one matrix."""
    scatter = request.op == "matmul_reduce_scatter"
    batch, rows, k = (x[0], x[2], x[1]) if request.transpose_x else x
    n = w[0] if request.transpose_w else w[1]
    if request.op == "matmul_all_reduce":
        target = TARGETS[request.team.platform]
        m_shard, missing = _core.chunk_rows(target, ranks=request.team.size, rows=batch * rows)
        return Sizes(1, m_shard, n, k, missing)
    return Sizes(batch, rows // request.team.size if scatter else rows, n, k)


def joined(request: Request, pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """x and w, as types, of one product with all columns of all-gather's w, or all of the others' contraction."""
    if len(pairs) == 1:
        return pairs[0]
    dim = _own_dim(request)
    return alike(request, *pairs[0], sum(w.shape[dim] for _, w in pairs))


def alike(request: Request, x: Any, w: Any, size: int) -> tuple[Any, Any]:
    """x and w, as types, of a product like this one: `size` are the columns of all-gather's w, or the contraction."""
    shape, dim = list(w.shape), _own_dim(request)
    shape[dim] = size
    k = x.shape[2] if request.op == "all_gather_matmul" else size
    return jax.ShapeDtypeStruct((*x.shape[:2], k), x.dtype), jax.ShapeDtypeStruct((*shape,), w.dtype)


def _own_dim(request: Request) -> int:
    """Of w: what products of one call may differ in."""
    return 0 if (request.op == "all_gather_matmul") == request.transpose_w else 1


def geometry(request: Request, x: jax.Array, w: jax.Array) -> dict[str, int]:
    return {"ranks": request.team.size} | dataclasses.asdict(sizes(request, x.shape, w.shape))


def all_rows(request: Request, shape: Sizes) -> int:
    return request.team.size * shape.batch * shape.m_shard - shape.missing


def wants_tiles(request: Request) -> bool:
    """Whether a call can't be for the kernels for few rows: these gather nothing for others, read x by rows, and who
    sets a number of the tiles' schedule means tiles."""
    config = request.settings.config
    numbers = (config.tile_m, config.tile_n, config.raster, config.lead, config.transport, config.pushers)
    meant = config.few_rows is None and any(value is not None for value in numbers)
    return request.gathers or request.transpose_x or request.products > 1 or config.few_rows is False or meant
