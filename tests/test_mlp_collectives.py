"""A training step of a sequence-parallel MLP holds our calls and no collective of XLA's over the tensor axis."""

import functools
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from global_view import MODES, all_reduce_sizes, collectives, setup, size
from helpers import assert_close, normal
from jax.sharding import PartitionSpec as P

import entwine_jax

EXAMPLES = Path(__file__).parents[1] / "examples"


def silu_mlp(up, down, s, x, w_gate, w_up, w_down):
    """SwiGLU; `s` may be None for the plain one."""
    return x + down(jax.nn.silu(up(x, w_gate)) * up(x, w_up), w_down)


def operands():
    return (
        normal((8, 16, 24), 1),
        normal((24, 32), 2) / 5,
        normal((24, 32), 3) / 5,
        normal((32, 24), 4) / 6,
    )


def pull(f, dy):
    """f and its gradients against a cotangent, without a loss that would be summed over all ranks."""

    def both(*args):
        y, backward = jax.vjp(f, *args)
        return y, backward(dy)

    return both


def square_sum(f):
    return lambda *args: jnp.sum(jnp.square(f(*args)))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("remat", [False, True])
def test_swiglu(mode, remat):
    dy = normal((8, 16, 24), 5)
    wanted = pull(functools.partial(silu_mlp, jnp.matmul, jnp.matmul, None), dy)(*operands())
    with setup(mode) as s:
        x_spec, up_spec, down_spec, _ = s.specs
        f = functools.partial(silu_mlp, s.up, s.down, s)
        f = s.spread(jax.checkpoint(f) if remat else f, (x_spec, up_spec, up_spec, down_spec), x_spec)
        args = s.place(*operands(), specs=(x_spec, up_spec, up_spec, down_spec))
        (dy,) = s.place(dy)
        compiled = jax.jit(pull(f, dy)).lower(*args).compile()
        found = collectives(compiled.as_text())
        # Sums of weight gradients over data.
        assert not {"all-gather", "reduce-scatter", "collective-permute", "all-to-all"} & found.keys()
        assert all_reduce_sizes(compiled.as_text()) == {size(s.mesh, s.data)}
        assert {name for name in found if name.startswith("entwine")} == {
            "entwine_all_gather_matmul",
            "entwine_matmul_reduce_scatter",
        }
        assert_close(compiled(*args), wanted)


@pytest.mark.each_value
@pytest.mark.parametrize("wanted", [(0,), (1,), (3,), (1, 2, 3), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_some_gradients(mode, wanted):
    """One call gives dx and what dw needs; where only one of them is wanted the other costs nothing."""
    plain = jax.grad(square_sum(functools.partial(silu_mlp, jnp.matmul, jnp.matmul, None)), wanted)(*operands())
    with setup(mode) as s:
        x_spec, up_spec, down_spec, _ = s.specs
        specs = x_spec, up_spec, up_spec, down_spec
        f = s.spread(functools.partial(silu_mlp, s.up, s.down, s), specs, x_spec)
        args = s.place(*operands(), specs=specs)
        compiled = jax.jit(jax.grad(square_sum(f), wanted)).lower(*args).compile()
        assert_close(compiled(*args), plain)
        found = collectives(compiled.as_text())
    # Forward: two gathers and, since its result is squared, the scatter. Without dx, rows for dw_gate and dw_up were
    # kept from the forward pass where JAX knows the shardings, else XLA gathers them; as it gathers dy for dw_down
    # without dh.
    kept = mode != "auto"
    backward = {
        (0,): (1, 2, 0),
        (1,): (1, 0, 0 if kept else 1),
        (3,): (0, 0, 1),
        (1, 2, 3): (1, 0, 0 if kept else 2),
        (0, 1, 2, 3): (1, 2, 0),
    }[wanted]
    counts = [
        found.get(name, 0) for name in ("entwine_all_gather_matmul", "entwine_matmul_reduce_scatter", "all-gather")
    ]
    assert counts[0] == 2 + backward[0] and counts[1] == 1 + backward[1]
    # XLA may gather x once for both of its weights.
    assert (counts[2] > 0) == (backward[2] > 0) and counts[2] <= backward[2]


def test_the_mlp_of_the_example():
    example = runpy.run_path(str(EXAMPLES / "mlp.py"))
    setup_ = example["cpu_setup"]()
    step = example["training_step"](setup_, "fused")
    params, (tokens, target) = example["make_params"](setup_, 1), example["make_tokens"](setup_)
    text = step.lower(params, tokens, target).compile().as_text()
    found = collectives(text)
    assert not {"all-gather", "reduce-scatter", "collective-permute", "all-to-all"} & found.keys()
    # The loss is a mean over all devices, which XLA may take one axis at a time.
    assert all_reduce_sizes(text) <= {setup_.mesh.shape["data"], setup_.mesh.shape["team"], setup_.mesh.size}
    assert found["entwine_all_gather_matmul"] >= 2 and found["entwine_matmul_reduce_scatter"] >= 1


def test_second_order_under_vmap():
    """Gradients of gradients, one for each of a batch of weights: the sums of cotangents of what isn't batched."""

    def inner(matmul):
        def loss(x, w):
            return jnp.sum(jnp.sin(matmul(x, w)))

        def norm(x, w):
            dx, dw = jax.grad(loss, (0, 1))(x, w)
            return jnp.sum(jnp.square(dx)) + jnp.sum(jnp.sin(dw))

        return lambda x, ws: jnp.sum(jax.vmap(norm, (None, 0))(x, ws))

    x, ws = normal((2, 8, 12), 1), normal((3, 12, 16), 2) / 4
    wanted = jax.jit(jax.grad(inner(jnp.matmul), (0, 1)))(x, ws)
    for mode in ("auto", "explicit"):
        with setup(mode, "8") as s:
            args = s.place(x, ws, specs=(P(None, "t", None), P(None, None, "t")))
            f = functools.partial(entwine_jax.collective_matmul, strategy="fused")
            got = jax.jit(jax.grad(inner(f), (0, 1)))(*args)
        assert_close(got, wanted, 3e-5)
