"""What the tests of collective_matmul share: a residual MLP in each of the four modes, and a program's collectives."""

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from helpers import mesh_of, normal
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import entwine_jax

MODES = ("auto", "explicit", "manual", "partial")
MESHES = {
    "8": ((8,), ("t",), None),
    "2x4": ((2, 4), ("d", "t"), None),
    "1x8": ((1, 8), ("d", "t"), None),
    "4x2 permuted": ((4, 2), ("t", "d"), [6, 3, 0, 5, 2, 7, 4, 1]),
    "2x2x2 middle": ((2, 2, 2), ("d", "t", "e"), None),
    "2x2x2 last, permuted": ((2, 2, 2), ("d", "e", "t"), [1, 0, 3, 2, 7, 6, 4, 5]),
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Tensor axis t; every other axis shards the batch."""

    mode: str
    mesh: Mesh

    @property
    def data(self) -> tuple[str, ...]:
        return tuple(name for name in self.mesh.axis_names if name != "t")

    @property
    def specs(self) -> tuple[P, P, P, P]:
        """Of x and y, w_up, w_down, and the hidden layer."""
        return P(self.data, "t", None), P(None, "t"), P("t", None), P(self.data, None, "t")

    def up(self, x: Any, w: Any, **options: Any) -> jax.Array:
        options = {"strategy": "fused"} | options
        if self.mode in ("manual", "partial"):
            options |= {"axis_name": "t", "out_sharding": P(None, None, "t")}
        return entwine_jax.collective_matmul(x, w, **options)

    def down(self, x: Any, w: Any, **options: Any) -> jax.Array:
        options = {"strategy": "fused"} | options
        if self.mode in ("manual", "partial"):
            options |= {"axis_name": "t", "out_sharding": P(None, "t", None)}
        else:
            spec = self.specs[0]
            options["out_sharding"] = spec if self.mode == "explicit" else NamedSharding(self.mesh, spec)
        return entwine_jax.collective_matmul(x, w, **options)

    def mlp(self, x: Any, w_up: Any, w_down: Any) -> jax.Array:
        return x + self.down(jnp.sin(self.up(x, w_up)), w_down)

    def spread(self, f: Callable[..., Any], in_specs: Any = None, out_specs: Any = None) -> Callable[..., Any]:
        """f, in the mode's shard_map if it has one. The specs are those of mlp by default."""
        in_specs, out_specs = in_specs or self.specs[:3], out_specs or self.specs[0]
        if self.mode == "manual":
            return jax.shard_map(f, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)
        if self.mode == "partial":

            def data_only(spec: P) -> P:
                return P(*(axes if axes in (self.data, *self.data) else None for axes in spec))

            return jax.shard_map(
                f,
                mesh=self.mesh,
                in_specs=jax.tree.map(data_only, in_specs),
                out_specs=jax.tree.map(data_only, out_specs),
                axis_names={*self.data},
            )
        return f

    def place(self, *arrays: Any, specs: Sequence[P] | None = None) -> list[jax.Array]:
        return [
            jax.device_put(v, NamedSharding(self.mesh, s)) for v, s in zip(arrays, specs or self.specs, strict=False)
        ]


@contextlib.contextmanager
def setup(mode: str, mesh: str = "2x4") -> Iterator[Setup]:
    shape, names, order = MESHES[mesh]
    made = mesh_of(shape, names, order)
    if mode != "explicit":
        yield Setup(mode, made)
        return
    made = Mesh(made.devices, names, axis_types=(AxisType.Explicit,) * len(names))
    with jax.set_mesh(made):
        yield Setup(mode, made)


def operands(batch: int = 8, rows: int = 16, k: int = 24, n: int = 32) -> tuple[jax.Array, jax.Array, jax.Array]:
    return normal((batch, rows, k), 1), normal((k, n), 2) / k**0.5, normal((n, k), 3) / n**0.5


def plain_mlp(x: Any, w_up: Any, w_down: Any) -> jax.Array:
    return x + jnp.sin(x @ w_up) @ w_down


COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all")


def collectives(text: str) -> dict[str, int]:
    """XLA's collectives in a compiled program, and our custom calls, by number."""
    found = {name: len(re.findall(rf" {name}(?:-start)?\(", text)) for name in COLLECTIVES}
    found |= {f"entwine_{op}": len(re.findall(rf'custom_call_target="entwine_{op}"', text)) for op in OPS}
    return {name: count for name, count in found.items() if count}


OPS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")


def all_reduce_sizes(text: str) -> set[int]:
    """The group sizes of a program's all-reduces, in any of the ways in which XLA writes groups."""
    sizes = set()
    for line in re.findall(r" all-reduce(?:-start)?\(.*", text):
        if named := re.search(r"replica_groups=mesh\[(.*?)\].*?\{(.*?)\}", line):
            axes = dict(re.findall(r"'(\w+)'=(\d+)", named[1]))
            sizes.add(math.prod(int(axes[name]) for name in re.findall(r"'(\w+)'", named[2])))
        elif iota := re.search(r"replica_groups=\[(\d+),(\d+)\]", line):
            sizes.add(int(iota[2]))
        else:
            sizes.add(len(re.search(r"replica_groups=\{\{([\d,]+)\}", line)[1].split(",")))
    return sizes


def size(mesh: Mesh, names: Sequence[str]) -> int:
    return math.prod(mesh.shape[name] for name in names)
