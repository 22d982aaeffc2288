"""PyTorch's CUDA kernels: the rule model against PyTorch's own answers, and each kernel's results against float64."""

from __future__ import annotations

import math
from itertools import product
from typing import TYPE_CHECKING

import pytest
import torch

from support import assert_close, budget, exact, in_order, make_bias, make_inputs, make_problem
from tilewise import Causal, Dense, Documents, Full, Problem, Target, Window
from tilewise.problem import describe, mask_operands
from tilewise.torch_kernels import bugs, candidates, gates

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.of("cuda")


# ---------------------------------------------------------------------------------------------------------------------
# The rules against PyTorch

DTYPES = (BF16, FP16, FP32, FP64)
DIMS = ((4, 4), (60, 60), (64, 64), (64, 32), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256), (320, 320))
HEADS = ((4, 4), (4, 2), (4, 1))
LENGTHS = ((128, 128), (1, 128), (128, 1), (96, 200))
MASKS = {
    "full": lambda b, h, sq, sk: Full(),
    "causal": lambda b, h, sq, sk: Causal(),
    "bottom-right": lambda b, h, sq, sk: Causal("bottom-right"),
    "window": lambda b, h, sq, sk: Window(8, 0),
    "boolean 2-D": lambda b, h, sq, sk: Dense((sq, sk)),
    "boolean 3-D": lambda b, h, sq, sk: Dense((h, sq, sk)),
    "boolean keys": lambda b, h, sq, sk: Dense((b, 1, 1, sk)),
    "additive 4-D": lambda b, h, sq, sk: Dense((b, h, sq, sk), True),
}


def grid() -> Iterator[Problem]:
    """A wide matrix of small problems."""
    for dtype, dims, heads, lengths, mask, grad in product(DTYPES, DIMS, HEADS, LENGTHS, MASKS, (False, True)):
        yield make_problem(
            (2, heads[0], lengths[0], dims[0]),
            dtype,
            heads_kv=heads[1],
            seq_kv=lengths[1],
            head_dim_v=dims[1],
            mask=MASKS[mask](2, heads[0], *lengths),
            needs_grad=grad,
        )


def specials() -> Iterator[Problem]:
    """What the grid leaves out: dropout, deterministic mode, layouts, zero lengths, huge batches."""
    for dropout, seq_q, grad, layout in product((0.1, 0.125, 0.5), (1, 64), (False, True), ("bhsd", "bshd")):
        yield make_problem((2, 4, seq_q, 64), BF16, seq_kv=64, dropout=dropout, needs_grad=grad, layout=layout)
    for deterministic, mask in product((False, True), (Full(), Causal(), Dense((64, 64)))):
        yield make_problem((2, 4, 64, 64), FP16, deterministic=deterministic, mask=mask)
    for seq_q, seq_kv in ((0, 8), (8, 0), (0, 0)):
        yield make_problem((2, 4, seq_q, 64), BF16, seq_kv=seq_kv)
    for batch, heads in ((65535, 1), (65536, 1), (1, 65536)):
        yield make_problem((batch, heads, 2, 8), BF16)


def told(problem: Problem, target: Target) -> list[str]:
    q, k, v = make_inputs(problem, "cuda", grad=problem.needs_grad)
    return candidates.disagreements(q, k, v, problem, target, make_bias(problem, "cuda"))


def report(found: list[str], asked: int) -> str:
    shown = "\n  ".join(found[:60])
    return f"{len(found)} disagreements over {asked} problems, torch {torch.__version__}:\n  {shown}"


def test_the_rules_agree_with_pytorch_on_a_wide_matrix(target: Target) -> None:
    asked = list(grid())
    found = [text for problem in asked for text in told(problem, target)]
    assert not found, report(found, len(asked))


def test_the_rules_agree_with_pytorch_on_special_cases(target: Target) -> None:
    asked = list(specials())
    found = [text for problem in asked for text in told(problem, target)]
    assert not found, report(found, len(asked))


def test_the_rules_agree_with_pytorch_on_strides(target: Target) -> None:
    """Views whose last dimension has a stride, and rows sliced out of wider ones."""
    wide = torch.randn(2, 4, 64, 80, device="cuda", dtype=BF16)
    across = torch.randn(2, 4, 64, 64, device="cuda", dtype=BF16).transpose(2, 3)
    packed = torch.randn(2, 64, 3, 4, 64, device="cuda", dtype=BF16).permute(2, 0, 3, 1, 4)
    found = []
    for q, k, v in ((across,) * 3, (wide[..., :64],) * 3, (wide[..., :64], across, wide[..., 16:]), tuple(packed)):
        found += candidates.disagreements(q, k, v, describe(q, k, v), target)
    assert not found, report(found, 4)


