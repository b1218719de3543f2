"""benchmarks.tune from end to end, on tiny shapes."""

import json
import pathlib
import sys

import jax
import pytest

# Behind everything else: the package under test is the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks import tune
from entwine_jax import _candidates


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_tiny(tuned_cache, tmp_path, monkeypatch, capsys):
    # Two candidates a shape are enough to go the whole way.
    monkeypatch.setattr(_candidates, "forms", lambda *_: [])
    monkeypatch.setattr(_candidates, "residents", lambda *_: [])
    monkeypatch.setattr(_candidates, "signals", lambda *_: [])
    monkeypatch.setattr(_candidates, "numbers", lambda *_: [])
    devices = jax.devices("cpu")[:2]
    monkeypatch.setattr(jax, "devices", lambda *_: devices)
    tune.main(["--out", str(tmp_path / "tune.json"), "--tiny", "--platform", "cpu", "--seconds", "3"])
    found = json.loads((tmp_path / "tune.json").read_text())
    assert [row["op"] for row in found["rows"]] == ["matmul_reduce_scatter", "all_gather_matmul", "matmul_all_reduce"]
    for row in found["rows"]:
        assert row["status"] == "measured" and row["plan"]["target"] == "host" and len(row["tried"]) == 2
        assert row["gain"] > 0 and row["xla_over_tuned"] > 0 and row["error"] < 1e-2
    assert found["seconds"] > 0 and "gain over the cost model's plans" in capsys.readouterr().err
    (path,) = tuned_cache.glob("*.json")
    assert len(json.loads(path.read_text())["entries"]) == 3
