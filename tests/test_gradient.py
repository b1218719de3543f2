"""Gradients against lax: one op, a two-layer MLP, the gradient of a gradient, replicated weights, dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, fused, in_lax, integers, mesh_of, normal, spread
from jax.sharding import PartitionSpec as P

import entwine_jax


def loss_of(rank, op, mesh, **options):
    f = spread(rank, op, mesh, **options)
    return lambda x, w: jnp.sum(jnp.sin(f(x, w)))


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    "shape, names, order",
    [
        ((2,), ("t",), None),
        ((3,), ("t",), [1, 2, 0]),
        ((8,), ("t",), None),
        ((2, 4), ("d", "t"), None),
        ((4, 2), ("t", "d"), [6, 3, 0, 5, 2, 7, 4, 1]),
    ],
    ids=["2", "3 permuted", "8", "2x4", "4x2 permuted"],
)
def test_gradient(op, check_vma, shape, names, order):
    mesh = mesh_of(shape, names, order)
    ranks = mesh.shape["t"]
    options = {"leading": ("d" if "d" in names else None,), "check_vma": check_vma}
    x, w = normal((2, 6 * ranks, 5 * ranks), 1), normal((5 * ranks, 7 * ranks), 2)
    got, wanted = (
        jax.jit(jax.value_and_grad(loss_of(rank, op, mesh, **options), (0, 1)))(x, w) for rank in (fused, in_lax)
    )
    assert_close(got, wanted)


def mlp(matmul, mesh, check_vma):
    """A sequence-parallel two-layer MLP and its loss."""

    def rank(x, w1, w2):
        h = jax.nn.gelu(matmul("all_gather_matmul", x, w1, "t"))
        return matmul("matmul_reduce_scatter", h, w2, "t")

    f = jax.shard_map(
        rank,
        mesh=mesh,
        in_specs=(P("d", "t"), P(None, "t"), P("t")),
        out_specs=P("d", "t"),
        check_vma=check_vma,
    )
    return lambda x, w1, w2: jnp.mean(jnp.square(f(x, w1, w2)).astype(jnp.float32))


def operands(dtype=jnp.float32):
    return normal((2, 16, 12), 1, dtype), normal((12, 24), 2, dtype), normal((24, 12), 3, dtype)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
def test_mlp(check_vma, dtype, bound):
    mesh, args = mesh_of((2, 4), ("d", "t")), operands(dtype)
    got, wanted = (jax.jit(jax.value_and_grad(mlp(m, mesh, check_vma), (0, 1, 2)))(*args) for m in (fused, in_lax))
    assert_close(got, wanted, bound)
    assert [g.dtype for g in got[1]] == [dtype] * 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_second_gradient(check_vma):
    """Reverse over reverse: the backward pass is itself made of the two ops."""
    mesh, args = mesh_of((1, 4), ("d", "t")), operands()

    def norm_of_gradient(matmul):
        gradient = jax.grad(mlp(matmul, mesh, check_vma), (0, 1, 2))
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in gradient(*args))

    got, wanted = (jax.jit(jax.grad(norm_of_gradient(m), (0, 1, 2)))(*args) for m in (fused, in_lax))
    assert_close(got, wanted, 2e-5)


def megatron(matmul, mesh, check_vma):
    """Two layers without sequence parallelism: rows are whole on every rank, and every layer ends in an all-reduce."""

    def rank(x, w1, w2):
        for _ in range(2):
            x = x + matmul("matmul_all_reduce", jnp.tanh(x @ w1), w2, "t")
        return x

    f = jax.shard_map(rank, mesh=mesh, in_specs=(P("d"), P(None, "t"), P("t")), out_specs=P("d"), check_vma=check_vma)
    return lambda x, w1, w2: jnp.mean(jnp.square(f(x, w1, w2)).astype(jnp.float32))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("dtype, bound", [(jnp.float32, 1e-5), (jnp.bfloat16, 2e-2)], ids=["float32", "bfloat16"])
def test_all_reduce_layers(check_vma, dtype, bound):
    """With check_vma types tell that the cotangent is whole everywhere; without, ranks have shares of it. Either way
    what is computed is lax's own gradient."""
    mesh, (x, w1, w2) = mesh_of((2, 4), ("d", "t")), operands(dtype)
    args = x, w1 / 4, w2 / 4  # away from tanh's ends, where bfloat16's rounding shows
    got, wanted = (jax.jit(jax.value_and_grad(megatron(m, mesh, check_vma), (0, 1, 2)))(*args) for m in (fused, in_lax))
    assert_close(got, wanted, bound)
    assert [g.dtype for g in got[1]] == [dtype] * 3


