"""Strategy "resident": some thread blocks only move. Exact, the bits of "fused", repeated on one arena, in graphs."""

import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    FLOAT32_TILES,
    OPS,
    REDUCE_SCATTER,
    TILES,
    Case,
    assert_close,
    assert_equal,
    check_exact,
    copies,
    count_different,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    on_device,
    per_shard,
    placed,
    poison,
    program,
    put,
    reference,
    relative_error,
    team_size,
    whole,
)
from jax.sharding import PartitionSpec as P
from test_gpu_children import GRAPHS, finish, start

import entwine_jax
from benchmarks.shapes import TEN
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

# The cost model's; one cluster; and so many that few are left to multiply at first.
MOVERS = {"planned": None, "2": Config(comm_sms=2), "120": Config(comm_sms=120)}


@pytest.mark.parametrize("config", MOVERS.values(), ids=MOVERS)
@pytest.mark.parametrize("op", OPS)
def test_exact(op, config):
    """Tails in all directions, and batches."""
    for (m_shard, n, k), batch in itertools.product(((8, 136, 72), (129, 136, 72), (600, 2056, 1032)), ((), (3,))):
        case = Case(op, m_shard, n, k, batch, odd=1 if op == ALL_REDUCE else 0)
        check_exact(case, strategy="resident", config=config)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles_and_types(op, tile):
    config = Config(tile_m=tile[0], tile_n=tile[1], comm_sms=6)
    results = (None, jnp.float32) if tile in FLOAT32_TILES else (None,)
    for dtype, result in itertools.product((jnp.bfloat16, jnp.float16), results):
        check_exact(Case(op, 520, 776, 264), operand=dtype, dtype=result, strategy="resident", config=config)


@pytest.mark.parametrize("shape", TEN, ids=str)
def test_benchmark_shapes(shape):
    """Integers to the bit; two runs agree to the bit, on numbers whose sums are rounded too."""
    mesh = mesh_of()
    case = Case(shape.op, shape.m // team_size(mesh), shape.n, shape.k)
    run, exact = program(case, mesh, strategy="resident"), reference(case, mesh)
    x, w = on_device(case, mesh, integer=True, seed=1)
    want, largest = exact(x, w)
    assert float(largest) <= 256, "the test's inputs are too large"
    poison(case, mesh)
    got = run(x, w)
    if int(count_different(got, want)):
        assert_equal(case, got, want)
    x, w = on_device(case, mesh, integer=False, seed=2)
    got = run(x, w)
    assert_close(case, got, exact(x, w)[0], 4e-3)
    assert int(count_different(run(x, w), got)) == 0


@pytest.mark.parametrize("op", OPS)
def test_repeated(op):
    """Many calls in a row without a pause, by turns with fused ones on the same arena, whose bits they have."""
    case, mesh = Case(op, 392, 1032, 520), mesh_of()
    ranks = team_size(mesh)
    inputs = [gaussians(case, ranks, seed) for seed in range(5)]
    inputs = [placed(case, mesh, *each) for each in inputs]
    tile = Config(tile_m=256, tile_n=128)
    fused = program(case, mesh, config=tile)
    ours = [
        program(case, mesh, strategy="resident", config=Config(tile_m=256, tile_n=128, comm_sms=sms)) for sms in (2, 12)
    ]
    alone = [jax.block_until_ready(fused(*each)) for each in inputs]
    together = []
    for i in range(60):
        together.append(ours[i // 2 % 2](*inputs[i % 5]))
        if i % 3:
            fused(*inputs[(i + 2) % 5])
    bad = [i for i, y in enumerate(together) if int(count_different(y, alone[i % 5]))]
    assert not bad, f"{case}: calls {bad} differ from the fused ones that ran alone"


@pytest.mark.parametrize("op", OPS)
def test_epilogue(op):
    """relu of the sum and a bias, all of whole numbers."""
    case, mesh = Case(op, 300, 776, 264, (2,)), mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, 5)
    bias = np.random.default_rng(6).integers(-8, 9, case.w_shape(ranks)[1]).astype(np.float32)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    b_spec = P(AXIS) if op == ALL_GATHER else P()

    def rank(x, w, b):
        return getattr(entwine_jax, op)(x, w, AXIS, bias=b, activation="relu", strategy="resident")

    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, w_spec, b_spec), out_specs=y_spec))
    got = run(*placed(case, mesh, x, w), put(bias, mesh, b_spec))
    want = np.maximum(exact_product(case, ranks, x, w) + bias, 0).astype(jnp.bfloat16)
    assert_equal(case, got, want)


@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
def test_gathered(batch):
    """The own rows on their way through a mover's ring, the peers' by clusters that multiply."""
    case, mesh = Case(ALL_GATHER, 600, 520, 264, batch), mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, 1)
    x_spec, w_spec, y_spec = case.specs(AXIS)

    def rank(x, w):
        return entwine_jax.all_gather_matmul(x, w, AXIS, return_gathered=True, strategy="resident")

    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=(y_spec, y_spec)))
    y, rows = run(*placed(case, mesh, x, w))
    assert_equal(case, y, exact_product(case, ranks, x, w))
    for copy in np.split(whole(rows), ranks, axis=-1):
        np.testing.assert_array_equal(copy, x)


def test_gradients():
    """Of a sequence-parallel two-layer MLP with gate and up in one call, against XLA's."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    up, down = Case(ALL_GATHER, 512, 1024, 256 * ranks), Case(REDUCE_SCATTER, 512, 256 * ranks, 1024)
    x, w_up = gaussians(up, ranks, 1)
    _, w_gate = gaussians(up, ranks, 3)
    _, w_down = gaussians(down, ranks, 2)
    (x_spec, up_spec, _), (_, down_spec, y_spec) = up.specs(AXIS), down.specs(AXIS)

    def loss(strategy):
        second = per_shard(down, strategy=strategy)

        def rank(x, a, b, c):
            gate, rows = entwine_jax.all_gather_matmul(x, (a, b), AXIS, strategy=strategy)
            return second(jnp.tanh(gate) * rows, c)

        f = jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, up_spec, up_spec, down_spec), out_specs=y_spec)
        return lambda *v: jnp.mean(jnp.square(f(*v).astype(jnp.float32)))

    args = put(x, mesh, x_spec), put(w_gate, mesh, up_spec), put(w_up, mesh, up_spec), put(w_down, mesh, down_spec)
    ours, theirs = (jax.jit(jax.grad(loss(strategy), (0, 1, 2, 3)))(*args) for strategy in ("resident", "xla"))
    for a, b in zip(ours, theirs, strict=True):
        assert float(relative_error(a, b)) <= 1e-2


def test_all_reduce_is_the_same_on_every_rank():
    case, mesh = Case(ALL_REDUCE, 300, 1032, 1032, odd=1), mesh_of()
    x, w = gaussians(case, team_size(mesh), 1)
    y = program(case, mesh, strategy="resident")(*placed(case, mesh, x, w))
    first, *others = copies(y)
    assert len(others) == team_size(mesh) - 1
    for other in others:
        np.testing.assert_array_equal(other.view(np.uint16), first.view(np.uint16))


@pytest.mark.parametrize("capture", GRAPHS)
def test_graphs(capture):
    finish(start("chained", 20, "resident", XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS[capture]}"))
