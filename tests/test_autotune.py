"""autotune: what it finds, measures and chooses, and what traces make of that."""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, operands, setup
from helpers import OPS, integers, mesh_of, product, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _contest, _race, _tuned

SHAPES = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)


def op_of(op=OPS[0], size=4, **options):
    return spread(lambda op, x, w, axis: getattr(entwine_jax, op)(x, w, axis, **options), op, mesh_of((size,)))


def only(f, *args):
    (matmul,) = entwine_jax.explain(f, *args)
    return matmul


@pytest.mark.parametrize("op", OPS)
def test_what_is_fastest_is_chosen(op, measure):
    # First the tiles, then the raster of the best ones.
    measure(lambda _, plan: 3e-3 if plan is None else {64: 2e-3}.get(plan.tile_m, 2.5e-3) / (1 + (plan.raster == 8)))
    (row,) = found = entwine_jax.autotune(op_of(op), *SHAPES)
    assert (row.status, row.strategy, row.plan.tile_m, row.plan.raster) == ("measured", "fused", 64, 8)
    assert row.fused_ms == row.ms == pytest.approx(1) and row.xla_ms == row.model_ms == pytest.approx(3)
    assert row.gain == pytest.approx(3) and row.key in repr(found) and "3.000" in repr(found)

    traced = only(op_of(op), *SHAPES)
    assert (traced.strategy, traced.plan) == ("fused", row.plan)
    assert traced.reason == "tuned: 1 ms fused, 3 ms on XLA (this process)"
    x, w = integers((64, 32), 1), integers((32, 64), 2)
    np.testing.assert_array_equal(np.asarray(jax.jit(op_of(op))(x, w)), product(x, w))


def test_xla_may_win(measure):
    measure(lambda _, plan: 1e-3 if plan is None else 1.2e-3 - 1e-6 * plan.raster)
    (row,) = entwine_jax.autotune(op_of(), *SHAPES)
    assert row.strategy == "xla" and row.plan is not None
    traced = only(op_of(), *SHAPES)
    assert (traced.strategy, traced.plan) == ("xla", None) and traced.reason.startswith("tuned: 1.2 ms fused, 1 ms on")
    # Who asks for fused gets the best plan of these.
    traced = only(op_of(strategy="fused"), *SHAPES)
    assert traced.plan == row.plan and traced.reason.startswith("asked for; plan tuned: 1.2 ms fused")


def test_noise_decides_nothing(measure):
    """Ties go to the cost model, whatever the samples: XLA here, and among plans its own."""
    (base,) = entwine_jax.explain(op_of(strategy="fused"), *SHAPES)
    for seed in range(5):
        noise = random.Random(seed)
        measure(lambda _, plan: 1e-3 * noise.uniform(0.985, 1.015))  # noqa: B023
        (row,) = entwine_jax.autotune(op_of(), *SHAPES, again=True)
        assert (row.strategy, row.plan) == ("xla", base.plan)
        # A clear difference shows through it.
        measure(lambda _, plan: noise.uniform(0.985, 1.015) * (1e-3 if plan and plan.tile_m == 16 else 1.2e-3))  # noqa: B023
        (row,) = entwine_jax.autotune(op_of(), *SHAPES, again=True)
        assert (row.strategy, row.plan.tile_m) == ("fused", 16)


def test_who_is_asked_first(measure, monkeypatch):
    """Argument, environment, what was measured, cost model."""
    measured = measure(lambda _, plan: 2e-3 if plan is None else 1e-3)
    entwine_jax.autotune(op_of(), *SHAPES)
    assert only(op_of(), *SHAPES).strategy == "fused"
    assert only(op_of(strategy="xla"), *SHAPES).reason == "asked for"
    assert only(op_of(config=Config(tuned=False)), *SHAPES).strategy == "xla"
    # A number of the plan: another one than what was measured.
    other = only(op_of(strategy="fused", config=Config(raster=3)), *SHAPES)
    assert (other.reason, other.plan.raster) == ("asked for", 3)
    assert only(op_of(config=Config(raster=3)), *SHAPES).strategy == "xla"
    monkeypatch.setenv("ENTWINE_STRATEGY", "xla")
    assert only(op_of(), *SHAPES).reason == "asked for"
    assert only(op_of(strategy="auto"), *SHAPES).strategy == "fused"
    monkeypatch.setenv("ENTWINE_TUNED", "0")
    assert only(op_of(strategy="auto"), *SHAPES).reason.startswith("on CPU devices auto means xla")
    assert only(op_of(strategy="auto", config=Config(tuned=True)), *SHAPES).strategy == "fused"
    monkeypatch.setenv("ENTWINE_TUNED", "2")
    with pytest.raises(ValueError, match="all_gather_matmul: ENTWINE_TUNED=2 must be 0 or 1"):
        only(op_of(), *SHAPES)
    monkeypatch.delenv("ENTWINE_TUNED")
    monkeypatch.delenv("ENTWINE_STRATEGY")
    before = len(measured.products)
    for options, status in (
        ({"strategy": "xla"}, "strategy='xla' was asked for"),
        ({"config": Config(few_rows=False)}, "its config sets the plan"),
    ):
        (row,) = entwine_jax.autotune(op_of(**options), *SHAPES, again=True)
        assert (row.status, row.strategy) == (status, None)
    assert len(measured.products) == before


