"""What a mask hides may be nan or infinite: no row that does not see it, and no gradient of one, may tell."""

from __future__ import annotations

import math

import pytest
import torch

import tilewise
from support import assert_close, budget
from tilewise import Causal, Documents, InvalidInput, Window, op
from tilewise.integrations.flash_attn import flash_attn_varlen_func

OURS = ["tiled", "reference"]
EVERY = [*OURS, "torch-flash", "torch-math", "auto"]
VALUES = [math.nan, math.inf, -math.inf]
FLOAT32 = budget(torch.float32, 128)


def leaves(*shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def gradients(call, tensors, dout):
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = call(*tensors)
    return [out.detach(), *torch.autograd.grad(out, tensors, dout)]


def assert_untouched(got, want, index, what) -> None:
    """Equal where `index` selects; nan there fails."""
    assert_close(got[index], want[index], FLOAT32, what)


# ---------------------------------------------------------------------------------------------------------------------
# Packed sequences

STARTS = (0, 5, 12, 19, 30)  # two of 7 in the middle, which run as one batch
SPOILED = slice(5, 12)
OTHERS = [*range(5), *range(12, 30)]


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("which", ["q", "k", "v", "dout", "all"])
@pytest.mark.parametrize("inner", [None, Causal(), Window(2, 1)], ids=str)
@pytest.mark.parametrize("backend", EVERY)
def test_a_document_keeps_its_nan_to_itself(backend, inner, which, value):
    mask = Documents(STARTS) if inner is None else Documents(STARTS, inner=inner)
    q, k, v = leaves(1, 4, 30, 8)
    k, v = k[:, :2].clone(), v[:, :2].clone()
    dout = torch.randn_like(q)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask=mask, backend=backend)

    want = gradients(call, (q, k, v), dout)
    tensors = {"q": q.clone(), "k": k.clone(), "v": v.clone(), "dout": dout.clone()}
    for name in tensors if which == "all" else [which]:
        tensors[name][:, :, SPOILED] = value
    spoiled_dout = tensors.pop("dout")
    got = gradients(call, tensors.values(), spoiled_dout)
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_untouched(one, other, (slice(None), slice(None), OTHERS), name)
    if backend in OURS and which != "dout":  # PyTorch's CPU kernel swallows a nan of q or k
        assert not torch.isfinite(got[0][:, :, SPOILED]).all() or not math.isnan(value)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("which", ["q", "k", "v"])
def test_flash_attn_varlen_keeps_sequences_apart(which, dtype, causal, alibi):
    tensors = {name: torch.randn(30, 4, 8).to(dtype) for name in "qkv"}
    starts = torch.tensor(STARTS, dtype=torch.int32)
    slopes = torch.rand(4, 4) if alibi else None

    def call(q, k, v):
        return flash_attn_varlen_func(q, k, v, starts, starts, 11, 11, causal=causal, alibi_slopes=slopes)

    dout = torch.randn(30, 4, 8).to(dtype)
    want = gradients(call, tensors.values(), dout)
    tensors[which][SPOILED] = math.nan
    got = gradients(call, tensors.values(), dout)
    assert got[0][SPOILED].isnan().any() or which != "v"
    for name, one, other in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        assert_close(one[OTHERS], other[OTHERS], budget(dtype, 32), name)


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("create_graph", [False, True])
def test_documents_stay_apart_in_recorded_gradients(backend, create_graph):
    mask = Documents(STARTS, inner=Causal())
    q, k, v = leaves(1, 2, 30, 8, dtype=torch.float64)

    def first_and_second(q, k, v):
        tensors = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        out = tilewise.attention(*tensors, mask=mask, backend=backend)
        grads = torch.autograd.grad(out[:, :, OTHERS].pow(2).sum(), tensors, create_graph=create_graph)
        if not create_graph:
            return grads
        return [*grads, *torch.autograd.grad(sum(grad[:, :, OTHERS].pow(2).sum() for grad in grads), tensors)]

    want = first_and_second(q, k, v)
    for tensor in (q, k, v):
        tensor[:, :, SPOILED] = math.nan
    for one, other in zip(first_and_second(q, k, v), want, strict=True):
        assert_untouched(one, other, (slice(None), slice(None), OTHERS), "gradient")


def test_documents_stay_apart_under_transforms():
    mask = Documents(STARTS)
    tensors = leaves(2, 1, 2, 30, 8)

    def loss(q, k, v):
        return tilewise.attention(q, k, v, mask=mask)[:, :, OTHERS].pow(2).sum()

    gradient = torch.func.vmap(torch.func.grad(loss, (0, 1, 2)))
    want = gradient(*tensors)
    for tensor in tensors:
        tensor[:, :, :, SPOILED] = math.nan
    for one, other in zip(gradient(*tensors), want, strict=True):
        assert_close(one[:, :, :, OTHERS], other[:, :, :, OTHERS], FLOAT32, "gradient")


