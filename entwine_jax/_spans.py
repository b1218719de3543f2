"""Who did what from when to when in a call, and what the link carried: written for ui.perfetto.dev, and drawn."""

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

# cc/simulate/spans.h
ROLES = ("multiply", "wait for rows", "wait for partial sums", "move", "transfer", "copy to y")
SPAN = np.dtype(
    [
        ("begin", "f8"),
        ("end", "f8"),
        ("worker", "u4"),
        ("role", "u4"),
        ("owner", "u4"),
        ("row", "u4"),
        ("column", "u4"),
    ],
    align=True,
)

Spans = np.ndarray[Any, Any]

COLORS = {
    "tile for another rank": "#c98b5e",
    "own tile": "#1b6ca8",
    "moves": "#5f9e7c",
    "waits": "#b3423a",
    "copies to y": "#8a8a8a",
}


def of_role(spans: Spans, role: str) -> Spans:
    """Those of one role; ValueError if there is no such role."""
    if role not in ROLES:
        raise ValueError(f"entwine_jax: role={role!r} is unknown; use one of {ROLES}")
    found: Spans = spans[spans["role"] == ROLES.index(role)]
    return found


def chrome_events(
    op: str, process: int, spans: Spans, rate: tuple[Spans, Spans], start_us: float = 0.0
) -> list[dict[str, Any]]:
    """Events of the Chrome trace format: a thread a worker, and the link's rate."""
    events: list[dict[str, Any]] = [
        {"name": ROLES[span["role"]], "cat": op, "ph": "X", "pid": process, "tid": int(span["worker"])}
        | {"ts": start_us + float(span["begin"]), "dur": float(span["end"] - span["begin"])}
        | {"args": {"owner": int(span["owner"]), "row": int(span["row"]), "column": int(span["column"])}}
        for span in spans
    ]
    for us, sent in zip(*rate, strict=True):
        events.append({"name": "link GB/s", "ph": "C", "pid": process, "ts": start_us + float(us)})
        events[-1]["args"] = {"sent": float(sent)}
    return events


def process_name(process: int, name: str) -> dict[str, Any]:
    return {"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}}


class Drawing(NamedTuple):
    """One call's part of a picture."""

    rank: int  # whose tiles are own ones
    us: float
    spans: Spans
    rate: tuple[Spans, Spans]


def kinds(spans: Spans, rank: int) -> dict[str, Spans]:
    """Spans by what they are coloured as."""
    multiplied = of_role(spans, "multiply")
    return {
        "tile for another rank": multiplied[multiplied["owner"] != rank],
        "own tile": multiplied[multiplied["owner"] == rank],
        "moves": np.concatenate([of_role(spans, "move"), of_role(spans, "transfer")]),
        "waits": np.concatenate([of_role(spans, "wait for rows"), of_role(spans, "wait for partial sums")]),
        "copies to y": of_role(spans, "copy to y"),
    }


def draw(
    calls: Mapping[str, Drawing],
    title: str,
    path: str | os.PathLike[str],
    *,
    workers: str = "worker",
    most_gb_per_s: float | None = None,
) -> None:
    """A PNG file: for each call its workers over time, coloured by role and owner, and the link's rate beneath.

    Raises:
      ImportError: matplotlib isn't installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError(
            "entwine_jax: to draw a picture needs matplotlib: pip install 'entwine-jax[bench]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(10, 0.5 + 2.6 * len(calls)))
    axes = figure.subplots(2 * len(calls), 1, sharex=True, gridspec_kw={"height_ratios": [2.2, 1] * len(calls)})
    longest = max(call.us for call in calls.values())
    for number, (name, call) in enumerate(calls.items()):
        rows, link = axes[2 * number], axes[2 * number + 1]
        # What copies and is no cluster or CTA is drawn apart from these, and broader.
        copies = np.isin(call.spans["role"], (ROLES.index("transfer"), ROLES.index("copy to y")))
        last = int(call.spans["worker"][~copies].max(initial=0))
        broad = max(1, (last + 1) // 16)
        for kind, spans in kinds(call.spans, call.rank).items():
            widths = spans["end"] - spans["begin"]
            workers_of = spans["worker"].astype(float)
            apart = np.where(workers_of > last, last + (workers_of - last) * (broad + 1), workers_of)
            heights = np.where(workers_of > last, broad, 0.9)
            rows.barh(apart, widths, heights, left=spans["begin"], color=COLORS[kind], edgecolor="white", lw=0.15)
        rows.set_ylabel(workers, fontsize=7)
        rows.set_title(f"{name}: {call.us:.0f} us", fontsize=9, loc="left")
        times, rates = call.rate
        link.fill_between(times, rates, step="pre", color=COLORS["moves"])
        link.set_ylabel("link GB/s", fontsize=7)
        link.set_ylim(0, most_gb_per_s)
        for each in (rows, link):
            each.tick_params(labelsize=6)
            each.set_xlim(0, longest)
    patches = [Patch(color=color, label=kind) for kind, color in COLORS.items()]
    figure.legend(handles=patches, fontsize=7, loc="upper right", ncols=len(patches))
    axes[-1].set_xlabel("microseconds", fontsize=8)
    figure.suptitle(title, fontsize=9, x=0.02, ha="left")
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})
