"""Strategy "resident" in the host executor: the same bits as "fused" on teams and shapes, by however few workers; what
it refuses; and what is planned, predicted and tuned of it. With "signal": test_resident_and_signal.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, PUBLIC, assert_close, integers, mesh_of, normal, product, spread
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _candidates, _config, _core, _obstacles, _strategy, _team

GATHER, SCATTER, REDUCE = OPS
SMALL = Config(tile_m=8, tile_n=16)


def resident(op, x, w, axis="t", **options):
    return PUBLIC[op](x, w, axis, **{"strategy": "resident", **options})


def with_config(op, mesh, config, **options):
    return jax.jit(spread(lambda op, x, w, axis: resident(op, x, w, axis, config=config), op, mesh, **options))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_exact(op, ranks):
    """Batches and tails; one worker a rank, as many movers as workers, and more."""
    x, w = integers((2, 37 * ranks, 3 * ranks), 1), integers((3 * ranks, 35 * ranks), 2)
    for config in (None, SMALL, Config(tile_m=16, tile_n=8, raster=3, workers=3, comm_sms=4, lead=0)):
        f = with_config(op, mesh_of((ranks,)), config, leading=(None,))
        np.testing.assert_array_equal(np.asarray(f(x, w)), product(x, w))
    (found,) = entwine_jax.explain(f, x, w)
    assert found.strategy == "resident" and found.plan.movers == 2 and "movers 2" in repr(entwine_jax.explain(f, x, w))
    as_fused = lambda op, x, w, axis: PUBLIC[op](x, w, axis, strategy="fused", config=config)  # noqa: E731
    fused = spread(as_fused, op, mesh_of((ranks,)), leading=(None,))
    (other,) = entwine_jax.explain(fused, x, w)
    twice = found.arena_bytes > other.arena_bytes  # what is yet to be moved
    assert twice == (op != GATHER), (found.arena_bytes, other.arena_bytes)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=str)
def test_the_bits_of_fused(op, dtype):
    """The same sums in the same order: of random numbers too."""
    x, w = normal((4 * 41, 24), 1).astype(dtype), normal((24, 4 * 30), 2).astype(dtype)
    bits = [
        np.asarray(jax.jit(spread(lambda op, x, w, axis: PUBLIC[op](x, w, axis, **o), op, mesh_of((4,))))(x, w))  # noqa: B023
        for o in ({"strategy": "fused"}, {"strategy": "resident", "config": Config(tile_m=16, workers=2)})
    ]
    np.testing.assert_array_equal(*bits)


def test_several_products_in_one_call():
    x, w, v = integers((40, 8), 1), integers((8, 12), 2), integers((12, 8), 3)

    def rank(x, w, v):
        (a, b), rows = entwine_jax.all_gather_matmul(x, (w, w), "t", strategy="resident", return_gathered=True)
        return entwine_jax.matmul_reduce_scatter((a, b), (v, v), "t", strategy="resident"), rows

    f = jax.shard_map(
        rank, mesh=mesh_of((2,)), in_specs=(P("t"), P(None, "t"), P("t")), out_specs=(P("t"), P(None, "t"))
    )
    y, rows = jax.jit(f)(x, w, v)
    np.testing.assert_array_equal(np.asarray(y), 2 * product(product(x, w), v))
    np.testing.assert_array_equal(np.asarray(rows)[:, :8], np.asarray(x))
    assert [found.strategy for found in entwine_jax.explain(f, x, w, v)] == ["resident"] * 2
    backward = jax.grad(lambda *each: jnp.sum(jnp.sin(f(*each)[0])), (0, 1, 2))
    wanted = jax.grad(lambda x, w, v: jnp.sum(jnp.sin(2 * (x @ w) @ v)), (0, 1, 2))(x, w, v)
    assert_close(jax.jit(backward)(x, w, v), wanted)
    assert {found.strategy for found in entwine_jax.explain(backward, x, w, v)} == {"resident"}


def test_gated():
    x, gate, up = integers((2 * 21, 8), 1), integers((8, 2 * 16), 2), integers((8, 2 * 16), 3)

    def rank(x, gate, up):
        return entwine_jax.all_gather_matmul(
            x, (gate, up), "t", gated=True, activation="relu", strategy="resident", config=SMALL
        )

    f = jax.shard_map(rank, mesh=mesh_of((2,)), in_specs=(P("t"), P(None, "t"), P(None, "t")), out_specs=P(None, "t"))
    wanted = np.maximum(product(x, gate), 0) * product(x, up)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, gate, up)), wanted)
    assert [found.strategy for found in entwine_jax.explain(f, x, gate, up)] == ["resident"]


@pytest.mark.parametrize("op", OPS)
def test_float8(op):
    x, w = (integers(shape, i) for i, shape in enumerate(((4 * 24, 32), (32, 4 * 16))))
    one = jnp.float32(1)
    small = [jnp.clip(v, -1, 1).astype(jnp.float8_e4m3fn) for v in (x, w)]
    f = jax.jit(
        spread(
            lambda op, x, w, axis: resident(op, x, w, axis, scales=(one, one), preferred_element_type=jnp.float32),
            op,
            mesh_of((4,)),
        )
    )
    np.testing.assert_array_equal(np.asarray(f(*small)), product(*(v.astype(jnp.float32) for v in small)))
    (found,) = entwine_jax.explain(f, *small)
    assert found.strategy == found.plan.strategy == "resident"


def test_refused_and_settings(monkeypatch):
    few = lambda op, x, w, axis: resident(op, x, w, axis, config=Config(few_rows=True))  # noqa: E731
    x, w = jnp.ones((8, 16)), jnp.ones((16, 16))
    with pytest.raises(NotImplementedError, match=r"strategy='resident' can't run.*few_rows=True is for .*'fused'"):
        jax.jit(spread(few, SCATTER, mesh_of((2,))))(x, w)
    monkeypatch.setenv("ENTWINE_STRATEGY", "resident")
    f = spread(lambda op, x, w, axis: PUBLIC[op](x, w, axis), SCATTER, mesh_of((2,)))
    (found,) = entwine_jax.explain(f, x, w)
    assert (found.strategy, found.reason) == ("resident", "asked for")


# On GPUs, as a CPU can show it.


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: True)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,))
    for name in ("peer_obstacle", "hopper_obstacle"):
        monkeypatch.setattr(_obstacles, name, lambda: None)


def choose(op=SCATTER, strategy="resident", m=8192, n=8192, k=3584, config=None, **request):
    team = _team.Team(("t",), 2, (0, 1), (), (), "cuda")
    made = _strategy.Request(
        op, team, False, jnp.dtype("bfloat16"), None, _config.resolve(op, strategy, config), **request
    )
    shapes = (1, m // 2 if op == GATHER else m, k), (k, n)
    return made, _strategy.choose(made, *(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("op", OPS)
def test_plans_on_gpus(op, monkeypatch):
    request, choice = choose(op)
    assert choice.strategy == choice.plan.strategy == "resident" and choice.plan.target == "sm90"
    assert (choice.plan.tile_m, choice.plan.tile_n) in _core.sm90_tiles(out_bytes=2) and 2 * choice.plan.movers in (
        2,
        4,
        6,
        8,
        12,
        16,
    )
    assert not choose(op, m=16)[1].plan.few_rows, "few rows are tiles"
    for sms, movers in ((1, 1), (7, 4), (16, 8)):
        assert choose(op, config=Config(comm_sms=sms))[1].plan.movers == movers
    assert choose(op, "auto")[1].strategy == "fused", "slower wherever both were measured"
    tried = _candidates.residents(choice.plan)
    assert tried[0] == choice.plan and len(tried) <= 3
    shown = {_candidates.show(op, plan, False) for plan in (*tried, *_candidates.numbers(request, choice.plan))}
    assert len(shown) == len({*tried, *_candidates.numbers(request, choice.plan)})
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: "GPU 1 can't read the memory of GPU 0")
    with pytest.raises(NotImplementedError, match=r"strategy='resident' can't run.*memory of GPU 0"):
        choose(op)


@pytest.mark.parametrize("op", OPS)
def test_predicted(op):
    """A link that movers fill, and no more; and one mover is slower than enough."""
    n, k = (1024, 8192) if op == GATHER else (8192, 1024)
    cost = lambda **config: entwine_jax.cost_model(op, 8192, n, k, 2, config=Config(**config))["resident"]  # noqa: E731
    best, one, eight = cost(), cost(comm_sms=2), cost(comm_sms=8)
    assert best.strategy == "resident" and best.plan.movers >= 1
    assert best.us < one.us and eight.us < one.us
    assert best.us >= max(best.link_us, 2 * 8192 * 8192 * 1024 / 790e6), "no schedule beats these"
    with pytest.raises(ValueError, match="mover_bytes_per_us must be"):
        entwine_jax.cost_model(op, 8192, 8192, 1024, 2, machine={"mover_bytes_per_us": 0})


def test_tuned(measure):
    """Where it is measured to be the fastest, auto takes it from then on, and the file says so."""
    f = lambda **o: spread(lambda op, x, w, axis: PUBLIC[op](x, w, axis, **o), SCATTER, mesh_of((4,)))  # noqa: E731
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def seconds(_, plan):
        if plan is None:
            return 3e-3
        return 2e-3 if plan.strategy != "resident" else 1e-3 / (1 + (plan.movers == 2))

    measured = measure(seconds)
    (row,) = entwine_jax.autotune(f(), *shapes)
    assert (row.strategy, row.resident_plan.movers) == ("resident", 2) and row.plan.strategy == "fused"
    assert row.ms == row.resident_ms == pytest.approx(0.5) and row.fused_ms == pytest.approx(2)
    assert "2 movers" in row.shown
    entwine_jax._tuned.forget()  # from the file
    for strategy, plan in (("auto", row.resident_plan), ("resident", row.resident_plan), ("fused", row.plan)):
        (found,) = entwine_jax.explain(f(strategy=strategy), *shapes)
        assert found.plan == plan and "0.5 ms resident, 3 ms on XLA" in found.reason
    (again,) = entwine_jax.autotune(f(), *shapes)
    assert again.status.startswith("known already") and again.resident_plan == row.resident_plan
    for strategy in ("fused", "signal", "resident"):
        measured.plans.clear()
        entwine_jax.autotune(f(strategy=strategy), *shapes, again=True)
        assert {plan.strategy for plan in measured.plans if plan} == {strategy}
