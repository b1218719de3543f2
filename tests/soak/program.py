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
from gpu.harness import delayed, put
from jax import lax
from jax.sharding import Mesh
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
        return put(value.astype(jnp.dtype(dtype)), self.mesh, P(None, *spec))

    def _rank(self, i: jax.Array, j: jax.Array, slow: jax.Array, steps: jax.Array, data: Any) -> jax.Array:
        firsts = {*itertools.accumulate((call.xs for call in self.program.calls), initial=0)}
        xs = [delayed(x[i], self.team, slow, steps) if k in firsts else x[i] for k, x in enumerate(data["x"])]
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
    """The op as a function of x and w, or of all its x and w; takes those of `ws` and `biases` that are its own."""
    options: dict[str, Any] = {"return_gathered": True} if call.gathered else {}
    if program.float8:
        options["scales"] = tuple(map(jnp.float32, SCALES))
    w = tuple(itertools.islice(ws, len(call.sizes)))
    bias = list(itertools.islice(biases, call.sums)) if call.bias else [None] * call.sums
    if call.gated:
        options["gated"] = True
    op = functools.partial(
        getattr(entwine_jax, call.op),
        axis_name=team,
        strategy="fused",
        preferred_element_type=jnp.dtype(program.result),
        config=entwine_jax.Config(**dict(call.config)),
        transpose_w=call.transpose_w,
        bias=bias if call.sums > 1 else bias[0],
        activation=[call.activation] * call.ys if call.ys > 1 else call.activation,
        **options,
    )
    return lambda x, given=None: op(x, given if given is not None else w if call.more else w[0])


