"""`DotGeneral`: a dot_general whose products of rows and a kernel are `collective_matmul`; its warning of float32."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from .. import _config, _matmul
from .._config import Config
from .._ops import AxisName
from ._parameters import _check_axis, _entry, _mesh, _tuple

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
      residuals, strategy, config: as in `collective_matmul`.

    Raises:
      TypeError: the sizes of contracted dimensions differ.
      ValueError: ``out`` is unknown, or given without ``axis_name``; an axis is named twice; ``residuals`` are unknown,
        or ``"save"`` where ``out`` says that nothing is gathered.
      NotImplementedError: a product of another form, see above; and what `collective_matmul` raises.
    """

    axis_name: AxisName | None = None
    _: dataclasses.KW_ONLY
    out: Out | None = None
    residuals: str = "regather"
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
        if _config.saves("flax.DotGeneral", self.residuals) and self.out in ("rows", "whole"):
            raise ValueError(
                f"entwine_jax.flax.DotGeneral: residuals='save' keeps what is gathered, and out={self.out!r} gathers "
                "nothing; leave residuals out"
            )
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
        return self._with_bias(lhs, rhs, None, dimension_numbers, precision, preferred_element_type, out_sharding)

    def _with_bias(
        self,
        lhs: ArrayLike,
        rhs: ArrayLike,
        bias: jax.Array | None,
        dimension_numbers: _DimensionNumbers,
        precision: Any = None,
        preferred_element_type: DTypeLike | None = None,
        out_sharding: PartitionSpec | NamedSharding | None = None,
    ) -> jax.Array:
        """The same and a bias of the last dimension, which the kernels add, for the layers here."""
        x, w = jnp.asarray(lhs), jnp.asarray(rhs)
        problem = _unlike_a_layer(x.ndim, w.ndim, dimension_numbers)
        if problem is not None:
            y = self._plain(x, w, dimension_numbers, precision, preferred_element_type, out_sharding, problem)
            return y if bias is None else y + bias
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
            bias=bias,
            residuals=self.residuals,
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
        named = _config.resolve("flax.DotGeneral", self.strategy, self.config).strategy
        if named in _config.OURS:
            raise NotImplementedError(
                f"entwine_jax.flax.DotGeneral: strategy={named!r} can't run lhs {x.shape} and rhs {w.shape} with "
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
    if dtype is None and inputs.dtype in (jnp.bfloat16, jnp.float16) and kernel.dtype == jnp.float32:
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
        "entwine_jax.flax: a layer multiplies in float32, which the fused GPU kernels don't, so XLA does it. 16-bit "
        "activations promote to the dtype of float32 parameters: give the layer dtype=jnp.bfloat16 (or float16)",
        stacklevel=4,
    )
