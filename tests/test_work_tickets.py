"""Blocks start in any order: where CTAs wait for one another, they number their work by tickets as they start."""

from __future__ import annotations

import pytest
import torch

import emulation
from support import exact, in_order, make_inputs, make_problem, same_bits
from tilewise import Causal, Full, Target
from tilewise.engine import SM80, SM90

H200 = Target.named("h200")
# Deterministic sums of dQ over several tiles of keys, which are cut into pieces.
CASES = [
    pytest.param(SM80, torch.bfloat16, (1, 3, 200, 64), 140, Causal("bottom-right"), id="sm80"),
    pytest.param(SM80, torch.float32, (1, 2, 130, 64), 140, Full(), id="sm80-float32"),
    pytest.param(SM90, torch.bfloat16, (1, 3, 300, 64), 260, Causal("bottom-right"), id="sm90"),
    pytest.param(SM90, torch.float32, (1, 2, 130, 64), 140, Causal("bottom-right"), id="sm90-float32"),
]


def gradients(monkeypatch, backend, dtype, shape, seq_kv, mask, seed, spoil=("", "")):
    """Of the same inputs, whatever the seed of the model."""
    problem = make_problem(
        shape, dtype, heads_kv=1, seq_kv=seq_kv, mask=mask, needs_grad=True, needs_lse=True, deterministic=True
    )
    config = backend.backward_configs(problem, H200)[0]
    program = backend.backward_program(problem, H200, config)
    assert any(region.name == "piece_tickets" for region in program.scratch.regions)
    torch.manual_seed(0)
    q, k, v = make_inputs(problem)
    dout = torch.randn(*shape[:3], shape[3]).to(dtype)
    out, lse, *_ = exact(q, k, v, problem, None, dout)
    emulation.install(monkeypatch, seed=seed, spoil=spoil)
    bound = backend.bind_backward(problem, config, H200)
    return in_order(bound(dout, None, q, k, v, out.to(dtype), lse.float()))


@emulation.emulated
@pytest.mark.parametrize(("backend", "dtype", "shape", "seq_kv", "mask"), CASES)
def test_gradients_have_the_same_bits_whatever_order_blocks_start_in(monkeypatch, backend, dtype, shape, seq_kv, mask):
    first, *others = (gradients(monkeypatch, backend, dtype, shape, seq_kv, mask, seed) for seed in (0, 1, 2))
    assert all(torch.isfinite(grad).all() for grad in first)
    for other in others:
        assert same_bits(first, other)


@emulation.emulated
def test_the_model_finds_work_that_is_numbered_by_block_index(monkeypatch):
    spoil = ("if (tickets != nullptr) {", "if (false) {")
    with pytest.raises(AssertionError, match="waits for one that comes after it"):
        [gradients(monkeypatch, *CASES[0].values, seed, spoil) for seed in range(8)]
