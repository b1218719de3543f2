"""The two plots of docs/performance.md. matplotlib is optional: the extra `bench`."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.rows import TITLES, Row, best_over_ours, headline, label, of_strategy, over_ours, peer_title

OURS, LOSES, OTHERS = "#1b6ca8", "#c0392b", ("#7f8c8d", "#b0a160", "#8e6fae", "#5f9e7c", "#c98b5e")
BOUND, BEST = "benchmark_bound.png", "benchmark_best.png"


def write(results: dict[str, Any], folder: pathlib.Path) -> list[pathlib.Path]:
    """Writes both into `folder` and returns their paths."""
    try:
        import matplotlib
    except ImportError as error:
        raise SystemExit("plots need matplotlib: pip install 'entwine-jax[bench]'") from error
    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    machine = f"{results['machine']['devices']} x {results['machine']['accelerator']}"
    fused = of_strategy(results["rows"], "fused") or results["rows"]
    paths = [folder / BOUND, folder / BEST]
    _bound(headline(results["rows"]), machine, paths[0])
    _best(fused, machine, paths[1])
    return paths


def _save(figure: Any, path: pathlib.Path) -> None:
    figure.tight_layout()
    # Without the version of matplotlib, the same numbers give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _names(rows: Sequence[Row]) -> list[str]:
    return [f"{TITLES[row['op']]}\n{label(row)}" for row in rows]


def _bound(rows: Sequence[Row], machine: str, path: pathlib.Path) -> None:
    """Time over the bound: ours, XLA and the peers, a group of bars for each shape."""
    from matplotlib.figure import Figure

    peers = sorted({peer for row in rows for peer in row["peers"]})
    series = {"ours": "ours_ms", "XLA": "xla_ms", **{peer_title(peer): peer for peer in peers}}
    figure = Figure(figsize=(9, 1.2 + 0.17 * (len(series) + 1.5) * len(rows)))
    axes = figure.subplots()
    height = 1 / (len(series) + 1.5)
    for number, (title, key) in enumerate(series.items()):
        for position, row in enumerate(rows):
            ms = row[key] if key in row else row["peers"].get(key)
            if ms is None:
                continue
            value = ms / max(row["gemm_ms"], row["link_ms"])
            loses = title == "ours" and best_over_ours(row) < 1
            color = LOSES if loses else OURS if title == "ours" else OTHERS[(number - 1) % len(OTHERS)]
            place = position + (number - (len(series) - 1) / 2) * height
            axes.barh(place, value, height, color=color)
            axes.text(value, place, f" {value:.2f}", va="center", fontsize=6)
    handles = [
        axes.barh(0, 0, color=OURS if title == "ours" else OTHERS[(number - 1) % len(OTHERS)])
        for number, title in enumerate(series)
    ]
    handles.append(axes.barh(0, 0, color=LOSES))
    axes.legend(handles, [*series, "ours, somebody is faster"], fontsize=7, loc="best")
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), _names(rows), fontsize=7)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.set_xlabel("time over the bound, the larger of GEMM alone and link alone (less is better)", fontsize=8)
    axes.set_title(f"{machine}: m, n, k of one rank", fontsize=9)
    _save(figure, path)


def _best(rows: Sequence[Row], machine: str, path: pathlib.Path) -> None:
    """Every row's fastest other over ours: losing rows are red and left of the line."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 1.2 + 0.2 * len(rows)))
    axes = figure.subplots()
    for position, row in enumerate(rows):
        others = over_ours(row)
        best = min(others, key=others.__getitem__)
        axes.barh(position, others[best] - 1, left=1, color=LOSES if others[best] < 1 else OURS)
        axes.text(max(others[best], 1), position, f" {others[best]:.2f} {best}", va="center", fontsize=6)
    axes.axvline(1, color="black", linewidth=0.8)
    names = [name.replace("\n", "  ") for name in _names(rows)]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.margins(x=0.25, y=0.01)
    axes.set_xlabel("time of the fastest other over ours (more is better)", fontsize=8)
    axes.set_title(f"{machine}: every row, m, n, k of one rank", fontsize=9)
    _save(figure, path)
