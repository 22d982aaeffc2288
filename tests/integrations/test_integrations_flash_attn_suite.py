"""The checks of flash-attn's own tests (flash_attn_suite), on the CPU; tests/gpu has them at flash-attn's sizes."""

from __future__ import annotations

import pytest
import torch

import flash_attn_suite as suite
from flash_attn_suite import Case

LENGTHS = [(23, 41), (41, 23), (64, 64), (1, 37), (97, 97), (37, 1), (63, 64)]
DIMS = [32, 40, 59, 64, 96, 111, 128, 256]
BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("case", suite.draw_cases(28, LENGTHS, DIMS, seed=0), ids=str)
def test_output_and_gradients(case):
    suite.check_output_and_gradients(case, "cpu")


@pytest.mark.parametrize("case", suite.draw_cases(14, LENGTHS[:6], DIMS[:5], seed=1), ids=str)
def test_varlen_output_and_gradients(case):
    suite.check_varlen(case, "cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(23, 41), (41, 23), (64, 64)], ids=str)
def test_lse(lengths, causal):
    suite.check_lse(Case(*lengths, 64, BF16, "gqa", causal=causal), "cpu")


@pytest.mark.parametrize("form", ["func", "qkvpacked"])
def test_large_inputs_do_not_overflow(form):
    suite.check_output_and_gradients(Case(97, 97, 64, FP16, form=form, causal=True), "cpu", scale=4.0, factors=(2, 5))


@pytest.mark.parametrize("local", [False, True])
def test_deterministic(local):
    suite.check_deterministic(Case(41, 41, 64, FP16, "gqa", causal=True, local=local, deterministic=True), "cpu", 3)


@pytest.mark.parametrize("causal", [False, True])
def test_gradient_of_a_strided_dout(causal):
    suite.check_gradient_of_a_strided_dout(Case(41, 41, 64, FP16, causal=causal), "cpu")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64])
def test_keys_shorter_than_a_tile(head_dim, causal):
    suite.check_keys_shorter_than_a_tile("cpu", FP16, head_dim, causal)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"local": True}], ids=str)
def test_dropout(options):
    suite.check_dropout(Case(96, 128, 128, torch.float32, "gqa", **options), "cpu")


def test_a_window_may_be_a_tensor():
    """As flash-attn's tests draw it."""
    q, k, v = suite.make(Case(23, 41, 32), "cpu")
    window = torch.tensor([5, 3])
    given = suite.flash_attn.flash_attn_func(q, k, v, window_size=window)
    assert torch.equal(given, suite.flash_attn.flash_attn_func(q, k, v, window_size=(5, 3)))
