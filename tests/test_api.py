"""What users call: semantics of attention, of PyTorch's signature, and every way to call them wrongly."""

from __future__ import annotations

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

import tilewise
from support import assert_close, budget, exact, make_inputs, make_problem
from tilewise import Causal, Dense, Documents, InvalidInput, Problem, Target, UnsupportedProblem, Window
from tilewise.scores import Softcap


def tensors(*shapes, dtype=torch.float32):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def test_attention_defaults_match_pytorch():
    q, k, v = tensors(*[(2, 4, 16, 8)] * 3)
    assert_close(tilewise.attention(q, k, v), F.scaled_dot_product_attention(q, k, v), budget(torch.float32, 16))


def test_layouts_agree_without_copies():
    q, k, v = tensors((2, 6, 9, 8), (2, 2, 12, 8), (2, 2, 12, 4))
    bhsd, lse = tilewise.attention(q, k, v, mask=Causal("bottom-right"), return_lse=True)
    swapped = [t.transpose(1, 2) for t in (q, k, v)]
    bshd, lse_too = tilewise.attention(*swapped, mask=Causal("bottom-right"), return_lse=True, layout="bshd")
    assert bshd.shape == (2, 9, 6, 4)
    assert bshd.is_contiguous()
    assert_close(bshd.transpose(1, 2), bhsd, budget(torch.float32, 12))
    assert_close(lse_too, lse, budget(torch.float32, 12))


def test_every_argument_at_once():
    problem = make_problem(
        (2, 6, 17, 8), heads_kv=2, seq_kv=23, head_dim_v=5, mask=Window(6, 2, "bottom-right"), scale=0.3, softcap=4.0
    )
    q, k, v = make_inputs(problem)
    out, lse = tilewise.attention(q, k, v, mask=problem.mask, scale=0.3, softcap=4.0, return_lse=True)
    want_out, want_lse = exact(q, k, v, problem)
    assert_close(out, want_out, budget(torch.float32, 23))
    assert_close(lse, want_lse, budget(torch.float32, 23), "lse")


@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("shape", [(16,), (9, 16), (4, 9, 16), (2, 1, 9, 16), (1, 4, 1, 16)])
def test_mask_tensors_broadcast(shape, additive):
    q, k, v = tensors((2, 4, 9, 8), (2, 4, 16, 8), (2, 4, 16, 8))
    mask = torch.randn(shape) if additive else torch.rand(shape) < 0.7
    problem = make_problem((2, 4, 9, 8), seq_kv=16, mask=Dense(shape, additive))
    want, _ = exact(q, k, v, problem, mask)
    for backend in ("auto", "tiled", "reference"):
        assert_close(tilewise.attention(q, k, v, mask=mask, backend=backend), want, budget(torch.float32, 16))


@pytest.mark.parametrize(
    "shapes",
    [
        [(0, 2, 4, 8)] * 3,
        [(1, 0, 4, 8)] * 3,
        [(1, 2, 0, 8), (1, 2, 4, 8), (1, 2, 4, 8)],
        [(1, 2, 4, 8), (1, 2, 0, 8), (1, 2, 0, 8)],
        [(1, 2, 0, 8)] * 3,
    ],
)
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_empty_sizes_give_well_formed_results(shapes, backend):
    q, k, v = (t.requires_grad_() for t in tensors(*shapes))
    out, lse = tilewise.attention(q, k, v, return_lse=True, backend=backend)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:3]
    assert torch.equal(out, torch.zeros_like(out))
    assert (lse == -math.inf).all()
    out.sum().backward()
    assert all(torch.equal(t.grad, torch.zeros_like(t)) for t in (q, k, v))


def test_dropout_runs_and_is_unbiased():
    q, k = torch.zeros(1, 1, 64, 8), torch.zeros(1, 1, 64, 8)
    v = torch.ones(1, 1, 64, 8)
    out = tilewise.attention(q, k, v, dropout=0.5)
    assert not torch.equal(out, v)
    assert abs(out.mean().item() - 1.0) < 6 / 64  # six standard deviations of 64 x 64 weights, each 0 or 2
    with pytest.raises(UnsupportedProblem, match="softcap"):
        tilewise.attention(q, k, v, dropout=0.5, softcap=3.0, backend="torch-math")


