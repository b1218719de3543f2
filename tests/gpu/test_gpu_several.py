"""Several products in one call on GPUs: exact integers, gradients beside XLA's, few rows, captured graphs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import ALL_GATHER, ALL_REDUCE, AXIS, EXACT, REDUCE_SCATTER, mesh_of, put, relative_error, team_size, whole
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

ROWS, COLUMNS = P(None, AXIS, None), P(None, None, AXIS)


def draw(shape, seed, dtype=jnp.bfloat16):
    """Integers so small that sums stay exact in bfloat16, also those of one rank."""
    return np.random.default_rng(seed).integers(-1, 1, shape, endpoint=True).astype(dtype)


def wide(value):
    return whole(value).astype(np.float64)


def assert_exact(got, want):
    assert np.abs(want).max() <= EXACT
    np.testing.assert_array_equal(wide(got), want)


@functools.cache
def products(mesh, count, transposed, gathers, dtype, few_rows=None):
    w = P(AXIS, None) if transposed else P(None, AXIS)

    def rank(x, ws):
        config = None if few_rows is None else entwine_jax.Config(few_rows=few_rows)
        options = {"transpose_w": transposed, "strategy": "fused", "preferred_element_type": dtype, "config": config}
        if not gathers:
            return entwine_jax.all_gather_matmul(x, ws, AXIS, **options), ()
        ys, rows = entwine_jax.all_gather_matmul(x, ws, AXIS, return_gathered=True, **options)
        return ys, (rows,)

    specs = (COLUMNS,) * count, (COLUMNS,) * gathers
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(ROWS, (w,) * count), out_specs=specs))


@pytest.mark.parametrize("gathers", [False, True], ids=["", "gathered"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_products_are_exact(transposed, dtype, gathers):
    """Widths below, at and above a tile's, rows that fill no tile; twice, with other numbers."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    for widths in ((264, 8), (1024, 512, 520), (40, 256, 8, 128)):
        for seed in (1, 2):
            x = draw((2, 300 * ranks, 136), seed)
            ws = [draw((136, n * ranks), 10 * seed + i) for i, n in enumerate(widths)]
            w_spec = P(AXIS, None) if transposed else P(None, AXIS)
            given = tuple(put(np.ascontiguousarray(w.T) if transposed else w, mesh, w_spec) for w in ws)
            ys, rows = products(mesh, len(widths), transposed, gathers, dtype)(put(x, mesh, ROWS), given)
            for y, w in zip(ys, ws, strict=True):
                assert_exact(y, wide(x) @ wide(w))
            for copy in np.split(wide(rows[0]), ranks, axis=-1) if gathers else ():
                np.testing.assert_array_equal(copy, wide(x))


@functools.cache
def sums(op, mesh, count, transposed, dtype):
    x, w = P(None, None, AXIS), P(None, AXIS) if transposed else P(AXIS, None)

    def rank(xs, ws):
        options = {"transpose_w": transposed, "strategy": "fused", "preferred_element_type": dtype}
        return getattr(entwine_jax, op)(xs, ws, AXIS, **options)

    y = ROWS if op == REDUCE_SCATTER else P()
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=((x,) * count, (w,) * count), out_specs=y))


