"""Layers import only downward: docs/design.md draws them."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]

# Each knows only what stands below it.
PYTHON = [
    {"flax"},
    {"__init__"},
    {"_explain"},
    {"_matmul"},
    {"_products"},
    {"_partitioning", "_placed"},
    {"_spread"},
    {"_ops"},
    {"_lowering"},
    {"_strategy"},
    {"_team", "_reference", "_selection"},
    {"_config", "_checks"},
    {"_core"},
]

# Each folder of cc/ and what it may include, itself aside.
CPP = {
    "schedule": set(),
    "kernel": {"schedule"},
    "team": {"schedule"},
    "host": {"schedule"},
    "ffi": {"host", "team", "kernel", "schedule"},
}


def python_imports(path: Path) -> set[str]:
    """The modules of entwine_jax that one of them imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            found |= {node.module} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert not any(name.startswith("entwine_jax") for name in names), (
                f"{path.name}: write it as a relative import"
            )
            assert not any(name.startswith("jax._src") for name in names), f"{path.name} imports jax._src"
    return found


def test_python_layers():
    height = {name: i for i, layer in enumerate(PYTHON) for name in layer}
    modules = {path.stem: path for path in (ROOT / "entwine_jax").glob("*.py")}
    assert modules.keys() <= height.keys(), "a module without a layer"
    for name, path in modules.items():
        for imported in python_imports(path):
            assert height[name] < height[imported], f"{name} imports {imported}, which is not below it"


def test_cpp_layers():
    cc = ROOT / "cc"
    assert {path.name for path in cc.iterdir() if path.is_dir()} <= CPP.keys(), "a folder without a layer"
    for path in cc.rglob("*"):
        if path.suffix not in (".h", ".cc", ".cu", ".cuh") or path.parent == cc:
            continue
        folder = path.relative_to(cc).parts[0]
        for included in re.findall(r'^\s*#\s*include\s+"([^"]+)"', path.read_text(), re.MULTILINE):
            other = included.split("/")[0]
            if other in CPP and other != folder:
                assert other in CPP[folder], f"{path.relative_to(ROOT)} includes {included}, which is not below it"


def test_public_names():
    """The package's own surface is short, and all of it documented."""
    import entwine_jax

    assert sorted(entwine_jax.__all__) == entwine_jax.__all__
    for name in entwine_jax.__all__:
        assert (getattr(entwine_jax, name).__doc__ or "").strip(), name
