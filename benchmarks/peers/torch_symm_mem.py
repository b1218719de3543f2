"""torch: symm_mem's fused ops (async tensor parallelism), and NCCL and cuBLAS one after the other.

One process a GPU, started from here as torchrun would. The environment is the caller's: where it forbids NVLink
multicast (NCCL_NVLS_ENABLE=0, TORCH_SYMM_MEM_DISABLE_MULTICAST=1), that holds here too. Eager, as these ops are used;
every call has its own operands, as everywhere in this benchmark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks import rounds
from benchmarks.peers import Job, Results
from benchmarks.shapes import ALL_GATHER, ALL_REDUCE_OP, Shape

# Both sum bfloat16 partial sums, and may round to bfloat16 after every addition.
_TOLERANCE = 2e-2

_MODULE, _IS_RANK = "benchmarks.peers.torch_symm_mem", "rank"
FUSED, SEQUENTIAL = "torch_symm_mem", "torch_sequential"


def _rank_command(job: Job) -> list[str]:
    return [sys.executable, "-m", _MODULE, job.dump(), _IS_RANK]


def launch(job: Job) -> int:
    """Starts the ranks and waits; if one fails, the others are ended, for they would wait for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started: list[subprocess.Popen[bytes]] = []
    for rank in range(job.ranks):
        place = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": job.ranks,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = {**os.environ, **{name: str(value) for name, value in place.items()}}
        # In this process's group, so that whoever ends the group ends them.
        started.append(subprocess.Popen(_rank_command(job), env=environment))
    try:
        while (statuses := [process.poll() for process in started]).count(None) and not any(statuses):
            time.sleep(0.1)
        time.sleep(0.5 if any(statuses) else 0)  # the others may have something to say too
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
    return next((status for status in statuses if status), 0)