def _results(program: Program, team: Any, xs: list[Any], ws: list[Any], biases: list[Any], dys: list[Any]) -> list[Any]:
    turn = functools.partial(_layers, program, team, ws, biases)
    if program.kind == "chain":
        return [turn(xs[0])]
    if program.kind == "loop":
        return [lax.fori_loop(0, program.turns, lambda _, x: turn(x), xs[0])]
    x, w, bias = iter(xs), iter(ws), iter(biases)
    ops = [_op(call, program, team, w, bias) for call in program.calls]
    its = [tuple(itertools.islice(x, call.xs)) for call in program.calls]
    if program.kind == "gradient":
        (call,) = program.calls
        given = its[0] if call.xs > 1 else its[0][0], tuple(ws) if call.more else ws[0]
        y, pull_back = jax.vjp(ops[0], *given)
        return [*jax.tree.leaves(y), *jax.tree.leaves(pull_back(tuple(dys) if call.ys > 1 else dys[0]))]
    return [y for op, x in zip(ops, its, strict=True) for y in jax.tree.leaves(op(x if len(x) > 1 else x[0]))]


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
            x, across = (rows, (None, team)) if call.gathers else (columns, (team, None))
            w = P(*across[::-1] if call.transpose_w else across)
            y = columns if call.gathers else rows if call.op == "matmul_reduce_scatter" else whole
            self.w += [w] * len(call.sizes)
            self.bias += [P(team if call.gathers else None)] * call.sums * call.bias
            if chained:
                self.x, self.results = [rows], [rows]
                continue
            self.x += [x] * call.xs
            self.results += [y] * call.ys + ([whole] if call.gathered else [])
            if program.kind == "gradient":
                self.dy = [y] * call.ys
                self.results += [x] * call.xs + [w] * len(call.sizes)
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
            rows = call.rows(ranks)
            sizes = [(k, n * ranks) if call.gathers else (k * ranks, n) for k, n in call.sizes]
            if not (chained and self.x):
                self.x += [self.signs((XS, *call.batch, rows, k), 1) for k, _ in sizes[: call.xs]]
            # What is added up: all k of a sum; for dx all n of several weights.
            k, n = sum(k for k, _ in sizes[: call.xs]), sum(n for _, n in sizes[: call.ys])
            terms = max(k, n) if program.kind == "gradient" else k
            self.w += [self.signs((WS, *size), terms) for size in sizes]
            self.bias += [self.signs((WS, n), 1) for _, n in sizes[: call.sums * call.bias]]
            self.dtypes += [result] * call.ys + ([program.dtype] if call.gathered else [])
            if program.kind == "gradient":
                self.bound = min(self.bound, exact(program.dtype))
                total = int(np.prod(call.batch, initial=1)) * rows
                self.dy += [self.signs((WS, *call.batch, rows, each), max(n, total)) for _, each in sizes[: call.ys]]
                self.dtypes += [program.dtype] * (call.xs + len(sizes))
        if chained:
            self.dtypes = [program.dtype]

    def signs(self, shape: tuple[int, ...], terms: int) -> np.ndarray:
        """-1, 0 and 1; so many zeros that sums of `terms` products stay some seven deviations below the bound."""
        kept = min(1.0, 2.25 * (self.bound / 7) ** 2 / terms)
        drawn = self.rng.integers(-1, 2, shape, np.int8)
        drawn[self.rng.random(shape, np.float32) > kept] = 0
        return drawn.astype(np.float32)

    def w_as_it_lies(self) -> list[np.ndarray]:
        each = [call.transpose_w for call in self.program.calls for _ in call.sizes]
        return [w.swapaxes(1, 2) if transpose else w for w, transpose in zip(self.w, each, strict=True)]

    def product(self, *pairs: tuple[np.ndarray, np.ndarray]) -> np.ndarray:
        """The sum of products. Exact in float32, whatever the order: every term is -1, 0 or 1, and there are fewer than
        2^24."""
        y: np.ndarray = functools.reduce(np.add, (x @ w for x, w in pairs))
        largest = np.abs(y).max() + 4  # a bias beside a float8 product is 4 of its units
        assert largest <= self.bound, f"the test's inputs are too large: {largest} in a result of {self.program.result}"
        return y

    def results(
        self, call: Call, xs: Sequence[np.ndarray], j: int, ws: Iterator[np.ndarray], biases: Iterator[np.ndarray]
    ) -> Any:
        """A call's: one for each w, or one of all pairs; or of two w whose products are multiplied."""
        own = [w[j] for w in itertools.islice(ws, len(call.sizes))]
        if call.gated:
            gate, up = (self.product((xs[0], w)) + (next(biases)[j] if call.bias else 0) for w in own)
            yield (np.maximum(gate, 0) if call.activation else gate) * up
            return
        for pairs in [[(xs[0], w)] for w in own] if call.gathers else [[*zip(xs, own, strict=True)]]:
            y = self.product(*pairs)
            y = y * (SCALES[0] * SCALES[1]) if self.program.float8 else y
            y = y + next(biases)[j] if call.bias else y
            yield np.maximum(y, 0) if call.activation else y

    def wants(self) -> list[np.ndarray]:
        """Of each result, those of all inputs: number i * WS + j is that of x i and w j."""
        every = [self.of(i, j) for i in range(XS) for j in range(WS)]
        return [np.stack(each) for each in zip(*every, strict=True)]

    def of(self, i: int, j: int) -> list[np.ndarray]:
        program = self.program
        xs = iter(x[i] for x in self.x)
        if program.kind in ("chain", "loop"):
            x = next(xs)
            for _ in range(program.turns):
                ws, biases = iter(self.w), iter(self.bias)
                for call in program.calls:
                    x = np.sign(next(self.results(call, [x], j, ws, biases)))
            return [x]
        results, ws, biases = [], iter(self.w), iter(self.bias)
        for call in program.calls:
            its = [*itertools.islice(xs, call.xs)]
            results += self.results(call, its, j, ws, biases)
            results += its if call.gathered else []
        if program.kind == "gradient":
            own, dys = [w[j] for w in self.w], [dy[j] for dy in self.dy]
            dxs = [[*zip(dys, (w.T for w in own), strict=True)]] if call.gathers else [[(dys[0], w.T)] for w in own]
            results += [self.product(*pairs) for pairs in dxs]
            for k in range(len(own)):
                x, dy = (v.reshape(-1, v.shape[-1]) for v in (its[k % call.xs], dys[k % call.ys]))
                dw = self.product((x.T, dy))
                results.append(dw.T if call.transpose_w else dw)
        return results
