"""simulate_tiles: what every cluster of a collective matmul should do when, without a GPU."""

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from . import _spans
from ._config import OURS, Config
from ._cost_model import Model
from ._spans import SPAN, Drawing
from ._strategy import Plan


@dataclasses.dataclass(frozen=True)
class SimulatedCall:
    """One rank's call, as the cost model goes through it.

    ``spans`` is a structured array: from ``begin`` to ``end``, in microseconds, ``worker`` (a cluster of two
    multiprocessors; after the last one NCCL or copy engines) has the ``role``, an index of ``("multiply", "wait for
    rows", "wait for partial sums", "move", "transfer", "copy to y")``, for the tile ``owner``, ``row`` block and
    ``column``. The own rank is 0. Of a transfer and a copy, ``row`` is the group.
    """

    op: str
    strategy: str
    ranks: int
    us: float
    plan: Plan
    spans: np.ndarray[Any, Any]
    link_bytes: np.ndarray[Any, Any]
    bin_us: float

    def of(self, role: str) -> np.ndarray[Any, Any]:
        """The spans of one role."""
        return _spans.of_role(self.spans, role)

    def link_rate(self, window_us: float = 10.0) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Times in microseconds, and the GB/s that the rank sent in the window that ends there."""
        bins = max(1, round(window_us / self.bin_us))
        whole = np.zeros(-(-max(len(self.link_bytes), 1) // bins) * bins)
        whole[: len(self.link_bytes)] = self.link_bytes
        sent = whole.reshape(-1, bins).sum(1)
        return (np.arange(len(sent)) + 1) * bins * self.bin_us, sent / (bins * self.bin_us) * 1e-3

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the Chrome trace format, for chrome://tracing or ui.perfetto.dev: a thread a cluster."""
        name = f"{self.op}, {self.strategy}, simulated"
        events = [*_spans.chrome_events(self.op, 0, self.spans, self.link_rate()), _spans.process_name(0, name)]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

    def drawing(self, window_us: float = 2.0) -> Drawing:
        """What a picture has of this call."""
        return Drawing(0, self.us, self.spans, self.link_rate(window_us))

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws a PNG file: clusters over time, coloured by role and by whose the tile is, and the link's rate.

        Raises:
          ImportError: matplotlib isn't installed (``pip install 'entwine-jax[bench]'``).
        """
        _spans.draw({f"{self.op}, {self.strategy}": self.drawing()}, "simulated", path, workers="cluster")


def simulate_tiles(
    op: str,
    m: int,
    n: int,
    k: int,
    ranks: int,
    *,
    strategy: str = "fused",
    dtype: DTypeLike = jnp.bfloat16,
    out_dtype: DTypeLike | None = None,
    config: Config | None = None,
    machine: Mapping[str, float] | None = None,
) -> SimulatedCall:
    """What every cluster of multiprocessors should do when, in a collective matmul on Hopper GPUs. Runs anywhere.

    The simulation is that of `cost_model`, which has the arguments and what they may be; `trace_tiles` measures the
    like on GPUs::

        call = entwine_jax.simulate_tiles("matmul_reduce_scatter", 8192, 8192, 3584, 2, strategy="resident")
        call.save("resident.json")  # for ui.perfetto.dev

    Args:
      op, m, n, k, ranks, dtype, out_dtype, config, machine: as `cost_model` takes them.
      strategy: ``"fused"``, ``"resident"`` or ``"signal"``.

    Returns:
      A `SimulatedCall`.

    Raises:
      ValueError: strategy is another one or can't run this call, has no tiles for so few rows, or one of the others is
        out of range.
      TypeError: no kernel takes dtype or gives out_dtype.
    """
    model = Model(op, m, n, k, ranks, dtype=dtype, out_dtype=out_dtype, config=config, machine=machine)
    can = model.strategies()
    if strategy not in can:
        names = f"use one of {tuple(can)}" if can else f"rows of {m} x {k} and {m} x {n} must be multiples of 16 bytes"
        known = "can't run this call" if strategy in OURS else "is unknown"
        raise ValueError(f"entwine_jax.simulate_tiles: strategy={strategy!r} {known}; {names}")
    plan, times, found = model.simulate(strategy, spans=True)
    if plan.few_rows:
        raise ValueError(
            f"entwine_jax.simulate_tiles: m={m} rows have kernels without tiles; pass config=Config(few_rows=False)"
        )
    return SimulatedCall(
        op=op,
        strategy=strategy,
        ranks=ranks,
        us=times["us"],
        plan=plan,
        spans=np.frombuffer(found["spans"], SPAN),
        link_bytes=np.array(found["link_bytes"]),
        bin_us=found["bin_us"],
    )
