"""Tensor-parallel matrix products that overlap with their collective, for JAX on NVIDIA GPUs."""

from ._autotune import autotune
from ._config import Config
from ._cost_model import Cost, cost_model
from ._explain import CollectiveMatmul, Explanation, explain
from ._float8 import float8_all_gather_matmul, float8_matmul_all_reduce, float8_matmul_reduce_scatter
from ._matmul import collective_matmul
from ._memory import ArenaMemory, MemoryStats, memory_stats
from ._ops import all_gather_matmul
from ._simulate import SimulatedCall, simulate_tiles
from ._sums import matmul_all_reduce, matmul_reduce_scatter
from ._trace import Trace, TracedCall, trace_tiles
from ._tuning import Tuned, Tuning

__all__ = [
    "ArenaMemory",
    "CollectiveMatmul",
    "Config",
    "Cost",
    "Explanation",
    "MemoryStats",
    "SimulatedCall",
    "Trace",
    "TracedCall",
    "Tuned",
    "Tuning",
    "all_gather_matmul",
    "autotune",
    "collective_matmul",
    "cost_model",
    "explain",
    "float8_all_gather_matmul",
    "float8_matmul_all_reduce",
    "float8_matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "memory_stats",
    "simulate_tiles",
    "trace_tiles",
]
