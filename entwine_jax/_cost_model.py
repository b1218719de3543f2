"""cost_model: what a collective matmul should take by each strategy, without a GPU."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from . import _core, _obstacles, _signal, _strategy
from ._config import TRANSPORTS, Config, resolve
from ._request import geometry
from ._strategy import Plan, Request
from ._team import Team

_OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
_WIDE = (jnp.bfloat16, jnp.float16)
_NARROW = (jnp.float8_e4m3fn, jnp.float8_e5m2)
_PITCH_BYTES = 16


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one strategy should take, in microseconds.

    ``us`` is the whole call. ``link_us`` is what its bytes take on the link and ``multiply_us`` what its products take;
    fused, they overlap. There, ``wait_rows_us``, ``wait_sums_us`` and ``wait_buffers_us`` tell what a cluster spends
    waiting for gathered rows, for partial sums, and for its own stores to leave (means over clusters). Kernels for few
    rows have no such parts: theirs are 0. ``formula_us`` is the closed form by which ``strategy="auto"`` decides.
    """

    strategy: str
    us: float
    formula_us: float
    link_us: float
    multiply_us: float
    wait_rows_us: float
    wait_sums_us: float
    wait_buffers_us: float
    plan: Plan | None  # None of XLA


def cost_model(
    op: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    out_dtype: DTypeLike | None = None,
    gated: bool = False,
    config: Config | None = None,
    machine: Mapping[str, float] | None = None,
) -> dict[str, Cost]:
    """What a collective matmul should take on Hopper GPUs by every strategy that can run it. Runs anywhere.

    Fused, the call's own schedule is simulated: clusters claim tiles in the real order, multiply, wait, add and send
    them over a link of the measured rate (``cc/simulate``). ``"resident"`` likewise. ``"signal"`` goes by its groups:
    waves of tiles, transfers and copies to the result. XLA is a GEMM, and NCCL before or after it. The numbers of the
    machine are those of two H200s; more of them are taken to have the same link each, whatever the number of peers.
    docs/performance.md tells how far predictions are from measurements::

        costs = entwine_jax.cost_model("matmul_reduce_scatter", 8192, 8192, 3584, ranks=8)
        min(costs, key=lambda strategy: costs[strategy].us)

    Args:
      op: ``"all_gather_matmul"``, ``"matmul_reduce_scatter"`` or ``"matmul_all_reduce"``.
      m, n, k: one rank's matmul, (m, k) @ (k, n). The m rows are the gathered ones, or those that are summed (and
        scattered): ranks divides them, unless op is all-reduce.
      ranks: the size of the team, 2 to 8.
      dtype: of x and w: bfloat16 (default), float16, or float8 of a scaled product.
      out_dtype: of the result: dtype (default; bfloat16 for float8) or float32; for float8 float16 too.
      gated: of ``all_gather_matmul(..., gated=True)`` where no gradient is taken; n is each weight's.
      config: overrides of the plan, as the ops take them.
      machine: other numbers than the measured ones, in microseconds and bytes a microsecond, by their names in
        ``cc/simulate/machine.h``: ``{"link_bytes_per_us": 450e3}``.

    Returns:
      `Cost` by strategy: ``"fused"``, ``"resident"``, ``"signal"`` and ``"xla"``. Only the last where rows of x, w or y
      are no multiple of 16 bytes; without one that can't run: few rows, float8, gated products and another type of
      result aren't for ``"signal"``.

    Raises:
      ValueError: op, a size, ranks, config or machine is out of range.
      TypeError: no kernel takes dtype or gives out_dtype.
    """
    types = {"dtype": dtype, "out_dtype": out_dtype}
    model = Model(op, m, n, k, ranks, **types, config=config, gated=gated, machine=machine)
    costs = {}
    for strategy in model.strategies():
        plan, times, _ = model.simulate(strategy)
        costs[strategy] = Cost(strategy, formula_us=model.formula_us(strategy), plan=plan, **times)
    xla = _core.simulate_xla(op, **model.sizes, gated=gated, machine=model.machine)
    costs["xla"] = Cost("xla", formula_us=model.formula_us("xla"), plan=None, **xla)
    return costs


