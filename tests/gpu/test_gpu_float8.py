"""float8 operands with scales: every kernel to the bit, random numbers, and the gradients of ops that quantise."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from epilogues import bias_of, bias_spec
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    OPS,
    REDUCE_SCATTER,
    TILES,
    Case,
    assert_close,
    assert_shards_equal,
    exact_product,
    gaussians,
    integers,
    mesh_of,
    per_shard,
    placed,
    poison,
    put,
    reference,
    relative_error,
    spread,
    team_size,
    whole,
)
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SCALES = jnp.float32(0.5), jnp.float32(0.25)


def program(case, mesh, **options):
    call = per_shard(case, **{"scales": SCALES, "preferred_element_type": jnp.bfloat16, **options})
    return jax.jit(spread(case, mesh, call))


def check(case, seed=0, x_dtype=E4M3, dtype=jnp.bfloat16, **options):
    mesh = mesh_of()
    ranks = team_size(mesh)
    x, w = integers(case, ranks, seed)
    poison(case, mesh, dtype=dtype)
    run = program(case, mesh, preferred_element_type=dtype, **options)
    y = run(*placed(case, mesh, x.astype(x_dtype), w.astype(E4M3)))
    assert y.dtype == dtype
    assert_shards_equal(case, y, exact_product(case, ranks, x, w) / 8)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_ragged(op, x_dtype, dtype):
    for m_shard, n, k in ((1, 8, 16), (100, 136, 4112), (129, 4104, 144), (600, 776, 528), (7, 1792, 4112)):
        check(Case(op, m_shard, n, k), x_dtype=x_dtype, dtype=dtype)
    check(Case(op, 129, 264, 144, (2, 3)), x_dtype=x_dtype, dtype=dtype)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(op, tile):
    check(Case(op, 300, 1032, 528), config=Config(tile_m=tile[0], tile_n=tile[1]))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
def test_few_rows(op, x_dtype, dtype):
    """On rows for each room, and w cut into 1 to 8 slices."""
    for m_shard, n, k in ((1, 8, 16), (7, 1792, 4112), (31, 3584, 8192), (64, 8192, 3600), (3, 20000, 1008)):
        check(Case(op, m_shard, n, k), x_dtype=x_dtype, dtype=dtype, config=Config(few_rows=True))


@pytest.mark.parametrize("op", OPS)
def test_few_rows_are_decoded_by_default(op):
    """w as it lies, (n, k), and the kernel that reads it once."""
    case, mesh = Case(op, 8, 8192, 4096), mesh_of()
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = integers(case, team_size(mesh), 5)
    specs = x_spec, P(*w_spec[::-1])
    args = [put(v, mesh, s) for v, s in zip((x.astype(E4M3), w.T.astype(E4M3)), specs, strict=True)]
    options = {"scales": SCALES, "preferred_element_type": jnp.float32, "transpose_w": True, "strategy": "auto"}
    f = jax.shard_map(per_shard(case, **options), mesh=mesh, in_specs=specs, out_specs=y_spec)
    (matmul,) = entwine_jax.explain(f, *args)
    assert matmul.strategy == "fused" and matmul.plan.few_rows and "copy" not in matmul.reason
    assert_shards_equal(case, jax.jit(f)(*args), exact_product(case, team_size(mesh), x, w) / 8)


@pytest.mark.parametrize("op", OPS)
def test_on_xla(op):
    check(Case(op, 300, 1032, 528), strategy="xla")
    check(Case(op, 300, 1032, 528), x_dtype=E5M2, strategy="xla")


@pytest.mark.parametrize("op", [REDUCE_SCATTER, ALL_REDUCE])
def test_each_rank_has_its_own_scale(op):
    case, mesh = Case(op, 136, 264, 144), mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = integers(case, ranks, 3)

    def rank(x, w):
        scales = jnp.float32(1), 1.0 + jax.lax.axis_index(AXIS)
        return getattr(entwine_jax, op)(x, w, AXIS, scales=scales, strategy="fused", preferred_element_type=jnp.float32)

    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec))
    y = run(*placed(case, mesh, x.astype(E4M3), w.astype(E4M3)))
    x, w = x.astype(np.float64), w.astype(np.float64)
    parts = ((1 + r) * x[:, r * case.k : (r + 1) * case.k] @ w[r * case.k : (r + 1) * case.k] for r in range(ranks))
    assert_shards_equal(case, y, sum(parts))


def test_gathered():
    case, mesh = Case(ALL_GATHER, 300, 520, 528), mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = integers(case, ranks, 4)
    call = functools.partial(
        entwine_jax.all_gather_matmul,
        axis_name=AXIS,
        scales=SCALES,
        strategy="fused",
        return_gathered=True,
        preferred_element_type=jnp.bfloat16,
    )
    specs = (y_spec, P(None))
    run = jax.jit(jax.shard_map(call, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=specs, check_vma=False))
    y, rows = run(*placed(case, mesh, x.astype(E4M3), w.astype(E4M3)))
    assert_shards_equal(case, y, exact_product(case, ranks, x, w) / 8)
    assert rows.dtype == E4M3
    assert_shards_equal(case, rows, x.astype(np.float64))


@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("m_shard, few_rows", [(300, None), (8, True)], ids=["tiles", "few"])
def test_several_weights_have_a_scale_each(x_dtype, dtype, m_shard, few_rows):
    """One call of tiles, or one each of few rows; with what each has of an epilogue."""
    cases, mesh = [Case(ALL_GATHER, m_shard, n, 528) for n in (1032, 264, 520)], mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = cases[0].specs(AXIS)
    x, ws = integers(cases[0], ranks, 8)[0], [integers(case, ranks, 9 + i)[1] for i, case in enumerate(cases)]
    w_scales = (jnp.float32(0.25), jnp.float32(2), jnp.float32(1))
    call = functools.partial(
        entwine_jax.all_gather_matmul,
        axis_name=AXIS,
        scales=(jnp.float32(0.5), w_scales),
        activation=("relu", None, None),
        transpose_w=True,
        strategy="fused",
        preferred_element_type=dtype,
        config=Config(few_rows=few_rows),
    )
    specs = x_spec, (P(*w_spec[::-1]),) * 3
    f = jax.shard_map(call, mesh=mesh, in_specs=specs, out_specs=(y_spec,) * 3)
    args = put(x.astype(x_dtype), mesh, x_spec), tuple(put(w.T.astype(E4M3), mesh, specs[1][0]) for w in ws)
    calls = entwine_jax.explain(f, *args)
    assert [(call.plan.few_rows, len(call.products)) for call in calls] == (
        [(True, 0)] * 3 if few_rows else [(False, 3)]
    )
    for case, w, y, scale in zip(cases, ws, jax.jit(f)(*args), w_scales, strict=True):
        want = exact_product(case, ranks, x, w) * float(scale) / 2
        assert_shards_equal(case, y, np.maximum(want, 0) if scale == 0.25 else want)


@pytest.mark.parametrize("op", OPS)
def test_epilogues(op):
    """Bias, relu and w as it lies, by the op and under automatic sharding: one call each, and no copy of w."""
    case, mesh = Case(op, 136, 264, 144), mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = integers(case, ranks, 7)
    bias = bias_of(case, ranks, 7)
    options = {"scales": SCALES, "preferred_element_type": jnp.float32, "activation": "relu", "transpose_w": True}
    specs = x_spec, P(*w_spec[::-1]), bias_spec(case)
    args = [put(v, mesh, s) for v, s in zip((x.astype(E4M3), w.T.astype(E4M3), bias), specs, strict=True)]

    def rank(x, w, b):
        return per_shard(case, bias=b, **options)(x, w)

    def automatic(x, w, b):
        out = NamedSharding(mesh, y_spec)
        return entwine_jax.collective_matmul(x, w, bias=b, out_sharding=out, strategy="fused", **options)

    for f in (jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=y_spec), automatic):
        (matmul,) = entwine_jax.explain(f, *args)
        assert (matmul.op, matmul.bias, matmul.activation) == (op, True, "relu") and "copy" not in matmul.reason
        assert_shards_equal(case, jax.jit(f)(*args), np.maximum(exact_product(case, ranks, x, w) / 8 + bias, 0))


@pytest.mark.parametrize("op", OPS)
def test_collective_matmul(op):
    """Under automatic sharding."""
    case, mesh = Case(op, 136, 264, 144), mesh_of()
    y_spec = case.specs(AXIS)[2]
    x, w = integers(case, team_size(mesh), 6)
    options = {"scales": SCALES, "preferred_element_type": jnp.bfloat16, "strategy": "fused"}
    run = jax.jit(lambda x, w: entwine_jax.collective_matmul(x, w, out_sharding=NamedSharding(mesh, y_spec), **options))
    x8, w8 = placed(case, mesh, x.astype(E4M3), w.astype(E4M3))
    assert [matmul.op for matmul in entwine_jax.explain(run, x8, w8)] == [op]
    assert_shards_equal(case, run(x8, w8), exact_product(case, team_size(mesh), x, w) / 8)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("x_dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("m_shard, n, k", [(136, 1032, 1040), (600, 4104, 4096)])
def test_random(op, x_dtype, m_shard, n, k):
    """The tensor cores cut sums of float8 products to some 14 bits as they go."""
    case, mesh = Case(op, m_shard, n, k), mesh_of()
    x, w = gaussians(case, team_size(mesh), 1)
    x, w = (np.asarray(x, np.float32) * 32).astype(x_dtype), (np.asarray(w, np.float32) * 256).astype(E4M3)
    want = reference(case, mesh)(*placed(case, mesh, x, w))[0] / 8
    for dtype in (jnp.float32, jnp.bfloat16):
        got = program(case, mesh, preferred_element_type=dtype)(*placed(case, mesh, x, w))
        assert_close(case, got, want, 1e-2)


def test_repeats_to_the_bit():
    case, mesh = Case(REDUCE_SCATTER, 600, 1032, 1040), mesh_of()
    x_spec, w_spec, _ = case.specs(AXIS)
    x, w = gaussians(case, team_size(mesh), 1)
    x, w = put((x * 32).astype(E4M3), mesh, x_spec), put((w * 256).astype(E4M3), mesh, w_spec)
    run = program(case, mesh)
    first = whole(run(x, w)).view(np.uint16)
    for _ in range(10):
        np.testing.assert_array_equal(whole(run(x, w)).view(np.uint16), first)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(op, check_vma):
    """Of ops that quantise, against the same on XLA, and against what isn't quantised."""
    case, mesh = Case(op, 264, 784, 528, (2,)), mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = case.specs(AXIS)
    x, w = gaussians(case, ranks, 1)
    x, w = placed(case, mesh, x, w)
    rng = np.random.default_rng(2)
    dy = put(rng.standard_normal(case.y_shape(ranks)).astype(jnp.bfloat16), mesh, y_spec)

    def run(name, strategy):
        call = lambda x, w: getattr(entwine_jax, name)(x, w, AXIS, strategy=strategy)  # noqa: E731
        whole = jax.shard_map(call, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec, check_vma=check_vma)

        @jax.jit
        def both(x, w, dy):
            y, back = jax.vjp(whole, x, w)
            return y, *back(dy)

        return both(x, w, dy)

    fused, xla, exact = run(f"float8_{op}", "fused"), run(f"float8_{op}", "xla"), run(op, "xla")
    for name, got, want, wide in zip(("y", "dx", "dw"), fused, xla, exact, strict=True):
        assert got.dtype == want.dtype == jnp.bfloat16
        assert float(relative_error(got, want)) <= 1.5e-2, name
        assert float(relative_error(got, wide)) <= 0.1, name  # e5m2 has two bits of fraction, e4m3 three


