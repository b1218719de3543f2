"""Strategy "resident" in the host executor: the same bits as "fused" on teams and shapes, by however few workers and
under stalls, with gradients and in JAX's modes; what it refuses; and what is planned, predicted and tuned of it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, operands, setup
from helpers import OPS, PUBLIC, assert_close, in_lax, integers, mesh_of, normal, product, specs, spread
from jax import lax
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


@pytest.mark.parametrize("op", OPS)
def test_two_axes_and_permuted_devices(op):
    mesh = mesh_of((2, 2, 2), ("a", "d", "b"), [3, 1, 0, 2, 7, 6, 4, 5])
    x, w = integers((2, 68, 12), 1), integers((12, 20), 2)
    rank = lambda op, x, w, axis: resident(op, x, w, axis, config=SMALL)  # noqa: E731
    y = jax.jit(spread(rank, op, mesh, axis=("b", "a"), leading=("d",)))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_stalls(op):
    """With one worker a rank and more, beside fused calls on the same arenas."""
    inputs = [(integers((4 * 40, 16), i), integers((16, 4 * 36), i + 9)) for i in range(3)]
    for seed in range(4):
        config = Config(workers=1 + seed, stall_us=300, stall_seed=seed, comm_sms=2 + 2 * (seed % 2), tile_m=16)
        both = jax.jit(
            spread(
                lambda op, x, w, axis: (
                    resident(op, x, w, axis, config=config)  # noqa: B023
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
        work = lambda: resident(op, x, w, axis, config=Config(timeout_s=0.3))  # noqa: E731
        y = jax.eval_shape(work)
        return lax.cond(lax.axis_index(axis) == 2, lambda: jnp.zeros(y.shape, y.dtype), work)

    broken = jax.jit(spread(rank, op, mesh_of((4,)), check_vma=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{op}: rank [013] waited 0.3 s for rank 2 at tile"):
        broken(x, w).block_until_ready()
    np.testing.assert_array_equal(np.asarray(with_config(op, mesh_of((4,)), None)(x, w)), product(x, w))


def finished(op, matmul, x, w, bias, axis):
    if matmul is resident:
        return resident(op, x, w, axis, bias=bias, activation="silu")
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
        assert_close(*(jax.jit(order(matmul))(x, w, bias) for matmul in (resident, in_lax)), 1e-4)
    found = entwine_jax.explain(jax.grad(loss(resident), (0, 1, 2)), x, w, bias)
    assert {each.strategy for each in found} <= {"resident", "xla"} and found[0].strategy == "resident"


def test_gathered():
    def rank(x, w):
        return resident(GATHER, x, w, return_gathered=True, config=SMALL)

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
def test_vmap(op):
    x, w = integers((3, 40, 16), 1), integers((3, 16, 20), 2)
    x_spec, w_spec, y_spec = specs(op)
    f = jax.shard_map(
        jax.vmap(lambda x, w: resident(op, x, w)),
        mesh=mesh_of((2,)),
        in_specs=(P(None, *x_spec), P(None, *w_spec)),
        out_specs=P(None, *y_spec),
    )
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w)), np.einsum("bmk,bkn->bmn", x, w))


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

    assert_close(*(jax.jit(jax.value_and_grad(loss(m), (0, 1)))(x, layers) for m in (resident, in_lax)))


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


@pytest.mark.parametrize("mode", MODES)
def test_global_view(mode):
    with setup(mode) as s:
        x, w_up, w_down = s.place(*operands())

        def loss(strategy):
            f = s.spread(lambda x, a, b: s.down(jnp.sin(s.up(x, a, strategy=strategy)), b, strategy=strategy))
            return lambda *v: jnp.sum(f(*v) ** 2)

        grads = [jax.jit(jax.value_and_grad(loss(each), (0, 1, 2)))(x, w_up, w_down) for each in ("resident", "xla")]
        assert_close(*grads)
        found = entwine_jax.explain(jax.grad(loss("resident"), (0, 1, 2)), x, w_up, w_down)
        assert {each.strategy for each in found} == {"resident"}


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
    assert (choice.plan.tile_m, choice.plan.tile_n) in _core.SM90_TILES and 2 * choice.plan.movers in (
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
    assert choose(op, "auto")[1].strategy == "fused", "nobody has measured it"
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