def test_documents_stay_apart_under_dropout():
    q, k, v = leaves(1, 2, 30, 8)
    v[:, :, SPOILED] = math.nan
    out = tilewise.attention(q, k, v, mask=Documents(STARTS), dropout=0.5)
    assert out[:, :, SPOILED].isnan().any()
    assert torch.isfinite(out[:, :, OTHERS]).all()


@pytest.mark.parametrize("backend", ["torch-flash", "torch-math", "tiled"])
def test_documents_of_all_lengths_match_the_reference(backend):
    """Empty ones, ones without keys, runs of equal lengths, over several batches and grouped heads."""
    starts_q, starts_k = (0, 0, 3, 6, 6, 10, 14, 18, 20), (0, 2, 5, 8, 9, 9, 13, 17, 18)
    mask = Documents(starts_q, starts_k, Causal("bottom-right"))
    q = torch.randn(2, 4, 20, 8)
    k, v = torch.randn(2, 2, 18, 8), torch.randn(2, 2, 18, 8)
    dout = torch.randn(2, 4, 20, 8)
    results = {}
    for name in (backend, "reference"):
        results[name] = gradients(
            lambda q, k, v, name=name: tilewise.attention(q, k, v, mask=mask, backend=name), (q, k, v), dout
        )
    for one, other in zip(results[backend], results["reference"], strict=True):
        assert_close(one, other, FLOAT32)


# ---------------------------------------------------------------------------------------------------------------------
# Any mask, in what is written in torch operations

N = 24
BAD = 15


def masks() -> dict[str, object]:
    hides = torch.ones(N, N, dtype=torch.bool).tril()
    padded = torch.ones(N, N, dtype=torch.bool)
    padded[:, BAD:] = False
    additive = torch.randn(N, N).masked_fill(~hides, -torch.inf)
    return {"causal": "causal", "window": Window(4, 2), "boolean": hides, "padding": padded, "additive": additive}


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("name", masks())
@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_hidden_values_do_not_leak(backend, name, value, softcap, monkeypatch):
    torch.manual_seed(0)
    mask = masks()[name]
    visible = mask if isinstance(mask, torch.Tensor) else tilewise.masks.parse(str(mask)).to_bool(
        range(N), range(N), N, N
    )  # fmt: skip
    visible = visible if visible.dtype == torch.bool else visible != -torch.inf
    blind = ~visible[:, BAD]  # rows that do not see the bad key
    q, k, v = leaves(1, 4, N, 8)
    k, v = k[:, :2].clone(), v[:, :2].clone()
    dout = torch.zeros_like(q)
    dout[:, :, blind] = torch.randn(1, 4, int(blind.sum()), 8)

    def call(q, k, v):
        return tilewise.attention(q, k, v, mask=mask, softcap=softcap, backend=backend)

    want = gradients(call, (q, k, v), dout)
    k[:, :, BAD], v[:, :, BAD] = value, value
    q[:, :, ~blind] = value  # and so are the rows that do
    got = gradients(call, (q, k, v), dout)
    assert_untouched(got[0], want[0], (slice(None), slice(None), blind), "out")
    assert_untouched(got[1], want[1], (slice(None), slice(None), blind), "dq")
    unseen = ~visible[~blind].any(0)  # keys that no bad row sees
    for one, other in zip(got[2:], want[2:], strict=True):
        assert_untouched(one, other, (slice(None), slice(None), unseen), "dk, dv")
    if not blind.all() and math.isnan(value):
        assert got[0][:, :, ~blind].isnan().all()


@pytest.mark.parametrize("backend", OURS)
def test_hidden_values_do_not_leak_across_tiles(backend):
    """Longer than a block of any config: full, partial and skipped tiles."""
    q, k, v = leaves(1, 1, 700, 4)
    want = tilewise.attention(q, k, v, mask="causal", backend=backend)
    v[:, :, 650], k[:, :, 650] = math.nan, math.inf
    got = tilewise.attention(q, k, v, mask="causal", backend=backend)
    assert torch.equal(got[:, :, :650], want[:, :, :650])
    assert got[:, :, 650:].isnan().all()


# ---------------------------------------------------------------------------------------------------------------------
# Numbers that float32 cannot hold


