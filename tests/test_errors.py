"""Bad input: each a Python exception that names the op, the argument, both values and the fix, and does no harm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, PUBLIC, fused, integers, mesh_of, product, spread
from jax.sharding import PartitionSpec as P

import entwine_jax


@pytest.fixture(autouse=True)
def a_later_call_works():
    yield
    x, w = integers((8, 6), 1), integers((6, 4), 2)
    for op in OPS:
        np.testing.assert_array_equal(np.asarray(spread(fused, op, mesh_of((2,)))(x, w)), product(x, w))


def fails(error, match, x, w, op="all_gather_matmul", axis="t", mesh=None, **options):
    """Of a rank's call with x and w as they are, under jit."""
    mesh = mesh or mesh_of((2,))
    rank = jax.shard_map(
        lambda x, w: PUBLIC[op](x, w, axis, **{"strategy": "fused", **options}),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(mesh.axis_names),
    )
    with pytest.raises(error, match=match) as raised:
        jax.jit(rank)(x, w)
    assert str(raised.value).startswith(f"entwine_jax.{op}: ")


x, w = np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)


@pytest.mark.parametrize("op", OPS)
def test_contraction(op):
    fails(TypeError, r"last dimension of x \(4, 6\).*6.*w \(5, 8\).*5.*equal", x, w[:5], op)
    fails(TypeError, r"w's transpose would fit", x, np.ones((8, 6), np.float32), op)


@pytest.mark.parametrize("op", OPS)
def test_dimensions(op):
    fails(TypeError, r"x has shape \(6,\) but needs", x[0], w, op)
    fails(TypeError, r"x has shape \(\) but needs", x[0, 0, None][0] + jnp.zeros(()), w, op)
    fails(TypeError, r"w has shape \(6,\) but must be a matrix", x, w[:, 0], op)
    fails(TypeError, r"w has shape \(1, 6, 8\).*jax.vmap", x, w[None], op)


def test_not_an_array():
    rank = jax.shard_map(lambda x: PUBLIC[OPS[0]](x, [[1.0]], "t"), mesh=mesh_of((2,)), in_specs=P(), out_specs=P("t"))
    with pytest.raises(TypeError, match="all_gather_matmul: w must be a JAX or NumPy array, not list"):
        rank(x)


def test_rows_that_the_team_cant_share():
    for ranks, padded in ((2, 6), (3, 6), (4, 8)):
        message = rf"x \(5, 6\) has 5 rows.*the {ranks} ranks of axis 't'.*pad the rows to {padded}"
        fails(ValueError, message, np.ones((5, 6), np.float32), w, "matmul_reduce_scatter", mesh=mesh_of((ranks,)))


@pytest.mark.parametrize("op", OPS)
def test_axis(op):
    fails(ValueError, r"axis_name='model' is unbound.*\('t',\).*jax.shard_map.*'model'", x, w, op, axis="model")
    fails(ValueError, r"axis_name=\('t', 't'\)", x, w, op, axis=("t", "t"))
    fails(ValueError, r"axis_name=\(\)", x, w, op, axis=())
    with pytest.raises(ValueError, match=rf"{op}: axis_name='t' is unbound.*\(\).*jax.shard_map"):
        PUBLIC[op](x, w, "t")
    with pytest.raises(ValueError, match=rf"{op}: axis_name='t' is unbound"):  # an axis, but not of a mesh
        jax.vmap(lambda x: PUBLIC[op](x, w, "t"), axis_name="t")(x[None])


@pytest.mark.parametrize("op", OPS)
def test_strategy(op, monkeypatch):
    fails(
        ValueError,
        r"strategy='quick' is unknown; use one of \('auto', 'fused', 'resident', 'signal', 'xla'\)",
        x,
        w,
        op,
        strategy="quick",
    )
    monkeypatch.setenv("ENTWINE_STRATEGY", "slow")
    fails(ValueError, r"ENTWINE_STRATEGY='slow' is unknown", x, w, op, strategy=None)


