"""How the work of a backward is divided among the multiprocessors: into which pieces, and in which order.

A CTA of a backward owns one tile of keys of one (batch, KV head) pair and goes through the query tiles that see it,
head by head of its group: its steps. Where such tiles are few, long or unequal they are cut into pieces of at most
`piece_steps` steps (kernels/common/pieces.cuh), whose dK and dV are added up in float32. Pairs run in `sections`, one
after another, so that those side by side share the L2 cache.

More pieces fill the GPU better and cost more: each loads its keys, starts its pipeline and hands over its sums.
`divide` simulates the grid for several limits and takes the one that ends first: blocks start in order, each on the
multiprocessor that is free first. Of 30 problems on an NVIDIA H200 the limit found so took 0.5% longer on average than
the best one measured, at worst 3.6%.
"""

from __future__ import annotations

import functools
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ..problem import Problem

# Pieces per tile that are tried.
_CUTS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 96, 128)
# A grid whose longest tile is this small a share of the whole run ends evenly by itself, and is not simulated.
_EVEN = 1 / 32
# CTAs per multiprocessor in a section of unequal tiles. Why two: the short tiles of a section fill the gaps that its
# long ones leave, and with more pairs side by side less of what they read stays in the L2 cache.
SECTION_WAVES = 2


class Costs(NamedTuple):
    """What a CTA costs beside its steps, in steps: to start and end, and to add up the gradients of a piece.

    `turn`: what every piece of a tile adds to the end of the last one, where they add up one after another.
    """

    start: float
    merge: float
    turn: float = 0.0


@dataclass(frozen=True, slots=True)
class Division:
    """How a grid is divided, and what a simulation says of it."""

    piece_steps: int
    pieces: int
    """Per (batch, KV head) pair."""
    sections: int
    cut: bool
    """Some tile has more than one piece."""
    grid: int
    waves: float
    """CTAs per multiprocessor."""
    idle: float
    """Share of the multiprocessors' time in which they wait for the end of the longest."""

    def __str__(self) -> str:
        cut = f"{self.grid} pieces of up to {self.piece_steps} steps" if self.cut else f"{self.grid} tiles of keys"
        return f"{cut}, {self.waves:.1f} per multiprocessor, {self.idle:.0%} idle at the end"


def tile_steps(problem: Problem, block_q: int, block_kv: int) -> tuple[int, ...]:
    """Per tile of keys, the query tiles that see it, over all heads of a group; as common/pieces.cuh counts them."""
    left, right, offset = problem.band
    first_shift, end_shift = offset - left, offset + right + 1
    steps = []
    for first_key in range(0, problem.seq_kv, block_kv):
        last_key = min(first_key + block_kv, problem.seq_kv) - 1
        begin, end = max(0, first_key - end_shift + 1), min(problem.seq_q, last_key - first_shift + 1)
        steps.append((-(-end // block_q) - begin // block_q) * problem.group if begin < end else 0)
    return tuple(steps)


def piece_count(steps: int, limit: int) -> int:
    return max(1, -(-steps // limit))


@functools.lru_cache(maxsize=1024)
def divide(steps: tuple[int, ...], pairs: int, slots: int, costs: Costs, sections: int | None = None) -> Division:
    """The division that ends first; of those that end at the same time the one with the fewest pieces.

    `steps` of each tile in the order of work, and so many CTAs at once on the device (`slots`). Without a number of
    `sections`, a section is SECTION_WAVES waves.
    """
    longest = max(1, *steps)
    if longest <= _EVEN * sum(steps) * pairs / slots:
        return _simulated(steps, pairs, slots, costs, sections, longest)[1]
    limits = sorted({-(-longest // cut) for cut in _CUTS}, reverse=True)
    choices = [_simulated(steps, pairs, slots, costs, sections, limit) for limit in limits]
    return min(choices, key=lambda choice: choice[0])[1]


def _simulated(
    steps: tuple[int, ...], pairs: int, slots: int, costs: Costs, sections: int | None, limit: int
) -> tuple[float, Division]:
    """When the last CTA of a division ends, in steps, and the division."""
    durations: list[float] = []
    for count in steps:
        pieces = piece_count(count, limit)
        extra = costs.start + (costs.merge if pieces > 1 else 0.0)
        durations += [min(limit, count - i * limit) + extra for i in reversed(range(pieces))]
    grid = pairs * len(durations)
    if sections is None:
        sections = min(pairs, max(1, round(grid / (SECTION_WAVES * slots))))
    busy = sum(durations) * pairs / slots
    span = _span(durations, pairs, slots, sections) if max(durations) > _EVEN / 4 * busy else busy + max(durations) / 2
    span += costs.turn * (piece_count(max(steps), limit) - 1)
    cut = len(durations) > len(steps)
    return span, Division(limit, len(durations), sections, cut, grid, grid / slots, 1 - busy / span)


def _span(durations: list[float], pairs: int, slots: int, sections: int) -> float:
    """Blocks start in order, each where one ends first."""
    free = [0.0] * slots
    small, larger = divmod(pairs, sections)
    for section in range(sections):
        for duration in durations:
            for _ in range(small + (section < larger)):
                heapq.heapreplace(free, free[0] + duration)
    return max(free)
