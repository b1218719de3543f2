"""Inputs, programs and comparisons that the GPU tests, their child processes and scripts/gpu_smoke.py share; no pytest.

Outputs of a jitted function can't be poisoned from Python. Instead inputs change from call to call, so that an element
which nothing wrote holds another call's value, and `poison` leaves NaNs in the memory that is handed out next.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _core

ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = "all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce"
OPS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)
# Of 16-bit results, and of float32.
TILES, FLOAT32_TILES = (_core.sm90_tiles(out_bytes=each) for each in (2, 4))
AXIS = "t"

# Integers up to here are bfloat16 numbers.
EXACT = 256


@dataclasses.dataclass(frozen=True)
class Case:
    """n and k are those of one rank's GEMM, as in the benchmark; batch is x's leading dimensions.

    There are `m_shard` rows a rank, in all `odd` fewer, which is for all-reduce, whose ranks don't share them.
    """

    op: str
    m_shard: int
    n: int
    k: int
    batch: tuple[int, ...] = ()
    odd: int = 0

    def __str__(self) -> str:
        batch = f" batch={self.batch}" if self.batch else ""
        odd = f" odd={self.odd}" if self.odd else ""
        return f"{self.op} m_shard={self.m_shard} n={self.n} k={self.k}{batch}{odd}"

    def x_shape(self, ranks: int) -> tuple[int, ...]:
        return (*self.batch, ranks * self.m_shard - self.odd, self.k * (1 if self.op == ALL_GATHER else ranks))

    def w_shape(self, ranks: int) -> tuple[int, int]:
        return (self.k, ranks * self.n) if self.op == ALL_GATHER else (ranks * self.k, self.n)

    def y_shape(self, ranks: int) -> tuple[int, ...]:
        return (*self.x_shape(ranks)[:-1], self.w_shape(ranks)[1])

    def specs(self, axis: Hashable) -> tuple[P, P, P]:
        """Of x, w and y."""
        none = (None,) * len(self.batch)
        rows, columns, whole = P(*none, axis, None), P(*none, None, axis), P(*none, None, None)
        if self.op == ALL_GATHER:
            return rows, P(None, axis), columns
        return columns, P(axis, None), rows if self.op == REDUCE_SCATTER else whole


def mesh_of(devices: list[jax.Device] | None = None) -> Mesh:
    """All devices, or these, as one team."""
    return Mesh(np.array(jax.devices() if devices is None else devices), (AXIS,))


def team_size(mesh: Mesh, axis: Hashable = AXIS) -> int:
    return int(np.prod([mesh.shape[name] for name in (axis if isinstance(axis, tuple) else (axis,))]))


def per_shard(case: Case, axis: Hashable = AXIS, **options: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    options.setdefault("strategy", "fused")
    op = getattr(entwine_jax, case.op)
    return lambda x, w: op(x, w, axis, **options)


def spread(
    case: Case, mesh: Mesh, rank: Callable[..., Any], axis: Hashable = AXIS, check_vma: bool = True
) -> Callable[..., Any]:
    """A rank's work as a function of global x and w."""
    x, w, y = case.specs(axis)
    return jax.shard_map(rank, mesh=mesh, in_specs=(x, w), out_specs=y, check_vma=check_vma)


@functools.lru_cache(maxsize=256)
def _program(case: Case, mesh: Mesh, axis: Hashable, options: tuple[tuple[str, Any], ...]) -> Callable[..., jax.Array]:
    return jax.jit(spread(case, mesh, per_shard(case, axis, **dict(options)), axis))


def program(case: Case, mesh: Mesh, axis: Hashable = AXIS, **options: Any) -> Callable[..., jax.Array]:
    """The jitted op on global arrays."""
    return _program(case, mesh, axis, tuple(sorted(options.items())))


# Inputs


def put(value: np.ndarray, mesh: Mesh, spec: P) -> jax.Array:
    """Works with several processes too, each of which has the whole value."""
    return jax.make_array_from_callback(value.shape, NamedSharding(mesh, spec), lambda index: value[index])


def placed(case: Case, mesh: Mesh, x: np.ndarray, w: np.ndarray, axis: Hashable = AXIS) -> tuple[jax.Array, jax.Array]:
    """x and w on the mesh as the op wants them."""
    x_spec, w_spec, _ = case.specs(axis)
    return put(x, mesh, x_spec), put(w, mesh, w_spec)


