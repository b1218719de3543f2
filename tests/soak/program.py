"""Builds a drawn program: its jitted function, inputs on the devices, and what NumPy says of the results.

A launch takes one of several x and one of several w, changing from launch to launch, and returns no result but how many
elements of each are wrong on each device: so launches can follow each other without a pause, and a stale result is a
wrong one.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu.harness import delayed
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
from soak.draw import Call, Program, exact

XS, WS = 3, 2  # different inputs
SCALES = (0.5, 0.5)  # of float8 operands


class Built:
    def __init__(self, program: Program, seed: int) -> None:
        self.program = program
        devices = np.array([jax.devices()[i] for i in program.order]).reshape(program.shape)
        self.mesh = Mesh(devices, program.names)
        self.team = program.axis if len(program.axis) > 1 else program.axis[0]
        inputs = _Inputs(program, seed)
        specs = _Specs(program, self.team)
        values: dict[str, list[np.ndarray]] = {
            "x": inputs.x,
            "w": inputs.w_as_it_lies(),
            "bias": inputs.bias,
            "dy": inputs.dy,
        }
        values["want"] = inputs.wants()
        places: dict[str, list[P]] = {
            "x": specs.x,
            "w": specs.w,
            "bias": specs.bias,
            "dy": specs.dy,
            "want": specs.results,
        }
        dtypes = {
            "x": [program.dtype] * len(inputs.x),
            "w": ["float8_e4m3fn" if program.float8 else program.dtype] * len(inputs.w),
            "bias": [program.result] * len(inputs.bias),
            "dy": [program.result] * len(inputs.dy),
            "want": inputs.dtypes,
        }
        self.data = {
            name: [self._put(*each) for each in zip(values[name], places[name], dtypes[name], strict=True)]
            for name in values
        }
        stacked = {name: [P(None, *spec) for spec in place] for name, place in places.items()}
        self.run = jax.jit(
            jax.shard_map(
                self._rank,
                mesh=self.mesh,
                in_specs=(P(), P(), P(), P(), stacked),
                out_specs=P(program.names),
                check_vma=program.check_vma,
            )
        )

    def launch(self, i: int, j: int, slow: int, steps: int) -> jax.Array:
        """Which x, which w; a rank that is late, and how much. (devices, results, 4): see `_compared`."""
        wrong: jax.Array = self.run(*map(np.int32, (i, j, slow, steps)), self.data)
        return wrong

    def _put(self, value: np.ndarray, spec: P, dtype: str) -> Any:
        return jax.device_put(value.astype(jnp.dtype(dtype)), NamedSharding(self.mesh, P(None, *spec)))

    def _rank(self, i: jax.Array, j: jax.Array, slow: jax.Array, steps: jax.Array, data: Any) -> jax.Array:
        xs = [delayed(x[i], self.team, slow, steps) for x in data["x"]]
        ws, biases, dys = ([each[j] for each in data[name]] for name in ("w", "bias", "dy"))
        results = _results(self.program, self.team, xs, ws, biases, dys)
        wrong = [_compared(y, want[i * WS + j]) for y, want in zip(results, data["want"], strict=True)]
        # Varying over all axes, as out_specs says.
        return jnp.stack(wrong)[None] + 0 * lax.axis_index(self.program.names)


def _compared(got: jax.Array, want: jax.Array) -> jax.Array:
    """How many elements differ, the first of them in the rank's flat array, and it and what it should be."""
    assert got.shape == want.shape and got.dtype == want.dtype, (got, want)
    different = (got != want).ravel()  # NaN too
    first = jnp.argmax(different)
    numbers = [jnp.sum(different), first, got.ravel()[first], want.ravel()[first]]
    return jnp.stack([number.astype(jnp.float32).astype(jnp.int32) for number in numbers])


# What a rank does


