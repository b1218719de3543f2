"""float8 operands with scales and an epilogue, or w transposed: y = activation(collective(x @ w) * scale + bias)."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, fused, integers, mesh_of, normal, product, specs
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _config

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
AG, RS, AR = OPS
STRATEGIES = ("fused", "xla")
SCALES = jnp.float32([0.5, 0.25])
NN = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def ours(op, x, w, scales, bias=None, dtype=jnp.float32, **options):
    options |= {"scales": (scales[0], scales[1]), "preferred_element_type": dtype}
    return fused(op, x, w, "t", bias=bias, **options)


def spread(op, ranks=2, biased=True, transpose_w=False, check_vma=True, **options):
    """A rank's work as a function of global x, w, scales and, if it is biased, a bias."""
    x, w, y = specs(op)
    of_bias = (P("t") if op == AG else P(None),) if biased else ()
    return jax.shard_map(
        functools.partial(ours, op, transpose_w=transpose_w, **options),
        mesh=mesh_of((ranks,)),
        in_specs=(x, P(*w[::-1]) if transpose_w else w, P(), *of_bias),
        out_specs=y,
        check_vma=check_vma,
    )


def operands(rows=40, k=24, n=72, batch=(), x_dtype=E4M3):
    """The bias is in the units of the scaled sums, which are eighths."""
    x, w = integers((*batch, rows, k), 1, x_dtype), integers((*batch, k, n), 2, E4M3)
    return x, w, integers((*batch, n), 3, low=-20, high=20) / 8


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_exact(op, strategy):
    """Each alone and all of them, in teams of several sizes."""
    alone = {"biased": True}, {"biased": False, "activation": "relu"}, {"biased": False, "transpose_w": True}
    together = {"biased": True, "activation": "relu", "transpose_w": True}
    for (ranks, options), check_vma in itertools.product(
        ((2, alone[0]), (2, alone[1]), (2, alone[2]), (4, together), (8, together)), (True, False)
    ):
        # Either dtype of x and of y, though not with everything.
        x, w, bias = operands(x_dtype=E4M3 if check_vma else E5M2)
        dtype = jnp.bfloat16 if check_vma else jnp.float32
        f = spread(op, ranks, check_vma=check_vma, strategy=strategy, dtype=dtype, **options)
        w_given = w.T if "transpose_w" in options else w
        y = jax.jit(f)(x, w_given, SCALES, *[bias] * options["biased"])
        wanted = product(x, w) / 8 + (np.asarray(bias) if options["biased"] else 0)
        assert y.dtype == dtype
        np.testing.assert_array_equal(
            np.asarray(y, np.float64), np.maximum(wanted, 0 if "activation" in options else -99)
        )


@pytest.mark.parametrize("op", OPS)
def test_rounded_once(op):
    """Scale, sum, bias and activation are float32, whose result is rounded to y's dtype."""
    x, w, _ = operands()
    bias = normal((w.shape[1],), 4)
    sums = np.asarray(product(x, w) / 8, np.float32) + np.asarray(bias)
    y = jax.jit(spread(op, dtype=jnp.bfloat16, activation="relu"))(x, w, SCALES, bias)
    np.testing.assert_array_equal(
        np.asarray(y, np.float32), np.asarray(jnp.maximum(sums, 0).astype(jnp.bfloat16), np.float32)
    )


@pytest.mark.parametrize("op", OPS)
def test_activations(op):
    x, w, bias = operands()
    with jax.enable_x64(True):
        sums = jnp.asarray(product(x, w) / 8 + np.asarray(bias))
        wanted = {activation: np.asarray(NN[activation](sums)) for activation in _config.ACTIVATIONS}
    for (activation, value), strategy in itertools.product(wanted.items(), STRATEGIES):
        f = spread(op, strategy=strategy, activation=activation)
        assert_close(jax.jit(f)(x, w, SCALES, bias), value, 1e-6)


def test_gathered():
    x, w, bias = operands()
    for strategy in STRATEGIES:
        y, rows = jax.jit(
            jax.shard_map(
                lambda *args, strategy=strategy: ours(
                    AG, *args, strategy=strategy, activation="relu", transpose_w=True, return_gathered=True
                ),
                mesh=mesh_of((2,)),
                in_specs=(P("t"), P("t"), P(), P("t")),
                out_specs=(P(None, "t"), P()),
                check_vma=False,
            )
        )(x, w.T, SCALES, bias)
        np.testing.assert_array_equal(np.asarray(y), np.maximum(product(x, w) / 8 + np.asarray(bias), 0))
        np.testing.assert_array_equal(np.asarray(rows, np.float32), np.asarray(x, np.float32))


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("batched", ["x", "w", "scales", "bias", "x bias", "w bias", "x w scales bias"])
def test_vmap(op, batched, many=3):
    """Over any of them, inside the shard_map."""
    x, w, bias = operands(16, 8, 24, (many,))
    scales = jnp.float32([[0.5, 0.25], [2, 1], [1, 0.5]])
    given = {"x": x, "w": w, "scales": scales, "bias": bias}
    dims = [0 if name in batched.split() else None for name in given]
    args = [v if dim == 0 else v[0] for v, dim in zip(given.values(), dims, strict=True)]
    x_spec, w_spec, y_spec = specs(op)
    wanted_specs = x_spec, w_spec, P(None), P("t") if op == AG else P(None)
    for check_vma in (True, False)[: 2 if "bias" in batched else 1]:
        f = jax.shard_map(
            jax.vmap(functools.partial(ours, op, activation="relu"), dims),
            mesh=mesh_of((2,)),
            in_specs=tuple(P(None, *s) if dim == 0 else s for s, dim in zip(wanted_specs, dims, strict=True)),
            out_specs=P(None, *y_spec),
            check_vma=check_vma,
        )
        x, w, s, b = (
            v if dim == 0 else np.broadcast_to(v, (many, *v.shape)) for v, dim in zip(args, dims, strict=True)
        )
        sums = np.stack([product(x[i], w[i]) for i in range(many)]) * np.prod(np.asarray(s), 1)[:, None, None]
        np.testing.assert_array_equal(np.asarray(jax.jit(f)(*args)), np.maximum(sums + np.asarray(b)[:, None], 0))