class Model:
    """One call's simulations; raises what `cost_model` does."""

    def __init__(
        self,
        op: str,
        m: int,
        n: int,
        k: int,
        ranks: int,
        *,
        machine: Mapping[str, float] | None,
        gated: bool = False,
        **options: Any,  # the rest of `_request`'s
    ) -> None:
        self.op, self.m, self.gated = op, m, gated
        self.request, self.x, self.w = _request(op, m, n, k, ranks, gated=gated, **options)
        self.machine, self.itemsize = _machine(machine), self.x.dtype.itemsize
        self.shape = geometry(self.request, self.x, self.w)
        self.sizes: dict[str, Any] = self.shape | {"out_bytes": self.request.dtype.itemsize, "in_bytes": self.itemsize}
        rows = ((k, self.x.dtype), (n, self.request.dtype))
        self.padded = all(columns * each.itemsize % _PITCH_BYTES == 0 for columns, each in rows)

    def strategies(self) -> list[str]:
        """Of ours, those that can run."""
        if not self.padded:
            return []
        config = self.request.settings.config
        resident = ["resident"] if not config.few_rows and config.comm_sms != 0 else []
        return [
            "fused",
            *resident,
            *(["signal"] if _signal.obstacle(self.request, self.x.dtype, self.m) is None else []),
        ]

    def plan(self, strategy: str) -> Plan:
        if strategy == "signal":  # on GPUs that see each other's memory
            return Plan(**_signal.numbers(self.request, "sm90", self.shape, False, self.itemsize))
        made = _strategy.resident_plan if strategy == "resident" else _strategy.plan
        plan = made(self.request, self.x, self.w)
        _check_plan(self.request, plan, self.m)
        return plan

    def simulate(self, strategy: str, spans: bool = False) -> "tuple[Plan, _core.TimesDict, _core.SpansDict]":
        plan = self.plan(strategy)
        if strategy == "signal":
            return plan, *_signal.simulate(self.op, plan, self.shape, self.itemsize, self.machine, spans)
        fields: Any = dataclasses.asdict(plan) | {"transport": TRANSPORTS.index(plan.transport)}
        return plan, *_core.simulate_fused(self.op, fields, **self.sizes, machine=self.machine, spans=spans)

    def formula_us(self, strategy: str) -> float:
        if strategy == "signal":
            return _signal.predict(self.op, self.shape, False, self.itemsize)[0]
        if strategy == "resident":
            return _strategy.predict_resident(self.request, self.x, self.w)
        return _strategy.predict(self.request, self.x, self.w)[strategy == "xla"]


def _request(
    op: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    *,
    dtype: DTypeLike,
    out_dtype: DTypeLike | None,
    config: Config | None,
    gated: bool,
) -> tuple[Request, Any, Any]:
    """As a call on so many GPUs would make it, and one rank's operands: of gated products, both w as one."""
    if op not in _OPS:
        raise ValueError(f"entwine_jax.cost_model: op={op!r} is unknown; use one of {_OPS}")
    for name, size, least, most in (("m", m, 1, 2**24), ("n", n, 1, 2**22), ("k", k, 1, 2**22), ("ranks", ranks, 2, 8)):
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= most:
            raise ValueError(f"entwine_jax.cost_model: {name}={size!r} must be an integer from {least} to {most}")
    if op != "matmul_all_reduce" and m % ranks:
        raise ValueError(f"entwine_jax.cost_model: ranks={ranks} must divide the rows of {op}, m={m}")
    operand = jnp.dtype(dtype)
    narrow = operand in _NARROW
    result = jnp.dtype(out_dtype) if out_dtype is not None else jnp.dtype(jnp.bfloat16) if narrow else operand
    if operand not in (*_WIDE, *_NARROW):
        names = ", ".join(jnp.dtype(each).name for each in (*_WIDE, *_NARROW))
        raise TypeError(f"entwine_jax.cost_model: dtype={operand} has no kernel; use one of {names}")
    if result not in ((*_WIDE, jnp.float32) if narrow else (operand, jnp.float32)):
        raise TypeError(f"entwine_jax.cost_model: out_dtype={result} of {operand} operands has no kernel; use float32")
    if gated and (narrow or op != "all_gather_matmul"):
        raise ValueError(
            f"entwine_jax.cost_model: gated=True is for all_gather_matmul of 16-bit dtypes, not {op}, {operand}"
        )
    team = Team(("t",), ranks, tuple(range(ranks)), (), (), "cuda")
    settings = resolve("cost_model", "fused", config)
    request = Request(op, team, False, result, None, settings, scaled=narrow, products=2 if gated else 1, gated=gated)
    rows = m // ranks if op == "all_gather_matmul" else m
    return (
        request,
        jax.ShapeDtypeStruct((1, rows, k), operand),
        jax.ShapeDtypeStruct((k, 2 * n if gated else n), operand),
    )


def _machine(machine: Mapping[str, float] | None) -> dict[str, float]:
    known, numbers = _core.machine(), dict(machine or {})
    for name, number in numbers.items():
        if name not in known:
            raise ValueError(f"entwine_jax.cost_model: machine has no number {name!r}; it has {', '.join(known)}")
        if isinstance(number, bool) or not isinstance(number, int | float):
            raise ValueError(f"entwine_jax.cost_model: machine[{name!r}]={number!r} must be a number")
    try:
        _core.check_machine(numbers)
    except ValueError as error:
        raise ValueError(f"entwine_jax.cost_model: machine: {error}") from None
    return numbers


def _check_plan(request: Request, plan: Plan, m: int) -> None:
    if obstacle := _obstacles.tile_obstacle(request, (plan.tile_m, plan.tile_n)):
        raise ValueError(f"entwine_jax.cost_model: {obstacle}")
    if plan.few_rows and m > _core.FEW_ROWS_MOST:
        raise ValueError(
            f"entwine_jax.cost_model: config's few_rows=True is for up to {_core.FEW_ROWS_MOST} rows, not m={m}"
        )
