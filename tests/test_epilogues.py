"""Bias and activation: y = activation(collective(x @ w) + bias), fused, beside lax and jax.nn."""

import functools
import itertools

import jax
import jax.numpy as jnp
import jax.test_util
import numpy as np
import pytest
from global_view import collectives
from helpers import OPS, assert_close, fused, in_lax, integers, mesh_of, normal, product, specs
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _config

GATHER, SCATTER, REDUCE = OPS
ACTIVATIONS = (None, *_config.ACTIVATIONS)
NN = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def ours(op, x, w, bias, activation, axis="t", **options):
    return fused(op, x, w, axis, bias=bias, activation=activation, **options)


def lines(op, x, w, bias, activation, axis="t"):
    """The same in lax."""
    y = in_lax(op, x, w, axis)
    return NN[activation](y if bias is None else y + bias)


def spread(rank, op, activation, mesh, leading=(), check_vma=True):
    """A rank's work as a function of global x, w and bias."""
    x, w, y = specs(op, leading=leading)
    return jax.shard_map(
        lambda x, w, bias: rank(op, x, w, bias, activation),
        mesh=mesh,
        in_specs=(x, w, P("t") if op == GATHER else P(None)),
        out_specs=y,
        check_vma=check_vma,
    )


def operands(ranks, batch=2, rows=6, k=5, n=7):
    return normal((batch, rows * ranks, k * ranks), 1), normal((k * ranks, n * ranks), 2), normal((n * ranks,), 3)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_exact(op, ranks):
    """Integers, ragged tiles, one worker a rank and several, random stalls, both transports."""
    for seed, (rows, k, n) in enumerate([(1, 3, 1), (33, 7, 40), (70, 5, 33)]):
        x, w = integers((2, rows * ranks, k * ranks), seed), integers((k * ranks, n * ranks), seed + 5)
        bias = integers((n * ranks,), seed + 9, low=-20, high=20)
        config = Config(
            workers=1 + 2 * (seed % 2), stall_us=50 * seed, stall_seed=seed, transport=("pull", "push")[seed % 2]
        )
        for activation in (None, "relu"):
            f = spread(functools.partial(ours, config=config), op, activation, mesh_of((ranks,)), (None,))
            wanted = product(x, w) + np.asarray(bias)
            wanted = wanted if activation is None else np.maximum(wanted, 0)
            np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w, bias)), wanted)


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32], ids=lambda d: jnp.dtype(d).name)
def test_values(op, dtype):
    """Against float64, with a bias of float32, of the operands' dtype and none; XLA's path within the same bounds."""
    x, w, bias = operands(4, rows=20, k=16, n=11)
    x, w = x.astype(dtype), (w / 8).astype(dtype)
    bound = {jnp.float32: 2e-6, jnp.bfloat16: 5e-3, jnp.float16: 7e-4}[dtype]

    def check(activation, b, strategy, preferred=None):
        sums = product(x, w) + (0 if b is None else np.asarray(b, np.float64))
        with jax.enable_x64(True):
            wanted = np.asarray(NN[activation](jnp.asarray(sums)))

        def rank(op, x, w, given, activation):
            options = {"strategy": strategy, "preferred_element_type": preferred}
            return ours(op, x, w, None if b is None else given, activation, **options)

        y = jax.jit(spread(rank, op, activation, mesh_of((4,)), (None,)))(x, w, bias if b is None else b)
        assert y.dtype == (preferred or dtype)
        # XLA's CPU compiler sums bfloat16 in bfloat16, and a bias is added to what was rounded.
        assert_close(y, wanted, bound if strategy == "fused" else 3 * bound)

    for activation in ACTIVATIONS:
        for strategy in ("fused", "xla"):
            check(activation, bias, strategy)
        check(activation, bias.astype(dtype), "fused", "float32")
        check(activation, None, "fused")


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient(op, activation, check_vma):
    mesh, args, leading = mesh_of((2, 4), ("d", "t")), operands(4), ("d",)

    def loss(rank):
        f = spread(rank, op, activation, mesh, leading, check_vma)
        return lambda *args: jnp.sum(jnp.sin(f(*args)))

    got, wanted = (jax.jit(jax.value_and_grad(loss(rank), (0, 1, 2)))(*args) for rank in (ours, lines))
    assert_close(got, wanted)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["relu", "gelu", "silu"])
