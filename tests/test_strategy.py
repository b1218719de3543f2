"""What auto chooses on GPUs, and why not: a pure function, so that a CPU can show it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from helpers import OPS

import entwine_jax
from entwine_jax import _config, _obstacles, _shards, _strategy, _team


@pytest.fixture(autouse=True)
def gpus(monkeypatch):
    """An extension built with CUDA and four GPUs that see each other."""
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: True)
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: None)
    monkeypatch.setattr(_obstacles, "hopper_obstacle", lambda: None)
    monkeypatch.setattr(_obstacles, "domains", lambda: (0,) * 4)


def choose(
    op="all_gather_matmul",
    strategy="auto",
    dtype=jnp.bfloat16,
    result=None,
    m=64,
    n=128,
    k=256,
    config=None,
    gathers=False,
    scaled=False,
    transpose_w=False,
    precision=None,
    beside=(),
    **team,
):
    settings = _config.resolve(op, strategy, config)
    fields = {"axis_name": ("t",), "size": 4, "groups": (0, 1, 2, 3), "other_axes": (), "loose_axes": ()}
    whole = _team.Team(**{**fields, "platform": "cuda", **team})
    made = jnp.dtype(result or dtype)
    request = _strategy.Request(
        op, whole, transpose_w, made, precision, settings, gathers, scaled=scaled, beside=beside
    )
    w_shape = (n, k) if transpose_w else (k, n)
    x, w = jax.ShapeDtypeStruct((1, m, k), dtype), jax.ShapeDtypeStruct(w_shape, dtype)
    return _strategy.choose(request, x, w)


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
def test_predictions_decide(op):
    """The benchmark's ten shapes are fused."""
    for m, n, k in (
        (8192, 8192, 3584),
        (4096, 8192, 2048),
        (16384, 12288, 6144),
        (2048, 8192, 3584),
        (2048, 4096, 7168),
    ):
        rows = m // 2 if op == "all_gather_matmul" else m
        choice = choose(op, size=2, m=rows, n=n, k=k)
        assert choice.strategy == "fused" and choice.reason.startswith("predicted"), choice


def test_tiles_fit_the_rows():
    """Large tiles where there are enough of them, smaller ones where they would leave multiprocessors idle."""
    for m, tile in ((4096, (256, 256)), (512, (256, 128)), (128, (128, 128))):
        plan = choose(strategy="fused", size=2, m=m, n=3584, k=8192).plan
        assert (plan.tile_m, plan.tile_n) == tile and not plan.few_rows, (m, plan)
    # Where these make a wave and a bit, the columns in between; not in float32, nor for a hundredth.
    for sizes, tile in (
        ({"m": 2048, "n": 3584, "k": 8192}, (256, 224)),
        ({"m": 2048, "n": 3584, "k": 8192, "result": jnp.float32}, (256, 128)),
        ({"m": 4096, "n": 3584, "k": 8192}, (256, 256)),
        ({"m": 1024, "n": 5120, "k": 3200, "op": "matmul_reduce_scatter"}, (256, 160)),
        ({"m": 1024, "n": 5120, "k": 3200, "op": "matmul_all_reduce"}, (256, 160)),
    ):
        plan = choose(strategy="fused", size=2, **sizes).plan
        assert (plan.tile_m, plan.tile_n) == tile, (sizes, plan)
    config = entwine_jax.Config(tile_m=128, tile_n=128)
    assert choose(strategy="fused", size=2, m=4096, n=3584, k=8192, config=config).plan.tile_m == 128


@pytest.mark.parametrize("op", OPS)
def test_few_rows(op):
    """Up to 128 rows have kernels of their own, which read w once."""
    for m in (2, 16, 64):
        choice = choose(op, size=2, m=m, n=8192, k=8192)
        assert choice.strategy == "fused" and choice.plan.few_rows, choice
    if op == "matmul_all_reduce":
        assert choose(op, size=8, groups=tuple(range(8)), m=1, n=8192, k=8192).plan.few_rows
    # A number of the tiles' schedule asks for tiles, and so does few_rows=False.
    for config in (entwine_jax.Config(raster=2), entwine_jax.Config(few_rows=False)):
        assert not choose(op, size=2, m=16, n=8192, k=8192, strategy="fused", config=config).plan.few_rows
    config = entwine_jax.Config(few_rows=True)
    with pytest.raises(NotImplementedError, match="few_rows=True is for up to 128 rows, not"):
        choose(op, size=2, m=600, strategy="fused", config=config)
    with pytest.raises(NotImplementedError, match="the host executor knows tiles only, not config's few_rows=True"):
        choose(op, size=2, platform="cpu", strategy="fused", config=config)