def _op(call: Call, program: Program, team: Any, ws: Iterator[Any], biases: Iterator[Any]) -> Callable[..., Any]:
    """The op as a function of x and its w, or all its w; takes those of `ws` and `biases` that are its own."""
    options: dict[str, Any] = {"return_gathered": True} if call.gathered else {}
    if program.float8:
        options["scales"] = tuple(map(jnp.float32, SCALES))
    w = list(itertools.islice(ws, call.weights))
    bias = list(itertools.islice(biases, call.weights)) if call.bias else [None] * call.weights
    activation = [call.activation] * call.weights
    several = call.weights > 1
    op = functools.partial(
        getattr(entwine_jax, call.op),
        axis_name=team,
        strategy="fused",
        preferred_element_type=jnp.dtype(program.result),
        config=entwine_jax.Config(**dict(call.config)),
        transpose_w=call.transpose_w,
        bias=bias if several else bias[0],
        activation=activation if several else activation[0],
        **options,
    )
    return lambda x, given=None: op(x, given if given is not None else w if several else w[0])


def _results(program: Program, team: Any, xs: list[Any], ws: list[Any], biases: list[Any], dys: list[Any]) -> list[Any]:
    turn = functools.partial(_layers, program, team, ws, biases)
    if program.kind == "chain":
        return [turn(xs[0])]
    if program.kind == "loop":
        return [lax.fori_loop(0, program.turns, lambda _, x: turn(x), xs[0])]
    w, bias = iter(ws), iter(biases)
    ops = [_op(call, program, team, w, bias) for call in program.calls]
    if program.kind == "gradient":
        y, pull_back = jax.vjp(ops[0], xs[0], ws[0])
        return [y, *pull_back(dys[0])]
    return [y for op, x in zip(ops, xs, strict=True) for y in jax.tree.leaves(op(x))]


def _layers(program: Program, team: Any, ws: Sequence[Any], biases: Sequence[Any], x: Any) -> Any:
    """Up and down; signs in between keep the integers small. Ends with the rank's own rows, as it begins."""
    w, bias = iter(ws), iter(biases)
    for call in program.calls:
        x = jnp.sign(_op(call, program, team, w, bias)(x)).astype(program.dtype)
        if call.op == "matmul_all_reduce":
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(team) * call.m_shard, call.m_shard, x.ndim - 2)
    return x


class _Specs:
    """How x, w, bias, dy and the results lie, without the dimension of the inputs' number."""

    def __init__(self, program: Program, team: Any) -> None:
        led = (program.other,) if program.other else ()
        self.x, self.w, self.bias, self.dy, self.results = [], [], [], [], []
        chained = program.kind in ("chain", "loop")
        for i, call in enumerate(program.calls):
            lead = (*led, *(None,) * (len(call.batch) - len(led)))
            rows, columns, whole = P(*lead, team, None), P(*lead, None, team), P(*lead, None, None)
            gather = call.op == "all_gather_matmul"
            x, across = (rows, (None, team)) if gather else (columns, (team, None))
            w = P(*across[::-1] if call.transpose_w else across)
            y = columns if gather else rows if call.op == "matmul_reduce_scatter" else whole
            self.w += [w] * call.weights
            self.bias += [P(team if gather else None)] * call.weights * call.bias
            if chained:
                self.x, self.results = [rows], [rows]
                continue
            self.x.append(x)
            self.results += [y] * call.weights + ([whole] if call.gathered else [])
            if program.kind == "gradient":
                self.dy, self.results = [y], [y, x, w]
            assert i == 0 or program.kind == "independent"