class Rank:
    """One rank's process."""

    def __init__(self, job: Job) -> None:
        import torch
        import torch.distributed as dist
        import torch.distributed._symmetric_memory as symmetric_memory

        self._torch, self._dist, self._job = torch, dist, job
        self.rank = int(os.environ["RANK"])
        torch.cuda.set_device(self.rank)
        self._device = torch.device("cuda", self.rank)
        dist.init_process_group("nccl", device_id=self._device)
        self._group = dist.group.WORLD.group_name
        with contextlib.suppress(Exception):  # newer versions need and have it no longer
            symmetric_memory.enable_symm_mem_for_group(self._group)
        torch.manual_seed(self.rank)

    def close(self) -> None:
        self._dist.destroy_process_group()

    def versions(self) -> dict[str, str]:
        return {
            "torch": str(self._torch.__version__),
            "torch's nccl": ".".join(map(str, self._torch.cuda.nccl.version())),
        }

    def _random(self, rows: int, columns: int, scale: float = 1.0) -> Any:
        drawn = self._torch.randn(rows, columns, device=self._device, dtype=self._torch.bfloat16)
        return drawn.mul_(scale)

    def _empty(self, rows: int, columns: int) -> Any:
        return self._torch.empty(rows, columns, device=self._device, dtype=self._torch.bfloat16)

    def _variants(self, shape: Shape) -> dict[str, Callable[[int], Any]]:
        """By name what call number i does; it returns its result."""
        torch, dist, group = self._torch, self._dist, self._group
        ranks, calls = self._job.ranks, shape.calls(self._job.calls)
        m, n, k = shape.m, shape.n, shape.k
        ws = [self._random(k, n, k**-0.5) for _ in range(calls)]
        whole = self._empty(m, n)

        if shape.op == ALL_GATHER:
            xs = [self._random(m // ranks, k) for _ in range(calls)]
            gathered = self._random(m, k)

            def gemm(call: int) -> Any:
                return torch.matmul(gathered, ws[call], out=whole)

            def sequential(call: int) -> Any:
                dist.all_gather_into_tensor(gathered, xs[call])
                return torch.matmul(gathered, ws[call], out=whole)

            def fused(call: int) -> Any:
                return torch.ops.symm_mem.fused_all_gather_matmul(xs[call], [ws[call]], 0, group)[1][0]

        else:
            xs = [self._random(m, k) for _ in range(calls)]
            scattered = self._empty(m // ranks, n)

            def gemm(call: int) -> Any:
                return torch.matmul(xs[call], ws[call], out=whole)

            def sequential(call: int) -> Any:
                torch.matmul(xs[call], ws[call], out=whole)
                dist.reduce_scatter_tensor(scattered, whole)
                return scattered

            def fused(call: int) -> Any:
                return torch.ops.symm_mem.fused_matmul_reduce_scatter(xs[call], ws[call], "sum", 0, group)

        if shape.op == ALL_REDUCE_OP:  # symm_mem has no fused one

            def reduced(call: int) -> Any:
                dist.all_reduce(gemm(call))
                return whole

            return {SEQUENTIAL: reduced, "gemm": gemm}
        return {FUSED: fused, SEQUENTIAL: sequential, "gemm": gemm}

    def _sampler(self, variant: Callable[[int], Any], calls: int) -> rounds.Sampler:
        def sample(programs: int) -> float:
            """From the end of a program before them, as in chains.py."""
            start, end = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._torch.cuda.synchronize()
            self._dist.barrier()
            for program in range(programs + 1):
                for call in range(calls):
                    variant(call)
                if program == 0:
                    start.record()
            end.record()
            self._torch.cuda.synchronize()
            return float(start.elapsed_time(end)) * 1e-3

        return sample

    def _slowest(self, values: list[float]) -> list[float]:
        """The same on all ranks: so many repeats, or the time of the slowest."""
        tensor = self._torch.tensor(values, device=self._device, dtype=self._torch.float64)
        self._dist.all_reduce(tensor, self._dist.ReduceOp.MAX)
        return [float(value) for value in tensor.tolist()]

    def any_of(self, flag: bool) -> bool:
        return bool(self._slowest([float(flag)])[0])

    def measure(self, shape: Shape, notes: list[str]) -> dict[str, dict[str, Any]]:
        variants = self._variants(shape)
        errors = {SEQUENTIAL: 0.0}
        try:
            if FUSED not in variants:
                raise NotImplementedError("there is no fused all-reduce")
            want = variants[SEQUENTIAL](0).float().clone()
            got = variants[FUSED](0).float()
            error = self._slowest([float((got - want).norm() / want.norm())])[0]
            del got, want
            if not error <= _TOLERANCE:
                raise ArithmeticError(f"its result is {error:.1e} away from that of NCCL and cuBLAS")
            errors[FUSED] = error
        except Exception as error:  # on all ranks alike; a peer's fault is a note
            notes.append(f"{shape}: {FUSED}: {type(error).__name__}: {error}"[:500])
            variants.pop(FUSED, None)
        calls = shape.calls(self._job.calls)
        samplers = {name: self._sampler(variant, calls) for name, variant in variants.items()}
        repeats: dict[str, int] = {}
        for name, sampler in samplers.items():
            for _ in range(2):
                sampler(1)
            # All ranks must run it equally often, so none may choose by its own clock.
            repeats[name] = rounds.repeats_of(self._slowest([sampler(3) / 3])[0], self._job.sample_seconds)
        samples = rounds.sample_rounds(samplers, repeats, self._job.rounds, str(shape))
        samples = {name: self._slowest(seconds) for name, seconds in samples.items()}
        return {name: rounds.details(samples, name, calls) | {"error": error} for name, error in errors.items()}


def work(job: Job) -> None:
    rank = Rank(job)
    leads = rank.rank == 0
    results = Results(job if leads else dataclasses.replace(job, out=os.devnull), rank.versions())
    for shape in job.shapes:
        if rank.any_of(leads and results.left() < 0):  # one rank's clock decides for all
            if leads:
                results.note(f"out of time ({job.seconds:.0f} s) before {shape}")
            break
        notes: list[str] = []
        found = rank.measure(shape, notes)
        if leads:
            for note in notes:
                results.note(note)
            results.add(shape, found)
    rank.close()


def main(job: Job, is_rank: bool) -> None:
    if is_rank:
        work(job)
    else:
        sys.exit(launch(job))


if __name__ == "__main__":
    main(Job.load(sys.argv[1]), _IS_RANK in sys.argv[2:])
