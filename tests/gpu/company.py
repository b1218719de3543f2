"""Our ops in company: of XLA's own collectives, host callbacks, other programs, threads, graphs, other meshes.

No pytest; each raises if a result isn't what it should be to the bit. They run on virtual CPU devices too
(tests/test_company.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import harness
import jax
import jax.extend.backend
import jax.numpy as jnp
import numpy as np
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    REDUCE_SCATTER,
    Case,
    assert_equal,
    exact_product,
    integers,
    mesh_of,
    per_shard,
    placed,
    program,
    put,
    spread,
    team_size,
    whole,
)
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import entwine_jax

CASES = (
    Case(ALL_GATHER, 264, 520, 264),
    Case(REDUCE_SCATTER, 136, 776, 392),
    Case(ALL_REDUCE, 200, 648, 328, odd=1),
)


def on_gpus() -> bool:
    return bool(jax.default_backend() == "gpu")


class Checked:
    """Cases with inputs that change from call to call, and their results."""

    def __init__(self, mesh: Mesh, axis: Any = AXIS, kinds: int = 3, **options: Any) -> None:
        self.mesh, self.axis, self.options, ranks = mesh, axis, options, team_size(mesh, axis)
        made = {(case, seed): integers(case, ranks, seed) for case in CASES for seed in range(kinds)}
        self.kinds = kinds
        self.inputs = {key: placed(key[0], mesh, *pair, axis) for key, pair in made.items()}
        self.wants = {key: exact_product(key[0], ranks, *pair) for key, pair in made.items()}
        self.runs = {case: program(case, mesh, axis, **options) for case in CASES}

    def warm(self) -> None:
        """Compiled and loaded, before anything waits for a peer while something else is being loaded."""
        for i in range(len(CASES)):
            self.check(self.launch(i))

    def launch(self, number: int) -> tuple[tuple[Case, int], jax.Array]:
        case = CASES[number % len(CASES)]
        key = case, number // len(CASES) % self.kinds
        return key, self.runs[case](*self.inputs[key])

    def check(self, launched: tuple[tuple[Case, int], jax.Array]) -> None:
        key, y = launched
        assert_equal(key[0], y, self.wants[key])


def beside_collectives(mesh: Mesh, gradients: Any = AXIS, floats: int = 1 << 20, turns: int = 6) -> None:
    """Layers whose gradients are summed over `gradients` by XLA: one after each pair of calls, which it depends on, and
    one at the start; nothing waits for them, so they may run at the same time as calls of ours."""
    ranks = mesh.shape[AXIS]
    k = 64 * ranks
    up, down = Case(ALL_GATHER, 136, 256, k), Case(REDUCE_SCATTER, 136, k, 256)
    x_spec, up_spec, _ = up.specs(AXIS)
    _, down_spec, y_spec = down.specs(AXIS)

    def layers(strategy: str) -> Callable[..., Any]:
        first, second = per_shard(up, strategy=strategy), per_shard(down, strategy=strategy)

        def body(x: jax.Array, w_up: jax.Array, w_down: jax.Array, g: jax.Array) -> Any:
            sums = [lax.psum(g, gradients)]
            for i in range(4):
                x = jnp.sign(second(jnp.sign(first(x, w_up)), w_down))
                sums.append(lax.psum(g * (i + 2) + jnp.abs(x).sum().astype(g.dtype), gradients))
            return x, [s[None] for s in sums]

        # All sums are of every device, whichever axes they go over.
        out = (y_spec, [P(mesh.axis_names)] * 5)
        run = jax.shard_map(body, mesh=mesh, in_specs=(x_spec, up_spec, down_spec, P()), out_specs=out, check_vma=False)
        return jax.jit(run)

    x, w_up = integers(up, ranks, 1)
    _, w_down = integers(down, ranks, 2)
    g = put(np.arange(floats, dtype=np.float32) % 97, mesh, P())
    on_mesh = put(x, mesh, x_spec), put(w_up, mesh, up_spec), put(w_down, mesh, down_spec), g
    ours, theirs = layers("fused"), layers("xla")
    wants, start = jax.block_until_ready(theirs(*on_mesh)), on_mesh[0]
    results = []
    for _ in range(turns):  # on what the last one returned, without waiting
        results.append(ours(start, *on_mesh[1:]))
        start = results[-1][0]
    want = wants
    for got in results:
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(whole(a).astype(np.float32), whole(b).astype(np.float32))
        want = theirs(want[0], *on_mesh[1:])


def beside_programs(mesh: Mesh, ours_first: bool, turns: int = 24, floats: int = 1 << 22) -> None:
    """Programs of XLA's collectives and matmuls between ours, all in flight together."""
    checked = Checked(mesh)

    def body(g: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
        return lax.psum(g, mesh.axis_names)[None], (a @ a)[None]

    spec = P(mesh.axis_names)
    other = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=(spec, spec), check_vma=False))
    g, a = put(np.arange(floats, dtype=np.float32) % 89, mesh, P()), put(np.ones((512, 512), np.float32), mesh, P())
    checked.warm()
    jax.block_until_ready(other(g, a))
    launched, others = [], []
    for turn in range(turns):
        for is_ours in (ours_first, not ours_first):
            if is_ours:
                launched.append(checked.launch(turn))
            else:
                others.append(other(g, a))
    for each in launched:
        checked.check(each)
    for total, square in others:
        np.testing.assert_array_equal(whole(total[0]), mesh.size * (np.arange(floats) % 89))
        assert bool((square == 512).all())


