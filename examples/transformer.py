"""Trains a small Llama on Python source, character by character, on fused collective matmuls and on XLA's own path.

The model is plain Flax: RMSNorm, grouped-query attention with rotary positions, SwiGLU; tensor and sequence parallel
over one mesh axis, data parallel over the other. One keyword makes its projections collective matmuls,
``dot_general=entwine_jax.flax.DotGeneral(...)``. Both versions start from the same parameters and see the same batches;
their losses must agree at every step. On GPUs a forward and backward pass at Llama-3-70B's widths, split eight ways, is
timed both ways too. Without GPUs it runs on eight virtual CPU devices, where it shows that results are right, not that
they come fast.
"""

import argparse
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # both before JAX starts
os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.6")  # peer memory lies outside of XLA's pool

import jax
import jax.numpy as jnp
import numpy as np

try:
    import optax
    from flax import nnx
except ImportError as error:
    sys.exit(f"examples/transformer.py: {error}; pip install 'entwine-jax[examples]'")
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax
import entwine_jax.flax

# Between blocks tokens are sharded over both axes (sequence parallelism), within them heads and hidden features are.
TOKENS = P("data", "tensor", None)
HEADS = P("data", None, "tensor")
TO_HEADS, FROM_HEADS = {"out_sharding": (None, "tensor")}, {"out_sharding": ("tensor",)}


@dataclasses.dataclass(frozen=True)
class Sizes:
    width: int
    layers: int
    kv_heads: int  # what the tensor axis divides
    queries: int  # for each of them
    head: int
    hidden: int  # for each of them
    batch: int
    length: int
    vocabulary: int
    dtype: Any
    param_dtype: Any
    attention: Literal["xla", "cudnn"] = "xla"


class Attention(nnx.Module):
    def __init__(self, s: Sizes, dense: Callable[..., nnx.LinearGeneral]):
        # One product for queries, keys and values: their input is gathered once.
        self.qkv = dense(s.width, (s.kv_heads, s.queries + 2, s.head), kernel_metadata=TO_HEADS)
        self.out = dense((s.kv_heads, s.queries, s.head), s.width, axis=(-3, -2, -1), kernel_metadata=FROM_HEADS)
        self.attention = s.attention

    def __call__(self, x: jax.Array) -> jax.Array:
        qkv = jax.lax.with_sharding_constraint(self.qkv(x), HEADS)
        batch, length, kv_heads, _, head = qkv.shape
        q, k, v = rotary(qkv[..., :-2, :]), rotary(qkv[..., -2:-1, :])[..., 0, :], qkv[..., -1, :]
        q = q.reshape(batch, length, -1, head)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=self.attention)
        y = y.reshape(batch, length, kv_heads, -1, head)
        z: jax.Array = self.out(jax.lax.with_sharding_constraint(y, HEADS))
        return z


