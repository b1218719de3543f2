"""The ops on whole numbers, bit for bit: teams, meshes, device orders, leading dimensions, jit and eager."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, assert_close, fused, in_lax, integers, mesh_of, normal, product, specs, spread

import entwine_jax

MESHES = {
    "2": ((2,), ("t",), None),
    "3": ((3,), ("t",), None),
    "4": ((4,), ("t",), None),
    "5": ((5,), ("t",), None),
    "8": ((8,), ("t",), None),
    "8 reversed": ((8,), ("t",), [7, 6, 5, 4, 3, 2, 1, 0]),
    "4 permuted": ((4,), ("t",), [2, 0, 3, 1]),
    "2x4 team last": ((2, 4), ("d", "t"), None),
    "4x2 team first": ((4, 2), ("t", "d"), None),
    "2x3 team last": ((2, 3), ("d", "t"), [5, 1, 4, 0, 2, 3]),
    "2x2x2 team in the middle": ((2, 2, 2), ("a", "t", "b"), [3, 1, 0, 2, 7, 6, 4, 5]),
}


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("name", MESHES)
def test_exact_on_meshes(op, name):
    shape, names, order = MESHES[name]
    mesh = mesh_of(shape, names, order)
    ranks, others = mesh.shape["t"], tuple(n for n in names if n != "t")
    # Every team works on its own batch; several tiles a chunk, none of them full.
    x, w = integers((4, 40 * ranks, 11 * ranks), 1), integers((11 * ranks, 35 * ranks), 2)
    y = jax.jit(spread(fused, op, mesh, leading=(others or None,)))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("axes", [("a", "b"), ("b", "a")])
def test_team_along_two_axes(op, axes):
    mesh = mesh_of((2, 2, 2), ("a", "d", "b"))
    x, w = integers((2, 16, 12), 1), integers((12, 20), 2)
    y = jax.jit(spread(fused, op, mesh, axis=axes, leading=("d",)))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("jit", [True, False], ids=["jit", "eager"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_modes(op, jit, check_vma):
    f = spread(fused, op, mesh_of((2, 2), ("d", "t")), check_vma=check_vma)
    x, w = integers((10, 6), 1), integers((6, 14), 2)
    np.testing.assert_array_equal(np.asarray((jax.jit(f) if jit else f)(x, w)), product(x, w))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("leading", [(), (1,), (3,), (2, 1, 3)])
def test_leading_dimensions(op, leading):
    x, w = integers((*leading, 12, 8), 1), integers((8, 10), 2)
    y = jax.jit(spread(fused, op, mesh_of((2,)), leading=(None,) * len(leading)))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("check_vma", [True, False])
def test_replicated_operands(check_vma):
    """What is replicated over the team axis goes in like any shard; vma tells that the result is not."""
    mesh, x, w = mesh_of((4,)), integers((8, 6), 1), integers((6, 5), 2)

    def both(op):
        def rank(x, w):
            return fused(op, x, w, "t"), in_lax(op, x, w, "t")

        f = jax.shard_map(rank, mesh=mesh, in_specs=jax.P(), out_specs=jax.P("t"), check_vma=check_vma)
        return jax.jit(f)(x, w)

    for op in OPS:
        got, wanted = both(op)
        np.testing.assert_array_equal(np.asarray(got), np.asarray(wanted))


def test_result_is_not_replicated():
    mesh, x, w = mesh_of((2,)), integers((4, 6), 1), integers((6, 4), 2)
    for op in ("all_gather_matmul", "matmul_reduce_scatter"):
        f = jax.shard_map(
            lambda x, w, op=op: fused(op, x, w, "t"), mesh=mesh, in_specs=specs(op)[:2], out_specs=jax.P()
        )
        with pytest.raises(ValueError, match="out_specs"):
            f(x, w)


@pytest.mark.parametrize("rows", [1, 2, 3, 31, 33, 130])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_all_reduce_of_any_rows(ranks, rows):
    """Fewer rows than ranks, and rows that ranks can't share: every rank has every element."""
    x, w = integers((rows, 5 * ranks), 1), integers((5 * ranks, 70), 2)
    y = jax.jit(spread(fused, "matmul_all_reduce", mesh_of((ranks,))))(x, w)
    assert len(y.addressable_shards) == ranks
    for shard in y.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), product(x, w))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=lambda d: jnp.dtype(d).name)
def test_all_reduce_is_the_same_on_every_rank(dtype):
    """To the bit, though every sum is rounded: one rank makes it."""
    x, w = normal((3, 65, 256), 1, dtype), normal((256, 100), 2, dtype)
    for check_vma in (True, False):
        f = spread(fused, "matmul_all_reduce", mesh_of((4,)), leading=(None,), check_vma=check_vma)
        first, *others = (np.asarray(shard.data) for shard in jax.jit(f)(x, w).addressable_shards)
        assert_close(first, product(x, w), 1e-2 if dtype == jnp.bfloat16 else 1e-6)
        for other in others:
            np.testing.assert_array_equal(other, first)


@pytest.mark.parametrize("op", OPS)
def test_numpy_operands_and_empty_arrays(op):
    mesh = mesh_of((2,))
    x, w = np.ones((4, 6), np.float32), np.ones((6, 8), np.float32)
    np.testing.assert_array_equal(np.asarray(spread(fused, op, mesh)(x, w)), product(x, w))

    def auto(op, x, w, axis):
        return getattr(entwine_jax, op)(x, w, axis)

    for shape in ((0, 6), (0, 4, 6)):
        x, w = jnp.ones(shape), jnp.ones((shape[-1], 8))
        f = spread(auto, op, mesh, leading=(None,) * (len(shape) - 2))
        y, gradients = jax.jit(lambda x, w, f=f: (f(x, w), jax.grad(lambda x, w: f(x, w).sum(), (0, 1))(x, w)))(x, w)
        np.testing.assert_array_equal(np.asarray(y), product(x, w))
        assert gradients[0].shape == x.shape and gradients[1].shape == w.shape and not np.any(gradients[1])


@pytest.mark.parametrize("op", OPS)
def test_team_of_one(op):
    x, w = integers((4, 6), 1), integers((6, 8), 2)
    for strategy in ("auto", "fused", "xla"):

        def rank(op, x, w, axis, strategy=strategy):
            return fused(op, x, w, axis, strategy=strategy)

        y = jax.jit(spread(rank, op, mesh_of((1, 2), ("t", "d"))))(x, w)
        np.testing.assert_array_equal(np.asarray(y), product(x, w))


def test_repeated_calls_with_new_inputs():
    """Epochs and the two halves of the arena: 50 calls in flight at once, no answer from an earlier one."""
    f = {op: jax.jit(spread(fused, op, mesh_of((4,)))) for op in OPS}
    for op in OPS:
        inputs = [(integers((64, 12), seed), integers((12, 40), seed + 100)) for seed in range(50)]
        outputs = [f[op](x, w) for x, w in inputs]
        for (x, w), y in zip(inputs, outputs, strict=True):
            np.testing.assert_array_equal(np.asarray(y), product(x, w))


def test_bitwise_repeatable():
    rng = np.random.default_rng(0)
    x, w = (jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in ((128, 64), (64, 96)))
    for op in OPS:
        f = jax.jit(spread(fused, op, mesh_of((4,))))
        first = np.asarray(f(x, w))
        for _ in range(10):
            np.testing.assert_array_equal(np.asarray(f(x, w)), first)
