"""entwine_jax.flax: values, gradients and programs in each mode; parameters and checkpoints; what it refuses."""

import contextlib
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MESHES, collectives
from helpers import assert_close, mesh_of, normal
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

pytest.importorskip("flax", minversion="0.12", reason="needs Flax: pip install 'entwine-jax[flax]'")

from flax import linen, nnx

import entwine_jax
import entwine_jax.flax as ours
from entwine_jax.flax import _dot_general

D, HIDDEN, BATCH, ROWS = 24, 32, 8, 16
BOTH = {"entwine_all_gather_matmul": 1, "entwine_matmul_reduce_scatter": 1}


@contextlib.contextmanager
def mesh_set(mode, name="2x4"):
    shape, names, order = MESHES[name]
    kind = AxisType.Explicit if mode == "explicit" else AxisType.Auto
    mesh = Mesh(mesh_of(shape, names, order).devices, names, axis_types=(kind,) * len(names))
    with jax.set_mesh(mesh):
        yield mesh, P(tuple(name for name in names if name != "t") or None, "t", None)


def put(x, mesh, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def inputs():
    return normal((BATCH, ROWS, D), 1), normal((BATCH, ROWS, D), 2)


class Mlp(nnx.Module):
    def __init__(self, rngs, strategy="fused"):
        options = {"axis_name": "t", "strategy": strategy, "rngs": rngs, "bias_init": nnx.initializers.normal()}
        self.up = ours.ColumnParallelLinear(D, HIDDEN, **options)
        self.down = ours.RowParallelLinear(HIDDEN, D, **options)

    def __call__(self, x):
        return x + self.down(jnp.sin(self.up(x)))


class PlainMlp(nnx.Module):
    """The same in plain Flax, on one device."""

    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(D, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, D, rngs=rngs)

    __call__ = Mlp.__call__


def whole(tree):
    """Everything on one device, as a model without a mesh has it."""
    return jax.tree.map(lambda v: jnp.asarray(np.asarray(v)), tree)


def reference(state, x, dy):
    """The plain model's value and gradients with the given parameters."""
    graphdef, like = nnx.split(nnx.eval_shape(lambda: PlainMlp(nnx.Rngs(0))))
    nnx.replace_by_pure_dict(like, whole(nnx.to_pure_dict(state)))
    y, pull = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), like, x)
    state, dx = pull(dy)
    return y, nnx.to_pure_dict(state), dx


CASES = [*(("auto", name) for name in MESHES), *(("explicit", name) for name in ("2x4", "2x2x2 last, permuted"))]


@pytest.mark.each_value
@pytest.mark.parametrize("mode, name", [*CASES, ("manual", "2x4"), ("partial", "2x4")])
def test_nnx_mlp(mode, name):
    x, dy = inputs()
    with mesh_set(mode, name) as (mesh, rows):
        graphdef, state = nnx.split(Mlp(nnx.Rngs(0)))
        specs = nnx.get_partition_spec(state)

        def apply(state, x):
            return nnx.merge(graphdef, state)(x)

        if mode == "manual":
            apply = jax.shard_map(apply, in_specs=(specs, rows), out_specs=rows)
        elif mode == "partial":
            apply = jax.shard_map(apply, in_specs=(P(), P("d")), out_specs=P("d"), axis_names={"d"})

        def pull(state, x, dy):
            y, pull = jax.vjp(apply, state, x)
            return y, *pull(dy)

        args = state, put(x, mesh, rows)
        assert all(m.bias for m in entwine_jax.explain(apply, *args))
        assert collectives(jax.jit(apply).lower(*args).compile().as_text()) == BOTH
        compiled = jax.jit(pull).lower(*args, put(dy, mesh, rows)).compile()
        found = collectives(compiled.as_text())
        assert {op: found[op] for op in BOTH} == dict.fromkeys(BOTH, 2)
        assert found.keys() <= {*BOTH, "all-gather", "all-reduce"}  # dW's
        y, dstate, dx = compiled(*args, put(dy, mesh, rows))
    assert_close(whole((y, nnx.to_pure_dict(dstate), dx)), reference(state, x, dy))


