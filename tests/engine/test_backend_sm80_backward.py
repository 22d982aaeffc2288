"""The FlashAttention-2 backward as far as it goes without a GPU: what it chooses, that it fits every GPU it knows, and
its kernels, real sources and real host code, on a model of the hardware."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import emulation
from support import exact, in_order, make_inputs, make_problem, rounding_budget, wanted
from tilewise import Causal, Full, Target, Window
from tilewise.engine import SM80
from tilewise.engine.sm80 import backward as sm80_backward
from tilewise.engine.sm80 import shared as sm80_shared
from tilewise.engine.source import COMPILED
from tilewise.target import TARGETS

GPUS = [name for name, target in TARGETS.items() if target.capability >= (8, 0)]
H200 = Target.named("h200")
BUDGETS = json.loads((Path(__file__).parents[1] / "ratchet.json").read_text())["kernels"]
BF16, FP16 = torch.bfloat16, torch.float16

DIMS = [(8, 8), (64, 64), (72, 40), (96, 96), (128, 128), (40, 128), (192, 128), (192, 192), (200, 256), (256, 256)]


def problem_of(seqs=(300, 300), dims=(64, 64), heads=(2, 1), dtype=BF16, **fields):
    values = {"heads_kv": heads[1], "seq_kv": seqs[1], "head_dim_v": dims[1], "needs_grad": True}
    return make_problem((1, heads[0], seqs[0], dims[0]), dtype, **(values | fields))


@pytest.mark.parametrize("name", GPUS)
def test_every_problem_it_takes_has_a_config_that_fits_and_is_compiled_in_ci(name):
    target = Target.named(name)
    twin = next(t for t in COMPILED if t.smem_per_block == target.smem_per_block)
    for dims in DIMS:
        for softcap in (0.0, 30.0):
            problem = problem_of(dims=dims, softcap=softcap, mask=Causal())
            assert SM80.why_not(problem, target) == []
            configs = sm80_backward.configs(problem, target)
            assert configs, str(problem)
            for config in configs:
                together = config.ctas_per_sm * (config.smem_bytes + 1024)
                assert config.smem_bytes <= target.smem_per_block
                assert together <= target.smem_per_sm
                # Compiled is what adds up as the twin can, which changes nothing else.
                built = replace(config, vector_sums=twin.capability >= sm80_shared.VECTOR_SUMS_FROM)
                assert config.smem_bytes == BUDGETS[sm80_backward.unit(built, twin.arch).label]["smem_bytes"]
                assert sm80_backward.postprocess_unit(built, twin.arch).label in BUDGETS
                assert config.head_dim >= dims[0]
                assert config.head_dim_v >= dims[1]


def test_sums_are_added_four_at_a_time_where_the_gpu_can():
    names = {name: sm80_backward.configs(problem_of(), Target.named(name))[0].vector_sums for name in GPUS}
    assert names == {name: TARGETS[name].capability >= (9, 0) for name in GPUS}


def test_extra_memory_grows_with_the_sequence_and_not_with_its_square():
    sizes = []
    for seq in (4096, 8192):
        problem = problem_of((seq, seq), (128, 128))
        config = sm80_backward.configs(problem, H200)[0]
        sizes.append(sm80_backward.program(problem, H200, config, frozenset("q")).scratch.bytes)
        assert sizes[-1] == 4 * 2 * seq * (128 + 2)
    assert sizes[1] == 2 * sizes[0]


# --- on a model of the hardware ---

emulated = emulation.emulated


def run_on_the_model(monkeypatch, problem, target=H200, seed=0, wants=(True, True, True), dlse=None, order=None):
    """`seed` draws the inputs and, unless `order` does, what the hardware leaves open."""
    emulation.install(monkeypatch, seed=seed if order is None else order)
    torch.manual_seed(seed)
    q, k, v = make_inputs(problem)
    dout = torch.randn(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v).to(problem.dtype)
    out, lse, *truth = exact(q, k, v, problem, None, dout)
    got = in_order(
        SM80.bind_backward(problem, None, target)(
            dout, dlse, q, k, v, out.to(problem.dtype), lse.float(), wants=wanted(*wants)
        )
    )
    return got, truth


def assert_accurate(got, truth, dtype):
    """Four roundings of 16 bits stand between the inputs and a gradient."""
    for grad, want, name in zip(got, truth, ("dq", "dk", "dv"), strict=True):
        error = ((grad.double() - want).norm() / want.norm()).item()
        assert error <= rounding_budget(dtype, 4), f"{name}: {error:.2e}"


@emulated
@pytest.mark.parametrize(
    ("seqs", "dims", "heads", "mask", "name", "fields"),
    [
        ((150, 200), (64, 64), (2, 1), Causal("bottom-right"), "h200", {}),
        ((256, 256), (128, 128), (1, 1), Causal(), "a100", {}),
        ((100, 140), (128, 128), (1, 1), Window(40, 10), "rtx-4090", {}),
        ((100, 100), (128, 128), (4, 2), Full(), "h200", {"layout": "bshd"}),
        ((60, 200), (64, 64), (1, 1), Causal(), "a100", {}),
        ((300, 300), (88, 80), (1, 1), Window(20, 0), "a100", {"dtype": FP16}),
        ((70, 140), (128, 128), (1, 1), Full(), "h200", {"softcap": 5.0}),
        ((70, 140), (96, 96), (1, 1), Causal(), "rtx-4090", {}),
        ((70, 100), (192, 128), (2, 1), Full(), "a100", {"dtype": FP16, "softcap": 5.0}),
        ((70, 100), (192, 192), (1, 1), Causal("bottom-right"), "rtx-4090", {}),
        ((130, 100), (256, 256), (1, 1), Causal(), "h200", {}),
        ((70, 100), (256, 256), (1, 1), Causal(), "rtx-4090", {}),
        ((150, 300), (128, 128), (1, 1), Causal(), "h200", {"deterministic": True}),
        ((150, 300), (64, 64), (2, 1), Window(100, 20), "a100", {"deterministic": True}),
    ],
    ids=str,
)
def test_gradients_on_the_model(monkeypatch, seqs, dims, heads, mask, name, fields):
    problem = problem_of(seqs, dims, heads, mask=mask, **fields)
    got, truth = run_on_the_model(monkeypatch, problem, Target.named(name))
    assert_accurate(got, truth, problem.dtype)


PIECES = [
    ((200, 140), (64, 64), (3, 1), Full(), "h200", {}),
    ((260, 130), (128, 128), (3, 1), Causal("bottom-right"), "a100", {}),
    ((270, 77), (128, 128), (2, 1), Full(), "rtx-4090", {}),
    ((200, 70), (256, 256), (2, 1), Causal(), "h200", {"dtype": FP16}),
    ((200, 200), (64, 64), (3, 1), Window(150, 20), "a100", {"softcap": 5.0, "layout": "bshd"}),
    ((260, 140), (128, 128), (2, 1), Causal(), "h200", {"deterministic": True}),
    ((200, 130), (192, 128), (2, 1), Full(), "a100", {"deterministic": True}),
]


@emulated
@pytest.mark.parametrize(("seqs", "dims", "heads", "mask", "name", "fields"), PIECES, ids=str)
def test_tiles_of_keys_in_pieces_on_the_model(monkeypatch, seqs, dims, heads, mask, name, fields):
    problem, target = problem_of(seqs, dims, heads, mask=mask, **fields), Target.named(name)
    divided = sm80_backward.divide(problem, sm80_backward.configs(problem, target)[0], target)
    assert divided.cut
    got, truth = run_on_the_model(monkeypatch, problem, target)
    assert_accurate(got, truth, problem.dtype)
    if problem.deterministic:
        again, _ = run_on_the_model(monkeypatch, problem, target, order=3)
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@emulated
def test_pieces_without_some_gradients(monkeypatch):
    problem = problem_of((200, 130), (64, 64), (3, 1), mask=Causal("bottom-right"), deterministic=True)
    config = sm80_backward.configs(problem, H200)[0]
    assert sm80_backward.divide(problem, config, H200).cut
    assert sm80_backward.divide(problem, sm80_backward.dq_only(config), H200).cut
    everything, _ = run_on_the_model(monkeypatch, problem)
    for wants in ((True, False, False), (False, True, False), (False, False, True), (False, True, True)):
        got, _ = run_on_the_model(monkeypatch, problem, wants=wants)
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None


def test_pieces_are_for_every_slot_of_a_multiprocessor():
    problem = problem_of((2048, 2048), (64, 64), (8, 1))
    config = sm80_backward.configs(problem, H200)[0]
    divided = sm80_backward.divide(problem, config, H200)
    assert config.ctas_per_sm > 1
    assert divided.cut
    assert divided.waves == divided.grid / (H200.sms * config.ctas_per_sm)


def test_sums_of_pieces_grow_with_the_keys_alone():
    sizes = []
    for seq in (512, 1024):
        problem = problem_of((16 * seq, seq), (128, 128), (8, 1))
        config = sm80_backward.configs(problem, H200)[0]
        divided = sm80_backward.divide(problem, config, H200)
        assert divided.cut
        plain = sm80_backward.program(problem, H200, config, frozenset("q")).scratch.bytes
        sizes.append(sm80_backward.program(problem, H200, config).scratch.bytes - plain)
        assert 4 * seq * 256 < sizes[-1] <= 4 * (seq * 256 + 32 * divided.grid)
    assert sizes[1] <= 2 * sizes[0]


@emulated
@pytest.mark.parametrize("seed", range(1, 5))
def test_whatever_order_copies_arrive_in(monkeypatch, seed):
    for name in ("h200", "rtx-4090"):  # two stages, and one
        problem = problem_of((150, 200), (128, 128), mask=Causal("bottom-right"))
        got, truth = run_on_the_model(monkeypatch, problem, Target.named(name), seed)
        assert_accurate(got, truth, problem.dtype)


@emulated
def test_a_gradient_of_the_log_sum_exp_counts(monkeypatch):
    problem = problem_of((70, 90), (64, 64), (1, 1), mask=Causal())
    torch.manual_seed(0)
    q, k, v = make_inputs(problem)
    dout, dlse = torch.randn(1, 1, 70, 64).to(BF16), torch.randn(1, 1, 70)
    wide = [tensor.double().requires_grad_() for tensor in (q, k, v)]
    scores = (wide[0] @ wide[1].mT * problem.scale).masked_fill(
        ~problem.mask.to_bool(range(70), range(90), 70, 90), -torch.inf
    )
    lse = scores.logsumexp(-1)
    out = torch.softmax(scores, -1) @ wide[2]
    truth = torch.autograd.grad((out, lse), wide, (dout.double(), dlse.double()))
    emulation.install(monkeypatch)
    got = in_order(
        SM80.bind_backward(problem, None, H200)(
            dout, dlse, q, k, v, out.detach().to(BF16), lse.detach().float(), (True,) * 3
        )
    )
    assert_accurate(got, truth, BF16)


@emulated
def test_gradients_that_are_not_wanted_are_not_there(monkeypatch):
    problem = problem_of((150, 200), (64, 64), mask=Causal("bottom-right"))
    everything, _ = run_on_the_model(monkeypatch, problem)
    for wants in ((True, False, False), (False, True, False), (False, False, True)):
        got, _ = run_on_the_model(monkeypatch, problem, wants=wants)
        for grad, whole, want in zip(got, everything, wants, strict=True):
            assert torch.equal(grad, whole) if want else grad is None
