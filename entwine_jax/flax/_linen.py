"""The layers for linen."""

from typing import Any

import jax
from flax import linen

from .._config import Config
from .._ops import AxisName
from ._dot_general import DotGeneral, Out, _mind_promotion
from ._parameters import _boxed, _check_features, _ranks_here


class _ParallelDense(linen.Dense, kw_only=True):
    """What the two linen layers share. Under jax.shard_map parameters are one rank's, so the sizes are too."""

    axis_name: AxisName
    strategy: str | None = None
    config: Config | None = None

    def _apply(self, inputs: jax.Array, out: Out, residuals: str = "regather") -> jax.Array:
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
        dot_general = DotGeneral(
            self.axis_name, out=out, residuals=residuals, strategy=self.strategy, config=self.config
        )
        return dot_general._with_bias(x, kernel, bias, (((x.ndim - 1,), (0,)), ((), ())), self.precision)


class ColumnParallelDense(_ParallelDense, kw_only=True):
    """``linen.Dense`` whose features are sharded over a mesh axis: `ColumnParallelLinear` for linen.

    Parameters are those of ``linen.Dense``, in ``linen.Partitioned`` boxes with ``(None, axis_name)`` for the kernel
    and ``(axis_name,)`` for the bias; initialise them sharded in the usual way, with ``jax.jit(model.init,
    out_shardings=linen.get_sharding(jax.eval_shape(model.init, key, x), mesh))``. Initialise and call it under
    ``jax.set_mesh``, or call it inside ``jax.shard_map`` with unboxed parameters, one rank's shards.

    Args:
      features: output features of the whole layer.
      axis_name: the mesh axis, or a tuple of axes from major to minor.
      residuals, strategy, config: as in `collective_matmul`.
      use_bias, dtype, param_dtype, precision, kernel_init, bias_init, promote_dtype: as in ``linen.Dense``.

    Raises:
      ValueError: no mesh is set, or it has no such axis, or the axis doesn't divide ``features``; unknown residuals.
    """

    residuals: str = "regather"

    @linen.compact
    def __call__(self, inputs: jax.Array) -> jax.Array:
        """``inputs @ kernel + bias``, features sharded over the axis."""
        return self._apply(inputs, "columns", self.residuals)


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