@pytest.mark.parametrize("check_vma", [True, False])
def test_second_gradient_of_all_reduce(check_vma):
    mesh, args = mesh_of((1, 4), ("d", "t")), operands()

    def norm_of_gradient(matmul):
        gradient = jax.grad(megatron(matmul, mesh, check_vma), (0, 1, 2))
        return lambda *args: sum(jnp.sum(jnp.square(g)) for g in gradient(*args))

    got, wanted = (jax.jit(jax.grad(norm_of_gradient(m), (0, 1, 2)))(*args) for m in (fused, in_lax))
    assert_close(got, wanted, 2e-5)


@pytest.mark.parametrize("check_vma", [True, False])
def test_gradient_of_all_reduce_has_its_collectives(check_vma):
    """None with check_vma; without, dx and dw share one sum of the cotangent."""
    mesh = mesh_of((4,))
    f = spread(fused, "matmul_all_reduce", mesh, check_vma=check_vma)

    def pull(x, w, dy):
        return jax.vjp(f, x, w)[1](dy)

    text = jax.jit(pull).lower(normal((6, 8), 1), normal((8, 12), 2), normal((6, 12), 3)).compile().as_text()
    assert text.count(" all-reduce(") == (0 if check_vma else 1)
    assert " all-gather(" not in text and " reduce-scatter(" not in text


def test_gradient_inside_shard_map():
    """jax.grad of a rank's own loss, once eagerly: with check_vma, of what differs from rank to rank."""
    mesh, x, w = mesh_of((2,)), normal((8, 6), 1), normal((6, 10), 2)
    for op in OPS:
        for check_vma in (True, False):

            def gradient(matmul):
                def rank(op, x, w, axis):
                    return jax.grad(lambda x: jnp.sum(jnp.sin(matmul(op, x, w, axis))))(x)  # noqa: B023

                x_spec, w_spec = (P("t"), P(None, "t")) if op == "all_gather_matmul" else (P(None, "t"), P("t"))  # noqa: B023
                return jax.shard_map(
                    functools.partial(rank, op, axis="t"),  # noqa: B023
                    mesh=mesh,
                    in_specs=(x_spec, w_spec),
                    out_specs=x_spec,
                    check_vma=check_vma,  # noqa: B023
                )

            jit = jax.jit if (op, check_vma) != ("all_gather_matmul", True) else lambda f: f
            assert_close(jit(gradient(fused))(x, w), jax.jit(gradient(in_lax))(x, w))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_weights(op, check_vma):
    """The gradient of a replicated w sums over the ranks (and over a data-parallel axis), once."""
    mesh = mesh_of((2, 4), ("d", "t"))
    x, w = normal((2, 8, 6), 1), normal((6, 5), 2)

    def loss(matmul):
        f = jax.shard_map(
            lambda x, w: matmul(op, x, w, "t"),
            mesh=mesh,
            in_specs=(P("d", "t") if op == "all_gather_matmul" else P("d"), P()),
            out_specs=P("d", "t"),
            check_vma=check_vma,
        )
        return lambda x, w: jnp.sum(jnp.sin(f(x, w)))

    got, wanted = (jax.jit(jax.grad(loss(m), (0, 1)))(x, w) for m in (fused, in_lax))
    assert_close(got, wanted)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "x_dtype, w_dtype, preferred",
    [
        (jnp.bfloat16, jnp.bfloat16, jnp.float32),
        (jnp.bfloat16, jnp.float32, None),
        (jnp.float16, jnp.float16, jnp.float32),
        (jnp.float32, jnp.float32, jnp.float32),
    ],
    ids=str,
)
def test_gradient_dtypes(op, x_dtype, w_dtype, preferred):
    mesh, x, w = mesh_of((2,)), normal((8, 16), 1, x_dtype), normal((16, 12), 2, w_dtype)

    def gradients(strategy):
        def rank(op, x, w, axis):
            return fused(op, x, w, axis, strategy=strategy, preferred_element_type=preferred)

        return jax.jit(jax.grad(loss_of(rank, op, mesh), (0, 1)))(x, w)

    got, wanted = gradients("fused"), gradients("xla")
    assert [g.dtype for g in got] == [g.dtype for g in wanted] == [x_dtype, w_dtype]
    assert_close(got, wanted, 1e-5 if x_dtype == jnp.float32 else 1e-2)


