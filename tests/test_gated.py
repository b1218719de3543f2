"""activation(all_gather(x) @ w_gate + b_gate) * (all_gather(x) @ w_up + b_up) in one call, `gated=True`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import collectives
from helpers import assert_close, integers, mesh_of, normal, product
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _config, _gated, _obstacles, _strategy, _team

GATHER, SCATTER = "all_gather_matmul", "matmul_reduce_scatter"
TILES = Config(tile_m=8, tile_n=16)
COLUMNS = P(None, "t")


def gate(x, ws, bs=None, **options):
    given = {"strategy": "fused", "config": TILES, "activation": "silu", **options}
    return entwine_jax.all_gather_matmul(x, ws, "t", gated=True, bias=bs, **given)


def gate_in_lax(x, ws, bs=(0, 0), activation=jax.nn.silu):
    rows = lax.all_gather(x, "t", axis=x.ndim - 2, tiled=True)
    return activation(rows @ ws[0] + bs[0]) * (rows @ ws[1] + bs[1])


def spread(rank, ranks=2, leading=(), transposed=False, biases=(True, True), out=1, check_vma=True):
    """`rank(x, ws, bs)` of global x, both w and biases (None for none)."""
    w, h = P("t", None) if transposed else COLUMNS, P(*leading, None, "t")
    bs = tuple(P("t") if biased else None for biased in biases)
    return jax.shard_map(
        rank,
        mesh=mesh_of((ranks,)),
        in_specs=(P(*leading, "t", None), (w, w), bs),
        out_specs=h if out == 1 else (h,) * out,
        check_vma=check_vma,
    )


CONFIGS = (
    TILES,
    Config(tile_m=4, tile_n=7, workers=3, stall_us=60, pushers=2, copiers=2),
    Config(tile_m=32, tile_n=64, workers=1),
    Config(tile_m=5, tile_n=1, workers=2),
)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
def test_exact(ranks, transposed):
    """Widths of less than half a tile, one column more, and several tiles; odd tiles, which are made even."""
    for i, (config, n) in enumerate(zip(CONFIGS, (9, 41, 5, 2), strict=True)):
        if ranks != 2 and i % 2 == transposed:
            continue
        biases = i % 2 == 0, i < 2
        x, ws = integers((2, 13 * ranks, 12), 1), tuple(integers((12, n * ranks), seed) for seed in (2, 3))
        bs = tuple(integers((n * ranks,), 4 + j) if biased else None for j, biased in enumerate(biases))
        given = tuple(w.T for w in ws) if transposed else ws
        rank = functools.partial(
            gate, config=config, transpose_w=transposed, activation="relu", return_gathered=i % 2 == 1
        )
        made = jax.jit(spread(rank, ranks, (None,), transposed, biases, 1 + i % 2))(x, given, bs)
        first, second = (product(x, w) + (0 if b is None else np.asarray(b)) for w, b in zip(ws, bs, strict=True))
        np.testing.assert_array_equal(np.asarray(made[0] if i % 2 else made), first.clip(0) * second)
        for copy in np.split(np.asarray(made[1]), ranks, axis=-1) if i % 2 else ():
            np.testing.assert_array_equal(copy, np.asarray(x))


@pytest.mark.parametrize("strategy", ["fused", "xla"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dtypes_and_activations(ranks, strategy):
    """Against float64, of which one rounding is half a unit in the last place; XLA's path rounds gate and up too."""
    erf = functools.partial(jax.nn.gelu, approximate=False)
    cases = (
        (jnp.bfloat16, 2**-8, {"silu": jax.nn.silu, "gelu_tanh": jax.nn.gelu}),
        (jnp.float16, 2**-11, {"gelu": erf}),
        (jnp.float32, 1e-6, {None: lambda v: v, "relu": jax.nn.relu}),
    )
    for dtype, unit, functions in cases:
        x, ws = normal((8 * ranks, 24), 1, dtype), tuple(normal((24, 20 * ranks), i, dtype) for i in (2, 3))
        bs = tuple(normal((20 * ranks,), i, dtype) for i in (4, 5))
        for result in (None,) if dtype == jnp.float32 else (None, jnp.float32):
            for activation, function in functions.items():
                options = {"strategy": strategy, "preferred_element_type": result, "activation": activation}
                h = jax.jit(spread(functools.partial(gate, **options), ranks))(x, ws, bs)
                assert h.dtype == (result or dtype)
                first, second = (product(x, w) + np.asarray(b, np.float64) for w, b in zip(ws, bs, strict=True))
                wanted = np.asarray(function(jnp.asarray(first, jnp.float32)), np.float64) * second
                bound = 2e-6 if result == jnp.float32 else unit if strategy == "fused" else 3 * unit
                assert_close(h, wanted, bound)


