"""float16 operands: every kernel of theirs, to the bit, and rounded as float16 is."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    AXIS,
    OPS,
    TILES,
    Case,
    assert_close,
    assert_equal,
    assert_shards_equal,
    check_exact,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    per_shard,
    placed,
    program,
    put,
    reference,
    spread,
    team_size,
)

import entwine_jax
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


check = functools.partial(check_exact, operand=jnp.float16)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
def test_ragged(op, dtype):
    for m_shard, n, k in ((1, 8, 8), (100, 136, 4104), (129, 4104, 72), (600, 776, 520)):
        check(Case(op, m_shard, n, k), dtype=dtype)
    check(Case(op, 129, 264, 136, (2, 3)), dtype=dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(op, tile):
    check(Case(op, 300, 1032, 520), config=Config(tile_m=tile[0], tile_n=tile[1]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32], ids=["float16", "float32"])
def test_few_rows(op, dtype):
    for m_shard, n, k in ((1, 8, 8), (7, 1792, 4104), (31, 3584, 8192), (64, 8192, 3592)):
        check(Case(op, m_shard, n, k), dtype=dtype, config=Config(few_rows=True))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m_shard, n, k", [(31, 3584, 4104), (600, 4104, 1000)])
def test_random(op, m_shard, n, k):
    """Three more bits than bfloat16 has."""
    case, mesh = Case(op, m_shard, n, k), mesh_of()
    x, w = gaussians(case, team_size(mesh), 1, jnp.float16)
    x, w = placed(case, mesh, x, w)
    want = reference(case, mesh)(x, w)[0]
    assert_close(case, program(case, mesh)(x, w), want, 5e-4)
    assert_close(case, program(case, mesh, preferred_element_type=jnp.float32)(x, w), want, 1e-4)


@pytest.mark.parametrize("op", OPS)
def test_large_and_small_numbers(op):
    """Past the range of float16 a sum is infinite; below its normal numbers it has the subnormal ones."""
    case, mesh = Case(op, 64, 136, 64), mesh_of()
    x_spec, w_spec, _ = case.specs(AXIS)
    x, w = integers(case, team_size(mesh), 5, jnp.float16)
    ones = put(np.ones_like(x), mesh, x_spec)
    y = program(case, mesh)(ones * 1024, put(np.ones_like(w), mesh, w_spec))
    assert bool(jnp.all(y == jnp.inf)), "65536 and more"
    exact = exact_product(case, team_size(mesh), x, w)
    y = program(case, mesh)(put(x, mesh, x_spec) * 2.0**-12, put(w, mesh, w_spec) * 2.0**-12)
    assert_shards_equal(case, y, exact * 2.0**-24)


@pytest.mark.parametrize("op", OPS)
def test_gradients(op):
    case, mesh = Case(op, 129, 136, 264), mesh_of()
    ranks = team_size(mesh)
    y_spec = case.specs(AXIS)[2]
    rng = np.random.default_rng(1)
    x, w, dy = (
        (rng.integers(-1, 2, shape(ranks)) * (rng.random(shape(ranks)) < 0.5)).astype(np.float16)
        for shape in (case.x_shape, case.w_shape, case.y_shape)
    )
    run = spread(case, mesh, per_shard(case))
    backward = jax.jit(lambda x, w, dy: jax.vjp(run, x, w)[1](dy))
    dx, dw = backward(*placed(case, mesh, x, w), put(dy, mesh, y_spec))
    assert dx.dtype == dw.dtype == jnp.float16
    x, w, dy = (value.astype(np.float64) for value in (x, w, dy))
    assert_equal(case, dx, dy @ w.T)
    assert_equal(case, dw, x.T @ dy)


def test_a_float32_cotangent_is_not_rounded():
    """Its product is one of float32, XLA's, and `explain` says so; the forward pass is fused."""
    case, mesh = Case(ALL_GATHER, 2048, 4096, 4096), mesh_of()
    ranks = team_size(mesh)
    call = per_shard(case, strategy="auto", preferred_element_type=jnp.float32)
    run = spread(case, mesh, call)
    shapes = [jax.ShapeDtypeStruct(shape(ranks), jnp.float16) for shape in (case.x_shape, case.w_shape)]
    forward, backward = entwine_jax.explain(jax.grad(lambda x, w: run(x, w).sum(), (0, 1)), *shapes)
    assert (forward.strategy, backward.strategy) == ("fused", "xla")
    assert "take bfloat16 and float16 operands, not float32" in backward.reason
