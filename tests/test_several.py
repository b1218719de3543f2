"""Several products in one call: of one x and several w, and the sum of the products of pairs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import collectives
from helpers import OPS, assert_close, integers, mesh_of, normal, product, specs
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _config, _obstacles, _strategy, _team

GATHER, SCATTER, REDUCE = OPS
SUMS = SCATTER, REDUCE
TILES = Config(tile_m=8, tile_n=16)


def multiply(x, ws, axis="t", **options):
    return entwine_jax.all_gather_matmul(x, ws, axis, **{"strategy": "fused", "config": TILES, **options})


def multiply_in_lax(x, ws, axis="t"):
    rows = lax.all_gather(x, axis, axis=x.ndim - 2, tiled=True)
    return tuple(rows @ w for w in ws)


def add(op, xs, ws, axis="t", **options):
    return getattr(entwine_jax, op)(xs, ws, axis, **{"strategy": "fused", "config": TILES, **options})


def add_in_lax(op, xs, ws, axis="t"):
    total = sum(x @ w for x, w in zip(xs, ws, strict=True))
    if op == REDUCE:
        return lax.psum(total, axis)
    return lax.psum_scatter(total, axis, scatter_dimension=total.ndim - 2, tiled=True)


def spread_products(rank, mesh, count, leading=(), transposed=False, check_vma=True):
    """`rank(x, ws)` of global x and w, count of them."""
    x, w, y = specs(GATHER, "t", leading)
    w = P(*reversed(w)) if transposed else w
    return jax.shard_map(rank, mesh=mesh, in_specs=(x, (w,) * count), out_specs=(y,) * count, check_vma=check_vma)


def spread_sum(rank, op, mesh, count, leading=(), transposed=False, check_vma=True):
    x, w, y = specs(op, "t", leading)
    w = P(*reversed(w)) if transposed else w
    return jax.shard_map(rank, mesh=mesh, in_specs=((x,) * count, (w,) * count), out_specs=y, check_vma=check_vma)


def matrices(make, rows, columns, ranks=1, seed=2, **options):
    """One (rows, columns) each; ranks times as many of what is a tuple."""
    each = [(rows, n * ranks) for n in columns] if isinstance(columns, tuple) else [(k * ranks, columns) for k in rows]
    return tuple(make(shape, seed + i, **options) for i, shape in enumerate(each))


CONFIGS = (
    TILES,
    Config(tile_m=4, tile_n=8, workers=3, stall_us=60, lead=0, pushers=2),
    Config(tile_m=32, tile_n=32, transport="push", workers=2),
)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_products_are_exact(ranks, transposed):
    """Widths below, at and above a tile's; two, three and four."""
    for config, widths in zip(CONFIGS, ((5, 40), (33, 1, 16), (16, 16, 7, 24)), strict=True):
        x, ws = integers((2, 13 * ranks, 12), 1), matrices(integers, 12, widths, ranks)
        given = tuple(w.T for w in ws) if transposed else ws
        rank = functools.partial(multiply, config=config, transpose_w=transposed)
        ys = jax.jit(spread_products(rank, mesh_of((ranks,)), len(ws), (None,), transposed))(x, given)
        for y, w in zip(ys, ws, strict=True):
            np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_sums_are_exact(ranks, op, transposed):
    """Contractions of all lengths, rows that an all-reduce's ranks can't share."""
    for config, depths in zip(CONFIGS, ((5, 40), (33, 1, 16), (128, 16, 7, 140)), strict=True):
        rows = 13 * ranks + (op == REDUCE)
        xs = tuple(integers((2, rows, k * ranks), i) for i, k in enumerate(depths))
        ws = matrices(integers, depths, 20, ranks, 10)
        given = tuple(w.T for w in ws) if transposed else ws
        rank = functools.partial(add, op, config=config, transpose_w=transposed)
        y = jax.jit(spread_sum(rank, op, mesh_of((ranks,)), len(xs), (None,), transposed))(xs, given)
        np.testing.assert_array_equal(np.asarray(y), sum(product(x, w) for x, w in zip(xs, ws, strict=True)))


