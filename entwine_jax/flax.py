"""Collective matmuls in Flax: a ``dot_general`` for models as they are, and layers with sharded parameters.

`DotGeneral` goes into any Flax layer that takes one, and leaves parameters and checkpoints alone::

    nnx.Linear(d, 4 * d, dot_general=entwine_jax.flax.DotGeneral("tp"), rngs=rngs)
    linen.Dense(4 * d, dot_general=entwine_jax.flax.DotGeneral("tp"))

The layers add what tensor parallelism wants of the parameters: sharding metadata, sharded initialisation, and checks
that features divide. Each is named after the plain layer that it is a subclass of and shares checkpoints with:

=====  =================  ======================  ===================
API    plain              column-parallel         row-parallel
=====  =================  ======================  ===================
nnx    ``nnx.Linear``     `ColumnParallelLinear`  `RowParallelLinear`
linen  ``linen.Dense``    `ColumnParallelDense`   `RowParallelDense`
=====  =================  ======================  ===================

So a model may use both APIs without a clash, and neither layer is the other's in disguise.
"""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

try:
    from flax import linen, nnx
except ImportError as error:
    raise ImportError("entwine_jax.flax needs Flax: pip install 'entwine-jax[flax]'") from error

from . import _config, _matmul
from ._config import Config
from ._ops import AxisName

__all__ = [
    "ColumnParallelDense",
    "ColumnParallelLinear",
    "DotGeneral",
    "RowParallelDense",
    "RowParallelLinear",
]

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()

Out = Literal["columns", "rows", "whole"]
_DimensionNumbers = tuple[tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]]


