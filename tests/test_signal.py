"""Strategy "signal" in the host executor: exact on teams and shapes, under stalls, with gradients, in JAX's modes; what
it refuses; and what auto makes of it on GPUs, with and without peer access."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, operands, setup
from helpers import OPS, PUBLIC, assert_close, in_lax, integers, mesh_of, normal, product, specs, spread
from jax import lax
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


@pytest.mark.parametrize("op", OPS)
def test_two_axes_and_permuted_devices(op):
    mesh = mesh_of((2, 2, 2), ("a", "d", "b"), [3, 1, 0, 2, 7, 6, 4, 5])
    x, w = integers((2, 68, 12), 1), integers((12, 20), 2)
    rank = lambda op, x, w, axis: signal(op, x, w, axis, config=MANY)  # noqa: E731
    y = jax.jit(spread(rank, op, mesh, axis=("b", "a"), leading=("d",)))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_stalls(op):
    """With one worker a rank and more, beside fused calls on the same arenas."""
    inputs = [(integers((4 * 40, 16), i), integers((16, 4 * 36), i + 9)) for i in range(3)]
    for seed in range(4):
        config = Config(workers=1 + seed % 2 * 2, stall_us=300, stall_seed=seed, group_waves=1 + seed % 3, tile_m=16)
        both = jax.jit(
            spread(
                lambda op, x, w, axis: (
                    signal(op, x, w, axis, config=config)  # noqa: B023
                    + PUBLIC[op](x, w, axis, strategy="fused")
                ),
                op,
                mesh_of((4,)),
            )
        )
        for y, (x, w) in [(both(x, w), (x, w)) for x, w in inputs]:
            np.testing.assert_array_equal(np.asarray(y), 2 * product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_missing_rank(op):
    x, w = integers((64, 12), 1), integers((12, 64), 2)

    def rank(op, x, w, axis):
        work = lambda: signal(op, x, w, axis, config=Config(timeout_s=0.3))  # noqa: E731
        y = jax.eval_shape(work)
        return lax.cond(lax.axis_index(axis) == 2, lambda: jnp.zeros(y.shape, y.dtype), work)

    broken = jax.jit(spread(rank, op, mesh_of((4,)), check_vma=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{op}: rank [013] waited 0.3 s for rank 2 at tile"):
        broken(x, w).block_until_ready()
    np.testing.assert_array_equal(np.asarray(with_config(op, mesh_of((4,)), None)(x, w)), product(x, w))


def finished(op, matmul, x, w, bias, axis):
    if matmul is signal:
        return signal(op, x, w, axis, bias=bias, activation="silu")
    return jax.nn.silu(in_lax(op, x, w, axis) + bias)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(op, check_vma):
    """First and second, with bias and activation, of float32."""
    x, w, bias = normal((2, 12, 8), 1), normal((8, 12), 2), normal((12,), 3)
    x_spec, w_spec, y_spec = specs(op, leading=(None,))
    of_bias = P("t") if op == GATHER else P()

    def loss(matmul):
        f = jax.shard_map(
            lambda x, w, b: finished(op, matmul, x, w, b, "t"),
            mesh=mesh_of((4,)),
            in_specs=(x_spec, w_spec, of_bias),
            out_specs=y_spec,
            check_vma=check_vma,
        )
        return lambda *v: jnp.sum(jnp.sin(f(*v)))

    def second(matmul):
        gradient = jax.grad(loss(matmul), (0, 1, 2))
        return jax.grad(lambda *v: sum(jnp.sum(jnp.cos(g)) for g in gradient(*v)), (0, 1, 2))

    for order in (lambda m: jax.value_and_grad(loss(m), (0, 1, 2)), second):
        assert_close(*(jax.jit(order(matmul))(x, w, bias) for matmul in (signal, in_lax)), 1e-4)


def test_gathered():
    def rank(x, w):
        return signal(GATHER, x, w, return_gathered=True, config=MANY)

    for ranks, batch in ((2, ()), (5, (3,))):
        x, w = integers((*batch, 41 * ranks, 12), 1), integers((12, 5 * ranks), 2)
        leading = (None,) * len(batch)
        in_specs, columns = (P(*leading, "t"), P(None, "t")), P(*leading, None, "t")
        f = jax.shard_map(rank, mesh=mesh_of((ranks,)), in_specs=in_specs, out_specs=(columns, columns))
        y, rows = jax.jit(f)(x, w)
        np.testing.assert_array_equal(np.asarray(y), product(x, w))
        for copy in np.split(np.asarray(rows), ranks, axis=-1):
            np.testing.assert_array_equal(copy, np.asarray(x))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(op, dims):
    x = integers((3, 40, 16), 1) if dims[0] == 0 else integers((40, 16), 1)
    w = integers((3, 16, 20), 2) if dims[1] == 0 else integers((16, 20), 2)
    x_spec, w_spec, y_spec = specs(op)
    lead = lambda spec, dim: spec if dim is None else P(None, *spec)  # noqa: E731
    f = jax.shard_map(
        jax.vmap(lambda x, w: signal(op, x, w), dims),
        mesh=mesh_of((2,)),
        in_specs=(lead(x_spec, dims[0]), lead(w_spec, dims[1])),
        out_specs=P(None, *y_spec),
    )
    wanted = np.einsum(f"{'b' * (dims[0] == 0)}mk,{'b' * (dims[1] == 0)}kn->bmn", x, w)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w)), wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_remat_and_scan(check_vma):
    x, layers = normal((8, 12), 1), (normal((3, 12, 16), 2) * 0.3, normal((3, 16, 12), 3) * 0.3)

    def loss(matmul):
        @jax.checkpoint
        def layer(x, weights):
            h = jnp.tanh(matmul(GATHER, x, weights[0], "t"))
            return x + matmul(SCATTER, h, weights[1], "t"), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(layer, x, layers)[0],
            mesh=mesh_of((4,)),
            in_specs=(P("t"), (P(None, None, "t"), P(None, "t"))),
            out_specs=P("t"),
            check_vma=check_vma,
        )
        return lambda x, layers: jnp.sum(jnp.square(f(x, layers)))

    assert_close(*(jax.jit(jax.value_and_grad(loss(m), (0, 1)))(x, layers) for m in (signal, in_lax)))


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


@pytest.mark.parametrize("mode", MODES)
def test_global_view(mode):
    with setup(mode) as s:
        x, w_up, w_down = s.place(*operands())

        def loss(strategy):
            f = s.spread(lambda x, a, b: s.down(jnp.sin(s.up(x, a, strategy=strategy)), b, strategy=strategy))
            return lambda *v: jnp.sum(f(*v) ** 2)

        grads = [jax.jit(jax.value_and_grad(loss(each), (0, 1, 2)))(x, w_up, w_down) for each in ("signal", "xla")]
        assert_close(*grads)
        found = entwine_jax.explain(jax.grad(loss("signal"), (0, 1, 2)), x, w_up, w_down)
        assert len(found) == 4 and {each.strategy for each in found} == {"signal"}


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
    for name in ("comm_sms", "group_waves"):
        with pytest.raises(ValueError, match=f"{name}=0 must be an integer from 1 to 4096"):
            Config(**{name: 0})
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
    assert (choice.plan.tile_m, choice.plan.tile_n) in _core.SIGNAL_TILES and 8 <= choice.plan.comm_sms <= 32
    plan = choose(op, "signal", config=Config(comm_sms=20, group_waves=2, tile_m=256, tile_n=128)).plan
    assert (plan.comm_sms, plan.group_waves, plan.tile_n) == (20, 2, 128)
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
    assert choose(op, "signal").plan.far
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
