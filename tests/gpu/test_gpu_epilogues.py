"""Bias and activation in the kernels: whole numbers to the bit, the curves to what bfloat16 holds, w either way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from epilogues import bias_of, bias_spec, finished, finishing
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
    assert_shards_equal,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    placed,
    poison,
    put,
    relative_error,
    team_size,
    whole,
)
from jax import lax
from jax.sharding import PartitionSpec as P

from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

NN = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def check(case, seed=0, dtype=jnp.bfloat16, transpose_w=False, **options):
    mesh = mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, _ = case.specs(AXIS)
    x, w = integers(case, ranks, seed)
    sums = exact_product(case, ranks, x, w)
    x = put(x, mesh, x_spec)
    w = put(w.T, mesh, P(*w_spec[::-1])) if transpose_w else put(w, mesh, w_spec)
    if transpose_w:
        options["transpose_w"] = True
    if dtype != jnp.bfloat16:
        options["preferred_element_type"] = dtype
    bias = bias_of(case, ranks, seed)
    for activation in (None, "relu"):
        poison(case, mesh, dtype=dtype)
        y = finishing(case, mesh, activation, **options)(x, w, put(bias, mesh, bias_spec(case)))
        assert y.dtype == dtype
        assert_shards_equal(case, y, finished(sums, bias, activation, dtype))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m_shard, n, k", [(1, 8, 8), (1, 4104, 72), (129, 136, 1032), (129, 4104, 8)])
def test_ragged(op, m_shard, n, k):
    check(Case(op, m_shard, n, k))


@pytest.mark.parametrize("few_rows", [True, False], ids=["few", "tiles"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_few_rows(op, dtype, few_rows):
    for m_shard, n, k in ((1, 8, 8), (7, 1792, 4104), (31, 3584, 8192), (64, 8192, 3592)):
        check(Case(op, m_shard, n, k), dtype=dtype, config=Config(few_rows=few_rows))
    check(Case(op, 3, 1160, 520, (2,)), dtype=dtype, transpose_w=True, config=Config(few_rows=few_rows))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "tile, dtype, transpose_w",
    [(tile, jnp.bfloat16, False) for tile in TILES] + [(tile, jnp.float32, True) for tile in FLOAT32_TILES],
)
def test_tiles(op, tile, dtype, transpose_w):
    """Both ways in which partial sums travel."""
    for transport in ("pull", "push"):
        config = Config(tile_m=tile[0], tile_n=tile[1], transport=transport)
        check(Case(op, 300, 776, 264, (2,)), dtype=dtype, transpose_w=transpose_w, config=config)


@pytest.mark.parametrize("m_shard, batch, n, k", [(33, (), 264, 72), (129, (), 776, 520), (700, (2,), 520, 264)])
def test_all_reduce_of_rows_that_ranks_cannot_share(m_shard, batch, n, k):
    check(Case(ALL_REDUCE, m_shard, n, k, batch, odd=1))


def wide(case, activation, x, w, bias):
    """One rank's work in float32, by XLA."""
    x, w = x.astype(jnp.float32), w.astype(jnp.float32)
    if case.op == ALL_GATHER:
        x = lax.all_gather(x, AXIS, axis=x.ndim - 2, tiled=True)
    y = jnp.matmul(x, w, precision=lax.Precision.HIGHEST)
    if case.op == REDUCE_SCATTER:
        y = lax.psum_scatter(y, AXIS, scatter_dimension=y.ndim - 2, tiled=True)
    elif case.op == ALL_REDUCE:
        y = lax.psum(y, AXIS)
    return NN[activation](y + bias.astype(jnp.float32))


