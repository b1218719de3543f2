"""collective_matmul of one x with several weights: one call, where shardings known while JAX traces say so.

What runs is `all_gather_matmul` of several weights, gradients included, in a shard_map of its own.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from . import _checks, _on_ranks, _placed, _products_several, _reference
from ._spread import Call


class Product(NamedTuple):
    """One of them as asked for."""

    call: Call
    x: jax.Array
    w: jax.Array
    bias: jax.Array | None
    scales: tuple[jax.Array, jax.Array] | None
    spec: PartitionSpec | None  # of y
    given: Any  # x as the user has given it

    @property
    def columns(self) -> int:
        return self.w.shape[0 if self.call.product == "x" else 1]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What `all_gather_matmul` is to be asked for, beside operands."""

    preferred_element_type: Any
    precision: Any
    strategy: str | None
    config: Any
    saves: bool
    transpose_w: bool
    activation: Any  # a name, if the products are gated, or a tuple of names
    gated: bool


@dataclasses.dataclass(frozen=True)
class Spread:
    """Where all lie in the shard_map, and where the results go."""

    mesh: Any
    axes: tuple[str, ...]
    team: tuple[str, ...]
    x: PartitionSpec
    ws: tuple[PartitionSpec, ...]
    ys: tuple[PartitionSpec, ...]


def together(each: Sequence[Product], gated: bool, options: dict[str, Any]) -> tuple[jax.Array, ...] | None:
    """All of them in one call; None if they aren't one."""
    call, x, _, _, scales, spec, _ = each[0]
    if any((one.call.dtype, one.x.dtype) != (call.dtype, x.dtype) for one in each):
        return None
    activations = tuple(one.call.activation for one in each)
    asked = Asked(
        **{name: options[name] for name in ("preferred_element_type", "precision", "strategy", "config")},
        saves=call.saves,
        transpose_w=call.product == "x",
        activation=activations[0] if gated else activations,
        gated=gated,
    )
    ws, biases = [one.w for one in each], [one.bias for one in each]
    pair = None if scales is None else (scales[0], tuple(one.scales[1] for one in each if one.scales is not None))
    names, manual = call.axis_name, {*jax.sharding.get_abstract_mesh().manual_axes}
    if manual and names is not None and {*names} <= manual:
        gathers = spec is not None and _checks.op_inside("collective_matmul", names, spec, False) == "all_gather_matmul"
        return _inside(asked, names, x, ws, biases, pair) if gathers else None
    if manual:  # JAX can't differentiate one shard_map in another over other axes (0.11.2)
        return None
    mesh = mesh_of(x, *ws)
    lies = settled(call, mesh, options["out_sharding"], spec)
    if not mesh.explicit_axes:
        if asked.transpose_w or asked.saves or pair is not None:
            return None
        ys: tuple[jax.Array, ...] = _automatic(tuple(one.call for one in each), lies, gated, x, (*ws,), (*biases,))
        return ys
    where = _of_explicit_axes(call, mesh, x, ws, spec)
    return None if where is None else _spread(asked, where, x, ws, biases, pair)


def mesh_of(*arrays: jax.Array) -> Any:
    """The one that is set, or that explicit arrays bring with them."""
    mesh = jax.sharding.get_abstract_mesh()
    meshes = (mesh, *(jax.typeof(v).sharding.mesh for v in arrays))
    return next((m for m in meshes if not m.empty), mesh)


def settled(call: Call, mesh: Any, out_sharding: Any, spec: PartitionSpec | None) -> Any:
    """out_sharding, checked, with the mesh if there is one, so that none needs to be set."""
    _checks.axes_of_mesh("collective_matmul", mesh, call.axis_name, spec)
    if spec is not None and isinstance(out_sharding, PartitionSpec) and not mesh.empty:
        return NamedSharding(mesh, spec)
    return out_sharding


def constrained(y: jax.Array, out_sharding: Any) -> jax.Array:
    """Under automatic sharding."""
    if out_sharding is None:
        return y
    try:
        made: jax.Array = lax.with_sharding_constraint(y, out_sharding)
    except RuntimeError as error:
        raise ValueError(
            f"entwine_jax.collective_matmul: out_sharding={out_sharding} needs a mesh, and x and w don't tell: call it "
            "under jax.set_mesh, or pass a jax.NamedSharding"
        ) from error
    return made


@functools.partial(jax.jit, static_argnums=(0, 1, 2), inline=True)
def _automatic(calls: tuple[Call, ...], out_sharding: Any, gated: bool, x: Any, ws: Any, biases: Any) -> Any:
    """What of them is one call turns out as XLA partitions them."""
    ys: list[jax.Array] = []
    for first in range(0, len(ws), _on_ranks.MOST):
        some = slice(first, first + _on_ranks.MOST)
        ys += _products_several.products(calls[some], x, ws[some], biases[some])
    made = tuple(constrained(y, out_sharding) for y in ys)
    return (_reference.gate(made, None),) if gated else made


def _of_explicit_axes(call: Call, mesh: Any, x: Any, ws: Sequence[Any], spec: PartitionSpec | None) -> Spread | None:
    """By the types of all; None if they don't all select the same all-gather."""
    places = [_placed.of_types(call, mesh, x, w, spec) for w in ws]
    if any(all(place.dims(x, w)[1]) for place, w in zip(places, ws, strict=True)):
        return None
    layouts = [_placed.layout(call, place, x, w) for place, w in zip(places, ws, strict=True)]
    first = layouts[0]
    for made in layouts:
        if (made.op, made.team, made.operands[0]) != ("all_gather_matmul", first.team, first.operands[0]):
            return None
    of = _placed.partition_spec
    ws_specs, ys = tuple(of(made.operands[1]) for made in layouts), tuple(place.specs[-1][1] for place in places)
    return Spread(mesh, places[0].axes, first.team, of(first.operands[0]), ws_specs, ys)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _spread(asked: Asked, where: Spread, x: Any, ws: Any, biases: Any, scales: Any) -> Any:
    """On global arrays."""
    bias_specs = [None if b is None else PartitionSpec(y[-1]) for b, y in zip(biases, where.ys, strict=True)]
    in_specs = (where.x, [*where.ws], bias_specs, jax.tree.map(lambda _: PartitionSpec(), scales))
    operands = jax.tree.map(
        lambda v, spec: jax.sharding.reshard(v, NamedSharding(where.mesh, spec)),
        (x, [*ws], [*biases], scales),
        in_specs,
    )
    ys: Any = jax.shard_map(
        functools.partial(_inside, asked, where.team),
        mesh=where.mesh,
        in_specs=in_specs,
        out_specs=where.ys[:1] if asked.gated else where.ys,
        axis_names={*where.axes},
    )(*operands)
    return ys


def _inside(
    asked: Asked, team: tuple[str, ...], x: Any, ws: Sequence[Any], biases: Any, scales: Any
) -> tuple[jax.Array, ...]:
    """On one rank's shards."""
    ys, _ = _on_ranks.several(
        x,
        ws,
        team,
        asked.preferred_element_type,
        asked.precision,
        asked.strategy,
        asked.config,
        gathers=False,
        saves=asked.saves,
        transpose_w=asked.transpose_w,
        bias=biases,
        activation=asked.activation,
        scales=scales,
        gated=asked.gated,
    )
    return ys
