"""Which of several is the fastest, in short samples that take turns. Knows nothing of JAX.

GPUs at their power limit remember what ran before, and their clocks drift. So samples are short, every round has a
random order of its own (seeded: the same in every run and process), and two are compared by the ratios within each
round. What is clearly slower leaves the race early; what isn't slower beyond the noise is a tie.
"""

import dataclasses
import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence

SAMPLE_SECONDS = 0.01
MOST_REPEATS = 256
LEAST_ROUNDS, MOST_ROUNDS = 4, 16
# Not in the race at all: by so much slower when it warms up.
HOPELESS = 4
# Out of it: slower in every round, and by so much in the middle.
CLEARLY_SLOWER = 1.05
# A tie: by less than this in the middle, or not even slower in three rounds of four.
SLOWER = 1.01

# Runs something so many times in a row and returns the seconds it took.
Sampler = Callable[[int], float]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Seconds of one run, by name and round; those of one that left the race end sooner."""

    seconds: dict[str, list[float]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratios(self, name: str, other: str) -> list[float]:
        return [a / b for a, b in zip(self.seconds[name], self.seconds[other], strict=False)]

    def fastest(self, names: Sequence[str]) -> str:
        """The one that took part longest, of these the one with the least median, of equals the first."""
        longest = max(len(self.seconds[name]) for name in names)
        return min((name for name in names if len(self.seconds[name]) == longest), key=self.median)

    def slower(self, name: str, other: str) -> bool:
        ratios = sorted(self.ratios(name, other))
        return statistics.median(ratios) > SLOWER and ratios[len(ratios) // 4] > 1

    def choose(self, names: Sequence[str]) -> str:
        """Of those that tie with the fastest the first: names are in order of preference."""
        fastest = self.fastest(names)
        return next(name for name in names if name == fastest or not self.slower(name, fastest))


def race(samplers: Mapping[str, Sampler], clock: Callable[[], float], until: float, seed: str) -> Samples:
    """Some rounds at least; more while there is time, and more than one is left."""
    warm = {name: _warm_up(sampler) for name, sampler in samplers.items()}
    least = min(warm.values())
    samples = Samples({name: [seconds] if seconds > HOPELESS * least else [] for name, seconds in warm.items()})
    left, generator = [name for name, each in samples.seconds.items() if not each], random.Random(seed)
    repeats = {name: max(1, min(MOST_REPEATS, math.ceil(SAMPLE_SECONDS / warm[name]))) for name in left}
    for turn in range(MOST_ROUNDS):
        if turn >= LEAST_ROUNDS and (len(left) == 1 or clock() >= until):
            break
        order = list(left)
        generator.shuffle(order)
        for name in order:
            samples.seconds[name].append(samplers[name](repeats[name]) / repeats[name])
        if turn + 1 >= LEAST_ROUNDS:
            fastest = samples.fastest(left)
            left = [name for name in left if name == fastest or not _clearly_slower(samples.ratios(name, fastest))]
    return samples


def _clearly_slower(ratios: Sequence[float]) -> bool:
    return min(ratios) > 1 and statistics.median(ratios) > CLEARLY_SLOWER


def _warm_up(sampler: Sampler) -> float:
    """Seconds of one run, roughly."""
    sampler(1)
    repeats, seconds = 1, sampler(1)
    # One run alone has latencies that runs in a row hide.
    while seconds < SAMPLE_SECONDS / 4 and repeats < MOST_REPEATS:
        repeats = min(MOST_REPEATS, math.ceil(repeats * min(10.0, SAMPLE_SECONDS / 2 / seconds)))
        seconds = sampler(repeats)
    return seconds / repeats
