"""Products of one x asked for one by one under automatic sharding know of each other, so that auto can add them up."""

import gc

import jax
import jax.numpy as jnp
import pytest
from global_view import collectives, setup
from helpers import assert_close, normal
from jax.extend.core import jaxprs_in_params

import entwine_jax
from entwine_jax import _shared

COLUMNS = (24, 16, 8)


def products_in(jaxpr):
    """Calls that XLA will partition, in traced order."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "custom_partitioning":
            yield from equation.params["static_args"]
        for inner in jaxprs_in_params(equation.params):
            yield from products_in(inner)


def found_in(f, *args):
    calls = [call for call in products_in(jax.make_jaxpr(f)(*args).jaxpr) if call.product != "w"]
    return [(call.shared.op, call.shared.columns, sorted(call.shared.group.columns)) for call in calls]


def weights(columns=COLUMNS):
    return [normal((24, n), 2 + i) for i, n in enumerate(columns)]


def one_by_one(x, *ws, **options):
    return [entwine_jax.collective_matmul(x, w, **options) for w in ws]


def test_forward_and_backward():
    x, ws, own = normal((2, 16, 24), 1), weights(), sorted(COLUMNS)

    def loss(x, *ws):
        return sum(jnp.sum(y * y) for y in one_by_one(x, *ws))

    found = found_in(jax.grad(loss, (0, 1, 2, 3)), x, *ws)
    assert found[:3] == [("all_gather_matmul", n, own) for n in COLUMNS]
    assert sorted(found[3:]) == sorted(("matmul_reduce_scatter", n, own) for n in COLUMNS)


def test_only_of_the_same_x():
    x, ws = normal((16, 24), 1), weights()
    found = found_in(lambda x, *ws: [*one_by_one(x, *ws[:2]), *one_by_one(x + 1, ws[2])], x, *ws)
    assert [columns for *_, columns in found] == [[16, 24], [16, 24], [8]]
    # Each trace counts for itself.
    assert [columns for *_, columns in found_in(lambda x, w: one_by_one(x, w), x, ws[0])] == [[24]]


def test_transposed_weights():
    x, ws = normal((16, 24), 1), [w.T for w in weights()]
    found = found_in(lambda x, *ws: one_by_one(x, *ws, transpose_w=True), x, *ws)
    assert found == [("all_gather_matmul", n, sorted(COLUMNS)) for n in COLUMNS]


def test_promoted_operands_and_layers():
    """x is the same to the user, though each product casts it, or a layer of Flax does."""
    x, ws = jnp.bfloat16(normal((16, 24), 1)), weights()
    assert [columns for *_, columns in found_in(one_by_one, x, *ws)] == [sorted(COLUMNS)] * 3
    nnx = pytest.importorskip("flax.nnx", reason="needs Flax: pip install 'entwine-jax[flax]'")
    from entwine_jax.flax import DotGeneral

    options = {"dot_general": DotGeneral("t"), "dtype": jnp.bfloat16, "rngs": nnx.Rngs(0)}
    layers = [nnx.Linear(24, n, **options) for n in COLUMNS]
    found = found_in(lambda x: [layer(x) for layer in layers], x)
    assert [columns for *_, columns in found] == [sorted(COLUMNS)] * 3


def test_nothing_is_kept():
    with setup("auto") as s:
        args = s.place(normal((8, 16, 24), 1), *weights(), specs=[s.specs[0], *[s.specs[1]] * 3])
        one_by_one(*args)  # what isn't traced has no others
        assert not _shared._groups
        jax.block_until_ready(jax.jit(one_by_one)(*args))
        gc.collect()
        assert not _shared._groups


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("residuals", ["regather", "save"])
def test_xla_gathers_once(residuals, together):
    """What is left to XLA is gathered by its partitioner: once for all products of x, forward and backward."""
    with setup("auto") as s:
        args = s.place(normal((8, 16, 24), 1), *weights(), specs=[s.specs[0], *[s.specs[1]] * 3])

        def loss(x, *ws):
            options = {"residuals": residuals, "strategy": "xla"}
            ys = entwine_jax.collective_matmul(x, ws, **options) if together else one_by_one(x, *ws, **options)
            return sum(jnp.sum(jnp.sin(y)) for y in ys)

        for f in (loss, jax.grad(loss, (0, 1, 2, 3))):
            found = collectives(jax.jit(f).lower(*args).compile().as_text())
            assert found["all-gather"] == 1, found
        wanted = jax.grad(lambda x, *ws: sum(jnp.sum(jnp.sin(x @ w)) for w in ws), (0, 1, 2, 3))
        assert_close(jax.jit(f)(*args), wanted(*(jnp.asarray(v) for v in jax.device_get(args))))


def test_xla_gathers_once_for_both_gradients():
    """Also dy, of what a reduce-scatter has scattered."""
    with setup("auto") as s:
        args = s.place(normal((8, 16, 24), 1), normal((24, 32), 2), normal((32, 24), 3))

        def loss(x, w_up, w_down):
            h = s.up(x, w_up, strategy="xla")
            return jnp.sum(jnp.sin(x + s.down(jnp.sin(h), w_down, strategy="xla")))

        found = collectives(jax.jit(jax.grad(loss, (0, 1, 2))).lower(*args).compile().as_text())
        assert (found["all-gather"], found["reduce-scatter"]) == (2, 2), found


@pytest.mark.parametrize("columns, wanted", [(48, (32, 16)), (24, (16, 8)), (1, (1, 1))])
def test_one_ranks_columns_of_the_others(columns, wanted):
    group = _shared.Group()
    group.columns += [48, 32, 16]
    shared = _shared.Shared(group, 48)
    assert shared.beside("all_gather_matmul", columns) == wanted
    assert shared.beside("matmul_reduce_scatter", columns) == ()
    assert shared.gradient().beside("matmul_reduce_scatter", columns) == wanted
    assert shared.gradient().gradient() is None


@pytest.mark.parametrize("mode", ["explicit", "manual"])
def test_xla_merges_gathers(mode):
    """Where a rank's program is traced as a whole, XLA sees that they are the same."""
    with setup(mode) as s:
        specs = [s.specs[0], *[s.specs[1]] * 3]
        args = s.place(normal((8, 16, 24), 1), *weights(), specs=specs)

        def f(x, *ws):
            return [s.up(x, w, strategy="xla") for w in ws]

        run = s.spread(f, in_specs=tuple(specs), out_specs=[s.specs[3]] * 3)

        def loss(*args):
            return sum(jnp.sum(jnp.sin(y)) for y in run(*args))

        for g in (run, jax.grad(loss, (0, 1, 2, 3))):
            assert collectives(jax.jit(g).lower(*args).compile().as_text())["all-gather"] == 1