def test_tracing_never_measures(measure):
    def never(*_):
        raise AssertionError("measured")

    measure(never)
    for strategy in ("auto", "fused"):
        f = op_of(strategy=strategy)
        entwine_jax.explain(f, *SHAPES)
        jax.block_until_ready(jax.jit(f)(*(jnp.ones(s.shape) for s in SHAPES)))
    assert [row.status for row in entwine_jax.autotune(op_of(), *SHAPES, dry_run=True)] == ["would be measured"]


def layer(x, w1, w2):
    """A shard_map around both ops, under auto, that JAX has jitted."""

    def rank(x, w1, w2):
        return entwine_jax.matmul_reduce_scatter(jnp.sin(entwine_jax.all_gather_matmul(x, w1, "t")), w2, "t")

    specs = (P("t"), P(None, "t"), P("t"))
    return jax.shard_map(rank, mesh=mesh_of((4,)), in_specs=specs, out_specs=P("t"))(x, w1, w2)


def test_it_finds_all_that_would_run(measure):
    """In scan, remat and gradients, and once each; also in what JAX has traced already, where auto meant XLA."""
    measured = measure(lambda _, plan: 1e-3)
    jitted = jax.jit(layer)
    args = jnp.ones((64, 32)), jnp.ones((32, 64)), jnp.ones((64, 32))
    jax.block_until_ready(jitted(*args))

    def loss(x, w1, w2):
        x, _ = lax.scan(jax.checkpoint(lambda x, _: (jitted(x, w1, w2), None)), x, length=3)
        return jnp.sum(x)

    found = entwine_jax.autotune(jax.grad(loss, (0, 1, 2)), *args)
    assert [(row.op, row.key.endswith(", gathers")) for row in found] == [
        (OPS[0], False),
        (OPS[1], False),
        (OPS[0], True),
        (OPS[1], True),
    ]
    assert [p.z is not None for p in measured.products] == [False, False, False, True]
    assert {row.status for row in found} == {"measured"}
    assert len({row.key for row in found}) == 4 and found[:1] == (found[0],)


@pytest.mark.parametrize("mode", MODES)
def test_global_arrays(mode, measure):
    """After partitioning; what was found is what the next trace gets, its backward pass too."""
    measure(lambda _, plan: 3e-3 if plan is None else 1e-3 if plan.tile_m == 16 else 2e-3)
    with setup(mode) as s:
        x, w_up, w_down = s.place(*operands())

        def mlp(x, w_up, w_down):
            return s.down(jnp.sin(s.up(x, w_up, strategy="auto")), w_down, strategy="auto")

        def gradient():
            f = s.spread(lambda *v: mlp(*v))
            return jax.grad(lambda *v: jnp.sum(f(*v) ** 2), (0, 1, 2))

        found = entwine_jax.autotune(gradient(), x, w_up, w_down)
        assert len(found) == 4 and all(row.strategy == "fused" for row in found)
        explained = entwine_jax.explain(gradient(), x, w_up, w_down)
        assert len(explained) == 4
        for matmul in explained:
            assert matmul.reason.startswith("tuned: 1 ms fused") and matmul.plan.tile_m == 16, matmul


def test_a_batch_by_vmap(measure):
    """Measured as it runs, and found by what tracing asks for."""
    measured = measure(lambda _, plan: 2e-3 if plan is None else 1e-3)

    def mapped(x, w):
        rank = jax.vmap(lambda x, w: entwine_jax.all_gather_matmul(x, w, "t"), (0, None))
        specs = P(None, "t", None), P(None, "t")
        return jax.shard_map(rank, mesh=mesh_of((4,)), in_specs=specs, out_specs=P(None, None, "t"))(x, w)

    x = jax.ShapeDtypeStruct((3, 64, 32), jnp.float32)
    (row,) = entwine_jax.autotune(mapped, x, SHAPES[1])
    assert measured.products[0].x.shape == (3, 16, 32) and row.asked != row.key
    assert only(lambda x, w: mapped(x, w), x, SHAPES[1]).strategy == "fused"