class Heads(nnx.Module):
    """Query, key and value, of few key and value heads."""

    def __init__(self, rngs, **options):
        options = {"axis_name": "t", "strategy": "fused", "rngs": rngs} | options
        self.q = ours.ColumnParallelLinear(D, HIDDEN, bias_init=nnx.initializers.normal(), **options)
        self.k = ours.ColumnParallelLinear(D, 8, use_bias=False, **options)
        self.v = ours.ColumnParallelLinear(D, 8, **options)

    @property
    def layers(self):
        return self.q, self.k, self.v


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual", "partial"])
def test_nnx_layers_at_once(mode):
    """The same as one by one, gradients included, in one call where that is known."""
    x, _ = inputs()
    with mesh_set(mode) as (mesh, rows):
        graphdef, state = nnx.split(Heads(nnx.Rngs(0)))
        specs, columns = nnx.get_partition_spec(state), P("d", None, "t")

        def both(call):
            def apply(state, x):
                return call(nnx.merge(graphdef, state).layers, x)

            if mode == "manual":
                apply = jax.shard_map(apply, in_specs=(specs, rows), out_specs=(columns,) * 3)
            elif mode == "partial":
                apply = jax.shard_map(apply, in_specs=(P(), P("d")), out_specs=P("d"), axis_names={"d"})

            def loss(state, x):
                return sum(jnp.sum(jnp.sin(y)) for y in apply(state, x))

            return jax.jit(apply), jax.jit(jax.grad(loss, (0, 1)))

        args = state, put(x, mesh, rows)
        at_once, one_by_one = both(ours.at_once), both(lambda layers, x: tuple(layer(x) for layer in layers))
        for got, wanted in zip(at_once, one_by_one, strict=True):
            assert_close(got(*args), wanted(*args))
        calls = {"entwine_all_gather_matmul": 3 if mode == "partial" else 1}
        assert collectives(at_once[0].lower(*args).compile().as_text()) == calls


def test_gated_nnx_layers_at_once():
    x, _ = inputs()
    with mesh_set("explicit") as (mesh, rows):
        options = {"axis_name": "t", "rngs": nnx.Rngs(0), "bias_init": nnx.initializers.normal()}
        gate, up = (ours.ColumnParallelLinear(D, HIDDEN, **options) for _ in range(2))
        x = put(x, mesh, rows)
        h = nnx.jit(lambda gate, up, x: ours.at_once((gate, up), x, gated=True, activation="silu"))(gate, up, x)
        assert_close(h, jax.nn.silu(gate(x)) * up(x))


def test_what_cannot_be_at_once():
    with mesh_set("auto"):
        heads, other = Heads(nnx.Rngs(0)), Heads(nnx.Rngs(0), residuals="save")
        x, row = jnp.zeros((4, D)), jnp.zeros((D,))
        plain = nnx.Linear(D, 8, rngs=nnx.Rngs(0))
        for error, words, layers, given in (
            (TypeError, "two or more", (heads.q,), x),
            (TypeError, r"layers\[1\] is Linear", (heads.q, plain), x),
            (ValueError, r"layers\[1\] has dot_general", (heads.q, other.k), x),
            (ValueError, "need rows to gather", heads.layers, row),
        ):
            with pytest.raises(error, match=words):
                ours.at_once(layers, given)


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_nnx_parameters(mode):
    """Sharded from the start, with Flax's own metadata; eagerly, under jit and as shapes alike."""
    with mesh_set(mode) as (mesh, _):
        kernels = {
            "up": (P(None, "t"), P("t")),
            "down": (P("t", None), P(None)),
        }

        def make():
            return Mlp(nnx.Rngs(0))

        for model in (make(), nnx.jit(make)()):
            specs = nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(model)))
            for name, (kernel, bias) in kernels.items():
                layer = getattr(model, name)
                assert isinstance(layer, nnx.Linear)
                assert specs[name] == {"kernel": kernel, "bias": bias}
                for value, spec in ((layer.kernel[...], kernel), (layer.bias[...], bias)):
                    assert value.sharding.is_equivalent_to(NamedSharding(mesh, spec), value.ndim)
        assert nnx.eval_shape(make).up.kernel.shape == (D, HIDDEN)
    same = nnx.Linear(D, HIDDEN, bias_init=nnx.initializers.normal(), rngs=nnx.Rngs(0))
    assert_close(whole(nnx.to_pure_dict(nnx.state(model.up))), nnx.to_pure_dict(nnx.state(same)), 1e-6)