def test_double_precision_is_kept():
    q, k, v = tensors(*[(1, 2, 8, 4)] * 3, dtype=torch.float64)
    out, lse = tilewise.attention(q, k, v, return_lse=True)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)


Q = (1, 4, 8, 16)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda q, k, v: tilewise.attention(q[0], k, v), "q"),
        (lambda q, k, v: tilewise.attention(q, k[0], v), "k"),
        (lambda q, k, v: tilewise.attention([1.0], k, v), "q"),
        (lambda q, k, v: tilewise.attention(q[0], k, v, layout="bshd"), "q"),
        (lambda q, k, v: tilewise.attention(q.int(), k, v), "q.dtype"),
        (lambda q, k, v: tilewise.attention(q.half(), k, v), "dtype"),
        (lambda q, k, v: tilewise.attention(q.to("meta"), k, v), "device"),
        (lambda q, k, v: tilewise.attention(q[:, :3], k[:, :2], v[:, :2]), "heads"),
        (lambda q, k, v: tilewise.attention(q, k[..., :8], v), "k"),
        (lambda q, k, v: tilewise.attention(q, k, v[:, :, :3]), "v"),
        (lambda q, k, v: tilewise.attention(q.expand(2, -1, -1, -1), k, v), "batch"),
        (lambda q, k, v: tilewise.attention(q[..., :0], k[..., :0], v), "head_dim"),
        (lambda q, k, v: tilewise.attention(q, k, v, scale=math.nan), "scale"),
        (lambda q, k, v: tilewise.attention(q, k, v, scale=0.0), "scale"),
        (lambda q, k, v: tilewise.attention(q, k, v, scale="big"), "scale"),
        (lambda q, k, v: tilewise.attention(q, k, v, softcap=-3.0), "softcap"),
        (lambda q, k, v: tilewise.attention(q, k, v, dropout=1.5), "dropout"),
        (lambda q, k, v: tilewise.attention(q, k, v, layout="sbhd"), "layout"),
        (lambda q, k, v: tilewise.attention(q, k, v, backend="nope"), "backend"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask="diagonal"), "mask"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=3), "mask"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=Dense((8, 8))), "mask"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=Documents((0, 5))), "Documents.cu_seqlens_q"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=torch.ones(7, 8, dtype=torch.bool)), "mask"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=torch.ones(3, 1, 8, 8, dtype=torch.bool)), "mask"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=torch.ones(8, 8, dtype=torch.int32)), "mask.dtype"),
        (lambda q, k, v: tilewise.attention(q, k, v, mask=torch.ones(8, 8, device="meta")), "mask.device"),
        (lambda q, k, v: tilewise.attention(q, k, v, scores=3), "scores"),
        (lambda q, k, v: tilewise.attention(q, k, v, scores=[Softcap(3.0)]), "scores"),
        (lambda q, k, v: tilewise.attention(q, k, v, operands=q), "operands"),
        (lambda q, k, v: tilewise.attention(q, k, v, operands={"slopes": q}), "operands"),
        (lambda q, k, v: tilewise.explain(q, k, v, operands={"slopes": q}), "operands"),
        (lambda q, k, v: tilewise.attention(3, k, v, layout="bshd"), "q"),
        (lambda q, k, v: tilewise.explain(q), "explain"),
        (lambda q, k, v: tilewise.explain(q, k, v, target="h2000"), "target"),
        (lambda q, k, v: tilewise.scaled_dot_product_attention(q, k[:, :2], v[:, :2]), "enable_gqa"),
        (
            lambda q, k, v: tilewise.scaled_dot_product_attention(q, k, v, torch.ones(8, 8) > 0, is_causal=True),
            "attn_mask",
        ),
    ],
)
def test_bad_calls_name_the_argument_and_the_remedy(call, argument):
    with pytest.raises(InvalidInput, match="What to do") as caught:
        call(*tensors(Q, Q, Q))
    assert caught.value.argument == argument
    assert str(caught.value.got) in str(caught.value)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("shape", [(8, 8), (4, 8, 8), (1, 4, 1, 8), (1, 1, 8, 1)])
