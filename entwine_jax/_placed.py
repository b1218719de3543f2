"""Products whose shardings are known while JAX traces: each is a shard_map of its own."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from . import _lowering, _scaled, _selection, _spread, _team
from ._selection import OPERANDS, Layout
from ._spread import Call


@dataclasses.dataclass(frozen=True)
class Place:
    """Where x, w and y lie, by name, on a mesh; only `axes` count, the others are manual already, or left to XLA."""

    mesh: Any  # jax.sharding.AbstractMesh
    axes: tuple[str, ...]
    specs: tuple[tuple[str, PartitionSpec], ...]
    explicit: bool  # the axes are explicit: arrays must be where a shard_map wants them

    def __repr__(self) -> str:  # short: it is printed in every jaxpr
        return ", ".join(f"{name} {spec}" for name, spec in self.specs)

    @property
    def sizes(self) -> dict[str, int]:
        sizes = dict(zip(self.mesh.axis_names, self.mesh.axis_sizes, strict=True))
        return {name: sizes[name] for name in self.axes}

    def dims(self, *arrays: Any) -> list[_selection.Spec]:
        """The axes of each dimension of its first arrays."""
        specs = zip(self.specs, arrays, strict=False)
        return [_selection.of_dims(spec, v.ndim, self.sizes) for (_, spec), v in specs]


def of_types(call: Call, mesh: Any, x: Any, w: Any, spec: PartitionSpec | None) -> Place:
    """Of a product on explicit axes; `spec` is y's, if it has been asked for."""
    names = OPERANDS[call.product]
    axes = tuple(name for name in mesh.axis_names if name in mesh.explicit_axes)
    place = Place(mesh, axes, tuple((n, jax.typeof(v).sharding.spec) for n, v in zip(names, (x, w), strict=True)), True)
    if spec is None:
        dims, matrix = place.dims(x, w)
        spec = partition_spec(_selection.default_result(dims, matrix if call.product == "y" else matrix[::-1]))
    return dataclasses.replace(place, specs=(*place.specs, (call.product, spec)))


def layout(call: Call, place: Place, a: Any, b: Any) -> Layout:
    specs, sizes = dict(place.specs), place.sizes
    shapes = {name: v.shape for name, v in zip(OPERANDS[call.product], (a, b), strict=True)}
    shapes[call.product] = _spread.abstract(call, a, b)
    names = (*OPERANDS[call.product], call.product)
    a_spec, b_spec, result = (_selection.of_dims(specs[name], len(shapes[name]), sizes) for name in names)
    return _selection.select(
        call.product, a_spec, b_spec, result, [shapes[name] for name in names], sizes, call.axis_name
    )


