"""Dropout in the kernels: the very weights that the reference drops (terms/dropout.py)."""

from __future__ import annotations

import functools
import itertools
import operator
from typing import Any

import pytest
import torch

from support import make_problem
from term_cases import F32, both_ways, case_of, check, emulated, everywhere
from tilewise.scores import Where
from tilewise.terms import Dropout, dropout

SEED = torch.tensor([0x1234_5678_9ABC, (7 << 32) + 12], dtype=torch.int64)


@emulated
@both_ways
@everywhere
def test_dropout(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """The very weights that the reference drops, whichever of queries and keys a kernel has as rows."""
    case = case_of(dtype, dim, mask, (Dropout(0.3),), lambda _: {"seed": SEED}, needs_grad=back)
    check(monkeypatch, backend, case, back=back)


@pytest.mark.parametrize("name", ["_philox4", "_philox2"])
def test_the_random_bits_are_those_of_philox(name: str) -> None:
    """The known answers for a counter and a key of zeros, and of ones, with seven rounds."""
    for value, want in KNOWN[name].items():
        word = torch.full((), value, dtype=torch.int64)
        key = [word] * 2 if name == "_philox4" else word
        assert [int(got) for got in getattr(dropout, name)([word] * len(want), key)] == want


KNOWN = {
    "_philox4": {
        0: [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        0xFFFFFFFF: [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
    },
    "_philox2": {0: [0x257A3673, 0xCD26BE2A], 0xFFFFFFFF: [0xAB302C4D, 0x3DC9D239]},
}


def test_any_three_numbers_of_a_call_are_independent() -> None:
    """Exactly: of the bits of the four halves that a number is the sum of, those of any three are linearly independent,
    so with halves that are uniform every outcome of three numbers is as likely as any other."""
    halves = []
    for half in range(4):
        word = torch.tensor(0xFFFF << 16 * (half % 2))
        a, b = (word, word * 0) if half < 2 else (word * 0, word)
        halves.append([int(one) >> shift & 0xFFFF for one in dropout.spread(a, b) for shift in (0, 16)])
    numbers = [sum((column == 0xFFFF) << half for half, column in enumerate(row)) for row in zip(*halves, strict=True)]
    assert sorted(numbers) == [1, 2, 4, 7, 8, 11, 13, 14]
    for some in itertools.combinations(numbers, 3):
        sums = [functools.reduce(operator.xor, few) for size in (1, 2, 3) for few in itertools.combinations(some, size)]
        assert 0 not in sums


def test_pairs_of_scores_are_dropped_independently() -> None:
    """Of all pairs of scores of a square of sixteen, over many squares: as often together as chance has it."""
    term = Dropout(0.3)
    problem = make_problem((4, 8, 256, 64), F32, scores=(term,))
    kept = term.kept(Where(problem, range(256), range(256), operands={"seed": SEED}))[0].double()
    chance = term.threshold / 65536
    squares = kept.reshape(32, 16, 16, 16, 16).transpose(2, 3).reshape(-1, 256) - chance
    sigma = chance * (1 - chance) / len(squares) ** 0.5
    both = squares.T @ squares / len(squares)
    both.fill_diagonal_(0.0)
    assert both.abs().max() < 6 * sigma
    threes = (squares[:, :16, None, None] * squares[:, None, 16:32, None] * squares[:, None, None, 128:144]).mean(0)
    assert threes.abs().max() < 6 * (chance * (1 - chance)) ** 1.5 / len(squares) ** 0.5


def test_weights_stay_with_the_chance_that_was_asked_for() -> None:
    term = Dropout(0.3)
    problem = make_problem((2, 4, 512, 64), F32, scores=(term,))
    where = Where(problem, range(512), range(512), operands={"seed": SEED})
    kept, weight = term.kept(where)
    assert weight == 65536 / round(65536 * 0.7)
    count, chance = kept.numel(), 1 / weight
    assert abs(kept.double().mean().item() - chance) < 5 * (chance * (1 - chance) / count) ** 0.5
    part = where._replace(rows=range(100, 131), keys=range(37, 200))
    assert torch.equal(term.kept(part)[0], kept[:, :, 100:131, 37:200])
    stacked = part._replace(stacked=True)
    assert torch.equal(term.kept(stacked)[0].reshape(term.kept(part)[0].shape), term.kept(part)[0])


def test_as_many_patterns_stay_as_were_asked_for() -> None:
    """Of all 16-bit patterns, by what is compared in kernels; one number has no bound, and its neighbour is taken."""
    patterns = torch.arange(65536)
    for count in [*range(1, 65536, 997), 2045, 2046, 2047, 33790, 33791, 33792, 63490, 65535, 65536]:
        term = Dropout(1.0 - count / 65536)
        assert term.threshold == count + (count == 33791)
        assert int(dropout.stays(patterns, term.threshold).sum()) == term.threshold
