"""The statistic of every comparison this package prints: paired rounds in, a ratio with its interval and a verdict out.

What a measured comparison looks like, in reports and in records (`Speed.to_dict`):

    "speed": {
      "against": "torch-flash",      the other candidate
      "ratio": 1.34,                 its time over this candidate's: above 1, this one is faster
      "low": 1.29, "high": 1.40,     the confidence interval of the ratio; null where there are too few rounds
      "verdict": "faster",           "faster", "slower", "indistinguishable", "too few rounds" or "same kernels"
      "rounds": 11,                  rounds that both candidates have
      "confidence": 0.99,
      "resolution": 0.01             what the interval was widened by, as a logarithm: more on a loaded machine
    }

Every candidate of a comparison has `speed`, against the fastest of PyTorch's paths (null without one), and
`speed_default`, against PyTorch's default choice (null where that did not run); `same_as`, the candidate whose kernels
it ran too ("" for none: such candidates are one entry, and are not compared with each other); and `cost_seconds`
({"median", "p20", "p80"} over the rounds of all that is timed: the bar and its whiskers). `ratio` and the
`*_seconds` summaries are as they always were. A comparison has `noise`, a list of sentences about the machine
(empty = quiet), and `undecided`, true where rounds ended before the intervals were narrow.

How the interval is made. A round times every candidate once, one soon after the other, in random order; the logarithm
of the two times' ratio is one observation, which a clock or a temperature that drifts moves little.

    outliers          a fifth of the observations on each side is cut off: the 20% trimmed mean, with the standard error
                      of the winsorised sample (Tukey and McLaughlin; Yuen) and Student's t
    autocorrelation   n correlated observations are worth n (1 - r) / (1 + r) independent ones. r is the lag-1
                      autocorrelation, corrected for its bias; a short series cannot show that it has none, so that r
                      is never taken to be less than MIN_AUTOCORRELATION
    placement         two processes that run the same kernel differ for as long as they live, by where their memory
                      lies: the interval is widened by RESOLUTION on both sides. Where threads share cores, on a loaded
                      machine, one process may be given less of them than another for longer than a comparison takes,
                      which its rounds cannot show: there the resolution is the load (`resolution_at`)
    repeated looks    measuring on until the interval is narrow means to look several times: look k may err with
                      probability alpha / (k (k + 1)), which adds up to alpha however many there are
    many candidates   the best of several is chosen by the same data: alpha is divided by how many there were
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

FASTER = "faster"
SLOWER = "slower"
INDISTINGUISHABLE = "indistinguishable"
TOO_FEW = "too few rounds"
SAME = "same kernels"

CONFIDENCE = 0.99
MIN_ROUNDS = 5  # fewer say nothing about their own spread
RESOLUTION = 0.01  # of the logarithm of a ratio
NARROW = 0.02  # half the interval's width, likewise, at which more rounds would tell nothing of interest
MIN_AUTOCORRELATION = 0.25
_MAX_AUTOCORRELATION = 0.8
_TRIMMED = 0.2  # of the observations, on each side
_GROWTH = 1.5  # from one look to the next


@dataclass(frozen=True, slots=True)
class Speed:
    """How many times as fast as `against` a candidate is, and how sure that is."""

    ratio: float
    low: float | None
    high: float | None
    rounds: int
    against: str = ""
    resolution: float = RESOLUTION
    same: bool = False  # both ran the same kernels: whatever the ratio is, it is noise

    @property
    def verdict(self) -> str:
        if self.same:
            return SAME
        if self.low is None or self.high is None:
            return TOO_FEW
        if self.low > 1.0:
            return FASTER
        return SLOWER if self.high < 1.0 else INDISTINGUISHABLE

    @property
    def differs(self) -> bool:
        """One of the two is faster, beyond the noise."""
        return self.verdict in (FASTER, SLOWER)

    @property
    def settled(self) -> bool:
        """More rounds would not change what a reader learns: a difference is shown, or is at most a small one."""
        if self.low is None or self.high is None:
            return False
        return self.same or self.differs or math.log(self.high / self.low) <= 2 * (NARROW + self.resolution)

    @classmethod
    def of(cls, values: dict[str, Any] | None) -> Speed | None:
        """What `to_dict` made; None where nothing was compared."""
        return None if values is None else cls.from_dict(values)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Speed:
        known = {name: values[name] for name in cls.__slots__ if name in values}
        for name in ("ratio", "low", "high"):  # JSON has no inf and nan: they are kept as text
            known[name] = None if known[name] is None else float(known[name])
        return cls(**known | {"same": values["verdict"] == SAME})

    def to_dict(self) -> dict[str, Any]:
        return {
            "against": self.against,
            "ratio": self.ratio,
            "low": self.low,
            "high": self.high,
            "verdict": self.verdict,
            "rounds": self.rounds,
            "confidence": CONFIDENCE,
            "resolution": self.resolution,
        }


def resolution_at(load: float) -> float:
    """With so many runnable threads per core: two of them may get shares of a core that differ by that factor."""
    return max(RESOLUTION, math.log(max(1.0, load)))


def speed(
    mine: Sequence[float],
    theirs: Sequence[float],
    *,
    looks: int = 1,
    among: int = 1,
    against: str = "",
    resolution: float = RESOLUTION,
) -> Speed | None:
    """From seconds per call, round by round; None where no round has both. `looks` counts this one."""
    logs = [math.log(other / own) for own, other in zip(mine, theirs, strict=False)]
    if not logs:
        return None
    if len(logs) < MIN_ROUNDS:
        return Speed(math.exp(_middle(logs)), None, None, len(logs), against, resolution)
    center, error, freedom = _location(logs)
    alpha = (1.0 - CONFIDENCE) / (looks * (looks + 1)) / max(1, among)
    half = student(alpha, freedom) * error + resolution
    return Speed(math.exp(center), math.exp(center - half), math.exp(center + half), len(logs), against, resolution)


def same(mine: Sequence[float], theirs: Sequence[float], against: str) -> Speed | None:
    """Of two candidates that ran the same kernels: a ratio with no claim."""
    found = speed(mine, theirs, against=against)
    return None if found is None else replace(found, same=True)


def looks(first: int, max_rounds: int) -> Iterator[int]:
    """Numbers of rounds after which to look whether they are enough: first, then half as many more each time."""
    rounds = max(1, min(first, max_rounds))
    while rounds < max_rounds:
        yield rounds
        rounds = min(max_rounds, math.ceil(rounds * _GROWTH))
    yield rounds


def _location(values: list[float]) -> tuple[float, float, int]:
    """The trimmed mean, its standard error, and the degrees of freedom."""
    count, ordered = len(values), sorted(values)
    cut = int(_TRIMMED * count)
    kept = ordered[cut : count - cut]
    center = sum(kept) / len(kept)
    low, high = kept[0], kept[-1]
    pulled = [min(max(value, low), high) for value in values]  # in the order of the rounds
    mean = sum(pulled) / count
    deviations = [value - mean for value in pulled]
    squares = sum(value * value for value in deviations)
    freedom = len(kept) - 1
    error = math.sqrt(squares / (len(kept) * freedom))
    together = _autocorrelation(deviations, squares)
    return center, error * math.sqrt((1.0 + together) / (1.0 - together)), freedom


def _autocorrelation(deviations: list[float], squares: float) -> float:
    products = sum(one * other for one, other in pairwise(deviations))
    lag_one = products / squares + 1.0 / len(deviations) if squares > 0 else 0.0
    return min(max(lag_one, MIN_AUTOCORRELATION), _MAX_AUTOCORRELATION)


def _middle(values: list[float]) -> float:
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


@lru_cache(maxsize=1024)
def student(alpha: float, freedom: int) -> float:
    """The value that Student's t exceeds in absolute value with probability alpha (Hill, CACM algorithm 396)."""
    n, p = float(freedom), alpha
    if freedom == 1:
        return 1.0 / math.tan(p * math.pi / 2)
    if freedom == 2:
        return math.sqrt(2.0 / (p * (2.0 - p)) - 2.0)
    a = 1.0 / (n - 0.5)
    b = 48.0 / (a * a)
    c = ((20700.0 * a / b - 98.0) * a - 16.0) * a + 96.36
    d = ((94.5 / (b + c) - 3.0) / b + 1.0) * math.sqrt(a * math.pi / 2) * n
    y = (d * p) ** (2.0 / n)
    if y > 0.05 + a:
        x = NormalDist().inv_cdf(p / 2)
        y = x * x
        if freedom < 5:
            c += 0.3 * (n - 4.5) * (x + 0.6)
        c = (((0.05 * d * x - 5.0) * x - 7.0) * x - 2.0) * x + b + c
        y = (((((0.4 * y + 6.3) * y + 36.0) * y + 94.5) / c - y - 3.0) / b + 1.0) * x
        y = math.expm1(a * y * y)
    else:
        tail = ((n + 6.0) / (n * y) - 0.089 * d - 0.822) * (n + 2.0) * 3.0
        y = ((1.0 / tail + 0.5 / (n + 4.0)) * y - 1.0) * (n + 1.0) / (n + 2.0) + 1.0 / y
    return math.sqrt(n * y)
