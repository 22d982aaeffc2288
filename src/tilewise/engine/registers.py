"""What terms of the scores cost in registers, by their kinds, and whose tiles they fit: facts about compiled kernels.

A kind without an entry needs no registers beyond those that a softcap takes, and runs in the tiles of kernels with a
softcap. A class that derives from another has the entry of that one where it has none of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..problem import Problem
    from ..scores import Term

_SM90, _BOTH = frozenset({"sm90"}), frozenset({"sm80", "sm90"})


class Cost(NamedTuple):
    """About how many registers of a thread a term takes, and the kernels without terms whose tiles have them left."""

    forward: int = 0
    backward: int = 0
    plain_tiles: frozenset[str] = frozenset()  # architectures
    plain_window: bool = False  # also in the loops of a window, on Hopper
    max_plain_heads: int = 256  # on Hopper


def _keep(term: Any) -> Cost:
    if term.rows_alike:
        return Cost(plain_tiles=_BOTH)
    return Cost(forward=24) if term.paired else Cost(forward=40, backward=32)


_COSTS: dict[str, Callable[[Any], Cost]] = {
    "alibi": lambda term: Cost(forward=8, plain_tiles=_SM90),
    "bias": lambda term: Cost(forward=24 if term.paired else 40, backward=32 if term.learned else 0),
    "dropout": lambda term: Cost(backward=16, plain_tiles=_SM90, max_plain_heads=192),
    "keep": _keep,
    "key_lengths": lambda term: Cost(plain_tiles=_BOTH, plain_window=True),
    "packed_keep": lambda term: Cost(plain_tiles=_BOTH),
    "relative_bias": lambda term: Cost(forward=24, backward=16 if term.learned else 0),
    "sink": lambda term: Cost(plain_tiles=_BOTH, plain_window=True),
    "spans": lambda term: Cost(forward=8, plain_tiles=_SM90, plain_window=True),
    "staged_bias": lambda term: Cost(),
}


def cost_of(term: Term) -> Cost:
    kinds = [getattr(base, "kind", "") for base in type(term).__mro__]
    made = next((_COSTS[kind] for kind in kinds if kind in _COSTS), None)
    return Cost() if made is None else made(term)


def forward_registers(problem: Problem) -> int:
    """About how many registers the terms of a forward need beside those of a softcap."""
    return sum(cost_of(term).forward for term in problem.scores)


def backward_registers(problem: Problem) -> int:
    """About how many registers the terms of a backward need."""
    return sum(cost_of(term).backward for term in problem.scores)


def fits_plain_tiles(problem: Problem, arch: str) -> bool:
    """Whether the terms of a problem leave the tiles of kernels without terms as they are."""
    return all(arch in cost_of(term).plain_tiles for term in problem.scores)


def max_plain_heads(problem: Problem) -> int:
    """The largest heads for which the terms of a problem fit Hopper's tiles of kernels without terms."""
    return min(cost_of(term).max_plain_heads for term in problem.scores)


def fits_plain_window(problem: Problem) -> bool:
    """Whether the terms of a problem fit the tiles of Hopper's kernels for windows without terms."""
    return all(cost_of(term).plain_window for term in problem.scores)