@dataclasses.dataclass(frozen=True)
class DotGeneral:
    """``lax.dot_general`` whose products of activations and a kernel are `collective_matmul`.

    For the ``dot_general=`` of ``nnx.Linear``, ``nnx.LinearGeneral``, ``linen.Dense`` and ``linen.DenseGeneral``. Input
    features that are the last dimensions of the activations and the first of the kernel count as one dimension, output
    features too, and may be sharded on the first of them (heads of attention, say). What isn't of that form is a plain
    dot, left to XLA; under ``strategy="fused"`` or inside a ``jax.shard_map`` over the axis it is an error.

    Equal instances are interchangeable: layers that use them are traced once.

    Args:
      axis_name: as in `collective_matmul`: the only mesh axis (or axes) that may be selected, and inside
        ``jax.shard_map`` the one to use. None lets the shardings choose.
      out: where the product lies over ``axis_name``: ``"columns"`` (the output features: all-gather), ``"rows"`` (the
        last dimension before the features, that is the sequence: reduce-scatter) or ``"whole"`` (all-reduce). None
        leaves it to the shardings. ``jax.shard_map`` needs it, as JAX knows no shardings there. Under automatic
        sharding ``"rows"`` means rows over that axis and no other, and ``"whole"`` is what comes if nothing asks for
        rows. An ``out_sharding`` of the call, which nnx layers take, goes before ``out``.
      strategy, config: as in `collective_matmul`.

    Raises:
      TypeError: the sizes of contracted dimensions differ.
      ValueError: ``out`` is unknown, or given without ``axis_name``; an axis is named twice.
      NotImplementedError: a product of another form, see above; and what `collective_matmul` raises.
    """

    axis_name: AxisName | None = None
    _: dataclasses.KW_ONLY
    out: Out | None = None
    strategy: str | None = None
    config: Config | None = None

    def __post_init__(self) -> None:
        if self.axis_name is not None:
            _check_axis("DotGeneral", self.axis_name)
            if not isinstance(self.axis_name, str):
                object.__setattr__(self, "axis_name", tuple(self.axis_name))  # a list would not hash
        if self.out not in (None, "columns", "rows", "whole"):
            raise ValueError(
                f"entwine_jax.flax.DotGeneral: out={self.out!r} must be 'columns', 'rows', 'whole' or None"
            )
        if self.out is not None and self.axis_name is None:
            raise ValueError(f"entwine_jax.flax.DotGeneral: out={self.out!r} needs axis_name=, the axis it speaks of")
        _config.resolve("flax.DotGeneral", self.strategy, self.config)

    def __call__(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        dimension_numbers: _DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        *,
        out_sharding: PartitionSpec | NamedSharding | None = None,
    ) -> jax.Array:
        """As ``lax.dot_general``."""
        x, w = jnp.asarray(lhs), jnp.asarray(rhs)
        problem = _unlike_a_layer(x.ndim, w.ndim, dimension_numbers)
        if problem is not None:
            return self._plain(x, w, dimension_numbers, precision, preferred_element_type, out_sharding, problem)
        _mind_float32(x, self.strategy)
        contracted = len(dimension_numbers[0][0])
        rows, features = x.shape[: x.ndim - contracted], w.shape[contracted:]
        if x.shape[len(rows) :] != w.shape[:contracted]:
            raise TypeError(
                f"entwine_jax.flax.DotGeneral: the last dimensions of lhs {x.shape} and the first of rhs {w.shape} are "
                f"contracted, and must be equal: {x.shape[len(rows) :]} and {w.shape[:contracted]}"
            )
        x = x.reshape(*rows, math.prod(x.shape[len(rows) :]))
        w = w.reshape(math.prod(w.shape[:contracted]), math.prod(features))
        sharding, constraint = _of_matrix(out_sharding, len(rows)), None
        if sharding is None and self.out is not None:
            sharding, constraint = _placed(self.axis_name, self.out, x, w)
        y = _matmul.collective_matmul(
            x,
            w,
            axis_name=self.axis_name,
            out_sharding=sharding,
            preferred_element_type=preferred_element_type,
            precision=precision,
            strategy=self.strategy,
            config=self.config,
        )
        if constraint is not None:
            y = lax.with_sharding_constraint(y, constraint)
        return y.reshape(*y.shape[:-1], *features)

    def _plain(
        self,
        x: jax.Array,
        w: jax.Array,
        dimension_numbers: Any,
        precision: Any,
        preferred_element_type: DTypeLike | None,
        out_sharding: Any,
        problem: str,
    ) -> jax.Array:
        """A dot that no collective matmul can be."""
        mesh = _mesh(x, w)
        if _config.resolve("flax.DotGeneral", self.strategy, self.config).strategy == "fused":
            raise NotImplementedError(
                f"entwine_jax.flax.DotGeneral: strategy='fused' can't run lhs {x.shape} and rhs {w.shape} with "
                f"dimension_numbers={dimension_numbers}: {problem}; use strategy='auto', which leaves it to XLA"
            )
        if mesh.manual_axes and (self.axis_name is None or {*_tuple(self.axis_name)} & {*mesh.manual_axes}):
            raise NotImplementedError(
                f"entwine_jax.flax.DotGeneral: inside jax.shard_map over axes {(*mesh.manual_axes,)}, "
                f"axis_name={self.axis_name!r} can't multiply lhs {x.shape} and rhs {w.shape} with "
                f"dimension_numbers={dimension_numbers}: {problem}; use lax.dot_general and collectives there"
            )
        explicit = bool(mesh.explicit_axes)
        y: jax.Array = lax.dot_general(
            x,
            w,
            dimension_numbers,
            precision=precision,
            preferred_element_type=preferred_element_type,
            out_sharding=out_sharding if explicit else None,
        )
        return y if out_sharding is None or explicit else lax.with_sharding_constraint(y, out_sharding)


