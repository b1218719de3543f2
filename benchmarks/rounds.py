"""Samples in rounds, each in an order of its own, and the statistics of them. Knows neither JAX nor torch.

GPUs at their power limit remember what ran before: what follows a hot, compute-bound sample is clocked lower than what
follows a cool, communication-bound one, by several percent, and clocks drift and jump between states besides. So

* every round has a random order (seeded, hence the same in every run and on every rank) of a design in which every
  variant comes behind every other equally often (Williams, Aust. J. Sci. Res. A 2, 1949). Where orders are random
  alone, some predecessors come twice as often as others in a hundred rounds, and the same program, timed as two
  variants, was 2 % slower as one of them;
* samples are short, 20 ms: clocks follow the load within some 40, so that longer samples are each at a clock of their
  own (the rounds' ratios were spread by 15 %, with 20 ms by 5 %), and shorter ones are made of a start and an end;
* ratios are taken within a round, where the clocks are alike, and their median is reported, not the medians' ratio.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

SAMPLE_SECONDS = 0.02
MOST_REPEATS = 512

# Runs something so many times in a row and returns the seconds it took.
Sampler = Callable[[int], float]


def repeats_for(sampler: Sampler, sample_seconds: float) -> int:
    """How often to run it for a sample of that length; warms up."""
    sampler(1)
    repeats, seconds = 1, sampler(1)
    # One run alone has latencies that runs in a row hide.
    while seconds < sample_seconds / 4 and repeats < MOST_REPEATS:
        repeats = min(MOST_REPEATS, math.ceil(repeats * min(10.0, sample_seconds / 2 / seconds)))
        seconds = sampler(repeats)
    return repeats_of(seconds / repeats, sample_seconds)


def repeats_of(seconds: float, sample_seconds: float) -> int:
    """How often to run for a sample what takes `seconds` once."""
    return max(1, min(MOST_REPEATS, math.ceil(sample_seconds / seconds)))


def sample_rounds(
    samplers: Mapping[str, Sampler], repeats: Mapping[str, int], rounds: int, seed: str
) -> dict[str, list[float]]:
    """Seconds of one repeat: of every variant one sample a round."""
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for order in itertools.islice(orders(list(samplers), seed), rounds):
        for name in order:
            samples[name].append(samplers[name](repeats[name]) / repeats[name])
    return samples


def orders(names: Sequence[str], seed: str) -> Iterator[list[str]]:
    """Of so many rounds as there are names, twice as many where their number is odd, each has every other behind it
    once, or twice; and then anew."""
    generator, count = random.Random(seed), len(names)
    # 0, 1, n - 1, 2, n - 2, ...: neighbours differ by every number modulo n, of an odd n once each way together with
    # the mirror image.
    zigzag = [(i + 1) // 2 if i % 2 else (count - i // 2) % count for i in range(count)]
    rows = [[(place + shift) % count for place in zigzag] for shift in range(count)]
    if count % 2:
        rows += [row[::-1] for row in rows]
    while True:
        named = generator.sample(list(names), count)
        generator.shuffle(rows)
        for row in rows:
            yield [named[place] for place in row]


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> float:
    """The median of the rounds' own ratios."""
    return statistics.median(n / d for n, d in zip(numerators, denominators, strict=True))


def spread(samples: Sequence[float]) -> float:
    """The interquartile range over the median."""
    low, _, high = statistics.quantiles(samples, n=4) if len(samples) > 1 else (samples[0],) * 3
    return (high - low) / statistics.median(samples)


def details(samples: Mapping[str, Sequence[float]], name: str, calls: int) -> dict[str, Any]:
    """What is reported of one peer; `samples` are seconds of `calls` calls each."""
    found = {
        "ms": statistics.median(samples[name]) / calls * 1e3,
        "spread": spread(samples[name]),
        "gemm_ms": statistics.median(samples["gemm"]) / calls * 1e3,
        "over_gemm": paired(samples[name], samples["gemm"]),
    }
    if "xla" in samples:
        found["over_xla"] = paired(samples[name], samples["xla"])
    return found


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))
