"""What a kernel leaves unwritten is found: fresh memory is nan (tilewise/fresh.py), and every form's check sees it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_decode import as_cached, posed

import emulation
from cache_cases import Case, assert_as_expected, make
from support import assert_close, budget, check_against_the_reference, make_inputs, make_problem
from test_packed import check_forward, check_gradients, make_case
from tilewise import Causal, Target, fresh
from tilewise.engine import SM80, SM90

A100, H200 = (Target.named(name) for name in ("a100", "h200"))
BF16, F32 = torch.bfloat16, torch.float32


def check_batched(backend: Any, target: Target, dtype: torch.dtype) -> None:
    problem = make_problem((2, 2, 100, 64), dtype, seq_kv=150, mask=Causal(), needs_grad=True, deterministic=True)
    allowed = budget(dtype, problem.seq_kv)
    lse = check_against_the_reference(backend, target, problem, {}, make_inputs(problem), allowed=(allowed, allowed))
    assert_close(*lse, allowed, "lse")


def check_packed(backend: Any, target: Target, dtype: torch.dtype) -> None:
    case = make_case(
        Causal("bottom-right"), dtype, lengths=((70, 90), (20, 0), (40, 30)), heads=(2, 2), needs_grad=True
    )
    out, lse = backend.bind(case.q, case.k, case.v, case.problem, None, target, case.operands)(
        case.q, case.k, case.v, case.operands
    )
    check_forward(case, out, lse)
    check_gradients(backend, target, case)


def check_cached(backend: Any, target: Target, dtype: torch.dtype) -> None:
    case = Case((260, 70), tokens=2, page=16, dtype=dtype)
    given = make(case)
    problem, *views, operands = posed(given.q, given.k, given.v, given.told)
    out, lse = backend.bind(*views, problem, None, target, operands)(*views, operands)
    assert_as_expected(case, given, *as_cached(out, lse))


# A form's check, whose kernels, the condition under which a kernel writes, what excludes a row, and what follows.
CASES = {
    "batched out and gradients of keys": (
        check_batched, SM80, BF16, "if (first_row + row < end_row", " && first_row + row != 5", ")",
    ),
    "batched lse": (
        check_batched, SM90, BF16, "if (lane % 4 == 0 && row < sequence(part).seq_q()", " && row != 5", ")",
    ),
    "batched row terms, in scratch": (
        check_batched, SM90, BF16, "if (lane != 0", " || row == 5", ") return;\n    float start = start_of_scores",
    ),
    "batched dq": (check_batched, SM90, BF16, "if (row + 8 * r < sequence.seq_q()", " && row != 5", " && column"),
    "batched dq of sums": (check_batched, SM80, BF16, "if (q_row >= sequence.seq_q()", " || q_row == 5", ") continue;"),
    "float32 out": (
        check_batched, SM90, F32, "if (row >= sequence().seq_q()", " || row == 5", ") continue;\n      if (params.lse",
    ),
    "float32 gradients of keys": (
        check_batched, SM90, F32, "if (key >= sequence().seq_k()", " || key == 5",
        ") continue;\n#pragma unroll\n      for (int j = 0; j < count / 4",
    ),
    "packed out and gradients of keys": (
        check_packed, SM80, BF16, "if (first_row + row < end_row", " && first_row + row != 5", ")",
    ),
    "packed rows without keys": (
        check_packed, SM90, BF16,
        "!record.unordered() && row < sequence.seq_q()", " && row != 5", " &&\n          lse == -infinity",
    ),
    "cached lse": (
        check_cached, SM90, BF16, "if (params.lse != nullptr", " && token != 1", ")\n      params.lse[first_row_of_",
    ),
}  # fmt: skip


@emulation.emulated
@pytest.mark.parametrize("check", [check_batched, check_packed, check_cached])
def test_the_checks_pass_what_is_whole(monkeypatch: Any, check: Any) -> None:
    emulation.install(monkeypatch)
    check(SM90, H200, BF16)
    if check is not check_cached:
        check(SM80, A100, BF16)
    if check is check_batched:
        check(SM80, A100, F32)
        check(SM90, H200, F32)


@emulation.emulated
@pytest.mark.parametrize("name", CASES)
def test_a_row_that_a_kernel_leaves_unwritten_is_found(monkeypatch: Any, name: str) -> None:
    check, backend, dtype, condition, less, then = CASES[name]
    emulation.install(monkeypatch, spoil=(condition + then, condition + less + then))
    with pytest.raises(AssertionError):
        check(backend, A100 if backend is SM80 else H200, dtype)


def test_fresh_memory_is_nan() -> None:
    like = torch.zeros(2, 3)
    for one in (fresh.new_empty(like, (4,)), fresh.new_empty_strided(like, (2, 2), (1, 2)), fresh.empty_like(like)):
        assert one.isnan().all()
    assert (fresh.new_empty(like, 3, dtype=torch.uint8) == 255).all()