CASES = [
    *(Case(op, 16, 1032, 1032) for op in OPS),  # few rows
    *(Case(op, 600, 1032, 520) for op in OPS),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_values(case, activation):
    """Against float32, elementwise too; a bfloat16 bias as well; and XLA's own path within the same bound."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = placed(case, mesh, *gaussians(case, ranks, 1))
    b_spec = bias_spec(case)
    bias = np.random.default_rng(2).standard_normal(case.w_shape(ranks)[1], np.float32)
    exact = jax.jit(
        jax.shard_map(
            functools.partial(wide, case, activation),
            mesh=mesh,
            in_specs=(x_spec, w_spec, b_spec),
            out_specs=y_spec,
        )
    )
    for dtype in (jnp.float32, jnp.bfloat16):
        b = put(bias.astype(dtype), mesh, b_spec)
        want = exact(x, w, b)
        for strategy in ("fused", "xla"):
            got = finishing(case, mesh, activation, strategy=strategy)(x, w, b)
            assert_close(case, got, want, 5e-3 if strategy == "fused" else 7e-3)
        got = finishing(case, mesh, activation, preferred_element_type=jnp.float32)(x, w, b)
        # The tensor cores cut, rather than round, what falls off the end of a float32 sum.
        assert_close(case, got, want, 1e-4)
        # Far from zero gelu and silu are as small as 1e-5: no cancellation there.
        off = jnp.max(jnp.abs(got - want) / (jnp.abs(want) + 5e-2))
        assert float(off) <= 2e-3, f"{case} {activation}: an element is off by {float(off):.1e} of itself"


@pytest.mark.parametrize("activation", NN)
def test_not_finite(activation):
    """NaNs and infinities come out as they should, of both kinds of kernel."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    for m_shard in (8, 256):
        case = Case(ALL_GATHER, m_shard, 264, 64)
        x = np.zeros(case.x_shape(ranks), np.float32)
        x[:4, 0] = np.nan, np.inf, -np.inf, 3e38
        w = np.ones(case.w_shape(ranks), np.float32)
        x_spec, w_spec, _ = case.specs(AXIS)
        x, w = (put(v.astype(jnp.bfloat16), mesh, s) for v, s in ((x, x_spec), (w, w_spec)))
        bias = put(np.zeros(case.w_shape(ranks)[1], np.float32), mesh, bias_spec(case))
        y = whole(finishing(case, mesh, activation)(x, w, bias)).astype(np.float32)
        # An infinity times zero, in the sums themselves, would be NaN: w has none.
        assert np.isnan(y[0]).all() and np.isposinf(y[1]).all() and (y[3] > 1e38).all()
        if activation is not None:
            assert not (y[2] < -1e-15).any()  # zero, or NaN
        assert not y[4:].any()


@pytest.mark.parametrize("activation", ["relu", "gelu"])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("transpose_w", [False, True], ids=["k by n", "n by k"])
def test_gradients(op, activation, transpose_w):
    """Of x, w and bias, beside float32's."""
    case, mesh = Case(op, 264, 520, 392), mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = gaussians(case, ranks, 1)
    bias = np.random.default_rng(2).standard_normal(case.w_shape(ranks)[1], np.float32)
    x, bias = put(x, mesh, x_spec), put(bias, mesh, bias_spec(case))
    exact = jax.shard_map(
        functools.partial(wide, case, activation),
        mesh=mesh,
        in_specs=(x_spec, w_spec, bias_spec(case)),
        out_specs=y_spec,
    )

    def gradients(f, *args):
        return jax.jit(jax.grad(lambda *args: jnp.sum(jnp.square(f(*args).astype(jnp.float32))), (0, 1, 2)))(*args)

    wanted = gradients(exact, x.astype(jnp.float32), put(w.astype(np.float32), mesh, w_spec), bias)
    if transpose_w:
        w, w_spec, wanted = w.T, P(*w_spec[::-1]), (wanted[0], wanted[1].T, wanted[2])
    w = put(w, mesh, w_spec)
    found = gradients(finishing(case, mesh, activation, transpose_w=transpose_w), x, w, bias)
    for name, got, want, like in zip(("x", "w", "bias"), found, wanted, (x, w, bias), strict=True):
        assert got.dtype == like.dtype and got.shape == like.shape
        assert float(relative_error(got, want)) <= 8e-3, name


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("m_shard", [8, 264], ids=["few", "tiles"])
def test_transposed_w(op, m_shard):
    """Without an epilogue, w as it lies."""
    case, mesh = Case(op, m_shard, 776, 520), mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, _ = case.specs(AXIS)
    x, w = integers(case, ranks, 4)
    wanted = exact_product(case, ranks, x, w)
    poison(case, mesh)
    f = finishing(case, mesh, None, transpose_w=True, biased=False)
    y = f(put(x, mesh, x_spec), put(w.T, mesh, P(*w_spec[::-1])), put(bias_of(case, ranks, 1), mesh, bias_spec(case)))
    assert_shards_equal(case, y, wanted)
