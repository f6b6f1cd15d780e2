"""Rates and ratios of interleaved rounds: geometric means, bootstrap intervals, percentiles."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["RESAMPLES", "Ratio", "bootstrap", "geometric_mean", "percentile", "ratio_of"]

RESAMPLES = 2000


class Ratio(NamedTuple):
    """A geometric mean over rounds, and the 95 % interval of it."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.2f} ({self.low:.2f} to {self.high:.2f})"


def geometric_mean(values: Sequence[float]) -> float:
    """Of positive numbers, at least one."""
    return math.exp(statistics.fmean(math.log(value) for value in values))


def bootstrap(ratios: Sequence[float], seed: int = 1) -> tuple[float, float]:
    """95 % interval of the geometric mean of `ratios`, by resampling rounds."""
    rng = random.Random(seed)
    logs = [math.log(ratio) for ratio in ratios]
    means = sorted(statistics.fmean(rng.choices(logs, k=len(logs))) for _ in range(RESAMPLES))
    return math.exp(means[int(RESAMPLES * 0.025)]), math.exp(means[int(RESAMPLES * 0.975)])


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Of rates that were taken in the same rounds, in order.

    Raises:
        ValueError: they are not equally many.
    """
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return Ratio(geometric_mean(ratios), *bootstrap(ratios))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them, above 0 and up to 1, do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]
