"""collective_matmul on GPUs: in each mode our kernels and no collective of XLA's, with its values and gradients."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import ALL_GATHER, ALL_REDUCE, AXIS, REDUCE_SCATTER, mesh_of, team_size, whole
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

BATCH, ROWS, WIDTH, HIDDEN = 2, 320, 512, 1024  # rows and hidden columns of one rank
SPECS = P(None, AXIS, None), P(None, AXIS), P(AXIS, None)
COLLECTIVES = (" all-gather", " all-reduce", " reduce-scatter", " collective-permute", " all-to-all")


def mesh_for(mode):
    mesh = mesh_of()
    if mode == "partial":  # an axis that is manual while the team's isn't
        return Mesh(mesh.devices.reshape(1, -1), ("d", AXIS))
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Explicit,)) if mode == "explicit" else mesh


def mlp(mode, mesh, strategy, residuals="regather"):
    inside = {"axis_name": AXIS} if mode in ("manual", "partial") else {}

    def f(x, w_up, w_down):
        rows = SPECS[0] if inside else NamedSharding(mesh, SPECS[0])
        columns = {"out_sharding": P(None, None, AXIS)} if inside else {}
        h = entwine_jax.collective_matmul(x, w_up, strategy=strategy, residuals=residuals, **columns, **inside)
        return x + entwine_jax.collective_matmul(jnp.tanh(h), w_down, strategy=strategy, out_sharding=rows, **inside)

    if mode == "partial":
        return jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P(), P()), out_specs=P("d"), axis_names={"d"})
    return jax.shard_map(f, mesh=mesh, in_specs=SPECS, out_specs=SPECS[0]) if inside else f


def operands(mesh):
    ranks, rng = team_size(mesh), np.random.default_rng(0)
    shapes = (BATCH, ranks * ROWS, WIDTH), (WIDTH, ranks * HIDDEN), (ranks * HIDDEN, WIDTH)
    return [
        jax.device_put(
            (rng.standard_normal(shape) / np.sqrt(shape[0] if len(shape) == 2 else 1)).astype(jnp.bfloat16),
            NamedSharding(mesh, spec),
        )
        for shape, spec in zip(shapes, SPECS, strict=True)
    ]


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual", "partial"])
@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_mlp(mode, residuals):
    mesh = mesh_for(mode)
    args = operands(mesh)

    def loss(f, *args):
        return jnp.mean(jnp.square(f(*args).astype(jnp.float32)))

    results = {}
    for strategy in ("fused", "xla"):
        f = mlp(mode, mesh, strategy, residuals if strategy == "fused" else "regather")
        gradient = jax.jit(jax.value_and_grad(functools.partial(loss, f), (0, 1, 2)))
        if mode == "partial":  # of two GPUs, none are left for the manual axis; an axis of one has no gradients
            gradient = jax.jit(functools.partial(loss, f))
        results[strategy] = jax.tree.map(lambda v: whole(v).astype(np.float64), (jax.jit(f)(*args), gradient(*args)))
        if strategy == "fused":
            text = jax.jit(f).lower(*args).compile().as_text()
            assert all(f"entwine_{op}" in text for op in (ALL_GATHER, REDUCE_SCATTER))
            assert not [name for name in COLLECTIVES if f"{name}(" in text or f"{name}-start(" in text]
            found = entwine_jax.explain(f, *args)
            assert [m.op for m in found] == [ALL_GATHER, REDUCE_SCATTER] and all(m.strategy == "fused" for m in found)
            if mode == "partial":
                continue
            found = entwine_jax.explain(gradient, *args)
            saved = (ALL_GATHER, False) if residuals == "save" else (REDUCE_SCATTER, True)
            gathered = sorted((m.op, m.transpose_w) for m in found if m.gathered)
            assert gathered == sorted([(ALL_GATHER, True), saved])
    for got, wanted in zip(*map(jax.tree.leaves, results.values()), strict=True):
        assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual"])
@pytest.mark.parametrize("gated", [False, True])
def test_several_weights(mode, gated):
    """One call forward, and one backward."""
    mesh = mesh_for(mode)
    ranks, rng = team_size(mesh), np.random.default_rng(2)
    columns = (HIDDEN, HIDDEN) if gated else (HIDDEN, 136, 136)
    shapes = (BATCH, ranks * ROWS, WIDTH), *((WIDTH, ranks * n) for n in columns)
    specs, y_spec = (SPECS[0], *(SPECS[1],) * len(columns)), P(None, None, AXIS)
    args = [
        jax.device_put((rng.standard_normal(shape) / 16).astype(jnp.bfloat16), NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=True)
    ]

    def of(strategy):
        options = {"axis_name": AXIS, "out_sharding": y_spec} if mode == "manual" else {}
        options |= {"gated": True, "activation": "silu"} if gated else {}

        def f(x, *ws):
            made = entwine_jax.collective_matmul(x, ws, strategy=strategy, **options)
            return (made,) if gated else made

        outs = (y_spec,) if gated else (y_spec,) * len(columns)
        return jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=outs) if mode == "manual" else f

    def both(strategy):
        def loss(*args):
            return sum(jnp.mean(jnp.square(y.astype(jnp.float32))) for y in of(strategy)(*args))

        return jax.jit(of(strategy)), jax.jit(jax.grad(loss, tuple(range(len(args)))))

    results = {}
    for strategy in ("fused", "xla"):
        forward, backward = both(strategy)
        results[strategy] = jax.tree.leaves((forward(*args), backward(*args)))
        if strategy == "fused":
            for run, wanted in ((forward, {ALL_GATHER: 1}), (backward, {ALL_GATHER: 1, REDUCE_SCATTER: 1})):
                text = run.lower(*args).compile().as_text()
                found = {op: text.count(f'custom_call_target="entwine_{op}"') for op in (ALL_GATHER, REDUCE_SCATTER)}
                assert {op: count for op, count in found.items() if count} == wanted
                assert not [name for name in COLLECTIVES if f"{name}(" in text or f"{name}-start(" in text]
    for got, wanted in zip(*results.values(), strict=True):
        got, wanted = whole(got).astype(np.float64), whole(wanted).astype(np.float64)
        assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual"])
def test_all_reduce(mode):
    """Rows that nobody shares: our kernel forward, and backward nothing that moves along the team's axis."""
    mesh = mesh_for(mode)
    ranks, rng = team_size(mesh), np.random.default_rng(1)
    specs = P(None, None, AXIS), P(AXIS, None), P()
    shapes = (BATCH, 333, ranks * HIDDEN), (ranks * HIDDEN, WIDTH)
    args = [
        jax.device_put(rng.standard_normal(shape).astype(jnp.bfloat16) / 16, NamedSharding(mesh, spec))
        for shape, spec in zip(shapes, specs, strict=False)
    ]

    def of(strategy):
        inside = {"axis_name": AXIS, "out_sharding": P()} if mode == "manual" else {}

        def f(x, w):
            return entwine_jax.collective_matmul(x, w, strategy=strategy, **inside)

        f = jax.shard_map(f, mesh=mesh, in_specs=specs[:2], out_specs=specs[2]) if inside else f

        def loss(x, w):
            y = f(x, w)
            return jnp.mean(jnp.square(y.astype(jnp.float32))), y

        return jax.jit(jax.grad(loss, (0, 1), has_aux=True))

    text = of("fused").lower(*args).compile().as_text()
    assert f"entwine_{ALL_REDUCE}" in text
    assert not [name for name in COLLECTIVES if f"{name}(" in text or f"{name}-start(" in text]
    ours, theirs = (jax.tree.leaves(of(strategy)(*args)) for strategy in ("fused", "xla"))
    for got, wanted in zip(ours, theirs, strict=True):
        got, wanted = whole(got).astype(np.float64), whole(wanted).astype(np.float64)
        assert np.linalg.norm(got - wanted) <= 2e-2 * np.linalg.norm(wanted)


