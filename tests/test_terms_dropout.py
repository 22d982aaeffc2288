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
from test_terms import built_units
from tilewise.jit import build
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


@pytest.mark.kernel_gate
@pytest.mark.parametrize("dim", [192, 256])
def test_kernels_of_wide_heads_build_without_spills(dim: int) -> None:
    units = built_units((Dropout(0.1),), dim)
    assert units
    for unit in units:
        used = build(unit, announce=False).resources
        assert used.spill_store_bytes == used.spill_load_bytes == 0


def test_the_words_of_a_head_are_those_of_philox() -> None:
    """The known answers of Philox4x32 with seven rounds, for a counter and a key of zeros, and of ones."""
    known = {
        0: [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48],
        0xFFFFFFFF: [0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662],
    }
    for value, want in known.items():
        word = torch.full((), value, dtype=torch.int64)
        assert [int(got) for got in dropout._philox4([word] * 4, [word] * 2)] == want


def test_the_words_of_scores_are_what_they_were() -> None:
    """Answers of another implementation, of mix() and of a position: query 5 and key 34 of head 3."""
    ones = torch.full((), 0xFFFFFFFF, dtype=torch.int64)
    assert [int(word) for word in dropout._mix(ones, ones, ones)] == [0x7ADFACB7, 0xC0DE75A4]
    problem = make_problem((1, 4, 64, 64), F32, scores=(Dropout(0.5),))
    bits = dropout.random_bits(*SEED, Where(problem, range(64), range(64), operands={}))[0, 3]
    assert [int(bits[query, key]) for query in (5, 13) for key in (34, 35)] == [0x1F24, 0x87DD, 0x8CA3, 0xB1D5]


def words_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(1 << 32, shape, generator=torch.Generator().manual_seed(seed))


def test_every_pair_of_words_comes_of_one_counter() -> None:
    """mix() can be undone, so over all counters every outcome is as frequent as any other, whatever the key."""
    a, b, key = words_of(3, 1000)
    left, right = dropout._mix(a, b, key)
    for factor in reversed(dropout._MIX_FACTORS):
        left ^= key
        left ^= left >> 16
        left, right = right, left - dropout._product(factor, right)[1] & 0xFFFFFFFF
    assert torch.equal(left, a)
    assert torch.equal(right, b)


def flips(changed: torch.Tensor) -> torch.Tensor:
    """How far the number of ones in each of 64 bits is from one half, in standard deviations: (..., samples) words."""
    ones = torch.stack([(changed >> bit & 1).sum(-1) for bit in range(32)], -1).double()
    count = changed.shape[-1]
    return (ones - count / 2) / (count / 4) ** 0.5


def test_every_bit_of_counter_and_key_changes_every_bit_of_the_words_half_of_the_time() -> None:
    a, b, key = words_of(3, 1 << 13)
    given = torch.stack([a, b, key])
    bit = torch.zeros(96, 3, 1, dtype=torch.int64)
    for number in range(96):
        bit[number, number // 32] = 1 << number % 32
    one, other = torch.stack(dropout._mix(*given)), torch.stack(dropout._mix(*(given ^ bit).unbind(1)))
    found = flips(one[:, None] ^ other)
    assert found.abs().max() < 6
    assert abs((found**2).mean().item() - 1) < 0.1


def test_words_of_two_queries_and_two_keys_are_independent() -> None:
    """Neither their exclusive or nor their alternating sum says anything, as for any counters that form a rectangle."""
    queries, keys = words_of(2, 1 << 13, seed=1) & 0xFFF
    key, first, second = words_of(3, 1 << 13, seed=2)
    for step in (1, 2, 8, 64):
        corner = [
            torch.stack(dropout._mix((queries + i) * dropout._QUERY_STEP + first,
                                     (keys + j) * dropout._KEY_STEP + second, key))
            for i in (0, step) for j in (0, step)
        ]  # fmt: skip
        assert flips(corner[0] ^ corner[1] ^ corner[2] ^ corner[3]).abs().max() < 5
        assert flips(corner[0] - corner[1] - corner[2] + corner[3] & 0xFFFFFFFF).abs().max() < 5


def test_scores_at_any_distance_are_dropped_independently() -> None:
    """Along heads, queries and keys, at every distance at once: no more often together than chance has it."""
    term = Dropout(0.3)
    problem = make_problem((2, 8, 256, 64), F32, scores=(term,))
    kept = term.kept(Where(problem, range(256), range(256), operands={"seed": SEED}))[0].double()
    chance = term.threshold / 65536
    spectrum = torch.fft.fftn(kept.reshape(16, 256, 256) - chance)
    together = torch.fft.ifftn(spectrum.abs() ** 2).real / (chance * (1 - chance) * kept.numel() ** 0.5)
    together.view(-1)[0] = 0.0  # a score with itself
    assert together.abs().max() < 6


def test_numbers_are_uniform() -> None:
    """All values of 16 bits are as frequent as chance has it, in the low and in the high halves of words."""
    problem = make_problem((4, 4, 512, 64), F32, scores=(Dropout(0.5),))
    bits = dropout.random_bits(*SEED, Where(problem, range(512), range(512), operands={}))
    for half in (0, 1):
        numbers = bits[..., half::2]
        expected = numbers.numel() / 65536
        counts = torch.bincount(numbers.reshape(-1), minlength=65536).double()
        chi_square = ((counts - expected) ** 2 / expected).sum().item()
        assert abs(chi_square - 65535) < 5 * (2 * 65535) ** 0.5


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