@pytest.mark.parametrize("strategy", ["fused", "xla"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_dtypes_epilogues_and_the_gathered_x(ranks, strategy):
    options = {"preferred_element_type": jnp.float32, "strategy": strategy, "config": None}
    for dtype in (jnp.bfloat16, jnp.float16, jnp.float32):
        x, ws = integers((8 * ranks, 6), 1, dtype), matrices(integers, 6, (10, 3, 8), ranks, dtype=dtype)
        bias = integers((8 * ranks,), 7)

        def rank(x, ws, bias):
            ys, rows = multiply(
                x, ws, bias=(None, None, bias), activation=("relu", None, "relu"), return_gathered=True, **options
            )
            return ys, rows

        columns = P(None, "t")
        f = jax.shard_map(
            rank, mesh=mesh_of((ranks,)), in_specs=(P("t"), columns, P("t")), out_specs=(columns, columns)
        )
        ys, rows = f(x, ws, bias)
        wanted = [product(x, w) for w in ws]
        for y, want in zip(ys, (wanted[0].clip(0), wanted[1], (wanted[2] + np.asarray(bias)).clip(0)), strict=True):
            assert y.dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(y), want)
        assert rows.dtype == dtype
        for copy in np.split(np.asarray(rows, np.float32), ranks, axis=1):
            np.testing.assert_array_equal(copy, np.asarray(x, np.float32))

        xs = tuple(integers((8 * ranks, k * ranks), i, dtype) for i, k in enumerate((6, 3)))
        ws, bias = matrices(integers, (6, 3), 12, ranks, dtype=dtype), integers((12,), 9)
        for op in SUMS:
            x, w, y = specs(op)
            f = jax.shard_map(
                lambda xs, ws, b, op=op: add(op, xs, ws, bias=b, activation="relu", **options),
                mesh=mesh_of((ranks,)),
                in_specs=((x, x), (w, w), P()),
                out_specs=y,
            )
            want = sum(product(x, w) for x, w in zip(xs, ws, strict=True)) + np.asarray(bias)
            np.testing.assert_array_equal(np.asarray(f(xs, ws, bias)), want.clip(0))


def swiglu(up, down, x, gate, up_w, downs, b):
    """With two sums of the hidden layer's halves, for a sum of pairs."""
    h, u = up(x, (gate, up_w), b)
    hidden = jax.nn.silu(h) * u
    return down((hidden, u), downs)


def swiglu_operands():
    x, b = normal((16, 6), 1), normal((20,), 9)
    # Small enough for the sine of what comes of them to keep its digits.
    return x, normal((6, 20), 2) / 3, normal((6, 20), 3) / 3, (normal((20, 6), 4) / 5, normal((20, 6), 5) / 5), b


def spread_swiglu(up, down, op, check_vma=True, ranks=2):
    columns, rows = P(None, "t"), P("t", None)
    return jax.shard_map(
        functools.partial(swiglu, up, down),
        mesh=mesh_of((ranks,)),
        in_specs=(rows, columns, columns, (rows, rows), P("t")),
        out_specs=P() if op == REDUCE else rows,
        check_vma=check_vma,
    )


def in_lax(op):
    def up(x, ws, b):
        h, u = multiply_in_lax(x, ws)
        return h + b, u

    return up, functools.partial(add_in_lax, op)


def ours(op, **options):
    def up(x, ws, b):
        return multiply(x, ws, bias=(b, None), **options)

    return up, functools.partial(add, op, strategy=options.get("strategy", "fused"))


EVERY = (0, 1, 2, 3, 4)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("op", SUMS)
def test_gradients(op, check_vma):
    args = swiglu_operands()

    def pull(up, down):
        f = spread_swiglu(up, down, op, check_vma)
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), EVERY))

    wanted = pull(*in_lax(op))(*args)
    for options in ({}, {"residuals": "save"}, {"strategy": "xla"}):
        assert_close(pull(*ours(op, **options))(*args), wanted)


