"""What `trace_tiles` makes of the kernels' notes; the kernels themselves take notes on GPUs only (tests/gpu)."""

import json

import jax
import numpy as np
import pytest

import entwine_jax
from entwine_jax import _trace

CAPACITY, CTAS, WRITERS = 8, 2, 4


def packed(owner, row, column):
    return owner << 29 | row << 14 | column


def launch(op, notes):
    """As the extension hands it out: notes are (cta, writer, ns, tile, mark)."""
    raw = np.zeros((CTAS, WRITERS, CAPACITY), _trace._RAW)
    used = np.zeros((CTAS, WRITERS), int)
    for cta, writer, ns, tile, mark in notes:
        raw[cta, writer, used[cta, writer]] = (ns, tile, _trace.MARKS.index(mark))
        used[cta, writer] += 1
    sizes = {"device": 1, "rank": 1, "ranks": 2, "m_shard": 256, "n": 256, "k": 64, "out_bytes": 2}
    shape = {"ctas": CTAS, "writers": WRITERS, "capacity": CAPACITY}
    return {"op": op, **sizes, **shape, "events": raw.tobytes()}


def test_reduce_scatter(tmp_path):
    tile = packed(1, 3, 5)
    notes = [
        (0, 3, 1_000_000, tile, "claimed"),
        (0, 0, 1_001_000, tile, "first_load"),
        (0, 0, 1_005_500, tile, "last_load"),
        (1, 1, 1_009_000, tile, "landed"),
        (1, 2, 1_018_000, packed(0, 0, 1), "landed"),
    ]
    call = _trace._call(launch("matmul_reduce_scatter", notes))
    assert [_trace.MARKS[mark] for mark in call.events["mark"]] == [
        "claimed",
        "first_load",
        "last_load",
        "landed",
        "landed",
    ]
    np.testing.assert_allclose(call.events["us"], [0, 1, 5.5, 9, 18])
    first = call.at("landed")[0]
    assert (first["cta"], first["writer"]) == (1, 1)
    assert (first["owner"], first["row"], first["column"]) == (1, 3, 5)
    # 64 rows of 256 bfloat16 each time.
    ends, rate = call.link_rate(window_us=10.0)
    np.testing.assert_allclose(ends, [10, 20])
    np.testing.assert_allclose(rate, [3.2768, 3.2768])

    path = tmp_path / "trace.json"
    _trace.Trace((call, call)).save(path)
    events = json.loads(path.read_text())["traceEvents"]
    loads = [event for event in events if event["name"] == "load"]
    assert [(event["ts"], event["dur"]) for event in loads] == [(1, 4.5), (39, 4.5)]
    assert loads[0]["args"] == {"owner": 1, "row": 3, "column": 5}
    assert {event["pid"] for event in events} == {1}


def test_all_gather():
    call = _trace._call(launch("all_gather_matmul", [(0, 3, 5_000, 2 << 24 | 70_000, "pushed")]))
    (push,) = call.at("pushed")
    assert (push["owner"], push["row"]) == (2, 70_000)
    assert call.sent()[1] == 98304


def test_nothing_noted():
    call = _trace._call(launch("matmul_reduce_scatter", []))
    assert len(call.events) == 0 and len(call.link_rate()[1]) == 0


def test_needs_gpus():
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="trace_tiles: only the GPU kernels take notes"):
            entwine_jax.trace_tiles(lambda x: x, 1.0)
