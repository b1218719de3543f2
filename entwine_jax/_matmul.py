"""collective_matmul: jnp.matmul on global arrays, whose shardings pick the collective matmul that runs."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from . import (
    _checks,
    _config,
    _float8_checks,
    _gate_checks,
    _lowering,
    _matmul_several,
    _on_ranks,
    _placed,
    _products,
    _reference,
    _shared,
    _spread,
)
from ._config import Config
from ._float8_checks import Scales
from ._matmul_several import Product, constrained, mesh_of, settled
from ._placed import Place
from ._selection import OPERANDS
from ._spread import Call
from ._team import AxisName

OP = "collective_matmul"
OutSharding = PartitionSpec | NamedSharding | None


@overload
def collective_matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    axis_name: AxisName | None = ...,
    out_sharding: OutSharding = ...,
    transpose_w: bool = ...,
    bias: ArrayLike | None = ...,
    activation: str | None = ...,
    residuals: str = ...,
    scales: Scales | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> jax.Array: ...
@overload
def collective_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    *,
    axis_name: AxisName | None = ...,
    out_sharding: OutSharding = ...,
    transpose_w: bool = ...,
    bias: Sequence[ArrayLike | None] | None = ...,
    activation: Sequence[str | None] | None = ...,
    residuals: str = ...,
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> tuple[jax.Array, ...]: ...
@overload
def collective_matmul(
    x: ArrayLike,
    w: Sequence[ArrayLike],
    *,
    gated: Literal[True],
    axis_name: AxisName | None = ...,
    out_sharding: OutSharding = ...,
    transpose_w: bool = ...,
    bias: Sequence[ArrayLike | None] | None = ...,
    activation: str | None = ...,
    residuals: str = ...,
    preferred_element_type: DTypeLike | None = ...,
    precision: Any = ...,
    strategy: str | None = ...,
    config: Config | None = ...,
) -> jax.Array: ...
def collective_matmul(
    x: ArrayLike,
    w: ArrayLike | Sequence[ArrayLike],
    *,
    gated: bool = False,
    axis_name: AxisName | None = None,
    out_sharding: OutSharding = None,
    transpose_w: bool = False,
    bias: ArrayLike | Sequence[ArrayLike | None] | None = None,
    activation: str | Sequence[str | None] | None = None,
    residuals: str = "regather",
    scales: Scales | tuple[ArrayLike, Sequence[ArrayLike]] | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: Any = None,
    strategy: str | None = None,
    config: Config | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
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
    `explain` tells what was chosen and why; under a ``strategy`` of our own a plain dot that needs a
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

    Several products of the same x, queries, keys and values say, are asked for with a tuple or list of weights; with
    ``gated=True`` the two of a SwiGLU or GeGLU MLP become one result, as in `all_gather_matmul`::

        q, k, v = collective_matmul(x, (w_q, w_k, w_v))
        h = collective_matmul(x, (w_gate, w_up), gated=True, activation="silu")

    If all of them select `all_gather_matmul` over one team, they are one call (for up to four weights), which gathers x
    once, and so is all of ``dx``, with what the weight gradients need gathered beside it. Otherwise each is a product
    of its own. So it is where the team's axis is automatic inside a ``jax.shard_map`` over others; and, under automatic
    sharding, with ``transpose_w``, ``scales`` or ``residuals="save"``, or if results have different dtypes. Of gated
    products the kernel multiplies the sums itself, where no gradient is taken, on explicit axes and in ``shard_map``
    over the team; under automatic sharding XLA multiplies its two results.

    Args:
      x: leading dimensions, rows, contraction.
      w: a matrix; or several.
      gated: of two weights (w_gate, w_up), of as many columns, there is one result,
        ``activation(x @ w_gate + b_gate) * (x @ w_up + b_up)``, with one activation. Not for float8.
      axis_name: the mesh axis of the team, or a tuple of axes from major to minor. Outside of ``jax.shard_map`` it
        restricts the choice to that team; by default any axis will do.
      out_sharding: where y shall lie.
      transpose_w: whether w is stored as (n, k), as an embedding table tied to the last layer is: ``y = x @ w.T``. It
        is read as it lies. (The product is then the one that elsewhere is a gradient, and messages about its shardings
        call it so, ``y @ w.T``. What its weight gradient gathers, XLA gathers, and ``residuals`` mean nothing to it.)
      bias: added to every row of y; of shape (n,), or a rank's shard of that where w is one.
        With several weights a sequence, with None for those without.
      activation: as in `all_gather_matmul`: None, ``"relu"``, ``"gelu"``, ``"gelu_tanh"`` or ``"silu"``. Fused kernels
        add the bias and apply it (where no gradient is taken) to float32 sums, before these are rounded. With several
        weights a sequence: ``activation=("silu", None)``.
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
      y; or a tuple of one y for each of several weights, or h.

    Raises:
      TypeError: operands aren't arrays, have no matching contraction, or dtypes that don't promote; a bias or scales
        that don't suit them; a gradient of float8 operands is asked for.
      ValueError: as many biases or activations as weights are wanted, but aren't given; gated, other than two weights
        or more than one activation; an axis that the mesh hasn't, or used twice; k shards that disagree; shardings that
        JAX can't know; residuals that are unknown, or of a product that has none; an unknown activation, strategy,
        precision or setting.
      NotImplementedError: a named strategy but ``"xla"`` can't run these shardings, types, shapes or devices.

      Under automatic sharding, what only the partitioner can see comes as a ``jax.errors.JaxRuntimeError`` that holds
      the message.
    """
    options: dict[str, Any] = {
        "axis_name": axis_name,
        "out_sharding": out_sharding,
        "transpose_w": transpose_w,
        "residuals": residuals,
        "preferred_element_type": preferred_element_type,
        "precision": precision,
        "strategy": strategy,
        "config": config,
    }
    if gated:
        _gate_checks.weights(OP, x, w, scales)
    if not isinstance(w, tuple | list):
        y: jax.Array = _one(_product_of(x, w, bias, activation, scales, options), options)
        return y
    _checks.several(OP, w)
    count = len(w)
    biases = _checks.one_each(OP, "bias", bias, count)
    if gated:
        activations = [_gate_checks.activation(OP, activation), None]
    else:
        activations = _checks.one_each(OP, "activation", activation, count)
    pairs = _float8_checks.several_scales(OP, scales, count)
    each = [_product_of(x, w[i], biases[i], activations[i], pairs[i], options, f"bias[{i}]") for i in range(count)]
    if gated:
        _gate_checks.columns(OP, *(one.columns for one in each))
    ys = _matmul_several.together(each, bool(gated), options)
    if ys is None:
        ys = tuple(_one(one, options) for one in each)
        return _reference.gate(ys, None) if gated else ys
    return ys[0] if gated else ys


