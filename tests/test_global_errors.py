"""Bad input to collective_matmul: exceptions that name the argument and the fix, in each mode; nothing dies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import setup
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

X, W = np.ones((8, 16, 24), np.float32), np.ones((24, 32), np.float32)
AXES = r"axes of the mesh are {'d': 2, 't': 4}"


def call(**options):
    return jax.jit(lambda x, w: entwine_jax.collective_matmul(x, w, **options))


def fails(error, match, f, x=X, w=W):
    with pytest.raises(error, match=rf"(?s)entwine_jax.collective_matmul: .*{match}"):
        f(x, w)


@pytest.fixture(params=["auto", "explicit"])
def mode(request):
    return request.param


def test_axes(mode):
    with setup(mode) as s:
        args = s.place(X, W)
        fails(ValueError, rf"axis_name='model' names 'model', but the {AXES}", call(axis_name="model"), *args)
        fails(ValueError, r"axis_name=\('t', 't'\) must name", call(axis_name=("t", "t")), *args)
        fails(ValueError, r"axis_name=\(\) must name", call(axis_name=()), *args)
        fails(ValueError, rf"out_sharding=.*'q'.* names 'q', but the {AXES}", call(out_sharding=P("q")), *args)
        fails(ValueError, r"out_sharding=P\('t', 't'\) uses axis 't' twice", call(out_sharding=P("t", "t")), *args)
        fails(ValueError, r"has 4 dimensions, the result only 3", call(out_sharding=P(None, None, None, "t")), *args)
        fails(TypeError, r"out_sharding='t' must be a jax.sharding.PartitionSpec", call(out_sharding="t"), *args)


def test_operands(mode):
    with setup(mode) as s:
        x, w = s.place(X, W)
        fails(TypeError, r"x has shape \(24,\) but needs rows", call(), X[0, 0], W)
        fails(TypeError, r"w has shape \(1, 24, 32\)", call(), X, W[None])
        fails(TypeError, r"24 but the first of w \(32, 24\) has size 32.*transpose would fit", call(), X, W.T)
        fails(TypeError, r"bias has shape \(3,\).*\(32,\)", call(bias=np.ones(3)), x, w)
        fails(ValueError, r"strategy='quick' is unknown", call(strategy="quick"), x, w)
        fails(ValueError, r"config=3 must be", call(config=3), x, w)
        fails(TypeError, r"preferred_element_type='float33'", call(preferred_element_type="float33"), x, w)


# x, w, and what is wrong with them
UNFIT = [
    (P("d", "t"), P("d", "t"), "w .*is sharded on both dimensions: (constrain|move) it to the tensor axis alone"),
    (P(None, None, "t"), P("d"), "disagree.*(constrain|reshard)"),
    (P("d", "t"), P("t"), "x's and w's shards of the contraction disagree, None and 't': constrain"),
]


@pytest.mark.parametrize("x_spec, w_spec, match", UNFIT)
def test_shardings_that_select_nothing(mode, x_spec, w_spec, match):
    """An error under a named strategy. Else a plain dot, with the reason in explain, or an error as for jnp.matmul."""
    with setup(mode) as s:
        args = s.place(X, W, specs=(x_spec, w_spec))
        error = jax.errors.JaxRuntimeError if mode == "auto" else (NotImplementedError, ValueError)
        fails(error, match, call(strategy="fused"), *args)
        try:
            (found,) = entwine_jax.explain(call(), *args)
        except ValueError as refused:
            assert mode == "explicit" and "entwine_jax.collective_matmul: " in str(refused)
        else:
            assert found.op == "dot"
            np.testing.assert_array_equal(np.asarray(call()(*args)), np.full((8, 16, 32), 24))


def test_another_axis_than_named(mode):
    with setup(mode) as s:
        args = s.place(X, W)
        error = jax.errors.JaxRuntimeError if mode == "auto" else NotImplementedError
        fails(error, r"over axis 't', not axis_name='d'", call(axis_name="d", strategy="fused"), *args)


def test_output_that_would_be_gathered_again():
    with setup("auto") as s:
        out = NamedSharding(s.mesh, P())
        message = r"y P\(None, None, None\); constrain x or y.*a row of the table"
        fails(jax.errors.JaxRuntimeError, message, call(out_sharding=out, strategy="fused"), *s.place(X, W))


def test_output_sharding_without_a_mesh():
    fails(ValueError, r"needs a mesh.*jax.set_mesh, or pass a jax.NamedSharding", call(out_sharding=P(None, "t")))


def test_named_strategy_that_cannot_run(mode):
    """The per-shard op's own message, from the partitioner too."""
    with setup(mode) as s, pytest.raises((NotImplementedError, jax.errors.JaxRuntimeError), match="not int8"):
        call(strategy="fused")(*s.place(X.astype("int8"), W.astype("int8")))


def inside(mesh, axis_names, **options):
    def rank(x, w):
        return entwine_jax.collective_matmul(x, w, **options)

    return jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=P(), out_specs=P(), axis_names=axis_names, check_vma=False))


def test_manual():
    """x and w are shards, and the wrong guess would be a wrong result."""
    with setup("manual") as s:
        every = {"d", "t"}
        fails(ValueError, r"x and w are shards.*axis_name= one of these", inside(s.mesh, every))
        fails(ValueError, r"axis_name='q' is none of them", inside(s.mesh, every, axis_name="q", out_sharding=P()))
        fails(ValueError, r"axis_name='t' needs out_sharding= too: columns", inside(s.mesh, every, axis_name="t"))
        bad = inside(s.mesh, every, axis_name="t", out_sharding=P("t"))
        fails(ValueError, r"out_sharding=.*must have axis_name='t' as it is at rows", bad)


@pytest.mark.parametrize("context", ["", "with mesh"])
@pytest.mark.filterwarnings("ignore:.*context manager has been deprecated")
def test_partially_manual(context):
    """Here custom_partitioning itself would fail, or kill the process under `with mesh:`."""
    with setup("partial") as s:
        if context:
            s.mesh.__enter__()
        try:
            message = r"over axes \('d',\), x and w may be sharded.*axis_name= one of those and out_sharding="
            fails(ValueError, message, inside(s.mesh, {"d"}))
            fails(ValueError, message, inside(s.mesh, {"d"}, axis_name="t"))
            fails(ValueError, r"names 'q'", inside(s.mesh, {"d"}, axis_name="q", out_sharding=P()))
            both = inside(s.mesh, {"d"}, axis_name=("d", "t"), out_sharding=P(None, ("d", "t")))
            fails(ValueError, r"is manual here in part, 'd' is", both)
            good = inside(s.mesh, {"d"}, axis_name="t", out_sharding=P(None, "t"), strategy="fused")
            np.testing.assert_array_equal(np.asarray(good(X, W)), np.full((8, 16, 32), 24))
        finally:
            if context:
                s.mesh.__exit__(None, None, None)


def test_bfloat16_sums_in_a_partially_manual_mesh():
    """XLA's CPU compiler aborts on them; ours are taken in float32 there."""
    mesh = jax.make_mesh((2, 2, 2), ("d", "t", "u"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    for out in (P(), P(None, "t")):
        f = inside(mesh, {"d"}, axis_name="t", out_sharding=out)
        y = f(X.astype(jnp.bfloat16), W.astype(jnp.bfloat16))
        assert y.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(y, np.float32), np.full((8, 16, 32), 24))
