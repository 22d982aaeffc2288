"""Generated problems of every form on a CPU, in every way of calling; `make nightly` runs thousands."""

from __future__ import annotations

import time
from typing import Any

import form_generator
import pytest
import term_generator
import torch

KINDS = 100


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_generated_forms_match_float64() -> None:
    outcomes = form_generator.run_all(form_generator.drawn(0, "cpu", KINDS, range(1)), 0)
    assert not form_generator.failed(outcomes), form_generator.report(outcomes)
    matched = {one.problem.form for one in outcomes if one.what == "matched"}
    assert matched == set(form_generator.FORMS["cpu"])


def test_a_problem_that_does_not_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_generator, "_PATIENCE", 0.0)  # less than a process takes to start
    (outcome,) = form_generator.run_all(form_generator.drawn(0, "cpu", 3, range(1)), 1, time.monotonic())
    assert form_generator.failed([outcome]) == [outcome]
    assert outcome.what == "this or one of the next 2 did not end"


@pytest.mark.parametrize("way", ["retained", "compiled"])
@pytest.mark.parametrize("form", form_generator.FORMS["cpu"])
def test_every_form_in_every_way(monkeypatch: Any, form: str, way: str) -> None:
    monkeypatch.setattr(term_generator, "WAYS", {way: 1})
    outcomes = [form_generator.run(form_generator.Problem(form, seed, 0, "cpu")) for seed in range(2)]
    assert {one.what for one in outcomes} <= {"matched", "refused"}, form_generator.report(outcomes)


@pytest.mark.parametrize("seed", [1049082352, 1049084720])
def test_gradients_in_16_bits_that_cancel_over_wide_heads(seed: int) -> None:
    outcome = form_generator.run(form_generator.Problem("batched", seed, 0, "cpu"))
    assert outcome.what == "matched"


def test_a_graph_that_changes_between_backwards_is_seen(monkeypatch: Any) -> None:
    attention, calls = term_generator.tilewise.attention, []

    def off(*given: Any, **options: Any) -> Any:
        found = attention(*given, **options)
        out = found[0] if isinstance(found, tuple) else found
        if out.requires_grad:
            out.register_hook(lambda grad: calls.append(grad) or (grad * 2 if len(calls) == 2 else grad))
        return found

    monkeypatch.setattr(term_generator.tilewise, "attention", off)
    for seed in range(8):
        case = term_generator.draw(seed)
        case.way, case.again = "retained", False
        calls.clear()
        wrong = term_generator.run_as_drawn(case, term_generator.draw)
        assert bool(wrong) == (len(calls) > 1 and bool(calls[0].any())), case
        assert all("retained graph" in text for text in wrong)


def test_a_graph_that_is_right_for_its_first_size_alone_is_seen(monkeypatch: Any) -> None:
    def off(function: Any, **options: Any) -> Any:
        calls: list[None] = []

        def compiled(*given: Any) -> Any:
            calls.append(None)
            out, *others = function(*given)
            return out * len(calls), *others

        return compiled

    monkeypatch.setattr(torch, "compile", off)
    case = term_generator.draw(3, form_generator.space("cpu"), 0)
    case.way = "compiled"
    wrong = term_generator.run_as_drawn(
        case, lambda number: term_generator.draw(3, form_generator.space("cpu"), number)
    )
    assert [text.split(":")[0] for text in wrong] == ["size 1", "size 2"]


def test_all_that_kernels_differ_in_is_drawn() -> None:
    packed = [form_generator.draw_packed(seed, 0, "cuda") for seed in range(60)]
    named = {name for case in packed for name in (*case.arguments, *case.leaves)}
    assert {"softcap", "alibi", "sink", "table", "seqused_k", "leftpad_k"} <= named
    assert {case.mask.partition(":")[0] for case in packed} == {"None", "causal", "window"}
    assert any((~case.visible.any(-1)).any() for case in packed if case.sizes.seq_q)
    assert any(case.leaves[name].requires_grad for case in packed for name in case.leaves if name not in "qkv")
    cached = [form_generator.draw_cached(seed, 0) for seed in range(60)]
    assert {name for case in cached for name in case.terms} == {"softcap", "alibi", "sink", "keep"}
    assert any(0 in case.lengths for case in cached)
    assert {term_generator.way(seed) for seed in range(200)} == set(term_generator.WAYS)
