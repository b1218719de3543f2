"""What the layers of both APIs ask of their parameters: axes and features that fit the mesh, sharded initialisers."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import linen, nnx
from jax.sharding import PartitionSpec

from .._ops import AxisName


def _tuple(axis_name: AxisName) -> tuple[str, ...]:
    return (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)


def _entry(axis_name: AxisName) -> str | tuple[str, ...]:
    """As a PartitionSpec has it."""
    names = _tuple(axis_name)
    return names[0] if len(names) == 1 else names


def _mesh(*arrays: jax.Array) -> Any:
    """The one that is set, or that explicit arrays bring with them."""
    mesh = jax.sharding.get_abstract_mesh()
    return next((m for m in (mesh, *(jax.typeof(v).sharding.mesh for v in arrays)) if not m.empty), mesh)


def _check_axis(layer: str, axis_name: Any) -> None:
    names = _tuple(axis_name) if isinstance(axis_name, str | Sequence) else ()
    if not names or len({*names}) < len(names) or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"entwine_jax.flax.{layer}: axis_name={axis_name!r} must name one mesh axis or several different ones"
        )


def _ranks_here(axis_name: AxisName) -> int:
    """How many ranks share the parameters that a layer sees: 1 unless it is inside a shard_map over the axis."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    return math.prod(sizes[name] for name in _tuple(axis_name) if name in mesh.manual_axes)


def _check_features(layer: str, argument: str, size: int, axis_name: AxisName, whole: bool) -> str | tuple[str, ...]:
    """The axis as metadata has it. `whole`: the parameters have to be."""
    _check_axis(layer, axis_name)
    axis, mesh = _entry(axis_name), jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise ValueError(
            f"entwine_jax.flax.{layer}: axis_name={axis!r} needs a mesh that has it, and none is set: "
            "make and call the layer under jax.set_mesh(mesh)"
        )
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    for name in _tuple(axis_name):
        if name not in sizes:
            raise ValueError(
                f"entwine_jax.flax.{layer}: axis_name={name!r} is not an axis of the mesh {sizes}; "
                "name one of those, or set another mesh with jax.set_mesh"
            )
    if {*_tuple(axis_name)} & {*mesh.manual_axes}:
        if whole:
            raise ValueError(
                f"entwine_jax.flax.{layer}: axis_name={axis!r} is manual here; make the layer outside of "
                "jax.shard_map, and pass its state in (nnx.split, nnx.get_partition_spec, nnx.merge)"
            )
        if argument != "features":
            return axis  # a shard has any size
    ranks = math.prod(sizes[name] for name in _tuple(axis_name))
    if size % ranks:
        raise ValueError(
            f"entwine_jax.flax.{layer}: {argument}={size} can't be shared evenly by the {ranks} ranks of "
            f"axis_name={axis!r}; make it {math.ceil(size / ranks) * ranks}"
        )
    return axis


def _sharded(layer: str, parameter: str, init: Callable[..., Any], spec: tuple[Any, ...]) -> Callable[..., Any]:
    """An initialiser that makes each shard where it lies: the whole would need a device that can hold it."""

    def checked(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> Any:
        made = init(key, shape, dtype)
        if isinstance(made, nnx.Variable | nnx.VariableMetadata):
            raise TypeError(
                f"entwine_jax.flax.{layer}: {parameter}_init={init!r} brings metadata, but axis_name says the "
                f"sharding; pass the bare initializer, and other metadata as {parameter}_metadata="
            )
        return made

    if {*jax.sharding.get_abstract_mesh().manual_axes}:
        return checked
    return jax.jit(checked, static_argnums=(1, 2), out_shardings=PartitionSpec(*spec))


def _boxed(init: Callable[..., Any], names: tuple[Any, ...]) -> Callable[..., Any]:
    """linen.with_partitioning, whose box merely asserts, on explicit axes, that its array is sharded so."""

    def resharded(*args: Any) -> jax.Array:
        value: jax.Array = init(*args)
        if _mesh().are_all_axes_explicit:
            value = jax.sharding.reshard(value, PartitionSpec(*names))
        return value

    return linen.with_partitioning(resharded, names)