@pytest.mark.parametrize("op", SUMS)
def test_gradients_of_gradients_and_of_some(op):
    args = swiglu_operands()

    def norm_of_gradient(up, down, wanted):
        f = spread_swiglu(up, down, op)
        loss = lambda *args: jnp.sum(jnp.sin(f(*args)))  # noqa: E731

        def norm(*args):
            return sum(jnp.sum(jnp.square(g)) for g in jax.tree.leaves(jax.grad(loss, wanted)(*args)))

        return jax.jit(jax.grad(norm, EVERY)), jax.jit(jax.grad(loss, wanted))

    for wanted in (EVERY, (0,), (2, 3)):
        second, first = norm_of_gradient(*ours(op), wanted)
        second_in_lax, first_in_lax = norm_of_gradient(*in_lax(op), wanted)
        assert_close(first(*args), first_in_lax(*args))
        assert_close(second(*args), second_in_lax(*args), 3e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_gradients_of_epilogues(activation):
    """Each result has its own, a sum has one."""
    x, ws, bias = normal((8, 6), 1), (normal((6, 10), 2), normal((6, 6), 3)), normal((6,), 4)
    downs, one = (normal((10, 12), 5), normal((6, 12), 6)), normal((12,), 7)
    function = {"relu": jax.nn.relu, "gelu": functools.partial(jax.nn.gelu, approximate=False), "silu": jax.nn.silu}

    def rank(x, ws, bias, downs, one):
        hs = multiply(x, ws, bias=(None, bias), activation=(None, activation))
        return add(SCATTER, hs, downs, bias=one, activation=activation)

    def rank_in_lax(x, ws, bias, downs, one):
        a, b = multiply_in_lax(x, ws)
        return function[activation](add_in_lax(SCATTER, (a, function[activation](b + bias)), downs) + one)

    def loss(rank):
        columns = P(None, "t")
        spec = P("t"), (columns, columns), P("t"), (P("t"), P("t")), P()
        f = jax.shard_map(rank, mesh=mesh_of((2,)), in_specs=spec, out_specs=P("t"))
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), EVERY))

    args = x, ws, bias, downs, one
    assert_close(loss(rank)(*args), loss(rank_in_lax)(*args))


def compiled_collectives(up, down, op, wanted=EVERY):
    f = spread_swiglu(up, down, op)
    gradient = jax.jit(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), wanted))
    return collectives(gradient.lower(*swiglu_operands()).compile().as_text())


def test_one_call_each_way():
    """Forward one call gathers and one sums, backward likewise, and nothing else travels."""
    assert compiled_collectives(*ours(SCATTER), SCATTER) == {f"entwine_{GATHER}": 2, f"entwine_{SCATTER}": 2}
    assert compiled_collectives(*ours(SCATTER, residuals="save"), SCATTER) == {
        f"entwine_{GATHER}": 2,
        f"entwine_{SCATTER}": 2,
    }
    # Without dx, all of x is kept from the forward pass.
    assert compiled_collectives(*ours(SCATTER), SCATTER, (1, 2)) == {f"entwine_{GATHER}": 2, f"entwine_{SCATTER}": 1}


def test_what_is_kept_and_gathered():
    def found(**options):
        f = spread_swiglu(*ours(SCATTER, **options), SCATTER)
        calls = entwine_jax.explain(jax.grad(lambda *args: jnp.sum(f(*args)), EVERY), *swiglu_operands())
        return [(m.op, len(m.products), m.gathered) for m in calls]

    x, dy = (1, 16, 6), (1, 16, 6)
    assert found() == [(GATHER, 2, None), (SCATTER, 2, None), (GATHER, 2, dy), (SCATTER, 2, x)]
    assert found(residuals="save") == [(GATHER, 2, x), (SCATTER, 2, None), (GATHER, 2, dy), (SCATTER, 2, None)]


@pytest.mark.parametrize("strategy", ["fused", "xla"])
def test_explain_names_all_products(strategy):
    args = swiglu_operands()
    f = spread_swiglu(*ours(SCATTER, strategy=strategy), SCATTER)
    first, second = calls = entwine_jax.explain(f, *args)
    assert [(p.x, p.w, p.y) for p in first.products] == [((1, 8, 6), (6, 10), (1, 16, 10))] * 2
    assert [p.bias for p in first.products] == [True, False]
    assert [(p.x, p.w, p.y) for p in second.products] == [((1, 16, 10), (10, 6), (1, 8, 6))] * 2
    assert first.x == first.products[0].x and first.y == first.products[0].y
    assert re.search(r"float32\[6,10\], float32\[6,10\] +float32\[16,10\], float32\[16,10\]", repr(calls))
    assert re.search(
        r"float32\[16,10\], float32\[16,10\] +float32\[10,6\], float32\[10,6\] +float32\[8,6\] ", repr(calls)
    )


