"""Programs of chained collective matmuls: what the JAX processes of the benchmark compile, check and sample.

* A *program* is one jitted function with several calls of one variant in it, and a *sample* is enough programs in a row
  to last tens of milliseconds, dispatched without waiting. So Python and dispatch run ahead of the devices. The clock
  starts when one program before them ends: what it takes to begin from idle (0.3 ms for eight dots, 0.9 ms for eight
  fused calls) is not in it: a model's step has it once.
* The calls are a chain: before each call one element of its x is set to an element of the result before it. So XLA can
  neither merge nor drop nor hoist them, and no call starts before the one before it has ended, as in a model's layers.
  This costs one tiny kernel a call (about 2 us, the same for every variant), which brings all ratios a little closer to
  one, and another one a program, for the clock. Every call has its own x and w, random normal bfloat16 or float8; x and
  the last result are donated and handed on, so the element is set in place and addresses don't change from program to
  program (captured graphs stay valid).
* Optimization barriers around each call keep XLA from computing only the one element that the chain reads.
* A sample ends when all devices are done, so it is the slowest rank's.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.rounds import Sampler
from benchmarks.shapes import ALL_GATHER, ALL_REDUCE_OP, Shape

AXIS = "t"
# Both round to bfloat16, XLA's partial sums too: each is within 4e-3 of the exact result. The tensor cores cut sums of
# float8 products short, each in its own order.
TOLERANCE, FLOAT8_TOLERANCE = 8e-3, 3e-2

Arrays = tuple[jax.Array, ...]
Call = Callable[[jax.Array, Any], jax.Array]


class WrongResultError(Exception):
    """Two programs that compute the same don't agree."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """How operands lie on the mesh: specs and global sizes of x (rows, k), w (k, columns) and y; w of float8 is
    (columns, k)."""

    x_spec: PartitionSpec
    w_spec: PartitionSpec
    y_spec: PartitionSpec
    x_shape: tuple[int, int]
    w_shape: tuple[int, int]
    y_shape: tuple[int, int]
    dtype: str = "bfloat16"  # of x and w
    bias_spec: PartitionSpec | None = None  # if there is one, calls get (w, bias) in place of w

    @property
    def weights_spec(self) -> Any:
        return self.w_spec if self.bias_spec is None else (self.w_spec, self.bias_spec)

    def with_float8(self) -> Layout:
        spec = PartitionSpec(*self.w_spec[::-1])
        return dataclasses.replace(self, w_spec=spec, w_shape=self.w_shape[::-1], dtype="float8_e4m3fn")


def with_bias(layout: Layout) -> Layout:
    """A bias lies as y's columns do."""
    return dataclasses.replace(layout, bias_spec=PartitionSpec(*layout.y_spec[1:]))


def collective_layout(shape: Shape, ranks: int) -> Layout:
    layout = _bfloat16_layout(shape, ranks)
    return layout.with_float8() if shape.float8 else layout


def _bfloat16_layout(shape: Shape, ranks: int) -> Layout:
    m, n, k = shape.m, shape.n, shape.k
    rows, columns = PartitionSpec(AXIS, None), PartitionSpec(None, AXIS)
    if shape.op == ALL_GATHER:
        return Layout(rows, columns, columns, (m, k), (k, n * ranks), (m, n * ranks))
    if shape.op == ALL_REDUCE_OP:
        return Layout(columns, rows, PartitionSpec(), (m, k * ranks), (k * ranks, n), (m, n))
    return Layout(columns, rows, rows, (m, k * ranks), (k * ranks, n), (m, n))


def gemm_layout(shape: Shape, ranks: int) -> Layout:
    """Every rank's matmul alone: with the gathered x, its own copy of it, or without the sum over ranks."""
    layout = collective_layout(shape, ranks)
    if shape.op == ALL_GATHER:
        return dataclasses.replace(layout, x_shape=(shape.m * ranks, shape.k))
    return dataclasses.replace(layout, y_spec=PartitionSpec(AXIS, None), y_shape=(shape.m * ranks, shape.n))


