"""How the work of a backward is divided: pieces cover it, fill a GPU better than whole tiles, and are few where that
does not help."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from support import banded_masks, make_problem
from tilewise import Causal, Full, Target, Window
from tilewise.engine import division
from tilewise.engine.division import Costs, Division, divide, piece_count, tile_steps
from tilewise.engine.sm80 import backward as sm80_backward
from tilewise.engine.sm80 import float32_backward as sm80_float32_backward
from tilewise.engine.sm90 import backward as sm90_backward
from tilewise.engine.sm90 import float32_backward as sm90_float32_backward

COSTS = Costs(start=2.0, merge=1.0)
SECTIONS = 1
SLOTS = 132
H200 = Target.named("h200")


def problem_of(heads, seqs, dim=128, batch=1, **fields):
    return make_problem((batch, heads[0], seqs[0], dim), heads_kv=heads[1], seq_kv=seqs[1], needs_grad=True, **fields)


def span(steps, pairs, limit):
    """When the last CTA of a division ends."""
    return division._simulated(steps, pairs, SLOTS, COSTS, SECTIONS, limit)[0]


@given(steps=st.integers(0, 5000), limit=st.integers(1, 600))
def test_no_piece_is_longer_than_the_limit_and_none_is_spare(steps, limit):
    count = piece_count(steps, limit)
    assert count >= 1
    assert count * limit >= steps
    assert (count - 1) * limit < max(steps, 1)


@given(
    mask=banded_masks,
    heads=st.sampled_from([(1, 1), (6, 2), (8, 1)]),
    seqs=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    block_q=st.sampled_from([4, 16]),
    block_kv=st.sampled_from([4, 16]),
)
def test_a_tile_has_a_step_for_every_query_tile_that_sees_it(mask, heads, seqs, block_q, block_kv):
    problem = problem_of(heads, seqs, mask=mask)
    steps = tile_steps(problem, block_q, block_kv)
    assert len(steps) == -(-seqs[1] // block_kv)
    for tile, count in enumerate(steps):
        keys = range(tile * block_kv, min((tile + 1) * block_kv, seqs[1]))
        touched = [
            bool(mask.to_bool(range(row, min(row + block_q, seqs[0])), keys, *seqs).any())
            for row in range(0, seqs[0], block_q)
        ]
        hull = range(touched.index(True), len(touched) - touched[::-1].index(True)) if any(touched) else range(0)
        # A window may leave a hole of one tile between rows that see the first key and rows that see the last.
        assert len(hull) * problem.group <= count <= (len(hull) + 1) * problem.group


@given(
    steps=st.lists(st.integers(0, 400), min_size=1, max_size=40),
    pairs=st.integers(1, 64),
)
def test_a_division_counts_its_own_pieces_and_ends_no_later_than_whole_tiles(steps, pairs):
    tiles = tuple(steps)
    found = divide(tiles, pairs, SLOTS, COSTS, SECTIONS)
    assert found.pieces == sum(piece_count(count, found.piece_steps) for count in tiles)
    assert found.grid == pairs * found.pieces
    assert found.waves == found.grid / SLOTS
    assert found.cut == (found.pieces > len(tiles))
    assert 0 <= found.idle <= 1
    assert span(tiles, pairs, found.piece_steps) <= span(tiles, pairs, max(1, *tiles))


FEW = [
    pytest.param(problem_of((8, 1), (2048, 2048), mask=Causal()), id="one KV head"),
    pytest.param(problem_of((32, 4), (8192, 1024)), id="few keys"),
    pytest.param(problem_of((32, 4), (4096, 77)), id="77 keys"),
    pytest.param(problem_of((1, 1), (16384, 16384), mask=Causal()), id="one long sequence"),
    pytest.param(problem_of((8, 1), (8192, 8192), mask=Window(1024, 0)), id="a window"),
]


@pytest.mark.parametrize("problem", FEW)
def test_few_or_long_tiles_are_cut_and_fill_the_gpu_better(problem):
    steps = tile_steps(problem, 64, 128)
    pairs = problem.batch * problem.heads_kv
    found = divide(steps, pairs, SLOTS, COSTS, SECTIONS)
    assert found.cut
    whole = division._simulated(steps, pairs, SLOTS, COSTS, SECTIONS, max(steps))[1]
    assert found.idle < whole.idle
    assert span(steps, pairs, found.piece_steps) < span(steps, pairs, max(steps))


@pytest.mark.parametrize("mask", [Full(), Causal()], ids=str)
def test_many_tiles_are_left_whole(mask):
    problem = problem_of((32, 32), (4096, 4096), batch=8, mask=mask)
    found = divide(tile_steps(problem, 64, 128), 256, SLOTS, COSTS, SECTIONS)
    assert not found.cut
    assert found.grid == 256 * 32
    assert found.idle < 0.02


def test_a_section_is_two_waves_where_no_number_of_them_is_given():
    found = divide((64,) * 32, 64, SLOTS, COSTS)
    assert found.sections == round(64 * 32 / (division.SECTION_WAVES * SLOTS))
    assert divide((64,) * 4, 2, SLOTS, COSTS).sections == 1


def test_pieces_that_take_turns_are_fewer():
    steps = (64,) * 2
    assert divide(steps, 1, SLOTS, COSTS._replace(turn=4.0)).pieces < divide(steps, 1, SLOTS, COSTS).pieces


def test_pieces_that_cost_nothing_to_add_up_are_no_longer():
    for pairs, longest in itertools.product((1, 3, 17), (8, 60, 500)):
        steps = (longest,) * 3
        free = divide(steps, pairs, SLOTS, COSTS._replace(merge=0.0), SECTIONS)
        assert free.piece_steps <= divide(steps, pairs, SLOTS, COSTS._replace(merge=50.0), SECTIONS).piece_steps


def test_a_division_says_what_it_is():
    text = {"waves": 1.5, "idle": 0.25, "sections": 1, "pieces": 6}
    assert str(Division(piece_steps=9, cut=True, grid=198, **text)) == (
        "198 pieces of up to 9 steps, 1.5 per multiprocessor, 25% idle at the end"
    )
    assert str(Division(piece_steps=9, cut=False, grid=198, **text)) == (
        "198 tiles of keys, 1.5 per multiprocessor, 25% idle at the end"
    )


def divisions_of(problem):
    """Of every backward that takes the problem in some dtype."""
    narrow = problem.with_(dtype=torch.bfloat16)
    return {
        "sm90": sm90_backward.divide(narrow, sm90_backward.configs(narrow, H200)[0], H200),
        "sm80": sm80_backward.divide(narrow, sm80_backward.configs(narrow, H200)[0], H200),
        "sm90 float32": sm90_float32_backward.divide(problem, H200),
        "sm80 float32": sm80_float32_backward.divide(problem, sm80_float32_backward.configs(problem, H200)[0], H200),
    }


@pytest.mark.parametrize("problem", FEW)
def test_every_backward_divides_by_the_same_rule(problem):
    for name, found in divisions_of(problem).items():
        assert found.cut or found.idle < 0.1, name
        assert found.waves > 0.9, name


def test_extra_memory_of_pieces_grows_with_the_sequence_and_not_with_its_square():
    extra = {}
    for seq in (4096, 8192):
        for deterministic in (False, True):
            problem = problem_of((8, 1), (seq, seq), deterministic=deterministic, mask=Causal())
            narrow = problem.with_(dtype=torch.bfloat16)
            for module in (sm80_backward, sm90_backward):
                config = module.configs(narrow, H200)[0]
                divided = module.divide(narrow, config, H200)
                assert divided.cut
                extra[module.__name__, deterministic, seq] = module.program(narrow, H200, config).scratch.bytes
            (config,) = sm90_float32_backward.configs(problem, H200)
            extra["float32", deterministic, seq] = sm90_float32_backward.program(problem, H200, config).scratch.bytes
    for (name, deterministic, seq), size in extra.items():
        if seq == 8192:
            assert size <= 2.1 * extra[name, deterministic, 4096], name


@pytest.mark.parametrize("module", [sm80_backward, sm90_backward], ids=["sm80", "sm90"])
def test_extra_memory_without_pieces_is_a_row_of_dq_and_two_terms(module):
    for seq in (4096, 8192):
        problem = problem_of((2, 1), (seq, seq), dtype=torch.bfloat16)
        config = module.configs(problem, H200)[0]
        assert module.program(problem, H200, config, frozenset("q")).scratch.bytes == 4 * 2 * seq * (128 + 2)