def _product_of(
    x: Any, w: Any, bias: Any, activation: Any, scales: Any, options: dict[str, Any], named: str = "bias"
) -> Product:
    """What the user has asked for, checked; `named` is what messages call the bias."""
    transpose_w, types = options["transpose_w"], (options["preferred_element_type"], options["precision"])
    given, (x, w) = x, _checks.arrays(OP, x, w)
    settings = _config.resolve(OP, options["strategy"], options["config"])
    _checks.shapes(OP, x.shape, w.shape, 1, (), transpose_w)
    pair = _float8_checks.scales(OP, x, w, scales)
    if pair is None:
        operand, dtype = _checks.types(OP, x, w, *types)
        x, w = x.astype(operand), w.astype(operand)
    else:
        dtype = _float8_checks.float8_types(OP, *types, f"x {x.dtype} and w {w.dtype}")
    names = _checks.team(OP, options["axis_name"])
    spec = _checks.spec(OP, options["out_sharding"], x.ndim)
    saves = _config.saves(OP, options["residuals"])
    if pair is not None:
        _float8_checks.float8_residuals(OP, saves)
    made = _config.activation(OP, activation)
    call = Call("x" if transpose_w else "y", dtype, types[1], settings, names, saves, made)
    _checks.activated(OP, activation, dtype)
    bias = _checks.bias(OP, bias, w.shape[0 if transpose_w else 1], dtype, named)
    return Product(call, x, w, bias, pair, spec, given)