EVERY = (0, 1, 2)


def operands():
    # Small enough for the sine of what comes of them to keep its digits.
    return (
        normal((16, 6), 1),
        tuple(normal((6, 20), i) / 3 for i in (2, 3)),
        tuple(normal((20,), i) / 3 for i in (4, 5)),
    )


def value_and_gradients(rank, wanted=EVERY, check_vma=True, **options):
    f = spread(functools.partial(rank, **options), check_vma=check_vma)
    return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), wanted))


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(check_vma):
    wanted = value_and_gradients(gate_in_lax)(*operands())
    for options in ({}, {"residuals": "save"}, {"strategy": "xla"}):
        assert_close(value_and_gradients(gate, check_vma=check_vma, **options)(*operands()), wanted)


@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_of_activations(activation):
    functions = {None: lambda v: v, "relu": jax.nn.relu, "gelu": functools.partial(jax.nn.gelu, approximate=False)}
    wanted = value_and_gradients(gate_in_lax, activation=functions[activation])(*operands())
    assert_close(value_and_gradients(gate, activation=activation)(*operands()), wanted)


def test_gradients_of_gradients_and_of_some():
    def norm_of_gradient(rank, wanted):
        first = value_and_gradients(rank, wanted)

        def norm(*args):
            return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(first(*args)[1]))

        return first, jax.jit(jax.grad(norm, EVERY))

    args = operands()
    for wanted in (EVERY, (0,), (1,), (2,)):
        first, second = norm_of_gradient(gate, wanted)
        first_in_lax, second_in_lax = norm_of_gradient(gate_in_lax, wanted)
        assert_close(first(*args), first_in_lax(*args))
        if wanted == EVERY:
            assert_close(second(*args), second_in_lax(*args), 3e-5)

    def of_one(rank):  # of up's weight alone
        f = spread(rank)
        x, (first, second), bs = args
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(f(x, (first, w), bs)))))(second)

    assert_close(of_one(gate), of_one(gate_in_lax))


def test_gradients_of_the_gathered_x():
    """Alone, and with that of h."""

    def loss(rank, uses_h):
        f = spread(rank, out=2)

        def value(*args):
            h, rows = f(*args)
            return jnp.sum(jnp.square(rows)) + (jnp.sum(jnp.sin(h)) if uses_h else 0)

        return jax.jit(jax.grad(value, EVERY))

    def rank_in_lax(x, ws, bs):
        return gate_in_lax(x, ws, bs), lax.all_gather(x, "t", axis=0, tiled=True)

    for uses_h in (True, False):
        got = loss(functools.partial(gate, return_gathered=True), uses_h)(*operands())
        assert_close(got, loss(rank_in_lax, uses_h)(*operands()))


def test_calls():
    """One gated call where no gradient is taken; else gate and up are a call, and their gradients one."""
    args = operands()

    def found(f):
        return [(m.op, len(m.products), m.gated, m.activation, m.gathered) for m in entwine_jax.explain(f, *args)]

    assert found(spread(gate)) == [(GATHER, 2, True, "silu", None)]
    x, f = (1, 16, 6), spread(gate)
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), EVERY))
    assert found(gradient) == [(GATHER, 2, False, None, None), (SCATTER, 2, False, None, x)]
    saving = value_and_gradients(gate, residuals="save")
    assert found(saving) == [(GATHER, 2, False, None, x), (SCATTER, 2, False, None, None)]
    compiled = gradient.lower(*args).compile().as_text()
    assert collectives(compiled) == {f"entwine_{GATHER}": 1, f"entwine_{SCATTER}": 1}

    call, *_ = calls = entwine_jax.explain(f, *args)
    assert call.y == (1, 16, 10) and [(p.w, p.bias, p.activation) for p in call.products] == [
        ((6, 10), True, "silu"),
        ((6, 10), True, None),
    ]
    text = repr(calls)
    assert f"{GATHER} + bias + silu, {GATHER} + bias, gated" in text and "float32[16,10]  " in text
    assert [m.gated for m in entwine_jax.explain(spread(functools.partial(gate, strategy="xla")), *args)] == [True]