def rotary(x: jax.Array) -> jax.Array:
    """x (batch, position, kv heads, queries, head)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 500_000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class SwiGlu(nnx.Module):
    def __init__(self, s: Sizes, dense: Callable[..., nnx.LinearGeneral]):
        self.gate_up = dense(s.width, (s.kv_heads, 2, s.hidden), kernel_metadata=TO_HEADS)  # one product, too
        self.down = dense((s.kv_heads, s.hidden), s.width, axis=(-2, -1), kernel_metadata=FROM_HEADS)

    def __call__(self, x: jax.Array) -> jax.Array:
        gate_up = jax.lax.with_sharding_constraint(self.gate_up(x), HEADS)
        hidden = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
        y: jax.Array = self.down(jax.lax.with_sharding_constraint(hidden, HEADS))
        return y


class Block(nnx.Module):
    def __init__(self, s: Sizes, dense: Callable[..., nnx.LinearGeneral], rngs: nnx.Rngs):
        norm = functools.partial(nnx.RMSNorm, s.width, dtype=s.dtype, param_dtype=s.param_dtype, rngs=rngs)
        self.attention_norm, self.attention = norm(), Attention(s, dense)
        self.mlp_norm, self.mlp = norm(), SwiGlu(s, dense)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x + self.attention(self.attention_norm(x)), TOKENS)
        y: jax.Array = jax.lax.with_sharding_constraint(x + self.mlp(self.mlp_norm(x)), TOKENS)
        return y


class Transformer(nnx.Module):
    def __init__(self, s: Sizes, dot_general: Callable[..., jax.Array], rngs: nnx.Rngs):
        types = {"dtype": s.dtype, "param_dtype": s.param_dtype, "rngs": rngs}
        dense = functools.partial(nnx.LinearGeneral, use_bias=False, dot_general=dot_general, **types)
        self.embed = nnx.Embed(s.vocabulary, s.width, **types)
        self.blocks = nnx.List([Block(s, dense, rngs) for _ in range(s.layers)])
        self.norm = nnx.RMSNorm(s.width, **types)
        self.head = nnx.Linear(s.width, s.vocabulary, use_bias=False, **types)

    def stack(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(self.embed(tokens), TOKENS)
        logits: jax.Array = self.head(self.norm(self.stack(x)))
        return logits


DOTS: dict[str, Callable[..., jax.Array]] = {
    # Both gather once a product, and keep what they have gathered for the gradient of its weights.
    "fused": entwine_jax.flax.DotGeneral("tensor", strategy="fused", residuals="save"),
    "xla": jax.lax.dot_general,  # collectives by XLA's partitioner
}


def make_models(sizes: Sizes) -> tuple[dict[str, Any], Any]:
    """Both versions of the model, and parameters that fit either, made where they lie."""

    def model(dot_general: Callable[..., jax.Array]) -> Transformer:
        return Transformer(sizes, dot_general, nnx.Rngs(0))

    graphs = {name: nnx.split(nnx.eval_shape(functools.partial(model, dot)))[0] for name, dot in DOTS.items()}
    params = jax.jit(lambda: nnx.state(model(DOTS["xla"]), nnx.Param))()
    return graphs, on_mesh(params)


def on_mesh(tree: Any) -> Any:
    mesh = jax.sharding.get_mesh()
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda v: v if isinstance(v.sharding, NamedSharding) else jax.device_put(v, whole), tree)


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda v: v.sharding, tree)


# ----------------------------------------------------------------------------------------------------------------------
# Training


def cpu_sizes() -> Sizes:
    return Sizes(
        width=64, layers=2, kv_heads=4, queries=2, head=8, hidden=48, batch=4, length=64, vocabulary=0,
        dtype=jnp.float32, param_dtype=jnp.float32,
    )  # fmt: skip


def gpu_sizes() -> Sizes:
    return Sizes(
        width=1024, layers=4, kv_heads=8, queries=2, head=64, hidden=344, batch=8, length=512, vocabulary=0,
        dtype=jnp.bfloat16, param_dtype=jnp.float32,
    )  # fmt: skip


TOLERANCE = {"cpu": 1e-4, "gpu": 2e-2}  # of a loss, relative: float32 and bfloat16


class Text:
    """A file that comes with Python, as numbers."""

    def __init__(self) -> None:
        self.path = Path(argparse.__file__)
        text = self.path.read_text(encoding="utf-8")
        self.characters = sorted(set(text))
        self.data = np.array([self.characters.index(c) for c in text], np.int32)

    def batches(self, steps: int, sizes: Sizes) -> Iterator[jax.Array]:
        rng = np.random.default_rng(0)
        for _ in range(steps):
            starts = rng.integers(0, len(self.data) - sizes.length, sizes.batch)
            windows = np.stack([self.data[i : i + sizes.length + 1] for i in starts])
            yield jax.device_put(windows, NamedSharding(jax.sharding.get_mesh(), P("data")))


def training_step(graph: Any, optimizer: Any, params: Any, state: Any, tokens: jax.Array) -> Any:
    """Compiled for these arguments: (params, state, tokens) -> (params, state, loss)."""

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = nnx.merge(graph, params)(tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:])
        return jnp.mean(losses)

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    out = (shardings(params), shardings(state), None)
    return jax.jit(step, donate_argnums=(0, 1), out_shardings=out).lower(params, state, tokens).compile()


def train(sizes: Sizes, text: Text, steps: int) -> tuple[dict[str, list[float]], dict[str, dict[str, int]]]:
    """Losses of both versions, and how many collective matmuls their programs hold."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    graphs, params = make_models(sizes)
    state = on_mesh(optimizer.init(params))
    first = next(text.batches(1, sizes))
    with progress("compiling", len(graphs)) as advance:
        compiled = {}
        for name, graph in graphs.items():
            compiled[name] = training_step(graph, optimizer, params, state, first)
            advance(name)
    models = {name: (jax.tree.map(jnp.copy, params), jax.tree.map(jnp.copy, state)) for name in graphs}
    losses: dict[str, list[float]] = {name: [] for name in graphs}
    with progress("training", steps) as advance:
        for tokens in text.batches(steps, sizes):
            for name, step in compiled.items():
                *models[name], loss = step(*models[name], tokens)
                losses[name].append(float(loss))
            advance(f"loss {losses['fused'][-1]:.3f}")
    return losses, {name: collective_matmuls(step) for name, step in compiled.items()}


