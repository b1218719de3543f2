"""What autotune runs: programs whose calls XLA keeps, one after the other."""

import jax
import jax.numpy as jnp
import pytest
from global_view import collectives
from helpers import OPS, mesh_of, spread
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import _agreed, _candidates, _explain, _strategy
from entwine_jax._measure import Bench, Product


def products(f, *shapes, dtype=jnp.float32):
    with _strategy.seeking(True):
        calls = _explain.calls(f, [jax.ShapeDtypeStruct(s, dtype) for s in shapes])
    return [(Product(call.request.bare(), *call.pairs[0], call.z), call.choice.plan) for call in calls]


def of_op(op, size=2, dtype=jnp.float32, **options):
    f = spread(lambda op, x, w, axis: getattr(entwine_jax, op)(x, w, axis, **options), op, mesh_of((size,)))
    return products(f, (16, 8), (8, 16), dtype=dtype)


def check(product, plan, xla):
    """Of each program as many collectives as it has calls, and time passes."""
    bench = Bench(product)
    assert collectives(bench.compiled(plan).as_text()) == {f"entwine_{product.request.op}": bench.calls}
    assert collectives(bench.compiled(None).as_text()) == {name: bench.calls * each for name, each in xla.items()}
    for sampler in (bench.sampler(plan), bench.sampler(None), bench.sampler(plan)):
        assert sampler(1) > 0 and sampler(2) > 0
    return bench


@pytest.mark.parametrize("op, collective", [*zip(OPS, ("all-gather", "reduce-scatter", "all-reduce"), strict=True)])
def test_ops(op, collective):
    ((product, plan),) = of_op(op)
    check(product, plan, {collective: 1})


def test_float8():
    scales = jnp.float32(1), jnp.float32(1)
    options = {"scales": scales, "preferred_element_type": jnp.float32, "activation": "relu"}
    ((product, plan),) = of_op(OPS[0], dtype=jnp.float8_e4m3fn, **options)
    assert product.request.activation is None
    check(product, plan, {"all-gather": 1})


def test_what_is_gathered_beside():
    """With all devices in teams as the program has them, and w transposed."""

    def rank(x, w1, w2):
        h = entwine_jax.all_gather_matmul(x, w1, "t")
        return entwine_jax.matmul_reduce_scatter(h, w2, "t")

    mesh = mesh_of((4, 2), ("t", "d"))
    specs = P(("d", "t")), P(None, "t"), P("t")
    f = jax.shard_map(rank, mesh=mesh, in_specs=specs, out_specs=P(("d", "t")))
    found = products(jax.grad(lambda *v: jnp.sum(f(*v) ** 2), (0, 1, 2)), (32, 8), (8, 16), (16, 8))
    (gather, plan), (scatter, scatter_plan) = found[2:]
    assert gather.request.gathers and scatter.z is not None and scatter.request.transpose_w
    bench = check(gather, plan, {"all-gather": 1})
    (moving, *_) = bench._moving
    assert moving[0].sharding.mesh.devices.shape == (2, 4)
    assert [device.id for device in moving[0].sharding.mesh.devices[0]] == [0, 2, 4, 6]
    check(scatter, scatter_plan, {"reduce-scatter": 1, "all-gather": 1})


def test_too_few_devices():
    ((product, _),) = of_op(OPS[0], size=8)
    few = jax.devices()[:4]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jax, "devices", lambda *_: few)
        with pytest.raises(ValueError, match="there are 4 cpu devices, fewer than the team's 8"):
            Bench(product)


def test_one_process_agrees_with_itself():
    assert _agreed.agreed({"a": [1.5, None]}) == {"a": [1.5, None]}


@pytest.mark.parametrize("op", OPS)
def test_candidates(op):
    """Different plans, each but once, none the model's own; their names tell them apart."""
    request = of_op(op)[0][0].request
    for gathers in (False, True) if op != OPS[2] else (False,):
        wanted = _strategy.dataclasses.replace(request, gathers=gathers)
        for few in (False, True) if not gathers else (False,):
            base = _strategy.Plan("sm90", 256, 256, 8, 58, "pull", 18, 48, few)
            shape = _strategy.Sizes(1, 32, 4096, 4096)
            forms, numbers = _candidates.forms(wanted, shape, base), _candidates.numbers(wanted, base)
            plans = [base, *forms, *numbers]
            names = [_candidates.show(op, plan, gathers) for plan in plans]
            assert len(set(names)) == len(plans), names
            assert any(plan.few_rows for plan in plans) == (not gathers)
            tiles = {(p.tile_m, p.tile_n) for p in plans if not p.few_rows}
            assert tiles == {*entwine_jax._core.sm90_tiles(out_bytes=request.dtype.itemsize)}
            assert all(plan.raster * plan.tile_m >= 256 and plan.lead >= 1 for plan in plans)
            assert {p.transport for p in plans} == ({"pull"} if op == OPS[0] else {"pull", "push"})
            assert bool(numbers) != few
