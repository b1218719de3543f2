"""What keeps a strategy from running a call: by types, shapes and settings, or by the devices."""

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from . import _core, _signal
from ._request import TARGETS, Request, all_rows, sizes
from ._team import Team

# cc/schedule: kMaxRanks; the row pitch that TMA needs.
_MAX_RANKS = 8
_PITCH_BYTES = 16


def obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """Why strategy "fused" can't run, None if it can."""
    problem = _obstacle(request, x, w)
    return peer_obstacle() if problem is None and request.team.platform == "cuda" else problem


def resident_obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """Why strategy "resident" can't run, None if it can: it has the kernels of "fused", but those for few rows."""
    if request.settings.config.few_rows:
        return "config's few_rows=True is for strategy='fused'"
    if request.settings.config.comm_sms == 0:
        return "config's comm_sms=0 leaves nobody to move (for copy engines, strategy='signal')"
    return obstacle(request, x, w)


def signal_obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """Why strategy "signal" can't run, None if it can: it needs no peer access."""
    if (problem := _obstacle(request, x, w)) is not None:
        return problem
    rows = all_rows(request, sizes(request, x.shape, w.shape))
    if (problem := _signal.obstacle(request, x.dtype, rows)) is not None:
        return problem
    if request.team.platform != "cuda":
        return None
    if request.settings.config.comm_sms == 0 and (problem := peer_obstacle()) is not None:
        return f"{problem}, which the copy engines of config's comm_sms=0 need"
    return hopper_obstacle()


def _obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    """What is in the way of all."""
    team, platform = request.team, request.team.platform
    if platform not in TARGETS:
        return f"platform {platform!r} has no fused implementation, only cpu and cuda have"
    if team.size > _MAX_RANKS:
        return f"a team has at most {_MAX_RANKS} ranks, not {team.size}"
    if team.loose_axes:
        return f"mesh axes {team.loose_axes} aren't manual here (make them so with jax.shard_map's axis_names)"
    if _names_algorithm(request.precision):
        return (
            f"precision={request.precision} names an algorithm (it multiplies in the operands' dtype, sums in float32)"
        )
    if 0 in x.shape or 0 in w.shape:
        return "there is nothing to compute in an empty array"
    return _cpu_obstacle(request, x) if platform == "cpu" else _cuda_obstacle(request, x, w)


def _names_algorithm(precision: Any) -> bool:
    if isinstance(precision, str):
        return precision in lax.DotAlgorithmPreset.__members__
    return isinstance(precision, lax.DotAlgorithm | lax.DotAlgorithmPreset)


def _cpu_obstacle(request: Request, x: jax.Array) -> str | None:
    if jax.process_count() > 1:
        return f"the host executor works within one process, not across the {jax.process_count()} of jax.distributed"
    if not request.scaled and x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
        return f"the host executor takes bfloat16, float16 and float32 operands, not {x.dtype}"
    if request.settings.config.few_rows:
        return "the host executor knows tiles only, not config's few_rows=True"
    if not request.scaled and request.dtype not in (x.dtype, jnp.float32):
        return f"the host executor returns {x.dtype} or float32 here, not {request.dtype}"
    return None


def _cuda_obstacle(request: Request, x: jax.Array, w: jax.Array) -> str | None:
    if not _core.cuda_built():
        return "entwine_jax was built without CUDA (reinstall it where nvcc is to be found)"
    if not request.scaled and x.dtype not in (jnp.bfloat16, jnp.float16):
        return f"the sm_90 kernels take bfloat16 and float16 operands, not {x.dtype}"
    if not request.scaled and request.dtype not in (x.dtype, jnp.float32):
        return f"the sm_90 kernels return {x.dtype} or float32 here, not {request.dtype}"
    if request.scaled and _is_precise(request.precision):
        return (
            f"precision={request.precision} asks for more than the tensor cores' sums of float8 products have, which "
            "are cut to some 14 bits"
        )
    shape = sizes(request, x.shape, w.shape)
    w_columns = shape.k if request.scaled else w.shape[1]  # float8 are transposed if they must be
    of_x = ("x as it is stored" if request.transpose_x else "x", x.shape[2], x.dtype)
    rows = (of_x, ("w", w_columns, w.dtype), ("the result", shape.n, request.dtype))
    for name, columns, dtype in rows:
        if columns * dtype.itemsize % _PITCH_BYTES:
            return (
                f"a row of {name} is {columns} x {dtype.itemsize} = {columns * dtype.itemsize} bytes, "
                f"not a multiple of {_PITCH_BYTES} (pad to {_padded(columns, _PITCH_BYTES // dtype.itemsize)} columns)"
            )
    chunk = _PITCH_BYTES // x.dtype.itemsize
    if request.transpose_x and request.op == "matmul_reduce_scatter" and shape.m_shard % chunk:
        return (
            f"each rank's {shape.m_shard} rows of an x that is stored transposed are not a multiple of {chunk} (pad to "
            f"{_padded(shape.m_shard, chunk)} a rank)"
        )
    config = request.settings.config
    tile = (config.tile_m, config.tile_n)
    if tile != (None, None) and (obstacle := tile_obstacle(request, tile)):
        return obstacle
    if config.few_rows and request.transpose_x:
        return "config's few_rows=True is for an x without transpose_x=True"
    if config.few_rows and all_rows(request, shape) > _core.FEW_ROWS_MOST:
        return f"config's few_rows=True is for up to {_core.FEW_ROWS_MOST} rows, not {all_rows(request, shape)}"
    return None


