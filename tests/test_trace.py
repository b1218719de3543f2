"""`trace_tiles`: what it makes of notes, and the notes of the host executor by every strategy."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import entwine_jax
from entwine_jax import Config, _core, _trace

CAPACITY, CTAS, WRITERS = 8, 2, 4


def packed(owner, row, column):
    return owner << 29 | row << 14 | column


def launch(op, notes, moments=(), launches=1, **more):
    """As the extension hands it out: notes are (cta, writer, ns, tile, mark), CTAs those of all launches."""
    raw = np.zeros((launches * CTAS, WRITERS, CAPACITY), _trace._RAW)
    used = np.zeros((launches * CTAS, WRITERS), int)
    for cta, writer, ns, tile, mark in notes:
        raw[cta, writer, used[cta, writer]] = (ns, tile, _trace.MARKS.index(mark))
        used[cta, writer] += 1
    rest = np.array([(ns, tile, _trace.MARKS.index(mark)) for ns, tile, mark in moments], _trace._RAW)
    sizes = {"device": 1, "rank": 1, "ranks": 2, "m_shard": 256, "n": 256, "k": 64}
    tiles = {"strategy": "fused", "tile_bytes": 131072, "parts": 4, "unit_bytes": 98304, "group_bytes": []}
    shape = {"ctas": CTAS, "writers": WRITERS, "capacity": CAPACITY}
    notes = {"events": raw.tobytes(), "moments": rest.tobytes()}
    return {"op": op, **sizes, **tiles, **shape, **notes, **more}


def spans_of(call, role):
    return [(span["begin"], span["end"], span["worker"], span["owner"], span["row"]) for span in call.of(role)]


def test_reduce_scatter(tmp_path):
    tile = packed(1, 3, 5)
    notes = [
        (0, 3, 1_000_000, tile, "claimed"),
        (0, 0, 1_001_000, tile, "first_load"),
        (0, 0, 1_004_500, tile, "last_load"),
        (0, 1, 1_005_500, tile, "multiplied"),
        (0, 2, 1_005_600, tile, "multiplied"),
        (1, 1, 1_006_000, tile, "awaited"),
        (1, 2, 1_006_100, tile, "awaited"),
        (1, 1, 1_007_000, tile, "arrived"),
        (1, 2, 1_008_000, tile, "arrived"),
        (1, 1, 1_009_000, tile, "landed"),
        (1, 2, 1_018_000, packed(0, 0, 1), "landed"),
    ]
    call = _trace._call(launch("matmul_reduce_scatter", notes))
    assert [_trace.MARKS[mark] for mark in call.events["mark"]] == [note[-1] for note in notes]
    np.testing.assert_allclose(call.at("landed")["us"], [9, 18])
    first = call.at("landed")[0]
    assert (first["cta"], first["writer"]) == (1, 1)
    assert (first["owner"], first["row"], first["column"]) == (1, 3, 5)
    # From the first load to the first image; the two storers' waits are one.
    assert spans_of(call, "multiply") == [(1, 5.5, 0, 1, 3)]
    assert spans_of(call, "wait for partial sums") == [(6, 8, 1, 1, 3)]
    # A quarter of a tile each time.
    ends, rate = call.link_rate(window_us=10.0)
    np.testing.assert_allclose(ends, [10, 20])
    np.testing.assert_allclose(rate, [3.2768, 3.2768])

    path = tmp_path / "trace.json"
    _trace.Trace((call, call)).save(path)
    events = json.loads(path.read_text())["traceEvents"]
    multiplied = [event for event in events if event["name"] == "multiply"]
    assert [(event["ts"], event["dur"]) for event in multiplied] == [(1, 4.5), (39, 4.5)]
    assert multiplied[0]["args"] == {"owner": 1, "row": 3, "column": 5}
    assert {event["pid"] for event in events} == {1}


def test_all_gather():
    call = _trace._call(launch("all_gather_matmul", [(0, 3, 5_000, 2 << 24 | 70_000, "pushed")]))
    (push,) = call.at("pushed")
    assert (push["owner"], push["row"]) == (2, 70_000)
    assert call.sent()[1].tolist() == [98304]


def test_movers():
    """What a mover has begun first lands first; a push by movers is one."""
    notes = [
        (0, 3, 1_000, packed(0, 1, 2), "moving"),
        (0, 3, 2_000, packed(0, 1, 3), "moving"),
        (0, 3, 4_000, 0, "moved"),
        (1, 3, 4_500, packed(0, 2, 2), "moving"),
        (0, 3, 5_000, 0, "moved"),
        (1, 3, 6_000, 0, "moved"),
        (0, 3, 7_000, packed(0, 9, 9), "claimed"),
    ]
    call = _trace._call(launch("matmul_reduce_scatter", notes, strategy="resident"))
    assert spans_of(call, "move") == [(0, 3, 0, 0, 1), (1, 4, 0, 0, 1), (3.5, 5, 1, 0, 2)]
    assert call.sent()[1].tolist() == [131072] * 3
    ends, rate = call.link_rate(2.0)
    np.testing.assert_allclose(ends[-1], 6.0)
    np.testing.assert_allclose(rate.sum() * 2.0, 3 * 131072e-3)


def test_groups():
    """Launches of one call have the same CTAs; copies are of the CTA after the last."""
    notes = [
        (0, 0, 1_000, packed(0, 0, 0), "first_load"),
        (0, 1, 3_000, packed(0, 0, 0), "multiplied"),
        (2, 0, 5_000, packed(1, 0, 0), "first_load"),
        (2, 1, 7_000, packed(1, 0, 0), "multiplied"),
    ]
    moments = [(1_500, packed(0, 1, 0), "sending"), (4_500, packed(0, 1, 0), "sent")]
    call = _trace._call(launch("all_gather_matmul", notes, moments, 2, strategy="signal", group_bytes=[7, 3_000_000]))
    assert spans_of(call, "multiply") == [(0, 2, 0, 0, 0), (4, 6, 0, 1, 0)]
    assert spans_of(call, "transfer") == [(0.5, 3.5, CTAS, 0, 1)]
    np.testing.assert_allclose(call.link_rate(1.0)[1], [500, 1000, 1000, 500, 0, 0])


def test_nothing_noted():
    call = _trace._call(launch("matmul_reduce_scatter", []))
    with pytest.raises(ValueError, match="role='walk' is unknown; use one of"):
        call.of("walk")
    assert len(call.events) == 0 and len(call.link_rate()[1]) == 0 and len(call.spans) == 0


def test_other_platforms(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    with pytest.raises(NotImplementedError, match=r"trace_tiles: jax.default_backend\(\) is 'tpu'; notes are taken on"):
        entwine_jax.trace_tiles(lambda x: x, 1.0)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    if not _core.cuda_built():
        with pytest.raises(NotImplementedError, match="trace_tiles: entwine_jax was built without CUDA"):
            entwine_jax.trace_tiles(lambda x: x, 1.0)


def test_one_trace_at_a_time():
    platform = _trace.require_traces()
    _core.start_trace(platform, 1 << 20)
    try:
        with pytest.raises(RuntimeError, match="a trace is being taken already"):
            entwine_jax.trace_tiles(lambda x: x, 1.0)
    finally:
        assert _core.stop_trace(platform) == []
    with pytest.raises(ValueError, match='platform must be "cpu" or "gpu"'):
        _core.start_trace("tpu", 1)


# What a rank's call should note, of four tiles of each of two chunks.
LAYOUTS = {
    "all_gather_matmul": (P("t"), P(None, "t"), P(None, "t")),
    "matmul_reduce_scatter": (P(None, "t"), P("t"), P("t")),
    "matmul_all_reduce": (P(None, "t"), P("t"), P()),
}


def program(op, strategy, mesh):
    x_spec, w_spec, y_spec = LAYOUTS[op]
    tiles = Config(tile_m=16, tile_n=16, comm_sms=1 if strategy == "resident" else None)

    def call(x, w):
        return getattr(entwine_jax, op)(x, w, "t", strategy=strategy, config=tiles)

    fn = jax.shard_map(call, mesh=mesh, in_specs=(x_spec, w_spec), out_specs=y_spec)
    n = 64 if op == "all_gather_matmul" else 32
    x = jax.device_put(jnp.ones((64, 24)), jax.NamedSharding(mesh, x_spec))
    w = jax.device_put(jnp.ones((24, n)), jax.NamedSharding(mesh, w_spec))
    return fn, x, w


@pytest.mark.parametrize("op", LAYOUTS)
@pytest.mark.parametrize("strategy", ["fused", "resident", "signal"])
def test_on_cpu_devices(op, strategy, tmp_path):
    if jax.default_backend() != "cpu":
        pytest.skip("tests/gpu has the kernels' traces")
    trace = entwine_jax.trace_tiles(*program(op, strategy, jax.make_mesh((2,), ("t",), devices=jax.devices()[:2])))
    assert [(call.op, call.strategy) for call in trace.calls] == [(op, strategy)] * 2
    assert sorted(call.rank for call in trace.calls) == [0, 1]
    for call in trace.calls:
        spans = call.spans
        multiplied = call.of("multiply")
        tiles = {(int(s["owner"]), int(s["row"]), int(s["column"])) for s in multiplied}
        assert len(multiplied) == len(tiles) == 8
        assert (spans["end"] >= spans["begin"]).all() and spans["begin"].min() >= 0
        # All that is sent, to the byte: half of x, or of the partial sums, and of an all-reduce half of y besides.
        sums, rows = 32 * 32 * 4, 32 * 24 * 4
        if strategy == "signal" and op == "matmul_all_reduce":
            wanted = 2 * sums  # as NCCL would be asked for, of all tiles
        else:
            wanted = {"all_gather_matmul": rows, "matmul_reduce_scatter": sums, "matmul_all_reduce": 2 * sums}[op]
        times, sizes = call.sent()
        assert sizes.sum() == wanted and (times <= call.us).all()
        np.testing.assert_allclose(call.link_rate()[1].sum() * 10.0 * 1e3, wanted, rtol=1e-6)
        if strategy == "resident" and op != "all_gather_matmul":
            assert len(call.of("move")) == (4 if op == "matmul_reduce_scatter" else 8)
        if strategy == "signal":
            assert len(call.of("transfer")) == len(call.group_bytes) > 0
        if strategy == "fused" and op != "all_gather_matmul":
            assert len(call.of("wait for partial sums")) == 4
        if op == "all_gather_matmul" and strategy != "signal":
            waits = call.of("wait for rows")
            assert len(waits) == 8
    pytest.importorskip("matplotlib")
    trace.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000
    with pytest.raises(ValueError, match=r"Trace.draw: rank=5 has no traced call; those of ranks \[0, 1\] are here"):
        trace.draw(tmp_path / "picture.png", rank=5)


def test_room_for_notes():
    """A call that has more notes than there is room isn't traced."""
    if jax.default_backend() != "cpu":
        pytest.skip("of the host executor")
    fn, x, w = program("all_gather_matmul", "fused", jax.make_mesh((2,), ("t",), devices=jax.devices()[:2]))
    assert entwine_jax.trace_tiles(fn, x, w, megabytes=0).calls == ()
