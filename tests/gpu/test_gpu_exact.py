"""All ops on small integers: every element is the float64 product's, to the bit."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    OPS,
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
    reference,
    spread,
    team_size,
    whole,
)

from benchmarks.shapes import ALL_REDUCE as ALL_REDUCE_SHAPES
from benchmarks.shapes import TEN, Shape
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


RAGGED = list(itertools.product((1, 100, 129), (8, 136, 4104), (8, 72, 4104)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m_shard, n, k", RAGGED)
def test_ragged(op, m_shard, n, k):
    check_exact(Case(op, m_shard, n, k))


@pytest.mark.parametrize("few_rows", [True, False], ids=["few", "tiles"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_few_rows(op, dtype, few_rows):
    """Both kernels that can take them, on rows for each room and w cut into 1 to 8 slices."""
    for m_shard, n, k in ((1, 8, 8), (7, 1792, 4104), (31, 3584, 8192), (64, 8192, 3592), (3, 20000, 1000)):
        check_exact(Case(op, m_shard, n, k), dtype=dtype, config=Config(few_rows=few_rows))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "m_shard, batch, n, k",
    [(1, (), 8, 8), (33, (), 264, 72), (65, (3,), 136, 136), (129, (), 776, 520), (700, (2,), 520, 264)],
)
def test_all_reduce_of_rows_that_ranks_cannot_share(m_shard, batch, n, k, dtype):
    check_exact(Case(ALL_REDUCE, m_shard, n, k, batch, odd=1), dtype=dtype)


def test_all_reduce_is_the_same_on_every_rank():
    """To the bit, on numbers whose sums are rounded."""
    case, mesh = Case(ALL_REDUCE, 300, 1032, 1032, odd=1), mesh_of()
    x, w = gaussians(case, team_size(mesh), 1)
    first, *others = copies(program(case, mesh)(*placed(case, mesh, x, w)))
    assert len(others) == team_size(mesh) - 1
    for other in others:
        np.testing.assert_array_equal(other.view(np.uint16), first.view(np.uint16))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "m_shard, n, k", [(1, 8, 8), (100, 136, 72), (128, 256, 64), (256, 512, 512), (600, 4104, 1000)]
)
def test_float32_result(op, m_shard, n, k):
    case, mesh = Case(op, m_shard, n, k), mesh_of()
    check_exact(case, dtype=jnp.float32)
    x, w = gaussians(case, team_size(mesh), 1)
    x, w = placed(case, mesh, x, w)
    got = program(case, mesh, preferred_element_type=jnp.float32)(x, w)
    # The tensor cores cut, rather than round, what falls off the end of a float32 sum.
    assert_close(case, got, reference(case, mesh)(x, w)[0], 1e-4)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "batch, m_shard, n, k", [((3,), 1, 8, 8), ((3,), 100, 136, 72), ((2, 3), 129, 264, 136), ((5,), 256, 256, 64)]
)
def test_batches(op, batch, m_shard, n, k):
    check_exact(Case(op, m_shard, n, k, batch))


@pytest.mark.parametrize("op", OPS)
def test_not_jitted(op):
    case, mesh = Case(op, 136, 264, 200), mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, 3)
    eager = spread(case, mesh, per_shard(case))
    assert_equal(case, eager(*placed(case, mesh, x, w)), exact_product(case, ranks, x, w))


def check_large(shape: Shape):
    """Integers to the bit, gaussians to 4e-3, against XLA's float32 product, itself sampled in float64."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    case = Case(shape.op, shape.m // ranks, shape.n, shape.k)
    run, exact = program(case, mesh), reference(case, mesh)

    x, w = on_device(case, mesh, integer=True, seed=1)
    want, largest = exact(x, w)
    assert float(largest) <= 256, "the test's inputs are too large"
    rng = np.random.default_rng(0)
    rows, columns = rng.integers(0, want.shape[0], 32), rng.integers(0, want.shape[1], 32)
    sample = whole(x[rows]).astype(np.float64) @ whole(w[:, columns]).astype(np.float64)
    assert_equal(case, want[rows][:, columns], sample)

    poison(case, mesh)
    got = run(x, w)
    if int(count_different(got, want)):
        assert_equal(case, got, want)

    x, w = on_device(case, mesh, integer=False, seed=2)
    want, _ = exact(x, w)
    got = run(x, w)
    assert_close(case, got, want, 4e-3)
    # Elementwise: the result's own rounding, and that of partial sums, none of which is larger than 6 in 1e8 elements.
    off = jnp.max(jnp.abs(got.astype(jnp.float32) - want) - jnp.abs(want) * 2**-8)
    bound = 0.0 if shape.op == ALL_GATHER else 8 * (ranks - 1) * 2**-9
    assert float(off) <= bound + 1e-3, f"{case}: an element is off by {float(off):.3f} more than its rounding"


@pytest.mark.parametrize("shape", [*TEN, *ALL_REDUCE_SHAPES], ids=str)
def test_benchmark_shapes(shape):
    check_large(shape)
