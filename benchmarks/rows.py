"""What tables and plots read from a benchmark's JSON; what older files lack is derived from the medians."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.shapes import ALL_GATHER, ALL_REDUCE_OP, REDUCE_SCATTER

Row = dict[str, Any]

TITLES = {
    ALL_GATHER: "all-gather + matmul",
    REDUCE_SCATTER: "matmul + reduce-scatter",
    ALL_REDUCE_OP: "matmul + all-reduce",
}
SUITE_TITLES = {
    "ten": "Ten shapes",
    "tp8": "MLPs of known models, split 8 ways",
    "small": "Few rows",
    "all_reduce": "All-reduce",
    "decode": "A decoder's few rows",
    "fp8": "float8",
    "decode_fp8": "A decoder's few rows in float8",
    "strategies": "Strategies side by side",
    "tiny": "Tiny shapes: a smoke test",
}
PEER_TITLES = {
    "xla_windowed": "XLA windowed",
    "pallas": "Pallas",
    "torch_symm_mem": "torch symm_mem",
    "torch_sequential": "torch sequential",
}


def peer_title(peer: str) -> str:
    return PEER_TITLES.get(peer, peer)


def ours_over_gemm(row: Row) -> float:
    return float(row.get("ours_over_gemm", row["ours_ms"] / row["gemm_ms"]))


def xla_over_ours(row: Row) -> float:
    return 1 / float(row.get("ours_over_xla", row["ours_ms"] / row["xla_ms"]))


def bound_over_ours(row: Row) -> float:
    return float(row.get("bound_over_ours", max(row["gemm_ms"], row["link_ms"]) / row["ours_ms"]))


def link_is_modelled(row: Row) -> bool:
    return bool(row.get("link_source", "model") == "model")


def over_ours(row: Row) -> dict[str, float]:
    """By title, how many times as long as ours the others take; XLA's is paired, the peers' are of other processes."""
    return {
        "XLA": xla_over_ours(row),
        **{peer_title(peer): ms / row["ours_ms"] for peer, ms in sorted(row["peers"].items())},
    }


def normalised(row: Row, title: str) -> float | None:
    """The same after dividing each by the GEMM of its own process: clocks differ between processes."""
    for peer, details in row.get("peer_details", {}).items():
        if peer_title(peer) == title:
            return float(details["over_gemm"] / ours_over_gemm(row))
    return None


def best_over_ours(row: Row) -> float:
    return min(over_ours(row).values())


def of_strategy(rows: Sequence[Row], strategy: str) -> list[Row]:
    return [row for row in rows if row["strategy"] == strategy]


def headline(rows: Sequence[Row]) -> list[Row]:
    """What the README shows: the ten shapes, fused; all there is where there are none."""
    fused = of_strategy(rows, "fused") or list(rows)
    return [row for row in fused if row["suite"] == "ten"] or fused


def label(row: Row) -> str:
    return f"{row['m']}, {row['n']}, {row['k']}"


def widest_spread(rows: Sequence[Row]) -> tuple[float, float]:
    """Of all variants the largest and the median interquartile range, as a share of the median."""
    spreads = [spread for row in rows for spread in row["spread"].values()]
    return max(spreads), statistics.median(spreads)
