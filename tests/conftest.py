"""Eight virtual CPU devices, the skips of tests that need GPUs, which cases of a test are run by default, and parts of
the tests for several processes."""

import functools
import itertools
import os
from collections.abc import Iterator

import pytest

# Before anything imports jax.
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
# Most of the tests' time is LLVM's, which needs a third less for code that nobody waits for.
if os.environ.get("JAX_PLATFORMS") == "cpu":
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
# What a developer's shell may hold must not change what is tested.
for _variable in ("STRATEGY", "TIMEOUT_S", "WORKERS", "STALL_US", "STALL_SEED"):
    os.environ.pop(f"ENTWINE_{_variable}", None)
os.environ["ENTWINE_TUNED"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="1/1", metavar="I/N", help="every Nth test, from the Ith on: a part of N")


def shown_by(item: pytest.Item) -> set[tuple[tuple[str, str], ...]]:
    """Of a case's parameters, every two with their values; every one, if the test is marked each_value."""
    callspec = getattr(item, "callspec", None)
    named = sorted((name, repr(value)) for name, value in callspec.params.items()) if callspec else []
    return {*itertools.combinations(named, 1 if "each_value" in item.keywords else 2)}


def beyond_those(cases: list[pytest.Item]) -> list[pytest.Item]:
    """Of a test's cases those that show nothing that others don't: of three strategies, three ops and four dtypes, say,
    24 of 36, since 12 show every two values together; or 32, since 4 show every value."""
    left = {case: shown_by(case) for case in cases}
    missing = set().union(*left.values())
    if not missing:  # no parameters, or one of which pairs are wanted
        return []
    while missing:
        missing -= left.pop(max(left, key=lambda case: len(left[case] & missing)))
    return [*left]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        tests.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in tests.values():
        if "gpu" not in cases[0].keywords:
            for case in beyond_those(cases):
                case.add_marker("slow")
    yield  # -m leaves them out
    part, parts = map(int, config.getoption("part").split("/"))
    kept = items[part - 1 :: parts]
    config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i % parts != part - 1])
    items[:] = kept


@functools.cache
def _gpus() -> int:
    """The sm_90 GPUs here."""
    import jax

    try:
        return sum(device.compute_capability == "9.0" for device in jax.devices("cuda"))
    except RuntimeError:  # no such platform
        return 0


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Markers gpu and multigpu(n). ENTWINE_REQUIRE_GPUS=n: tests of up to n GPUs fail where they can't run."""
    needed = max((mark.args[0] if mark.args else 2 for mark in item.iter_markers("multigpu")), default=0)
    needed = max(needed, 1 if item.get_closest_marker("gpu") else 0)
    if needed > (found := _gpus() if needed else 0):
        message = f"needs {needed} sm_90 GPUs, found {found}"
        if needed <= int(os.environ.get("ENTWINE_REQUIRE_GPUS") or 0):
            pytest.fail(f"{message}, and ENTWINE_REQUIRE_GPUS={os.environ['ENTWINE_REQUIRE_GPUS']}", pytrace=False)
        pytest.skip(message)


@pytest.fixture
def tuned_cache(tmp_path, monkeypatch):
    """A directory for what `autotune` keeps, still to be made; lookups are on."""
    from entwine_jax import _tuned

    monkeypatch.setenv("ENTWINE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("ENTWINE_TUNED")
    _tuned.forget()
    yield tmp_path / "cache"
    _tuned.forget()


@pytest.fixture
def measure(monkeypatch, tuned_cache):
    """measure(seconds) has autotune measure what the function says: see tuning.py."""
    from tuning import Measurements

    from entwine_jax import _autotune, _contest

    def install(seconds):
        made = Measurements(seconds)
        monkeypatch.setattr(_contest, "Bench", made)
        monkeypatch.setattr(_autotune, "_clock", lambda: made.clock)
        return made

    return install