def test_gradient_is_that_of_finite_differences(op, activation):
    f = spread(ours, op, activation, mesh_of((2,)), (None,))
    jax.test_util.check_grads(jax.jit(lambda *args: jnp.sum(f(*args))), operands(2), 1, ["rev"], rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_second_gradient(op, check_vma, activation):
    def norm_of_gradient(rank):
        f = spread(rank, op, activation, mesh_of((2, 2), ("d", "t")), ("d",), check_vma)
        gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2))
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in gradient(*args))

    got, wanted = (jax.jit(jax.grad(norm_of_gradient(rank), (0, 1, 2)))(*operands(2)) for rank in (ours, lines))
    assert_close(got, wanted, 3e-5)


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_only_what_is_wanted(op, activation):
    """Some of the gradients, eagerly and under jit; that of the bias alone takes no product."""
    mesh, args = mesh_of((2,)), operands(2)

    def gradient(rank, argnums):
        f = spread(rank, op, activation, mesh, (None,))
        return jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums)

    wanted = jax.jit(gradient(lines, (0, 1, 2)))(*args)
    for argnums in ((2,), (0, 1), (1, 2)):
        compiled = jax.jit(gradient(ours, argnums)).lower(*args).compile()
        assert_close(compiled(*args), tuple(wanted[i] for i in argnums))
        calls = collectives(compiled.as_text())
        if argnums == (2,):
            calls.pop("all-reduce", None)  # of dbias
            assert calls == {f"entwine_{op}": 1}
        if argnums == (0, 1):
            assert "all-reduce" not in calls
    assert_close(gradient(ours, (0, 2))(*args), (wanted[0], wanted[2]))


@pytest.mark.parametrize("op", OPS)
def test_where_the_activation_is_applied(op):
    """In the kernel, unless its gradient needs what it is a function of."""
    args = operands(2)

    def found(activation, gradient):
        f = spread(ours, op, activation, mesh_of((2,)), (None,))
        loss = lambda *args: jnp.sum(f(*args))  # noqa: E731
        first = entwine_jax.explain(jax.grad(loss) if gradient else loss, *args)[0]
        return first.op, first.bias, first.activation

    assert found(None, False) == found(None, True) == (op, True, None)
    assert found("relu", False) == found("relu", True) == (op, True, "relu")
    assert found("gelu", False) == (op, True, "gelu") and found("gelu", True) == (op, True, None)
    f = spread(ours, op, "silu", mesh_of((2,)), (None,))
    assert f"{op} + bias + silu" in repr(entwine_jax.explain(f, *args))
    text = jax.jit(f).lower(*args).as_text()
    assert "exponential" not in text and "logistic" not in text


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dims", [d for d in itertools.product((0, None), (1, None), (0, None)) if d != (None,) * 3], ids=str
)
def test_vmap(op, dims, activation="gelu"):
    """Over any of x, w and bias, with gradients."""
    many = 3
    arrays = [normal((many, *v.shape), i) for i, v in enumerate(operands(2))]
    arrays = [v[0] if d is None else jnp.moveaxis(v, 0, d) for v, d in zip(arrays, dims, strict=True)]

    def spec(dim, wanted):
        return wanted if dim is None else P(*wanted[:dim], None, *wanted[dim:])

    x_spec, w_spec, y_spec = specs(op, leading=(None,))
    wanted_specs = (x_spec, w_spec, P("t") if op == GATHER else P(None))

    def loss(rank):
        f = jax.shard_map(
            jax.vmap(lambda *args: rank(op, *args, activation), dims),
            mesh=mesh_of((2,)),
            in_specs=tuple(map(spec, dims, wanted_specs)),
            out_specs=spec(0, y_spec),
        )
        return lambda *args: (jnp.sum(jnp.sin(f(*args))), f(*args))

    got, wanted = (jax.jit(jax.grad(loss(rank), (0, 1, 2), has_aux=True))(*arrays) for rank in (ours, lines))
    assert_close(got, wanted)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sequence", [True, False])
def test_remat_and_scan(check_vma, sequence):
    mesh, x = mesh_of((4,)), normal((8, 12), 1)
    layers = [normal(shape, i) * 0.3 for i, shape in enumerate([(5, 12, 16), (5, 16), (5, 16, 12), (5, 12)])]

    def loss(rank):
        @jax.checkpoint
        def layer(x, p):
            up, b, down, c = p
            if sequence:
                h = rank(GATHER, x, up, b, "gelu")
                return x + rank(SCATTER, h, down, c, "relu"), None
            return x + rank(REDUCE, jax.nn.gelu(x @ up + b), down, c, "silu"), None

        rows = P("t") if sequence else P()
        f = jax.shard_map(
            lambda x, layers: lax.scan(layer, x, layers)[0],
            mesh=mesh,
            in_specs=(rows, [P(None, None, "t"), P(None, "t"), P(None, "t"), P()]),
            out_specs=rows,
            check_vma=check_vma,
        )
        return lambda x, layers: jnp.sum(jnp.square(f(x, layers)))

    got, wanted = (jax.jit(jax.value_and_grad(loss(rank), (0, 1)))(x, layers) for rank in (ours, lines))
    assert_close(got, wanted)