def test_nnx_checkpoint(tmp_path):
    """To the plain layer with Orbax, and back."""
    checkpoint = pytest.importorskip("orbax.checkpoint", reason="needs Orbax: pip install orbax-checkpoint")
    x, _ = inputs()
    with mesh_set("auto") as (mesh, rows), checkpoint.StandardCheckpointer() as files:
        model = Mlp(nnx.Rngs(0))
        y = nnx.jit(lambda model, x: model(x))(model, put(x, mesh, rows))
        files.save(tmp_path / "ours", nnx.to_pure_dict(nnx.state(model)))
        files.wait_until_finished()
        here = jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
        like = nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda: PlainMlp(nnx.Rngs(1)))))
        like = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=here), like)
        restored = files.restore(tmp_path / "ours", like)
        files.save(tmp_path / "plain", restored)
        files.wait_until_finished()
        back = Mlp(nnx.Rngs(2))
        state = nnx.state(back)
        like = nnx.to_pure_dict(
            jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding), state)
        )
        nnx.replace_by_pure_dict(state, files.restore(tmp_path / "plain", like))
        nnx.update(back, state)
        assert back.up.kernel[...].sharding.spec == P(None, "t")
        again = nnx.jit(lambda model, x: model(x))(back, put(x, mesh, rows))
    assert np.array_equal(y, again)
    plain = PlainMlp(nnx.Rngs(1))
    state = nnx.state(plain)
    nnx.replace_by_pure_dict(state, restored)
    nnx.update(plain, state)
    assert_close(whole(y), plain(x))


class DenseMlp(linen.Module):
    plain: bool = False

    @linen.compact
    def __call__(self, x):
        options = {"bias_init": linen.initializers.normal()}
        if self.plain:
            up, down = linen.Dense(HIDDEN, name="up", **options), linen.Dense(D, name="down", **options)
        else:
            options |= {"axis_name": "t", "strategy": "fused"}
            up = ours.ColumnParallelDense(HIDDEN, name="up", **options)
            down = ours.RowParallelDense(D, name="down", **options)
        return x + down(jnp.sin(up(x)))


@pytest.mark.parametrize("mode", ["auto", "explicit", "manual", "partial"])
def test_linen_mlp(mode):
    """Initialised sharded from its boxes; the plain layers' parameters, value and gradients."""
    x, dy = inputs()
    model, plain = DenseMlp(), DenseMlp(plain=True)
    key = jax.random.key(0)
    with mesh_set(mode) as (mesh, rows):
        shardings = linen.get_sharding(jax.eval_shape(model.init, key, x), mesh)
        params = linen.unbox(jax.jit(model.init, out_shardings=shardings)(key, put(x, mesh, rows)))
        specs = jax.tree.map(lambda v: v.sharding.spec, params)["params"]
        assert specs == {
            "up": {"kernel": P(None, "t"), "bias": P("t")},
            "down": {"kernel": P("t", None), "bias": P(None)},
        }
        assert_close(whole(params), plain.init(key, x), 1e-6)
        apply = model.apply
        if mode == "manual":
            specs = jax.tree.map(lambda v: v.sharding.spec, params)
            apply = jax.shard_map(apply, in_specs=(specs, rows), out_specs=rows)
        elif mode == "partial":
            apply = jax.shard_map(apply, in_specs=(P(), P("d")), out_specs=P("d"), axis_names={"d"})
        args = params, put(x, mesh, rows)
        assert all(m.bias for m in entwine_jax.explain(apply, *args))
        assert collectives(jax.jit(apply).lower(*args).compile().as_text()) == BOTH
        got = jax.jit(lambda params, x, dy: jax.vjp(apply, params, x)[1](dy))(*args, put(dy, mesh, rows))
    assert_close(whole(got), jax.vjp(plain.apply, whole(params), x)[1](dy))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_linen_boxes(mode):
    """The boxes may stay on."""
    x, _ = inputs()
    with mesh_set(mode) as (mesh, rows):
        params = DenseMlp().init(jax.random.key(0), put(x, mesh, rows))
        y = jax.jit(DenseMlp().apply)(params, put(x, mesh, rows))
    assert_close(whole(y), DenseMlp(plain=True).apply(whole(linen.unbox(params)), x))


