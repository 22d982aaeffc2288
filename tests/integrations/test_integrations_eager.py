"""The models of benchmarks/eager.py, tiny: every way computes what eager attention does, and rows say what it took."""

from __future__ import annotations

from pathlib import Path

import eager
import pytest
import torch
from documents import programs

from support import budget

pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("family", eager.FAMILIES)
def test_every_way_computes_the_same_model(family):
    runner = eager.Runner(family, tiny=True, device="cpu", dtype=torch.float32)
    told = runner.verify()
    allowed = 16 * budget(torch.float32, 64)
    assert all(max(told["errors"][name].values()) <= allowed for name in eager.WAYS)
    assert set(told["first"]) >= set(eager.WAYS)
    assert told["same tokens"] == dict.fromkeys(eager.WAYS, 1.0)
    with runner.way(eager.OURS):
        made = runner.generate()
    assert made.shape == (eager.SEQUENCES, runner.prompt.shape[1] + runner.new_tokens)


@pytest.mark.parametrize("kind", [kind for kind in eager.KINDS if kind.startswith(eager.PADDED)])
def test_padded_sequences_are_of_different_lengths(kind):
    runner = eager.Runner("Llama", tiny=True, device="cpu", dtype=torch.float32)
    lengths = {tuple(there.sum(1).tolist()) for there in runner.there.values()}
    assert all(len(set(one)) > 1 for one in lengths)
    for padded in (True, False):
        given = runner.given(runner.prompt, padded=padded)
        assert bool(given["attention_mask"].all()) is not padded
        assert torch.equal(given["input_ids"] == 0, given["attention_mask"] == 0), "words begin at 3"
    times = runner.rounds(kind, 2, 1, {"errors": {}, "wrong": {}})
    assert [len(found) for found in times.values()] == [2] * len(eager.WAYS)


def test_a_decoded_token_is_verified_before_it_is_timed():
    runner = eager.Runner("Llama", tiny=True, device="cpu", dtype=torch.float32)
    told = {"errors": {name: {} for name in eager.WAYS}, "wrong": {}}
    times = runner.rounds("graph", 2, 3, told)
    assert all(told["errors"][name]["graph"] <= 16 * budget(torch.float32, 64) for name in eager.WAYS)
    assert [len(found) for found in times.values()] == [2] * len(eager.WAYS)


def test_every_kind_has_its_words_in_the_table():
    assert set(programs._WHATS) == set(eager.KINDS)


def test_rows_compare_with_sdpa_what_is_right():
    times = {name: [2.0 + place, 2.1 + place, 2.2 + place] for place, name in enumerate(eager.WAYS)}
    told = {"errors": {}, "wrong": {eager.OVERRIDE: "out error"}, "first": {}, "same tokens": {}}
    row = eager.row_of("GPT2", "step", told, times)
    assert list(row["speed"]) == [eager.OURS]
    assert row["speed"][eager.OURS]["ratio"] == pytest.approx(3.1 / 2.1)
    assert row["seconds"] is times