def collective_matmuls(compiled: Any) -> dict[str, int]:
    text = compiled.as_text()
    return {
        op: text.count(f'custom_call_target="entwine_{op}"') for op in ("all_gather_matmul", "matmul_reduce_scatter")
    }


def show(losses: dict[str, list[float]]) -> float:
    """A short table; the worst relative difference."""
    fused, xla = np.array(losses["fused"]), np.array(losses["xla"])
    differences = np.abs(fused - xla) / np.abs(xla)
    print(f"\n{'step':>4}  {'loss, fused':>12}  {'loss, XLA':>12}  {'difference':>10}")
    every = max(1, len(fused) // 10)
    for i in sorted({*range(0, len(fused), every), len(fused) - 1}):
        print(f"{i:4}  {fused[i]:12.6f}  {xla[i]:12.6f}  {differences[i]:10.1e}")
    return float(np.max(differences))


# ----------------------------------------------------------------------------------------------------------------------
# Timing


def llama_70b(ranks: int) -> Sizes:
    """Two layers, each rank with what one of eight has: 8 query heads, 1 key-value head, 28672 / 8 hidden features."""
    return Sizes(
        width=8192, layers=2, kv_heads=ranks, queries=8, head=128, hidden=28672 // 8, batch=1, length=4096,
        vocabulary=128, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16,
    )  # fmt: skip


def time_stack(sizes: Sizes, rounds: int, repeats: int) -> dict[str, Any]:
    """Milliseconds of the blocks' forward, and forward and backward, of both versions in random order."""
    graphs, params = make_models(sizes)
    shape = (sizes.batch, sizes.length, sizes.width)
    tokens = NamedSharding(jax.sharding.get_mesh(), TOKENS)
    normal = jax.jit(lambda key: jax.random.normal(key, shape, sizes.dtype), out_shardings=tokens)
    x, dy = normal(jax.random.key(1)), normal(jax.random.key(2))

    def programs(graph: Any) -> Iterable[tuple[str, Any]]:
        def forward(params: Any, x: jax.Array) -> jax.Array:
            y: jax.Array = nnx.merge(graph, params).stack(x)
            return y

        def both(params: Any, x: jax.Array, dy: jax.Array) -> Any:
            y, pull = jax.vjp(forward, params, x)
            return y, pull(dy)

        yield "forward", (jax.jit(forward, out_shardings=tokens), (params, x))
        out = (tokens, (shardings(params), tokens))
        yield "forward and backward", (jax.jit(both, out_shardings=out), (params, x, dy))

    work = {(kind, name): program for name, graph in graphs.items() for kind, program in programs(graph)}
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    fused: dict[str, dict[str, int]] = {}
    with progress("compiling", len(work)) as advance:
        for (kind, name), (program, args) in work.items():
            compiled = program.lower(*args).compile()
            calls[kind, name] = functools.partial(compiled, *args)
            jax.block_until_ready(calls[kind, name]())
            if name == "fused":
                fused[kind] = collective_matmuls(compiled)
            advance(f"{kind}, {name}")
    same = agree(calls["forward", "fused"](), calls["forward", "xla"]())
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in calls}
    order = random.Random(0)
    with progress("timing", rounds) as advance:
        for _ in range(rounds):
            for key in order.sample(list(calls), len(calls)):
                jax.block_until_ready(calls[key]())  # what ran before must not count
                start = time.perf_counter()
                for _ in range(repeats):
                    done = calls[key]()
                jax.block_until_ready(done)
                seconds[key].append((time.perf_counter() - start) / repeats)
                del done
            advance("")
    rows = []
    for kind in ("forward", "forward and backward"):
        ms = {name: [1e3 * s for s in seconds[kind, name]] for name in graphs}
        medians = {name: statistics.median(values) for name, values in ms.items()}
        rows.append({
            "pass": kind, "median_ms": medians, "speedup": medians["xla"] / medians["fused"],
            "ms": ms, "collective_matmuls": fused[kind],
        })  # fmt: skip
    return {"sizes": describe(sizes), "rounds": rounds, "repeats": repeats, "relative_difference": same, "rows": rows}


