"""Trains a tensor-parallel MLP twice from the same start, once on the fused collective matmuls and once on XLA's own.

Prints the losses of both side by side, which must agree, and which strategy every matmul took. Runs on the GPUs of this
machine where there are at least two that can, else on eight virtual CPU devices, whose executor follows the GPU's
schedule tile by
tile: there it shows that the results are right, not that they come fast.
"""

import argparse
import dataclasses
import functools
import os
import sys
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")  # before JAX starts

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

Params = dict[str, jax.Array]

# Tokens are sharded over both axes outside the two matmuls; "up" is column-parallel, "down" row-parallel.
TOKENS = P("data", "team", None)
WEIGHTS = {"up": P(None, "team"), "down": P("team", None)}


@dataclasses.dataclass(frozen=True)
class Setup:
    devices: Sequence[Any]
    team: int
    batch: int  # sequences
    length: int
    width: int
    hidden: int
    dtype: Any
    tolerance: float  # of the losses' relative difference

    @property
    def mesh(self) -> Mesh:
        return Mesh(np.array(self.devices).reshape(-1, self.team), ("data", "team"))


def cpu_setup() -> Setup:
    devices = jax.devices("cpu")
    team = 4 if len(devices) % 4 == 0 else len(devices)
    return Setup(devices, team, batch=4, length=96, width=64, hidden=256, dtype=jnp.float32, tolerance=1e-4)


def gpu_setup() -> Setup | None:
    """None without two GPUs."""
    try:
        devices = jax.devices("cuda")
    except RuntimeError:
        return None
    team = max((size for size in range(2, 9) if len(devices) % size == 0), default=0)
    if team == 0:
        return None
    batch = 4 * len(devices) // team
    return Setup(devices, team, batch, length=1024, width=2048, hidden=8192, dtype=jnp.bfloat16, tolerance=2e-2)


def mlp(mesh: Mesh, strategy: str) -> Any:
    """A sequence-parallel MLP: gather tokens and widen, then narrow and scatter tokens."""

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(TOKENS, WEIGHTS["up"], WEIGHTS["down"]), out_specs=TOKENS)
    def forward(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(entwine_jax.all_gather_matmul(x, up, "team", strategy=strategy))
        return entwine_jax.matmul_reduce_scatter(hidden, down, "team", strategy=strategy)

    return forward


def training_step(setup: Setup, strategy: str) -> Any:
    """(params, tokens, target) -> (params, loss): plain gradient descent on float32 weights."""
    forward = mlp(setup.mesh, strategy)

    def loss(params: Params, x: jax.Array, target: jax.Array) -> jax.Array:
        y = forward(x.astype(setup.dtype), params["up"].astype(setup.dtype), params["down"].astype(setup.dtype))
        return jnp.mean(jnp.square(y.astype(jnp.float32) - target))

    def step(params: Params, x: jax.Array, target: jax.Array) -> tuple[Params, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x, target)
        rate = 5.0 * setup.width / setup.hidden
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value

    return jax.jit(step, donate_argnums=0)


def make_params(setup: Setup, seed: int) -> Params:
    shapes = {"up": (setup.width, setup.hidden), "down": (setup.hidden, setup.width)}
    keys = dict(zip(shapes, jax.random.split(jax.random.key(seed)), strict=True))
    return {
        name: jax.device_put(
            np.asarray(jax.random.normal(keys[name], shape)) / np.sqrt(shape[0]),
            NamedSharding(setup.mesh, WEIGHTS[name]),
        )
        for name, shape in shapes.items()
    }


def make_tokens(setup: Setup) -> tuple[jax.Array, jax.Array]:
    """Random tokens, and what a teacher of the same form makes of them."""
    shape = (setup.batch, setup.length, setup.width)
    x = jax.device_put(np.asarray(jax.random.normal(jax.random.key(0), shape)), NamedSharding(setup.mesh, TOKENS))
    teacher = make_params(setup, seed=1)
    return x, jax.jit(mlp(setup.mesh, "xla"))(x, teacher["up"], teacher["down"])


def choose_setup(wanted: str) -> Setup:
    setup = None if wanted == "cpu" else gpu_setup()
    if setup is not None:
        x = jax.ShapeDtypeStruct((setup.batch, setup.length, setup.width), setup.dtype)
        up = jax.ShapeDtypeStruct((setup.width, setup.hidden), setup.dtype)
        down = jax.ShapeDtypeStruct((setup.hidden, setup.width), setup.dtype)
        try:
            entwine_jax.explain(mlp(setup.mesh, "fused"), x, up, down)
            return setup
        except NotImplementedError as error:
            print(f"The GPUs here can't run the fused path: {error}\n", file=sys.stderr)
    if wanted == "gpu":
        sys.exit("examples/mlp.py: --device gpu needs two GPUs that can run the fused path")
    return cpu_setup()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto", help="where to run (default: auto)")
    parser.add_argument("--steps", type=int, default=10, help="training steps (default: 10)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps} must be at least 1")

    setup = choose_setup(arguments.device)
    device, teams = setup.devices[0], len(setup.devices) // setup.team
    print(
        f"{len(setup.devices)} x {device.device_kind} ({device.platform}): {teams} data-parallel teams of {setup.team}"
    )
    print(
        f"MLP {setup.width} -> {setup.hidden} -> {setup.width} in {jnp.dtype(setup.dtype).name} "
        f"on {setup.batch} sequences of {setup.length} tokens\n"
    )

    x, target = make_tokens(setup)
    steps = {strategy: training_step(setup, strategy) for strategy in ("fused", "xla")}
    params = {strategy: make_params(setup, seed=2) for strategy in steps}
    explanation = entwine_jax.explain(steps["fused"], params["fused"], x, target)

    print(f"{'step':>4}  {'loss, fused':>12}  {'loss, XLA':>12}  {'difference':>10}")
    losses: dict[str, list[float]] = {strategy: [] for strategy in steps}
    for i in range(arguments.steps):
        for strategy, step in steps.items():
            params[strategy], loss = step(params[strategy], x, target)
            losses[strategy].append(float(loss))
        ours, xlas = losses["fused"][i], losses["xla"][i]
        print(f"{i:4}  {ours:12.6f}  {xlas:12.6f}  {abs(ours - xlas) / abs(xlas):10.1e}", flush=True)
    fused, xla = np.array(losses["fused"]), np.array(losses["xla"])
    worst = np.max(np.abs(fused - xla) / np.abs(xla))

    print(f"\nThe collective matmuls of one fused training step, forward and backward:\n\n{explanation}\n")
    others = [matmul for matmul in explanation if matmul.strategy != "fused"]
    if others:
        sys.exit(f"FAILED: {len(others)} of {len(explanation)} matmuls did not take the fused path")
    if not worst <= setup.tolerance:  # also if it is not a number
        sys.exit(f"FAILED: the losses differ by {worst:.1e}, more than {setup.tolerance:.0e}")
    if arguments.steps > 1 and not fused[-1] < fused[0]:
        sys.exit(f"FAILED: the loss did not fall, from {fused[0]} to {fused[-1]}")
    print(
        f"OK: all {len(explanation)} matmuls were fused; the losses agree to {worst:.1e} "
        f"(at most {setup.tolerance:.0e} is allowed)"
    )


if __name__ == "__main__":
    main()
