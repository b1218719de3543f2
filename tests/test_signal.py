"""Strategy "signal" in the host executor: exact on teams and shapes; what it refuses; what auto makes of it on GPUs,
with and without peer access. With "resident": test_resident_and_signal.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, PUBLIC, assert_close, integers, mesh_of, product, spread
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _config, _core, _obstacles, _strategy, _team

GATHER, SCATTER, REDUCE = OPS
MANY = Config(tile_m=8, tile_n=16, group_waves=1)


def signal(op, x, w, axis="t", **options):
    return PUBLIC[op](x, w, axis, **{"strategy": "signal", **options})


def with_config(op, mesh, config, **options):
    return jax.jit(spread(lambda op, x, w, axis: signal(op, x, w, axis, config=config), op, mesh, **options))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", range(2, 9))
def test_exact(op, ranks):
    """Batches, tails, and tiles in one group and in many."""
    x, w = integers((2, 37 * ranks, 3 * ranks), 1), integers((3 * ranks, 35 * ranks), 2)
    for config in (None, MANY, Config(tile_m=16, tile_n=8, raster=3, workers=3)):
        f = with_config(op, mesh_of((ranks,)), config, leading=(None,))
        np.testing.assert_array_equal(np.asarray(f(x, w)), product(x, w))
        (found,) = entwine_jax.explain(f, x, w)
        assert found.strategy == "signal" and found.arena_bytes == 0 < found.scratch_bytes
        assert (len(found.groups) > 2) if config is MANY else len(found.groups) >= 1, found
        assert "scratch" in repr(entwine_jax.explain(f, x, w)) and "groups " in repr(entwine_jax.explain(f, x, w))


def test_several_products_are_as_many_calls():
    x, w, v = integers((40, 8), 1), integers((8, 12), 2), integers((12, 8), 3)

    def rank(x, w, v):
        (a, b), rows = entwine_jax.all_gather_matmul(x, (w, w), "t", strategy="signal", return_gathered=True)
        return entwine_jax.matmul_reduce_scatter((a, b), (v, v), "t", strategy="signal"), rows

    f = jax.shard_map(
        rank, mesh=mesh_of((2,)), in_specs=(P("t"), P(None, "t"), P("t")), out_specs=(P("t"), P(None, "t"))
    )
    y, rows = jax.jit(f)(x, w, v)
    np.testing.assert_array_equal(np.asarray(y), 2 * product(product(x, w), v))
    np.testing.assert_array_equal(np.asarray(rows)[:, :8], np.asarray(x))
    assert [found.strategy for found in entwine_jax.explain(f, x, w, v)] == ["signal"] * 4
    grads = jax.jit(jax.grad(lambda *each: jnp.sum(jnp.sin(f(*each)[0])), (0, 1, 2)))(x, w, v)
    wanted = jax.grad(lambda x, w, v: jnp.sum(jnp.sin(2 * (x @ w) @ v)), (0, 1, 2))(x, w, v)
    assert_close(grads, wanted)


@pytest.mark.parametrize(
    "options, x_dtype, match",
    [
        ({"preferred_element_type": jnp.float32}, jnp.bfloat16, "of x's dtype bfloat16, not float32"),
        ({"config": Config(few_rows=True)}, jnp.float32, "few_rows=True"),
        ({}, jnp.int32, "takes bfloat16, float16 and float32 operands, not int32"),
        (
            {"scales": (jnp.float32(1), jnp.float32(1)), "preferred_element_type": jnp.float32},
            jnp.float8_e4m3fn,
            "no float8 operands",
        ),
    ],
)
@pytest.mark.parametrize("op", OPS)
def test_refused(op, options, x_dtype, match):
    x, w = jnp.ones((8, 16), x_dtype), jnp.ones((16, 16), x_dtype)
    f = spread(lambda op, x, w, axis: signal(op, x, w, axis, **options), op, mesh_of((2,)))
    with pytest.raises(NotImplementedError, match=f"{op}: strategy='signal' can't run.*{match}.*or use strategy="):
        jax.jit(f)(x, w)


def test_settings(monkeypatch):
    with pytest.raises(ValueError, match=r"group_waves=0 must be an integer from 1 to 4096"):
        Config(group_waves=0)
    with pytest.raises(ValueError, match=r"comm_sms=-1 must be an integer from 0 to 4096"):
        Config(comm_sms=-1)
    monkeypatch.setenv("ENTWINE_STRATEGY", "signal")
    f = spread(lambda op, x, w, axis: PUBLIC[op](x, w, axis), SCATTER, mesh_of((2,)))
    (found,) = entwine_jax.explain(f, integers((8, 16), 1), integers((16, 16), 2))
    assert (found.strategy, found.reason) == ("signal", "asked for")


# On GPUs, as a CPU can show it.


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: True)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,))
    for name in ("peer_obstacle", "hopper_obstacle"):
        monkeypatch.setattr(_obstacles, name, lambda: None)


def choose(op=SCATTER, strategy="auto", dtype=jnp.bfloat16, m=8192, n=8192, k=3584, size=2, config=None, **request):
    team = _team.Team(("t",), size, tuple(range(size)), (), (), "cuda")
    made = _strategy.Request(op, team, False, jnp.dtype(dtype), None, _config.resolve(op, strategy, config), **request)
    x, w = jax.ShapeDtypeStruct((1, m // size if op == GATHER else m, k), dtype), jax.ShapeDtypeStruct((k, n), dtype)
    return _strategy.choose(made, x, w)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("op", OPS)
def test_plans_on_gpus(op):
    choice = choose(op, "signal")
    assert choice.strategy == choice.plan.strategy == "signal" and choice.plan.target == "sm90" and not choice.plan.far
    assert (choice.plan.tile_m, choice.plan.tile_n) in _core.SIGNAL_TILES
    assert choice.plan.engines and choice.plan.comm_sms == 0
    assert choose(op, "signal", size=8).plan.engines == (op != REDUCE), "to all seven, or twice around by NCCL"
    plan = choose(op, "signal", config=Config(comm_sms=20, group_waves=2, tile_m=256, tile_n=128)).plan
    assert (plan.comm_sms, plan.engines, plan.group_waves, plan.tile_n) == (20, False, 2, 128)
    assert choose(op, "signal", config=Config(comm_sms=0)).plan.engines
    assert choose(op).strategy == "fused", "auto has no reason to take it"
    for options, match in (
        ({"config": Config(tile_m=128, tile_n=128)}, "tile_n=128 is none of its tiles"),
        ({"m": 128}, "128 rows are too few .*strategy='fused' has kernels"),
        ({"dtype": jnp.float32}, "take bfloat16 and float16 operands"),
        ({"n": 129}, "not a multiple of 16"),
    ):
        with pytest.raises(NotImplementedError, match=f"strategy='signal' can't run.*{match}"):
            choose(op, "signal", **options)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("op", OPS)
def test_without_peer_access(op, monkeypatch):
    """Named, it runs; auto takes it where it is predicted to win over XLA, which goes through host memory too."""
    why = "device 0 can't access the memory of device 1"
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: why)
    plan = choose(op, "signal").plan
    assert plan.far and not plan.engines and plan.comm_sms > 0
    with pytest.raises(NotImplementedError, match=f"{why}, which the copy engines of config's comm_sms=0 need"):
        choose(op, "signal", config=Config(comm_sms=0))
    choice = choose(op, k=8192)
    assert choice.strategy == "signal" and choice.plan.far and why in choice.reason and "us on XLA" in choice.reason
    assert choose(op, m=64).strategy == "xla" and why in choose(op, m=64).reason
    assert choose(op, dtype=jnp.float32).strategy == "xla"
    with pytest.raises(NotImplementedError, match=f"strategy='fused' can't run.*{why}"):
        choose(op, "fused")
    monkeypatch.setattr(_obstacles, "hopper_obstacle", lambda: "device 0 has compute capability 8.0")
    assert choose(op, k=8192).strategy == "xla"
    with pytest.raises(NotImplementedError, match=r"strategy='signal' can't run.*capability 8\.0"):
        choose(op, "signal")


def test_the_switch_for_tests(monkeypatch):
    monkeypatch.setenv("ENTWINE_PEER_ACCESS", "0")
    _obstacles.peer_obstacle.cache_clear()
    try:
        assert "ENTWINE_PEER_ACCESS=0" in _obstacles.peer_obstacle()
    finally:
        _obstacles.peer_obstacle.cache_clear()


def test_tuned(measure):
    """Where it is measured to be the fastest, auto takes it from then on, and the file says so."""
    f = lambda **o: spread(lambda op, x, w, axis: PUBLIC[op](x, w, axis, **o), SCATTER, mesh_of((4,)))  # noqa: E731
    shapes = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def seconds(_, plan):
        if plan is None:
            return 3e-3
        return 2e-3 if plan.strategy != "signal" else 1e-3 / (1 + (plan.group_waves == 2))

    measured = measure(seconds)
    (row,) = entwine_jax.autotune(f(), *shapes)
    assert (row.strategy, row.signal_plan.group_waves) == ("signal", 2) and row.plan.strategy == "fused"
    assert row.ms == row.signal_ms == pytest.approx(0.5) and row.fused_ms == pytest.approx(2)
    assert "groups of 2 waves" in row.shown
    entwine_jax._tuned.forget()  # from the file
    for strategy, plan in (("auto", row.signal_plan), ("signal", row.signal_plan), ("fused", row.plan)):
        (found,) = entwine_jax.explain(f(strategy=strategy), *shapes)
        assert found.plan == plan and "0.5 ms as signal, 3 ms on XLA" in found.reason
    (again,) = entwine_jax.autotune(f(), *shapes)
    assert again.status.startswith("known already") and again.signal_plan == row.signal_plan
    assert not any(plan and plan.strategy == "signal" for plan in tried(measured, f(strategy="fused"), shapes))
    assert not any(plan and plan.strategy == "fused" for plan in tried(measured, f(strategy="signal"), shapes))


def tried(measured, f, shapes):
    measured.plans.clear()
    entwine_jax.autotune(f, *shapes, again=True)
    return measured.plans
