"""What strategies "resident" and "signal" have in common in the host executor: exact on permuted devices, under stalls,
with gradients, in JAX's modes. What is their own: test_resident.py, test_signal.py."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from global_view import MODES, operands, setup
from helpers import OPS, PUBLIC, assert_close, in_lax, integers, mesh_of, normal, product, specs, spread
from jax import lax
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config

GATHER, SCATTER, REDUCE = OPS
# Many tiles; in groups of one wave each.
SMALL = {"resident": Config(tile_m=8, tile_n=16), "signal": Config(tile_m=8, tile_n=16, group_waves=1)}


@pytest.fixture(params=SMALL)
def strategy(request):
    return request.param


def ours(strategy):
    """An op by its name, x, w, the axis and options, by the strategy."""

    def matmul(op, x, w, axis="t", **options):
        return PUBLIC[op](x, w, axis, **{"strategy": strategy, **options})

    return matmul


@pytest.mark.parametrize("op", OPS)
def test_two_axes_and_permuted_devices(strategy, op):
    mesh = mesh_of((2, 2, 2), ("a", "d", "b"), [3, 1, 0, 2, 7, 6, 4, 5])
    x, w = integers((2, 68, 12), 1), integers((12, 20), 2)
    rank = lambda op, x, w, axis: ours(strategy)(op, x, w, axis, config=SMALL[strategy])  # noqa: E731
    y = jax.jit(spread(rank, op, mesh, axis=("b", "a"), leading=("d",)))(x, w)
    np.testing.assert_array_equal(np.asarray(y), product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_stalls(strategy, op):
    """With one worker a rank and more, beside fused calls on the same arenas."""
    inputs = [(integers((4 * 40, 16), i), integers((16, 4 * 36), i + 9)) for i in range(3)]
    for seed in range(4):
        own = {
            "resident": {"workers": 1 + seed, "comm_sms": 2 + 2 * (seed % 2)},
            "signal": {"workers": 1 + seed % 2 * 2, "group_waves": 1 + seed % 3},
        }
        config = Config(stall_us=300, stall_seed=seed, tile_m=16, **own[strategy])
        both = jax.jit(
            spread(
                lambda op, x, w, axis: (
                    ours(strategy)(op, x, w, axis, config=config)  # noqa: B023
                    + PUBLIC[op](x, w, axis, strategy="fused")
                ),
                op,
                mesh_of((4,)),
            )
        )
        for y, (x, w) in [(both(x, w), (x, w)) for x, w in inputs]:
            np.testing.assert_array_equal(np.asarray(y), 2 * product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_missing_rank(strategy, op):
    x, w = integers((64, 12), 1), integers((12, 64), 2)

    def rank(op, x, w, axis):
        work = lambda: ours(strategy)(op, x, w, axis, config=Config(timeout_s=0.3))  # noqa: E731
        y = jax.eval_shape(work)
        return lax.cond(lax.axis_index(axis) == 2, lambda: jnp.zeros(y.shape, y.dtype), work)

    broken = jax.jit(spread(rank, op, mesh_of((4,)), check_vma=False))
    with pytest.raises(jax.errors.JaxRuntimeError, match=rf"{op}: rank [013] waited 0.3 s for rank 2 at tile"):
        broken(x, w).block_until_ready()
    np.testing.assert_array_equal(np.asarray(jax.jit(spread(ours(strategy), op, mesh_of((4,))))(x, w)), product(x, w))


def finished(matmul, op, x, w, bias, axis):
    if matmul is in_lax:
        return jax.nn.silu(in_lax(op, x, w, axis) + bias)
    return matmul(op, x, w, axis, bias=bias, activation="silu")


@pytest.mark.each_value
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("check_vma", [True, False])
def test_gradients(strategy, op, check_vma):
    """First and second, with bias and activation, of float32."""
    mine, x, w, bias = ours(strategy), normal((2, 12, 8), 1), normal((8, 12), 2), normal((12,), 3)
    x_spec, w_spec, y_spec = specs(op, leading=(None,))
    of_bias = P("t") if op == GATHER else P()

    def loss(matmul):
        f = jax.shard_map(
            lambda x, w, b: finished(matmul, op, x, w, b, "t"),
            mesh=mesh_of((4,)),
            in_specs=(x_spec, w_spec, of_bias),
            out_specs=y_spec,
            check_vma=check_vma,
        )
        return lambda *v: jnp.sum(jnp.sin(f(*v)))

    def second(matmul):
        gradient = jax.grad(loss(matmul), (0, 1, 2))
        return jax.grad(lambda *v: sum(jnp.sum(jnp.cos(g)) for g in gradient(*v)), (0, 1, 2))

    for order in (lambda m: jax.value_and_grad(loss(m), (0, 1, 2)), second):
        assert_close(*(jax.jit(order(matmul))(x, w, bias) for matmul in (mine, in_lax)), 1e-4)
    found = entwine_jax.explain(jax.grad(loss(mine), (0, 1, 2)), x, w, bias)
    assert {each.strategy for each in found} <= {strategy, "xla"} and found[0].strategy == strategy


def test_gathered(strategy):
    def rank(x, w):
        return ours(strategy)(GATHER, x, w, return_gathered=True, config=SMALL[strategy])

    for ranks, batch in ((2, ()), (5, (3,))):
        x, w = integers((*batch, 41 * ranks, 12), 1), integers((12, 5 * ranks), 2)
        leading = (None,) * len(batch)
        in_specs, columns = (P(*leading, "t"), P(None, "t")), P(*leading, None, "t")
        f = jax.shard_map(rank, mesh=mesh_of((ranks,)), in_specs=in_specs, out_specs=(columns, columns))
        y, rows = jax.jit(f)(x, w)
        np.testing.assert_array_equal(np.asarray(y), product(x, w))
        for copy in np.split(np.asarray(rows), ranks, axis=-1):
            np.testing.assert_array_equal(copy, np.asarray(x))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dims", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap(strategy, op, dims):
    x = integers((3, 40, 16), 1) if dims[0] == 0 else integers((40, 16), 1)
    w = integers((3, 16, 20), 2) if dims[1] == 0 else integers((16, 20), 2)
    x_spec, w_spec, y_spec = specs(op)
    lead = lambda spec, dim: spec if dim is None else P(None, *spec)  # noqa: E731
    f = jax.shard_map(
        jax.vmap(functools.partial(ours(strategy), op), dims),
        mesh=mesh_of((2,)),
        in_specs=(lead(x_spec, dims[0]), lead(w_spec, dims[1])),
        out_specs=P(None, *y_spec),
    )
    wanted = np.einsum(f"{'b' * (dims[0] == 0)}mk,{'b' * (dims[1] == 0)}kn->bmn", x, w)
    np.testing.assert_array_equal(np.asarray(jax.jit(f)(x, w)), wanted)


@pytest.mark.parametrize("check_vma", [True, False])
def test_remat_and_scan(strategy, check_vma):
    x, layers = normal((8, 12), 1), (normal((3, 12, 16), 2) * 0.3, normal((3, 16, 12), 3) * 0.3)

    def loss(matmul):
        @jax.checkpoint
        def layer(x, weights):
            h = jnp.tanh(matmul(GATHER, x, weights[0], "t"))
            return x + matmul(SCATTER, h, weights[1], "t"), None

        f = jax.shard_map(
            lambda x, layers: lax.scan(layer, x, layers)[0],
            mesh=mesh_of((4,)),
            in_specs=(P("t"), (P(None, None, "t"), P(None, "t"))),
            out_specs=P("t"),
            check_vma=check_vma,
        )
        return lambda x, layers: jnp.sum(jnp.square(f(x, layers)))

    assert_close(*(jax.jit(jax.value_and_grad(loss(m), (0, 1)))(x, layers) for m in (ours(strategy), in_lax)))


@pytest.mark.each_value
@pytest.mark.parametrize("mode", MODES)
def test_global_view(strategy, mode):
    with setup(mode) as s:
        x, w_up, w_down = s.place(*operands())

        def loss(by):
            f = s.spread(lambda x, a, b: s.down(jnp.sin(s.up(x, a, strategy=by)), b, strategy=by))
            return lambda *v: jnp.sum(f(*v) ** 2)

        grads = [jax.jit(jax.value_and_grad(loss(each), (0, 1, 2)))(x, w_up, w_down) for each in (strategy, "xla")]
        assert_close(*grads)
        found = entwine_jax.explain(jax.grad(loss(strategy), (0, 1, 2)), x, w_up, w_down)
        assert len(found) == 4 and {each.strategy for each in found} == {strategy}