def agree(a: jax.Array, b: jax.Array) -> float:
    norm = jax.jit(lambda v: jnp.linalg.norm(v.astype(jnp.float32).ravel()))
    return float(norm(jnp.subtract(a.astype(jnp.float32), b.astype(jnp.float32))) / norm(b))


def time_llama(sizes: Sizes, rounds: int, repeats: int) -> dict[str, Any]:
    """With cuDNN's attention where it works, else XLA's: the same for both versions."""
    if sizes.dtype == jnp.bfloat16 and jax.sharding.get_mesh().devices.flat[0].platform == "gpu":
        try:
            probe = jnp.ones((1, 128, 8, sizes.head), jnp.bfloat16)
            attend = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
            jax.block_until_ready(jax.jit(jax.grad(lambda q: attend(q, q, q).astype(jnp.float32).sum()))(probe))
            return time_stack(dataclasses.replace(sizes, attention="cudnn"), rounds, repeats)
        except Exception as error:
            print(f"cuDNN's attention doesn't work here, so XLA's is timed: {str(error)[:300]}", file=sys.stderr)
    return time_stack(sizes, rounds, repeats)


def show_times(timing: dict[str, Any]) -> None:
    sizes = timing["sizes"]
    print(
        f"\n{sizes['layers']} layers, {sizes['batch']} x {sizes['length']} tokens of width {sizes['width']}, "
        f"{sizes['kv_heads']} x {sizes['hidden']} hidden features, {sizes['dtype']}, {sizes['attention']} attention; "
        "medians"
    )
    print(f"{'':22}  {'fused, ms':>10}  {'XLA, ms':>10}  {'speedup':>8}")
    for row in timing["rows"]:
        medians = "  ".join(f"{row['median_ms'][name]:10.3f}" for name in DOTS)
        print(f"{row['pass']:22}  {medians}  {row['speedup']:7.3f}x")


# ----------------------------------------------------------------------------------------------------------------------


def describe(sizes: Sizes) -> dict[str, Any]:
    types = {name: jnp.dtype(getattr(sizes, name)).name for name in ("dtype", "param_dtype")}
    return dataclasses.asdict(sizes) | types


