"""Biases by distance in the kernels, with their gradients (terms/relative_bias.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from term_cases import BF16, H200, Case, both_ways, case_of, check, emulated, everywhere
from tilewise import Full
from tilewise.engine import SM90
from tilewise.terms import RelativeBias


def table_case(dtype: Any, dim: int, mask: Any, span: int, zero: int, number: str, **fields: Any) -> Case:
    tensor = torch.randn(4, span, generator=torch.Generator().manual_seed(4)).to(getattr(torch, number))
    term = RelativeBias(span, zero, number, fields.get("needs_grad", False))
    return case_of(dtype, dim, mask, (term,), lambda _: {"table": tensor}, **fields)


@emulated
@both_ways
@everywhere
def test_relative_bias(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """A table of all distances in float32, and one of few in the dtype of q."""
    own = str(dtype).removeprefix("torch.")
    span, zero, number = (249, 99, "float32") if dim == 64 else (61, 20, own)
    check(monkeypatch, backend, table_case(dtype, dim, mask, span, zero, number, needs_grad=back), back=back)


TABLES = {
    "all distances": (700, 90, 1),
    "tiles before, across and behind it": (61, -200, 1),
    "numbers that are not adjacent": (700, 90, 2),
}


@emulated
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("what", TABLES)
def test_numbers_loaded_while_scores_are_computed(monkeypatch: Any, what: str, dim: int) -> None:
    """So many keys that most tiles run in the steady loop."""
    span, zero, step = TABLES[what]
    case = table_case(BF16, dim, Full(), span, zero, "float32", seq_q=80, seq_kv=600)
    table = torch.randn(4, step * span, generator=torch.Generator().manual_seed(5))[:, ::step]
    check(monkeypatch, SM90, case._replace(operands={"table": table}), back=False)


def test_a_learned_table_is_refused_where_sums_must_have_an_order() -> None:
    problem = table_case(BF16, 64, Full(), 61, 20, "float32", needs_grad=True, deterministic=True).problem
    reasons = [reason.what for reason in SM90.why_not(problem, H200)]
    assert len(reasons) == 1
    assert "added up in the order" in reasons[0]
