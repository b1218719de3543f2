"""collective_matmul: jnp.matmul on global arrays, whose shardings pick the collective matmul that runs."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from . import (
    _checks,
    _config,
    _float8_checks,
    _lowering,
    _on_ranks,
    _placed,
    _products,
    _reference,
    _selection,
    _spread,
)
from ._config import Config
from ._float8_checks import Scales
from ._placed import Place
from ._selection import OPERANDS
from ._spread import Call
from ._team import AxisName

OP = "collective_matmul"
OutSharding = PartitionSpec | NamedSharding | None


def collective_matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name: AxisName | None = None,
    out_sharding: OutSharding = None,
    transpose_w: bool = False,
    bias: ArrayLike | None = None,
    activation: str | None = None,
    residuals: str = "regather",
    scales: Scales | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array:
    """``activation(jnp.matmul(x, w) + bias)`` on global arrays, their collective running while the product does.

    The shardings choose, for ``y[..., m, n] = x[..., m, k] @ w[k, n]`` and any mesh axis ``t``:

    ==========  ==========  ==============  ============================================
    x           w           y               runs as
    ==========  ==========  ==============  ============================================
    m over t    n over t    n over t        `all_gather_matmul`
    k over t    k over t    m over t        `matmul_reduce_scatter`
    k over t    k over t    not over t      `matmul_all_reduce`
    otherwise                               a plain dot, left to XLA
    ==========  ==========  ==============  ============================================

    Other axes may shard leading dimensions, and rows as the major axes before ``t``. Gradients choose the same way.
    `explain` tells what was chosen and why; under ``strategy="fused"`` or ``"signal"`` a plain dot that needs a
    collective is an error.

    How the shardings are known depends on where it is called:

    * under ``jax.jit`` with automatic sharding: as Shardy propagates them. A product of k-sharded operands is a
      reduce-scatter where something asks for sharded rows: ``out_sharding``, a constraint, a residual connection.
      Otherwise it is an all-reduce.
    * on meshes of explicit axes (``jax.make_mesh``'s default): from the types of x and w, and ``out_sharding``.
    * inside ``jax.shard_map``, where JAX doesn't know them: from ``axis_name`` and ``out_sharding``, a
      `PartitionSpec` of y over that axis: columns mean `all_gather_matmul`, rows `matmul_reduce_scatter`, neither
      `matmul_all_reduce`. If the axis is manual there, x and w are one rank's shards; if it is automatic
      (``shard_map``'s ``axis_names`` holds others only), they are whole along it. Explicit axes are known there too.

    Args:
      x: leading dimensions, rows, contraction.
      w: a matrix.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor. Outside of ``jax.shard_map`` it
        restricts the choice to that team; by default any axis will do.
      out_sharding: where y shall lie.
      transpose_w: whether w is stored as (n, k), as an embedding table tied to the last layer is: ``y = x @ w.T``. It
        is read as it lies. (The product is then the one that elsewhere is a gradient, and messages about its shardings
        call it so, ``y @ w.T``. What its weight gradient gathers, XLA gathers, and ``residuals`` mean nothing to it.)
      bias: added to every row of y; of shape (n,), or a rank's shard of that where w is one.
      activation: as in `all_gather_matmul`: None, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``. Fused kernels
        add the bias and apply it (where no gradient is taken) to float32 sums, before these are rounded.
      residuals: as in `all_gather_matmul`: ``"save"`` keeps x for the weight gradient as it was gathered, named
        ``"entwine_gathered"``, rather than gather it again. Products whose shardings select another op, or a plain dot,
        keep x as ever. Inside ``jax.shard_map``, where ``out_sharding`` alone names the op, ``"save"`` is an error for
        one that gathers nothing.
      scales: of float8 operands, as in `all_gather_matmul`: ``y = activation((x @ w) * (x_scale * w_scale) + bias)``,
        the scales being the same everywhere. No gradients, so there is nothing to keep: ``residuals="save"`` is an
        error.
      preferred_element_type: dtype of the result; by default that of the operands, which promote as in ``jnp.matmul``.
        float8 operands need it, bfloat16 or float32.
      precision: as in ``jnp.matmul``.
      strategy: as in `all_gather_matmul`.
      config: overrides for the fused schedule.

    Returns:
      y.

    Raises:
      TypeError: operands aren't arrays, have no matching contraction, or dtypes that don't promote; a bias or scales
        that don't suit them; a gradient of float8 operands is asked for.
      ValueError: an axis that the mesh hasn't, or used twice; k shards that disagree; shardings that JAX can't know;
        residuals that are unknown, or of a product that has none; an unknown activation, strategy, precision or
        setting.
      NotImplementedError: ``strategy="fused"`` or ``"signal"`` can't run these shardings, types, shapes or devices.

      Under automatic sharding, what only the partitioner can see comes as a ``jax.errors.JaxRuntimeError`` that holds
      the message.
    """
    x, w = _checks.arrays(OP, x, w)
    settings = _config.resolve(OP, strategy, config)
    _checks.shapes(OP, x.shape, w.shape, 1, (), transpose_w)
    pair = _float8_checks.scales(OP, x, w, scales)
    if pair is None:
        operand, dtype = _checks.types(OP, x, w, preferred_element_type, precision)
        x, w = x.astype(operand), w.astype(operand)
    else:
        dtype = _float8_checks.float8_types(OP, preferred_element_type, precision, f"x {x.dtype} and w {w.dtype}")
    names = _checks.team(OP, axis_name)
    spec = _checks.spec(OP, out_sharding, x.ndim)
    saves = _config.saves(OP, residuals)
    if pair is not None:
        _float8_checks.float8_residuals(OP, saves)
    call = Call(
        "x" if transpose_w else "y", dtype, precision, settings, names, saves, _config.activation(OP, activation)
    )
    _checks.activated(OP, activation, dtype)
    bias = _checks.bias(OP, bias, w.shape[0 if transpose_w else 1], dtype)

    mesh = jax.sharding.get_abstract_mesh()
    manual = {*mesh.manual_axes}
    if manual and names is not None and {*names} <= manual:
        op = _checks.op_inside(OP, names, spec, saves)
        options = preferred_element_type, precision, strategy, config, False, saves
        epilogue: Any = {"bias": bias, "activation": activation}
        y, _ = _on_ranks.on_ranks(op, x, w, names, *options, transpose_w=transpose_w, scales=pair, **epilogue)
        return y
    if manual and manual == {*mesh.axis_names}:
        raise ValueError(
            f"entwine_jax.{OP}: inside jax.shard_map over axes {(*mesh.manual_axes,)} x and w are shards, and JAX "
            "doesn't know of what; say so with axis_name= one of these axes and out_sharding=, "
            "or write x @ w for the product of the shards alone"
            + ("" if names is None else f" (axis_name={_checks.axis(names)} is none of them)")
        )
    scale = None if pair is None else pair[0] * pair[1]
    return _global(call, x, w, bias, scale, out_sharding, spec)


def _global(
    call: Call,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    out_sharding: OutSharding,
    spec: PartitionSpec | None,
) -> jax.Array:
    """Operands are whole, along the axes that aren't manual at least; a scale is that of float8 x and w."""
    mesh = _mesh(x, w)
    _checks.axes_of_mesh(OP, mesh, call.axis_name, spec)
    if spec is not None and isinstance(out_sharding, PartitionSpec) and not mesh.empty:
        out_sharding = NamedSharding(mesh, spec)  # so that no mesh needs to be set
    if {*mesh.explicit_axes}:
        return _explicit(call, mesh, x, w, bias, scale, out_sharding, spec)
    if mesh.manual_axes:
        return _partial(call, mesh, x, w, bias, scale, spec)
    y: jax.Array = _automatic(call, out_sharding, x, w, bias, scale)
    return y


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _automatic(
    call: Call, out_sharding: Any, x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    y: jax.Array = _product(call, None, x, w, bias, scale)
    if out_sharding is None:
        return y
    try:
        y = lax.with_sharding_constraint(y, out_sharding)
    except RuntimeError as error:
        raise ValueError(
            f"entwine_jax.{OP}: out_sharding={out_sharding} needs a mesh, and x and w don't tell: call it under "
            "jax.set_mesh, or pass a jax.NamedSharding"
        ) from error
    return y


def _product(
    call: Call, place: Place | None, x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: jax.Array | None
) -> Any:
    if scale is None:
        return _products.product(call, place, x, w, None, None, bias)
    return _products.scaled(call, place, x, w, scale, bias)


def _partial(
    call: Call, mesh: Any, x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: jax.Array | None, spec: Any
) -> jax.Array:
    """Inside a shard_map over other axes: the team's own is automatic, and no one says where x and w lie."""
    team = call.axis_name
    if team is None or spec is None:
        raise ValueError(
            f"entwine_jax.{OP}: inside jax.shard_map over axes {(*mesh.manual_axes,)}, x and w may be sharded over the "
            "other axes of the mesh, and JAX doesn't know how; say so with axis_name= one of those and out_sharding="
        )
    for name in team:
        if name in mesh.manual_axes:
            raise ValueError(
                f"entwine_jax.{OP}: axis_name={_checks.axis(team)} is manual here in part, {name!r} is: "
                "make all of it manual in jax.shard_map's axis_names, or none"
            )
    op, rows, none = _checks.op_inside(OP, team, spec, call.saves), PartitionSpec, [None] * (x.ndim - 2)
    specs = {
        "all_gather_matmul": (rows(*none, team, None), rows(None, team), rows(*none, None, team)),
        "matmul_reduce_scatter": (rows(*none, None, team), rows(team, None), rows(*none, team, None)),
        "matmul_all_reduce": (rows(*none, None, team), rows(team, None), rows(*none, None, None)),
    }[op]
    if call.product == "x":
        specs = specs[0], PartitionSpec(*reversed(specs[1])), specs[2]
    names = (*OPERANDS[call.product], call.product)
    place = Place(mesh, team, tuple(zip(names, specs, strict=True)), explicit=False)
    x, w, bias = _lowering.vary_bias(OP, x, w, bias, ())
    y: jax.Array = _placed_product(call, place, x, w, bias, scale)
    return y


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _placed_product(
    call: Call, place: Place, x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: jax.Array | None
) -> Any:
    return _product(call, place, x, w, bias, scale)


def _explicit(
    call: Call,
    mesh: Any,
    x: jax.Array,
    w: jax.Array,
    bias: jax.Array | None,
    scale: jax.Array | None,
    out_sharding: Any,
    spec: Any,
) -> jax.Array:
    axes = tuple(name for name in mesh.axis_names if name in mesh.explicit_axes)
    sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
    given = {"x": jax.typeof(x).sharding.spec, "w": jax.typeof(w).sharding.spec}
    dims = {name: _selection.of_dims(s, v.ndim, sizes) for (name, s), v in zip(given.items(), (x, w), strict=True)}
    matrix = dims["w"][::-1] if call.product == "x" else dims["w"]
    if dims["x"][-1] != matrix[0] and dims["x"][-1] and matrix[0]:
        raise ValueError(
            f"entwine_jax.{OP}: x {given['x']} and w {given['w']} disagree on how their contraction is sharded; "
            "move one with jax.sharding.reshard"
        )
    if all(dims["w"]):
        # jnp.matmul refuses most of these, and with out_sharding= returns a wrong dw for others (JAX 0.11.2, 0.12.0).
        raise ValueError(
            f"entwine_jax.{OP}: w {given['w']} is sharded on both dimensions: move it to the tensor axis alone with "
            "jax.sharding.reshard"
        )
    if spec is None:
        spec = PartitionSpec(*(axes or None for axes in _selection.default_result(dims["x"], matrix)))
    x, w, bias = _lowering.vary_bias(OP, x, w, bias, ())
    if bias is not None:  # so that its gradient, a sum over rows of y's, lies where it does
        bias = jax.sharding.reshard(bias, NamedSharding(mesh, PartitionSpec(spec[-1])))
    names = (*OPERANDS[call.product], call.product)
    place = Place(mesh, axes, tuple(zip(names, (*given.values(), spec), strict=True)), explicit=True)
    found = _placed.layout(call, place, x, w)
    if found.op != "dot":
        y: jax.Array = _placed_product(call, place, x, w, bias, scale)
        return y
    _spread.check(call, found)
    w = w.T if call.product == "x" else w
    try:
        if scale is not None:
            y = _scaled_dot(call, x, w, scale, bias, out_sharding)
        else:
            y = jnp.matmul(x, w, precision=call.precision, preferred_element_type=call.dtype, out_sharding=out_sharding)
    except Exception as error:
        if type(error).__name__ != "ShardingTypeError":  # it isn't public
            raise
        raise ValueError(f"entwine_jax.{OP}: {found.reason}. JAX says: {error}") from error
    y = _lowering.note(y, jax.typeof(x), jax.typeof(w), found.reason)
    return y if scale is not None else _reference.finish(y, bias, call.activation)


def _scaled_dot(
    call: Call, x: jax.Array, w: jax.Array, scale: jax.Array, bias: jax.Array | None, out_sharding: Any
) -> jax.Array:
    """A plain dot of float8, which jnp.matmul would want to be of one type, and its epilogue."""
    contracted = (((x.ndim - 1,), (0,)), ((), ()))
    dtypes = {"precision": call.precision, "preferred_element_type": jnp.float32}
    y = lax.dot_general(x, w, contracted, **dtypes, out_sharding=out_sharding)
    return _reference.finish(y * scale, bias, call.activation).astype(call.dtype)


def _mesh(x: jax.Array, w: jax.Array) -> Any:
    """The one that is set, or that explicit arrays bring with them."""
    mesh = jax.sharding.get_abstract_mesh()
    meshes = (mesh, *(jax.typeof(v).sharding.mesh for v in (x, w)))
    return next((m for m in meshes if not m.empty), mesh)
