"""What XLA is handed: target, operands and attributes of the custom calls, on both platforms."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from helpers import OPS, fused, mesh_of, spread

import entwine_jax
from entwine_jax import _obstacles, _strategy, _team

# Any op over four ranks.
ARGS = jax.ShapeDtypeStruct((2, 64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((32, 96), jnp.bfloat16)


def lowered(op, mesh, platform, backward=False, **options):
    leading = ("d" if "d" in mesh.axis_names else None,)
    f = spread(lambda op, x, w, axis: fused(op, x, w, axis, **options), op, mesh, leading=leading)
    if backward:
        f = jax.grad(lambda x, w, f=f: f(x, w).astype(jnp.float32).sum())
    return jax.jit(f).trace(*ARGS).lower(lowering_platforms=(platform,)).as_text()


def call(text, op):
    """The operands and attributes of the one custom call of an op."""
    (match,) = re.findall(rf"stablehlo\.custom_call @entwine_{op}\((.*?)\) \{{(.*)\}} :", text)
    attributes = re.search(r"backend_config = \{(.*?)\}", match[1])[1]
    return match[0].split(", "), dict(re.findall(r"(\w+) = (array<[^>]*>|dense<[^>]*>|[^,]+)", attributes))


@pytest.fixture
def pretend_gpus(monkeypatch):
    resolve = _team.resolve

    def resolve_cuda(op, axis_name):
        team = resolve(op, axis_name)
        return _team.Team(team.axis_name, team.size, team.groups, team.other_axes, team.loose_axes, "cuda")

    monkeypatch.setattr(_team, "resolve", resolve_cuda)
    monkeypatch.setattr(_strategy._core, "cuda_built", lambda: True)
    monkeypatch.setattr(_obstacles, "peer_obstacle", lambda: None)


def test_attribute_names_are_the_handlers():
    """By name: FFI attributes that C++ doesn't know, or misses, fail only when the program runs."""
    header = (Path(__file__).parents[1] / "cc" / "ffi" / "problem.h").read_text()
    known = set(re.findall(r'StructMember<.*?>\("(\w+)"\)', header, re.DOTALL))
    for op in OPS:
        _, attributes = call(lowered(op, mesh_of((4,)), "cpu"), op)
        assert attributes.keys() == known


@pytest.mark.parametrize("op", OPS)
def test_cpu(op):
    config = entwine_jax.Config(timeout_s=7, workers=2, stall_us=5, stall_seed=6, lead=9)
    operands, attributes = call(lowered(op, mesh_of((2, 4), ("d", "t")), "cpu", config=config), op)
    assert len(operands) == 3  # x, w, where
    numbers = {name: int(value.split(":")[0]) for name, value in attributes.items() if name != "groups"}
    wanted = {
        "team_size": 4,
        "transpose_w": 0,
        "transpose_x": 0,
        "timeout_ms": 7000,
        "workers": 2,
        "stall_us": 5,
        "stall_seed": 6,
        "lead": 9,
    }
    assert wanted.items() <= numbers.items()


@pytest.mark.parametrize("op", OPS)
def test_epilogue(op, pretend_gpus):
    """The bias is an operand, of float32 whatever it was; without one there is none."""
    bias = jnp.ones(24 if op == OPS[0] else 96, jnp.bfloat16)
    operands, attributes = call(lowered(op, mesh_of((4,)), "cuda", bias=bias, activation="silu"), op)
    assert len(operands) == 3 and attributes["biased"].startswith("1") and attributes["activation"].startswith("4")
    text = lowered(op, mesh_of((4,)), "cuda", activation="relu")
    operands, attributes = call(text, op)
    assert len(operands) == 2 and attributes["biased"].startswith("0") and attributes["activation"].startswith("1")
    assert "stablehlo.maximum" not in text
    # Where a gradient is taken XLA applies what the kernel doesn't, but for relu.
    text = lowered(op, mesh_of((4,)), "cuda", backward=True, bias=bias, activation="gelu_tanh")
    assert re.search(rf"@entwine_{op}\(.*activation = 0", text) and "stablehlo.tanh" in text


@pytest.mark.parametrize("op", OPS)
def test_cuda(op, pretend_gpus):
    operands, attributes = call(lowered(op, mesh_of((4,)), "cuda"), op)
    assert len(operands) == 2
    assert attributes["tile_m"].split()[0] in ("128", "256")  # the host executor's is 32
    text = lowered(op, mesh_of((4,)), "cuda", backward=True)
    if op == "matmul_all_reduce":
        assert "custom_call @entwine" not in text  # dx is a product of shards
    else:
        _, attributes = call(text, OPS[1 - OPS.index(op)])
        assert attributes["transpose_w"].startswith("1")
    assert "stablehlo.transpose" not in text  # dx needs no copy of w


@pytest.mark.parametrize(
    "shape, names, axis, groups",
    [
        ((2, 4), ("d", "t"), "t", [0, 1, 2, 3, 4, 5, 6, 7]),
        ((4, 2), ("t", "d"), "t", [0, 2, 4, 6, 1, 3, 5, 7]),
        ((2, 2, 2), ("a", "d", "b"), ("a", "b"), [0, 1, 4, 5, 2, 3, 6, 7]),
        ((2, 2, 2), ("a", "d", "b"), ("b", "a"), [0, 4, 1, 5, 2, 6, 3, 7]),
        ((1, 8, 1), ("a", "t", "b"), "t", [0, 1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_groups(shape, names, axis, groups):
    """Logical ids, [team][rank], teams in row-major order of the mesh's other axes, however devices are permuted."""
    found = []

    def rank(x):
        found.append(_team.resolve("op", axis))
        return x

    mesh = mesh_of(shape, names, [3, 1, 0, 2, 7, 6, 4, 5])
    jax.make_jaxpr(jax.shard_map(rank, mesh=mesh, in_specs=jax.P(), out_specs=jax.P()))(1.0)
    assert list(found[0].groups) == groups
    assert found[0].platform == "cpu" and not found[0].loose_axes
