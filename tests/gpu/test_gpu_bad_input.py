"""What the kernels can't do: an error that says so, after which the next call works."""

import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    OPS,
    REDUCE_SCATTER,
    Case,
    assert_equal,
    exact_product,
    integers,
    mesh_of,
    placed,
    program,
    team_size,
)

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


def run(case, dtype, **options):
    mesh = mesh_of()
    ranks = team_size(mesh)
    x, w = (value.astype(dtype) for value in integers(case, ranks, 0))
    return program(case, mesh, **options)(*placed(case, mesh, x, w))


def works(op):
    case = Case(op, 100, 136, 72)
    ranks = team_size(mesh_of())
    assert_equal(case, run(case, jnp.bfloat16), exact_product(case, ranks, *integers(case, ranks, 0)))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [np.float32, np.int8], ids=lambda dtype: dtype.__name__)
def test_dtype(op, dtype):
    with pytest.raises((TypeError, NotImplementedError), match=rf"{op}.*{np.dtype(dtype).name}"):
        run(Case(op, 16, 64, 64), dtype)
    works(op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n, k", [(12, 64), (64, 12), (9, 64), (64, 9)])
def test_row_pitch(op, n, k):
    with pytest.raises((ValueError, NotImplementedError), match=rf"{op}.*16"):
        run(Case(op, 16, n, k), jnp.bfloat16)
    works(op)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n, k", [(12, 64), (64, 9)])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float32], ids=["bfloat16", "float32"])
def test_auto_takes_them(op, n, k, dtype):
    case = Case(op, 16, n, k)
    ranks = team_size(mesh_of())
    assert_equal(case, run(case, dtype, strategy="auto"), exact_product(case, ranks, *integers(case, ranks, 0)))


def test_rows_not_shared_evenly():
    case, mesh = Case(REDUCE_SCATTER, 1, 64, 64), mesh_of()
    ranks = team_size(mesh)
    x, w = np.ones((ranks * 16 + 1, ranks * 64), jnp.bfloat16), np.ones((ranks * 64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match=rf"matmul_reduce_scatter.*{ranks * 16 + 1}"):
        program(case, mesh)(*placed(case, mesh, x, w))
    works(REDUCE_SCATTER)


def test_wrong_contraction():
    case, mesh = Case(ALL_GATHER, 1, 64, 64), mesh_of()
    ranks = team_size(mesh)
    x, w = np.ones((ranks * 16, 64), jnp.bfloat16), np.ones((72, ranks * 64), jnp.bfloat16)
    with pytest.raises(TypeError, match=r"all_gather_matmul.*64.*72"):
        program(case, mesh)(*placed(case, mesh, x, w))
    works(ALL_GATHER)
