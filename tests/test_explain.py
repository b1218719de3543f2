"""explain finds every collective matmul of a traced function, and says what becomes of it and why."""

import jax
import jax.numpy as jnp
import pytest
from helpers import OPS, fused, mesh_of, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax


def layer(strategy, mesh=None):
    def rank(x, w1, w2):
        h = jnp.tanh(entwine_jax.all_gather_matmul(x, w1, "t", strategy=strategy))
        return entwine_jax.matmul_reduce_scatter(h, w2, "t", strategy=strategy)

    mesh = mesh or mesh_of((4,))
    return jax.shard_map(rank, mesh=mesh, in_specs=(P("t"), P(None, "t"), P("t")), out_specs=P("t"))


ARGS = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 12), (12, 24), (24, 12)))


def test_forward():
    gather, scatter = entwine_jax.explain(jax.jit(layer("fused")), *ARGS)
    assert (gather.op, gather.x, gather.w, gather.y) == (OPS[0], (1, 4, 12), (12, 6), (1, 16, 6))
    assert (scatter.op, scatter.x, scatter.w, scatter.y) == (OPS[1], (1, 16, 6), (6, 12), (1, 4, 12))
    for matmul in (gather, scatter):
        assert (matmul.axis_name, matmul.team_size, matmul.strategy) == (("t",), 4, "fused")
        assert matmul.dtype == matmul.result_dtype == jnp.float32
        assert matmul.plan.target == "host" and matmul.arena_bytes > 0
    assert (gather.reason, scatter.reason) == ("asked for", "asked for")


def test_backward_scan_remat_and_cond():
    f = layer("fused")

    def loss(x, w1, w2):
        x, _ = lax.scan(jax.checkpoint(lambda x, _: (f(x, w1, w2), None)), x, length=3)
        return jnp.sum(lax.cond(x[0, 0] > 0, lambda: f(x, w1, w2), lambda: x))

    found = entwine_jax.explain(loss, *ARGS)
    assert [matmul.op for matmul in found] == [*OPS[:2], *OPS[:2]]
    backward = entwine_jax.explain(jax.grad(loss), *ARGS)
    assert len(backward) > len(found)
    assert any(matmul.transpose_w for matmul in backward)


@pytest.mark.parametrize(
    "strategy, reason",
    [("auto", "on CPU devices auto means xla"), ("xla", "asked for")],
)
def test_reasons(strategy, reason):
    for matmul in entwine_jax.explain(layer(strategy), *ARGS):
        assert matmul.strategy == "xla" and matmul.plan is None and matmul.arena_bytes == 0
        assert matmul.reason.startswith(reason)


def test_team_of_one():
    for matmul in entwine_jax.explain(layer("fused", mesh_of((1,))), *ARGS):
        assert (matmul.strategy, matmul.team_size) == ("xla", 1)
        assert "plain dot" in matmul.reason


def test_the_other_collectives_are_gone():
    """Under "fused" the program holds custom calls where "xla" has collectives."""
    hlo = {s: jax.jit(layer(s)).lower(*ARGS).compile().as_text() for s in ("fused", "xla")}
    for op in OPS[:2]:
        assert f"entwine_{op}" in hlo["fused"] and f"entwine_{op}" not in hlo["xla"]
    assert "all-gather" not in hlo["fused"] and "all-gather" in hlo["xla"]


def test_all_reduce():
    """Ours in place of XLA's, with more peer memory than a reduce-scatter, in value and gradient."""

    def f(strategy, op="matmul_all_reduce"):
        return spread(lambda op, x, w, axis: fused(op, x, w, axis, strategy=strategy), op, mesh_of((4,)))

    x, w = ARGS[1:]
    (found,), (scatter,) = entwine_jax.explain(f("fused"), x, w), entwine_jax.explain(f("fused", OPS[1]), x, w)
    assert (found.op, found.x, found.w, found.y) == ("matmul_all_reduce", (1, 12, 6), (6, 12), (1, 12, 12))
    assert (found.strategy, found.reason, found.plan.target) == ("fused", "asked for", "host")
    assert found.arena_bytes > scatter.arena_bytes > 0
    assert found.plan.transport in repr(entwine_jax.explain(f("fused"), x, w))
    assert [m.strategy for m in entwine_jax.explain(f("xla"), x, w)] == ["xla"]

    for strategy in ("fused", "xla"):
        gradient = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(strategy)(x, w))), (0, 1))  # noqa: B023
        for program in (f(strategy), gradient):
            hlo = jax.jit(program).lower(x, w).compile().as_text()
            assert ("entwine_matmul_all_reduce" in hlo) == (strategy == "fused")
            assert (" all-reduce" in hlo) == (strategy == "xla")
            assert " all-gather" not in hlo and " reduce-scatter" not in hlo


def test_table():
    lines = repr(entwine_jax.explain(layer("fused"), *ARGS)).splitlines()
    assert lines[0].split() == ["op", "x", "w", "y", "gathered", "axis", "strategy", "arena", "plan", "why"]
    assert len(lines) == 3
    for word in ("all_gather_matmul", "float32[4,12]", "float32[12,6]", "float32[16,6]", "t:4", "fused", "asked for"):
        assert word in lines[1]
    assert repr(entwine_jax.explain(jnp.sin, 1.0)) == "no collective matmul"


def test_what_is_gathered_beside():
    """The backward pass gathers x beside dx's product, and what all-gather gathers can be a result."""
    f = layer("fused")
    backward = entwine_jax.explain(jax.grad(lambda *args: jnp.sum(f(*args)), (0, 1, 2)), *ARGS)
    assert [(m.op, m.transpose_w, m.gathered) for m in backward] == [
        (OPS[0], False, None),
        (OPS[1], False, None),
        (OPS[0], True, (1, 16, 12)),
        (OPS[1], True, (1, 16, 12)),
    ]
    plain, beside = backward[1], backward[3]
    # Of the same shape, but for 12 words a source, one row block each, and two halves of three peers' chunks.
    assert beside.arena_bytes > plain.arena_bytes
    lines = repr(backward).splitlines()
    assert "float32[16,12]" in lines[4] and "copiers 1" in lines[4] and "copiers" not in lines[1]


def test_sequence_and_keywords():
    f = spread(lambda op, x, w, axis: entwine_jax.all_gather_matmul(x, w, axis), OPS[0], mesh_of((2,)))
    found = entwine_jax.explain(lambda x, *, w: f(x, w), ARGS[0], w=ARGS[1])
    assert len(found) == 1 and found[0] is next(iter(found)) and list(found[:1]) == [found[0]]
