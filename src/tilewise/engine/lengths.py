"""The lengths of packed sequences in words, and what tiles lose on them: for `explain` and `trace`."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import mean, median
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..masks import Mask


class Lengths(NamedTuple):
    """How many sequences there are of so many queries and keys."""

    counts: tuple[tuple[tuple[int, int], int], ...]

    @classmethod
    def of(cls, starts_q: Sequence[int], starts_kv: Sequence[int]) -> Lengths:
        pairs = zip(pairwise(starts_q), pairwise(starts_kv), strict=True)
        return cls(tuple(sorted(Counter((q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in pairs).items())))

    @property
    def of_queries(self) -> list[int]:
        return sorted(rows for (rows, _), count in self.counts for _ in range(count))

    def lost(self, inner: Mask, block_q: int, block_kv: int) -> float:
        """The share of the pairs in visited tiles that no query sees: behind the end of a sequence, or
        hidden by the mask. Every sequence has tiles of its own."""
        visited = seen = 0
        for (rows, keys), count in self.counts:
            seen += count * inner.pairs(rows, keys)
            for begin in range(0, rows, block_q):
                own = inner.keys(range(begin, min(rows, begin + block_q)), rows, keys)
                tiles = -(-own.stop // block_kv) - own.start // block_kv if own else 0
                visited += count * tiles * block_q * block_kv
        return 1.0 - seen / visited if visited else 0.0

    def __str__(self) -> str:
        rows = self.of_queries
        if rows[0] == rows[-1]:
            return f"{len(rows)} sequences of {rows[0]} queries"
        middle = f"median {median(rows):.0f}, mean {mean(rows):.0f}"
        return f"{len(rows)} sequences of {rows[0]} to {rows[-1]} queries, {middle}"


def told(lengths: Lengths, inner: Mask, block_q: int, block_kv: int) -> str:
    """In a line: the lengths, and what tiles of a shape lose on them."""
    lost = 100 * lengths.lost(inner, block_q, block_kv)
    return f"{lengths}; {lost:.0f}% of the work in tiles of {block_q} x {block_kv} is lost to partial tiles"