@pytest.mark.parametrize("backend", ["auto", "tiled", "reference", "torch-math"])
def test_a_mask_that_starts_to_need_a_gradient_has_one(backend, shape, grad):
    """Also when a plan for such tensors is remembered, and when q needs a gradient itself."""
    q, k, v = (t.double().requires_grad_(grad) for t in tensors(Q, Q, Q))
    mask = torch.randn(shape, dtype=torch.float64)
    tilewise.attention(q, k, v, mask=mask, backend=backend)
    mask.requires_grad_()
    weights = torch.softmax(q @ k.transpose(-1, -2) / 4 + mask, -1)
    dout = torch.randn_like(q)
    wanted = [tensor for tensor in (q, k, v, mask) if tensor.requires_grad]
    truth = torch.autograd.grad(weights @ v, wanted, dout)
    for call in (
        lambda: tilewise.attention(q, k, v, mask=mask, backend=backend),
        lambda: torch.ops.tilewise.attention(q, k, v, [mask], "", None, "", "bhsd", backend, False)[0],
    ):
        for got, want in zip(torch.autograd.grad(call(), wanted, dout), truth, strict=True):
            assert_close(got, want, 4 * budget(torch.float64, 64), "gradient")
    with torch.no_grad():
        assert not tilewise.attention(q, k, v, mask=mask, backend=backend).requires_grad


def test_a_backend_that_has_no_gradient_for_a_mask_refuses_it_by_name():
    q, k, v = tensors(Q, Q, Q)
    mask = torch.zeros(8, 8, requires_grad=True)
    with pytest.raises(UnsupportedProblem, match="bias requires grad"):
        tilewise.attention(q, k, v, mask=mask, backend="torch-flash")
    told = tilewise.explain(q, k, v, mask=mask)
    assert "+grad(bias)" in str(told.problem)
    assert Problem.from_dict(told.problem.to_dict()) == told.problem
    for target, ours in (("h200", "sm90"), ("a100", "sm80")):
        verdicts = tilewise.explain(told.problem, target=target).verdicts
        refusing = {v.backend for v in verdicts if any("bias requires grad" in why.what for why in v.reasons)}
        assert {"triton", "torch-flash", "torch-efficient", "torch-cudnn"} <= refusing
        assert ours not in refusing


def test_a_named_backend_never_falls_back():
    q, k, v = tensors(Q, Q, Q)
    with pytest.raises(UnsupportedProblem, match=r"torch-flash.*\n.*softcap") as caught:
        tilewise.attention(q, k, v, softcap=2.0, backend="torch-flash")
    assert caught.value.problem.softcap == 2.0
    assert all(reason.remedy for verdict in caught.value.verdicts for reason in verdict.reasons)


