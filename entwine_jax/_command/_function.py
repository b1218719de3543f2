"""A function and its arguments, as named on the command line.

The function is ``module:name``, found from the working directory. Its arguments are ``--arg`` for each, or all of them
from ``--args module:name``, a tuple or a function that returns one. An ``--arg`` reads as JAX prints a type, with a
partition spec behind an @ where the array is sharded over a mesh::

    --arg 'bf16[8192,4096]@(tp,None)'   --arg 'f32[4,512,1024]@(data,(cp,tp))'   --arg 'i32[]'

The mesh is ``--mesh data=2,tp=4``, or the one that the module sets with ``jax.set_mesh``.
"""

import argparse
import ast
import contextlib
import dataclasses
import importlib
import math
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ._usage import UsageError

_SHORT = {"bf": "bfloat", "f": "float", "i": "int", "s": "int", "u": "uint", "c": "complex"}


@dataclasses.dataclass(frozen=True)
class Call:
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: Mesh | None  # of --mesh

    @contextlib.contextmanager
    def in_mesh(self) -> Iterator[None]:
        with contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh):
            yield

    def arrays(self) -> tuple[Any, ...]:
        """The arguments with random numbers for what are only shapes."""
        return tuple(jax.tree.map(_filled, arg) for arg in self.args)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("function", help="module:name, found from the working directory")
    parser.add_argument(
        "--arg",
        action="append",
        default=[],
        metavar="TYPE",
        help="one argument, for example 'bf16[8192,4096]@(tp,None)'",
    )
    parser.add_argument("--args", metavar="MODULE:NAME", help="all arguments: a tuple, or a function that returns one")
    parser.add_argument("--mesh", metavar="AXIS=SIZE,...", help="the mesh, for example data=2,tp=4")
    parser.add_argument(
        "--auto", action="store_true", help="axes of --mesh are automatic, not explicit (JAX's default)"
    )
    parser.add_argument(
        "--cpu-devices", type=int, metavar="N", help="virtual CPU devices, where JAX has no GPU; as many as --mesh has"
    )


def load(options: argparse.Namespace) -> Call:
    if options.arg and options.args:
        raise UsageError("give the arguments by --arg or by --args, not both")
    axes = _axes(options.mesh)
    provide_cpu_devices(options.cpu_devices or math.prod(axes.values()))
    mesh = _mesh(axes, options.auto)
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        fn = named(options.function)
        if not callable(fn):
            raise UsageError(f"{options.function} is no function but {type(fn).__name__}")
        if options.args:
            found = named(options.args)
            found = found() if callable(found) else found
            args = tuple(found) if isinstance(found, tuple | list) else (found,)
        else:
            args = tuple(_type(text, mesh or _current_mesh()) for text in options.arg)
    return Call(fn, args, mesh)


def provide_cpu_devices(count: int) -> None:
    """At least so many, unless JAX has made its devices or somebody has said how many."""
    if count > 1 and jax.config.jax_num_cpu_devices < 0 and "device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # there are devices already: then these
            jax.config.update("jax_num_cpu_devices", count)


def _axes(text: str | None) -> dict[str, int]:
    axes: dict[str, int] = {}
    for part in text.split(",") if text else ():
        match = re.fullmatch(r"\s*(\w+)\s*=\s*([1-9]\d*)\s*", part)
        if match is None or match[1] in axes:
            raise UsageError(f"--mesh {text}: must be different axes with their sizes, for example data=2,tp=4")
        axes[match[1]] = int(match[2])
    return axes


def _mesh(axes: dict[str, int], auto: bool) -> Mesh | None:
    if not axes:
        return None
    wanted, devices = math.prod(axes.values()), jax.devices()
    if wanted > len(devices):
        named = ",".join(f"{name}={size}" for name, size in axes.items())
        raise UsageError(
            f"--mesh {named}: needs {wanted} devices, JAX has {len(devices)} ({devices[0].platform}); without GPUs,"
            f" JAX_PLATFORMS=cpu JAX_NUM_CPU_DEVICES={wanted} in the environment gives so many virtual ones"
        )
    kind = AxisType.Auto if auto else AxisType.Explicit
    return jax.make_mesh(tuple(axes.values()), tuple(axes), (kind,) * len(axes), devices=devices[:wanted])


def _current_mesh() -> Mesh | None:
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def named(text: str) -> Any:
    """What module:name names."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"{text}: must be module:name")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module's own imports
        raise UsageError(f"{text}: there is no module {error.name!r} in {here} or on Python's path") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise UsageError(f"{text}: {getattr(found, '__name__', module)} has no {part!r}")
        found = getattr(found, part)
    return found


def _type(text: str, mesh: Mesh | None) -> jax.ShapeDtypeStruct:
    match = re.fullmatch(r"\s*(\w+)\s*\[([\d\s,]*)\]\s*(?:@(.*))?", text)
    if match is None:
        raise UsageError(f"--arg {text}: must be like 'bf16[8192,4096]', with '@(tp,None)' behind it if it is sharded")
    shape = tuple(int(size) for size in match[2].split(",") if size.strip())
    dtype = _dtype(match[1], text)
    if match[3] is None:
        return jax.ShapeDtypeStruct(shape, dtype)
    if mesh is None:
        raise UsageError(f"--arg {text}: is sharded over no mesh; give --mesh, or have the module call jax.set_mesh")
    try:
        sharding = NamedSharding(mesh, _spec(match[3]))
        sharding.shard_shape(shape)
    except (ValueError, SyntaxError) as error:
        raise UsageError(f"--arg {text}: {error}") from None
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def _dtype(name: str, text: str) -> Any:
    short = re.fullmatch(r"([a-z]+?)(\d+\w*)", name)
    long = f"{_SHORT[short[1]]}{short[2]}" if short and short[1] in _SHORT else name
    long = re.sub(r"^float8_?e", "float8_e", long)
    try:
        return jnp.dtype(long)
    except TypeError:
        raise UsageError(f"--arg {text}: there is no dtype {name!r}") from None


def _spec(text: str) -> PartitionSpec:
    """(tp, None), ((data, tp), None), tp or ()."""

    def read(node: ast.expr) -> Any:
        if isinstance(node, ast.Tuple):
            return tuple(read(each) for each in node.elts)
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, str)):
            return node.value
        raise ValueError(f"{text} must be a partition spec like (tp,None)")

    found = read(ast.parse(text.strip(), mode="eval").body)
    return PartitionSpec(*(found if isinstance(found, tuple) else (found,)))


def _filled(value: Any) -> Any:
    if not isinstance(value, jax.ShapeDtypeStruct):
        return value

    def make() -> jax.Array:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return jnp.zeros(value.shape, value.dtype)
        return jax.random.normal(jax.random.key(math.prod(value.shape)), value.shape).astype(value.dtype)

    array: jax.Array = jax.jit(make, out_shardings=value.sharding)()
    return array
