"""Errors of the user: operands, types, shapes and meshes. Each names the op, the argument, the values and the fix."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

# Ops that take x stored (..., k, rows) too.
_READ_BY_COLUMNS = ("matmul_reduce_scatter", "matmul_all_reduce")


def arrays(op: str, x: Any, w: Any) -> tuple[jax.Array, jax.Array]:
    for name, value in (("x", x), ("w", w)):
        if not isinstance(value, jax.Array | np.ndarray):
            raise TypeError(f"entwine_jax.{op}: {name} must be a JAX or NumPy array, not {type(value).__name__}")
    return jnp.asarray(x), jnp.asarray(w)


def several(op: str, ws: Any) -> None:
    if not ws:
        raise TypeError(f"entwine_jax.{op}: w={ws!r} is empty but must hold at least one matrix")


def pairs(op: str, xs: Any, ws: Any) -> None:
    """Of a sum of products."""
    for name, value in (("x", xs), ("w", ws)):
        if not isinstance(value, tuple | list):
            raise TypeError(
                f"entwine_jax.{op}: {name} is {type(value).__name__} and the other operand several, but there must "
                "be an x and a w for each product: pass tuples of as many"
            )
    several(op, ws)
    if len(xs) != len(ws):
        raise TypeError(f"entwine_jax.{op}: x holds {len(xs)} arrays and w {len(ws)}, but each product has one of both")


def summed_rows(op: str, transpose_x: bool) -> None:
    """Of the x of a sum of products."""
    if transpose_x:
        raise NotImplementedError(
            f"entwine_jax.{op}: transpose_x=True is for one product, but x and w are several: pass each x as "
            "(..., m, k), jnp.swapaxes(x, -1, -2), or add up calls of one product each"
        )


def summands(op: str, shapes: list[tuple[tuple[int, ...], int]]) -> None:
    """That products which are added are alike; of each its x's shape and its columns."""
    (x, n), *others = shapes
    for i, (its_x, its_n) in enumerate(others, 1):
        if its_x[:-1] != x[:-1]:
            raise TypeError(
                f"entwine_jax.{op}: x[{i}] has shape {its_x} and x[0] {x}, but all products are added: they must "
                "differ in the last dimension only"
            )
        if its_n != n:
            raise TypeError(
                f"entwine_jax.{op}: w[{i}] has {its_n} columns and w[0] {n}, but all products are added: they must "
                "have as many"
            )


def shapes(
    op: str,
    x: tuple[int, ...],
    w: tuple[int, ...],
    team: int,
    axis_name: tuple[str, ...],
    transpose_w: bool = False,
    base: str | None = None,
    transpose_x: bool = False,
) -> None:
    """x (..., rows, k) or transposed (..., k, rows), w (k, n) or transposed (n, k); the rows that reduce-scatter
    divides must be a multiple of the team's size. `base` is the op where users know it by another name."""
    if len(x) < 2:
        needed = "a contraction and rows, (..., k, rows)" if transpose_x else "rows and a contraction, (..., rows, k)"
        raise TypeError(f"entwine_jax.{op}: x has shape {x} but needs {needed}; add a dimension")
    if len(w) != 2:
        matrix = "(n, k)" if transpose_w else "(k, n)"
        raise TypeError(
            f"entwine_jax.{op}: w has shape {w} but must be a matrix {matrix}; use jax.vmap for a batch of them"
        )
    contracted, other = (w[1], w[0]) if transpose_w else w
    k, rows = (x[-2], x[-1]) if transpose_x else (x[-1], x[-2])
    if k != contracted:
        hint = ""
        if transpose_x and rows == contracted:
            hint = "; x would fit without transpose_x=True"
        elif k == other:
            fits = "w would fit without transpose_w=True"
            hint = f"; {fits if transpose_w else "w's transpose would fit: pass transpose_w=True"}"
        elif rows == contracted and op in _READ_BY_COLUMNS:
            hint = "; x's transpose would fit: pass transpose_x=True"
        raise TypeError(
            f"entwine_jax.{op}: the last dimension {'but one ' if transpose_x else ''}of x {x} has size {k} but the "
            f"{'last' if transpose_w else 'first'} of w {w} has size {contracted}; they are contracted and must be "
            f"equal{hint}"
        )
    if (base or op) == "matmul_reduce_scatter" and rows % team:
        raise ValueError(
            f"entwine_jax.{op}: x {x} has {rows} rows, which the {team} ranks of axis {axis(axis_name)} can't share "
            f"evenly; pad the rows to {math.ceil(rows / team) * team}"
        )


