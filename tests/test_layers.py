"""Layers import only downward: docs/design.md draws them."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "entwine_jax"

# Each knows only what stands below it.
PYTHON = [
    {"__main__"},
    {"_command"},
    {
        "_command._bench",
        "_command._doctor",
        "_command._explain",
        "_command._predict",
        "_command._trace",
        "_command._tune",
    },
    {"_command._function"},
    {"_command._usage"},
    {"flax"},
    {"flax._at_once"},
    {"flax._nnx", "flax._linen"},
    {"flax._dot_general"},
    {"flax._parameters"},
    {"__init__"},
    {"_autotune", "_simulate"},
    {"_contest"},
    {"_cost_model", "_explain", "_trace", "_float8", "_tuning", "_measure"},
    {"_agreed", "_candidates", "_progress", "_race"},
    {"_matmul"},
    {"_matmul_several"},
    {"_products_several"},
    {"_products", "_partitioned_several"},
    {"_partitioned_pairs", "_partitioned_scaled"},
    {"_partitioning", "_placed"},
    {"_spread"},
    {"_ops", "_sums"},
    {"_on_ranks", "_shards", "_quantised"},
    {"_gated"},
    {"_several", "_scaled"},
    {"_differentiable"},
    {"_lowering"},
    {"_batching"},
    {"_operands"},
    {"_strategy"},
    {"_measured"},
    {"_obstacles"},
    {"_request"},
    {"_signal", "_tuned"},
    {"_team", "_reference", "_selection", "_gate_checks"},
    {"_float8_checks"},
    {"_config", "_checks", "_memory"},
    {"_core", "_shared", "_spans", "_threads"},
]

# Each folder of cc/ and what it may include, itself aside.
CPP = {
    "schedule": set(),
    "simulate": {"schedule"},
    "kernel": {"schedule"},
    "team": {"schedule"},
    "host": {"schedule"},
    "ffi": {"host", "team", "kernel", "schedule"},
    "python": {"ffi", "host", "team", "simulate", "schedule"},
}


def module_name(path: Path) -> str:
    """As PYTHON has it: a package is its __init__."""
    *folders, stem = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(folders if folders and stem == "__init__" else [*folders, stem])


def python_imports(path: Path) -> set[str]:
    """The modules of entwine_jax that one of them imports."""
    folders, found = path.relative_to(PACKAGE).parent.parts, set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level <= len(folders) + 1, f"{path.name} imports from outside of entwine_jax"
            base = folders[: len(folders) + 1 - node.level]
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {".".join([*base, name]) for name in names}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith("entwine_jax") for name in names), (
                f"{path.name}: write it as a relative import"
            )
            assert not any(name.startswith("jax._src") for name in names), f"{path.name} imports jax._src"
    return found


def test_python_layers():
    height = {name: i for i, layer in enumerate(PYTHON) for name in layer}
    modules = {module_name(path): path for path in PACKAGE.rglob("*.py")}
    assert modules.keys() <= height.keys(), "a module without a layer"
    for name, path in modules.items():
        for imported in python_imports(path):
            assert height[name] < height[imported], f"{name} imports {imported}, which is not below it"


def test_cpp_layers():
    cc = ROOT / "cc"
    assert {path.name for path in cc.iterdir() if path.is_dir()} <= CPP.keys(), "a folder without a layer"
    for path in cc.rglob("*"):
        if path.suffix not in (".h", ".cc", ".cu", ".cuh"):
            continue
        folder = path.relative_to(cc).parts[0]
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            other = included.split("/")[0]
            if other in CPP and other != folder:
                assert other in CPP[folder], f"{path.relative_to(ROOT)} includes {included}, which is not below it"


@pytest.mark.parametrize("name", ["entwine_jax", "entwine_jax.flax"])
def test_public_names(name):
    """A package's own surface is short, and all of it documented."""
    if name == "entwine_jax.flax":
        pytest.importorskip("flax", minversion="0.12", reason="needs Flax: pip install 'entwine-jax[flax]'")
    package = import_module(name)
    assert sorted(package.__all__) == package.__all__
    for public in package.__all__:
        assert (getattr(package, public).__doc__ or "").strip(), public