class TestTorchSignature:
    """tilewise.scaled_dot_product_attention against PyTorch's own function, argument by argument."""

    def both(self, *args, **kwargs):
        got = tilewise.scaled_dot_product_attention(*args, **kwargs)
        want = F.scaled_dot_product_attention(*args, **kwargs)
        assert_close(got, want, budget(torch.float32, args[1].shape[-2]))
        return got

    def test_masks(self):
        q, k, v = tensors((2, 4, 9, 8), (2, 4, 12, 8), (2, 4, 12, 8))
        self.both(q, k, v)
        self.both(q, k, v, is_causal=True)
        self.both(q, k, v, torch.rand(9, 12) < 0.8)
        self.both(q, k, v, torch.randn(2, 1, 9, 12), scale=0.2)
        self.both(q, k, v, torch.randn(2, 4, 9, 12), 0.0, False)

    def test_grouped_queries(self):
        q, k, v = tensors((2, 4, 9, 8), (2, 2, 12, 8), (2, 2, 12, 8))
        self.both(q, k, v, enable_gqa=True)

    def test_three_dimensions(self):
        q, k, v = tensors((3, 9, 8), (3, 12, 8), (3, 12, 8))
        self.both(q, k, v, is_causal=True)
        self.both(q, k, v, torch.rand(3, 9, 12) < 0.8)
        self.both(q, k, v, torch.rand(9, 12) < 0.8)

    def test_lower_right_bias(self):
        q, k, v = tensors((2, 4, 9, 8), (2, 4, 12, 8), (2, 4, 12, 8))
        got = tilewise.scaled_dot_product_attention(q, k, v, causal_lower_right(9, 12))
        assert_close(got, tilewise.attention(q, k, v, mask=Causal("bottom-right")), budget(torch.float32, 12))

    @pytest.mark.parametrize(
        ("call", "why"),
        [
            (lambda q, k, v: (q[:, None], k[:, None], v[:, None]), "5"),
            (lambda q, k, v: (q, k[:1], v[:1]), "batch dimension"),
            (lambda q, k, v: (q, k[:, :1], v[:, :1]), "heads dimension"),
            (lambda q, k, v: (q, k, v, torch.zeros(9, 12, requires_grad=True)), "requires grad"),
        ],
    )
    def test_what_only_pytorch_defines_is_handed_over_aloud(self, call, why, caplog):
        q, k, v = tensors((2, 4, 9, 8), (2, 4, 12, 8), (2, 4, 12, 8))
        with caplog.at_level(logging.INFO, "tilewise"):
            self.both(*call(q, k, v))
        assert why in caplog.text
        assert "handed to PyTorch" in caplog.text

    def test_autocast_casts_as_pytorch_does(self):
        q, k, v = tensors(*[(1, 2, 8, 16)] * 3)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = tilewise.scaled_dot_product_attention(q, k, v)
            assert got.dtype == F.scaled_dot_product_attention(q, k, v).dtype == torch.bfloat16
            assert tilewise.attention(q, k, v).dtype == torch.float32
            for mask in (torch.randn(8, 8), torch.rand(8, 8) < 0.7):
                want = F.scaled_dot_product_attention(q, k, v, mask)
                assert_close(tilewise.scaled_dot_product_attention(q, k, v, mask), want, budget(torch.bfloat16))


class TestExplain:
    def test_needs_no_gpu_for_a_named_target(self):
        problem = Problem(1, 32, 8, 4096, 4096, 128, 128, torch.bfloat16, mask=Causal())
        text = str(tilewise.explain(problem, target="h200"))
        assert "h200 (sm_90, 132 SMs)" in text
        assert "<- runs" in text
        for backend in tilewise.plan.BACKENDS:
            assert backend in text

    def test_agrees_with_what_runs(self):
        q, k, v = tensors(Q, Q, Q)
        plan = tilewise.explain(q, k, v, mask="causal", return_lse=True)
        assert plan.target == Target.of("cpu")
        assert plan.problem.needs_lse
        out, _ = tilewise.attention(q, k, v, mask="causal", return_lse=True)
        named, _ = tilewise.attention(q, k, v, mask="causal", return_lse=True, backend=plan.backend)
        assert torch.equal(out, named)

    def test_grad_state_is_part_of_the_problem(self):
        q, k, v = tensors(Q, Q, Q)
        assert not tilewise.explain(q, k, v).problem.needs_grad
        assert tilewise.explain(q.requires_grad_(), k, v).problem.needs_grad


def test_lazy_clones_stay_lazy_while_calls_warm_up():
    clones = [torch._lazy_clone(torch.randn(1, 2, 8, 16)) for _ in range(3)]
    tilewise.warm_up(*clones, mask="causal")
    assert all(map(torch._C._is_cow_tensor, clones))
