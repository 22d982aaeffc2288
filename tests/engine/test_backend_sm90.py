"""The Hopper backend as far as it goes without a GPU: what it refuses, what it chooses, and that choices fit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from family import BF16, H200, Family
from family_choices import *  # noqa: F403 (every case, for this family)
from family_choices import REFUSED

from support import make_problem
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM90, run
from tilewise.engine.program import Map
from tilewise.engine.sm90 import forward
from tilewise.masks import Packed
from tilewise.terms import Alibi, KeyLengths, Sink, Spans

FAMILY = Family(SM90, BF16, ("forward", "backward"))
REFUSALS = [
    *REFUSED,
    ({"dtype": torch.float32, "needs_grad": True, "head_dim": 192, "head_dim_v": 192}, "takes heads to 128"),
]


def test_refusals_add_up():
    problem = make_problem((1, 2, 64, 60), torch.float64, needs_grad=True)
    reasons = SM90.why_not(problem, replace(Target.named("a100"), has_jit=False))
    assert len(reasons) == 4
    assert any("tilewise[cuda]" in reason.remedy for reason in reasons)


def test_small_problems_are_spread_over_the_chip():
    small = SM90.configs(make_problem((1, 8, 256, 64), torch.float16), H200)[0]
    large = SM90.configs(make_problem((4, 32, 4096, 64), torch.float16), H200)[0]
    assert small.block_q < large.block_q


def test_heads_of_80_have_tall_tiles_where_these_fill_the_chip():
    full = make_problem((8, 16, 1024, 80), torch.bfloat16)
    for mask in (Full(), Causal(), Window(1023, 0)):
        large, small = (SM90.configs(full.with_(mask=mask, batch=batch), H200)[0] for batch in (8, 1))
        assert (large.block_q, large.block_kv) == (192, 96)
        assert (small.block_q, small.block_kv) == (128, 128)


@pytest.mark.parametrize("inner", [Full(), Causal(), Window(511, 0)], ids=str)
def test_packed_sequences_of_heads_of_80_have_the_tiles_that_their_kernels_have_registers_for(inner):
    packed = make_problem((1, 16, 10000, 80), torch.bfloat16, mask=Packed(4, 8192, 8192, inner))
    configs = SM90.configs(packed, H200)
    assert configs
    assert all(config.takes_packed for config in configs)
    assert not SM90.configs(packed.with_(mask=Causal()), H200)[0].takes_packed


@pytest.mark.parametrize("dim", [64, 80, 96, 128, 192])
@pytest.mark.parametrize("term", [Sink(), Spans(), KeyLengths(), KeyLengths(padded_left=True)], ids=str)
def test_terms_that_fit_the_loops_of_a_window_keep_its_tiles(term, dim):
    plain = make_problem((4, 16, 4096, dim), torch.bfloat16, mask=Window(1023, 0))
    tiles = SM90.configs(plain, H200)[0]
    assert SM90.configs(plain.with_(scores=(term,)), H200)[0] == tiles


def test_other_terms_and_wide_heads_leave_registers_to_the_loops_of_a_window():
    for dim, term in ((128, Alibi()), (256, Sink()), (256, Spans())):
        plain = make_problem((4, 16, 4096, dim), torch.bfloat16, mask=Window(1023, 0))
        assert SM90.configs(plain.with_(scores=(term,)), H200)[0].block_kv < SM90.configs(plain, H200)[0].block_kv


def test_details_tell_the_launch():
    problem = make_problem((4, 16, 4096, 128), torch.bfloat16, mask=Causal())
    (line,) = SM90.details(problem, H200, SM90.configs(problem, H200)[0])
    assert line == "132 CTAs of 384 threads, 168 registers per thread; 2048 query tiles longest first, 15.5 waves"


def test_many_keys_are_divided_where_there_are_few_queries():
    few = make_problem((1, 32, 16, 128), torch.bfloat16, heads_kv=8, seq_kv=8192)
    config = SM90.configs(few, H200)[0]
    assert config.split
    parts, share = SM90.details(few, H200, config)
    assert "8 query tiles times 16 parts of their keys" in parts
    assert "128 CTAs" in parts
    assert "the 4 query heads of a KV head share tiles" in share
    short = few.with_(seq_kv=512)
    many = few.with_(seq_q=2048)
    assert not any(config.split for problem in (short, many) for config in SM90.configs(problem, H200))


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, 64),
        ({"seq_q": 1, "mask": Causal("bottom-right")}, 4),
        ({"mask": Causal("bottom-right")}, 16),  # rows of different heads would see different keys
        ({"heads_kv": 32}, 16),
        ({"seq_q": 128}, 128),  # whole tiles already
    ],
)
def test_heads_share_tiles_where_that_spares_some(changes, rows):
    problem = make_problem((1, 32, 16, 128), torch.bfloat16, heads_kv=8, seq_kv=8192).with_(**changes)
    program = SM90.program(problem, H200, forward.configs(problem, H200)[0])  # few rows have a family of their own
    fields = program.launches[0].fields
    assert fields["seq_q"] == rows
    assert fields["heads"] * fields["seq_q"] == problem.heads_q * problem.seq_q
    assert dict(program.views) == ({} if rows == problem.seq_q else dict.fromkeys(("q", "out"), (1, 8, rows, 128)))


def test_heads_that_lie_apart_are_not_folded():
    problem = make_problem((1, 32, 16, 128), torch.bfloat16, heads_kv=8, seq_kv=8192)
    program = SM90.program(problem, H200, SM90.configs(problem, H200)[0])
    assert program.fallback_without_views.launches[0].fields["seq_q"] == 16
    behind = torch.empty(1, 32, 16, 128)
    apart = torch.empty(1, 16, 32, 128).transpose(1, 2)
    assert run._viewed(program, {"q": behind, "out": behind})["q"].shape == (1, 8, 64, 128)
    assert run._viewed(program, {"q": behind, "out": apart}) is None


def test_maps_of_broadcast_operands_keep_their_places_unless_they_share_them(monkeypatch) -> None:
    """Keys that are expanded over heads are asked for by head; a bias by place 0 of what it is broadcast over."""
    monkeypatch.setattr(run, "rows_map", lambda tensor, rows: (tuple(tensor.shape), rows))
    expanded = torch.empty(1, 1, 300, 64, device="meta").expand(3, 4, 300, 64)
    assert run.tensor_map(Map("k", 128), {"k": expanded}) == ((3, 4, 300, 64), 128)
    assert run.tensor_map(Map("bias", 64, shared=True), {"bias": expanded}) == ((1, 1, 300, 64), 64)
