"""Ragged shapes, drawn by Hypothesis: nothing need be a multiple of anything."""

import jax
import numpy as np
from helpers import OPS, fused, integers, mesh_of, product, spread
from hypothesis import given, settings
from hypothesis import strategies as st

import entwine_jax

# Around the edges of the host executor's 32 x 32 tiles.
sizes = st.one_of(st.integers(1, 9), st.sampled_from([31, 32, 33, 63, 64, 65, 100]))


@settings(max_examples=24, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(OPS),
    ranks=st.integers(2, 8),
    batch=st.integers(1, 3),
    m_shard=sizes,
    odd=st.integers(0, 7),
    n=sizes,
    k=sizes,
    transport=st.sampled_from(["pull", "push"]),
    lead=st.integers(0, 12),
    raster=st.integers(1, 5),
    pushers=st.integers(1, 4),
    workers=st.integers(1, 3),
)
def test_ragged(op, ranks, batch, m_shard, odd, n, k, workers, **plan):
    """Exact, whatever the shape and the plan."""
    config = entwine_jax.Config(workers=workers, **plan)
    gather = op == "all_gather_matmul"
    rows = m_shard * ranks
    if op == "matmul_all_reduce":  # any number
        rows = max(rows - odd, 1)
    x = integers((batch, rows, k * (1 if gather else ranks)), 1)
    w = integers((x.shape[-1], n * (ranks if gather else 1)), 2)
    f = spread(lambda op, x, w, axis: fused(op, x, w, axis, config=config), op, mesh_of((ranks,)), leading=(None,))
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w)), product(x, w))
    # The same call again: the other half of the arena.
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x + 1, w)), product(x + 1, w))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(op=st.sampled_from(OPS), ranks=st.sampled_from([2, 3, 4]), m_shard=sizes, n=sizes, k=sizes)
def test_ragged_gradients(op, ranks, m_shard, n, k):
    gather = op == "all_gather_matmul"
    x = integers((m_shard * ranks, k * (1 if gather else ranks)), 1)
    w = integers((x.shape[-1], n * (ranks if gather else 1)), 2)
    g = integers((x.shape[0], w.shape[1]), 3)
    f = spread(fused, op, mesh_of((ranks,)))
    dx, dw = jax.jit(lambda x, w, g: jax.vjp(f, x, w)[1](g))(x, w, g)
    np.testing.assert_array_equal(np.asarray(dx), product(g, w.T))
    np.testing.assert_array_equal(np.asarray(dw), product(x.T, g))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    op=st.sampled_from(OPS),
    ranks=st.integers(1, 8),
    batch=st.integers(1, 3),
    m_shard=st.integers(1, 200),
    n=st.integers(1, 200),
    lead=st.integers(0, 40),
    raster=st.integers(1, 8),
)
def test_each_tile_once(op, ranks, batch, m_shard, n, lead, raster):
    """The order that both executors walk, as the extension tells it; the C++ tests prove more."""
    rows, columns = batch * -(-m_shard // 32), -(-n // 32)
    wanted = {(owner, row, col) for owner in range(ranks) for row in range(rows) for col in range(columns)}
    for rank in range(ranks):
        order = entwine_jax._core.tile_order(
            op,
            ranks=ranks,
            rank=rank,
            batch=batch,
            m_shard=m_shard,
            n=n,
            tile_m=32,
            tile_n=32,
            raster=raster,
            lead=lead,
        )
        assert len(order) == len(wanted) and set(order) == wanted
