"""The custom calls with any attributes, shapes and dtypes: the right result or an error, never a crash or a hang.

tests/cc/problem_fuzz_test.cc does the same to the decoding alone, a thousand times as often and under sanitizers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import OPS, PUBLIC, integers, mesh_of, product, spread
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from entwine_jax import Config

RANKS = 2
PLAN = ("tile_m", "tile_n", "raster", "lead", "transport", "pushers", "copiers", "few_rows", "movers")
ATTRIBUTES = (
    "team_size",
    "transpose_w",
    "transpose_x",
    "products",
    "gated",
    "biased",
    "activation",
    "scaled",
    *PLAN,
    "timeout_ms",
    "workers",
    "stall_us",
    "stall_seed",
)
GOOD = dict.fromkeys(ATTRIBUTES, 1) | {
    "team_size": RANKS,
    "transpose_w": 0,
    "transpose_x": 0,
    "gated": 0,
    "biased": 0,
    "activation": 0,
    "scaled": 0,
    "few_rows": 0,
    "movers": 0,
    "timeout_ms": 2000,
    "stall_us": 0,
}
# What waits for a peer that never comes must end soon; a stall mustn't last.
LARGEST = {"timeout_ms": 2000, "stall_us": 2000}

edges = st.sampled_from([-(2**63), -(2**31), -1, 0, 1, 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**62, 2**63 - 1])
odd = st.one_of(edges, st.integers(-(2**63), 2**63 - 1), st.integers(0, 70))
sizes = st.sampled_from([0, 1, 2, 3, 7, 32, 33])
profile = settings(
    max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


def shapes_of(op, batch, m_shard, n, k):
    """Of one rank's x, w and y."""
    whole = m_shard * RANKS
    x_rows, y_rows = {"all_gather_matmul": (m_shard, whole), "matmul_reduce_scatter": (whole, m_shard)}.get(
        op, (whole, whole)
    )
    return [(batch, x_rows, k), (k, n), (batch, y_rows, n)]


def call(op, shapes, dtypes, attributes, groups, places):
    """The custom call as it is on both ranks, ones times ones; `places` are what the ranks think their team and rank
    to be. Returns the ranks' results, or raises what XLA does."""

    def rank(where):
        x, w = (jnp.ones(shape, dtype) for shape, dtype in zip(shapes[:2], dtypes[:2], strict=True))
        result = jax.ShapeDtypeStruct(shapes[2], dtypes[2])
        numbers = {name: np.int64(value) for name, value in attributes.items()}
        y = jax.ffi.ffi_call(f"entwine_{op}", result)(x, w, where[0], groups=np.array(groups, np.int64), **numbers)
        return y[None]

    mesh = mesh_of((RANKS,))
    run = jax.jit(jax.shard_map(rank, mesh=mesh, in_specs=P("t"), out_specs=P("t"), check_vma=False))
    return np.asarray(run(jnp.asarray(places, jnp.int32))).astype(np.float64)


def works(op):
    """The next call is well again."""
    shapes = shapes_of(op, 2, 3, 5, 4)
    y = call(op, shapes, [jnp.float32] * 3, GOOD, [0, 1], [(0, 0), (0, 1)])
    np.testing.assert_array_equal(y, 4.0 * (1 if op == "all_gather_matmul" else RANKS))


@profile
@given(st.sampled_from(OPS), st.dictionaries(st.sampled_from(ATTRIBUTES), odd, min_size=1, max_size=3))
def test_attributes(op, odd_ones):
    attributes = GOOD | {name: min(value, LARGEST.get(name, value)) for name, value in odd_ones.items()}
    shapes = shapes_of(op, 2, 3, 5, 5)  # w transposed or not
    try:
        y = call(op, shapes, [jnp.float32] * 3, attributes, [0, 1], [(0, 0), (0, 1)])
    except jax.errors.JaxRuntimeError as error:
        assert f"entwine_jax.{op}" in str(error)
    else:
        # relu leaves it as it is, the others almost.
        near = 0 if attributes["activation"] <= 1 else 0.01
        np.testing.assert_allclose(y, 5.0 * (1 if op == "all_gather_matmul" else RANKS), rtol=near)
    works(op)


