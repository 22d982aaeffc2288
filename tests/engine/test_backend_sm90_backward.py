"""The Hopper backward as far as it goes without a GPU: what its family has in common with others, and what it has of
its own."""

from __future__ import annotations

import dataclasses
from itertools import product

import pytest
import torch
from family import BF16, BOTTOM_RIGHT, FP16, H200, Case, Family, inputs_of, like_out
from family_backward import *  # noqa: F403 (every case, for this family)
from family_backward import check

import emulation
from support import same_bits
from tilewise import Causal, Full, Window
from tilewise.engine import SM90, rules
from tilewise.engine.sm90 import backward as sm90_backward
from tilewise.operands import ALL

emulated = emulation.emulated
FAMILY = Family(SM90, BF16, ("backward",))
GRADIENTS = [
    Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT),
    Case((256, 256), (128, 128), mask=Causal()),
    Case((100, 140), (128, 128), mask=Window(40, 10)),
    Case((100, 100), (128, 128), (2, 1)),
    Case((200, 60), (128, 128), mask=BOTTOM_RIGHT),
    Case((300, 300), (88, 80), mask=Window(20, 0), fields={"dtype": FP16}),
    Case((70, 140), (128, 128), fields={"softcap": 5.0}),
    Case((70, 140), (128, 128), fields={"softcap": 50.0}),
    Case((130, 100), (256, 256), mask=Causal()),
    Case((70, 100), (192, 128), (2, 1), fields={"dtype": FP16, "softcap": 5.0}),
    Case((150, 150), (128, 128), mask=Causal(), fields={"deterministic": True}),
]
CUT = [
    Case((600, 260), heads=(4, 1)),
    Case((600, 130), (128, 128), (4, 1), BOTTOM_RIGHT),
    Case((700, 100), (128, 128), (2, 1)),
    Case((300, 300), (256, 256), (4, 2), Causal(), fields={"dtype": FP16}),
    Case((400, 400), (128, 128), (3, 1), Window(150, 20), fields={"softcap": 5.0}),
    pytest.param(
        Case((500, 300), (128, 128), (4, 1), Causal(), fields={"deterministic": True}), marks=pytest.mark.kernel_gate
    ),
    Case((300, 200), (192, 128), (4, 1), fields={"deterministic": True}),
]
PARTLY = [Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT)]
PARTLY_CUT = [Case((600, 130), heads=(4, 1), mask=BOTTOM_RIGHT, fields={"deterministic": True})]
GRADIENTS_IN_ANY_ORDER = [Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT)]


def test_registers_add_up_to_what_a_multiprocessor_has():
    for classes, has_terms in product(rules.HEAD_DIM_CLASSES, (False, True)):
        rows = rules.rows("sm90_backward", "backward", classes, has_terms)
        assert rows
        for row in rows:
            shared_out = 24 + row["query_registers"] + 2 * row["product_registers"]
            assert shared_out <= 512
            assert row["query_registers"] % 8 == row["product_registers"] % 8 == 0


def test_the_shortcut_for_one_tile_of_keys_is_taken_only_when_every_query_tile_sees_it():
    def writes(seqs, mask, softcap=0.0):
        problem = Case(seqs, (128, 128), (2, 1), mask).problem(FAMILY, softcap=softcap, needs_grad=True)
        return sm90_backward.configs(problem, H200)[0].writes_dq

    assert writes((128, 128), Full())
    assert writes((1000, 100), Causal())
    assert not writes((1000, 129), Full())
    assert not writes((1000, 100), Causal("bottom-right"))
    assert not writes((1000, 100), Window(50, 0))
    assert not writes((128, 128), Full(), softcap=5.0)


@emulated
@pytest.mark.parametrize(
    "case",
    [
        Case((128, 128), heads=(3, 1), mask=Causal(), fields={"batch": 2}),
        Case((70, 100), (72, 40), fields={"dtype": FP16}),
        Case((150, 77), (128, 128), (2, 2), Window(None, 30), fields={"deterministic": True}),
    ],
    ids=str,
)
def test_short_sequences_take_one_launch_and_give_the_same_bits(monkeypatch, case):
    """As with a kernel before that makes the row terms, where tiles are not cut then either."""
    problem = case.problem(FAMILY, needs_grad=True)
    target = dataclasses.replace(H200, sms=problem.batch * problem.heads_kv)
    dlse = torch.randn(problem.batch, problem.heads_q, problem.seq_q)

    def gradients(launches):
        program = sm90_backward.program(problem, target, sm90_backward.configs(problem, target)[0])
        assert (len(program.launches), program.scratch.bytes == 0) == (launches, launches == 1)
        grads = check(monkeypatch, FAMILY, problem, target)
        return *grads, *FAMILY.backward(monkeypatch, problem, inputs_of(problem), like_out(problem), target, dlse=dlse)

    alone = gradients(1)
    monkeypatch.setattr(sm90_backward, "_makes_row_terms", lambda problem, config, target: False)
    assert same_bits(alone, gradients(2))


def test_when_a_backward_is_one_launch():
    def launches(seqs, dims=(64, 64), heads=(2, 2), target=H200, wants=ALL, **fields):
        problem = Case(seqs, dims, heads).problem(FAMILY, needs_grad=True, **fields)
        return len(sm90_backward.program(problem, target, sm90_backward.configs(problem, target)[0], wants).launches)

    assert launches((128, 128)) == launches((384, 128)) == launches((192, 100), (128, 128)) == 1
    assert launches((385, 128)) == launches((193, 100), (128, 128)) == 2, "more query tiles than stages"
    assert launches((128, 129)) == 2, "two tiles of keys"
    assert launches((128, 128), heads=(4, 1)) == 2, "a group of four heads is four query tiles"
    assert launches((64, 64), heads=(132, 132)) == 1
    assert launches((64, 64), heads=(133, 133)) == 2, "more CTAs than run at once"
    assert launches((128, 128), wants=frozenset("kv")) == 2
    assert launches((128, 128), softcap=5.0) == 2


@emulated
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "case",
    [
        Case((150, 200), heads=(2, 1), mask=BOTTOM_RIGHT),
        Case((200, 300), (128, 128), mask=Window(40, 10)),
        Case((300, 200), mask=BOTTOM_RIGHT),
        Case((130, 200), (256, 256), mask=Causal()),
    ],
    ids=str,
)
def test_sums_of_dq_as_they_come_and_in_turn_on_the_model(monkeypatch, case, deterministic):
    monkeypatch.setattr(sm90_backward, "MAX_CLAIMANTS", 0)
    check(monkeypatch, FAMILY, case.problem(FAMILY, needs_grad=True, deterministic=deterministic), H200)


@emulated
@pytest.mark.parametrize("mask", [Causal(), Window(40, 10)], ids=str)
def test_the_last_of_several_sections_goes_the_other_way_and_no_order_of_work_shows(monkeypatch, mask):
    small = dataclasses.replace(H200, l2_bytes=1, sms=1)
    problem = Case((300, 260), (128, 128), (2, 2), mask).problem(FAMILY, needs_grad=True, deterministic=True)
    assert FAMILY.divided(problem, small).sections == 2
    first, again = (check(monkeypatch, FAMILY, problem, small, seed) for seed in (0, 7))
    assert same_bits(first, again)