class ColumnParallelLinear(nnx.Linear):
    """``nnx.Linear`` whose output features are sharded over a mesh axis, with a `collective_matmul` in it.

    Where the rows of the inputs (the sequence, say) are sharded over the axis, they are gathered while the product
    runs. Parameters are those of ``nnx.Linear``, named, shaped and checkpointed like them; the kernel's metadata has
    ``out_sharding=(None, axis_name)``, the bias' ``(axis_name,)``, and both are made sharded.

    Make it and call it under ``jax.set_mesh``. For ``jax.shard_map`` make it outside, and split and merge it with
    ``nnx.get_partition_spec`` of its state as ``in_specs``.

    Args:
      in_features, out_features: sizes of the whole layer.
      axis_name: the mesh axis, or a tuple of axes from major to minor.
      strategy, config: as in `collective_matmul`.
      kernel_init, bias_init, kernel_metadata, bias_metadata, rngs: as in ``nnx.Linear``.
      **options: other arguments of ``nnx.Linear``, but ``dot_general``. ``dtype=jnp.bfloat16`` is needed for the GPU
        kernels if parameters are float32.

    Raises:
      ValueError: no mesh is set, or it has no such axis, or the axis doesn't divide ``out_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: AxisName,
        strategy: str | None = None,
        config: Config | None = None,
        kernel_init: Callable[..., Any] = _KERNEL_INIT,
        bias_init: Callable[..., Any] = _BIAS_INIT,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
        **options: Any,
    ):
        axis = _check_features("ColumnParallelLinear", "out_features", out_features, axis_name, whole=True)
        super().__init__(
            in_features,
            out_features,
            dot_general=DotGeneral(axis_name, out="columns", strategy=strategy, config=config),
            kernel_init=_sharded("ColumnParallelLinear", "kernel", kernel_init, (None, axis)),
            bias_init=_sharded("ColumnParallelLinear", "bias", bias_init, (axis,)),
            kernel_metadata={**kernel_metadata, "out_sharding": (None, axis)},
            bias_metadata={**bias_metadata, "out_sharding": (axis,)},
            rngs=rngs,
            **options,
        )
        self.axis_name = axis

    def __call__(self, inputs: jax.Array, out_sharding: PartitionSpec | NamedSharding | None = None) -> jax.Array:
        """``inputs @ kernel + bias``, features sharded over the axis; ``out_sharding`` says more, or otherwise."""
        _mind_promotion(inputs, self.kernel, self.dtype)
        y: jax.Array = super().__call__(inputs, out_sharding)
        return y


class RowParallelLinear(nnx.Linear):
    """``nnx.Linear`` whose input features are sharded over a mesh axis, with a `collective_matmul` in it.

    The second half of what `ColumnParallelLinear` begins: each rank multiplies its features, and the ranks' products
    are added and scattered over rows while that runs. Parameters are those of ``nnx.Linear``; the kernel's metadata has
    ``out_sharding=(axis_name, None)``, the bias is whole on every rank and added once.

    Make it and call it under ``jax.set_mesh``; in ``jax.shard_map`` as `ColumnParallelLinear`.

    Args:
      in_features, out_features: sizes of the whole layer.
      axis_name: the mesh axis, or a tuple of axes from major to minor.
      scatter: whether rows of the result are sharded over the axis (and over no other; pass ``out_sharding`` to the
        call where they are). Otherwise it is whole on every rank: an all-reduce.
      strategy, config: as in `collective_matmul`.
      kernel_init, bias_init, kernel_metadata, bias_metadata, rngs: as in ``nnx.Linear``.
      **options: other arguments of ``nnx.Linear``, but ``dot_general``. ``dtype=jnp.bfloat16`` is needed for the GPU
        kernels if parameters are float32.

    Raises:
      ValueError: no mesh is set, or it has no such axis, or the axis doesn't divide ``in_features``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: AxisName,
        scatter: bool = True,
        strategy: str | None = None,
        config: Config | None = None,
        kernel_init: Callable[..., Any] = _KERNEL_INIT,
        bias_init: Callable[..., Any] = _BIAS_INIT,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        rngs: nnx.Rngs,
        **options: Any,
    ):
        axis = _check_features("RowParallelLinear", "in_features", in_features, axis_name, whole=True)
        out: Out = "rows" if scatter else "whole"
        super().__init__(
            in_features,
            out_features,
            dot_general=DotGeneral(axis_name, out=out, strategy=strategy, config=config),
            kernel_init=_sharded("RowParallelLinear", "kernel", kernel_init, (axis, None)),
            bias_init=_sharded("RowParallelLinear", "bias", bias_init, (None,)),
            kernel_metadata={**kernel_metadata, "out_sharding": (axis, None)},
            bias_metadata={**bias_metadata, "out_sharding": (None,)},
            rngs=rngs,
            **options,
        )
        self.axis_name = axis

    def __call__(self, inputs: jax.Array, out_sharding: PartitionSpec | NamedSharding | None = None) -> jax.Array:
        """``inputs @ kernel + bias``, rows sharded over the axis or not; ``out_sharding`` says more, or otherwise."""
        _mind_promotion(inputs, self.kernel, self.dtype)
        y: jax.Array = super().__call__(inputs, out_sharding)
        return y