def linked(x: jax.Array, y: jax.Array) -> jax.Array:
    """x with one element of the result before it, so that its call starts after that."""
    return jax.lax.dynamic_update_slice(x, jnp.clip(y[:1, :1], -1, 1).astype(x.dtype), (0, 0))


# Of what tells that a program has ended: an element of each rank's last result, which the next program doesn't consume.
ENDED_SPEC = PartitionSpec(AXIS, None)


def ended(y: jax.Array) -> jax.Array:
    return y[:1, :1] + 1


def per_rank_program(layout: Layout, mesh: Mesh, calls: int, call: Call, check_vma: bool = True) -> jax.stages.Wrapped:
    """(xs, ws, last result) -> (xs, last result, something that nobody takes), every array global; `call` sees one
    rank's, in a `jax.shard_map`."""

    def body(xs: Sequence[jax.Array], ws: Sequence[jax.Array], y: jax.Array) -> tuple[Arrays, jax.Array, jax.Array]:
        handed_on = []
        for x, w in zip(xs, ws, strict=True):
            x = jax.lax.optimization_barrier(linked(x, y))
            y = jax.lax.optimization_barrier(call(x, w))
            handed_on.append(x)
        return tuple(handed_on), y, ended(y)

    xs, ws = (layout.x_spec,) * calls, (layout.weights_spec,) * calls
    out = xs, layout.y_spec, ENDED_SPEC
    mapped = jax.shard_map(body, mesh=mesh, in_specs=(xs, ws, layout.y_spec), out_specs=out, check_vma=check_vma)
    return jax.jit(mapped, donate_argnums=(0, 2))


def global_program(layout: Layout, mesh: Mesh, calls: int, call: Call) -> jax.stages.Wrapped:
    """The same with a `call` that sees global arrays: XLA's partitioner makes the collective from the shardings.

    The chain's link stays a matter of each rank, else the partitioner would communicate for it.
    """
    link = jax.shard_map(linked, mesh=mesh, in_specs=(layout.x_spec, layout.y_spec), out_specs=layout.x_spec)
    end = jax.shard_map(ended, mesh=mesh, in_specs=layout.y_spec, out_specs=ENDED_SPEC)
    x_sharding, w_sharding, y_sharding = (
        NamedSharding(mesh, spec) for spec in (layout.x_spec, layout.w_spec, layout.y_spec)
    )

    def body(xs: Sequence[jax.Array], ws: Sequence[jax.Array], y: jax.Array) -> tuple[Arrays, jax.Array, jax.Array]:
        handed_on = []
        for x, w in zip(xs, ws, strict=True):
            x = jax.lax.optimization_barrier(link(x, y))
            y = jax.lax.with_sharding_constraint(call(x, w), y_sharding)
            y = jax.lax.optimization_barrier(y)
            handed_on.append(x)
        return tuple(handed_on), y, end(y)

    xs, ws = (x_sharding,) * calls, (w_sharding,) * calls
    out = xs, y_sharding, NamedSharding(mesh, ENDED_SPEC)
    return jax.jit(body, in_shardings=(xs, ws, y_sharding), out_shardings=out, donate_argnums=(0, 2))


