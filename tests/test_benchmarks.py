"""The benchmark and its report from end to end, on tiny shapes."""

import json
import pathlib
import sys

import pytest

# Behind everything else: the package under test is the installed one.
sys.path.append(str(pathlib.Path(__file__).parents[1]))

from benchmarks import collective_matmul, report, shapes

ROW = {
    "suite": "ten",
    "op": "all_gather_matmul",
    "m": 8192,
    "n": 4096,
    "k": 7168,
    "ranks": 2,
    "dtype": "bfloat16",
    "strategy": "fused",
    "ours_ms": 0.5,
    "xla_ms": 1.0,
    "gemm_ms": 0.4,
    "link_ms": 0.152,
    "peers": {"pallas": 0.75},
    "spread": {"ours": 0.01, "xla": 0.02, "gemm": 0.005},
}
RESULTS = {
    "machine": {"accelerator": "NVIDIA H200", "platform": "gpu", "devices": 2},
    "versions": {"jax": "0.11.2"},
    "notes": [],
    "rows": [ROW, ROW | {"m": 2048, "ours_ms": 2.0, "peers": {}}],
}


def test_tiny_run(tmp_path, capsys):
    out = tmp_path / "new" / "tiny.json"
    collective_matmul.main(["--out", str(out), "--tiny", "--platform", "cpu"])
    results = json.loads(out.read_text())
    assert set(results) == {"machine", "versions", "notes", "rows"}
    assert [row["op"] for row in results["rows"]] == [shape.op for shape in shapes.TINY]
    for row in results["rows"]:
        assert set(row) == set(ROW)
        assert all(row[f"{name}_ms"] > 0 for name in ("ours", "xla", "gemm", "link"))
        assert set(row["spread"]) == {"ours", "xla", "gemm"}
    assert "geomean" in capsys.readouterr().err
    assert "GEMM alone" in report.report(results)


def test_wrong_results_are_not_timed(tmp_path, monkeypatch):
    right = collective_matmul.one_call
    monkeypatch.setattr(
        collective_matmul,
        "one_call",
        lambda shape, name: lambda x, w: right(shape, name)(x, w) * (1.05 if name == "ours" else 1.0),
    )
    with pytest.raises(SystemExit, match="before timing"):
        collective_matmul.main(["--out", str(tmp_path / "wrong.json"), "--tiny", "--platform", "cpu"])


def test_ten_shapes():
    assert len(shapes.SUITES["ten"]) == 10
    by_time = [shape.link_ms(2) for shape in shapes.SUITES["ten"]]
    # The design's own numbers for two GPUs.
    wanted = [0.174, 0.087, 0.523, 0.174, 0.044, 0.152, 0.044, 0.523, 0.044, 0.038]
    assert by_time == pytest.approx(wanted, abs=6e-4)


def test_report_keeps_losing_rows():
    text = report.report(RESULTS)
    assert "| 8192, 4096, 7168 | 0.500 | 1.000 | 0.750 | 0.400 | 0.152 | **2.00** | 1.25 |" in text
    assert "| 2048, 4096, 7168 | 2.000 | 1.000 |  | 0.400 | 0.152 | 0.50 (slower) | 5.00 |" in text
    assert "faster than XLA on 1 of 2 shapes" in text


def test_update_and_check(tmp_path, capsys):
    results, page = tmp_path / "results.json", tmp_path / "page.md"
    results.write_text(json.dumps(RESULTS))
    page.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    with pytest.raises(SystemExit, match=r"stale: .*page\.md"):
        report.main([str(results), "--check", str(page)])
    report.main([str(results), "--update", str(page)])
    report.main([str(results), "--check", str(page)])
    text = page.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n") and text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    report.main([str(results)])
    assert capsys.readouterr().out in text
    page.write_text("no markers\n")
    with pytest.raises(SystemExit, match="needs one <!-- benchmark:begin -->"):
        report.main([str(results), "--update", str(page)])
