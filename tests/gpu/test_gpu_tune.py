"""autotune on GPUs: in little time, and whatever plan it may choose gives the right result."""

import time

import jax
import pytest
from harness import (
    ALL_GATHER,
    AXIS,
    OPS,
    REDUCE_SCATTER,
    Case,
    assert_equal,
    exact_product,
    integers,
    mesh_of,
    put,
    team_size,
)

import entwine_jax
from entwine_jax import Config, _candidates, _explain, _strategy, _tuned

# What of a plan is strategy "fused"'s.
FUSED = ("tile_m", "tile_n", "raster", "lead", "transport", "pushers", "copiers", "few_rows")

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]


def program(case, mesh, **options):
    """Not jitted, and of a function of its own: what was measured since is to be seen."""
    op, (x, w, y) = getattr(entwine_jax, case.op), case.specs(AXIS)
    return jax.shard_map(lambda x, w: op(x, w, AXIS, **options), mesh=mesh, in_specs=(x, w), out_specs=y)


def operands(case, mesh):
    ranks = team_size(mesh)
    x, w = integers(case, ranks, seed=3)
    specs = case.specs(AXIS)
    return (put(x, mesh, specs[0]), put(w, mesh, specs[1])), exact_product(case, ranks, x, w)


def test_two_small_shapes(tuned_cache):
    mesh = mesh_of()
    cases = Case(ALL_GATHER, 512, 1024, 1024), Case(REDUCE_SCATTER, 256, 2048, 512)
    given = [operands(case, mesh) for case in cases]

    def both(options):
        return lambda *args: [program(case, mesh, **options)(*args[2 * i : 2 * i + 2]) for i, case in enumerate(cases)]

    args = [array for arrays, _ in given for array in arrays]
    start = time.monotonic()
    found = entwine_jax.autotune(both({}), *args, seconds=8)
    took = time.monotonic() - start
    print(found, f"{took:.1f} s", [row.tried for row in found], sep="\n")
    # Other processes may be testing on the same GPUs.
    assert took < 20 and [row.status for row in found] == ["measured"] * 2
    for row in found:
        assert len(row.tried) >= 2 and row.fused_ms > 0 and row.xla_ms > 0 and row.plan.target == "sm90"
    _tuned.forget()  # what a new process finds
    for strategy in ("auto", "fused"):
        explained = entwine_jax.explain(both({"strategy": strategy}), *args)
        for matmul, row in zip(explained, found, strict=True):
            assert "tuned: " in matmul.reason and str(found.path) in matmul.reason
            assert matmul.strategy == (row.strategy if strategy == "auto" else "fused")
            assert matmul.plan == (row.plan if matmul.strategy == "fused" else None)
        results = jax.jit(both({"strategy": strategy}))(*args)
        for case, got, (_, want) in zip(cases, results, given, strict=True):
            assert_equal(case, got, want)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("rows", [512, 32])
def test_all_candidates_are_right(op, rows):
    """Every plan that autotune would try, in one program."""
    mesh = mesh_of()
    ranks = team_size(mesh)
    m_shard = rows if op == ALL_GATHER else rows // ranks
    case = Case(op, m_shard, 1024, 512)
    (x, w), want = operands(case, mesh)
    (call,) = _explain.calls(program(case, mesh, strategy="fused"), (x, w))
    shape = _strategy.sizes(call.request, *(v.shape for v in call.pairs[0]))
    base = call.choice.plan
    forms = [base, *_candidates.forms(call.request, shape, base)]
    plans = list(dict.fromkeys([*forms, *(p for form in forms for p in _candidates.numbers(call.request, form))]))
    configs = []
    for plan in plans:
        numbers = {name: getattr(plan, name) for name in FUSED}
        configs.append(Config(few_rows=True) if plan.few_rows else Config(**numbers))

    @jax.jit
    def every(x, w):
        return [program(case, mesh, strategy="fused", config=config)(x, w) for config in configs]

    (explained,) = entwine_jax.explain(program(case, mesh, strategy="fused", config=configs[-1]), x, w)
    assert explained.plan == plans[-1]
    for plan, got in zip(plans, every(x, w), strict=True):
        print(_candidates.show(op, plan, False))
        assert_equal(case, got, want)