def test_dtypes():
    for op in OPS:
        with jax.numpy_dtype_promotion("strict"):
            fails(TypeError, r"x is float32 and w is bfloat16.*'strict'.*cast", x, w.astype(jnp.bfloat16), op)
        fails(TypeError, "both bool.*cast", x.astype(bool), w.astype(bool), op)
        fails(NotImplementedError, r"'fused'.*int8\[1, 4, 6\].*not int8.*'xla'", x.astype("int8"), w.astype("int8"), op)
        fails(NotImplementedError, r"returns float32 .*not bfloat16", x, w, op, preferred_element_type=jnp.bfloat16)
        with jax.enable_x64(True):
            fails(NotImplementedError, r"'fused'.*float64\[6, 8\].*not float64", x.astype(float), w.astype(float), op)


def test_precision_and_result_type():
    fails(ValueError, r"precision='exact'", x, w, precision="exact")
    fails(TypeError, r"preferred_element_type='float33'", x, w, preferred_element_type="float33")
    fails(NotImplementedError, r"precision=TF32_TF32_F32 names an algorithm", x, w, precision="TF32_TF32_F32")
    algorithm = jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3
    fails(NotImplementedError, r"names an algorithm", x, w, precision=algorithm)


def test_empty_arrays_and_large_teams():
    fails(NotImplementedError, r"x float32\[1, 0, 6\].*empty", x[:0], w)


def test_partial_manual():
    """Another axis that XLA partitions itself: no custom call, but auto still works."""
    mesh = mesh_of((2, 4), ("d", "t"))

    def rank(x, w, strategy):
        return PUBLIC["all_gather_matmul"](x, w, "t", strategy=strategy)

    def spread_over_t(strategy):
        local = functools.partial(rank, strategy=strategy)
        return jax.jit(
            jax.shard_map(local, mesh=mesh, in_specs=(P("t"), P(None, "t")), out_specs=P(None, "t"), axis_names={"t"})
        )

    with pytest.raises(NotImplementedError, match=r"mesh axes \('d',\) aren't manual here.*axis_names"):
        spread_over_t("fused")(x, w)
    np.testing.assert_array_equal(np.asarray(spread_over_t("auto")(x, w)), product(x, w))
    gradient = jax.jit(jax.grad(lambda x: spread_over_t("auto")(x, w).sum()))(x)
    np.testing.assert_array_equal(np.asarray(gradient), product(np.ones((4, 8)), w.T))


def test_explicit_axes_beside_the_team():
    mesh = jax.make_mesh((2, 4), ("d", "t"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)

    def rank(x, w):
        return PUBLIC["all_gather_matmul"](x, w, "t")

    f = jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P("t"), axis_names={"t"})
    with pytest.raises(NotImplementedError, match=r"mesh axes \('d',\) are explicit beside axis_name='t'.*axis_names"):
        jax.jit(f)(x, w)


def test_lowering_for_another_platform():
    f = jax.jit(spread(fused, "all_gather_matmul", mesh_of((2,))))
    for platform in ("cuda", "tpu"):
        with pytest.raises(NotImplementedError, match=r"traced for cpu devices.*strategy='xla'"):
            f.trace(x, w).lower(lowering_platforms=(platform,))


@pytest.mark.parametrize(
    "field, value",
    [
        ("lead", -1),
        ("raster", 0),
        ("transport", "carry"),
        ("pushers", 1.5),
        ("tile_m", 2**31),
        ("workers", True),
        ("timeout_s", -1),
        ("timeout_s", float("nan")),
        ("stall_us", "1"),
    ],
)
def test_config(field, value):
    with pytest.raises(ValueError, match=rf"entwine_jax.Config: {field}={value!r} must be"):
        entwine_jax.Config(**{field: value})


def test_config_of_another_type():
    fails(ValueError, r"config=\{'lead': 3\} must be an entwine_jax.Config", x, w, config={"lead": 3})


@pytest.mark.parametrize(
    "variable, value, message",
    [
        ("TIMEOUT_S", "soon", "is not a number"),
        ("TIMEOUT_S", "-1", "must be"),
        ("WORKERS", "0", "must be"),
        ("STALL_US", "x", "is not a number"),
        ("STALL_SEED", "-3", "must be"),
    ],
)
def test_environment(variable, value, message, monkeypatch):
    monkeypatch.setenv(f"ENTWINE_{variable}", value)
    fails(ValueError, rf"ENTWINE_{variable}=.*{value}.* {message}", x, w)
    monkeypatch.delenv(f"ENTWINE_{variable}")  # before the call that shows that nothing broke
