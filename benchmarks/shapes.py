"""The shapes that are measured, and what one rank's link has to carry for them."""

from __future__ import annotations

import dataclasses

ALL_GATHER = "all_gather_matmul"
REDUCE_SCATTER = "matmul_reduce_scatter"

# One direction of one H200's NVLink as the copy engine drives it with both directions busy, the best of all mechanisms.
LINK_BYTES_PER_SECOND = 385e9


@dataclasses.dataclass(frozen=True)
class Shape:
    """One rank's GEMM: (m, k) @ (k, n); the m rows are the gathered ones, or those that are summed and scattered."""

    op: str
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.op} m={self.m} n={self.n} k={self.k}"

    def link_bytes(self, ranks: int, element_bytes: int = 2) -> int:
        """The fewest bytes that one rank must send: its chunk to every peer, or every peer's chunk of partial sums."""
        columns = self.k if self.op == ALL_GATHER else self.n
        return self.m // ranks * columns * (ranks - 1) * element_bytes

    def link_ms(self, ranks: int) -> float:
        """A model, not a measurement: the bytes over LINK_BYTES_PER_SECOND."""
        return self.link_bytes(ranks) / LINK_BYTES_PER_SECOND * 1e3


SUITES: dict[str, tuple[Shape, ...]] = {
    "ten": (
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
    ),
}

# The whole path in seconds on virtual CPU devices.
TINY: tuple[Shape, ...] = (Shape(REDUCE_SCATTER, 96, 40, 24), Shape(ALL_GATHER, 96, 40, 24))
