"""Gated products on GPUs: exact integers, activations beside float32, gradients beside XLA's, captured graphs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import ALL_GATHER, AXIS, REDUCE_SCATTER, mesh_of, put, relative_error, team_size, whole
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

ROWS, COLUMNS = P(None, AXIS, None), P(None, None, AXIS)
SILU = {"gated": True, "activation": "silu", "strategy": "fused"}


def draw(shape, seed, dtype=jnp.bfloat16):
    return np.random.default_rng(seed).integers(-1, 1, shape, endpoint=True).astype(dtype)


def normal(shape, seed, scale=1.0):
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(jnp.bfloat16)


def wide(value):
    return whole(value).astype(np.float64)


@functools.cache
def gated(mesh, transposed, gathers, dtype, biases, tile_n):
    w = P(AXIS, None) if transposed else P(None, AXIS)
    config = None if tile_n is None else entwine_jax.Config(tile_m=256, tile_n=tile_n)
    options = {"activation": "relu", "transpose_w": transposed, "preferred_element_type": dtype, "config": config}

    def rank(x, ws, bs):
        made = entwine_jax.all_gather_matmul(
            x, ws, AXIS, bias=bs, strategy="fused", gated=True, return_gathered=gathers, **options
        )
        return made if gathers else (made, ())

    in_specs = ROWS, (w, w), tuple(P(AXIS) if biased else None for biased in biases)
    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=in_specs, out_specs=(COLUMNS, COLUMNS if gathers else ())))


@pytest.mark.parametrize("operand", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("result", [None, jnp.float32], ids=["", "to_float32"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_exact(transposed, result, operand):
    """Widths below, at and above half a tile's, rows that fill no tile; twice, with other numbers. What 16 bits can't
    hold is rounded once."""
    mesh = mesh_of()
    ranks, w_spec = team_size(mesh), P(AXIS, None) if transposed else P(None, AXIS)
    for i, n in enumerate((8, 64, 128, 136, 520)):
        biases, gathers, tile_n = (i % 2 == 0, i % 3 == 0), i % 2 == 1, (None, 128, 256)[i % 3]
        for seed in (1, 2):
            x, ws = (
                draw((2, 300 * ranks, 136), seed, operand),
                [draw((136, n * ranks), 10 * seed + j, operand) for j in (0, 1)],
            )
            bs = [
                3 * draw((n * ranks,), 20 * seed + j, np.float32) if biased else None for j, biased in enumerate(biases)
            ]
            given = tuple(put(np.ascontiguousarray(w.T) if transposed else w, mesh, w_spec) for w in ws)
            on_mesh = tuple(None if b is None else put(b, mesh, P(AXIS)) for b in bs)
            run = gated(mesh, transposed, gathers, result, biases, tile_n)
            h, rows = run(put(x, mesh, ROWS), given, on_mesh)
            gate, up = (
                x.astype(np.float64) @ w.astype(np.float64) + (0 if b is None else b)
                for w, b in zip(ws, bs, strict=True)
            )
            np.testing.assert_array_equal(wide(h), (gate.clip(0) * up).astype(result or operand).astype(np.float64))
            for copy in np.split(wide(rows), ranks, axis=-1) if gathers else ():
                np.testing.assert_array_equal(copy, wide(x))


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_activations(activation):
    """A result of float32 against float64 sums; at a size where every cluster has several tiles."""
    mesh = mesh_of()
    ranks, k, n = team_size(mesh), 512, 1800
    x, ws = normal((1, 2048, k), 1), [normal((k, n * ranks), i, k**-0.5) for i in (2, 3)]

    def rank(x, ws):
        options = SILU | {"activation": activation, "preferred_element_type": jnp.float32}
        return entwine_jax.all_gather_matmul(x, ws, AXIS, **options)

    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(ROWS, (P(None, AXIS),) * 2), out_specs=COLUMNS))
    h = run(put(x, mesh, ROWS), tuple(put(w, mesh, P(None, AXIS)) for w in ws))
    gate, up = (x.astype(np.float64) @ w.astype(np.float64) for w in ws)
    functions = {"relu": jax.nn.relu, "silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu, None: lambda v: v}
    functions["gelu"] = functools.partial(jax.nn.gelu, approximate=False)
    wanted = np.asarray(functions[activation](jnp.asarray(gate, jnp.float32)), np.float64) * up
    assert np.linalg.norm(wide(h) - wanted) <= 1e-5 * np.linalg.norm(wanted)


def swiglu(ours, residuals="regather"):
    def rank(x, gate, up, down):
        if ours:
            h = entwine_jax.all_gather_matmul(x, (gate, up), AXIS, residuals=residuals, **SILU)
            return entwine_jax.matmul_reduce_scatter(h, down, AXIS, strategy="fused")
        rows = lax.all_gather(x, AXIS, axis=1, tiled=True)
        y = (jax.nn.silu(rows @ gate) * (rows @ up)) @ down
        return lax.psum_scatter(y, AXIS, scatter_dimension=1, tiled=True)

    in_specs = ROWS, P(None, AXIS), P(None, AXIS), P(AXIS, None)
    return jax.shard_map(rank, mesh=mesh_of(), in_specs=in_specs, out_specs=ROWS)


def swiglu_operands():
    mesh = mesh_of()
    ranks, d, hidden = team_size(mesh), 520, 392
    shapes = ((2, 264 * ranks, d), ROWS, 1.0), *[((d, hidden * ranks), P(None, AXIS), d**-0.5)] * 2
    shapes = *shapes, ((hidden * ranks, d), P(AXIS, None), (hidden * ranks) ** -0.5)
    return [put(normal(shape, i, scale), mesh, spec) for i, (shape, spec, scale) in enumerate(shapes)]


@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_forward_and_gradients(residuals):
    """The forward pass alone is the gated call; differentiated it is that of both products."""
    args = swiglu_operands()
    forward = jax.jit(swiglu(True, residuals))
    assert float(relative_error(forward(*args), jax.jit(swiglu(False))(*args))) <= 1e-2
    assert [(m.op, m.gated) for m in entwine_jax.explain(forward, *args)] == [
        (ALL_GATHER, True),
        (REDUCE_SCATTER, False),
    ]

    def loss(ours):
        run = swiglu(ours, residuals)
        return jax.jit(jax.value_and_grad(lambda *args: jnp.mean(jnp.square(run(*args).astype(jnp.float32))), range(4)))

    (ours, gradients), (theirs, wanted) = (loss(ours)(*args) for ours in (True, False))
    assert abs(float(ours) - float(theirs)) <= 1e-2 * abs(float(theirs))
    for name, got, want in zip(("x", "gate", "up", "down"), gradients, wanted, strict=True):
        assert float(relative_error(got, want)) <= 3e-2, name


def test_in_a_loop():
    """Captured into a graph where XLA does so; each round takes what the last one gave, and is the same to the bit."""
    args = swiglu_operands()

    def rounds(x, *weights):
        return lax.fori_loop(0, 6, lambda _, x: (x + swiglu(True)(x, *weights)) / 2, x)

    x, *weights = args
    step = jax.jit(lambda x, *weights: (x + swiglu(True)(x, *weights)) / 2)
    for _ in range(6):
        x = step(x, *weights)
    np.testing.assert_array_equal(wide(jax.jit(rounds)(*args)), wide(x))