def test_gradient_is_exact():
    """Whole numbers again: the backward pass bit for bit, w transposed without a copy."""
    mesh = mesh_of((4,))
    for op in OPS:
        f = spread(fused, op, mesh)
        x, w, g = integers((160, 44), 1), integers((44, 136), 2), integers((160, 136), 3)
        dx, dw = jax.jit(lambda x, w, g, f=f: jax.vjp(f, x, w)[1](g))(x, w, g)
        np.testing.assert_array_equal(np.asarray(dx), np.asarray(g) @ np.asarray(w).T)
        np.testing.assert_array_equal(np.asarray(dw), np.asarray(x).T @ np.asarray(g))


def test_forward_mode_is_a_clear_error():
    f = spread(fused, "all_gather_matmul", mesh_of((2,)))
    x, w = normal((4, 6), 1), normal((6, 4), 2)
    with pytest.raises(TypeError, match="custom_vjp"):
        jax.jvp(jax.jit(f), (x, w), (x, w))


def on_xla(op, x, w, axis):
    return getattr(entwine_jax, op)(x, w, axis, strategy="xla")


def test_xla_is_lax_and_nothing_more():
    """Where XLA runs a matmul, its program is that of the lax line: the gathered x is kept for dw."""
    mesh, args = mesh_of((2, 4), ("d", "t")), operands()
    counts = []
    for rank in (on_xla, in_lax):
        text = jax.jit(jax.grad(mlp(rank, mesh, True), (0, 1, 2))).lower(*args).compile().as_text()
        counts.append({name: text.count(f" {name}(") for name in ("all-gather", "reduce-scatter", "all-reduce", "dot")})
    assert counts[0] == counts[1] and counts[0]["all-gather"] > 0


def test_forward_mode_on_xla():
    mesh = mesh_of((2,))
    x, w = normal((4, 6), 1), normal((6, 4), 2)
    for op in OPS:
        got, wanted = (jax.jvp(jax.jit(spread(rank, op, mesh)), (x, w), (x, w)) for rank in (on_xla, in_lax))
        assert_close(got, wanted)


def test_auto_and_xla_have_the_same_gradients_as_lax():
    mesh, args = mesh_of((2, 4), ("d", "t")), operands()
    wanted = jax.jit(jax.grad(mlp(in_lax, mesh, True), (0, 1, 2)))(*args)
    for strategy in ("auto", "xla"):

        def ours(op, x, w, axis, strategy=strategy):
            return getattr(entwine_jax, op)(x, w, axis, strategy=strategy)

        assert_close(jax.jit(jax.grad(mlp(ours, mesh, True), (0, 1, 2)))(*args), wanted)