@profile
@given(
    st.sampled_from(OPS),
    st.tuples(sizes, sizes, sizes, sizes),
    st.dictionaries(
        st.sampled_from(range(3)), st.lists(sizes, min_size=0, max_size=4).map(tuple), min_size=0, max_size=2
    ),
    st.lists(
        st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16, jnp.int8, jnp.int4, jnp.bool_, jnp.float8_e5m2]),
        min_size=3,
        max_size=3,
    ),
    st.booleans(),
)
def test_shapes_and_dtypes(op, numbers, replaced, dtypes, alike):
    good = shapes_of(op, *numbers)
    shapes = [replaced.get(i, shape) for i, shape in enumerate(good)]
    dtypes = [dtypes[0]] * 3 if alike else dtypes
    try:
        y = call(op, shapes, dtypes, GOOD, [0, 1], [(0, 0), (0, 1)])
    except jax.errors.JaxRuntimeError as error:
        assert f"entwine_jax.{op}" in str(error)
    else:
        if y.size:  # else XLA makes no call at all
            assert shapes == good
            np.testing.assert_array_equal(y, float(shapes[0][2] * (1 if op == "all_gather_matmul" else RANKS)))
    works(op)


SEVERAL = (4, 7, 1, 33)  # the size that each product has of its own


def several(op, count, biased, attributes, spoiled):
    """As `call`, of `count` products, of which `spoiled` replaces some operands' and results' shapes and dtypes, by
    their places, or leaves them out (None). Returns the results of the ranks."""
    gather, m_shard, other = op == "all_gather_matmul", 3, 5
    x_shape, _, y_shape = shapes_of(op, 2, m_shard, 1, 1)
    pairs = [(other, size) if gather else (size, other) for size in SEVERAL[:count]]
    xs = [(*x_shape[:2], k) for k, _ in pairs]
    ys = [(*y_shape[:2], n) for _, n in pairs] if gather else [(*y_shape[:2], other)]
    more = [shape for i in range(1, count) for shape in ((pairs[i],) if gather else (xs[i], pairs[i]))]
    biases = [(pairs[i][1],) for i in range(len(ys)) if biased >> i & 1]
    arguments = [(shape, jnp.float32) for shape in (xs[0], pairs[0], *more, *biases)]
    results = [(shape, jnp.float32) for shape in ys]
    for place, instead in spoiled.items():
        of = arguments if place < len(arguments) else results
        of[place if place < len(arguments) else (place - len(arguments)) % len(results)] = instead
    arguments, results = ([each for each in of if each is not None] for of in (arguments, results))
    numbers = {
        name: np.int64(value) for name, value in (GOOD | {"products": count, "biased": biased} | attributes).items()
    }

    def rank(where):
        values = [jnp.ones(shape, dtype) for shape, dtype in arguments]
        types = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
        run = jax.ffi.ffi_call(f"entwine_{op}", types)
        made = run(*values[:2], where[0], *values[2:], groups=np.array([0, 1], np.int64), **numbers)
        return [y[None] for y in made]

    run = jax.jit(jax.shard_map(rank, mesh=mesh_of((RANKS,)), in_specs=P("t"), out_specs=P("t"), check_vma=False))
    return [np.asarray(y).astype(np.float64) for y in run(jnp.asarray([(0, 0), (0, 1)], jnp.int32))]


def right(op, ys, count, biased):
    """Ones times ones."""
    for i, y in enumerate(ys):
        sum_of = 5 if op == "all_gather_matmul" else RANKS * sum(SEVERAL[:count])
        np.testing.assert_array_equal(y, sum_of + (biased >> i & 1))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_several_products(op, count):
    """Good ones, with and without biases."""
    for biased in (0, 1, 2**count - 1) if op == "all_gather_matmul" else (0, 1):
        right(op, several(op, count, biased, {}, {}), count, biased)


instead = st.none() | st.tuples(
    st.lists(sizes, min_size=0, max_size=4).map(tuple), st.sampled_from([jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4])
)


