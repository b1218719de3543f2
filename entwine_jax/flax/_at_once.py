"""Several nnx layers of the same inputs in one collective matmul."""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from .. import _matmul
from ._dot_general import DotGeneral, _mind_promotion, _placed
from ._nnx import ColumnParallelLinear

# What layers must have in common.
_COMMON = ("dot_general", "in_features", "dtype", "precision", "preferred_element_type", "promote_dtype")


def at_once(
    layers: Sequence[ColumnParallelLinear], inputs: jax.Array, *, gated: bool = False, activation: Any = None
) -> Any:
    """What `ColumnParallelLinear` layers make of the same inputs, which are gathered once for all of them.

    ``tuple(layer(inputs) for layer in layers)`` gathers them for each layer. The layers stay as they are, with
    parameters and checkpoints of their own; only their calls are one `collective_matmul` of several weights, forward
    and backward::

        q, k, v = entwine_jax.flax.at_once((self.q, self.k, self.v), x)
        h = entwine_jax.flax.at_once((self.gate, self.up), x, gated=True, activation="silu")

    The equation of each is ``y = activation(inputs @ kernel + bias)``, for inputs of shape (..., m, k), rows (m) over
    the layers' axis, and kernels (k, n), columns over it; of two gated layers ``h = activation(inputs @ kernel[0] +
    bias[0]) * (inputs @ kernel[1] + bias[1])``. Types, accumulation and memory are `collective_matmul`'s. Under
    automatic sharding ``residuals="save"`` keeps the layers' products apart.

    Args:
      layers: two or more, which agree in ``in_features``, ``axis_name``, ``residuals``, ``strategy``, ``config``,
        ``dtype``, ``precision``, ``preferred_element_type`` and ``promote_dtype``.
      inputs: at least a matrix.
      gated: of two layers with as many features, there is one result.
      activation: as in `collective_matmul`: of each layer a name or None, or of gated ones one name.

    Returns:
      A tuple of one y for each layer, or h.

    Raises:
      TypeError: a layer is of another class; what `collective_matmul` raises.
      ValueError: layers differ in what they must have in common; the inputs have no rows; what `collective_matmul`
        raises.
    """
    dot, first = _check(layers, inputs), layers[0]
    kernels = [layer.kernel[...] for layer in layers]
    biases = [None if layer.bias is None else layer.bias[...] for layer in layers]
    for kernel in kernels:
        _mind_promotion(inputs, kernel, first.dtype)
    promoted: Any = first.promote_dtype((inputs, *kernels, *biases), dtype=first.dtype)
    x, ws, biases = promoted[0], promoted[1 : 1 + len(layers)], promoted[1 + len(layers) :]
    sharding, constraint = _placed(dot.axis_name, "columns", x, ws[0])
    given: Any = {"gated": True} if gated else {}
    made: Any = _matmul.collective_matmul(
        x,
        ws,
        axis_name=dot.axis_name,
        out_sharding=sharding,
        bias=biases,
        activation=activation,
        residuals=dot.residuals,
        preferred_element_type=first.preferred_element_type,
        precision=first.precision,
        strategy=dot.strategy,
        config=dot.config,
        **given,
    )
    if constraint is not None:
        made = jax.tree.map(lambda y: lax.with_sharding_constraint(y, constraint), made)
    return made


def _check(layers: Any, inputs: Any) -> DotGeneral:
    """The dot_general of all."""
    if not isinstance(layers, tuple | list) or len(layers) < 2:
        raise TypeError(f"entwine_jax.flax.at_once: layers must be a tuple of two or more, not {layers!r}; call one")
    for i, layer in enumerate(layers):
        if not isinstance(layer, ColumnParallelLinear) or not isinstance(layer.dot_general, DotGeneral):
            raise TypeError(
                f"entwine_jax.flax.at_once: layers[{i}] is {type(layer).__name__}, but the layers must be "
                "ColumnParallelLinear with the dot_general that they have been made with; call others by themselves"
            )
        for name in _COMMON:
            mine, other = getattr(layer, name), getattr(layers[0], name)
            if mine != other:
                raise ValueError(
                    f"entwine_jax.flax.at_once: layers[{i}] has {name}={mine!r} and layers[0] {other!r}, but one call "
                    "has one; make them alike, or call them one by one"
                )
    if inputs.ndim < 2:
        raise ValueError(
            f"entwine_jax.flax.at_once: inputs have shape {inputs.shape} but need rows to gather, (..., rows, "
            "features); call the layers one by one, or add a dimension"
        )
    dot: DotGeneral = layers[0].dot_general
    return dot