def several(x, gate, up, b, strategy="fused", **options):
    h, u = entwine_jax.all_gather_matmul(
        x, (gate, up), "t", bias=(b, None), activation=("silu", None), strategy=strategy, **options
    )
    return h * u


def several_in_lax(x, gate, up, b):
    rows = lax.all_gather(x, "t", axis=0, tiled=True)
    return jax.nn.silu(rows @ gate + b) * (rows @ up)


@pytest.mark.parametrize("check_vma", [True, False])
def test_several_weights(check_vma):
    args = normal((8, 6), 1), normal((6, 10), 2), normal((6, 10), 3), normal((10,), 4)
    specs = P("t"), P(None, "t"), P(None, "t"), P("t")

    def loss(rank):
        f = jax.shard_map(rank, mesh=mesh_of((2,)), in_specs=specs, out_specs=P(None, "t"), check_vma=check_vma)
        return lambda *args: jnp.sum(jnp.sin(f(*args)))

    for strategy in ("fused", "xla"):
        rank = functools.partial(several, strategy=strategy)
        got, wanted = (jax.jit(jax.value_and_grad(loss(r), (0, 1, 2, 3)))(*args) for r in (rank, several_in_lax))
        assert_close(got, wanted)

    def swapped(x, gate, up, b):
        u, h = entwine_jax.all_gather_matmul(
            x, [up, gate], "t", bias=[None, b], activation=[None, "silu"], strategy="fused"
        )
        return h * u

    assert_close(
        jax.jit(jax.grad(loss(swapped), (0, 1, 2, 3)))(*args),
        jax.jit(jax.grad(loss(several_in_lax), (0, 1, 2, 3)))(*args),
    )


