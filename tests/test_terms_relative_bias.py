"""Biases by distance in the kernels, with their gradients (terms/relative_bias.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from term_cases import BF16, F32, H200, Case, both_ways, case_of, check, emulated, everywhere
from tilewise import Causal, Full
from tilewise.engine import SM80, SM90
from tilewise.operands import by_distance
from tilewise.terms import RelativeBias


def table_case(dtype: Any, dim: int, mask: Any, span: int, zero: int, number: str, **fields: Any) -> Case:
    tensor = torch.randn(4, span, generator=torch.Generator().manual_seed(4)).to(getattr(torch, number))
    term = RelativeBias(span, zero, number, fields.get("needs_grad", False))
    return case_of(dtype, dim, mask, (term,), lambda _: {"table": tensor}, **fields)


@emulated
@everywhere
@both_ways
def test_relative_bias(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """A table of all distances in float32, and one of few in the dtype of q."""
    own = str(dtype).removeprefix("torch.")
    span, zero, number = (249, 99, "float32") if dim == 64 else (61, 20, own)
    check(monkeypatch, backend, table_case(dtype, dim, mask, span, zero, number, needs_grad=back), back=back)


TABLES = {  # span, zero, distance of its numbers, and what they are
    "all distances": (800, 130, 1, "float32"),
    "heads that begin anywhere": (773, 130, 1, "float32"),
    "16 bits": (775, 131, 1, "bfloat16"),
    "only keys before": (130, 129, 1, "float32"),
    "tiles before, across and behind it": (61, -200, 1, "float32"),
    "numbers that are not adjacent": (800, 130, 2, "float32"),
}


def long_case(what: str, dim: int) -> Case:
    """So many keys that most tiles run in the steady loop."""
    span, zero, step, number = TABLES[what]
    case = table_case(BF16, dim, Full(), span, zero, number, seq_q=80, seq_kv=600)
    table = torch.randn(4, step * span, generator=torch.Generator().manual_seed(5)).to(getattr(torch, number))
    return case._replace(operands={"table": table[:, ::step]})


@emulated
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("what", TABLES)
def test_numbers_loaded_while_scores_are_computed(monkeypatch: Any, what: str, dim: int) -> None:
    case = long_case(what, dim)
    assert SM90.configs(case.problem, H200)[0].stages_table == (dim == 128)
    check(monkeypatch, SM90, case, back=False)


SPOILS = {
    "of another tile": ("origin + (key - row)", "origin + (key + 128 - row)"),
    "not waited for": ("sizeof(smem.k[0]) + (with_table ? table.bytes : 0)", "sizeof(smem.k[0])"),
    "of other rows": ("return config.block_q() - 1 - (", "return config.block_q() - 2 - ("),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_the_model_finds_a_staged_table_that_is_wrong(monkeypatch: Any, spoil: str) -> None:
    with pytest.raises(AssertionError):
        check(monkeypatch, SM90, long_case("heads that begin anywhere", 128), back=False, spoil=SPOILS[spoil])


@emulated
@pytest.mark.parametrize(("backend", "dtype", "mask"), [(SM90, BF16, Causal()), (SM80, F32, Full())], ids=str)
def test_a_learned_table_in_a_fixed_order(monkeypatch: Any, backend: Any, dtype: Any, mask: Any) -> None:
    """The gradient of every score has a place of its own, and what has the same distance is added up behind them."""
    case = table_case(dtype, 64, mask, 61, 20, "float32", needs_grad=True, deterministic=True)
    check(monkeypatch, backend, case, back=True)


def test_a_learned_table_in_a_fixed_order_has_its_limit() -> None:
    fields = {"needs_grad": True, "deterministic": True}
    problem = table_case(BF16, 64, Full(), 61, 20, "float32", **fields).problem
    assert not SM90.why_not(problem, H200)
    reasons = [reason.what for reason in SM90.why_not(problem.with_(seq_q=32768, seq_kv=32768), H200)]
    assert len(reasons) == 1
    assert "32 GiB are over 16" in reasons[0]


@pytest.mark.parametrize("zero", [-9, 0, 3, 6, 40])
@pytest.mark.parametrize("span", [1, 2, 5, 30])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 6), (6, 1), (5, 8), (8, 5)], ids=str)
def test_sums_by_distance(lengths: tuple[int, int], span: int, zero: int) -> None:
    rows, keys = lengths
    scores = torch.randn(2, 3, rows, keys, dtype=torch.float64)
    numbers = (torch.arange(keys) - torch.arange(rows)[:, None] + zero).clamp(0, span - 1)
    want = torch.zeros(3, span, dtype=torch.float64)
    want.index_add_(1, numbers.flatten(), scores.sum(0).flatten(1))
    assert torch.allclose(by_distance(scores, span, zero), want)
