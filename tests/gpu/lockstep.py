"""The GPU tests in several processes that all run the same ones, as JAX programs of many processes do.

    python tests/gpu/lockstep.py 2 tests/gpu -k exact          two processes; what follows is for pytest

Each process has one GPU. Where there are fewer GPUs, processes share them: that shows whether what is computed is
right, not how fast. NCCL must be told that it is meant, and 2.30 is the oldest that can be. So one GPU is enough to
test teams of up to eight. Processes take turns of some milliseconds, or run at the same time on a share of the
multiprocessors each, which is many times faster, if CUDA's multi-process service runs (`nvidia-cuda-mps-control -d`).
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time

# "process/processes/port/GPUs", in the environment of each.
VARIABLE = "ENTWINE_LOCKSTEP"


def join() -> int:
    """Makes this process the one that its environment says it is, if it says so; before JAX touches a device. How many
    processes there are."""
    if VARIABLE not in os.environ:
        return 1
    import jax

    process, processes, port, gpus = map(int, os.environ[VARIABLE].split("/"))
    jax.distributed.initialize(f"localhost:{port}", processes, process, local_device_ids=[process % gpus])
    return processes


def shared() -> bool:
    """Whether processes share GPUs here."""
    _, processes, _, gpus = map(int, os.environ.get(VARIABLE, "0/1/0/1").split("/"))
    return processes > gpus


def environments(processes: int) -> list[dict[str, str]]:
    """One for each process of a new team."""
    gpus = count_gpus()
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    made, together = dict(os.environ), -(-processes // gpus)
    if together > 1:
        made["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        # All kernels that wait for each other must fit at once.
        made.setdefault("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", str(100 // together))
    # Each takes its share of a GPU's memory at start; arenas and communicators need some beside.
    made.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", str(0.5 / together))
    return [made | {VARIABLE: f"{process}/{processes}/{port}/{gpus}"} for process in range(processes)]


def count_gpus() -> int:
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def run(command: list[str], environments: list[dict[str, str]]) -> int:
    """The worst exit status. A process that fails or ends early leaves the others waiting for it: they are ended soon
    after. What the first says is shown as it comes; of the others, what those said that failed."""
    with contextlib.ExitStack() as files:
        outputs = [None, *(files.enter_context(tempfile.TemporaryFile("w+")) for _ in environments[1:])]
        children = [
            subprocess.Popen(command, env=environment, stdout=output, stderr=output and subprocess.STDOUT)
            for environment, output in zip(environments, outputs, strict=True)
        ]
        statuses = statuses_of(children)
        for i, (status, output) in enumerate(zip(statuses, outputs, strict=True)):
            if status and output is not None:
                output.seek(0)
                print(f"process {i} ended with {status}:\n{output.read()[-8000:]}", flush=True)
    return max(statuses)


def statuses_of(children: list[subprocess.Popen[bytes]]) -> list[int]:
    """How they ended, all of them soon after the first."""
    try:
        while all(child.poll() is None for child in children):
            time.sleep(0.1)
        for child in children:
            child.wait(30)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for child in children:
            child.kill()
    return [abs(child.wait()) for child in children]


def main() -> int:
    processes, *arguments = sys.argv[1:]
    return run([sys.executable, "-m", "pytest", *arguments], environments(int(processes)))


if __name__ == "__main__":
    sys.exit(main())