HEADS, HEAD = 4, 8


class Attention(nnx.Module):
    """Projections to and from heads, as attention has them, in unchanged Flax."""

    def __init__(self, rngs, **dots):
        sharded = {"out_sharding": (None, "t")}, {"out_sharding": ("t",)}
        self.up = nnx.LinearGeneral(
            D, (HEADS, 3, HEAD), kernel_metadata=sharded[0], bias_metadata=sharded[1], rngs=rngs, **dots
        )
        self.down = nnx.LinearGeneral(
            (HEADS, HEAD), D, axis=(-2, -1), kernel_metadata=sharded[1], use_bias=False, rngs=rngs, **dots
        )

    def __call__(self, x, out_sharding=None):
        return x + self.down(jnp.sin(self.up(x)).sum(-2), out_sharding)


class LinenAttention(linen.Module):
    dot: object = None

    @linen.compact
    def __call__(self, x):
        up = linen.DenseGeneral((HEADS, 3, HEAD), use_bias=False, dot_general=self.dot, name="up")
        down = linen.DenseGeneral(D, axis=(-2, -1), use_bias=False, dot_general=self.dot, name="down")
        return x + down(jnp.sin(up(x)).sum(-2))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_unchanged_nnx_model(mode):
    """Injection under nnx; the residual connection asks for rows, or the call's out_sharding does."""
    x, dy = inputs()
    with mesh_set(mode) as (mesh, rows):
        graphdef, state = nnx.split(Attention(nnx.Rngs(0), dot_general=ours.DotGeneral("t", strategy="fused")))
        out = rows if mode == "explicit" else None
        args = state, put(x, mesh, rows)

        def apply(state, x):
            return nnx.merge(graphdef, state)(x, out)

        assert collectives(jax.jit(apply).lower(*args).compile().as_text()) == BOTH
        got = jax.jit(lambda state, x, dy: jax.vjp(apply, state, x)[1](dy))(*args, put(dy, mesh, rows))
    with mesh_set("auto"):
        graphdef, _ = nnx.split(Attention(nnx.Rngs(0)))
    wanted = jax.vjp(lambda state, x: nnx.merge(graphdef, state)(x), whole(state), x)[1](dy)
    assert_close(whole(jax.tree.leaves(got)), jax.tree.leaves(wanted))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_unchanged_linen_model(mode):
    x, dy = inputs()
    params = LinenAttention().init(jax.random.key(0), x)
    with mesh_set(mode) as (mesh, rows):
        sharded = {"up": {"kernel": P(None, "t")}, "down": {"kernel": P("t")}}
        args = jax.tree.map(lambda v, s: put(v, mesh, s), params, {"params": sharded}), put(x, mesh, rows)
        kinds = {
            "up": ours.DotGeneral("t", strategy="fused"),
            "down": ours.DotGeneral("t", out="rows", strategy="fused"),
        }

        def dot(lhs, rhs, *numbers, **options):  # linen passes no out_sharding, which explicit axes need
            return kinds["up" if rhs.ndim == 4 else "down"](lhs, rhs, *numbers, **options)

        model = LinenAttention(dot if mode == "explicit" else kinds["up"])
        assert collectives(jax.jit(model.apply).lower(*args).compile().as_text()) == BOTH
        got = jax.jit(lambda params, x, dy: jax.vjp(model.apply, params, x)[1](dy))(*args, put(dy, mesh, rows))
    assert_close(whole(got), jax.vjp(LinenAttention().apply, params, x)[1](dy))