def test_calls_that_gather_are_predicted_as_tiles():
    """The kernels for few rows gather for nobody else."""
    plain = choose(size=2, m=8, n=8192, k=8192)
    assert plain.strategy == "fused" and plain.plan.few_rows
    gathering = choose(size=2, m=8, n=8192, k=8192, gathers=True)
    assert gathering.strategy == "xla"
    named = choose(size=2, m=8, n=8192, k=8192, gathers=True, strategy="fused")
    assert not named.plan.few_rows


@pytest.mark.parametrize("op", OPS)
def test_what_tiles_are_bad_at_is_left_to_xla(op):
    """More than few rows, but not enough of them to be worth reading much of w twice."""
    rows = 80 if op == "all_gather_matmul" else 160
    choice = choose(op, size=2, m=rows, n=8192, k=8192)
    assert choice.strategy == "xla" and choice.plan is None and "us on XLA" in choice.reason, choice
    assert choose(op, size=2, m=rows, n=8192, k=8192, strategy="fused").strategy == "fused"


# m, n, k of one rank and XLA's time in milliseconds, on two H200s.
ALL_REDUCE_ON_XLA = [
    (8192, 8192, 3584, 1.143),
    (4096, 8192, 2048, 0.475),
    (16384, 12288, 6144, 4.618),
    (8192, 8192, 1024, 0.707),
    (2048, 8192, 3584, 0.350),
]


def test_all_reduce_predictions():
    for m, n, k, ms in ALL_REDUCE_ON_XLA:
        choice = choose("matmul_all_reduce", size=2, m=m, n=n, k=k)
        assert choice.strategy == "fused", choice
        xla_us = float(choice.reason.split()[-4])
        assert 0.85 * ms < xla_us * 1e-3 < 1.15 * ms
        # Twice the bytes: what is bound by the link is so sooner, and pushes.
        assert choice.plan.transport == ("push" if k <= 2048 else "pull")
    for rows in (1, 8, 63, 64, 128):  # a decoder's few rows, of which an odd number is no obstacle
        assert choose("matmul_all_reduce", size=2, m=rows, n=8192, k=3584).plan.few_rows
        assert choose("matmul_all_reduce", "fused", size=2, m=rows, n=8192, k=3584).strategy == "fused"


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])
def test_fused(op, dtype):
    for options in ({}, {"result": jnp.float32}, {"n": 8, "k": 8, "m": 4}, {"size": 2}, {"strategy": "fused"}):
        choice = choose(op, dtype=dtype, **options)
        assert choice.strategy == "fused" and choice.plan.target == "sm90", choice
        assert choice == choose(op, **options), "one schedule for either type"
    assert choose(op, config=entwine_jax.Config(lead=7, transport="push")).plan.lead == 7


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"dtype": jnp.float32}, "take bfloat16 and float16 operands, not float32"),
        ({"dtype": jnp.int8}, "not int8"),
        ({"result": jnp.float16}, "return bfloat16 or float32 here, not float16"),
        ({"dtype": jnp.float16, "result": jnp.bfloat16}, "return float16 or float32 here, not bfloat16"),
        ({"n": 129}, r"a row of w is 129 x 2 = 258 bytes, not a multiple of 16 \(pad to 136 columns\)"),
        ({"k": 100}, r"a row of x is 100 x 2 = 200 bytes"),
        ({"size": 16, "groups": tuple(range(16))}, "at most 8 ranks, not 16"),
        ({"loose_axes": ("d",)}, "aren't manual here"),
        ({"config": entwine_jax.Config(tile_m=64)}, "tile_m=64, tile_n=None is none of the tiles"),
        ({"config": entwine_jax.Config(tile_m=128, tile_n=256)}, "tile_m=128, tile_n=256 is none"),
        ({"platform": "rocm"}, "'rocm' has no fused implementation"),
    ],
)
def test_not_fused(options, reason):
    choice = choose(**options)
    assert choice.strategy == "xla" and choice.plan is None
    with pytest.raises(NotImplementedError, match=f"all_gather_matmul: strategy='fused' can't run.*{reason}") as raised:
        choose(strategy="fused", **options)
    assert choice.reason in str(raised.value)


