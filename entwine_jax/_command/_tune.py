"""``entwine tune``: measures the collective matmuls of a function, or one of given sizes, and keeps what is fastest.

    entwine tune module:function --args module:example_args
    entwine tune all_gather_matmul 8192 4096 7168 --dtype bfloat16

The sizes are those of one rank's matmul, (m, k) @ (k, n): m are the rows that are gathered, or those that are summed.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from .. import _float8_checks, _ops, _sums
from .._autotune import autotune
from .._tuning import Tuned
from ._function import named
from ._usage import UsageError, subcommand

OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def add_to(commands: Any) -> None:
    parser = subcommand(
        commands,
        "tune",
        run,
        "measures the collective matmuls of a function, or one of given sizes, and keeps what is fastest",
        "entwine tune model:step --args model:example_args",
        "entwine tune matmul_reduce_scatter 8192 8192 3584 --dtype bfloat16 --seconds 20",
    )
    parser.add_argument("what", help=f"module:function, or one of {', '.join(OPS)}")
    parser.add_argument("sizes", nargs="*", type=int, metavar="M N K", help="of one rank's matmul, for an op")
    parser.add_argument(
        "--args", metavar="MODULE:NAME", help="the function's arguments: a tuple, or a function that returns one"
    )
    parser.add_argument(
        "--dtype", default="bfloat16", help="of an op's operands (default: bfloat16; float8_e4m3fn has scales)"
    )
    parser.add_argument(
        "--result", metavar="DTYPE", help="of an op's result; default: as the operands, bfloat16 for float8"
    )
    parser.add_argument("--transpose-w", action="store_true", help="an op's w is stored (n, k)")
    parser.add_argument("--transpose-x", action="store_true", help="x is stored (k, m), of the two ops that sum")
    parser.add_argument("--gathers", action="store_true", help="all_gather_matmul that returns the gathered x too")
    parser.add_argument("--ranks", type=int, help="of an op's team; default: all devices")
    parser.add_argument("--seconds", type=float, default=60.0, help="about how long it may take (default: 60)")
    parser.add_argument("--again", action="store_true", help="measure also what is known already")
    parser.add_argument("--dry-run", action="store_true", help="list what would be measured")


def run(options: argparse.Namespace) -> int:
    """Exit status 1 if there was nothing to measure, or no time for all of it."""
    fn, args = _of_op(options) if options.what in OPS else _of_function(options)
    if not options.seconds > 0:
        raise UsageError(f"--seconds {options.seconds:g}: must be more than 0")
    found = autotune(fn, *args, seconds=options.seconds, again=options.again, dry_run=options.dry_run, progress=True)
    if options.json:
        print(
            json.dumps({"path": found.path and str(found.path), "products": [_plain(row) for row in found]}, indent=1)
        )
    else:
        print(found)
    done = [row.strategy is not None or row.status == "would be measured" for row in found]
    return 0 if done and all(done) else 1


def _plain(row: Tuned) -> dict[str, Any]:
    return dataclasses.asdict(row) | {"ms": row.ms, "gain": row.gain}


def _of_function(options: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    if options.sizes:
        raise UsageError(f"{options.what} is no op, and only ops take sizes; the ops are {', '.join(OPS)}")
    if ":" not in options.what:
        raise UsageError(f"{options.what}: must be module:name, or one of {', '.join(OPS)}")
    fn = named(options.what)
    if not callable(fn):
        raise UsageError(f"{options.what} is no function but {type(fn).__name__}")
    args = named(options.args) if options.args else ()
    args = args() if callable(args) else args
    return fn, tuple(args) if isinstance(args, tuple | list) else (args,)


def _of_op(options: argparse.Namespace) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    op, ranks = options.what, options.ranks or jax.device_count()
    if len(options.sizes) != 3 or min(options.sizes) < 1:
        raise UsageError(f"{op} needs three sizes of one rank's matmul, M N K, for example 8192 4096 7168")
    if not 2 <= ranks <= jax.device_count():
        raise UsageError(
            f"a team has two ranks or more, and JAX has {jax.device_count()} devices ({jax.default_backend()}), not "
            f"{ranks}; without GPUs, JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES=8 in the environment gives virtual ones"
        )
    m, n, k = options.sizes
    if op != "matmul_all_reduce" and m % ranks:
        raise UsageError(f"{ranks} ranks can't share {m} rows evenly; use {-(-m // ranks) * ranks}")
    if options.gathers and op != "all_gather_matmul":
        raise UsageError(f"--gathers is for all_gather_matmul, not {op}")
    if options.transpose_x and op == "all_gather_matmul":
        raise UsageError("--transpose-x is for matmul_reduce_scatter and matmul_all_reduce, not all_gather_matmul")
    dtype = _dtype(options.dtype)
    float8 = dtype in _float8_checks.FLOAT8
    result = _dtype(options.result) if options.result else jnp.dtype("bfloat16") if float8 else None
    keywords: dict[str, Any] = {"preferred_element_type": result, "transpose_w": options.transpose_w}
    if float8:
        keywords["scales"] = (jnp.float32(1), jnp.float32(k**-0.5))
    if options.gathers:
        keywords["return_gathered"] = True
    if options.transpose_x:
        keywords["transpose_x"] = True
    gather = op == "all_gather_matmul"
    x_shape = (m, k) if gather else (m, k * ranks)
    x = jax.ShapeDtypeStruct(x_shape[::-1] if options.transpose_x else x_shape, dtype)
    w_shape = (k, n * ranks) if gather else (k * ranks, n)
    w = jax.ShapeDtypeStruct(w_shape[::-1] if options.transpose_w else w_shape, jnp.float8_e4m3fn if float8 else dtype)
    rows, columns = P("t", None), P(None, "t")
    of_w = columns if gather != options.transpose_w else rows
    of_y = columns if gather else P() if op == "matmul_all_reduce" else rows
    mapped = jax.shard_map(
        lambda x, w: getattr(_ops if gather else _sums, op)(x, w, "t", **keywords),
        mesh=Mesh(np.array(jax.devices()[:ranks]), ("t",)),
        in_specs=(rows if gather or options.transpose_x else columns, of_w),
        out_specs=(of_y, P()) if options.gathers else of_y,
        check_vma=False,
    )
    return mapped, (x, w)


def _dtype(name: str) -> Any:
    try:
        return jnp.dtype(name)
    except TypeError:
        raise UsageError(f"there is no dtype {name!r}") from None
