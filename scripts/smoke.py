"""Checks an installed wheel: run it from anywhere with the Python that the wheel is installed in.

It imports entwine_jax (not the source tree's), looks at what is registered, and runs all collective matmuls through
their custom calls on 4 virtual CPU devices. `--cuda` demands that the wheel holds the CUDA handlers too. No GPU needed.
"""

import argparse
import functools
import importlib.metadata
import os
import sysconfig
from pathlib import Path
from typing import Any

RANKS = 4
TARGETS = {"entwine_all_gather_matmul", "entwine_matmul_reduce_scatter", "entwine_matmul_all_reduce"}

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={RANKS}"

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _core


def check_installed() -> None:
    package, installed = Path(entwine_jax.__file__).resolve().parent, Path(sysconfig.get_path("platlib")).resolve()
    assert package.parent == installed, f"{package} is not what is installed in {installed}"
    assert (package / "py.typed").exists(), "the wheel has no py.typed"
    print(f"entwine-jax {importlib.metadata.version('entwine-jax')} in {package}, jax {jax.__version__}")


def check_registrations(cuda: bool) -> None:
    registrations = _core.registrations()
    assert _core.cuda_built() == ("CUDA" in registrations)
    assert _core.cuda_built() or not cuda, "the wheel was built without CUDA"
    for platform, targets in registrations.items():
        assert set(targets) >= TARGETS, f"{platform} registers {sorted(targets)}, not all of {sorted(TARGETS)}"
        print(f"{platform}: {', '.join(f'{name} ({", ".join(stages)})' for name, stages in sorted(targets.items()))}")


def check_matmuls() -> None:
    # Small integers, so that every sum is exact; rows and columns that no tile divides.
    m, k, n = RANKS * 37, 8, 41
    random = np.random.default_rng(0)
    x = random.integers(-4, 5, (m, k * RANKS)).astype(np.float32)
    w = random.integers(-4, 5, (k * RANKS, n * RANKS)).astype(np.float32)
    mesh = jax.make_mesh((RANKS,), ("t",), axis_types=(jax.sharding.AxisType.Auto,))
    cases: list[tuple[Any, P, P, P]] = [
        (entwine_jax.all_gather_matmul, P("t", None), P(None, "t"), P(None, "t")),
        (entwine_jax.matmul_reduce_scatter, P(None, "t"), P("t", None), P("t", None)),
        (entwine_jax.matmul_all_reduce, P(None, "t"), P("t", None), P()),
    ]
    for op, x_spec, w_spec, y_spec in cases:
        per_shard = functools.partial(op, axis_name="t", strategy="fused")
        y = jax.jit(jax.shard_map(per_shard, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec))(x, w)
        np.testing.assert_array_equal(np.asarray(y), x @ w)
        print(f"{op.__name__}: exact on {RANKS} devices")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="fail if the wheel was built without CUDA")
    arguments = parser.parse_args()
    check_installed()
    check_registrations(arguments.cuda)
    check_matmuls()
    print("smoke test passed")