def integers(case: Case, ranks: int, seed: int, dtype: Any = jnp.bfloat16) -> tuple[np.ndarray, np.ndarray]:
    """x and w of -1, 0, 1, sparse enough that every sum and partial sum is an integer that bfloat16 holds."""
    x_rng, w_rng = np.random.default_rng([seed, 0]), np.random.default_rng([seed, 1])
    x = x_rng.integers(-1, 2, case.x_shape(ranks), np.int8)
    w = w_rng.integers(-1, 2, case.w_shape(ranks), np.int8)
    w[w_rng.random(w.shape, np.float32) > min(1.0, 2000 / case.w_shape(ranks)[0])] = 0
    return x.astype(dtype), w.astype(dtype)


def gaussians(case: Case, ranks: int, seed: int, dtype: Any = jnp.bfloat16) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(case.x_shape(ranks), np.float32)
    w = rng.standard_normal(case.w_shape(ranks), np.float32) * case.k**-0.5
    return x.astype(dtype), w.astype(dtype)


def exact_product(case: Case, ranks: int, x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """The global result in float64; asserts that it and all partial sums are bfloat16 numbers."""
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    if case.op == ALL_GATHER:
        partials = [x64 @ w64]
    else:
        partials = [x64[..., i : i + case.k] @ w64[i : i + case.k] for i in range(0, ranks * case.k, case.k)]
    total = np.sum(partials, axis=0)
    assert max(np.abs(part).max() for part in [*partials, total]) <= EXACT, f"{case}: the test's inputs are too large"
    return total


def poison(case: Case, mesh: Mesh, axis: Hashable = AXIS, dtype: Any = jnp.bfloat16) -> None:
    """Frees NaNs of the result's size: the best-fit allocator is likely to give that memory to the next result."""
    sharding = NamedSharding(mesh, case.specs(axis)[2])
    fill = jax.jit(lambda: jnp.full(case.y_shape(team_size(mesh, axis)), jnp.nan, dtype), out_shardings=sharding)
    nans = [jax.block_until_ready(fill()) for _ in range(2)]
    for array in nans:
        array.delete()


def on_device(case: Case, mesh: Mesh, integer: bool, seed: int) -> tuple[jax.Array, jax.Array]:
    """What `integers` and `gaussians` make, for sizes that the host would be slow at."""
    ranks = team_size(mesh)
    x_shape, w_shape = case.x_shape(ranks), case.w_shape(ranks)
    x_spec, w_spec, _ = case.specs(AXIS)

    def draw(key: jax.Array) -> tuple[jax.Array, jax.Array]:
        x_key, w_key, mask = jax.random.split(key, 3)
        if integer:
            kept = jax.random.uniform(mask, w_shape) < 2000 / w_shape[0]
            x, w = jax.random.randint(x_key, x_shape, -1, 2), jax.random.randint(w_key, w_shape, -1, 2) * kept
        else:
            x, w = jax.random.normal(x_key, x_shape), jax.random.normal(w_key, w_shape) * case.k**-0.5
        return x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)

    shardings = (NamedSharding(mesh, x_spec), NamedSharding(mesh, w_spec))
    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))


@functools.lru_cache(maxsize=256)
def reference(case: Case, mesh: Mesh, axis: Hashable = AXIS) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """XLA's float32 product of global arrays and the largest partial sum: exact on what `integers` makes."""

    def body(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        x, w = x.astype(jnp.float32), w.astype(jnp.float32)
        if case.op == ALL_GATHER:
            x = lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
        y = jnp.matmul(x, w, precision=lax.Precision.HIGHEST)
        largest = lax.pmax(jnp.abs(y).max(), axis)
        if case.op == REDUCE_SCATTER:
            y = lax.psum_scatter(y, axis, scatter_dimension=y.ndim - 2, tiled=True)
        elif case.op == ALL_REDUCE:
            y = lax.psum(y, axis)
        return y, largest

    x, w, y = case.specs(axis)
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=(x, w), out_specs=(y, P()), check_vma=False))


# Comparisons


