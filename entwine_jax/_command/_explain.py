"""``entwine explain``: which collective matmuls a function holds, and what becomes of each."""

import argparse
import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._config import STRATEGIES
from .._explain import CollectiveMatmul, explain
from . import _function
from ._usage import subcommand


def add_to(commands: Any) -> None:
    parser = subcommand(
        commands,
        "explain",
        run,
        "which collective matmuls a function holds, and what becomes of each; runs nothing",
        "entwine explain model:mlp --mesh tp=8 --arg 'bf16[8192,4096]@(tp,None)' --arg 'bf16[4096,14336]@(None,tp)'",
        "entwine explain train:step --args train:example_args --grad --require fused",
    )
    _function.add_options(parser)
    parser.add_argument("--grad", action="store_true", help="of the gradient of the sum of all results, too")
    parser.add_argument(
        "--require",
        choices=[name for name in STRATEGIES if name != "auto"],
        help="exit status 1 unless there are collective matmuls and all are run so",
    )


def run(options: argparse.Namespace) -> int:
    call = _function.load(options)
    fn = _gradient(call.fn, len(call.args)) if options.grad else call.fn
    with call.in_mesh():
        found = explain(fn, *call.args)
    if options.json:
        print(json.dumps({"function": options.function, "matmuls": [_plain(each) for each in found]}, indent=1))
    else:
        print(found)
    if options.require is None:
        return 0
    return 0 if len(found) and all(each.strategy == options.require for each in found) else 1


def _gradient(fn: Any, count: int) -> Any:
    def total(*args: Any) -> jax.Array:
        leaves = [leaf for leaf in jax.tree.leaves(fn(*args)) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        return sum((jnp.sum(leaf, dtype=jnp.float32) for leaf in leaves), jnp.float32(0))

    return jax.value_and_grad(total, tuple(range(count)), allow_int=True)


def _plain(matmul: CollectiveMatmul) -> dict[str, Any]:
    fields = dataclasses.asdict(matmul)
    return {name: str(value) if isinstance(value, np.dtype) else value for name, value in fields.items()}
