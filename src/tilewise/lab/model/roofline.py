"""Three ceilings of an attention problem on a GPU: its matrix units, its memory, and the units that do exponentials.

No kernel that does the arithmetic can be faster than the highest of the three. The exponential is one of them because
tensor cores grew faster than the units beside them: at head_dim 64 a softmax costs about as long as its products.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...problem import Problem
    from ...target import Target

_EXPONENTIALS_PER_CYCLE = 16  # per multiprocessor, of every target: 4 lanes of each of the 4 schedulers


class Bounds(NamedTuple):
    """Least seconds by each ceiling."""

    compute: float
    memory: float
    exponentials: float

    @property
    def seconds(self) -> float:
        return max(self)

    @property
    def by(self) -> str:
        """The ceiling that counts."""
        return self._fields[self.index(max(self))]


class Work(NamedTuple):
    """What has to be done at minimum."""

    flops: int
    bytes: int
    exponentials: int

    @property
    def intensity(self) -> float:
        """Operations a byte."""
        return self.flops / max(1, self.bytes)


def work(problem: Problem, what: str) -> Work:
    """Of a "forward", a "backward", or a "step", which is both."""
    if what == "step":
        there, back = work(problem, "forward"), work(problem, "backward")
        return Work(*(a + b for a, b in zip(there, back, strict=True)))
    if what == "forward":
        return Work(problem.flops(), problem.min_bytes(), problem.pairs())
    return Work(problem.flops(backward=True), _backward_bytes(problem), problem.pairs())


def _backward_bytes(problem: Problem) -> int:
    """q, k, v, out, dout and lse are read once, dq, dk and dv written once."""
    rows = problem.batch * problem.heads_q * problem.seq_q
    keys = problem.batch * problem.heads_kv * problem.seq_kv
    queries = rows * (2 * problem.head_dim + 2 * problem.head_dim_v)
    return (queries + 2 * keys * (problem.head_dim + problem.head_dim_v)) * problem.dtype.itemsize + 4 * rows


class Rates(NamedTuple):
    """What a device can do per second, and the source of these figures."""

    flops: float
    bytes: float
    exponentials: float
    source: str


def rates_of(target: Target, dtype: torch.dtype) -> Rates | None:
    """A GPU's by its data sheet; None where there is none."""
    flops = target.peak_flops(dtype)
    if not flops or not target.dram_bytes_per_s or not target.clock_hz:
        return None
    exponentials = target.sms * _EXPONENTIALS_PER_CYCLE * target.clock_hz
    return Rates(flops, target.dram_bytes_per_s, exponentials, "data sheet")


def measured_rates() -> Rates:
    """The CPU's, by the best of a few runs each of a square product, a copy, and exponentials, all in float32.

    Its kernels widen 16-bit inputs to that; a 16-bit product by itself is often much slower, and no ceiling.
    """
    size, count = 1024, 2**24
    left, right = torch.randn(size, size), torch.randn(size, size)
    flat = torch.randn(count)
    copy = torch.empty_like(flat)
    return Rates(
        2 * size**3 / _fastest(lambda: left @ right),
        2 * count * flat.element_size() / _fastest(lambda: copy.copy_(flat)),
        count / _fastest(lambda: torch.exp(flat, out=copy)),
        "measured here in float32",
    )


def _fastest(call: Callable[[], object], runs: int = 10) -> float:
    times = []
    for _ in range(runs + 1):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times[1:])


def bounds(problem: Problem, rates: Rates | None, what: str) -> Bounds | None:
    """None where no rates are known."""
    if rates is None:
        return None
    minimum = work(problem, what)
    return Bounds(minimum.flops / rates.flops, minimum.bytes / rates.bytes, minimum.exponentials / rates.exponentials)


def shares(problem: Problem, rates: Rates | None, what: str, seconds: float) -> dict[str, float] | None:
    """How near a measured time comes to each ceiling, 1 being at it."""
    found = bounds(problem, rates, what)
    return None if found is None or not seconds else {name: value / seconds for name, value in found._asdict().items()}