def whole(value: Any) -> np.ndarray:
    """A global array, also of what only other processes address."""
    if not isinstance(value, jax.Array) or value.is_fully_addressable or value.is_fully_replicated:
        return np.asarray(value)
    return np.asarray(multihost_utils.process_allgather(value, tiled=True))


def copies(value: jax.Array) -> list[np.ndarray]:
    """Every device's copy of what all have, in all processes."""
    mine = np.stack([np.asarray(shard.data) for shard in value.addressable_shards])
    return [*(mine if jax.process_count() == 1 else multihost_utils.process_allgather(mine, tiled=True))]


def mismatches(case: Case, got: np.ndarray, want: np.ndarray, tile: tuple[int, int] = (128, 256)) -> str:
    """Empty if all elements are equal; else how many are not, where the first ones are, and in which tiles."""
    got, want = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if got.shape != want.shape:
        return f"{case}: the result has shape {got.shape}, not {want.shape}"
    wrong = got != want  # NaN too
    count = int(wrong.sum())
    if not count:
        return ""
    where = np.argwhere(wrong)
    first = ", ".join(f"{tuple(map(int, at))}: {got[tuple(at)]:g} not {want[tuple(at)]:g}" for at in where[:4])
    tiles = sorted({(int(at[-2]) // tile[0], int(at[-1]) // tile[1]) for at in where})
    shown = " ".join(map(str, tiles[:12])) + (" ..." if len(tiles) > 12 else "")
    zeros, nans = int((wrong & (got == 0)).sum()), int(np.isnan(got).sum())
    rows, columns = where[:, -2], where[:, -1]
    return (
        f"{case}: {count} of {wrong.size} wrong ({zeros} zero, {nans} NaN), rows {rows.min()}..{rows.max()}, "
        f"columns {columns.min()}..{columns.max()}; first (row, col) {first}; "
        f"{len(tiles)} tiles of {tile[0]} x {tile[1]}: {shown}"
    )


def assert_equal(case: Case, got: Any, want: Any) -> None:
    message = mismatches(case, whole(got), whole(want))
    assert not message, message


def check_exact(case: Case, seed: int = 0, operand: Any = jnp.bfloat16, dtype: Any = None, **options: Any) -> None:
    """One call on integers, whose result is of `dtype` or of the operands', by all devices as one team."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    if dtype is not None:
        options["preferred_element_type"] = dtype
    x, w = integers(case, ranks, seed, operand)
    poison(case, mesh, dtype=dtype or operand)
    y = program(case, mesh, **options)(*placed(case, mesh, x, w))
    assert y.dtype == (dtype or operand)
    assert_shards_equal(case, y, exact_product(case, ranks, x, w))


@jax.jit
def count_different(got: jax.Array, want: jax.Array) -> jax.Array:
    """How many elements differ after `want` is rounded to the dtype of `got`; NaN differs from everything."""
    return jnp.sum(got != want.astype(got.dtype))


def assert_shards_equal(case: Case, got: jax.Array, want: np.ndarray) -> None:
    """Compares what this process addresses: for several processes, and for results that every rank has."""
    for shard in got.addressable_shards:
        message = mismatches(case, np.asarray(shard.data), want[shard.index])
        assert not message, f"device {shard.device.id}: {message}"


@jax.jit
def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.sum((got - want) ** 2) / jnp.sum(want**2))


def assert_close(case: Case, got: jax.Array, want: jax.Array, bound: float) -> None:
    error = float(relative_error(got, want))
    assert error <= bound, f"{case}: ||got - want|| / ||want|| is {error:.2e}, more than {bound:.0e}"  # NaN fails too


# Random delays


def delayed(x: jax.Array, axis: Hashable, slow_rank: jax.Array, steps: jax.Array) -> jax.Array:
    """x, which `slow_rank` gets late: after a loop of `steps` turns, which XLA drives from the host, ~10 us a turn."""
    turns = jnp.where(lax.axis_index(axis) == slow_rank, steps, 0)

    def turn(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        i, state = carry
        return i + 1, (state * 1103515245 + 12345) % 65536  # nothing that a compiler can shorten

    start = (turns * 0, turns * 0 + 1)
    done, state = lax.while_loop(lambda carry: carry[0] < turns, turn, start)
    # Neither is ever negative, which XLA can't know.
    return jnp.where((done >= 0) & (state >= 0), x, jnp.zeros_like(x))
