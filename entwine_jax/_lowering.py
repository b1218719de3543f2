"""The JAX primitives behind all ops: the custom call, and a note of what XLA runs.

That every collective matmul leaves one equation is what lets `explain` find it in any traced function.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from . import _batching, _core, _operands, _reference, _strategy, _threads
from ._config import ACTIVATIONS, TRANSPORTS
from ._strategy import Choice, Plan, Request

_threads.provide()
for _platform, _targets in _core.registrations().items():
    for _target, _stages in _targets.items():
        jax.ffi.register_ffi_target(_target, _stages, platform=_platform)


def vary(x: jax.Array, w: jax.Array, axis_name: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """x and w made varying over the team's axes and each other's: then AD itself sums the gradient of a replicated one.

    With check_vma=False nothing varies in JAX's books and this does nothing.
    """
    axes = frozenset(axis_name).union(*(varying(v) for v in (x, w)))
    return _cast(x, axes), _cast(w, axes)


def vary_bias(
    op: str, x: jax.Array, w: jax.Array, bias: jax.Array | None, axis_name: tuple[str, ...]
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """The same with a bias. That of an all-reduce must not vary over the team's axes, as y doesn't."""
    x, w = vary(x, w, axis_name)
    if bias is None:
        return x, w, None
    kept = {*axis_name} if op == "matmul_all_reduce" else set()
    if wrong := kept & varying(bias):
        raise ValueError(
            f"entwine_jax.{op}: bias varies over mesh axes {(*sorted(wrong),)}, but every rank has the same result, so "
            "it must be the same on every rank: leave these axes out of its in_specs"
        )
    axes = varying(x) | varying(bias)
    return _cast(x, axes), _cast(w, axes), _cast(bias, axes - kept)


def varying(v: jax.Array) -> frozenset[str]:
    axes: frozenset[str] = jax.typeof(v).manual_axis_type.varying
    return axes


def _cast(v: jax.Array, axes: frozenset[str]) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    missing = tuple(sorted(axes - varying(v)))
    alone = tuple(name for name in missing if mesh.auto_axes and mesh.shape[name] == 1)
    several = tuple(name for name in missing if name not in alone)
    v = lax.pcast(v, several, to="varying") if several else v
    return _vary_alone(v, alone) if alone else v


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _vary_alone(v: jax.Array, axis_name: tuple[str, ...]) -> jax.Array:
    """v made varying over axes of size one, beside automatic ones: there XLA has no sum over such an axis, which the
    transpose of a pcast would ask for, and dies of it."""
    varying: jax.Array = lax.pcast(v, axis_name, to="varying")
    return varying


def _vary_alone_forward(v: jax.Array, axis_name: tuple[str, ...]) -> tuple[jax.Array, None]:
    return _vary_alone(v, axis_name), None


def _vary_alone_backward(axis_name: tuple[str, ...], saved: None, dv: jax.Array) -> tuple[jax.Array]:
    mesh = jax.sharding.get_abstract_mesh()
    raise NotImplementedError(
        f"entwine_jax: a gradient inside jax.shard_map over mesh axes {axis_name} of size 1, beside the automatic axes "
        f"{mesh.auto_axes}: XLA can't sum over an axis of one there; leave {axis_name} out of shard_map's axis_names"
    )


_vary_alone.defvjp(_vary_alone_forward, _vary_alone_backward)


# Operands: see _operands.py. Results: y of each product of an all-gather, else (or if they are gated) one y; and if the
# request gathers, all of x, or of z that reduce-scatter gathers beside.
collective_matmul_p = Primitive("collective_matmul")
collective_matmul_p.multiple_results = True


def _results(*flat: Any, request: Request, choice: Choice) -> list[Any]:
    operands = _operands.split(request, flat)
    ys = [_result(x, w, request) for x, w in operands.pairs()[: request.results]]
    z = operands.xs[0] if operands.z is None else operands.z
    return [*ys, gathered(request, z)] if request.gathers else ys


def gathered(request: Request, z: Any) -> Any:
    """The type of all of z."""
    return z.update(shape=(z.shape[0], z.shape[1] * request.team.size, z.shape[2]), weak_type=False)


def _result(x: Any, w: Any, request: Request) -> Any:
    if request.op == "matmul_all_reduce":
        # The same on every rank, which its type says as psum's does.
        rows = x.shape[2 if request.transpose_x else 1]
        varying = x.manual_axis_type.varying - {*request.team.axis_name}
        return x.update(
            shape=(x.shape[0], rows, w.shape[0 if request.transpose_w else 1]),
            dtype=request.dtype,
            weak_type=False,
            manual_axis_type=x.manual_axis_type.update(varying=varying),
        )
    shape = _strategy.sizes(request, x.shape, w.shape)
    rows = shape.m_shard * (request.team.size if request.op == "all_gather_matmul" else 1)
    # From x's own type, to carry the axes it varies over: a plain ShapeDtypeStruct would call the result replicated.
    return x.update(shape=(shape.batch, rows, shape.n), dtype=request.dtype, weak_type=False)


collective_matmul_p.def_abstract_eval(_results)
batching.primitive_batchers[collective_matmul_p] = functools.partial(_batching.batch, collective_matmul_p)


def _attributes(request: Request, plan: Plan) -> dict[str, Any]:
    """By the names of `CallAttributes` in cc/ffi/problem.h."""
    settings = request.settings
    numbers = {
        "team_size": request.team.size,
        "transpose_w": int(request.transpose_w or request.scaled),
        "transpose_x": int(request.transpose_x),
        "products": request.products,
        "gated": int(request.gated),
        "biased": sum(int(biased) << i for i, biased in enumerate(request.biases)),
        "activation": sum((None, *ACTIVATIONS).index(a) << 8 * i for i, a in enumerate(request.activations)),
        "scaled": int(request.scaled),
        "tile_m": plan.tile_m,
        "tile_n": plan.tile_n,
        "raster": plan.raster,
        "lead": plan.lead,
        "transport": TRANSPORTS.index(plan.transport),
        "pushers": plan.pushers,
        "copiers": plan.copiers,
        "few_rows": int(plan.few_rows),
        "movers": plan.movers,
        "timeout_ms": settings.timeout_ms,
        "workers": settings.workers,
        "stall_us": settings.stall_us,
        "stall_seed": settings.stall_seed,
    }
    if plan.strategy == "signal":  # `SignalAttributes` in cc/ffi/signal_call.h
        numbers |= {"comm_sms": plan.comm_sms, "group_waves": plan.group_waves, "far": int(plan.far)}
    return {"groups": np.array(request.team.groups, np.int64)} | {
        name: np.int64(value) for name, value in numbers.items()
    }


def _lower_for(target: str | None) -> Callable[..., Any]:
    def lower(*flat: jax.Array, request: Request, choice: Choice) -> Any:
        team, plan = request.team, choice.plan
        if plan is None or plan.target != target:
            raise NotImplementedError(
                f"entwine_jax.{request.op}: strategy={choice.strategy!r} was traced for {team.platform} devices and "
                "can't be lowered for another platform; trace it on that platform, or use strategy='xla'"
            )
        results = _results(*map(jax.typeof, flat), request=request, choice=choice)
        if request.scaled and not request.transpose_w:
            # The tensor cores take float8 operands that are contiguous in k alone.
            given = _operands.split(request, flat)
            flat = (*given._replace(ws=tuple(w.T for w in given.ws)).flat(),)
        operands, more = [*flat[:2]], flat[2:]
        y_type = results[0]
        if request.transpose_x and request.op == "matmul_all_reduce" and flat[0].shape[0] > 1:
            # Its rows are one matrix, and so they lie in y. In x those of a batch are columns: side by side.
            operands[0] = lax.collapse(jnp.swapaxes(flat[0], 0, 1), 1)[None]
            results[0] = y_type.update(shape=(1, y_type.shape[0] * y_type.shape[1], y_type.shape[2]))
        if target == "host":
            # A GPU learns its place from the communicator; a virtual CPU device is told the index of its team and its
            # rank there.
            index = lax.axis_index(team.other_axes) if team.other_axes else 0
            operands.append(jnp.stack([jnp.int32(index), lax.axis_index(team.axis_name)]))
        attributes = _attributes(request, plan)
        if plan.strategy != "signal":
            y, *others = jax.ffi.ffi_call(f"entwine_{request.op}", results)(*operands, *more, **attributes)
            return [y.reshape(y_type.shape), *others]
        x, w = map(jax.typeof, flat[:2])
        size = _strategy.scratch_bytes(request, plan, x, w)
        scratch = x.update(shape=(1, 1, size), dtype=np.dtype(np.uint8), weak_type=False)
        call = jax.ffi.ffi_call(f"entwine_signal_{request.op}", [results[0], scratch, *results[1:]])
        y, _, *gathered = call(*operands, *more, **attributes)
        return [y.reshape(y_type.shape), *gathered]

    return lower


mlir.register_lowering(collective_matmul_p, mlir.lower_fun(_lower_for(None), multiple_results=True))
mlir.register_lowering(collective_matmul_p, mlir.lower_fun(_lower_for("host"), multiple_results=True), platform="cpu")
mlir.register_lowering(collective_matmul_p, mlir.lower_fun(_lower_for("sm90"), multiple_results=True), platform="cuda")


def on_xla(
    request: Request, choice: Choice, operands: _operands.Operands
) -> tuple[tuple[jax.Array, ...], jax.Array | None]:
    """The products in lax, with JAX's own derivatives and batching; and all of x if the request gathers."""
    team, dtype, whole = request.team, request.dtype, None
    if team.platform == "cpu" and team.loose_axes and dtype in (jnp.bfloat16, jnp.float16):
        # XLA's CPU compiler aborts on sums of these inside a partially manual shard_map.
        dtype = np.dtype(np.float32)
    options: dict[str, Any] = {"transpose_w": request.transpose_w, "dtype": dtype, "precision": request.precision}
    options["transpose_x"] = request.transpose_x
    pairs, scale = operands.pairs(), operands.scale
    # Of several products of an all-gather each has one.
    scales = [scale] * len(pairs) if scale is None or not scale.ndim else [*scale]
    if request.op == "all_gather_matmul":
        rows = operands.xs[0] if team.size == 1 else _reference.gather(operands.xs[0], team.axis_name)
        rows = _reference.named(rows) if request.gathers or team.size > 1 else rows
        whole = rows if request.gathers else None
        ys = [_reference.matmul(rows, w, scale=s, **options) for (_, w), s in zip(pairs, scales, strict=True)]
    else:
        y = functools.reduce(jnp.add, (_reference.matmul(x, w, scale=scale, **options) for x, w in pairs))
        if request.op == "matmul_all_reduce":  # also of one: the psum tells JAX that y is the same everywhere
            y = lax.psum(y, team.axis_name)
        elif team.size > 1:
            y = _reference.scatter(y, team.axis_name)
        ys = [y]
    ys = [y.astype(request.dtype) for y in ys]
    if request.gated:
        ys = [_reference.gate(ys, request.activation, operands.biases)]
    else:
        finishes = zip(ys, operands.biases, request.activations, strict=True)
        ys = [_reference.finish(y, bias, activation) for y, bias, activation in finishes]
    types = tuple((jax.typeof(x), jax.typeof(w)) for x, w in pairs)
    return (note(ys[0], *types[0], (request, choice), types[1:]), *ys[1:]), whole


# Leaves a word to `explain` where a product is XLA's.
note_p = Primitive("collective_matmul_note")


def note(
    y: jax.Array, x: Any, w: Any, about: tuple[Request, Choice] | str, more: tuple[tuple[Any, Any], ...] = ()
) -> jax.Array:
    """y as it is, a product of x and w (types): which collective matmul it is, or why it is none. `more` are x and w
    of the other products of several."""
    noted: jax.Array = note_p.bind(y, x=x, w=w, about=about, more=more)
    return noted


def _note_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    return note_p.bind(*primals, **params), tangents[0]


note_p.def_abstract_eval(lambda y, **params: y)
note_p.def_impl(lambda y, **params: y)
ad.primitive_jvps[note_p] = _note_jvp
batching.primitive_batchers[note_p] = lambda args, dims, **params: (note_p.bind(*args, **params), dims[0])
mlir.register_lowering(note_p, lambda ctx, y, **params: [y])
