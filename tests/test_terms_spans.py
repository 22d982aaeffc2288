"""Spans of keys per query, from tensors, in the kernels: documents, prefixes and chunks (terms/spans.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import emulation
import tilewise
from support import make_problem
from term_cases import BF16, F32, H200, Case, Tensor, both_ways, case_of, check, emulated, everywhere, forward
from tilewise import Causal, Documents, Full, InvalidInput, PrefixLM, Window
from tilewise.engine import SM80, SM90
from tilewise.engine.policy import Policy
from tilewise.engine.sm90.backward import Order
from tilewise.terms import Dropout, KeyLengths, Sink, Spans, spans
from tilewise.terms.spans import KnownSpans


def drawn(kind: str, problem: Any) -> dict[str, Tensor]:
    """Spans that never fall, with rows that see nothing among them; `shared` by all batches, or not."""
    rows = torch.arange(problem.seq_q)
    if kind == "shared":  # documents, the second without keys
        document = (rows // 31).clamp(max=3)
        first, end = rows.new_tensor([0, 40, 40, 71])[document], rows.new_tensor([40, 40, 71, 150])[document]
        return spans.operands_of(first[None], end[None], problem.seq_kv)
    generator = torch.Generator().manual_seed(4)
    steps = torch.randint(0, 4, (2, problem.batch, problem.seq_q), generator=generator)
    first, end = steps.cumsum(-1).clamp(max=problem.seq_kv).unbind()
    return spans.operands_of(first, (end + 9).clamp(max=problem.seq_kv), problem.seq_kv)


@emulated
@both_ways
@pytest.mark.parametrize("kind", ["shared", "of batches"])
@everywhere
def test_spans(monkeypatch: Any, backend: Any, dtype: Any, dim: int, mask: Any, kind: str, back: bool) -> None:
    """Beside bands, which hide as well."""
    case = case_of(dtype, dim, mask, (Spans(),), lambda problem: drawn(kind, problem), needs_grad=back)
    check(monkeypatch, backend, case, back=back)


def of_documents(problem: Any, documents: int) -> dict[str, Tensor]:
    """Of equal lengths, as many rows as keys."""
    length = problem.seq_q // documents
    first = torch.arange(problem.seq_q) // length * length
    return spans.operands_of(first[None], first[None] + length, problem.seq_kv)


@emulated
@pytest.mark.parametrize("deterministic", [False, True], ids=["any order", "deterministic"])
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, BF16), (SM90, F32), (SM80, F32)], ids=str)
def test_tiles_outside_of_documents_are_left_out(
    monkeypatch: Any, backend: Any, dtype: Any, deterministic: bool
) -> None:
    """Whole tiles of them, several per document: with some that are full, and others that nothing sees."""
    sizes = {"batch": 1, "heads_q": 2, "heads_kv": 1, "seq_q": 512, "seq_kv": 512, "deterministic": deterministic}
    case = case_of(dtype, 64, Causal(), (Spans(),), lambda problem: of_documents(problem, 2), needs_grad=True, **sizes)
    check(monkeypatch, backend, case, back=True)


@emulated
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["shared", "of batches"])
@pytest.mark.parametrize("order", [Order.KEY_ORDER, Order.CLAIM_ORDER], ids=["key order", "claim order"])
def test_who_adds_to_dq_is_the_same_from_both_sides(monkeypatch: Any, order: Order, kind: str, dim: int) -> None:
    """A tile of keys knows its queries, and a tile of queries how many add to it: else some wait for ever."""
    sizes = {"seq_q": 400, "seq_kv": 500, "deterministic": order is Order.KEY_ORDER}
    unknown = case_of(BF16, dim, Full(), (Spans(),), lambda problem: drawn(kind, problem), **sizes).operands
    terms = (replace(KnownSpans.of(unknown["first_key"], unknown["end_key"]), longest=500),)
    case = case_of(BF16, dim, Full(), terms, lambda problem: drawn(kind, problem), needs_grad=True, **sizes)
    program = SM90.backward_program(case.problem, H200, SM90.backward_configs(case.problem, H200)[0])
    assert program.launches[1].fields["order"] == order
    assert "dq" in program.zeroed  # some rows see nothing, and nobody writes theirs
    check(monkeypatch, SM90, case, back=True)


@emulated
def test_dq_of_a_whole_tile_of_queries_without_keys_is_zero(monkeypatch: Any) -> None:
    """No tile of keys visits it."""
    first, end = torch.zeros(1, 400, dtype=torch.int64), torch.full((1, 400), 500)
    first[:, 120:], end[:, :200] = 90, 90
    term = KnownSpans.of(first, end)
    assert (term.longest, term.every_row_sees) == (410, False)
    operands = spans.operands_of(first, end, 500)
    case = case_of(BF16, 64, Full(), (term,), lambda _: operands, seq_q=400, seq_kv=500, needs_grad=True)
    check(monkeypatch, SM90, case, back=True)


def test_spans_know_whether_every_row_sees() -> None:
    first, end = torch.tensor([[0, 2, 2], [0, 0, 4]]), torch.tensor([[1, 3, 4], [2, 2, 9]])
    assert KnownSpans.of(first, end) == KnownSpans(longest=5, every_row_sees=True)
    first[1, 2] = 9
    assert KnownSpans.of(first, end) == KnownSpans(longest=2, every_row_sees=False)


def test_documents_add_up_their_dq_without_sums_to_zero() -> None:
    """Few tiles of keys add to a tile of queries, and every row sees itself. By spans of keys, as dropout asks for."""
    documents = Documents((0, 2000, 3000, 4096), (), Causal())
    problem = make_problem((4, 16, 4096, 128), BF16, mask=documents, scores=(Dropout(0.5),), needs_grad=True)
    config = SM90.backward_configs(problem, H200)[0]
    of_documents = SM90.backward_program(problem, H200, config)
    assert of_documents.launches[1].fields["order"] == Order.CLAIM_ORDER
    assert not of_documents.zeroed
    first_without_keys = Documents((0, 2000, 3000, 4096), (0, 0, 3000, 4096), Causal())
    program = SM90.backward_program(problem.with_(mask=first_without_keys), H200, config)
    assert program.launches[1].fields["order"] == Order.CLAIM_ORDER
    assert program.zeroed == {"dq"}
    of_prefix = SM90.backward_program(problem.with_(mask=PrefixLM(1000)), H200, config)
    assert of_prefix.launches[1].fields["order"] == Order.ANY_ORDER


def test_known_spans_know_the_longest_and_whether_every_row_sees() -> None:
    first, end = torch.tensor([[0, 2], [1, 4]])
    assert KnownSpans.of(first, end) == KnownSpans(2, every_row_sees=True)
    assert KnownSpans.of(first, torch.tensor([0, 5])) == KnownSpans(3, every_row_sees=False)


@pytest.mark.parametrize("name", ["first_key", "end_key", "first_row", "end_row"])
def test_every_tensor_is_held_to_its_own_shape(name: str) -> None:
    """Those of queries and those of keys have different ones."""
    q, k = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 9, 8)
    given = spans.operands_of(torch.zeros(1, 5), torch.full((1, 5), 9), 9)
    want = tilewise.attention(q, k, k)
    torch.testing.assert_close(tilewise.attention(q, k, k, scores=(Spans(),), operands=given), want)
    with pytest.raises(InvalidInput, match=name):
        tilewise.attention(q, k, k, scores=(Spans(),), operands=given | {name: given[name][:, 1:]})


@pytest.mark.parametrize("term", [Spans(), KeyLengths(), KeyLengths(padded_left=True)], ids=str)
def test_a_partial_tile_is_masked_in_one_pass(term: Any) -> None:
    """The term hides what the band hides; beside it no kernel looks at every element once more."""
    for precise in (False, True):
        assert "BandMask" not in Policy((term,), precise).cpp_type
        assert "BandMask" in Policy((Sink(),), precise).cpp_type


@pytest.mark.parametrize("mask", [PrefixLM(1000), Documents((0, 2000, 4096), (), Causal())], ids=str)
def test_tiles_that_may_grow_are_ordered_as_causal_ones(mask: Any) -> None:
    """Of a prefix no band says so. A long tile must not begin when little else is left to do beside it."""

    def order(problem: Any) -> tuple[object, ...]:
        fields = SM90.program(problem, H200, SM90.configs(problem, H200)[0]).launches[0].fields
        return fields["longest_first"], fields["sections"]

    # Documents with dropout: without, they are packed sequences.
    causal = make_problem((4, 16, 4096, 128), BF16, mask=Causal(), scores=(Dropout(0.5),))
    assert order(causal.with_(mask=mask)) == order(causal)
    assert order(causal)[0] == 1


def test_a_prefix_for_each_sequence_of_no_rows() -> None:
    q, k = torch.zeros(2, 4, 0, 8), torch.zeros(2, 4, 9, 8)
    assert tilewise.attention(q, k, k, mask=PrefixLM(torch.tensor([3, 5]))).shape == q.shape


def test_both_ways_round_say_the_same() -> None:
    case = case_of(BF16, 64, Window(60, 10), (Spans(),), lambda problem: drawn("of batches", problem))
    of = case.operands
    rows, keys = torch.arange(case.problem.seq_q)[:, None], torch.arange(case.problem.seq_kv)
    by_queries = (keys >= of["first_key"][..., None]) & (keys < of["end_key"][..., None])
    by_keys = (rows >= of["first_row"][:, None]) & (rows < of["end_row"][:, None])
    assert torch.equal(by_queries, by_keys)


@emulated
@pytest.mark.parametrize(("backend", "dtype"), [(SM90, BF16), (SM80, BF16), (SM90, F32), (SM80, F32)], ids=str)
def test_nonfinite_values_of_other_documents_stay_there(monkeypatch: Any, backend: Any, dtype: Any) -> None:
    sizes = {"batch": 1, "seq_q": 128, "seq_kv": 128}
    case: Case = case_of(dtype, 64, Full(), (Spans(),), lambda problem: of_documents(problem, 4), **sizes)
    case.v[:, :, 40, 3] = torch.nan
    case.v[:, :, 64, 5] = torch.inf  # the first of its document
    case.k[:, :, 100] = torch.nan
    emulation.install(monkeypatch)
    got, _ = forward(backend, case)
    spoiled, infinite = torch.zeros_like(got, dtype=torch.bool), torch.zeros_like(got, dtype=torch.bool)
    spoiled[:, :, 32:64, 3] = True
    spoiled[:, :, 96:] = True
    infinite[:, :, 64:96, 5] = True
    assert torch.equal(got.isnan(), spoiled)
    assert torch.equal(got.isinf(), infinite)
