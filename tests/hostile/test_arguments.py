"""Arguments of wrong types and values, and what F.scaled_dot_product_attention takes: so does its namesake."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import tilewise
from support import assert_close, budget, make_problem
from tilewise import Causal, InvalidInput, Target, TilewiseError
from tilewise.integrations import flash_attn

sdpa = tilewise.scaled_dot_product_attention
R = torch.randn


def tensors():
    return [R(1, 2, 5, 4) for _ in range(3)]


NO_TENSORS = [None, 1, "q", [[1.0]], np.ones((1, 2, 5, 4), np.float32)]


@pytest.mark.parametrize("wrong", NO_TENSORS, ids=lambda wrong: type(wrong).__name__)
@pytest.mark.parametrize("position", [0, 1, 2])
def test_what_is_no_tensor_is_named(position, wrong):
    given = tensors()
    given[position] = wrong
    for call in (
        tilewise.attention,
        lambda *given: tilewise.attention(*given, layout="bshd"),
        lambda *given: tilewise.attention(*given, dropout=0.5),
        sdpa,
        flash_attn.flash_attn_func,
    ):
        with pytest.raises(InvalidInput, match=type(wrong).__name__):
            call(*given)


@pytest.mark.parametrize("wrong", ["causal", [1], np.ones((5, 5), bool), Causal(), True, 1.0], ids=str)
def test_a_mask_of_a_wrong_type_is_named(wrong):
    with pytest.raises(InvalidInput, match="attn_mask") as caught:
        sdpa(*tensors(), attn_mask=wrong)
    assert "is_causal=True" in caught.value.remedy
    if isinstance(wrong, str | Causal):
        return
    with pytest.raises(InvalidInput, match="mask") as caught:
        tilewise.attention(*tensors(), mask=wrong)
    assert "\n" not in str(caught.value.got)


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("is_causal", 'mask="causal"'), ("attn_mask", "mask"), ("dropout_p", "dropout"), ("enable_gqa", "leave it out")],
)
def test_pytorchs_names_are_translated(name, remedy):
    for call in (tilewise.attention, tilewise.explain):
        with pytest.raises(TypeError, match=name) as caught:
            call(*tensors(), **{name: True})
        assert isinstance(caught.value, TilewiseError)
        assert remedy in str(caught.value)


def nested():
    return torch.nested.nested_tensor([R(2, 3), R(3, 3)], layout=torch.jagged)


def packed(**given):
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    q, k, v = (R(5, 2, 4) for _ in range(3))
    given = {"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets} | given
    return tilewise.attention_packed(**given)


WRONG_BESIDE = {
    "a nested sink": (lambda: tilewise.attention(*tensors(), sink=nested()), "sink: got a nested"),
    "nested keep": (lambda: tilewise.attention(*tensors(), keep=nested()), "keep: got a nested"),
    "a nested mask": (lambda: tilewise.attention(*tensors(), mask=nested()), "mask: got a nested"),
    "nested packed keys": (lambda: packed(k=nested()), "k: got a nested"),
    "nested offsets": (lambda: packed(cu_seqlens_k=nested()), "cu_seqlens_k: got a nested"),
    "a list of used keys": (lambda: packed(seqused_k=[1, 2]), r"operands\['seqused_k'\]: got list"),
    "operands by number": (lambda: tilewise.attention(*tensors(), operands={1: R(2)}), "operands: got dict"),
}


@pytest.mark.parametrize("what", WRONG_BESIDE)
def test_what_is_wrong_beside_q_k_and_v_is_named(what):
    call, message = WRONG_BESIDE[what]
    with pytest.raises(InvalidInput, match=f"^{message}"):
        call()


def test_an_unknown_name_is_refused():
    with pytest.raises(tilewise.UnknownArgument, match="colour"):
        tilewise.attention(*tensors(), colour="red")


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": "a"}, {"scale": torch.tensor(0.5)}, {"softcap": None}, {"softcap": "a"}, {"layout": 1},
        {"layout": []}, {"backend": 1}, {"backend": []}, {"backend": None}, {"precision": 1}, {"dropout": "a"},
        {"dropout": 1.0}, {"dropout": -0.5},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("grad", [False, True])
def test_wrong_values_are_refused(arguments, grad):
    given = [tensor.requires_grad_(grad) for tensor in tensors()]
    with pytest.raises(InvalidInput, match=next(iter(arguments))):
        tilewise.attention(*given, **arguments)


def test_tensors_that_are_not_strided_are_refused():
    q, k, v = tensors()
    with pytest.raises(InvalidInput, match="strided"):
        tilewise.attention(q.to_sparse(), k, v)


def test_flash_attn_names_wrong_offsets():
    q, k, v = (R(5, 2, 4) for _ in range(3))
    with pytest.raises(InvalidInput, match="cu_seqlens_q"):
        flash_attn.flash_attn_varlen_func(q, k, v, None, torch.tensor([0, 5]), 5, 5)
    with pytest.raises(InvalidInput, match="qkv"):
        flash_attn.flash_attn_qkvpacked_func(None)


def test_the_warning_of_a_fallback_is_public():
    assert issubclass(tilewise.FallbackWarning, UserWarning)
    q = R(1, 2, 3, 4)
    with tilewise.sdpa(on_fallback="warn", backend="torch-flash"), pytest.warns(tilewise.FallbackWarning):
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)


@pytest.mark.parametrize("seq", [64, 16384])
def test_float64_on_a_gpu_says_that_it_runs_in_plain_operations(seq):
    """In whatever takes it: the reference where that fits, the tiled loop elsewhere."""
    plan = tilewise.plan.plan(make_problem((1, 16, seq, 64), torch.float64), Target.named("h200"))
    assert plan.backend == ("reference" if seq == 64 else "tiled")
    assert any("float64 runs in plain operations" in notice for notice in plan.chosen.notices)


@pytest.mark.parametrize("backend", ["tiled", "reference", "torch-flash", "auto"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_of_lse(backend, dtype):
    given = [tensor.to(dtype) for tensor in tensors()]
    lse = tilewise.attention(*given, return_lse=True, backend=backend)[1]
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (operator,) = torch.ops.tilewise.attention(*given, [], "full", None, "", "bhsd", backend, True)[1:]
    assert operator.dtype == lse.dtype


# ---------------------------------------------------------------------------------------------------------------------
# The namesake

CASES = {
    "one query head": ((R(2, 1, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {}),
    "one key and value head": ((R(2, 3, 5, 4), R(2, 1, 6, 4), R(2, 1, 6, 4)), {}),
    "one key head": ((R(2, 3, 5, 4), R(2, 1, 6, 4), R(2, 3, 6, 4)), {}),
    "one value head": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 1, 6, 4)), {}),
    "key and value heads that differ": ((R(2, 6, 5, 4), R(2, 3, 6, 4), R(2, 2, 6, 4)), {"enable_gqa": True}),
    "as many key as query heads": ((R(2, 6, 5, 4), R(2, 6, 6, 4), R(2, 2, 6, 4)), {"enable_gqa": True}),
    "grouped heads": ((R(2, 6, 5, 4), R(2, 2, 6, 4), R(2, 2, 6, 4)), {"enable_gqa": True}),
    "heads that do not go together": ((R(2, 6, 5, 4), R(2, 4, 6, 4), R(2, 4, 6, 4)), {"enable_gqa": True}),
    "grouped heads without saying so": ((R(2, 6, 5, 4), R(2, 2, 6, 4), R(2, 2, 6, 4)), {}),
    "one batch": ((R(2, 3, 5, 4), R(1, 3, 6, 4), R(1, 3, 6, 4)), {}),
    "dropout 1": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"dropout_p": 1.0}),
    "dropout 2": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"dropout_p": 2.0}),
    "dropout as a tensor": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"dropout_p": torch.tensor(0.0)}),
    "scale as a tensor": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": torch.tensor(0.3)}),
    "scale of NumPy": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": np.float32(0.3)}),
    "scale as an integer": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": 2}),
    "scale True": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": True}),
    "scale 0": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": 0.0}),
    "scale nan": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": float("nan")}),
    "scale inf": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"scale": float("inf")}),
    "is_causal 1": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"is_causal": 1}),
    "integers": ((R(2, 3, 5, 4).long(), R(2, 3, 6, 4).long(), R(2, 3, 6, 4).long()), {}),
    "two dimensions": ((R(5, 4), R(6, 4), R(6, 4)), {}),
    "one dimension": ((R(5), R(5), R(5)), {}),
    "five dimensions": ((R(2, 2, 2, 5, 4), R(2, 2, 2, 6, 4), R(2, 2, 2, 6, 4)), {}),
    "dimensions that differ": ((R(2, 3, 5, 4), R(6, 4), R(6, 4)), {}),
    "another head_dim": ((R(2, 3, 5, 4), R(2, 3, 6, 3), R(2, 3, 6, 4)), {}),
    "another head_dim of values": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 9)), {}),
    "a dtype that differs": ((R(2, 3, 5, 4), R(2, 3, 6, 4).double(), R(2, 3, 6, 4)), {}),
    "an integer mask": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"attn_mask": torch.ones(5, 6).long()}),
    "a mask that does not fit": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"attn_mask": torch.ones(4, 6)}),
    "a mask of 5 dimensions": ((R(2, 3, 5, 4), R(2, 3, 6, 4), R(2, 3, 6, 4)), {"attn_mask": R(1, 1, 1, 5, 6)}),
}


@pytest.mark.parametrize(("given", "arguments"), CASES.values(), ids=CASES.keys())
def test_the_namesake_takes_what_pytorch_takes(given, arguments):
    try:
        want = F.scaled_dot_product_attention(*given, **arguments)
    except (RuntimeError, TypeError, NotImplementedError, IndexError) as refusal:
        with pytest.raises((TilewiseError, type(refusal))):
            sdpa(*given, **arguments)
        return
    got = sdpa(*given, **arguments)
    assert (got.shape, got.dtype) == (want.shape, want.dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert_close(got.nan_to_num(), want.nan_to_num(), budget(torch.float32, 16))
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    for one, other in zip(
        torch.autograd.grad(sdpa(*leaves, **arguments).sum(), leaves),
        torch.autograd.grad(F.scaled_dot_product_attention(*leaves, **arguments).sum(), leaves),
        strict=True,
    ):
        assert_close(one.nan_to_num(), other.nan_to_num(), budget(torch.float32, 16), "gradient")