def batches(kind, count=3):
    """x and two w, some of them one for each of a batch, and vmap's axes of them."""
    x, ws = normal((count, 8, 6), 1), (normal((count, 6, 10), 2), normal((count, 6, 4), 3))
    in_x, in_ws = {"x": (0, (None, None)), "w": (None, (0, None)), "all": (0, (0, 0))}[kind]
    pick = lambda v, axis: v if axis == 0 else v[0]  # noqa: E731
    return pick(x, in_x), tuple(map(pick, ws, in_ws)), (in_x, in_ws)


@pytest.mark.parametrize("kind", ["x", "w", "all"])
def test_vmap_of_products(kind):
    x, ws, axes = batches(kind)

    def value(rank):
        batch = lambda axis, spec: P(None, *spec) if axis == 0 else spec  # noqa: E731
        in_specs = batch(axes[0], P("t", None)), tuple(batch(axis, P(None, "t")) for axis in axes[1])
        f = jax.shard_map(
            jax.vmap(rank, axes), mesh=mesh_of((2,)), in_specs=in_specs, out_specs=(P(None, None, "t"),) * 2
        )
        return jax.jit(jax.value_and_grad(lambda *args: sum(jnp.sum(jnp.sin(y)) for y in f(*args)), (0, 1)))

    for options in ({}, {"residuals": "save"}):
        rank = functools.partial(multiply, **options)
        assert_close(value(rank)(x, ws), value(multiply_in_lax)(x, ws))


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_of_sums(op, axes):
    """Of one of both x, or of one w; the other pair is the same for all."""
    x_axis, w_axis = axes
    xs = normal((3, 8, 12) if x_axis == 0 else (8, 12), 1), normal((8, 4), 2)
    ws = normal((12, 6), 3), normal((3, 4, 6) if w_axis == 0 else (4, 6), 4)
    in_axes = (x_axis, None), (None, w_axis)

    def value(rank):
        x, w, y = specs(op)
        batch = lambda axis, spec: P(None, *spec) if axis == 0 else spec  # noqa: E731
        f = jax.shard_map(
            jax.vmap(rank, in_axes),
            mesh=mesh_of((2,)),
            in_specs=((batch(x_axis, x), x), (w, batch(w_axis, w))),
            out_specs=P(None, *y),
        )
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1)))

    assert_close(value(functools.partial(add, op))(xs, ws), value(functools.partial(add_in_lax, op))(xs, ws))


@pytest.mark.parametrize("policy", [None, "entwine_gathered"])
def test_scan_and_remat(policy):
    """Layers in a scan, each recomputed in the backward pass but for what is named."""
    x, layers = normal((8, 6), 1), (normal((3, 6, 10), 2), normal((3, 6, 10), 3), normal((3, 10, 6), 4))
    rows = P(None, "t")
    names = jax.checkpoint_policies.save_only_these_names(policy) if policy else None

    def loss(multiply, down):
        def layer(x, weights):
            h, u = multiply(x, weights[:2])
            return x + down((jax.nn.silu(h) * u,), weights[2:]), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(jax.checkpoint(layer, policy=names), x, layers)[0],
            mesh=mesh_of((2,)),
            in_specs=(P("t"), (P(None, None, "t"), P(None, None, "t"), rows)),
            out_specs=P("t"),
        )
        return jax.jit(jax.value_and_grad(lambda *args: jnp.sum(jnp.square(f(*args))), (0, 1)))

    residuals = "save" if policy else "regather"
    got = loss(functools.partial(multiply, residuals=residuals), functools.partial(add, SCATTER))(x, layers)
    assert_close(got, loss(multiply_in_lax, functools.partial(add_in_lax, SCATTER))(x, layers))


def test_more_than_a_kernel_takes():
    """Four to a call."""
    x, ws = integers((8, 6), 1), matrices(integers, 6, (4,) * 6, 2)
    f = spread_products(multiply, mesh_of((2,)), 6)
    assert [len(call.products) for call in entwine_jax.explain(f, x, ws)] == [4, 2]
    for y, w in zip(jax.jit(f)(x, ws), ws, strict=True):
        np.testing.assert_array_equal(np.asarray(y), product(x, w))
    xs, ws = tuple(integers((8, 4), i) for i in range(5)), matrices(integers, (2,) * 5, 6, 2)
    wanted = sum(product(x, w) for x, w in zip(xs, ws, strict=True))
    for op in SUMS:
        f = spread_sum(functools.partial(add, op, activation="relu"), op, mesh_of((2,)), 5)
        assert [len(call.products) for call in entwine_jax.explain(f, xs, ws)] == [4, 0]
        np.testing.assert_array_equal(np.asarray(jax.jit(f)(xs, ws)), wanted.clip(0))


