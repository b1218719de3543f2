"""trace_tiles on GPUs: every tile of a call is noted once, in order of time, and all that is sent."""

import jax
import numpy as np
import pytest
from harness import (
    ALL_GATHER,
    ALL_REDUCE,
    AXIS,
    OPS,
    Case,
    assert_equal,
    exact_product,
    integers,
    mesh_of,
    put,
    team_size,
)

import entwine_jax
from entwine_jax import Config

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

TILE_BYTES = 256 * 256 * 2


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("strategy", "comm_sms"), [("fused", None), ("resident", 2), ("resident", None), ("signal", None)]
)
def test_every_tile(op, strategy, comm_sms, tmp_path):
    mesh = mesh_of()
    ranks = team_size(mesh)
    case = Case(op, 512, 1024, 512)
    call, (x_spec, w_spec, y_spec) = getattr(entwine_jax, op), case.specs(AXIS)
    config = Config(comm_sms=comm_sms, tile_m=256, tile_n=256)
    fn = jax.shard_map(
        lambda x, w: call(x, w, AXIS, strategy=strategy, config=config),
        mesh=mesh,
        in_specs=(x_spec, w_spec),
        out_specs=y_spec,
    )
    x, w = integers(case, ranks, seed=3)
    args = put(x, mesh, x_spec), put(w, mesh, w_spec)
    trace = entwine_jax.trace_tiles(fn, *args)
    assert_equal(case, jax.jit(fn)(*args), exact_product(case, ranks, x, w))
    here = [d for d in mesh.devices.flat if d.process_index == jax.process_index()]
    assert [(each.op, each.strategy) for each in trace.calls] == [(op, strategy)] * len(here)

    chunk = 2 * 4  # tiles
    for each in trace.calls:
        print(each.strategy, each.op, each.rank, f"{each.us:.1f} us", len(each.events), "events")
        spans = each.spans
        assert (spans["end"] >= spans["begin"]).all() and (spans["end"] <= each.us).all()
        multiplied = each.of("multiply")
        tiles = {(int(s["owner"]), int(s["row"]), int(s["column"])) for s in multiplied}
        # Both CTAs of a cluster.
        assert len(tiles) == chunk * ranks and len(multiplied) == 2 * len(tiles)
        claimed = [tuple(event[["owner", "row", "column"]].tolist()) for event in each.at("claimed")]
        assert sorted(claimed) == sorted(tiles)
        sums, chunk_bytes = (ranks - 1) * chunk * TILE_BYTES, (ranks - 1) * 512 * 512 * 2
        _, sizes = each.sent()
        if strategy == "signal":
            assert len(each.of("transfer")) == len(each.group_bytes) == len(sizes)
            once = {ALL_GATHER: chunk_bytes, ALL_REDUCE: ranks * sums}.get(op, sums)
            assert sizes.sum() == once
            copies = each.of("copy to y")
            assert len(copies) == (0 if op == ALL_GATHER else min(2, len(sizes)))
            landed = each.at("landed")
            assert len(landed) == (0 if op == ALL_GATHER else 4 * len(tiles))
            # The clocks of kernels and of copies agree: the last group goes when the last tile has landed.
            if op != ALL_GATHER:
                late = each.at("sending")["us"].max() - landed["us"].max()
                print(f"the last group follows its last tile by {late:.1f} us")
                assert -10 < late < 50
        elif op == ALL_GATHER:
            assert sizes.sum() >= chunk_bytes and len(each.at("pushed")) == (ranks - 1) * 2 * 3
        else:
            both = 1 if op != ALL_REDUCE else 2
            assert sizes.sum() == both * sums
            moves = each.of("move")
            assert len(moves) == (both * (ranks - 1) * chunk if strategy == "resident" else 0)
            assert len({(int(s["owner"]), int(s["row"]), int(s["column"])) for s in moves}) * both >= len(moves)
        rate = each.link_rate()[1]
        np.testing.assert_allclose(rate.sum() * 1e4, sizes.sum(), rtol=1e-6)
    trace.save(tmp_path / "trace.json")
    assert (tmp_path / "trace.json").stat().st_size > 1000