def types(op: str, x: Any, w: Any, preferred: Any, precision: Any) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """The operands' common dtype and the result's, by the rules of jnp.matmul."""
    try:
        operand = jnp.result_type(x, w)
    except ValueError as error:  # jax.dtypes.TypePromotionError
        raise TypeError(
            f"entwine_jax.{op}: x is {x.dtype} and w is {w.dtype}, which don't promote under "
            f"jax_numpy_dtype_promotion={jax.config.jax_numpy_dtype_promotion!r}; cast one of them"
        ) from error
    if operand == jnp.bool_:
        raise TypeError(
            f"entwine_jax.{op}: x and w are both bool, which can't be summed; cast one of them to a number type"
        )
    return operand, result_type(op, operand, preferred, precision)


def result_type(op: str, operand: Any, preferred: Any, precision: Any) -> np.dtype[Any]:
    """jnp.matmul itself judges precision and preferred_element_type."""
    one = jax.ShapeDtypeStruct((1, 1), operand)
    matmul = lambda a, b: jnp.matmul(a, b, precision=precision, preferred_element_type=preferred)  # noqa: E731
    try:
        made: np.dtype[Any] = jax.eval_shape(matmul, one, one).dtype
        return made
    except (TypeError, ValueError, KeyError) as error:
        raise type(error)(
            f"entwine_jax.{op}: preferred_element_type={preferred!r} and precision={precision!r} "
            f"don't suit operands of {operand}: {error}"
        ) from error


def axis(names: tuple[str, ...]) -> str:
    """An axis name as the user wrote it."""
    return repr(names[0] if len(names) == 1 else names)


def team(op: str, axis_name: Any) -> tuple[str, ...] | None:
    """The axes of a team, None if none is named."""
    if axis_name is None:
        return None
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    if not names or len(set(names)) < len(names):
        raise ValueError(f"entwine_jax.{op}: axis_name={axis_name!r} must name one mesh axis or several different ones")
    return names


def spec(op: str, out_sharding: Any, ndim: int) -> PartitionSpec | None:
    """out_sharding with an entry for each dimension."""
    if out_sharding is None:
        return None
    given = out_sharding.spec if isinstance(out_sharding, NamedSharding) else out_sharding
    if not isinstance(given, PartitionSpec):
        raise TypeError(
            f"entwine_jax.{op}: out_sharding={out_sharding!r} must be a jax.sharding.PartitionSpec or NamedSharding"
        )
    if len(given) > ndim:
        raise ValueError(f"entwine_jax.{op}: out_sharding={given} has {len(given)} dimensions, the result only {ndim}")
    used = [name for entry in given for name in _axes(entry)]
    for name in used:
        if used.count(name) > 1:
            raise ValueError(f"entwine_jax.{op}: out_sharding={given} uses axis {name!r} twice; one dimension has it")
    return PartitionSpec(*given, *[None] * (ndim - len(given)))


def _axes(entry: Any) -> tuple[str, ...]:
    """Of one dimension of a PartitionSpec; None and P.UNCONSTRAINED name none."""
    return (entry,) if isinstance(entry, str) else tuple(entry) if isinstance(entry, tuple | list) else ()


def axes_of_mesh(op: str, mesh: Any, team: tuple[str, ...] | None, out_sharding: PartitionSpec | None) -> None:
    """That a mesh, where it is known, has the axes."""
    arguments = {
        "axis_name": (team and axis(team), team or ()),
        "out_sharding": (out_sharding, [name for entry in out_sharding or () for name in _axes(entry)]),
    }
    for argument, (value, names) in arguments.items():
        for name in names:
            if not mesh.empty and name not in mesh.axis_names:
                sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
                raise ValueError(
                    f"entwine_jax.{op}: {argument}={value} names {name!r}, but the axes of the mesh are {sizes}"
                )


