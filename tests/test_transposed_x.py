"""transpose_x: x stored (..., k, rows), read as it lies; its gradient lies so too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    OPS,
    PUBLIC,
    assert_close,
    assert_gradients,
    assert_vmapped,
    fused,
    in_lax,
    integers,
    mesh_of,
    normal,
    product,
    specs,
)
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _config, _core, _obstacles, _strategy, _team

SUMS = OPS[1:]
SCATTER, REDUCE = SUMS


def ours(op, x, w, axis, **options):
    return fused(op, x, w, axis, transpose_x=True, **options)


def lines(op, x, w, axis):
    return in_lax(op, jnp.swapaxes(x, -1, -2), w, axis)


def spread(rank, op, mesh, leading=(), check_vma=True, transpose_w=False):
    x, w, y = specs(op, leading=leading)
    local = functools.partial(rank, op, axis="t", **({"transpose_w": True} if transpose_w else {}))
    specs_in = P(*leading, *x[:-3:-1]), P(*w[::-1]) if transpose_w else w
    return jax.shard_map(local, mesh=mesh, in_specs=specs_in, out_specs=y, check_vma=check_vma)


def turned(x):
    return np.swapaxes(x, -1, -2)


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_exact(op, ranks):
    for rows, k, n in ((1, 3, 1), (33, 7, 40), (70, 5, 33)):
        for lead in ((), (2,), (2, 3)):
            x, w = integers((*lead, k * ranks, rows * ranks), 1), integers((k * ranks, n), 2)
            y = jax.jit(spread(ours, op, mesh_of((ranks,)), (None,) * len(lead)))(x, w)
            np.testing.assert_array_equal(np.asarray(y), product(turned(x), w))


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("strategy", ["fused", "resident", "signal", "xla"])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_strategies(op, strategy, transpose_w):
    """All of them take it, beside a transposed w too; an all-reduce any number of rows."""
    x, w = integers((2, 12, 75 if op == REDUCE else 76), 1, jnp.bfloat16), integers((12, 37), 2, jnp.bfloat16)
    config = None if strategy == "xla" else Config(tile_m=8, tile_n=16, workers=2)
    rank = functools.partial(ours, strategy=strategy, config=config, preferred_element_type=jnp.bfloat16)
    f = spread(rank, op, mesh_of((4,)), (None,), transpose_w=transpose_w)
    y = jax.jit(f)(x, w.T if transpose_w else w)
    np.testing.assert_array_equal(np.asarray(y, np.float64), product(turned(x), w))
    (found,) = entwine_jax.explain(f, x, w.T if transpose_w else w)
    assert found.strategy == strategy and found.transpose_x and found.transpose_w == transpose_w


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_bias_and_activation(op, activation):
    x, w, b = normal((8, 12), 1), normal((8, 10), 2), normal((10,), 3)
    gelu = functools.partial(jax.nn.gelu, approximate=False)

    def loss(rank):
        x_spec, w_spec, y = specs(op)
        f = jax.shard_map(rank, mesh=mesh_of((4,)), in_specs=(P(*x_spec[::-1]), w_spec, P()), out_specs=y)
        return lambda *args: (jnp.sum(jnp.sin(f(*args))), f(*args))

    def by_lax(x, w, b):
        return (jax.nn.relu if activation == "relu" else gelu)(lines(op, x, w, "t") + b)

    rank = lambda x, w, b: ours(op, x, w, "t", bias=b, activation=activation)  # noqa: E731
    got, wanted = (jax.jit(jax.grad(loss(r), (0, 1, 2), has_aux=True))(x, w, b) for r in (rank, by_lax))
    assert_close(got, wanted)


@pytest.mark.each_value
@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("strategy", ["fused", "resident", "signal", "xla"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(op, strategy, check_vma):
    mesh, x, w = mesh_of((2, 4), ("d", "t")), normal((2, 12, 8), 1), normal((12, 16), 2)

    def loss(rank):
        f = spread(rank, op, mesh, ("d",), check_vma)
        return lambda x, w: jnp.sum(jnp.sin(f(x, w)))

    rank = functools.partial(ours, strategy=strategy)
    # Under "xla" the rest is JAX's own.
    assert_gradients(loss(rank), loss(lines), x, w, every=strategy != "xla")


@pytest.mark.parametrize("transpose_w", [False, True])
def test_a_backward_pass_is_one_call(transpose_w):
    """dx by an all-gather of dy, which dw takes from it."""
    x, w = normal((12, 8), 1), normal((12, 16), 2)
    f = spread(ours, SCATTER, mesh_of((2,)), transpose_w=transpose_w)
    loss = jax.grad(lambda x, w: jnp.sum(jnp.sin(f(x, w))), (0, 1))
    forward, backward = entwine_jax.explain(loss, x, w.T if transpose_w else w)
    assert forward.transpose_x and not backward.transpose_x
    assert backward.op == OPS[0] and backward.gathered and backward.transpose_w != transpose_w


@pytest.mark.each_value
@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("x_dim, w_dim", [(0, None), (2, None), (None, 2), (0, 1)])
def test_vmap(op, x_dim, w_dim):
    x, w = normal((3, 6, 8), 1), normal((3, 6, 10), 2)
    x_spec, w_spec, y_spec = specs(op)
    assert_vmapped(op, ours, lines, (x, w), (x_dim, w_dim), (P(*x_spec[::-1]), w_spec, y_spec))


@pytest.mark.parametrize("op", SUMS)
def test_scan_and_remat(op):
    xs, w = normal((3, 6, 8), 1), normal((6, 10), 2)

    def loss(rank):
        def steps(xs, w):
            step = jax.checkpoint(lambda total, x: (total + jnp.sum(jnp.sin(rank(op, x, w, "t"))), None))
            start = lax.pcast(jnp.float32(0), "t", to="varying") if op == SCATTER else jnp.float32(0)
            total, _ = lax.scan(step, start, xs)
            return total[None]

        x_spec, w_spec, _ = specs(op)
        out = P("t") if op == SCATTER else P(None)
        f = jax.shard_map(steps, mesh=mesh_of((2,)), in_specs=(P(None, *x_spec[::-1]), w_spec), out_specs=out)
        return lambda *args: jnp.sum(f(*args))

    got, wanted = (jax.jit(jax.value_and_grad(loss(r), (0, 1)))(xs, w) for r in (ours, lines))
    assert_close(got, wanted)


@pytest.mark.parametrize("op", SUMS)
def test_a_weight_gradient_of_data_parallel_training(op):
    """Tokens over the axis, whose ranks share out dw or all have it."""
    x, dy = normal((24, 6), 1), normal((24, 10), 2)
    out = P("d") if op == SCATTER else P()
    f = jax.shard_map(
        lambda x, dy: PUBLIC[op](x, dy, "d", transpose_x=True, strategy="fused"),
        mesh=mesh_of((2,), ("d",)),
        in_specs=P("d"),
        out_specs=out,
    )
    assert_close(jax.jit(f)(x, dy), x.T @ dy)


@pytest.mark.parametrize("op", SUMS)
def test_explain_and_no_copy(op):
    f = spread(ours, op, mesh_of((2,)))
    x, w = normal((12, 8), 1), normal((12, 16), 2)
    (found,) = entwine_jax.explain(f, x, w)
    assert found.transpose_x and found.op == op and found.x == (1, 6, 8) and found.reason == "asked for"
    assert "float32[6,8].T" in repr(entwine_jax.explain(f, x, w))
    assert "stablehlo.transpose" not in jax.jit(f).lower(x, w).as_text()


@pytest.mark.parametrize("op", SUMS)
def test_batches(op):
    """Of a reduce-scatter they are read as they lie; of an all-reduce they are laid side by side, which is said."""
    f, x, w = spread(ours, op, mesh_of((2,)), (None,)), normal((3, 12, 8), 1), normal((12, 16), 2)
    (found,) = entwine_jax.explain(f, x, w)
    copied = "x's batches are laid side by side first, a copy of 576 bytes" in found.reason
    assert copied == (op == REDUCE) == ("stablehlo.transpose" in jax.jit(f).lower(x, w).as_text())


@pytest.mark.parametrize("op", SUMS)
def test_bad_input(op):
    x, w = np.ones((6, 4), np.float32), np.ones((6, 8), np.float32)

    def call(x, w, **options):
        jax.shard_map(
            lambda x, w: PUBLIC[op](x, w, "t", **{"transpose_x": True, **options}),
            mesh=mesh_of((2,)),
            in_specs=P(),
            out_specs=P(),
        )(x, w)

    scales = {"scales": (jnp.float32(1), jnp.float32(1)), "preferred_element_type": jnp.float32}
    float8 = (x.astype(jnp.float8_e4m3fn), w.astype(jnp.float8_e4m3fn))
    for args, options, error, match in (
        (
            (x.T, w),
            {},
            TypeError,
            r"last dimension but one of x \(4, 6\) has size 4 but the first of w \(6, 8\) has size 6.*x would fit "
            "without transpose_x=True",
        ),
        ((x, w), {"transpose_x": False}, TypeError, r"last dimension of x .*x's transpose would fit: pass transpose_x"),
        ((x[0], w), {}, TypeError, r"needs a contraction and rows, \(\.\.\., k, rows\)"),
        ((x, w.T), {}, TypeError, r"w's transpose would fit: pass transpose_w=True"),
        (((x, x), (w, w)), {}, NotImplementedError, "transpose_x=True is for one product.*pass each x as"),
        (float8, scales, NotImplementedError, "transpose_x=True of a float8 x.*pass it as .*or cast it"),
    ):
        with pytest.raises(error, match=rf"entwine_jax.{op}: .*{match}"):
            call(*args, **options)
    if op == SCATTER:
        with pytest.raises(ValueError, match=r"x \(6, 5\) has 5 rows, which the 2 ranks.*pad the rows to 6"):
            call(np.ones((6, 5), np.float32), w)


def test_not_for_what_is_gathered():
    with pytest.raises(TypeError, match="transpose_x"):
        entwine_jax.all_gather_matmul(np.ones((2, 2)), np.ones((2, 2)), "t", transpose_x=True)


# On GPUs, as a CPU can show it.


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(_core, "cuda_built", lambda: True)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,))
    for name in ("peer_obstacle", "hopper_obstacle"):
        monkeypatch.setattr(_obstacles, name, lambda: None)


def request_of(op, strategy, config=None, transpose_w=False):
    team = _team.Team(("t",), 2, (0, 1), (), (), "cuda")
    settings = _config.resolve(op, strategy, config)
    return _strategy.Request(op, team, transpose_w, jnp.dtype(jnp.bfloat16), None, settings, transpose_x=True)


def choose(op, strategy="auto", m=8192, n=8192, k=3584, config=None, transpose_w=False, batch=1):
    x = jax.ShapeDtypeStruct((batch, k, m), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((n, k) if transpose_w else (k, n), jnp.bfloat16)
    return _strategy.choose(request_of(op, strategy, config, transpose_w), x, w)


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("op", SUMS)
def test_plans_on_gpus(op):
    assert choose(op).strategy == "fused"
    for strategy in ("fused", "resident", "signal"):
        assert choose(op, strategy).plan.strategy == strategy
        choose(op, strategy, k=3585)  # any contraction, but of a w that is stored by columns
        with pytest.raises(NotImplementedError, match=r"a row of w is 3585 x 2 = 7170 bytes.*pad to 3592 columns"):
            choose(op, strategy, k=3585, transpose_w=True)
        with pytest.raises(NotImplementedError, match=r"a row of x as it is stored is 1002 x 2.*pad to 1008 columns"):
            choose(op, strategy, m=1002)
        if op == SCATTER:
            with pytest.raises(NotImplementedError, match=r"each rank's 700 rows of an x.*\(pad to 704 a rank\)"):
                choose(op, strategy, m=1400)
        else:
            choose(op, strategy, m=1400)
    assert choose(op, m=1002).strategy == "xla" and "x as it is stored" in choose(op, m=1002).reason


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("op", SUMS)
def test_few_rows_are_tiles(op):
    choice = choose(op, "fused", m=64)
    assert not choice.plan.few_rows and (choice.plan.tile_m, choice.plan.tile_n) in _core.sm90_tiles(out_bytes=2)
    with pytest.raises(NotImplementedError, match="few_rows=True is for an x without transpose_x=True"):
        choose(op, "fused", m=64, config=Config(few_rows=True))


@pytest.mark.usefixtures("gpus")
def test_keys():
    """Tables know both layouts apart, and an all-reduce's batches, which cost a copy."""
    x, w = jax.ShapeDtypeStruct((2, 128, 64), jnp.bfloat16), jax.ShapeDtypeStruct((128, 64), jnp.bfloat16)
    for op in SUMS:
        key = _strategy.key(request_of(op, "auto"), x, w)
        assert key.startswith(f"{op} bfloat16(2, 128, 64).T @ bfloat16(128, 64) -> bfloat16, 2 ranks")


@pytest.mark.parametrize("op", SUMS)
def test_tuned(op, measure):
    f, shapes = (
        spread(functools.partial(ours, strategy="auto"), op, mesh_of((2,)), (None,)),
        (
            jax.ShapeDtypeStruct((2, 16, 24), jnp.float32),
            jax.ShapeDtypeStruct((16, 32), jnp.float32),
        ),
    )
    measure(lambda _, plan: 2e-3 if plan is None else 1e-3)
    (row,) = entwine_jax.autotune(f, *shapes)
    assert row.status == "measured" and "float32(2, 8, 24).T @" in row.key
    (found,) = entwine_jax.explain(f, *shapes)
    assert found.transpose_x and found.strategy == row.strategy != "xla" and "1 ms" in found.reason