FLOAT8 = {"dtype": jnp.float8_e4m3fn, "result": jnp.bfloat16, "scaled": True}


@pytest.mark.parametrize("op", OPS)
def test_float8(op):
    # Rows that all-gather gathers, and that the others share.
    sizes = {"size": 2, "m": 4096 if op == "all_gather_matmul" else 8192, "n": 8192, "k": 7168}
    narrow, wide = choose(op, **sizes, **FLOAT8), choose(op, **sizes)
    assert narrow.strategy == wide.strategy == "fused"
    assert float(narrow.reason.split()[1]) < 0.6 * float(wide.reason.split()[1])
    assert narrow.reason.endswith(
        f"; w is transposed first, a copy of {8192 * 7168} bytes unless it is a transpose itself"
    )
    assert "copy" not in choose(op, **sizes, **FLOAT8, transpose_w=True).reason
    # Twice as fast a product is sooner bound by the link.
    assert choose(op, "fused", size=2, m=8192, n=8192, k=2048, **FLOAT8).plan.transport == (
        "pull" if op == "all_gather_matmul" else "push"
    )
    # Of few rows w's bytes are what counts, and halve.
    few, wide = choose(op, size=2, m=16, n=8192, k=8192, **FLOAT8), choose(op, size=2, m=16, n=8192, k=8192)
    assert few.strategy == "fused" and few.plan.few_rows and wide.plan.few_rows
    assert float(few.reason.split()[1]) < 0.7 * float(wide.reason.split()[1])
    for config in (entwine_jax.Config(raster=2), entwine_jax.Config(few_rows=False)):
        assert not choose(op, "fused", size=2, m=16, n=8192, k=8192, config=config, **FLOAT8).plan.few_rows


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"k": 24}, r"a row of x is 24 x 1 = 24 bytes, not a multiple of 16 \(pad to 32 columns\)"),
        ({"n": 20}, r"a row of the result is 20 x 2 = 40 bytes, not a multiple of 16 \(pad to 24 columns\)"),
        ({"n": 20, "result": jnp.float32, "k": 8}, "a row of x is 8 x 1"),
        ({"precision": "highest"}, "precision=highest asks for more than the tensor cores' sums of float8"),
        ({"precision": (None, jax.lax.Precision.HIGH)}, "asks for more than"),
        ({"config": entwine_jax.Config(few_rows=True), "m": 33}, "few_rows=True is for up to 128 rows, not 132"),
    ],
)
def test_float8_not_fused(options, reason):
    with pytest.raises(NotImplementedError, match=f"all_gather_matmul: strategy='fused' can't run.*{reason}"):
        choose(strategy="fused", **{**FLOAT8, **options})
    assert choose(**{**FLOAT8, **options}).strategy == "xla"
    # A w that needs no more columns than 16-bit ones: its rows are k, once it is transposed.
    assert choose(strategy="fused", **{**FLOAT8, "n": 24, "precision": "default"}).strategy == "fused"


def test_without_cuda_or_peers(monkeypatch):
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: "GPU 1 can't read the memory of GPU 0")
    assert "memory of GPU 0" in choose().reason
    with pytest.raises(NotImplementedError, match="memory of GPU 0"):
        choose(strategy="fused")
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: False)
    assert "built without CUDA" in choose().reason


@pytest.mark.parametrize(
    "groups, reason",
    [
        (range(8), None),  # (2, 4): tensor parallelism within a host
        ((0, 4, 1, 5, 2, 6, 3, 7), "a team along this axis spans 2 NVLink domains"),  # (4, 2), transposed
        ((0, 1, 2, 4, 3, 5, 6, 7), "a team along this axis spans 2 NVLink domains"),  # some teams do, some don't
        (range(4), "the mesh has 4 of 8 GPUs in 2 NVLink domains"),  # whose devices could be any
    ],
)
def test_several_nvlink_domains(monkeypatch, groups, reason):
    """Two hosts of four GPUs. A named strategy is trusted."""
    monkeypatch.setattr(_obstacles, "domains", lambda: (0, 0, 0, 0, 1, 1, 1, 1))
    shape = {"size": 2 if groups == (0, 1, 2, 4, 3, 5, 6, 7) else 4, "groups": tuple(groups)}
    for op in OPS:
        large = {"m": 4096, "n": 8192, "k": 4096, **shape}
        assert choose(op, strategy="fused", **large).strategy == "fused"
        choice = choose(op, **large)
        assert choice.strategy == ("fused" if reason is None else "xla")
        assert reason is None or reason in choice.reason


