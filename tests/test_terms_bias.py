"""Biases in the kernels, with their gradients (terms/bias.py, kernels/common/terms/bias.cuh)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulation
from support import assert_close, budget
from term_cases import (
    BACKWARD,
    BF16,
    F32,
    FORWARD,
    H200,
    HALF,
    KERNELS,
    Case,
    Tensor,
    both_ways,
    case_of,
    check,
    emulated,
    forward,
    truth,
)
from tilewise import Causal, Full
from tilewise.engine import SM80, SM90, run
from tilewise.scores import Softcap, Term
from tilewise.terms import Bias

BIASES = ["dense", "strided", "heads", "keys", "float32", "dense", "batch"]


def bias_of(kind: str, problem: Any) -> Tensor:
    """As a kernel may find it in memory, with some -inf."""
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "dense": (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv),
        "strided": (problem.batch, problem.heads_q, problem.seq_kv, problem.seq_q),
        "heads": (1, problem.heads_q, problem.seq_q, problem.seq_kv),
        "keys": (problem.batch, 1, 1, problem.seq_kv),
        "float32": (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv),
        "batch": (problem.batch, 1, problem.seq_q, problem.seq_kv),
    }
    bias = torch.randn(shapes[kind], generator=generator)
    bias[torch.rand(shapes[kind], generator=generator) < 0.1] = -torch.inf
    bias = bias.to(F32 if kind == "float32" else problem.dtype)
    return bias.transpose(-1, -2) if kind == "strided" else bias


def bias_case(kind: str, dtype: Any, dim: int, mask: Any, before: tuple[Term, ...] = (), **fields: Any) -> Case:
    """Learned where gradients are needed; `heads` has an odd number of keys, so that two of them are no pair."""
    sizes = fields | ({"seq_kv": 149} if kind == "heads" else {})
    plain = case_of(dtype, dim, mask, (), lambda _: {}, **sizes).problem
    bias = bias_of(kind, plain)
    term = Bias.of(bias.detach().requires_grad_(plain.needs_grad), plain)
    return case_of(dtype, dim, mask, (*before, term), lambda _: {"bias": bias}, **sizes)


@emulated
@both_ways
@pytest.mark.parametrize(
    ("kind", "backend", "dtype", "dim", "mask"), [(k, *row) for k, row in zip(BIASES, KERNELS, strict=True)], ids=str
)
def test_bias(monkeypatch: Any, kind: str, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    check(monkeypatch, backend, bias_case(kind, dtype, dim, mask, needs_grad=back), back=back)


def staged_case(dtype: Any, dim: int, mask: Any, shape: tuple[int, ...], **fields: Any) -> Case:
    """Rows of the bias begin at multiples of 16 bytes, though no tile divides the lengths."""
    sizes = {"seq_q": 200, "seq_kv": 264} | fields
    generator = torch.Generator().manual_seed(3)
    bias = torch.randn((*shape, sizes["seq_q"], sizes["seq_kv"]), generator=generator)
    bias[torch.rand(bias.shape, generator=generator) < 0.1] = -torch.inf
    bias[..., 70, :] = -torch.inf
    bias = bias.to(dtype)
    plain = case_of(dtype, dim, mask, (), lambda _: {}, **sizes).problem
    term = Bias.of(bias.detach().requires_grad_(plain.needs_grad), plain)
    return case_of(dtype, dim, mask, (term,), lambda _: {"bias": bias}, **sizes)


STAGED = [
    (BF16, 64, Causal(), (1, 4)),
    (HALF, 128, Full(), (2, 1)),
    (BF16, 128, Causal("bottom-right"), (1, 1)),
    (HALF, 64, Full(), (2, 4)),
]


@emulated
@both_ways
@pytest.mark.parametrize(("dtype", "dim", "mask", "shape"), STAGED, ids=str)
def test_a_bias_whose_tiles_are_loaded_ahead(
    monkeypatch: Any, dtype: Any, dim: int, mask: Any, shape: tuple[int, ...], back: bool
) -> None:
    case = staged_case(dtype, dim, mask, shape, needs_grad=back)
    configs = SM90.backward_configs(case.problem, H200) if back else SM90.configs(case.problem, H200)
    assert configs[0].bias_stages if back else configs[0].bias_slots
    check(monkeypatch, SM90, case, back=back)


@emulated
def test_more_tiles_of_a_bias_than_there_are_slots(monkeypatch: Any) -> None:
    """Most of them need no new maximum, and give their slots back as the others do."""
    case = staged_case(BF16, 64, Full(), (1, 1), seq_q=96, seq_kv=680)
    config = SM90.configs(case.problem, H200)[0]
    assert 680 // config.block_kv > config.bias_slots / config.consumers + 2
    check(monkeypatch, SM90, case, back=False)


@emulated
@both_ways
@pytest.mark.parametrize("how", ["address", "strides"])
def test_a_bias_that_no_tensor_map_describes(monkeypatch: Any, how: str, back: bool) -> None:
    """Its strides say so, or its address, which every call has anew."""
    case = staged_case(BF16, 64, Full(), (1, 4), needs_grad=back)
    bias = case.operands["bias"]
    if how == "address":
        bias = torch.empty(bias.numel() + 2, dtype=BF16)[2:].view(bias.shape).copy_(bias)
    else:
        bias = bias[:, :, :1].expand(bias.shape)  # one row for all, of the size of all
    case.operands["bias"] = bias
    assert not run.is_mapped(bias)
    check(monkeypatch, SM90, case, back=back)


@emulated
@both_ways
def test_a_bias_of_padded_rows(monkeypatch: Any, back: bool) -> None:
    """Its rows begin at multiples of 16 bytes, though their length is odd; those of its gradient do not."""
    case = staged_case(BF16, 64, Causal(), (1, 4), seq_kv=151, needs_grad=back)
    padded = torch.full((1, 4, 200, 152), torch.nan, dtype=BF16)[..., :151]
    case.operands["bias"] = padded.copy_(case.operands["bias"])
    assert run.is_mapped(padded)
    check(monkeypatch, SM90, case, back=back)


LATE = {
    FORWARD: (
        "ptx::mbarrier_wait(&smem.bias_full[bias_position.stage], bias_position.phase);\n    if constexpr (adds_line)",
        ";\n    if constexpr (adds_line)",
    ),
    BACKWARD: ("      wait_bias();\n      Policy::apply", "      Policy::apply"),
}


@emulated
@both_ways
def test_a_tile_that_is_not_waited_for_is_noticed(monkeypatch: Any, back: bool) -> None:
    case = staged_case(BF16, 64, Full(), (1, 4), needs_grad=back)
    with pytest.raises(AssertionError):
        check(monkeypatch, SM90, case, back=back, spoil=LATE[back])


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, F32), (SM80, BF16)], ids=str)
def test_a_bias_behind_a_softcap(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    case = bias_case("batch", dtype, 64, Causal(), (Softcap(3.0),), needs_grad=True)
    check(monkeypatch, backend, case, back=True)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, F32)], ids=str)
def test_a_shared_bias_in_a_fixed_order(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    """Every score has a place of its own, and the sums are PyTorch's."""
    case = bias_case("heads", dtype, 64, Causal(), needs_grad=True, deterministic=True)
    check(monkeypatch, backend, case, back=True)
    term = case.problem.scores[-1]
    room = term.sums(term.tensors[0], case.problem)
    assert room.shape == room.full


@emulated
@pytest.mark.parametrize("backend", [SM90, SM80], ids=str)
def test_a_bias_of_the_least_number_hides(monkeypatch: Any, backend: Any) -> None:
    """As masks made of finfo.min mean it: rows that see nothing are zeros."""
    case = bias_case("dense", BF16, 64, Full())
    case.operands["bias"][:, :, 7] = torch.finfo(BF16).min
    emulation.install(monkeypatch)
    out, lse = forward(backend, case)
    want_out, want_lse, _, _ = truth(case)
    assert (out[:, :, 7] == 0).all()
    assert (lse[:, :, 7] == -torch.inf).all()
    assert_close(out, want_out, budget(BF16, 150))
    assert_close(lse, want_lse, budget(BF16, 150), "lse")