def op_inside(op: str, team: tuple[str, ...], out_sharding: PartitionSpec | None, saves: bool) -> str:
    """The op that, inside a shard_map, puts the result where it is wanted; `saves` if it is to keep what it gathers."""
    if out_sharding is None:
        raise ValueError(
            f"entwine_jax.{op}: inside jax.shard_map, axis_name={axis(team)} needs out_sharding= too: columns over it "
            "for all_gather_matmul, rows for matmul_reduce_scatter, neither for the sum on every rank"
        )
    dims = [_axes(entry) for entry in out_sharding]
    places = [i - len(dims) for i, axes in enumerate(dims) if {*axes} & {*team}]
    if not places:
        return _without_residuals(op, "matmul_all_reduce", out_sharding, saves)
    if len(places) > 1 or places[0] < -2 or dims[places[0]][-len(team) :] != team:
        raise ValueError(
            f"entwine_jax.{op}: out_sharding={out_sharding} must have axis_name={axis(team)} as it is at rows (the "
            "last dimension but one), at columns (the last), or nowhere"
        )
    if places[0] == -1:
        return "all_gather_matmul"
    return _without_residuals(op, "matmul_reduce_scatter", out_sharding, saves)


def _without_residuals(op: str, found: str, out_sharding: PartitionSpec, saves: bool) -> str:
    if saves:
        raise ValueError(
            f"entwine_jax.{op}: residuals='save' keeps what all_gather_matmul has gathered, but "
            f"out_sharding={out_sharding} means {found} here, which gathers nothing; leave residuals out"
        )
    return found


def bias(op: str, value: Any, columns: int, dtype: np.dtype[Any], argument: str = "bias") -> jax.Array | None:
    """A bias of a result of so many columns and that dtype."""
    if value is None:
        return None
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"entwine_jax.{op}: {argument} must be a JAX or NumPy array, not {type(value).__name__}")
    made = jnp.asarray(value)
    if made.shape != (columns,):
        raise TypeError(
            f"entwine_jax.{op}: {argument} has shape {made.shape} but must have one number for each column of the "
            f"result, ({columns},){_bias_hint(made.shape, columns)}"
        )
    kinds = [next((k for k in (np.floating, np.integer) if jnp.issubdtype(t, k)), t) for t in (made.dtype, dtype)]
    if kinds[0] != kinds[1]:
        raise TypeError(
            f"entwine_jax.{op}: {argument} is {made.dtype} but the result {dtype}; cast it, "
            f"{argument}.astype({dtype.name!r}) say"
        )
    return made


def activated(op: str, activation: str | None, dtype: np.dtype[Any]) -> None:
    if activation is not None and not jnp.issubdtype(dtype, np.floating):
        raise TypeError(
            f"entwine_jax.{op}: activation={activation!r} is for real floating-point results, not {dtype}; pass "
            "preferred_element_type=jnp.float32, or apply it to the result"
        )


def one_each(op: str, argument: str, value: Any, weights: int) -> list[Any]:
    """An argument that several weights have one of each."""
    if value is None:
        return [None] * weights
    if not isinstance(value, tuple | list) or len(value) != weights:
        given = f"{argument}={value!r}" if argument == "activation" else f"{argument}, {type(value).__name__}"
        if isinstance(value, tuple | list):
            given = f"{argument} of {len(value)}"
        raise ValueError(
            f"entwine_jax.{op}: w holds {weights} weights, so {given} must be a sequence of {weights}, one for each "
            f"and None for those without: {argument}=({', '.join(['...'] * weights)})"
        )
    return [*value]


def _bias_hint(shape: tuple[int, ...], columns: int) -> str:
    if math.prod(shape) == columns:
        return f"; reshape it to ({columns},)"
    if len(shape) == 1 and columns and shape[0] % columns == 0:
        return "; pass the rank's shard of it, as of w"
    return "; use jax.vmap for a batch of them" if len(shape) == 2 and shape[1] == columns else ""