@pytest.mark.parametrize("mode", ["auto", "explicit"])
@pytest.mark.parametrize("api", ["nnx", "linen", "DotGeneral"])
def test_residuals(mode, api):
    """What a column-parallel layer has gathered is there for its kernel's gradient, if it is to save it."""
    x, _ = inputs()

    def gathered(mesh, rows, **options):
        kernel = put(jnp.ones((D, HIDDEN)) / D, mesh, P(None, "t"))
        options = {"axis_name": "t", "strategy": "fused"} | options
        if api == "nnx":
            graph, state = nnx.split(ours.ColumnParallelLinear(D, HIDDEN, use_bias=False, rngs=nnx.Rngs(0), **options))
            apply = lambda kernel, x: nnx.merge(graph, nnx.State({"kernel": state.kernel.replace(kernel)}))(x)  # noqa: E731
        elif api == "linen":
            layer = ours.ColumnParallelDense(HIDDEN, use_bias=False, **options)
            apply = lambda kernel, x: layer.apply({"params": {"kernel": kernel}}, x)  # noqa: E731
        else:
            dot = ours.DotGeneral(out="columns", **options)
            apply = lambda kernel, x: dot(x, kernel, (((2,), (0,)), ((), ())))  # noqa: E731
        gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(apply(*args))), (0, 1))
        found = entwine_jax.explain(gradient, kernel, put(x, mesh, rows))
        return [m.op for m in found if m.gathered]

    with mesh_set(mode) as (mesh, rows):
        assert gathered(mesh, rows) == ["matmul_reduce_scatter"]
        assert gathered(mesh, rows, residuals="save") == ["all_gather_matmul"]
        with pytest.raises(ValueError, match=r"flax.DotGeneral: residuals='keep' is unknown"):
            gathered(mesh, rows, residuals="keep")
        with pytest.raises(
            ValueError, match=r"residuals='save' keeps what is gathered, and out='rows' gathers nothing"
        ):
            ours.DotGeneral("t", out="rows", residuals="save")


def test_nnx_linear_takes_it():
    """nnx.Linear, with preferred_element_type, bias and rows that nobody shards: a plain dot, as it should be."""
    layer = nnx.Linear(
        D,
        HIDDEN,
        dot_general=ours.DotGeneral(),
        preferred_element_type=jnp.float32,
        dtype=jnp.bfloat16,
        rngs=nnx.Rngs(0),
    )
    x, _ = inputs()
    plain = nnx.Linear(D, HIDDEN, preferred_element_type=jnp.float32, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    for batch in (x, x[0], x[0, 0]):
        y = layer(batch)
        assert y.dtype == jnp.float32
        assert_close(y, plain(batch), 1e-6)


def test_scan_over_layers():
    """A stack made with nnx.vmap and run with nnx.scan; the metadata gains an axis."""
    x, _ = inputs()
    with mesh_set("auto") as (mesh, rows):

        @nnx.split_rngs(splits=3)
        @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: None})
        def make(rngs):
            return Mlp(rngs)

        stack = nnx.jit(lambda: make(nnx.Rngs(0)))()
        assert nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(stack)))["up"]["kernel"] == P(None, None, "t")

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: None})
        def run(layer, x):
            return layer(x)

        y = nnx.jit(run)(stack, put(x, mesh, rows))
        state = nnx.state(stack)
    for i in range(3):
        x, *_ = reference(jax.tree.map(lambda v, i=i: v[i], whole(state)), x, x)
    assert_close(whole(y), x)


def test_equal_dots_trace_once():
    assert ours.DotGeneral("t", out="rows") == ours.DotGeneral("t", out="rows")
    assert hash(ours.DotGeneral(["t", "u"])) == hash(ours.DotGeneral(("t", "u")))
    traced = []

    @functools.partial(jax.jit, static_argnums=0)
    def f(dot, x):
        traced.append(dot)
        return dot(x, x.T, (((1,), (0,)), ((), ())))

    for _ in range(2):
        f(ours.DotGeneral(), jnp.ones((4, 4)))
    assert len(traced) == 1


