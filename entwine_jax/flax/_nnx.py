"""The layers for nnx."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from .._config import Config
from .._ops import AxisName
from ._dot_general import DotGeneral, Out, _mind_promotion
from ._parameters import _check_features, _sharded

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


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
      residuals, strategy, config: as in `collective_matmul`.
      kernel_init, bias_init, kernel_metadata, bias_metadata, rngs: as in ``nnx.Linear``.
      **options: other arguments of ``nnx.Linear``, but ``dot_general``. ``dtype=jnp.bfloat16`` is needed for the GPU
        kernels if parameters are float32.

    Raises:
      ValueError: no mesh is set, or it has no such axis, or the axis doesn't divide ``out_features``; unknown
        residuals.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        axis_name: AxisName,
        residuals: str = "regather",
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
            dot_general=DotGeneral(axis_name, out="columns", residuals=residuals, strategy=strategy, config=config),
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
        return _apply(self, inputs, out_sharding)


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
        return _apply(self, inputs, out_sharding)


def _apply(layer: nnx.Linear, inputs: jax.Array, out_sharding: PartitionSpec | NamedSharding | None) -> jax.Array:
    """What nnx.Linear does, but that the bias goes into the kernel."""
    _mind_promotion(inputs, layer.kernel, layer.dtype)
    if not isinstance(layer.dot_general, DotGeneral):  # someone has put another there
        y: jax.Array = nnx.Linear.__call__(layer, inputs, out_sharding)
        return y
    parameters = layer.kernel[...], None if layer.bias is None else layer.bias[...]
    x, kernel, bias = layer.promote_dtype((inputs, *parameters), dtype=layer.dtype)
    numbers = ((x.ndim - 1,), (0,)), ((), ())
    return layer.dot_general._with_bias(
        x, kernel, bias, numbers, layer.precision, layer.preferred_element_type, out_sharding
    )