@pytest.mark.parametrize("residuals", ["regather", "save"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_with_the_gathered_x(residuals, activation):
    """Bias and activation are y's; the gathered x is what it is."""
    x, w, bias = operands(2, batch=1)

    def loss(rank):
        f = jax.shard_map(
            rank,
            mesh=mesh_of((2,)),
            in_specs=(P(None, "t"), P(None, "t"), P("t")),
            out_specs=(P(None, None, "t"), P(None, None, "t")),
        )
        return lambda *args: sum(jnp.sum(jnp.sin(v)) for v in f(*args))

    def both(x, w, bias):
        return ours(GATHER, x, w, bias, activation, return_gathered=True, residuals=residuals)

    def both_in_lax(x, w, bias):
        return lines(GATHER, x, w, bias, activation), lax.all_gather(x, "t", axis=1, tiled=True)

    got, wanted = (jax.jit(jax.value_and_grad(loss(r), (0, 1, 2)))(x, w, bias) for r in (both, both_in_lax))
    assert_close(got, wanted)


@pytest.mark.parametrize("op", OPS)
def test_replicated_and_odd_biases(op):
    """A bias that is replicated, or is a rank's own beside replicated operands, or brings an axis of its own."""
    mesh, (x, w) = mesh_of((2, 4), ("d", "t")), (normal((8, 8), 1), normal((8, 6), 2))
    for bias_spec, shape in ((P(), (6,)), (P("d"), (12,)), (P("t"), (24,)), (P(("d", "t")), (48,))):
        if op == REDUCE and "t" in str(bias_spec):
            continue  # an error: see below
        bias = normal(shape, 3)

        def loss(rank, bias_spec=bias_spec):
            f = jax.shard_map(
                lambda x, w, b: rank(op, x, w, b, "silu")[None],
                mesh=mesh,
                in_specs=(P(), P(), bias_spec),
                out_specs=P(("d", "t")),
            )
            return lambda *args: jnp.sum(jnp.sin(f(*args)))

        got, wanted = (jax.jit(jax.value_and_grad(loss(r), (0, 1, 2)))(x, w, bias) for r in (ours, lines))
        assert_close(got, wanted)


def test_dtypes_of_the_gradients():
    x, w, bias = operands(2)
    for op, dtype in itertools.product(OPS, (jnp.bfloat16, jnp.float32)):

        def gradients(strategy, op=op, dtype=dtype):
            f = spread(functools.partial(ours, strategy=strategy), op, "gelu", mesh_of((2,)), (None,))
            loss = lambda *args: jnp.sum(jnp.sin(f(*args)).astype(jnp.float32))  # noqa: E731
            return jax.jit(jax.grad(loss, (0, 1, 2)))(
                x.astype(jnp.bfloat16), w.astype(jnp.bfloat16), bias.astype(dtype)
            )

        got, wanted = gradients("fused"), gradients("xla")
        assert [v.dtype for v in got] == [v.dtype for v in wanted] == [jnp.bfloat16, jnp.bfloat16, dtype]
        assert_close(got, wanted, 2e-2)


@pytest.mark.parametrize("op", OPS)
def test_not_finite(op):
    """A NaN stays one, infinities go where they should."""
    x = jnp.asarray([[jnp.nan, 0], [jnp.inf, 0], [-jnp.inf, 0], [1, 0]] * 2, jnp.float32)
    w, bias = jnp.asarray([[1.0] * 4, [0] * 4]), jnp.zeros(4)
    for activation in ("relu", "gelu", "silu"):
        f = spread(ours, op, activation, mesh_of((2,)))
        y = np.asarray(jax.jit(f)(x, w, bias))[:4]
        assert np.isnan(y[0]).all() and np.isposinf(y[1]).all() and (y[3] > 0.7).all()
        assert not (y[2] < 0).any()  # zero, or NaN


def test_team_of_one():
    x, w, bias = operands(1)
    for op, activation in itertools.product(OPS, ACTIVATIONS):
        f = spread(ours, op, activation, mesh_of((1,)), (None,))
        assert_close(jax.jit(f)(x, w, bias), NN[activation](x @ w + bias))


x, w = np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)


def fails(error, match, op, bias=None, bias_spec=None, activation=None):
    """Of a rank's call with these; a bias without a spec is no operand of the shard_map."""
    rank = jax.shard_map(
        lambda b: ours(op, x, w, b if bias_spec else bias, activation),
        mesh=mesh_of((2,)),
        in_specs=bias_spec or P(),
        out_specs=P("t"),
    )
    with pytest.raises(error, match=match) as raised:
        rank(bias if bias_spec else x)
    assert str(raised.value).startswith(f"entwine_jax.{op}: ")


@pytest.mark.parametrize("op", OPS)
def test_bad_input(op):
    fails(ValueError, r"activation='swish' is unknown.*'silu'", op, activation="swish")
    fails(TypeError, r"bias has shape \(7,\).*\(8,\)", op, bias=np.ones(7, np.float32))
    fails(TypeError, r"bias has shape \(16,\).*\(8,\); pass the rank's shard", op, bias=np.ones(16, np.float32))
    fails(TypeError, r"bias has shape \(1, 8\).*\(8,\); reshape it to \(8,\)", op, bias=np.ones((1, 8), np.float32))
    fails(TypeError, r"bias has shape \(3, 8\).*jax.vmap", op, bias=np.ones((3, 8), np.float32))
    fails(TypeError, r"bias is int32 but the result float32; cast it", op, bias=np.ones(8, np.int32))
    fails(TypeError, r"bias is complex64 but the result float32", op, bias=np.ones(8, np.complex64))
    fails(TypeError, r"bias must be a JAX or NumPy array, not list", op, bias=[1.0] * 8)


@pytest.mark.parametrize("op", OPS)
def test_integers(op):
    """A bias of integers is for a product of integers, which has no activation."""
    x, w, bias = np.ones((4, 6), np.int32), np.ones((6, 8), np.int32), np.arange(8, dtype=np.int32)

    def run(activation=None):
        rank = functools.partial(ours, op, axis="t", strategy="auto", activation=activation)
        f = jax.shard_map(lambda x, w, b: rank(x, w, b)[None], mesh=mesh_of((2,)), in_specs=P(), out_specs=P("t"))
        return f(x, w, bias)

    times = 1 if op == GATHER else 2
    y = np.asarray(run())
    assert y.dtype == np.int32 and (y == times * 6 + bias).all()
    with pytest.raises(TypeError, match=r"activation='relu' is for real floating-point results, not int32.*preferred"):
        run("relu")


def test_bad_input_of_several_weights():
    for argument, value in (("activation", "silu"), ("activation", ("silu",)), ("bias", np.ones(8, np.float32))):
        with pytest.raises(
            ValueError, match=rf"all_gather_matmul: w holds 2 weights, so {argument}.*\(\.\.\., \.\.\.\)"
        ):
            jax.shard_map(
                lambda x, argument=argument, value=value: entwine_jax.all_gather_matmul(
                    x, (w, w), "t", **{argument: value}
                ),
                mesh=mesh_of((2,)),
                in_specs=P("t"),
                out_specs=P(None),
            )(x)


def test_a_bias_of_an_all_reduce_is_the_same_on_every_rank():
    fails(ValueError, r"bias varies over mesh axes \('t',\)", REDUCE, np.ones(16, np.float32), P("t"))
