"""x stored (..., k, rows): every strategy to the bit, gradients, a weight gradient against XLA's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_REDUCE,
    AXIS,
    FLOAT32_TILES,
    REDUCE_SCATTER,
    TILES,
    Case,
    assert_equal,
    assert_shards_equal,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    per_shard,
    poison,
    put,
    relative_error,
    team_size,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

SUMS = (REDUCE_SCATTER, ALL_REDUCE)


def turned(x):
    return np.ascontiguousarray(np.swapaxes(x, -1, -2))


def spread(case, mesh, transpose_w=False, **options):
    x, w, y = case.specs(AXIS)
    specs = P(*x[:-2], *x[:-3:-1]), P(*w[::-1]) if transpose_w else w
    rank = per_shard(case, transpose_x=True, transpose_w=transpose_w, **options)
    return jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=y)


def operands(case, mesh, x, w, transpose_w=False):
    x_spec, w_spec, _ = case.specs(AXIS)
    x = put(turned(x), mesh, P(*x_spec[:-2], *x_spec[:-3:-1]))
    return x, put(turned(w), mesh, P(*w_spec[::-1])) if transpose_w else put(w, mesh, w_spec)


def check(case, operand=jnp.bfloat16, transpose_w=False, **options):
    mesh = mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, 1, operand)
    dtype = options.get("preferred_element_type", operand)
    poison(case, mesh, dtype=dtype)
    y = jax.jit(spread(case, mesh, transpose_w, **options))(*operands(case, mesh, x, w, transpose_w))
    assert y.dtype == dtype
    assert_shards_equal(case, y, exact_product(case, ranks, x, w))


@pytest.mark.parametrize("strategy", ["fused", "resident", "signal"])
@pytest.mark.parametrize("op", SUMS)
def test_exact(op, strategy):
    """Tails in all directions; of a contraction too that isn't a multiple of anything; and batches."""
    for (m_shard, n, k), batch in itertools.product(((136, 136, 72), (296, 1032, 523), (600, 2056, 1032)), ((), (3,))):
        case = Case(op, m_shard, n, k, batch, odd=8 if op == ALL_REDUCE else 0)
        check(case, strategy=strategy)
        if k % 8 == 0:
            check(case, transpose_w=True, strategy=strategy)


def test_chunks_begin_at_multiples_of_16_bytes():
    """It is what TMA wants of a load, and an illegal instruction otherwise."""
    ranks = team_size(mesh_of())
    m_shard = next(m for m in (129, 130, 132) if m * ranks % 8 == 0)
    with pytest.raises(NotImplementedError, match=f"each rank's {m_shard} rows"):
        check(Case(REDUCE_SCATTER, m_shard, 264, 200))
    check(Case(REDUCE_SCATTER, m_shard, 264, 200), strategy="auto")


@pytest.mark.parametrize("op", SUMS)
def test_tiles_and_types(op):
    case = Case(op, 520, 776, 264)
    for dtype, tile in itertools.product((jnp.bfloat16, jnp.float16), TILES):
        for result in (dtype, jnp.float32) if tile in FLOAT32_TILES else (dtype,):
            config = Config(tile_m=tile[0], tile_n=tile[1])
            check(case, operand=dtype, preferred_element_type=result, config=config)


@pytest.mark.parametrize("op", SUMS)
def test_few_rows_are_tiles(op):
    case, mesh = Case(op, 8, 776, 520), mesh_of()
    check(case)
    shapes = [jax.ShapeDtypeStruct(v.shape, v.dtype) for v in operands(case, mesh, *integers(case, team_size(mesh), 1))]
    (found,) = entwine_jax.explain(spread(case, mesh), *shapes)
    assert found.transpose_x and found.strategy == "fused" and not found.plan.few_rows


@pytest.mark.parametrize("op", SUMS)
def test_gradients(op):
    """dx lies as x does."""
    case, mesh = Case(op, 264, 520, 392, (2,)), mesh_of()
    ranks = team_size(mesh)
    rng = np.random.default_rng(1)
    y_spec = case.specs(AXIS)[2]

    def sparse(shape):
        value = rng.integers(-1, 2, shape, np.int8)
        value[rng.random(shape) > 0.3] = 0
        return value.astype(jnp.bfloat16)

    x, w, dy = (sparse(shape(ranks)) for shape in (case.x_shape, case.w_shape, case.y_shape))
    run = spread(case, mesh)
    dx, dw = jax.jit(lambda x, w, dy: jax.vjp(run, x, w)[1](dy))(*operands(case, mesh, x, w), put(dy, mesh, y_spec))
    x, w, dy = (value.astype(np.float64) for value in (x, w, dy))
    assert_equal(case, dx, turned(dy @ w.T))
    assert_equal(case, dw, np.einsum("bmk,bmn->kn", x, dy, optimize=True))


@pytest.mark.parametrize("op", SUMS)
def test_a_weight_gradient(op):
    """Of tokens that lie over the axis, against XLA's, to what bfloat16 holds; two runs agree to the bit."""
    case, mesh = Case(op, 1024, 2048, 512), mesh_of()
    x, w = operands(case, mesh, *gaussians(case, team_size(mesh), 1))  # (tokens, features) and (tokens, out)

    def by_lax(x, dy):
        dw = jnp.matmul(x.T, dy, preferred_element_type=jnp.float32)
        return lax.psum_scatter(dw, AXIS, tiled=True) if op == REDUCE_SCATTER else lax.psum(dw, AXIS)

    f = jax.jit(spread(case, mesh))
    x_spec, w_spec, y_spec = case.specs(AXIS)
    wanted = jax.jit(jax.shard_map(by_lax, mesh=mesh, in_specs=(P(*x_spec[::-1]), w_spec), out_specs=y_spec))(x, w)
    got = f(x, w)
    assert float(relative_error(got, wanted)) <= 8e-3
    assert bool(jnp.all(got == f(x, w)))