def test_equal_requests_trace_once():
    """The primitive's parameters are values: equal calls share compiled code."""
    a, b = choose(), choose()
    assert a == b and hash(a) == hash(b) and a is not b
    assert dataclasses.replace(a, reason="") != a


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("transpose_w", [False, True])
def test_products_of_one_x_in_calls_of_their_own(op, transpose_w):
    """Each is faster than XLA alone; XLA, which moves bytes once for all of them, is faster than all of them."""

    def chosen(*columns):
        own, *beside = columns
        sizes = {"n": own, "k": 8192} if op == "all_gather_matmul" else {"n": 8192, "k": own}
        rows, gathers = (4096, False) if op == "all_gather_matmul" else (8192, True)  # as gradients do
        return choose(op, size=2, m=rows, **sizes, transpose_w=transpose_w, beside=(*beside,), gathers=gathers)

    assert chosen(1024).strategy == "fused"
    for columns in ((1024, 128, 128), (128, 1024, 128)):
        choice = chosen(*columns)
        assert choice.strategy == "xla" and "us for the 3 products of this x in calls of their own" in choice.reason
    for columns in ((3584, 3584), (3584,)):
        assert chosen(*columns).strategy == "fused"
    asked = choose(op, size=2, m=4096, n=1024, k=1024, beside=(128, 128), strategy="fused")
    assert asked.strategy == "fused"


def test_what_gradients_gather_beside_is_predicted():
    """Rows of x take as long on the link as dx; on XLA that is a gather more, if it has none of the forward pass."""

    def us(gathers):
        reason = choose("matmul_reduce_scatter", size=2, m=8192, n=8192, k=512, gathers=gathers).reason
        return [float(us) for us in re.findall(r"(\d+) us", reason)]

    (fused, xla), (fused_too, xla_too) = us(False), us(True)
    link = 8192 * 8192 / 361e3  # the bytes of a chunk, in microseconds
    assert fused_too - fused == pytest.approx(link, rel=0.1) and xla_too - xla > link
    # Short products: forward, XLA's one gather is as good as three; backward that gather is there, so that it wins.
    choice = choose("matmul_reduce_scatter", size=2, m=4096, n=4096, k=2048, gathers=True, beside=(512, 512))
    assert choice.strategy == "xla"


@pytest.mark.parametrize("op", ["all_gather_matmul", "matmul_reduce_scatter"])
@pytest.mark.parametrize("count", [1, 3])
def test_whether_shards_are_left_to_xla(op, count):
    """What the partitioner asks before it gathers rows itself."""
    team = _team.Team(("t",), 2, (0, 1), (), (), platform="cuda")

    def ours(m, n, strategy="auto", dtype=jnp.bfloat16):
        gather, settings = op == "all_gather_matmul", _config.resolve(op, strategy, None)
        request = _strategy.Request(op, team, False, jnp.dtype(dtype), None, settings)
        x, w = (8192, n) if gather else (n, 8192)
        xs = [jax.ShapeDtypeStruct((2, m // 2, x), dtype)] * count
        ws = [jax.ShapeDtypeStruct((x, w), dtype)] * count
        return _shards.ours(request, xs[0], ws[0]) if count == 1 else _shards.several_ours(request, xs, ws)

    assert ours(8192, 3584) and not ours(8192, 3584, dtype=jnp.float32)
    assert not ours(8192, 3584, strategy="xla") and ours(8192, 3584, strategy="signal")
    assert ours(16, 3584) == (count == 1 or op == "all_gather_matmul")  # kernels for few rows gather nothing beside
    with pytest.raises(NotImplementedError, match="can't run x float32"):
        ours(8192, 3584, strategy="fused", dtype=jnp.float32)