def test_time_is_bounded(measure):
    """What can't be tried in time isn't; what there is no time left for keeps the cost model's choice."""
    measured = measure(lambda _, plan: 1e-3)
    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 32), (32, 64), (64, 32))]
    found = entwine_jax.autotune(lambda *v: layer(*v), *args, seconds=1.5)
    assert [row.status for row in found] == ["measured", "there was no time left for it"]
    assert [plan and plan.tile_m for plan in measured.plans] == [None, 32]
    assert [m.reason.startswith("tuned") for m in entwine_jax.explain(lambda *v: layer(*v), *args)] == [True, False]
    measured.plans.clear()
    entwine_jax.autotune(lambda *v: layer(*v), *args, seconds=100, again=True)
    assert len(measured.plans) > 12
    with pytest.raises(ValueError, match="autotune: seconds=0 must be more than 0"):
        entwine_jax.autotune(layer, *args, seconds=0)


def test_what_fails_is_left_out(measure, monkeypatch):
    measured = measure(lambda _, plan: 1e-3)

    class Failing:
        def __init__(self, product):
            self.bench = measured(product)

        def sampler(self, plan):
            if plan is not None:
                raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no memory\nmore")
            return self.bench.sampler(plan)

    monkeypatch.setattr(_contest, "Bench", Failing)
    (row,) = entwine_jax.autotune(op_of(), *SHAPES)
    assert (row.strategy, row.plan, row.fused_ms) == ("xla", None, None) and None in row.tried.values()
    _tuned.forget()  # from the file
    assert only(op_of(), *SHAPES).reason.startswith("tuned: nothing fused, 1 ms on XLA")
    assert only(op_of(strategy="fused"), *SHAPES).strategy == "fused"


def test_what_cannot_be_fused_is_not_measured(measure):
    measured = measure(lambda _, plan: 1e-3)
    shapes = [jax.ShapeDtypeStruct(s.shape, jnp.int32) for s in SHAPES]
    (row,) = entwine_jax.autotune(op_of(), *shapes)
    assert "the host executor takes" in row.status and row.strategy is None and not measured.products
    (row,) = entwine_jax.autotune(op_of(size=1), *SHAPES)
    assert "a team of one" in row.status
    assert repr(entwine_jax.autotune(jnp.matmul, *SHAPES)) == "no collective matmul"


def test_several_products_at_once_are_not_measured(measure):
    measured = measure(lambda *_: 1e-3)
    mesh = mesh_of((4,))

    def both(x, w, v):
        return entwine_jax.all_gather_matmul(x, (w, v), "t", strategy="fused")

    both = jax.shard_map(both, mesh=mesh, in_specs=(P("t"), P(None, "t"), P(None, "t")), out_specs=P(None, "t"))
    (row,) = entwine_jax.autotune(both, *SHAPES, SHAPES[1])
    assert row.status == "several products at once aren't tuned" and row.key.startswith("2 products at once")
    assert measured.products == []


def test_a_race():
    """Everyone takes part in every round, in changing orders, until it is clearly slower."""
    seconds = {"a": 1e-3, "b": 1.005e-3, "c": 1.2e-3, "d": 2e-3, "e": 5e-3}
    order = []

    def sampler(name):
        def sample(repeats):
            order.append(name)
            return repeats * seconds[name]

        return sample

    found = _race.race({name: sampler(name) for name in seconds}, lambda: 0.0, 1.0, "seed")
    counts = {name: len(each) for name, each in found.seconds.items()}
    most, least = _race.MOST_ROUNDS, _race.LEAST_ROUNDS
    assert counts == {"a": most, "b": most, "c": least, "d": least, "e": 1}
    turns = [tuple(order[-2 * i : len(order) - 2 * i + 2]) for i in range(2, 10)]  # of the two that are left
    assert {frozenset(turn) for turn in turns} == {frozenset("ab")} and len(set(turns)) == 2
    assert found.choose(["b", "a", "c"]) == "b" and found.choose(["e", "d", "c"]) == "c"
    assert found.slower("c", "a") and not found.slower("b", "a")
    # Without time, the least that tells anything.
    found = _race.race({name: sampler(name) for name in "ab"}, lambda: 2.0, 1.0, "seed")
    assert {len(each) for each in found.seconds.values()} == {_race.LEAST_ROUNDS}