@pytest.mark.parametrize("kind", ["x", "w", "bias", "all"])
def test_vmap(kind):
    x, ws, bs = normal((3, 8, 6), 1), (normal((3, 6, 10), 2), normal((3, 6, 10), 3)), (normal((3, 10), 4),) * 2
    axes = {"x": (0, None, None), "w": (None, 0, None), "bias": (None, None, 0), "all": (0, (0, None), (None, 0))}[kind]
    specs = P("t", None), COLUMNS, P("t")
    in_axes = tuple((axis, axis) if i and not isinstance(axis, tuple) else axis for i, axis in enumerate(axes))

    def pick(v, axis):
        return v if axis == 0 else v[0]

    def spec(axis, of):
        return P(None, *of) if axis == 0 else of

    def value(rank):
        in_specs = (
            spec(in_axes[0], specs[0]),
            *(tuple(spec(axis, of) for axis in pair) for pair, of in zip(in_axes[1:], specs[1:], strict=True)),
        )
        f = jax.shard_map(jax.vmap(rank, in_axes), mesh=mesh_of((2,)), in_specs=in_specs, out_specs=P(None, None, "t"))
        return jax.jit(f), jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), EVERY))

    args = pick(x, in_axes[0]), *(tuple(map(pick, v, pair)) for v, pair in zip((ws, bs), in_axes[1:], strict=True))
    for got, wanted in zip(value(gate), value(gate_in_lax), strict=True):
        assert_close(got(*args), wanted(*args))


@pytest.mark.parametrize("policy", [None, "entwine_gathered"])
def test_scan_and_remat(policy):
    """Layers in a scan, each recomputed in the backward pass but for what is named."""
    x, layers = normal((8, 6), 1), (normal((3, 6, 10), 2), normal((3, 6, 10), 3), normal((3, 10, 6), 4))
    names = jax.checkpoint_policies.save_only_these_names(policy) if policy else None

    def run(rank):
        def layer(x, weights):
            h = rank(x, weights[:2])
            return x + lax.psum_scatter(h @ weights[2], "t", scatter_dimension=0, tiled=True), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(jax.checkpoint(layer, policy=names), x, layers)[0],
            mesh=mesh_of((2,)),
            in_specs=(P("t"), (P(None, None, "t"), P(None, None, "t"), P(None, "t"))),
            out_specs=P("t"),
        )
        return jax.jit(f), jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.square(f(*args))), (0, 1)))

    ours = run(functools.partial(gate, residuals="save" if policy else "regather"))
    for got, wanted in zip(ours, run(gate_in_lax), strict=True):
        assert_close(got(x, layers), wanted(x, layers))


def on_gpus(monkeypatch, rows, n=3584, strategy="auto", **options):
    """The request of x (rows, 8192) and two w (8192, n), on two GPUs, and its pairs."""
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: True)
    for name in ("peer_obstacle", "hopper_obstacle"):
        monkeypatch.setattr(_obstacles, name, lambda: None)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,))
    team = _team.Team(
        **{"axis_name": ("t",), "size": 2, "groups": (0, 1), "other_axes": (), "loose_axes": (), "platform": "cuda"}
    )
    settings = _config.resolve(GATHER, strategy, Config(**options) if options else None)
    request = _strategy.Request(GATHER, team, False, jnp.dtype(jnp.bfloat16), None, settings, products=2, gated=True)
    request = request.finished([False, False], ["silu", None])
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, rows, 8192), (8192, n)))
    return request, [(x, w)] * 2


