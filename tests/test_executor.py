"""The host executor under stress: random stalls, workers, both transports, all from several threads."""

import functools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, fused, integers, mesh_of, product, spread
from jax import lax

from entwine_jax import Config


def with_config(op, mesh, config):
    return jax.jit(spread(lambda op, x, w, axis: fused(op, x, w, axis, config=config), op, mesh))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("transport", ["pull", "push"])
def test_stalls(op, workers, transport):
    """Orders that a quiet machine never shows, with one worker a rank (the progress rule's hardest case) and more."""
    mesh = mesh_of((4,))
    for seed in range(4):
        config = Config(
            workers=workers, transport=transport, stall_us=300, stall_seed=seed, lead=seed, pushers=1 + seed % 2
        )
        f = with_config(op, mesh, config)
        inputs = [(integers((4 * 40, 16), i), integers((16, 4 * 36), i + 9)) for i in range(6)]
        for y, (x, w) in [(f(x, w), (x, w)) for x, w in inputs]:
            np.testing.assert_array_equal(np.asarray(y), product(x, w))


def test_stalled_two_axis_teams():
    mesh = mesh_of((4, 2), ("t", "d"), [5, 2, 7, 0, 1, 6, 3, 4])
    config = Config(stall_us=300, stall_seed=3, tile_m=8, tile_n=16)
    x, w = integers((2, 72, 12), 1), integers((12, 40), 2)
    for op in OPS:
        rank = lambda op, x, w, axis: fused(op, x, w, axis, config=config)  # noqa: E731
        f = jax.jit(spread(rank, op, mesh, leading=("d",)))
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(f(x, w)), product(x, w))


@pytest.mark.parametrize("tile", [(1, 1), (7, 5), (32, 64), (128, 128)], ids=str)
def test_tile_shapes(tile):
    x, w = integers((4 * 21, 12), 1), integers((12, 4 * 23), 2)
    for op in OPS:
        f = with_config(op, mesh_of((4,)), Config(tile_m=tile[0], tile_n=tile[1]))
        np.testing.assert_array_equal(np.asarray(f(x, w)), product(x, w))


def test_python_threads():
    """Three threads, each with an executable of its own over the same four devices."""
    fs = [with_config(OPS[i], mesh_of((4,)), Config(lead=i)) for i in range(3)]
    x, w = integers((48, 16), 1), integers((16, 40), 2)
    wanted, failures = product(x, w), []

    def work(f):
        for _ in range(10):
            try:
                np.testing.assert_array_equal(np.asarray(f(x, w)), wanted)
            except Exception as error:
                failures.append(error)

    threads = [threading.Thread(target=work, args=(f,)) for f in fs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_growing_arenas():
    """Each call needs more memory than the last, then less again."""
    for op in OPS:
        for m in (1, 64, 600, 2, 2000, 5):
            x, w = integers((2 * m, 8), m), integers((8, 130), m + 1)
            np.testing.assert_array_equal(np.asarray(with_config(op, mesh_of((2,)), None)(x, w)), product(x, w))


def test_subsets_of_the_devices():
    """Teams of other sizes and members, one after the other: none may take up another's state."""
    x, w = integers((24, 24), 1), integers((24, 24), 2)
    for _ in range(2):
        for shape, order in (((2,), [0, 1]), ((2,), [1, 0]), ((3,), [0, 2, 1]), ((4,), [3, 1, 2, 0]), ((8,), None)):
            for op in OPS:
                f = with_config(op, mesh_of(shape, order=order), None)
                np.testing.assert_array_equal(np.asarray(f(x, w)), product(x, w))


@pytest.mark.parametrize("op", OPS)
def test_missing_rank(op):
    """A rank that never comes is an error which says so, not a hang, and the next call is well again."""
    x, w = integers((64, 12), 1), integers((12, 64), 2)

    def rank(op, x, w, axis):
        work = functools.partial(fused, op, x, w, axis, config=Config(timeout_s=0.3))
        y = jax.eval_shape(work)
        return lax.cond(lax.axis_index(axis) == 2, lambda: jnp.zeros(y.shape, y.dtype), work)

    broken = jax.jit(spread(rank, op, mesh_of((4,)), check_vma=False))
    message = rf"{op}: rank [013] waited 0.3 s for rank 2 at tile .* epoch \d+ .*ENTWINE_TIMEOUT_S"
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match=message):
            broken(x, w).block_until_ready()
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(with_config(op, mesh_of((4,)), None)(x, w)), product(x, w))