@pytest.mark.parametrize("op", [REDUCE_SCATTER, ALL_REDUCE])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_sums_are_exact(op, transposed, dtype):
    """Contractions that end within a k block, and with one."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    for depths in ((72, 8), (64, 136, 40), (8, 128, 16, 64)):
        for seed in (1, 2):
            xs = [draw((2, 300 * ranks, k * ranks), seed + 10 * i) for i, k in enumerate(depths)]
            ws = [draw((k * ranks, 520), 50 * seed + i) for i, k in enumerate(depths)]
            w_spec = P(None, AXIS) if transposed else P(AXIS, None)
            given = tuple(put(np.ascontiguousarray(w.T) if transposed else w, mesh, w_spec) for w in ws)
            x_given = tuple(put(x, mesh, COLUMNS) for x in xs)
            y = sums(op, mesh, len(depths), transposed, dtype)(x_given, given)
            assert_exact(y, sum(wide(x) @ wide(w) for x, w in zip(xs, ws, strict=True)))


@pytest.mark.parametrize("few_rows", [None, True])
def test_few_rows(few_rows):
    mesh = mesh_of()
    ranks = team_size(mesh)
    x, ws = draw((1, 8 * ranks, 136), 1), [draw((136, n * ranks), 2 + n) for n in (256, 1024)]
    given = tuple(put(w, mesh, P(None, AXIS)) for w in ws)
    run = products(mesh, 2, False, False, jnp.bfloat16, few_rows)
    ys, _ = run(put(x, mesh, ROWS), given)
    if few_rows:
        calls = entwine_jax.explain(run, put(x, mesh, ROWS), given)
        assert [(call.plan.few_rows, call.products) for call in calls] == [(True, ())] * 2
    for y, w in zip(ys, ws, strict=True):
        assert_exact(y, wide(x) @ wide(w))


@pytest.mark.parametrize("residuals", ["regather", "save"])
@pytest.mark.parametrize("activation", [None, ("silu", None)], ids=["", "silu"])
@pytest.mark.parametrize("op", [REDUCE_SCATTER, ALL_REDUCE])
def test_gradients(op, activation, residuals):
    """Of a SwiGLU MLP whose two branches go down by weights of their own, and one collective each way."""
    mesh = mesh_of()
    ranks, d, hidden = team_size(mesh), 520, 392
    rng = np.random.default_rng(0)

    def array(shape, spec, scale=1.0):
        return put((rng.standard_normal(shape) * scale).astype(jnp.bfloat16), mesh, spec)

    up, down = P(None, AXIS), P(AXIS, None)
    args = (
        array((2, 264 * ranks, d), ROWS),
        *(array((d, hidden * ranks), up, d**-0.5) for _ in range(2)),
        *(array((hidden * ranks, d), down, (hidden * ranks) ** -0.5) for _ in range(2)),
    )

    def loss(fused):
        def rank(x, gate, up, a, b):
            if fused:
                options = {"activation": activation, "residuals": residuals, "strategy": "fused"}
                h, u = entwine_jax.all_gather_matmul(x, (gate, up), AXIS, **options)
                return getattr(entwine_jax, op)((h, h * u), (a, b), AXIS, strategy="fused")
            rows = lax.all_gather(x, AXIS, axis=1, tiled=True)
            h, u = rows @ gate, rows @ up
            h = jax.nn.silu(h) if activation else h
            y = h @ a + (h * u) @ b
            return lax.psum(y, AXIS) if op == ALL_REDUCE else lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)

        specs = ROWS, up, up, down, down
        run = jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=ROWS if op == REDUCE_SCATTER else P())
        return jax.jit(jax.value_and_grad(lambda *args: jnp.mean(jnp.square(run(*args).astype(jnp.float32))), range(5)))

    (ours, gradients), (theirs, wanted) = (loss(fused)(*args) for fused in (True, False))
    assert abs(float(ours) - float(theirs)) <= 1e-2 * abs(float(theirs))
    for name, got, want in zip(("x", "gate", "up", "a", "b"), gradients, wanted, strict=True):
        assert float(relative_error(got, want)) <= 3e-2, name
    text = loss(True).lower(*args).compile().as_text()
    calls = {each: text.count(f'custom_call_target="entwine_{each}"') for each in (ALL_GATHER, REDUCE_SCATTER)}
    assert calls == ({ALL_GATHER: 2, REDUCE_SCATTER: 2} if op == REDUCE_SCATTER else {ALL_GATHER: 1, REDUCE_SCATTER: 1})


def test_in_a_loop():
    """Captured into a graph where XLA does so; each round takes what the last one gave."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    x, identity = draw((1, 264 * ranks, 256), 3), np.eye(256, dtype=jnp.bfloat16)

    def rank(x, ws):
        def step(_, x):
            halves = entwine_jax.all_gather_matmul(x, ws, AXIS, strategy="fused")
            # Both halves of the identity's columns, back by those of its rows: x once for each rank.
            return entwine_jax.matmul_reduce_scatter(halves, tuple(w.T for w in ws), AXIS, strategy="fused")

        return lax.fori_loop(0, 6, step, x)

    shares = np.split(identity, 2, axis=1)  # of 128 columns, whole on every rank divided by the ranks
    given = tuple(put(share, mesh, P(None, AXIS)) for share in shares)
    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(ROWS, (P(None, AXIS),) * 2), out_specs=ROWS))
    np.testing.assert_array_equal(wide(run(put(x, mesh, ROWS), given)), wide(x))