def host_callbacks(mesh: Mesh, turns: int = 4) -> None:
    """Rows go over the host between two calls, and the host is told of them, while other programs are in flight."""
    ranks, told = team_size(mesh), []
    k = 64 * ranks
    up, down = Case(ALL_GATHER, 72, 128, k), Case(REDUCE_SCATTER, 72, k, 128)
    x_spec, up_spec, _ = up.specs(AXIS)
    _, down_spec, y_spec = down.specs(AXIS)

    def on_host(h: np.ndarray) -> np.ndarray:
        return np.sign(np.asarray(h, np.float32)).astype(np.float32)

    def layers(strategy: str, calls_back: bool) -> Callable[..., Any]:
        first, second = per_shard(up, strategy=strategy), per_shard(down, strategy=strategy)

        def body(x: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
            h = first(x, w_up).astype(jnp.float32)
            if calls_back:
                h = jax.pure_callback(on_host, jax.ShapeDtypeStruct(h.shape, h.dtype), h)
                jax.debug.callback(lambda v: told.append(float(v)), h.sum())
            y = second(jnp.sign(h).astype(x.dtype), w_down)
            return jnp.sign(y)

        return jax.jit(
            jax.shard_map(body, mesh=mesh, in_specs=(x_spec, up_spec, down_spec), out_specs=y_spec, check_vma=False)
        )

    x, w_up = integers(up, ranks, 1)
    _, w_down = integers(down, ranks, 2)
    on_mesh = put(x, mesh, x_spec), put(w_up, mesh, up_spec), put(w_down, mesh, down_spec)
    checked = Checked(mesh)
    checked.warm()
    ours, theirs = layers("fused", True), layers("xla", False)
    want = theirs(*on_mesh)
    launched, results = [], []
    for turn in range(turns):
        results.append(ours(*on_mesh))
        launched.append(checked.launch(turn))
    for each in launched:
        checked.check(each)
    for y in results:
        assert_equal(down, y, want)
    jax.effects_barrier()
    assert len(told) == turns * len(mesh.local_devices), f"the host was told {len(told)} times"


def python_threads(mesh: Mesh, threads: int = 3, turns: int = 30, compiling: bool = True, **options: Any) -> None:
    """Threads that call jitted functions on one team without waiting for each other. `compiling`: their own too, which
    they compile and load while the others' calls are in flight."""
    checked, failures = Checked(mesh, **options), []
    checked.warm()
    barrier = threading.Barrier(threads)

    def work(first: int) -> None:
        try:
            barrier.wait()
            key, flying = (CASES[first % 3], 0), []
            if compiling:
                own = jax.jit(spread(key[0], mesh, per_shard(key[0], **options)))
                flying.append((key, own(*checked.inputs[key])))
            for turn in range(turns):
                flying.append(checked.launch(first + turn))
                if len(flying) > 4:
                    checked.check(flying.pop(0))
            for each in flying:
                checked.check(each)
        except BaseException as error:
            failures.append(error)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if failures:
        raise failures[0]


def graphs_and_eager(mesh: Mesh, turns: int = 40) -> None:
    """Captured programs between others that are not, on one team, if the process's XLA_FLAGS let XLA capture."""
    checked = Checked(mesh)
    runs = []
    for least in (1, 1 << 20):
        options = {"xla_gpu_graph_min_graph_size": least} if on_gpus() else None
        each = {case: jax.jit(spread(case, mesh, per_shard(case)), compiler_options=options) for case in CASES}
        runs.append(each)
        checked.runs = each
        checked.warm()
    launched = []
    for turn in range(turns):
        checked.runs = runs[turn % 7 % 2]
        launched.append(checked.launch(turn))
    for each in launched:
        checked.check(each)


def cleared_caches(mesh: Mesh, turns: int = 3) -> None:
    """`jax.clear_caches` with calls in flight: they end, and the same functions compiled anew find the arenas."""
    arenas = None
    for _ in range(turns):
        checked = Checked(mesh)
        checked.warm()
        launched = [checked.launch(i) for i in range(12)]
        jax.clear_caches()
        launched += [checked.launch(i) for i in range(12)]
        for each in launched:
            checked.check(each)
        del checked, launched
        found = entwine_jax.memory_stats().bytes
        assert arenas in (None, found), f"arenas grew from {arenas} to {found}"
        arenas = found


def several_meshes(meshes: list[tuple[Mesh, Any]], turns: int = 24) -> None:
    """Teams of several meshes by turns, all calls in flight together."""
    every = [Checked(mesh, axis) for mesh, axis in meshes]
    for each in every:
        each.warm()
    launched = [(each, each.launch(turn)) for turn in range(turns) for each in every]
    for each, result in launched:
        each.check(result)


def backends(turns: int = 2) -> None:
    """Backends that are dropped and made anew; what lies on the devices then is new as well."""
    for _ in range(turns + 1):
        checked = Checked(mesh_of())
        checked.warm()
        assert entwine_jax.memory_stats().bytes > 0
        del checked
        jax.clear_caches()
        harness._program.cache_clear()
        jax.extend.backend.clear_backends()


def exit_in_flight(launches: int = 200) -> None:
    """Leaves calls behind; the process must end by itself, soon and well."""
    checked = Checked(mesh_of())
    checked.warm()
    kept = [checked.launch(i) for i in range(launches)]
    print(f"leaving {len(kept)} calls", flush=True)


def threads() -> None:
    # A GPU may not load a program while kernels on it wait for one that is to be launched: XLA's own have that too.
    python_threads(mesh_of(), threads=4, turns=60, compiling=False)


def mixed_graphs() -> None:
    graphs_and_eager(mesh_of())


SCENARIOS: dict[str, Callable[..., None]] = {
    "backends": backends,
    "mixed_graphs": mixed_graphs,
    "threads": threads,
}