def tile_obstacle(request: Request, tile: tuple[int | None, int | None]) -> str | None:
    """Why a config's tile isn't one that the sm_90 kernels have."""
    if tile in request.sm90_tiles:
        return None
    results = f"{'gated ' if request.gated else ''}{request.dtype} results"
    return (
        f"config's tile_m={tile[0]}, tile_n={tile[1]} is none of the tiles of the sm_90 kernels for {results}, "
        f"{', '.join(map(str, request.sm90_tiles))}"
    )


def _padded(columns: int, multiple: int) -> int:
    return -(-columns // multiple) * multiple


def _is_precise(precision: Any) -> bool:
    """Whether any operand's precision is more than the default."""
    each = precision if isinstance(precision, tuple | list) else (precision,)
    return any(p is not None and lax.Precision(p) != lax.Precision.DEFAULT for p in each)


def gather_obstacle(request: Request, z: jax.Array) -> str | None:
    """Why a fused reduce-scatter can't gather z beside its product, None if it can."""
    if z.size == 0:
        return "it is empty"
    if request.team.platform == "cuda" and z.shape[-1] * z.dtype.itemsize % _PITCH_BYTES:
        return f"a row of it is {z.shape[-1]} x {z.dtype.itemsize} bytes, not a multiple of {_PITCH_BYTES}"
    return None


@functools.cache
def hopper_obstacle() -> str | None:
    return _core.hopper([device.local_hardware_id for device in jax.local_devices(backend="cuda")]) or None


@functools.cache
def peer_obstacle() -> str | None:
    if os.environ.get("ENTWINE_PEER_ACCESS") == "0":
        return "ENTWINE_PEER_ACCESS=0 says that the GPUs don't see each other's memory"
    return _core.peer_access([device.local_hardware_id for device in jax.local_devices(backend="cuda")]) or None


@functools.cache
def domains() -> tuple[int, ...]:
    """The NVLink domain of each GPU, a host in most machines, in the order of jax.devices()."""
    return tuple(getattr(device, "partition_index", 0) for device in jax.devices("cuda"))


def span_obstacle(team: Team) -> str | None:
    """Whether the team, or another along its axis, reaches beyond one NVLink domain, as far as can be known while JAX
    traces: a mesh doesn't tell its devices then, and is taken to have all there are in their order."""
    if len(set(domains())) == 1:
        return None
    if len(team.groups) != len(domains()):
        return (
            f"the mesh has {len(team.groups)} of {len(domains())} GPUs in {len(set(domains()))} NVLink domains, and "
            "tracing doesn't tell which (strategy='fused' if each team keeps within one)"
        )
    teams = (team.groups[first : first + team.size] for first in range(0, len(team.groups), team.size))
    most = max(len({domains()[i] for i in ranks}) for ranks in teams)
    if most == 1:
        return None
    return (
        f"a team along this axis spans {most} NVLink domains if the mesh has its devices in the order of jax.devices() "
        "(strategy='fused' if each keeps within one)"
    )


OBSTACLES = {"fused": obstacle, "resident": resident_obstacle, "signal": signal_obstacle}


def no_peers() -> str | None:
    """The same where it isn't known that there are kernels."""
    return peer_obstacle() if _core.cuda_built() else None