def test_pytorchs_reasons_are_captured(target: Target) -> None:
    problem = make_problem((1, 2, 64, 64), FP32, mask=Dense((64, 64)))
    q, k, v = make_inputs(problem, "cuda")
    answers = candidates.ask_torch(q, k, v, problem, make_bias(problem, "cuda"))
    assert set(answers) == set(gates.NAMES)
    assert answers[gates.EFFICIENT].usable
    assert answers[gates.MATH].usable
    assert any("attn_mask" in warning for warning in answers[gates.FLASH].warnings), answers[gates.FLASH]
    assert any("dtype" in warning for warning in answers[gates.CUDNN].warnings), answers[gates.CUDNN]


# ---------------------------------------------------------------------------------------------------------------------
# The kernels against float64

SHAPES = {
    "plain": {},
    "grouped": {"heads_q": 6, "heads_kv": 2},
    "one key head": {"heads_q": 4, "heads_kv": 1},
    "few queries": {"seq_q": 5},
    "one query": {"seq_q": 1, "heads_q": 8, "heads_kv": 2},
    "few keys": {"seq_kv": 40},
    "narrow values": {"head_dim_v": 32},
    "latent": {"head_dim": 192, "head_dim_v": 128},
    "wide": {"head_dim": 256, "head_dim_v": 256},
    "padded": {"head_dim": 60, "head_dim_v": 60},
    "scale": {"scale": 0.03},
    "odd lengths": {"seq_q": 131, "seq_kv": 203},
}
RUN_MASKS = {
    "full": lambda p: Full(),
    "causal": lambda p: Causal(),
    "causal bottom-right": lambda p: Causal("bottom-right"),
    "window": lambda p: Window(40, 3),
    "documents": lambda p: Documents((0, p.seq_q // 3, p.seq_q), (0, 0, p.seq_kv), Causal()),
    "boolean": lambda p: Dense((p.batch, 1, p.seq_q, p.seq_kv)),
    "boolean per head": lambda p: Dense((p.heads_q, p.seq_q, p.seq_kv)),
    "boolean keys": lambda p: Dense((p.batch, 1, 1, p.seq_kv)),
    "additive": lambda p: Dense((p.seq_q, p.seq_kv), True),
}


def pose(shape: str, mask: str, dtype: torch.dtype, layout: str) -> Problem:
    plain = make_problem((2, 4, 192, 64), dtype, layout=layout, needs_grad=True, **SHAPES[shape])
    return plain.with_(mask=RUN_MASKS[mask](plain))


@pytest.mark.parametrize("candidate", candidates.CANDIDATES, ids=lambda candidate: candidate.name)
@pytest.mark.parametrize(("dtype", "layout"), [(BF16, "bhsd"), (BF16, "bshd"), (FP16, "bshd"), (FP32, "bhsd")])
@pytest.mark.parametrize("shape", SHAPES)
def test_kernels_match_float64(
    candidate: candidates.Candidate, shape: str, dtype: torch.dtype, layout: str, target: Target
) -> None:
    """out, lse and all gradients, under every mask the kernel takes; one row at least sees no key in most of them."""
    willing = 0
    for mask in RUN_MASKS:
        problem = pose(shape, mask, dtype, layout)
        if candidate.why_not(problem, target):
            continue
        willing += 1
        check(candidate, problem, f"{candidate.name} {mask}")
    refused = all(candidate.why_not(pose(shape, mask, dtype, layout), target) for mask in RUN_MASKS)
    assert willing or refused


def check(candidate: candidates.Candidate, problem: Problem, what: str) -> None:
    q, k, v = make_inputs(problem, "cuda")
    bias = make_bias(problem, "cuda")
    if bias is not None:
        bias.select(-2, 0).fill_(False if bias.dtype == torch.bool else -math.inf)
    dout = torch.randn(2, problem.heads_q, problem.seq_q, problem.head_dim_v, device="cuda").to(problem.dtype)
    truth = dict(zip(("out", "lse", "dq", "dk", "dv"), exact(q, k, v, problem, bias, dout), strict=True))
    unseen = truth["lse"] == -math.inf
    out, lse = candidate.forward(q, k, v, problem, None, mask_operands(bias))
    grads = in_order(candidate.backward(dout, None, q, k, v, out, lse, problem, None, mask_operands(bias)))
    found = {"out": out, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    if candidate is not candidates.MATH:
        assert lse is not None
        assert lse.is_contiguous()
        assert lse.dtype == FP32
        found["lse"] = lse
    for name, tensor in found.items():
        assert tensor is not None
        assert_close(tensor, truth[name], budget(problem.dtype, problem.seq_kv), f"{what} {name}")
    assert not out[unseen].any(), f"{what}: rows without keys are not 0"
    assert not found["dq"][unseen].any(), f"{what}: rows without keys have a gradient"
    stored = out.transpose(1, 2) if problem.layout == "bshd" else out
    assert stored.is_contiguous(), f"{what}: strides {out.stride()}"


@pytest.mark.parametrize("candidate", candidates.CANDIDATES, ids=lambda candidate: candidate.name)
def test_inference_gives_the_same_out_and_an_lse_on_request(candidate: candidates.Candidate, target: Target) -> None:
    problem = make_problem((2, 4, 150, 64), BF16, mask=Causal())
    q, k, v = make_inputs(problem, "cuda")
    true_out, true_lse = exact(q, k, v, problem)
    out, lse = candidate.forward(q, k, v, problem)
    assert lse is None
    assert_close(out, true_out, budget(BF16, 150))
    if candidate is candidates.MATH:
        assert candidate.why_not(problem.with_(needs_lse=True), target)
        return
    lse = candidate.forward(q, k, v, problem.with_(needs_lse=True))[1]
    assert lse is not None
    assert_close(lse, true_lse, budget(BF16, 150), "lse")


@pytest.mark.parametrize("candidate", candidates.CANDIDATES, ids=lambda candidate: candidate.name)
def test_gradients_that_arrive_expanded_or_sliced(candidate: candidates.Candidate) -> None:
    """out.sum() sends back a tensor of strides 0; a slice of a wider result sends rows apart."""
    problem = make_problem((2, 4, 96, 64), BF16, needs_grad=True)
    q, k, v = make_inputs(problem, "cuda")
    out, lse = candidate.forward(q, k, v, problem)
    for dout in (torch.ones(1, 1, 1, 1, device="cuda", dtype=BF16), torch.randn(2, 4, 96, 72, device="cuda").to(BF16)):
        shaped = dout.expand(out.shape) if dout.numel() == 1 else dout[..., 4:68]
        grads = in_order(candidate.backward(shaped, None, q, k, v, out, lse, problem))
        for grad, true in zip(grads, exact(q, k, v, problem, None, shaped)[2:], strict=True):
            assert grad is not None
            assert_close(grad, true, budget(BF16, 96), candidate.name)


@pytest.mark.parametrize("candidate", candidates.CANDIDATES, ids=lambda candidate: candidate.name)
@pytest.mark.parametrize("mask", ["full", "causal", "causal bottom-right", "boolean"])
def test_dropout_keeps_the_mean_and_has_gradients(candidate: candidates.Candidate, mask: str, target: Target) -> None:
    plain = make_problem((2, 4, 256, 64), BF16, seq_q=200, dropout=0.5, needs_grad=True)
    problem = plain.with_(mask=RUN_MASKS[mask](plain))
    if candidate.why_not(problem, target):
        assert candidate is not candidates.MATH
        return
    q, k, v = make_inputs(problem, "cuda", grad=True)
    ones = torch.ones_like(v).requires_grad_()
    bias = make_bias(problem, "cuda")
    out = candidate.dropout_forward(q, k, ones, problem, mask_operands(bias))
    unseen = exact(q, k, v, problem.with_(dropout=0.0), bias)[1] == -math.inf
    assert not out[unseen].any()
    # Each row is a mean of many keys kept with probability 1/2 and doubled; over all rows little noise is left.
    assert abs(out[~unseen].double().mean().item() - 1) < 0.02
    assert out.float().std() > 0.01, "nothing was dropped"
    grads = torch.autograd.grad(out.float().sum(), (q, k, ones))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("seq", [64, 192, 640, 704, 1000])
@pytest.mark.parametrize("mask", ["full", "causal", "boolean"])
def test_nan_gradients_of_cudnn_are_known_hazards(mask: str, seq: int, target: Target) -> None:
    """Data that pytorch#196678 needs: every score near -120, so that every row's lse is below -88.7.

    When the assertion of the boolean mask fails, the bug is gone from this cuDNN and its row in the rules needs an end.
    """
    plain = make_problem((1, 1, seq, 64), BF16, needs_grad=True)
    problem = plain.with_(mask=Dense((seq, seq)) if mask == "boolean" else RUN_MASKS[mask](plain))
    q, k = (torch.randn(1, 1, seq, 64, device="cuda", dtype=BF16) * 0.1 for _ in range(2))
    v = torch.randn(1, 1, seq, 64, device="cuda", dtype=BF16)
    q[..., 0], k[..., 0] = 1.0, -120 * math.sqrt(64)
    bias = torch.ones(seq, seq, dtype=torch.bool, device="cuda").tril() if mask == "boolean" else None
    finite = {}
    for candidate in (candidates.CUDNN, candidates.EFFICIENT):
        if candidate.why_not(problem, target):
            continue
        out, lse = candidate.forward(q, k, v, problem, None, mask_operands(bias))
        grads = in_order(
            candidate.backward(torch.randn_like(out), None, q, k, v, out, lse, problem, None, mask_operands(bias))
        )
        finite[candidate.name] = all(grad is not None and bool(grad.isfinite().all()) for grad in grads)
    assert finite[gates.EFFICIENT]
    hazard = bugs.hazardous(gates.CUDNN, problem, target)
    assert finite.get(gates.CUDNN, True) or hazard, "cuDNN returned NaN that no row of the rules foresees"
    if mask == "boolean" and hazard:
        assert not finite[gates.CUDNN], "the bug is gone from this cuDNN"