def test_operands_of_other_axes():
    """A scale or a bias may bring an axis of its own, and then so does y."""
    mesh, (x, w, bias) = mesh_of((2, 2), ("d", "t")), operands()

    def rank(op, strategy, x, w, scales, bias):
        return ours(op, x, w, scales.reshape(2), bias.reshape(-1), strategy=strategy)[None]

    for op, strategy, own in itertools.product(OPS, STRATEGIES, ("scales", "bias")):
        x_spec, w_spec, y_spec = specs(op)
        b = bias[None] * (jnp.float32([[1], [-1]]) if own == "bias" else 1)
        s = SCALES[None] * (jnp.float32([[1], [2]]) if own == "scales" else 1)
        axes = P("d" if own == "scales" else None), P("d" if own == "bias" else None, "t" if op == AG else None)
        local = functools.partial(rank, op, strategy)
        f = jax.shard_map(local, mesh=mesh, in_specs=(x_spec, w_spec, *axes), out_specs=P("d", *y_spec))
        sums = product(x, w) * np.prod(np.asarray(s), 1)[:, None, None]
        np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w, s, b)), sums + np.asarray(b)[:, None] + 0 * sums)


@pytest.mark.parametrize("op", OPS)
def test_explain(op):
    """One call with its epilogue, and the copy of w where there is one."""
    x, w, bias = operands()
    for transpose_w, strategy in itertools.product((False, True), STRATEGIES):
        f = spread(op, transpose_w=transpose_w, activation="gelu", strategy=strategy)
        found = entwine_jax.explain(f, x, w.T if transpose_w else w, SCALES, bias)
        (matmul,) = found
        assert (matmul.op, matmul.strategy, matmul.transpose_w) == (op, strategy, transpose_w)
        copies = not transpose_w and strategy == "fused"
        assert ("w is transposed first, a copy of" in matmul.reason) == copies
        if strategy == "fused":
            assert (matmul.bias, matmul.activation) == (True, "gelu") and f"{op} + bias + gelu  " in repr(found)


@pytest.mark.parametrize("op", OPS)
def test_errors(op):
    x, w, bias = operands()

    def fails(error, match, bias=bias, **options):
        with pytest.raises(error, match=rf"entwine_jax.{op}: {match}"):
            jax.eval_shape(spread(op, **options), x, w, SCALES, bias)

    columns = 36 if op == AG else 72
    fails(TypeError, rf"bias has shape \(\d+,\) but .*\({columns},\)", bias[:70])
    fails(TypeError, "bias is int32 but the result float32; cast it", jnp.zeros(72, jnp.int32))
    fails(ValueError, "activation='tanh' is unknown", activation="tanh")
    fails(TypeError, "x has shape .*w's transpose would fit|.*contracted and must be equal", transpose_w=True)
    for strategy in STRATEGIES:
        f = spread(op, strategy=strategy)
        with pytest.raises(
            TypeError, match=f"{op}: the gradient of a float8 array.*stop_gradient on x, w, .* and bias"
        ):
            jax.eval_shape(jax.grad(lambda b, f=f: f(x, w, SCALES, b).sum()), bias)


def test_nothing_to_save():
    x, w, _ = operands()
    with pytest.raises(
        ValueError, match=r"all_gather_matmul: residuals='save' is for the weight gradient, which float8"
    ):
        jax.eval_shape(spread(AG, biased=False, residuals="save"), x, w, SCALES)


@pytest.mark.parametrize("op", OPS)
def test_float16(op):
    """bias, activation and transpose_w of float16 operands, exact."""
    x, w = integers((40, 24), 1, jnp.float16), integers((24, 72), 2, jnp.float16)
    bias = integers((72,), 3, low=-20, high=20)
    x_spec, w_spec, y_spec = specs(op)
    for ranks, dtype in ((2, jnp.float32), (8, None)):
        y = jax.jit(
            jax.shard_map(
                lambda x, w, b, dtype=dtype: fused(
                    op, x, w, "t", bias=b, activation="relu", transpose_w=True, preferred_element_type=dtype
                ),
                mesh=mesh_of((ranks,)),
                in_specs=(x_spec, P(*w_spec[::-1]), P("t") if op == AG else P()),
                out_specs=y_spec,
            )
        )(x, w.T, bias)
        assert y.dtype == (dtype or jnp.float16)
        np.testing.assert_array_equal(np.asarray(y, np.float64), np.maximum(product(x, w) + np.asarray(bias), 0))
