"""The backward of a family, its real sources and real host code, on a model of the hardware."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from family import Case, Family, assert_grads_near, inputs_of, like_out, visible

import emulation
from support import budget, rounding_budget, same_bits
from tilewise import Causal

if TYPE_CHECKING:
    from tilewise import Problem, Target

emulated = emulation.emulated
EVERY = (True, True, True)


def check(
    monkeypatch: pytest.MonkeyPatch, family: Family, problem: Problem, target: Target, seed: int = 0, draw: int = 0
) -> tuple[torch.Tensor, ...]:
    """The gradients of inputs of seed `draw`."""
    inputs, dout = inputs_of(problem, draw), like_out(problem)
    grads = family.backward(monkeypatch, problem, inputs, dout, target, seed)
    family.assert_grads(grads, inputs, dout, problem)
    return grads


@emulated
def test_gradients_on_the_model(monkeypatch: pytest.MonkeyPatch, family: Family, gradient: Case) -> None:
    problem = gradient.problem(family, needs_grad=True)
    check(monkeypatch, family, problem, gradient.target, seed=gradient.seqs[0])


@emulated
def test_tiles_of_keys_in_pieces_on_the_model(monkeypatch: pytest.MonkeyPatch, family: Family, cut: Case) -> None:
    problem = cut.problem(family, needs_grad=True)
    assert family.divided(problem, cut.target).cut
    grads = check(monkeypatch, family, problem, cut.target)
    if problem.deterministic:
        assert same_bits(grads, check(monkeypatch, family, problem, cut.target, seed=3))


@emulated
@pytest.mark.parametrize("seed", range(1, 5))
def test_gradients_in_whatever_order_the_hardware_works(
    monkeypatch: pytest.MonkeyPatch, family: Family, gradient_in_any_order: Case, seed: int
) -> None:
    problem = gradient_in_any_order.problem(family, needs_grad=True)
    check(monkeypatch, family, problem, gradient_in_any_order.target, seed, draw=seed)


def check_some_gradients(monkeypatch: pytest.MonkeyPatch, family: Family, case: Case) -> None:
    """Those that are not wanted are not there, and the others are the same to the last bit."""
    problem = case.problem(family, needs_grad=True)
    inputs, dout = inputs_of(problem), like_out(problem)
    everything = family.backward(monkeypatch, problem, inputs, dout, case.target)
    for wants in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
        grads = family.backward(monkeypatch, problem, inputs, dout, case.target, wants=wants)
        for grad, whole, want in zip(grads, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None


@emulated
def test_gradients_that_are_not_wanted_are_not_there(
    monkeypatch: pytest.MonkeyPatch, family: Family, partly: Case
) -> None:
    check_some_gradients(monkeypatch, family, partly)


@emulated
def test_pieces_without_some_gradients(monkeypatch: pytest.MonkeyPatch, family: Family, partly_cut: Case) -> None:
    assert family.divided(partly_cut.problem(family, needs_grad=True), partly_cut.target).cut
    check_some_gradients(monkeypatch, family, partly_cut)


@emulated
@pytest.mark.parametrize("alone", [False, True], ids=["with out", "alone"])
def test_a_gradient_of_the_log_sum_exp_counts(monkeypatch: pytest.MonkeyPatch, family: Family, alone: bool) -> None:
    problem = Case((70, 90), mask=Causal()).problem(family, needs_grad=True)
    inputs = inputs_of(problem)
    dout, dlse = like_out(problem) * (not alone), torch.randn(1, 1, 70)
    wide = [tensor.double().requires_grad_() for tensor in inputs]
    scores = (wide[0] @ wide[1].mT * problem.scale).masked_fill(~visible(problem), -torch.inf)
    results = (torch.softmax(scores, -1) @ wide[2], scores.logsumexp(-1))
    truth = torch.autograd.grad(results, wide, (dout.double(), dlse.double()))
    grads = family.backward(monkeypatch, problem, inputs, dout, dlse=dlse)
    if alone:
        assert (grads[2] == 0).all()
        grads, truth = grads[:2], truth[:2]
    assert_grads_near(grads, truth, budget(family.dtype, 90) if family.is_wide else rounding_budget(family.dtype, 4))