@pytest.mark.parametrize("op", SUMS)
@pytest.mark.parametrize("strategy", ["fused", "xla"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2], ids=["e4m3", "e5m2"])
def test_sums_of_float8(op, strategy, dtype):
    """One scale for all."""
    scales = jnp.float32(0.5), jnp.float32(0.25)
    xs = tuple(integers((8, k), i, dtype) for i, k in enumerate((64, 10)))
    ws = matrices(integers, (32, 5), 12, 2, dtype=jnp.float8_e4m3fn)
    rank = functools.partial(add, op, strategy=strategy, scales=scales, preferred_element_type=jnp.float32)
    f = spread_sum(rank, op, mesh_of((2,)), 2)
    wanted = sum(product(x.astype(jnp.float32), w.astype(jnp.float32)) for x, w in zip(xs, ws, strict=True)) / 8
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(xs, ws)), wanted)
    with pytest.raises(TypeError, match=f"{op}: the gradient of a float8 array"):
        jax.grad(lambda ws: jnp.sum(f(xs, ws)), allow_int=True)(ws)


def test_few_rows_have_calls_of_their_own(monkeypatch):
    """The kernels for few rows take one product."""
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: True)
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: None)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,))
    team = _team.Team(
        **{"axis_name": ("t",), "size": 2, "groups": (0, 1), "other_axes": (), "loose_axes": (), "platform": "cuda"}
    )

    def apart(rows, strategy="fused", config=None, dtype=jnp.bfloat16):
        settings = _config.resolve(GATHER, strategy, config)
        request = _strategy.Request(GATHER, team, False, jnp.dtype(jnp.bfloat16), None, settings, products=2)
        request = dataclasses.replace(request, others=((False, None),), scaled=dtype != jnp.bfloat16)
        x = jax.ShapeDtypeStruct((1, rows, 8192), dtype)
        pairs = [(x, jax.ShapeDtypeStruct((8192, n), dtype)) for n in (3584, 1024)]
        choice = _strategy.choose_of(request, pairs)
        assert choice.plan is None or not choice.plan.few_rows
        return _strategy.apart(request, pairs)

    for dtype in (jnp.bfloat16, jnp.float8_e4m3fn):
        assert apart(8, dtype=dtype) and not apart(1024, dtype=dtype)
    assert not apart(8, "xla") and not apart(8, config=Config(few_rows=False))
    assert apart(32, config=Config(few_rows=True))


def fails(error, match, op, x, w, **options):
    with pytest.raises(error, match=match):
        jax.shard_map(
            lambda x, w: getattr(entwine_jax, op)(x, w, "t", strategy="fused", **options),
            mesh=mesh_of((2,)),
            in_specs=(P(), P()),
            out_specs=P(),
        )(x, w)


@pytest.mark.parametrize("op", SUMS)
def test_bad_pairs(op):
    x, w = np.ones((8, 6), np.float32), np.ones((6, 10), np.float32)
    fails(TypeError, rf"{op}: x is .* and the other operand several.*tuples", op, x, (w, w))
    fails(TypeError, rf"{op}: w is .* and the other operand several.*tuples", op, (x, x), w)
    fails(TypeError, rf"{op}: x holds 2 arrays and w 1", op, (x, x), (w,))
    fails(TypeError, rf"{op}: w=\(\) is empty", op, (), ())
    fails(TypeError, r"x\[1\] has shape \(4, 6\) and x\[0\] \(8, 6\).*last dimension only", op, (x, x[:4]), (w, w))
    fails(TypeError, r"w\[1\] has 4 columns and w\[0\] 10", op, (x, x), (w, w[:, :4]))
    fails(TypeError, r"they are contracted and must be equal", op, (x, x[:, :5]), (w, w))
    fails(TypeError, rf"{op}: scales are for float8", op, (x, x), (w, w), scales=(np.float32(1), np.float32(1)))
    float8 = {"scales": (np.float32(1), np.float32(1)), "preferred_element_type": jnp.float32}
    mixed = jnp.asarray(x, jnp.float8_e4m3fn), jnp.asarray(x, jnp.float8_e5m2)
    fails(
        TypeError, "float8_e4m3fn, float8_e5m2.*one dtype", op, mixed, (jnp.asarray(w, mixed[0].dtype),) * 2, **float8
    )