def product(
    call: Call,
    place: Place,
    a: jax.Array,
    b: jax.Array,
    rows: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> jax.Array:
    """A product, without its gradient; of a weight gradient, `rows` may be what the forward pass has kept of a."""
    made = layout(call, place, a, b)
    specs = [partition_spec(spec) for spec in made.operands]
    saved = rows is not None and made.operands[0] == _saved(place, a.ndim)[1]
    if rows is not None and saved:
        a, specs[0] = rows, _saved_spec(place, a.ndim)
    operands, specs = _operands(place, made, specs, a, b, bias)

    def rank(a: jax.Array, b: jax.Array, *bias: jax.Array) -> jax.Array:
        operands = _varying(made, a[0] if saved else a, b, *bias)
        team = _team.resolve("collective_matmul", made.team) if made.team else None
        return _spread.one_rank(call, made, team)(*operands)

    y: jax.Array = jax.shard_map(
        rank, mesh=place.mesh, in_specs=(*specs,), out_specs=partition_spec(made.result), axis_names={*place.axes}
    )(*operands)
    return _move(place, y, dict(place.specs)[call.product]) if place.explicit else y


def scaled(
    call: Call, place: Place, a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array | None = None
) -> jax.Array:
    """A product of float8 times `scale`."""
    made = layout(call, place, a, b)
    operands, specs = _operands(place, made, [partition_spec(spec) for spec in made.operands], a, b, bias)

    def rank(scale: jax.Array, *operands: jax.Array) -> jax.Array:
        a, b, *bias = _varying(made, *operands)
        a, b, scale = _scaled.varied(made.team, a, b, scale)
        team = _team.resolve("collective_matmul", made.team) if made.team else None
        return _spread.one_rank_scaled(call, made, team)(a, b, scale, *bias)

    y: jax.Array = jax.shard_map(
        rank,
        mesh=place.mesh,
        in_specs=(PartitionSpec(), *specs),
        out_specs=partition_spec(made.result),
        axis_names={*place.axes},
    )(scale, *operands)
    return _move(place, y, dict(place.specs)[call.product]) if place.explicit else y


def _operands(
    place: Place, made: Layout, specs: list[PartitionSpec], a: jax.Array, b: jax.Array, bias: jax.Array | None
) -> tuple[list[jax.Array], list[PartitionSpec]]:
    """Of a product's shard_map; a bias lies as the result's columns do."""
    operands = [a, b]
    if bias is not None:
        operands, specs = [a, b, bias], [*specs, partition_spec(made.result[-1:])]
    if place.explicit:
        operands = [_move(place, v, spec) for v, spec in zip(operands, specs, strict=True)]
    return operands, specs


def _varying(made: Layout, a: jax.Array, b: jax.Array, *bias: jax.Array) -> list[jax.Array]:
    if not made.team:
        return [*_lowering.vary(a, b, ()), *bias]
    operands = _lowering.vary_bias(made.op, a, b, next(iter(bias), None), made.team)
    return [v for v in operands if v is not None]


def saving(
    call: Call, place: Place, x: jax.Array, w: jax.Array, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """y = x @ w and all of x as the team has gathered it, an empty array if it gathers nothing.

    The types of a shard_map can't tell that all ranks hold the same, so their copies are an array with a dimension for
    the team.
    """
    made = layout(call, place, x, w)
    if made.op != "all_gather_matmul":
        return product(call, place, x, w, bias=bias), jnp.zeros((0,), x.dtype)
    operands, specs = _operands(place, made, [partition_spec(spec) for spec in made.operands], x, w, bias)

    def rank(*operands: jax.Array) -> tuple[jax.Array, jax.Array]:
        work = _spread.one_rank_saving(call, made, _team.resolve("collective_matmul", made.team))
        y, rows = work(*_varying(made, *operands))
        return y, rows[None]

    results = partition_spec(made.result), _saved_spec(place, x.ndim)
    y, rows = jax.shard_map(rank, mesh=place.mesh, in_specs=(*specs,), out_specs=results, axis_names={*place.axes})(
        *operands
    )
    return _move(place, y, dict(place.specs)["y"]) if place.explicit else y, rows


def _saved(place: Place, ndim: int) -> tuple[tuple[str, ...], _selection.Spec]:
    """The team that has gathered x, and how its copies lie: as y, whose columns are that team's."""
    *rows, team = _selection.of_dims(dict(place.specs)["y"], ndim, place.sizes)
    return team, (*rows, ())


def _saved_spec(place: Place, ndim: int) -> PartitionSpec:
    team, spec = _saved(place, ndim)
    return partition_spec((team, *spec))


def gradients(
    calls: tuple[Call, Call], place: Place, dy: jax.Array, w: jax.Array, x: jax.Array, rows: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """dx and dw of y = x @ w, the products of the calls: as one, if what dw needs can be gathered beside dx; or `rows`
    is what the forward pass has kept of it."""
    to_x, to_w = calls
    of_x, of_w = layout(to_x, place, dy, w), layout(to_w, place, x, dy)
    team = _team.along(of_x.team, place.sizes, place.axes, "") if of_x.team else None
    if _spread.gradients_of_rank(to_x, to_w, of_x, of_w, team) is None:
        return product(to_x, place, dy, w), product(to_w, place, x, dy, rows)
    specs = [partition_spec(spec) for spec in (*of_x.operands, of_x.result)]
    saved = rows is not None and of_w.operands[0] == _saved(place, x.ndim)[1]
    if rows is not None and saved:
        x, specs[2] = rows, _saved_spec(place, x.ndim)
    results = partition_spec(of_x.result), partition_spec(of_w.result)
    if place.explicit:
        dy, w, x = (_move(place, v, spec) for v, spec in zip((dy, w, x), specs, strict=True))

    def rank(dy: jax.Array, w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dy, w = _lowering.vary(dy, w, of_x.team)
        dy, x = _lowering.vary(dy, x[0] if saved else x, of_x.team)
        dy, w = _lowering.vary(dy, w, of_x.team)
        team = _team.resolve("collective_matmul", of_x.team)
        work = _spread.gradients_of_rank(to_x, to_w, of_x, of_w, team, saved)
        assert work is not None
        return work(dy, w, x)

    dx, dw = jax.shard_map(rank, mesh=place.mesh, in_specs=(*specs,), out_specs=results, axis_names={*place.axes})(
        dy, w, x
    )
    if place.explicit:
        wanted = dict(place.specs)
        dx, dw = _move(place, dx, wanted["x"]), _move(place, dw, wanted["w"])
    return dx, dw


def _move(place: Place, array: jax.Array, spec: PartitionSpec) -> jax.Array:
    moved: jax.Array = jax.sharding.reshard(array, NamedSharding(place.mesh, spec))
    return moved


def partition_spec(spec: _selection.Spec) -> PartitionSpec:
    return PartitionSpec(*(axes or None for axes in spec))