class _ParallelDense(linen.Dense, kw_only=True):
    """What the two linen layers share. Under jax.shard_map parameters are one rank's, so the sizes are too."""

    axis_name: AxisName
    strategy: str | None = None
    config: Config | None = None

    def _apply(self, inputs: jax.Array, out: Out) -> jax.Array:
        layer, columns = type(self).__name__, out == "columns"
        if self.dot_general is not None or self.dot_general_cls is not None:
            raise ValueError(f"entwine_jax.flax.{layer}: dot_general= is its own; use linen.Dense with another")
        argument, size = ("features", self.features) if columns else ("the inputs' last dimension", inputs.shape[-1])
        axis = _check_features(layer, argument, size, self.axis_name, whole=False)
        ranks = _ranks_here(self.axis_name)
        if ranks > 1 and self.is_initializing():
            raise ValueError(
                f"entwine_jax.flax.{layer}: axis_name={axis!r} is manual here, and init would give every rank the same "
                "shard; call init outside of jax.shard_map"
            )
        kernel_init, bias_init, features = self.kernel_init, self.bias_init, self.features
        if ranks == 1:
            names: Any = ((None, axis), (axis,)) if columns else ((axis, None), (None,))
            kernel_init, bias_init = (_boxed(init, n) for init, n in zip((kernel_init, bias_init), names, strict=True))
        elif columns:
            features //= ranks
        kernel = self.param("kernel", kernel_init, (inputs.shape[-1], features), self.param_dtype)
        bias = self.param("bias", bias_init, (features,), self.param_dtype) if self.use_bias else None
        _mind_promotion(inputs, kernel, self.dtype)
        promoted: Any = self.promote_dtype(inputs, kernel, bias, dtype=self.dtype)
        x, kernel, bias = promoted
        dot_general = DotGeneral(self.axis_name, out=out, strategy=self.strategy, config=self.config)
        y = dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), precision=self.precision)
        return y if bias is None else y + jnp.reshape(bias, (*[1] * (y.ndim - 1), features))


class ColumnParallelDense(_ParallelDense, kw_only=True):
    """``linen.Dense`` whose features are sharded over a mesh axis: `ColumnParallelLinear` for linen.

    Parameters are those of ``linen.Dense``, in ``linen.Partitioned`` boxes with ``(None, axis_name)`` for the kernel
    and ``(axis_name,)`` for the bias; initialise them sharded in the usual way, with ``jax.jit(model.init,
    out_shardings=linen.get_sharding(jax.eval_shape(model.init, key, x), mesh))``. Initialise and call it under
    ``jax.set_mesh``, or call it inside ``jax.shard_map`` with unboxed parameters, one rank's shards.

    Args:
      features: output features of the whole layer.
      axis_name: the mesh axis, or a tuple of axes from major to minor.
      strategy, config: as in `collective_matmul`.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as in ``linen.Dense``.

    Raises:
      ValueError: no mesh is set, or it has no such axis, or the axis doesn't divide ``features``.
    """

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``inputs @ kernel + bias``, features sharded over the axis."""
        return self._apply(inputs, "columns")


class RowParallelDense(_ParallelDense, kw_only=True):
    """``linen.Dense`` whose input features are sharded over a mesh axis: `RowParallelLinear` for linen.

    The kernel's box has ``(axis_name, None)``, the bias' ``(None,)``; all else as in `ColumnParallelDense`.

    Args:
      features: output features.
      axis_name: the mesh axis, or a tuple of axes from major to minor.
      scatter: whether rows of the result are sharded over the axis, and over no other. Otherwise it is whole on every
        rank: an all-reduce.
      strategy, config: as in `collective_matmul`.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as in ``linen.Dense``.

    Raises:
      ValueError: no mesh is set, or it has no such axis, or the axis doesn't divide the inputs' last dimension.
    """

    scatter: bool = True

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``inputs @ kernel + bias``, rows sharded over the axis or not."""
        return self._apply(inputs, "rows" if self.scatter else "whole")


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