@pytest.mark.parametrize("op", OPS)
def test_gradients_of_several(op):
    """One call forward and one back, against the same on XLA; and a second derivative, which is XLA's either way."""
    cases, mesh = [Case(op, 264, 784 + (128 * i if op == ALL_GATHER else 0), 528) for i in range(2)], mesh_of()
    ranks = team_size(mesh)
    x_spec, w_spec, y_spec = cases[0].specs(AXIS)
    drawn = [gaussians(case, ranks, 1 + i) for i, case in enumerate(cases)]
    ws = tuple(put(w * (1 + 7 * i), mesh, w_spec) for i, (_, w) in enumerate(drawn))
    gather = op == ALL_GATHER
    x = put(drawn[0][0], mesh, x_spec) if gather else tuple(put(x, mesh, x_spec) for x, _ in drawn)
    specs = (x_spec if gather else (x_spec,) * 2, (w_spec,) * 2), (y_spec,) * 2 if gather else y_spec

    def whole(strategy):
        call = lambda x, w: getattr(entwine_jax, f"float8_{op}")(  # noqa: E731
            x, w, AXIS, strategy=strategy, residuals="operands"
        )
        return jax.shard_map(call, mesh=mesh, in_specs=specs[0], out_specs=specs[1])

    def loss(f, x, ws):
        return sum(jnp.sin(y.astype(jnp.float32) / 32).sum() for y in jax.tree.leaves(f(x, ws)))

    def second(f, x, ws):
        return jnp.square(jax.grad(loss, 1)(f, x, ws)[0].astype(jnp.float32)).sum()

    for of_loss in (loss, second):
        first, other = (
            jax.jit(jax.grad(functools.partial(of_loss, whole(s)), (0, 1)))(x, ws) for s in ("fused", "xla")
        )
        for got, want in zip(jax.tree.leaves(first), jax.tree.leaves(other), strict=True):
            assert got.dtype == want.dtype == jnp.bfloat16
            # What differs comes from y, of which either way rounds partial sums in its own order.
            assert float(relative_error(got, want)) <= (3e-2 if of_loss is loss else 0.1)
    calls = entwine_jax.explain(jax.grad(functools.partial(loss, whole("fused")), (0, 1)), x, ws)
    back = {ALL_GATHER: REDUCE_SCATTER, REDUCE_SCATTER: ALL_GATHER}
    assert [(m.op, len(m.products)) for m in calls] == [(o, 2) for o in (op, back.get(op)) if o]


@pytest.mark.parametrize("op", OPS)
def test_what_they_cannot_do(op):
    mesh = mesh_of()
    case = Case(op, 64, 64, 24)
    with pytest.raises(NotImplementedError, match=rf"{op}.*a row of x is \d+ x 1 = \d+ bytes, not a multiple of 16"):
        program(case, mesh)(
            np.zeros(case.x_shape(team_size(mesh)), E4M3), np.zeros(case.w_shape(team_size(mesh)), E4M3)
        )
    case = Case(op, 129, 64, 64)
    zeros = np.zeros(case.x_shape(team_size(mesh)), E4M3), np.zeros(case.w_shape(team_size(mesh)), E4M3)
    with pytest.raises(NotImplementedError, match="few_rows=True is for up to 128 rows"):
        program(case, mesh, config=Config(few_rows=True))(*zeros)
    with pytest.raises(NotImplementedError, match="precision=highest asks for more"):
        program(case, mesh, precision="highest")(*zeros)
