"""ALiBi in the kernels (terms/alibi.py, kernels/common/terms/alibi.cuh)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import emulation
from support import budget
from term_cases import (
    BF16,
    F32,
    H200,
    HALF,
    Tensor,
    backward,
    both_ways,
    case_of,
    check,
    emulated,
    everywhere,
    truth,
)
from tilewise import Causal, Full, Window
from tilewise.engine import SM80, SM90
from tilewise.engine.rules import specialise_causal_alibi
from tilewise.scores import Softcap
from tilewise.terms import Alibi, Dropout, RelativeBias, Sink
from tilewise.terms.alibi import OneSidedAlibi

LEARNED = Alibi(learned=True)


def slopes_of(problem: Any) -> dict[str, Tensor]:
    """Of both signs, one of them 0."""
    slopes = torch.tensor([0.3, -0.05, 0.0, 0.02])
    return {"slopes": slopes if not problem.scores[-1].batched else torch.stack([slopes, slopes.flip(0) / 2])}


@emulated
@both_ways
@everywhere
def test_alibi(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, back: bool) -> None:
    """Of heads where the slopes are given, of batches and heads where they are learned."""
    case = case_of(dtype, dim, mask, (Alibi(back, back),), slopes_of, needs_grad=back)
    check(monkeypatch, backend, case, back=back)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, F32), (SM80, BF16)], ids=str)
def test_alibi_behind_a_softcap(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    case = case_of(dtype, 64, Causal(), (Softcap(3.0), Alibi(learned=True)), slopes_of, needs_grad=True)
    check(monkeypatch, backend, case, back=True)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM90, F32), (SM80, BF16)], ids=str)
def test_learned_slopes_in_a_fixed_order(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    """Every block of scores has a sum of its own: no sum of two depends on who comes first."""
    terms = (Alibi(learned=True),)
    case = case_of(dtype, 64, Window(60, 10), terms, slopes_of, needs_grad=True, deterministic=True)
    check(monkeypatch, backend, case, back=True)
    room = terms[0].sums(terms[0].tensors[0], case.problem)
    assert room.shape == room.full


@emulated
@pytest.mark.parametrize(
    ("backend", "dtype", "dim", "mask", "terms", "deterministic"),
    [
        (SM90, BF16, 64, Causal("bottom-right"), (LEARNED, Sink()), False),
        (SM90, BF16, 64, Full(), (LEARNED, Softcap(3.0)), True),
        (SM90, HALF, 128, Causal(), (LEARNED,), False),
        (SM90, HALF, 192, Full(), (LEARNED, Dropout(0.3)), False),
        (SM80, BF16, 64, Window(60, 10), (LEARNED, Sink(), Dropout(0.3)), False),
        (SM80, HALF, 128, Causal(), (Softcap(3.0), LEARNED), True),
    ],
    ids=str,
)
def test_an_error_of_out_does_not_reach_the_slopes(
    monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, terms: Any, deterministic: bool
) -> None:
    """It has the factor of the mean distance of a row's keys, and the gradient's addends cancel."""
    emulation.install(monkeypatch)
    tensors = {
        "slopes": torch.tensor([0.3, -0.05, 0.0, 0.02]),
        "sink": torch.tensor([0.5, 2.0, -1.0, 4.0]),
        "seed": torch.tensor([3, 5]),
    }
    read = {operand.name: tensors[operand.name] for term in terms for operand in term.tensors}
    case = case_of(dtype, dim, mask, terms, lambda _: read, needs_grad=True, deterministic=deterministic)
    out, lse, _, magnitudes = truth(case)
    dlse = torch.randn(lse.shape)
    wrong = out + 0.05 * torch.randn(out.shape)
    found = [backward(backend, case, one.to(dtype), lse.float(), dlse)["slopes"] for one in (out, wrong)]
    error = (found[0] - found[1]).norm() / magnitudes["slopes"].norm()
    assert error <= budget(F32, case.problem.seq_kv)


def test_deterministic_slopes_have_sums_for_each_row_and_block_of_the_kernels() -> None:
    term = Alibi(learned=True)
    sizes = case_of(BF16, 64, Full(), (term,), slopes_of, seq_q=33, seq_kv=48, deterministic=True).problem
    room = term.sums(term.tensors[0], sizes).shape[2:]
    assert room == (3 * (33 + 128), (48 + 128) // 16), "three sums per row, also of a tile's rows behind the last"


@pytest.mark.parametrize(
    ("mask", "rows", "keys", "is_one_sided"),
    [
        (Causal(), 100, 100, True),
        (Causal(), 100, 150, True),
        (Causal(), 150, 100, False),  # the last query stands at the last key, the first one before the first
        (Causal("bottom-right"), 150, 100, True),
        (Window(60, 0), 100, 100, True),
        (Window(60, 10), 100, 100, False),
        (Full(), 100, 100, False),
    ],
)
def test_signs_of_distances_are_looked_at_where_both_are_seen(
    mask: Any, rows: int, keys: int, is_one_sided: bool
) -> None:
    case = case_of(BF16, 64, mask, (Alibi(),), slopes_of, seq_q=rows, seq_kv=keys)
    found = specialise_causal_alibi(case.problem)
    distances = torch.arange(rows)[:, None] + (keys - rows) - torch.arange(keys)
    seen = mask.to_bool(range(rows), range(keys), rows, keys, "cpu")
    assert bool((distances[seen] >= 0).all()) == is_one_sided
    assert (type(found.scores[0]) is OneSidedAlibi) == is_one_sided
    assert found.operands == case.problem.operands


def test_row_terms_of_a_backward_begin_with_the_line() -> None:
    """One term that adds it is added to what scores start from; behind a softcap it is applied to every score."""
    for terms, has_line in (((Alibi(),), True), ((Softcap(3.0), Alibi()), False)):
        problem = case_of(BF16, 64, Causal(), terms, slopes_of, needs_grad=True).problem
        program = SM90.backward_program(problem, H200, SM90.backward_configs(problem, H200)[0])
        assert ("slopes" in program.launches[0].fields) == has_line
    units = []
    for terms in ((), (Softcap(3.0),), (RelativeBias(9, 4),)):
        problem = case_of(BF16, 64, Causal(), terms, lambda _: {"table": torch.zeros(4, 9)}, needs_grad=True).problem
        units.append(SM90.backward_program(problem, H200, SM90.backward_configs(problem, H200)[0]).launches[0].unit)
    assert units[0] == units[1] == units[2], "these add no line"