@contextlib.contextmanager
def progress(title: str, total: int) -> Iterator[Callable[[str], None]]:
    """A progress bar, where there are Rich and a terminal; gives what advances it."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        yield lambda note: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(*Progress.get_default_columns(), "{task.fields[note]}", console=Console(stderr=True)) as bar:
        task = bar.add_task(title, total=total, note="")
        yield lambda note: bar.update(task, advance=1, note=note)


def plot(losses: dict[str, list[float]], path: str) -> None:
    import matplotlib  # type: ignore[import-not-found, unused-ignore]

    matplotlib.use("Agg")
    from matplotlib import pyplot  # type: ignore[import-not-found, unused-ignore]

    figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(losses["xla"], color="0.6", linewidth=4, label="XLA")
    axes.plot(losses["fused"], color="tab:blue", label="entwine_jax")
    axes.set(xlabel="step", ylabel="loss a character")
    axes.legend()
    figure.savefig(path, dpi=150)


def make_mesh(wanted: str) -> Mesh:
    """1 x n GPUs if they can run the fused path, else 2 x 4 CPU devices."""
    if wanted != "cpu":
        try:
            gpus = jax.devices("cuda")
        except RuntimeError:
            gpus = []
        ranks = next((n for n in (8, 4, 2) if n <= len(gpus)), 0)
        if ranks:
            mesh = Mesh(np.array(gpus[:ranks]).reshape(1, ranks), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
            try:
                entwine_jax.explain(
                    jax.shard_map(
                        lambda x: entwine_jax.all_gather_matmul(x, x.T, "tensor", strategy="fused"),
                        mesh=mesh, in_specs=P("tensor"), out_specs=P(None, "tensor"),
                    ),
                    jax.ShapeDtypeStruct((64 * ranks, 64 * ranks), jnp.bfloat16),
                )  # fmt: skip
                return mesh
            except NotImplementedError as error:
                print(f"The GPUs here can't run the fused path: {error}\n", file=sys.stderr)
        if wanted == "gpu":
            sys.exit("examples/transformer.py: --device gpu needs two GPUs that can run the fused path")
    cpus = jax.devices("cpu")
    if len(cpus) < 8:
        sys.exit(f"examples/transformer.py: needs 8 CPU devices, found {len(cpus)}; set JAX_NUM_CPU_DEVICES=8")
    return Mesh(np.array(cpus[:8]).reshape(2, 4), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="where to run (default: auto)")
    parser.add_argument("--steps", type=int, default=50, help="training steps (default: 50)")
    parser.add_argument(
        "--time", choices=("auto", "yes", "no"), default="auto", help="time a pass, too (default: on GPUs)"
    )
    parser.add_argument("--rounds", type=int, default=20, help="rounds of timing (default: 20)")
    parser.add_argument("--out", metavar="FILE.json", help="write losses and times there")
    parser.add_argument("--plot", metavar="FILE.png", help="plot the losses there; needs matplotlib")
    arguments = parser.parse_args()
    for name in ("steps", "rounds"):
        if getattr(arguments, name) < 1:
            parser.error(f"--{name} {getattr(arguments, name)} must be at least 1")
    if arguments.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")

    mesh, text = make_mesh(arguments.device), Text()
    device = mesh.devices.flat[0]
    on_gpu = device.platform == "gpu"
    sizes = dataclasses.replace(gpu_sizes() if on_gpu else cpu_sizes(), vocabulary=len(text.characters))
    print(f"{mesh.size} x {device.device_kind} ({device.platform}): {mesh.shape['data']} x {mesh.shape['tensor']} mesh")
    print(
        f"{sizes.layers} layers of width {sizes.width} in {jnp.dtype(sizes.dtype).name}, on {text.path.name} "
        f"({len(text.data)} characters, {sizes.vocabulary} different), {sizes.batch} x {sizes.length} a step",
        flush=True,
    )
    start = time.perf_counter()
    result: dict[str, Any] = {
        "device": device.device_kind, "mesh": dict(mesh.shape), "jax": jax.__version__, "sizes": describe(sizes),
    }  # fmt: skip

    def save(**found: Any) -> None:
        result.update(found)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n")

    timing = None
    with jax.set_mesh(mesh):
        losses, found = train(sizes, text, arguments.steps)
        worst = show(losses)
        save(losses=losses, worst_difference=worst, collective_matmuls=found)
        print(f"{time.perf_counter() - start:.0f} s", flush=True)
        if arguments.time == "yes" or (arguments.time == "auto" and on_gpu):
            large = llama_70b(mesh.shape["tensor"]) if on_gpu else sizes
            timing = time_llama(large, arguments.rounds, repeats=5 if on_gpu else 1)
            save(timing=timing)
            show_times(timing)
            print(f"{time.perf_counter() - start:.0f} s", flush=True)
    if arguments.plot:
        plot(losses, arguments.plot)

    # Four products a layer; the gradient of each to its input is one more.
    matmuls, wanted = sum(found["fused"].values()), 8 * sizes.layers
    tolerance = TOLERANCE["gpu" if on_gpu else "cpu"]
    problems = []
    if any(found["xla"].values()):
        problems.append(f"XLA's own version holds collective matmuls: {found['xla']}")
    if matmuls < wanted:
        problems.append(f"the training step holds {matmuls} fused collective matmuls, not {wanted}")
    if not worst <= tolerance:  # also if it is not a number
        problems.append(f"the losses differ by {worst:.1e}, more than {tolerance:.0e}")
    if arguments.steps > 1 and not losses["fused"][-1] < losses["fused"][0]:
        problems.append(f"the loss did not fall, from {losses['fused'][0]} to {losses['fused'][-1]}")
    if timing and not timing["relative_difference"] <= 2e-2:
        problems.append(f"the timed forward passes differ by {timing['relative_difference']:.1e}")
    if problems:
        sys.exit(f"FAILED: {'; '.join(problems)}")
    print(f"\nOK: {matmuls} fused collective matmuls a step; the losses agree to {worst:.1e} (at most {tolerance:.0e})")


if __name__ == "__main__":
    main()