def _unlike_a_layer(x: int, w: int, dimension_numbers: Any) -> str | None:
    """Why a product isn't rows times a kernel, None if it is. x and w are numbers of dimensions."""
    (x_contracted, w_contracted), (x_batch, w_batch) = dimension_numbers
    if len(x_batch) or len(w_batch):
        return "it has batch dimensions"
    pairs = sorted(zip(x_contracted, w_contracted, strict=True))
    many = len(pairs)
    if not many or pairs != list(zip(range(x - many, x), range(many), strict=True)):
        return "it doesn't contract the last dimensions of lhs with the first of rhs, in order"
    if many == x:
        return "lhs has no rows"
    return "rhs has no columns" if many == w else None


def _of_matrix(out_sharding: PartitionSpec | NamedSharding | None, rows: int) -> Any:
    """Of a product's matrix, whose columns are all features."""
    if out_sharding is None:
        return None
    spec = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if any(axes is not None for axes in spec[rows + 1 :]):
        raise ValueError(
            f"entwine_jax.flax.DotGeneral: out_sharding={spec} shards output features after the first, "
            f"dimension {rows}; order the features so that the first is the sharded one"
        )
    spec = PartitionSpec(*spec[: rows + 1])
    return NamedSharding(out_sharding.mesh, spec) if isinstance(out_sharding, NamedSharding) else spec


def _placed(axis_name: Any, out: Out, x: jax.Array, w: jax.Array) -> tuple[PartitionSpec | None, PartitionSpec | None]:
    """`collective_matmul`'s out_sharding for `out`, or a constraint on what it returns."""
    names, mesh = _tuple(axis_name), _mesh(x, w)
    if mesh.empty:
        raise ValueError(
            f"entwine_jax.flax.DotGeneral: axis_name={_entry(names)!r} and out={out!r} need a mesh: "
            "call it under jax.set_mesh(mesh)"
        )
    if {*names} <= {*mesh.explicit_axes} - {*mesh.manual_axes}:
        *leading, rows, _ = (_without(names, axes) for axes in _dims(x))
        columns = _without(names, _dims(w)[1])
        if out == "columns":
            columns = names
        elif out == "rows":
            rows = (*rows, *names)
        return PartitionSpec(*(axes or None for axes in (*leading, rows, columns))), None
    if mesh.manual_axes:
        place = {"columns": (None, names), "rows": (names, None), "whole": (None, None)}[out]
        return PartitionSpec(*[None] * (x.ndim - 2), *place), None
    anything = PartitionSpec.UNCONSTRAINED
    if out == "columns":
        return None, PartitionSpec(*[anything] * (x.ndim - 1), names)
    if out == "whole":
        return None, None
    others = [name for name, size in mesh.shape.items() if name not in names and size > 1]
    if x.ndim == 2 and others:
        raise ValueError(
            f"entwine_jax.flax.DotGeneral: rows of x {x.shape} may be sharded over {(*others,)} too, which "
            f"out='rows' over axis_name={_entry(names)!r} would undo; give the call an out_sharding=, "
            "or x another dimension for the rows that the axis shares"
        )
    return None, PartitionSpec(*[anything] * (x.ndim - 2), names, anything)


def _dims(array: jax.Array) -> list[tuple[str, ...]]:
    spec = jax.typeof(array).sharding.spec
    dims = [() if axes is None else _tuple(axes) for axes in spec]
    return [*dims, *[()] * (array.ndim - len(dims))]


def _without(names: tuple[str, ...], axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in axes if axis not in names)


def _mind_promotion(inputs: Any, kernel: Any, dtype: Any) -> None:
    if dtype is None and inputs.dtype == jnp.bfloat16 and kernel.dtype == jnp.float32:
        _warn_of_float32()


def _mind_float32(x: jax.Array, strategy: str | None) -> None:
    """Flax promotes before it calls dot_general: here float32 activations and promoted ones look the same."""
    if x.dtype != jnp.float32 or _config.resolve("flax.DotGeneral", strategy, None).strategy != "auto":
        return
    device = jax.sharding.get_abstract_mesh().abstract_device
    if (device.platform if device is not None else jax.default_backend()) in ("gpu", "cuda"):
        _warn_of_float32()


@functools.cache  # once
def _warn_of_float32() -> None:
    warnings.warn(
        "entwine_jax.flax: a layer multiplies in float32, which the fused GPU kernels don't, so XLA does it. bfloat16 "
        "activations promote to the dtype of float32 parameters: give the layer dtype=jnp.bfloat16",
        stacklevel=4,
    )