@pytest.mark.parametrize("strategy, kept", [("fused", "entwine_matmul_all_reduce"), ("xla", "all-reduce")])
def test_whole_rows(strategy, kept):
    """scatter=False: an all-reduce, the result whole over the axis."""
    x, _ = inputs()
    for mode in ("auto", "explicit"):
        with mesh_set(mode) as (mesh, _):
            layer = ours.RowParallelLinear(D, HIDDEN, axis_name="t", scatter=False, strategy=strategy, rngs=nnx.Rngs(0))
            args = *nnx.split(layer), put(x, mesh, P("d", None, "t"))
            apply = jax.jit(lambda graphdef, state, x: nnx.merge(graphdef, state)(x), static_argnums=0)
            compiled = apply.lower(*args).compile()
            assert collectives(compiled.as_text()) == {kept: 1}
            y = compiled(*args[1:])
        assert y.sharding.is_equivalent_to(NamedSharding(mesh, P("d")), 3)
        assert_close(whole(y), x @ np.asarray(layer.kernel[...]))


def test_warns_once_of_float32():
    _dot_general._warn_of_float32.cache_clear()
    x, _ = inputs()
    with mesh_set("auto") as (mesh, rows), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        x = put(x.astype(jnp.bfloat16), mesh, rows)
        Mlp(nnx.Rngs(0), strategy="auto").up(x)
        assert len(caught) == 1 and "dtype=jnp.bfloat16" in str(caught[0].message)
        Mlp(nnx.Rngs(0), strategy="auto")(x)
        ours.ColumnParallelDense(HIDDEN, axis_name="t").init(jax.random.key(0), x)
        assert len(caught) == 1
        _dot_general._warn_of_float32.cache_clear()
        layer = ours.ColumnParallelLinear(D, HIDDEN, axis_name="t", dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
        assert layer(x).dtype == jnp.bfloat16
        assert len(caught) == 1
    _dot_general._warn_of_float32.cache_clear()


def test_warns_of_promoted_operands(monkeypatch):
    """DotGeneral sees float32 only, which is worth a warning where kernels would have taken bfloat16."""
    _dot_general._warn_of_float32.cache_clear()
    x = jnp.ones((4, 4))
    numbers = ((1,), (0,)), ((), ())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.DotGeneral()(x, x, numbers)
        monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
        ours.DotGeneral(strategy="xla")(x, x, numbers)
        ours.DotGeneral()(x.astype(jnp.bfloat16), x.astype(jnp.bfloat16), numbers)
        assert not caught
        ours.DotGeneral()(x, x, numbers)
        ours.DotGeneral()(x, x, numbers)
        assert len(caught) == 1
    _dot_general._warn_of_float32.cache_clear()


def test_bad_layers():
    rngs, key, x = nnx.Rngs(0), jax.random.key(0), inputs()[0]

    def fails(match, f, error=ValueError):
        with pytest.raises(error, match=rf"(?s)entwine_jax.flax.{match}"):
            f()

    def column(features=32, axis="t", **options):
        return ours.ColumnParallelLinear(24, features, axis_name=axis, rngs=rngs, **options)

    def dense(features=32, axis="t", **options):
        return ours.ColumnParallelDense(features, axis_name=axis, **options).init(key, x)

    fails("ColumnParallelLinear: axis_name='t' needs a mesh.*jax.set_mesh", column)
    fails("ColumnParallelDense: axis_name='t' needs a mesh.*jax.set_mesh", dense)
    with mesh_set("auto") as (_, rows):
        fails("ColumnParallelLinear: out_features=30 can't be shared evenly by the 4 .*make it 32", lambda: column(30))
        fails("ColumnParallelDense: features=30 can't be shared evenly by the 4 .*make it 32", lambda: dense(30))
        fails(r"ColumnParallelLinear: axis_name='m' is not an axis of the mesh \{'d': 2", lambda: column(axis="m"))
        fails(r"ColumnParallelDense: axis_name='m' is not an axis", lambda: dense(axis="m"))
        fails(
            r"ColumnParallelLinear: out_features=12 .* the 8 ranks of axis_name=\('d', 't'\)",
            lambda: column(12, ("d", "t")),
        )
        fails(r"ColumnParallelLinear: axis_name=\('t', 't'\) must name", lambda: column(axis=("t", "t")))
        fails(r"ColumnParallelDense: axis_name=\(\) must name", lambda: dense(axis=()))
        row = functools.partial(ours.RowParallelLinear, axis_name="t", rngs=rngs)
        fails("RowParallelLinear: in_features=30 can't be shared evenly .*make it 32", lambda: row(30, 8))
        narrow = ours.RowParallelDense(8, axis_name="t")
        fails("RowParallelDense: the inputs' last dimension=30 can't", lambda: narrow.init(key, jnp.ones((8, 16, 30))))
        boxed = nnx.with_partitioning(nnx.initializers.ones, (None, "t"))
        fails("ColumnParallelLinear: kernel_init=.*kernel_metadata=", lambda: column(kernel_init=boxed), TypeError)
        fails("ColumnParallelDense: dot_general= is its own", lambda: dense(dot_general=jax.lax.dot_general))
        fails(
            r"DotGeneral: rows of x \(16, 24\) may be sharded over \('d',\).*out_sharding=",
            lambda: row(24, 8)(x[0]),
        )
        row(24, 8)(x[0], P(("d", "t"), None))
        make = jax.shard_map(lambda x: column()(x), in_specs=rows, out_specs=rows)
        fails("ColumnParallelLinear: axis_name='t' is manual here; make the layer outside", lambda: make(x))
        init = jax.shard_map(lambda x: dense(), in_specs=rows, out_specs=P())
        fails("ColumnParallelDense: axis_name='t' is manual here, and init", lambda: init(x))
    fails("DotGeneral: out='rows' needs axis_name=", lambda: ours.DotGeneral(out="rows"))
    fails("DotGeneral: axis_name=3 must name", lambda: ours.DotGeneral(3))
    fails("DotGeneral: out='row' must be", lambda: ours.DotGeneral("t", out="row"))
    fails("DotGeneral: strategy='quick' is unknown", lambda: ours.DotGeneral("t", strategy="quick"))


def test_bad_products():
    """What isn't rows times a kernel is a plain dot, unless that would be silent."""
    a, b = normal((4, 6, 8), 1), normal((4, 8, 5), 2)
    batched = ((2,), (1,)), ((0,), (0,))
    last = ((2,), (1,)), ((), ())
    for numbers, reason in ((batched, "batch dimensions"), (last, "the last dimensions of lhs with the first of rhs")):
        assert_close(ours.DotGeneral()(a, b, numbers), jax.lax.dot_general(a, b, numbers))
        with pytest.raises(NotImplementedError, match=f"strategy='fused' can't run.*{reason}.*strategy='auto'"):
            ours.DotGeneral(strategy="fused")(a, b, numbers)
        with mesh_set("auto"):
            inside = jax.shard_map(lambda a, b, n=numbers: ours.DotGeneral("t")(a, b, n), in_specs=P(), out_specs=P())
            with pytest.raises(NotImplementedError, match=f"inside jax.shard_map.*{reason}"):
                inside(a, b)
            sharded = ours.DotGeneral()(a, b, numbers, out_sharding=P("t"))
            assert sharded.sharding.spec[0] == "t"
    with pytest.raises(TypeError, match=r"contracted, and must be equal: \(6, 8\) and \(8, 6\)"):
        ours.DotGeneral()(a, normal((8, 6, 3), 3), (((1, 2), (0, 1)), ((), ())))
    with mesh_set("auto"), pytest.raises(ValueError, match="shards output features after the first, dimension 2"):
        features = (((2,), (0,)), ((), ()))
        ours.DotGeneral()(a, normal((8, 4, 3), 3), features, out_sharding=P(None, None, None, "t"))