def _one(product: Product, options: dict[str, Any]) -> jax.Array:
    call, x, w, bias, pair, spec, given = product
    names, out_sharding = call.axis_name, options["out_sharding"]
    mesh = jax.sharding.get_abstract_mesh()
    manual = {*mesh.manual_axes}
    if manual and names is not None and {*names} <= manual:
        op = _checks.op_inside(OP, names, spec, call.saves)
        y, _ = _on_ranks.on_ranks(
            op,
            x,
            w,
            names,
            options["preferred_element_type"],
            options["precision"],
            options["strategy"],
            options["config"],
            saves=call.saves,
            transpose_w=call.product == "x",
            bias=bias,
            activation=call.activation,
            scales=pair,
        )
        return y
    if manual and manual == {*mesh.axis_names}:
        raise ValueError(
            f"entwine_jax.{OP}: inside jax.shard_map over axes {(*mesh.manual_axes,)} x and w are shards, and JAX "
            "doesn't know of what; say so with axis_name= one of these axes and out_sharding=, "
            "or write x @ w for the product of the shards alone"
            + ("" if names is None else f" (axis_name={_checks.axis(names)} is none of them)")
        )
    scale, mesh = None if pair is None else pair[0] * pair[1], mesh_of(x, w)
    out_sharding = settled(call, mesh, out_sharding, spec)
    if {*mesh.explicit_axes}:
        return _explicit(call, mesh, x, w, bias, scale, out_sharding, spec)
    if mesh.manual_axes:
        return _partial(call, mesh, x, w, bias, scale, spec)
    if (shared := _shared.of(given, product.columns)) is not None:  # of a trace, which no other has
        return _of_trace(dataclasses.replace(call, shared=shared), out_sharding, x, w, bias, scale)
    made: jax.Array = _automatic(call, out_sharding, x, w, bias, scale)
    return made


def _of_trace(
    call: Call, out_sharding: Any, x: jax.Array, w: jax.Array, bias: jax.Array | None, scale: jax.Array | None
) -> jax.Array:
    """Under automatic sharding. A scale is that of float8 x and w."""
    return constrained(_product(call, None, x, w, bias, scale), out_sharding)


_automatic = functools.partial(jax.jit, static_argnums=(0, 1), inline=True)(_of_trace)


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
    place = _placed.of_types(call, mesh, x, w, spec)
    (_, x_spec), (_, w_spec), (_, spec) = place.specs
    x_dims, w_dims = place.dims(x, w)
    contracted = w_dims[1 if call.product == "x" else 0]
    if x_dims[-1] != contracted and x_dims[-1] and contracted:
        raise ValueError(
            f"entwine_jax.{OP}: x {x_spec} and w {w_spec} disagree on how their contraction is sharded; "
            "move one with jax.sharding.reshard"
        )
    if all(w_dims):
        # jnp.matmul refuses most of these, and with out_sharding= returns a wrong dw for others (JAX 0.11.2, 0.12.0).
        raise ValueError(
            f"entwine_jax.{OP}: w {w_spec} is sharded on both dimensions: move it to the tensor axis alone with "
            "jax.sharding.reshard"
        )
    x, w, bias = _lowering.vary_bias(OP, x, w, bias, ())
    if bias is not None:  # so that its gradient, a sum over rows of y's, lies where it does
        bias = jax.sharding.reshard(bias, NamedSharding(mesh, PartitionSpec(spec[-1])))
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
