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

Several column-parallel nnx layers of the same inputs, query, key and value or gate and up, gather them once where
`at_once` calls them.

A model may use both APIs without a clash, and neither layer is the other's in disguise.
"""

try:
    from flax import linen, nnx  # noqa: F401
except ImportError as error:
    raise ImportError("entwine_jax.flax needs Flax: pip install 'entwine-jax[flax]'") from error

from ._at_once import at_once
from ._dot_general import DotGeneral
from ._dot_general import Out as Out
from ._linen import ColumnParallelDense, RowParallelDense
from ._nnx import ColumnParallelLinear, RowParallelLinear

__all__ = [
    "ColumnParallelDense",
    "ColumnParallelLinear",
    "DotGeneral",
    "RowParallelDense",
    "RowParallelLinear",
    "at_once",
]
