"""The shapes that are measured, and what one rank's link has to carry for them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

ALL_GATHER = "all_gather_matmul"
REDUCE_SCATTER = "matmul_reduce_scatter"
ALL_REDUCE_OP = "matmul_all_reduce"

# One direction of one H200's NVLink as the copy engine drives it with both directions busy, the best of all mechanisms.
LINK_BYTES_PER_SECOND = 385e9


# To dispatch a program takes 0.15 to 0.5 ms of the host's time: what one lasts, so that it is always ahead.
PROGRAM_MS = 2.0
MOST_CALLS = 40


@dataclasses.dataclass(frozen=True)
class Shape:
    """One rank's GEMM: (m, k) @ (k, n); the m rows are the gathered ones, or those that are summed, and scattered or
    not."""

    op: str
    m: int
    n: int
    k: int
    float8: bool = False  # operands; the result is bfloat16 anyway

    def __str__(self) -> str:
        return f"{self.op} m={self.m} n={self.n} k={self.k}{' float8' if self.float8 else ''}"

    def link_bytes(self, ranks: int) -> int:
        """The fewest bytes that one rank must send: its chunk to every peer, or every peer's chunk of partial sums; to
        all-reduce, both."""
        return self.chunk_bytes(ranks) * (ranks - 1)

    def chunk_bytes(self, ranks: int) -> int:
        """What one rank sends to one peer: x, or partial sums."""
        columns = self.k if self.op == ALL_GATHER else self.n
        element_bytes = 1 if self.float8 and self.op == ALL_GATHER else 2
        return -(-self.m // ranks) * columns * element_bytes * (2 if self.op == ALL_REDUCE_OP else 1)

    def calls(self, most: int) -> int:
        """So many that a program of them takes PROGRAM_MS, but 2 to `most`: by the GEMM's or the weights' time,
        and something for each call."""
        weights = self.n * self.k * (1 if self.float8 else 2)
        ms = max(2 * self.m * self.n * self.k / 700e12, weights / 4e12) * 1e3 + 0.01
        return min(most, max(2, round(PROGRAM_MS / ms)))

    def link_ms(self, ranks: int) -> float:
        """A model, not a measurement: the bytes over LINK_BYTES_PER_SECOND."""
        return self.link_bytes(ranks) / LINK_BYTES_PER_SECOND * 1e3


TEN: tuple[Shape, ...] = (
    Shape(REDUCE_SCATTER, 8192, 8192, 3584),
    Shape(REDUCE_SCATTER, 4096, 8192, 2048),
    Shape(REDUCE_SCATTER, 16384, 12288, 6144),
    Shape(REDUCE_SCATTER, 8192, 8192, 1024),
    Shape(REDUCE_SCATTER, 2048, 8192, 3584),
    Shape(ALL_GATHER, 8192, 4096, 7168),
    Shape(ALL_GATHER, 4096, 4096, 4096),
    Shape(ALL_GATHER, 16384, 6144, 12288),
    Shape(ALL_GATHER, 8192, 4096, 2048),
    Shape(ALL_GATHER, 2048, 4096, 7168),
)


def _mlp(model: int, hidden: int, rows: tuple[int, ...], ways: int = 8) -> Iterator[Shape]:
    """The MLP of one model split `ways` ways: up projection (all-gather) and down projection (reduce-scatter)."""
    for m in rows:
        yield Shape(ALL_GATHER, m, hidden // ways, model)
        yield Shape(REDUCE_SCATTER, m, model, hidden // ways)


# Two m for each model, so that 24 rows cover the models, their two ops and every m from 1024 to 16384.
TP8: tuple[Shape, ...] = (
    *_mlp(12288, 49152, (2048, 8192)),  # GPT-3 175B
    *_mlp(4096, 14336, (4096, 16384)),  # Llama-3 8B
    *_mlp(8192, 28672, (1024, 4096)),  # Llama-3 70B
    *_mlp(16384, 53248, (1024, 4096)),  # Llama-3 405B
    *_mlp(8192, 29568, (2048, 8192)),  # Qwen2 72B, 3696 columns: no multiple of a tile
    *_mlp(5120, 25600, (1024, 16384)),  # Qwen3 32B
)

SMALL: tuple[Shape, ...] = (
    *_mlp(8192, 28672, (16, 32, 64, 128, 256, 512)),  # Llama-3 70B
    *_mlp(4096, 14336, (64, 256)),  # Llama-3 8B
)

# A decoder's layers, Llama-3 70B split 8 ways: the down projection's sum, and a gate or up projection (more rows of
# which are in SMALL).
DECODE: tuple[Shape, ...] = (
    Shape(ALL_GATHER, 8, 3584, 8192),
    *(Shape(ALL_REDUCE_OP, m, 8192, 3584) for m in (1, 8, 32, 64, 128, 256)),
)

ALL_REDUCE: tuple[Shape, ...] = tuple(
    dataclasses.replace(shape, op=ALL_REDUCE_OP) for shape in TEN if shape.op == REDUCE_SCATTER
)

# Beside each of them the same in bfloat16 is timed.
FLOAT8: tuple[Shape, ...] = (
    Shape(ALL_GATHER, 8192, 4096, 7168, float8=True),
    Shape(ALL_GATHER, 8192, 8192, 7168, float8=True),
    Shape(ALL_GATHER, 4096, 4096, 4096, float8=True),
    Shape(REDUCE_SCATTER, 8192, 8192, 3584, float8=True),
    Shape(REDUCE_SCATTER, 8192, 8192, 7168, float8=True),
    Shape(REDUCE_SCATTER, 4096, 8192, 2048, float8=True),
)
DECODE_FLOAT8: tuple[Shape, ...] = tuple(dataclasses.replace(shape, float8=True) for shape in DECODE)
# Some of these, with and without a bias and an activation: epilogues.py.
EPILOGUES: tuple[Shape, ...] = (
    Shape(ALL_GATHER, 8192, 4096, 7168),
    Shape(ALL_GATHER, 4096, 4096, 4096),
    Shape(ALL_GATHER, 8192, 4096, 2048),
    Shape(REDUCE_SCATTER, 8192, 8192, 3584),
    Shape(REDUCE_SCATTER, 4096, 8192, 2048),
    Shape(ALL_REDUCE_OP, 4096, 8192, 2048),
    Shape(ALL_GATHER, 8, 3584, 8192),
    Shape(ALL_REDUCE_OP, 32, 8192, 3584),
)

SUITES: dict[str, dict[str, tuple[Shape, ...]]] = {
    "ten": {"ten": TEN},
    "tp8": {"tp8": TP8},
    "small": {"small": SMALL},
    "all_reduce": {"all_reduce": ALL_REDUCE},
    "decode": {"decode": DECODE},
    "fp8": {"fp8": FLOAT8},
    "decode_fp8": {"decode_fp8": DECODE_FLOAT8},
    "epilogues": {"epilogues": EPILOGUES},
    "strategies": {"strategies": (*TEN, *ALL_REDUCE)},
    "all": {"ten": TEN, "tp8": TP8, "small": SMALL, "all_reduce": ALL_REDUCE, "decode": DECODE},
}

# The whole path in seconds on virtual CPU devices.
TINY: tuple[Shape, ...] = tuple(Shape(op, 96, 40, 24) for op in (REDUCE_SCATTER, ALL_GATHER, ALL_REDUCE_OP))
TINY_FLOAT8: tuple[Shape, ...] = tuple(dataclasses.replace(shape, float8=True) for shape in TINY)
