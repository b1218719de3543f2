"""A product on shards: one rank's work for a `Layout`, in a shard_map or as what the partitioner puts in its place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from . import _reference, _shards, _team
from ._config import OURS, Settings
from ._selection import OPERANDS, Layout, Spec
from ._shared import Shared
from ._strategy import Request
from ._team import Team


@dataclasses.dataclass(frozen=True)
class Call:
    """A product as asked for: everything but operands and shardings."""

    product: str  # "y", "x" or "w": see _selection
    dtype: np.dtype[Any]  # of the result
    precision: Any
    settings: Settings
    axis_name: tuple[str, ...] | None  # the only team that may be selected; None for any
    saves: bool = False  # all-gather keeps the gathered x for its weight gradient
    activation: str | None = None  # of _config.ACTIVATIONS
    shared: Shared | None = None  # with other products of the same x

    def __repr__(self) -> str:  # short: it is printed in every jaxpr
        return f"{self.product}:{self.dtype.name}"


def abstract(call: Call, a: Any, b: Any) -> tuple[int, ...]:
    """The result's shape."""
    if call.product == "w":
        return a.shape[-1], b.shape[-1]
    return (*a.shape[:-1], b.shape[1 if call.product == "y" else 0])


def whole(call: Call, a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """The product itself, as one dot, and its epilogue."""
    return _reference.finish(_dot(call, a, b), bias, call.activation)


def _dot(call: Call, a: jax.Array, b: jax.Array) -> jax.Array:
    if call.product == "w":
        return _reference.weight_gradient(a, b, precision=call.precision).astype(call.dtype)
    contracted = (((a.ndim - 1,), (0 if call.product == "y" else 1,)), ((), ()))
    if a.dtype != b.dtype and b.dtype != jnp.float8_e4m3fn:
        operand = jnp.promote_types(a.dtype, b.dtype)
        a, b = a.astype(operand), b.astype(operand)
    return lax.dot_general(a, b, contracted, precision=call.precision, preferred_element_type=call.dtype)


def one_rank(call: Call, layout: Layout, team: Team | None) -> Callable[..., jax.Array]:
    """The work of one rank on its shards, which may be of a bias too: (a, b[, bias])."""
    check(call, layout)
    if layout.op != "dot":
        work = _fused(call, layout, team, gathers=False)
        return lambda *shards: work(*shards)[0]

    def dot(a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        y = _dot(call, a, b)
        return _reference.finish(lax.psum(y, layout.summed) if layout.summed else y, bias, call.activation)

    return dot


def whole_scaled(call: Call, a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """A product of float8 times `scale`, as one dot, and its epilogue."""
    return _reference.finish(_scaled_dot(call, a, b, scale), bias, call.activation).astype(call.dtype)


def _scaled_dot(call: Call, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    """In float32."""
    return _dot(dataclasses.replace(call, dtype=np.dtype(np.float32)), a, b) * scale


def one_rank_scaled(call: Call, layout: Layout, team: Team | None) -> Callable[..., jax.Array]:
    """The work of one rank on its shards of float8, the scale of their product, and maybe a shard of a bias."""
    check(call, layout)

    def work(a: jax.Array, b: jax.Array, scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        if layout.op != "dot":
            return _shards.scaled(request(call, layout, team, b, scaled=True), a, b, scale, bias)
        if not layout.summed:
            return whole_scaled(call, a, b, scale, bias)
        y = lax.psum(_scaled_dot(call, a, b, scale).astype(call.dtype), layout.summed)
        return _reference.finish(y, bias, call.activation)

    return work


def request(
    call: Call, layout: Layout, team: Team | None, b: jax.Array, gathers: bool = False, scaled: bool = False
) -> Request:
    """A collective matmul whose right operand is `b`, or like it."""
    assert team is not None
    beside: tuple[int, ...] = ()
    if call.shared is not None:
        columns = b.shape[1 if (layout.op == "all_gather_matmul") == (call.product == "y") else 0]
        beside = call.shared.beside(layout.op, columns)
    return Request(
        layout.op,
        team,
        call.product == "x",
        call.dtype,
        call.precision,
        call.settings,
        gathers,
        scaled=scaled,
        activation=call.activation,
        beside=beside,
    )


def _fused(call: Call, layout: Layout, team: Team | None, gathers: bool) -> Callable[..., Any]:
    def work(a: jax.Array, b: jax.Array, bias: jax.Array | None = None) -> Any:
        return _shards.product(request(call, layout, team, b, gathers=gathers), a, b, bias)

    return work


def one_rank_saving(call: Call, layout: Layout, team: Team | None) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """y = x @ w of one rank, and what to keep of x: all rows that the team has gathered, itself if it gathers none."""
    work = one_rank(call, layout, team)
    if layout.op != "all_gather_matmul":
        return lambda a, *more: (work(a, *more), a)
    return _fused(call, layout, team, gathers=True)


Gradients = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]


def gradients_of_rank(
    to_x: Call, to_w: Call, x: Layout, w: Layout, team: Team | None, saved: bool = False
) -> Gradients | None:
    """One rank's work for both gradients of a product on its shards, (dy, w, x) -> (dx, dw), if one call can do it.

    That is so if dx is a collective matmul, and dw needs just what that call can gather beside: all rows of x, or
    of dy. `x` and `w` are the gradients' layouts; x itself then lies as dx does, or with `saved` as dw wants it.
    """
    if x.op not in ("all_gather_matmul", "matmul_reduce_scatter"):
        return None
    (dy, _), dx = x.operands, x.result
    scatters = x.op == "matmul_reduce_scatter"
    if w.operands != ((gathered(dx, x.team), dy) if scatters else (dx, gathered(dy, x.team))):
        return None

    def both(dy: jax.Array, w_: jax.Array, x_: jax.Array) -> tuple[jax.Array, jax.Array]:
        dx, dw = _shards.gradients(request(to_x, x, team, w_), dy, w_, x_, saved and scatters)
        return dx, lax.psum(dw, w.summed) if w.summed else dw

    return both


def gathered(spec: Spec, team: tuple[str, ...]) -> Spec:
    """How an array lies when the team, the minor axes of its rows, has gathered them."""
    *leading, rows, columns = spec
    return (*leading, rows[: len(rows) - len(team)], columns)


def by_xla(call: Call, layout: Layout, team: Team | None, a: Any, b: Any, gathers: bool = False) -> bool:
    """Whether XLA would run a collective matmul; a and b are the types of one rank's operands."""
    narrow = call.product != "w" and b.dtype == jnp.float8_e4m3fn
    return layout.op != "dot" and not _shards.ours(request(call, layout, team, b, gathers, narrow), a, b)


def of_gathered_rows(layout: Layout) -> Layout:
    """In place of an all-gather and its product: the product alone, whose rows lie gathered. The partitioner, who moves
    them there, does so once for all that want them."""
    if layout.op != "all_gather_matmul":
        return layout
    a, b = layout.operands
    return dataclasses.replace(layout, op="dot", team=(), operands=(gathered(a, layout.team), b), moves=True)


def check(call: Call, layout: Layout) -> None:
    """A named strategy never falls back to a collective of XLA's; weight gradients have no other."""
    named = call.settings.strategy
    if named in OURS and layout.moves and call.product != "w":
        raise NotImplementedError(
            f"entwine_jax.collective_matmul: strategy={named!r} can't run {OPERANDS[call.product][0]} @ "
            f"{'w' if call.product == 'y' else 'w.T'}: {layout.reason}; or use strategy='auto', which leaves it to XLA"
        )


def team_of(layout: Layout, mesh: Mesh) -> Team | None:
    """The layout's team on a mesh that is manual as a whole."""
    sizes = dict(mesh.shape)
    return _team.along(layout.team, sizes, tuple(sizes), mesh.devices.flat[0].platform) if layout.team else None