@pytest.mark.parametrize("backend", ["auto", *OURS])
@pytest.mark.parametrize("softcap", [1e39, 3.5e38, 1e38, 1e-46, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_softcaps_out_of_range_are_refused(backend, softcap, dtype):
    tensors = [tensor.to(dtype) for tensor in leaves(1, 2, 5, 4)]
    with pytest.raises(InvalidInput, match="softcap"):
        tilewise.attention(*tensors, softcap=softcap, backend=backend)


@pytest.mark.parametrize("backend", OURS)
@pytest.mark.parametrize("softcap", [1e39, 1e30, 1e-30])
def test_softcaps_in_range_are_right(backend, softcap):
    tensors = leaves(1, 2, 5, 4, dtype=torch.float64)
    q, k, v = tensors
    scores = softcap * torch.tanh(q @ k.transpose(-1, -2) / 2 / softcap)
    assert_close(tilewise.attention(q, k, v, softcap=softcap, backend=backend), scores.softmax(-1) @ v, FLOAT32)
    if softcap < 1e39:
        narrow = [tensor.float() for tensor in tensors]
        assert_close(tilewise.attention(*narrow, softcap=softcap, backend=backend), scores.softmax(-1) @ v, FLOAT32)


@pytest.mark.parametrize("scale", [1e39, -1e39])
def test_scales_that_float32_cannot_hold_are_refused(scale):
    with pytest.raises(InvalidInput, match="scale"):
        tilewise.attention(*leaves(1, 2, 5, 4), scale=scale)
    assert tilewise.attention(*leaves(1, 2, 5, 4, dtype=torch.float64), scale=scale).shape == (1, 2, 5, 4)


# ---------------------------------------------------------------------------------------------------------------------
# Tensors without memory


@pytest.mark.parametrize("backend", EVERY)
@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_efficient_zero_tensors_are_zeros(backend, which, layout):
    """PyTorch's zero tensors have no memory: a kernel that reads it would read anything."""
    tensors = leaves(1, 4, 4, 8)
    real, lazy = list(tensors), list(tensors)
    real[which], lazy[which] = torch.zeros(1, 4, 4, 8), torch._efficientzerotensor((1, 4, 4, 8))
    want = tilewise.attention(*real, backend=backend, layout=layout)
    for _ in range(2):  # the second call is a remembered one
        assert torch.equal(tilewise.attention(*lazy, backend=backend, layout=layout), want)
    grads = []
    for inputs in (real, lazy):
        inputs[which - 1] = leaf = inputs[which - 1].clone().requires_grad_()
        grads += torch.autograd.grad(tilewise.attention(*inputs, backend=backend, layout=layout).sum(), leaf)
    assert_close(grads[1], grads[0], FLOAT32, "gradient")


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_the_override_gives_zero_tensors_memory(backend):
    q, k, _ = leaves(1, 4, 4, 8)
    with tilewise.sdpa(backend=backend):
        for _ in range(2):
            out = torch.nn.functional.scaled_dot_product_attention(q, k, torch._efficientzerotensor((1, 4, 4, 8)))
            assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize("backend", EVERY)
def test_a_gradient_without_memory_is_zero(backend):
    tensors = [tensor.requires_grad_() for tensor in leaves(1, 2, 5, 4)]
    out = tilewise.attention(*tensors, backend=backend, mask="causal")
    grads = torch.autograd.grad(out, tensors, torch._efficientzerotensor((1, 2, 5, 4)))
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def negated(tensor):
    """The tensor as PyTorch negates lazily: its memory holds the opposite."""
    return torch._neg_view(-tensor)


@pytest.mark.parametrize("backend", EVERY)
def test_tensors_whose_memory_holds_the_opposite(backend, monkeypatch):
    seen = []
    real_memory = op.with_memory
    monkeypatch.setattr(op, "with_memory", lambda tensor: seen.append(tensor.is_neg()) or real_memory(tensor))
    tensors = leaves(1, 2, 5, 4)
    want = tilewise.attention(*tensors, backend=backend)
    for _ in range(2):  # the second call is a remembered one
        seen.clear()
        assert_close(tilewise.attention(*map(negated, tensors), backend=backend), want, FLOAT32)
        assert seen[:3] == [True] * 3
    assert not any(op.with_memory(negated(tensor)).is_neg() for tensor in tensors)
    grads = []
    for dout in (torch.ones(1, 2, 5, 4), negated(torch.ones(1, 2, 5, 4))):
        inputs = [tensor.detach().clone().requires_grad_() for tensor in tensors]
        grads.append(torch.autograd.grad(tilewise.attention(*inputs, backend=backend), inputs, dout))
    for got, expected in zip(grads[1], grads[0], strict=True):
        assert_close(got, expected, FLOAT32)


def test_gradients_of_lse_whose_memory_holds_the_opposite(monkeypatch):
    """A kernel reads the memory of both gradients that it is given."""
    seen = []
    backward = op.Call.backward
    monkeypatch.setattr(op.Call, "backward", lambda *given: seen.append(given[1:3]) or backward(*given))
    tensors = [tensor.requires_grad_() for tensor in leaves(1, 2, 5, 4)]
    results = tilewise.attention(*tensors, return_lse=True, backend="tiled")
    grads = [torch.ones_like(result) for result in results]
    want = torch.autograd.grad(results, tensors, grads, retain_graph=True)
    got = torch.autograd.grad(results, tensors, [negated(grad) for grad in grads])
    assert not any(grad.is_neg() for given in seen for grad in given)
    for one, other in zip(got, want, strict=True):
        assert_close(one, other, FLOAT32)


def test_masks_without_memory_add_nothing():
    q, k, v = leaves(1, 2, 5, 4)
    nothing = torch._efficientzerotensor((5, 5))
    for backend in EVERY:
        want = tilewise.attention(q, k, v, mask=torch.zeros(5, 5), backend=backend)
        assert_close(tilewise.attention(q, k, v, mask=nothing, backend=backend), want, FLOAT32)
