"""The table of docs/reliability.md: what it is made of, and that it is up to date."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for pytest started as a command

from benchmarks import reliability  # noqa: E402

SOAK = {
    "platform": "gpu",
    "devices": 2,
    "kind": "NVIDIA H200",
    "launches": 20000,
    "late": 8000,
    "stalled": 700,
    "rounds": 60,
    "wrapping": 30,
    "programs": 300,
    "seconds": 290.5,
    "wrong": 1,
    "hung": 2,
    "error": 3,
    "crashed": 4,
    "peers_absent": 0,
    "reported_in_time": 0,
}
PEERS = {"peers_killed": 5, "peers_stopped": 6, "peers_absent": 7, "reported_in_time": 17, "slowest_report_s": 4.5}
LEAKS = {
    "calls": 10000,
    "compilations": 200,
    "leaks": ["host_call"],
    "host_bytes_a_call": 1234.5,
    "device_bytes_a_call": 0.0,
    "host_bytes_a_compilation": 77.0,
    "device_bytes_a_compilation": 8.0,
}
COMPANY = """
tests/gpu/test_gpu_company.py::test_one[a b] PASSED                  [ 10%]
tests/gpu/test_gpu_children.py::test_two FAILED                      [ 20%]
tests/gpu/test_gpu_exact.py::test_three PASSED                       [ 30%]
FAILED tests/gpu/test_gpu_children.py::test_two - no
"""
FUZZ = "count fuzz_inputs 150000\nok     any input is a problem or an error (4000 ms)\n"


def collected(tmp_path, *, logs=(), tests=()):
    (tmp_path / "logs").mkdir(exist_ok=True)
    for name, text in dict(logs).items():
        (tmp_path / "logs" / name).write_text(text)
    for name, text in dict(tests).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    arguments = ["collect", "--logs", tmp_path / "logs", "--out", tmp_path / "out.json"]
    if tests:
        arguments += ["--tests", *(tmp_path / name for name in dict(tests))]
    reliability.main([*map(str, arguments)])
    text = (tmp_path / "out.json").read_text()
    assert str(tmp_path) not in text
    return json.loads(text)


def test_nothing_was_run(tmp_path):
    found = collected(tmp_path)
    assert all(found[name] is None for name in reliability.FIELDS) and found["sanitizers"] == []
    assert reliability.table([found]).count("not run") == len(reliability.ROWS)


def test_gpu_runs(tmp_path):
    logs = {
        "soak.json": json.dumps(SOAK),
        "lost_peers.json": json.dumps(PEERS),
        "leaks.json": json.dumps(LEAKS),
        "test.log": COMPANY,
        "sanitize_memcheck.log": "count launches 376\n8 passed, 0 failed\n========= ERROR SUMMARY: 2 errors\n",
        "sanitize_racecheck.log": "count launches 24\n========= RACECHECK SUMMARY: 3 hazards displayed (3 errors)\n",
        "sanitize_initcheck.log": "count launches 8\nwas cut short",
        "sanitize_synccheck.log": "count launches 0\n========= ERROR SUMMARY: 1 error\n",
    }
    found = collected(tmp_path, logs=logs)
    text = reliability.table([found])
    assert found["sanitizer_findings"] == 5 and found["sanitizers"] == ["memcheck", "racecheck"]
    assert "| 2 x NVIDIA H200 |" in text
    for cell in ("20,000 of 300", "8,000, 700", "60, 30", "3, 4", "17 of 18", "4.5", "5 (memcheck, racecheck)", "400"):
        assert f"| {cell} |" in text, text
    for cell in ("10,000 and 200", "1,234 B, devices 0 B", "77 B, devices 8 B"):
        assert f"| {cell} |" in text, text
    assert (found["leaks"], found["company_tests"], found["company_failed"]) == (1, 2, 1)
    assert found["fuzz_inputs"] is None and "decodes calls | not run |" in text


def test_cpu_runs(tmp_path):
    soak = SOAK | {"platform": "cpu", "devices": 8, "peers_absent": 9, "reported_in_time": 9}
    model = "count protocol_states 7\ncount protocol_programs 2\nok     nothing goes wrong (9 ms)\n"
    model += "count protocol_states 5\ncount protocol_programs 1\nok     nothing goes wrong (3 ms)\n"
    tests = {
        "cc-address/LastTest.log": f"{FUZZ}{model}",
        "cc-thread/LastTest.log": "WARNING: ThreadSanitizer: data race\na.cc:3:1: runtime error: overflow\n",
        "fuzz.log": FUZZ.replace("150000", "5000000"),
    }
    found = collected(tmp_path, logs={"soak.json": json.dumps(soak)}, tests=tests)
    assert (found["fuzz_inputs"], found["fuzz_crashes"], found["sanitizer_findings"]) == (5_000_000, 0, 2)
    text = reliability.table([found])
    for cell in ("8 virtual CPU devices", "9 of 9", "12 of 3 programs", "5,000,000"):
        assert f"| {cell} |" in text, text
    assert "processes killed while their peer waits | not run |" in text


def test_tests_of_another_machine_are_added(tmp_path):
    (tmp_path / "before.json").write_text(json.dumps(collected(tmp_path, logs={"soak.json": json.dumps(SOAK)})))
    (tmp_path / "fuzz.log").write_text(FUZZ)
    arguments = ["collect", "--with", tmp_path / "before.json", "--tests", tmp_path / "fuzz.log", "--out"]
    reliability.main([*map(str, (*arguments, tmp_path / "both.json"))])
    found = json.loads((tmp_path / "both.json").read_text())
    assert found["machine"]["accelerator"] == "NVIDIA H200"
    assert (found["launches"], found["fuzz_inputs"], found["fuzz_crashes"]) == (20000, 150000, 0)


@pytest.mark.parametrize("log", ["count fuzz_inputs 5\nFAILED any", "Test: problem_fuzz_test\nSegmentation fault"])
def test_a_crash_of_the_fuzz_test_is_counted(tmp_path, log):
    assert collected(tmp_path, tests={"a.log": FUZZ, "b.log": log})["fuzz_crashes"] == 1


def test_document_is_up_to_date():
    results = sorted((ROOT / "benchmarks" / "results").glob("reliability-*.json"))
    assert results
    reliability.main(["report", *map(str, results), "--check", str(ROOT / "docs" / "reliability.md")])


def test_results_name_no_machine():
    for path in (ROOT / "benchmarks" / "results").glob("reliability-*.json"):
        assert set(json.loads(path.read_text())) == {*reliability.FIELDS, "sanitizers", "versions"}