def test_choice_on_gpus(monkeypatch):
    """Tiles whose halves meet in a thread; few rows apart; the model knows what XLA writes and reads once more."""
    request, pairs = on_gpus(monkeypatch, 4096)
    choice = _strategy.choose_of(request, pairs)
    assert choice.strategy == "fused" and choice.plan.tile_m == 256 and not choice.plan.few_rows
    both = dataclasses.replace(request, gated=False)
    ours, theirs = zip(*(_strategy.predict(r, *_strategy.joined(r, pairs)) for r in (request, both)), strict=True)
    assert ours[0] == ours[1]
    assert theirs[0] - theirs[1] == pytest.approx(3 * 8192 * 3584 * 2 / 4.2e6)
    small, pairs = on_gpus(monkeypatch, 96, 1024, "fused")
    assert _strategy.choose_of(dataclasses.replace(small, gated=False), pairs).plan.tile_m == 128
    assert _strategy.choose_of(small, pairs).plan.tile_m == 256
    assert _strategy.apart(*on_gpus(monkeypatch, 8))
    alone = small.alone(0), small.alone(1)
    assert [(r.gated, r.products, r.activation) for r in alone] == [(False, 1, "silu"), (False, 1, None)]
    for strategy, options, match in (
        ("fused", {"tile_m": 128, "tile_n": 128}, "tile_m=128, tile_n=128 is none of the tiles"),
        ("signal", {}, "it takes one product a call"),
    ):
        with pytest.raises(NotImplementedError, match=match):
            _strategy.choose_of(*on_gpus(monkeypatch, 4096, strategy=strategy, **options))


def test_few_rows_are_two_calls(monkeypatch):
    """As on GPUs, where the kernels for few rows take one product; with gradients."""
    monkeypatch.setattr(_gated._strategy, "apart", lambda request, pairs: True)
    args = operands()
    calls = entwine_jax.explain(spread(gate), *args)
    assert [(m.products, m.gated, m.activation, m.bias) for m in calls] == [
        ((), False, "silu", True),
        ((), False, None, True),
    ]
    assert_close(value_and_gradients(gate)(*args), value_and_gradients(gate_in_lax)(*args))


def fails(error, match, x, w, **options):
    rank = functools.partial(entwine_jax.all_gather_matmul, axis_name="t", **{"gated": True, **options})
    with pytest.raises(error, match=match):
        jax.shard_map(rank, mesh=mesh_of((2,)), in_specs=(P(), P()), out_specs=P())(x, w)


def test_errors():
    x, w = np.ones((8, 6), np.float32), np.ones((6, 10), np.float32)
    fails(ValueError, r"two weights, w=\(w_gate, w_up\), but w is one, .*; pass two", x, w)
    fails(ValueError, r"but w is 3 arrays", x, (w, w, w))
    fails(ValueError, r"but w is 1 arrays", x, (w,))
    fails(ValueError, r"there is one activation.*\('silu', None\); pass its name", x, (w, w), activation=("silu", None))
    fails(ValueError, r"activation='swish' is unknown", x, (w, w), activation="swish")
    fails(ValueError, r"w holds 2 weights, so bias, ", x, (w, w), bias=w[0])
    fails(TypeError, r"w\[0\] has 10 columns and w\[1\] 4.*as many", x, (w, w[:, :4]))
    fails(TypeError, r"they are contracted and must be equal", x, (w, w[:4]))
    fails(TypeError, r"bias\[1\] has shape \(4,\)", x, (w, w), bias=(None, w[0, :4]))
    fails(
        TypeError,
        r"activation='silu' is for real floating",
        x.astype(np.int32),
        (w.astype(np.int32),) * 2,
        activation="silu",
    )
    x8, w8 = jnp.asarray(x, jnp.float8_e4m3fn), jnp.asarray(w, jnp.float8_e4m3fn)
    fails(NotImplementedError, r"gated=True takes no float8", x8, (w8, w8), scales=(np.float32(1), np.float32(1)))
    fails(NotImplementedError, r"strategy='signal' can't run.*one product a call", x, (w, w), strategy="signal")