@profile
@given(
    st.sampled_from(OPS),
    st.integers(2, 4),
    st.integers(0, 15),
    st.dictionaries(
        st.sampled_from(["products", "gated", "biased", "activation", "scaled", "tile_n"]), odd, max_size=2
    ),
    st.dictionaries(st.integers(0, 14), instead, max_size=2),
)
def test_spoiled_products(op, count, biased, odd_ones, spoiled):
    """Operands that are missing, too many, of other shapes and types than the attributes say."""
    assume(not any(place in (0, 1) and of is None for place, of in spoiled.items()))
    try:
        ys = several(op, count, biased, odd_ones, spoiled)
    except jax.errors.JaxRuntimeError as error:
        # Where the handler itself lacks an operand or a result, it is XLA that says so.
        assert f"entwine_jax.{op}" in str(error) or "Wrong number of" in str(error), error
    else:
        # Without results, or with empty ones, XLA makes no call at all.
        if ys and all(y.size for y in ys) and odd_ones.get("activation", 0) <= 1:
            right(op, ys, count, biased)
    works(op)


@profile
@given(
    st.sampled_from(OPS),
    st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 3), max_size=6),
    st.lists(st.tuples(st.integers(-3, 3), st.integers(-3, 3)), min_size=2, max_size=2),
)
def test_places(op, groups, places):
    """Ranks that don't know who they are, in teams that don't exist; also two that think to be the same one."""
    try:
        y = call(op, shapes_of(op, 1, 3, 5, 4), [jnp.float32] * 3, GOOD | {"timeout_ms": 100}, groups, places)
    except jax.errors.JaxRuntimeError as error:
        assert f"entwine_jax.{op}" in str(error)
    else:
        assert {rank for _, rank in places} == {0, 1} and places[0][0] == places[1][0]
        np.testing.assert_array_equal(y, 4.0 * (1 if op == "all_gather_matmul" else RANKS))
    works(op)


numbers = st.one_of(st.sampled_from([0, 1, 2, 31, 32, 33, 2**16, 2**30, 2**31 - 2, 2**31 - 1]), st.integers(0, 80))


@profile
@given(
    st.sampled_from(OPS),
    st.sampled_from(["fused", "resident"]),
    st.fixed_dictionaries(
        {},
        optional=dict.fromkeys(
            ("lead", "raster", "pushers", "copiers", "tile_m", "tile_n", "comm_sms", "stall_seed"), numbers
        )
        | {"transport": st.sampled_from(["pull", "push"]), "workers": st.integers(1, 5)},
    ),
)
def test_configs(op, strategy, numbers):
    """What `Config` accepts gives the right result."""
    try:
        config = Config(**numbers)
    except ValueError as error:
        assert "entwine_jax.Config" in str(error)
        return
    x, w = integers((4 * 21, 8), 1), integers((8, 4 * 10), 2)
    rank = lambda op, x, w, axis: PUBLIC[op](x, w, axis, config=config, strategy=strategy)  # noqa: E731
    np.testing.assert_array_equal(np.asarray(jax.jit(spread(rank, op, mesh_of((4,))))(x, w)), product(x, w))


def test_missing_and_mistyped_attributes():
    x, w, where = jnp.ones((1, 2, 4)), jnp.ones((4, 5)), jnp.zeros(2, jnp.int32)
    result = jax.ShapeDtypeStruct((1, 4, 5), jnp.float32)
    good = {name: np.int64(value) for name, value in GOOD.items()} | {"groups": np.array([0, 1], np.int64)}
    for spoilt in (
        {},
        {name: value for name, value in good.items() if name != "raster"},
        good | {"raster": 1.5},
        good | {"raster": "1"},
        good | {"groups": np.array([0, 1], np.float32)},
        good | {"groups": np.int64(2)},
    ):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.ffi.ffi_call("entwine_all_gather_matmul", result)(x, w, where, **spoilt).block_until_ready()
    # Too few operands and results, too many of them.
    for operands, results in (((x, w), result), ((x, w, where, x, x), [result, result])):
        with pytest.raises(jax.errors.JaxRuntimeError):
            jax.block_until_ready(jax.ffi.ffi_call("entwine_all_gather_matmul", results)(*operands, **good))