class _Inputs:
    """Global integers, sparse enough that every sum is one that the result's dtype holds."""

    def __init__(self, program: Program, seed: int) -> None:
        self.program, self.rng = program, np.random.default_rng(seed)
        ranks, result = program.ranks, program.result
        self.bound = exact(result)
        self.x: list[np.ndarray] = []
        self.w: list[np.ndarray] = []  # (k, n)
        self.bias: list[np.ndarray] = []
        self.dy: list[np.ndarray] = []
        self.dtypes: list[str] = []
        chained = program.kind in ("chain", "loop")
        for call in program.calls:
            gather, rows = call.op == "all_gather_matmul", call.rows(ranks)
            k, n = (call.k, call.n * ranks) if gather else (call.k * ranks, call.n)
            if not (chained and self.x):
                self.x.append(self.signs((XS, *call.batch, rows, k), 1))
            terms = max(k, n) if program.kind == "gradient" else k
            self.w += [self.signs((WS, k, n), terms) for _ in range(call.weights)]
            self.bias += [self.signs((WS, n), 1) for _ in range(call.weights * call.bias)]
            self.dtypes += [result] * call.weights + ([program.dtype] if call.gathered else [])
            if program.kind == "gradient":
                self.bound = min(self.bound, exact(program.dtype))
                total = int(np.prod(call.batch, initial=1)) * rows
                self.dy.append(self.signs((WS, *call.batch, rows, n), max(n, total)))
                self.dtypes = [result, program.dtype, program.dtype]
        if chained:
            self.dtypes = [program.dtype]

    def signs(self, shape: tuple[int, ...], terms: int) -> np.ndarray:
        """-1, 0 and 1; so many zeros that sums of `terms` products stay some seven deviations below the bound."""
        kept = min(1.0, 2.25 * (self.bound / 7) ** 2 / terms)
        drawn = self.rng.integers(-1, 2, shape, np.int8)
        drawn[self.rng.random(shape, np.float32) > kept] = 0
        return drawn.astype(np.float32)

    def w_as_it_lies(self) -> list[np.ndarray]:
        each = [call.transpose_w for call in self.program.calls for _ in range(call.weights)]
        return [w.swapaxes(1, 2) if transpose else w for w, transpose in zip(self.w, each, strict=True)]

    def product(self, x: np.ndarray, w: np.ndarray) -> np.ndarray:
        """Exact in float32, whatever the order: every term is -1, 0 or 1, and there are fewer than 2^24."""
        y: np.ndarray = x @ w
        largest = np.abs(y).max() + 4  # a bias beside a float8 product is 4 of its units
        assert largest <= self.bound, f"the test's inputs are too large: {largest} in a result of {self.program.result}"
        return y

    def results(self, call: Call, x: np.ndarray, j: int, ws: Iterator[np.ndarray], biases: Iterator[np.ndarray]) -> Any:
        """A call's, one for each w."""
        for w in itertools.islice(ws, call.weights):
            y = self.product(x, w[j])
            y = y * (SCALES[0] * SCALES[1]) if self.program.float8 else y
            y = y + next(biases)[j] if call.bias else y
            yield np.maximum(y, 0) if call.activation else y

    def wants(self) -> list[np.ndarray]:
        """Of each result, those of all inputs: number i * WS + j is that of x i and w j."""
        every = [self.of(i, j) for i in range(XS) for j in range(WS)]
        return [np.stack(each) for each in zip(*every, strict=True)]

    def of(self, i: int, j: int) -> list[np.ndarray]:
        program, x = self.program, self.x[0][i]
        if program.kind in ("chain", "loop"):
            for _ in range(program.turns):
                ws, biases = iter(self.w), iter(self.bias)
                for call in program.calls:
                    x = np.sign(next(self.results(call, x, j, ws, biases)))
            return [x]
        results, ws, biases = [], iter(self.w), iter(self.bias)
        for call, each in zip(program.calls, self.x, strict=True):
            results += self.results(call, each[i], j, ws, biases)
            results += [each[i]] if call.gathered else []
        if program.kind == "gradient":
            w, dy = self.w[0][j], self.dy[0][j]
            flat = [v.reshape(-1, v.shape[-1]) for v in (x, dy)]
            dw = self.product(flat[0].T, flat[1])
            results += [self.product(dy, w.T), dw.T if program.calls[0].transpose_w else dw]
        return results
