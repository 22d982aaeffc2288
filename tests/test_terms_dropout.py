"""Dropout in the kernels: the very weights that the reference drops (terms/dropout.py)."""

from __future__ import annotations

from typing import Any

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


def test_the_random_bits_are_those_of_philox() -> None:
    """The known answer for a counter and a key of zeros, and of ones, with seven rounds."""
    zeros, ones = torch.zeros((), dtype=torch.int64), torch.full((), 0xFFFFFFFF, dtype=torch.int64)
    assert [int(word) for word in dropout._philox([zeros] * 4, [zeros] * 2)] == KNOWN[0]
    assert [int(word) for word in dropout._philox([ones] * 4, [ones] * 2)] == KNOWN[1]


KNOWN = [
    [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
    [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
]


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