def test_auto_takes_the_kernels():
    mesh = mesh_of()
    assert [m.strategy for m in entwine_jax.explain(mlp("auto", mesh, "auto"), *operands(mesh))] == ["fused"] * 2


def test_auto_knows_of_other_products_of_the_same_x():
    """Where few columns follow a wide one, XLA's one gather beats three of ours; where all are wide, ours win."""
    mesh = mesh_of()
    ranks = team_size(mesh)

    def f(x, *ws):
        return [entwine_jax.collective_matmul(x, w, strategy="auto") for w in ws]

    def loss(x, *ws):
        return sum(jnp.sum(jnp.square(y.astype(jnp.float32))) for y in f(x, *ws))

    def strategies(g, *columns):
        shapes = ((8192, 8192), P(AXIS, None)), *(((8192, n * ranks), P(None, AXIS)) for n in columns)
        args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, spec)) for s, spec in shapes]
        return [m.strategy for m in entwine_jax.explain(g, *args)]

    assert strategies(f, 1024, 128, 128) == ["xla"] * 3
    assert strategies(f, 1024) == ["fused"]
    assert strategies(f, 3584, 3584) == ["fused"] * 2
    assert strategies(jax.grad(loss, (0, 1, 2, 3)), 1024, 128, 128) == ["xla"] * 6