def random_arrays(
    mesh: Mesh,
    spec: PartitionSpec,
    shape: tuple[int, ...],
    scale: float,
    count: int,
    seed: int,
    dtype: str = "bfloat16",
) -> Arrays:
    def draw(key: jax.Array) -> jax.Array:
        return (jax.random.normal(key, shape, jnp.float32) * scale).astype(dtype)

    sharded = jax.jit(draw, out_shardings=NamedSharding(mesh, spec))
    return tuple(sharded(key) for key in jax.random.split(jax.random.key(seed), count))


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    """||got - want|| / ||want||; NaN stays NaN."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((got - want) ** 2) / jnp.sum(want**2))


def seconds(dispatch: Callable[[], Any], programs: int) -> float:
    """Of so many programs, from the end of one before them; `dispatch` returns what is ready when its program ends."""
    before = dispatch()
    last = dispatch()  # before anybody waits: the devices have work
    jax.block_until_ready(before)
    start = time.perf_counter()
    for _ in range(programs - 1):
        last = dispatch()
    jax.block_until_ready(last)
    return time.perf_counter() - start


@dataclasses.dataclass
class _Running:
    """A compiled program with its arguments; its xs are in a pool, for they move from program to program."""

    program: jax.stages.Compiled
    ws: Any
    y: jax.Array
    xs_of: str


class Chains:
    """The compiled programs of one shape, by name. What has the same layout shares its arrays."""

    def __init__(self, shape: Shape, mesh: Mesh, calls: int) -> None:
        self.shape, self.mesh, self.calls = shape, mesh, calls
        self._xs: dict[str, Arrays] = {}
        self._ws: dict[str, Any] = {}  # of a layout with a bias, pairs
        self._running: dict[str, _Running] = {}

    def add(self, name: str, layout: Layout, program: jax.stages.Wrapped) -> None:
        """Compiles `program`, one of this module's for as many calls."""
        xs_of = f"{layout.x_shape} {layout.x_spec} {layout.dtype}"
        ws_of = f"{layout.w_shape} {layout.weights_spec} {layout.dtype}"
        if xs_of not in self._xs:
            self._xs[xs_of] = random_arrays(self.mesh, layout.x_spec, layout.x_shape, 1.0, self.calls, 1, layout.dtype)
        if ws_of not in self._ws:
            # float8 have a scale of their own: numbers this small would be too coarse.
            scale = self.shape.k**-0.5 if layout.dtype == "bfloat16" else 1.0
            ws: Any = random_arrays(self.mesh, layout.w_spec, layout.w_shape, scale, self.calls, 2, layout.dtype)
            if layout.bias_spec is not None:
                columns = layout.y_shape[1:]
                biases = random_arrays(self.mesh, layout.bias_spec, columns, 1.0, self.calls, 3, "float32")
                ws = tuple(zip(ws, biases, strict=True))
            self._ws[ws_of] = ws
        y = jax.device_put(jnp.zeros(layout.y_shape, jnp.bfloat16), NamedSharding(self.mesh, layout.y_spec))
        compiled = program.lower(self._xs[xs_of], self._ws[ws_of], y).compile()
        self._running[name] = _Running(compiled, self._ws[ws_of], y, xs_of)

    def drop(self, name: str) -> None:
        del self._running[name]

    def samplers(self) -> dict[str, Sampler]:
        return {name: functools.partial(self.sample, name) for name in self._running}

    def sample(self, name: str, programs: int) -> float:
        return seconds(functools.partial(self._dispatch, name), programs)

    def _dispatch(self, name: str) -> jax.Array:
        """One program; ready when that has ended."""
        run = self._running[name]
        end: jax.Array
        self._xs[run.xs_of], run.y, end = run.program(self._xs[run.xs_of], run.ws, run.y)
        return end

    def compare(self, name: str, reference: str, when: str) -> float:
        """Runs both programs from the same state and returns how far apart their results are, if not too far."""
        self._running[name].y = jnp.copy(self._running[reference].y)  # each program consumes its own
        for each in (name, reference):
            self._dispatch(each)
        error = float(relative_error(self._running[name].y, self._running[reference].y))
        most = FLOAT8_TOLERANCE if self.shape.float8 else TOLERANCE
        if not error <= most:  # also NaN
            raise WrongResultError(
                f"{self.shape}: {when} timing, ||{name} - {reference}|| / ||{reference}|| is {error:.2e},"
                f" more than {most:.0e}"
            )
        return error
