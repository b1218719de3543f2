"""What needs processes of its own: XLA's flags, the first call, one process a GPU, full memory, peers that fail."""

import os
import pathlib
import subprocess
import sys

import jax
import lockstep
import pytest
from harness import OPS
from peers import FATES, SAID, STRATEGIES, meet

pytestmark = [pytest.mark.gpu, pytest.mark.multigpu(2)]

SCENARIOS = pathlib.Path(__file__).parent / "scenarios.py"
LIMIT_S = 80


def start(*arguments, **environment):
    if jax.process_count() > 1:
        pytest.skip("starts processes of its own, for all GPUs")
    command = [sys.executable, str(SCENARIOS), *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish(*children):
    """Waits for all of them; one that fails or takes too long takes the others with it."""
    outputs = []
    try:
        for child in children:
            outputs.append(child.communicate(timeout=LIMIT_S)[0])
    except subprocess.TimeoutExpired as expired:
        for child in children:
            child.kill()
        output = "\n".join([*outputs, *(child.communicate()[0] or "" for child in children[len(outputs) :])])
        pytest.fail(f"no end after {LIMIT_S} s: {expired.cmd}\n{output[-6000:]}", pytrace=False)
    for child, output in zip(children, outputs, strict=True):
        if child.returncode or "scenario done" not in output:
            pytest.fail(f"exit status {child.returncode}: {child.args}\n{output[-6000:]}", pytrace=False)
    return outputs


@pytest.mark.parametrize("op", OPS)
def test_cold_first_call(op):
    finish(start("cold", op))


# With the smallest graphs that there can be, everything around and between the calls is captured too.
GRAPHS = {
    "off": "--xla_gpu_enable_command_buffer=",
    "on": "--xla_gpu_enable_command_buffer=+CUSTOM_CALL --xla_gpu_graph_min_graph_size=1",
}


@pytest.mark.parametrize("capture", GRAPHS)
def test_graphs(capture, tmp_path):
    dump = f"--xla_dump_to={tmp_path} --xla_dump_hlo_module_re=.*body.*"
    finish(start("graphs", XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS[capture]} {dump}"))
    # XLA dumps what it runs: a call that is captured stands indented below its command buffer.
    dumped = {path.name: path.read_text(errors="replace").splitlines() for path in tmp_path.glob("*thunk_sequence*")}
    assert any("kCustomCall" in line for lines in dumped.values() for line in lines), sorted(dumped)
    final = [line for name, lines in dumped.items() if "after_thunk_passes" in name for line in lines]
    calls = [line for line in final if "kCustomCall" in line]
    if capture == "on":
        assert calls and all(line.startswith(" ") for line in calls), "\n".join(final)
    else:
        assert not any("kCommandBuffer" in line for line in final), "\n".join(final)


def test_graphs_and_eager_calls_by_turns():
    finish(start("mixed_graphs", XLA_FLAGS=f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS['on']}"))


def test_python_threads():
    finish(start("threads", ENTWINE_TIMEOUT_S="10"))


def test_multiprocessors_that_a_foreign_kernel_has_taken():
    finish(start("foreign_kernel"))


def test_backends_made_anew():
    finish(start("backends"))


def test_exit_with_calls_in_flight():
    child = start("exit_in_flight")
    try:
        output, _ = child.communicate(timeout=LIMIT_S)
    finally:
        child.kill()
    assert child.returncode == 0 and "leaving 200 calls" in output, f"{child.returncode}: {output[-4000:]}"
    assert "Fatal" not in output and "terminate called" not in output, output[-4000:]


def test_one_process_a_gpu():
    finish(*(start("distributed", **environment) for environment in lockstep.environments(len(jax.devices()))))


@pytest.mark.parametrize("devices", ["all", "one"])
def test_arena_that_does_not_fit(devices):
    finish(start("arena_full", devices))


def test_late_peer():
    (output,) = finish(start("late_peer", ENTWINE_TIMEOUT_S="2"))
    # The one that waits, the one that it waits for, and where.
    for words in ("matmul_reduce_scatter: rank 0", "for rank 1", "row", "column", "epoch", "ENTWINE_TIMEOUT_S"):
        assert words in output, f"no {words!r} in:\n{output[-4000:]}"


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("op", OPS)
def test_rank_without_the_call(op, strategy):
    (output,) = finish(start("absent", op, strategy, ENTWINE_TIMEOUT_S="2"))
    said = SAID.search(output)
    assert said is not None and op in said[0], output[-4000:]


@pytest.mark.parametrize("op", OPS)
def test_rank_without_few_rows(op):
    """Of a reduce-scatter and an all-reduce it is packets that don't come."""
    (output,) = finish(start("absent", op, "fused", "few", ENTWINE_TIMEOUT_S="2"))
    said = SAID.search(output)
    assert said is not None and op in said[0], output[-4000:]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("fate", FATES)
def test_peer_that(fate, strategy):
    """is killed, is stopped, or lacks calls, in a process of its own."""
    outcome = meet(fate, strategy)
    assert outcome.in_time, f"{outcome}\n{outcome.output[-6000:]}"
