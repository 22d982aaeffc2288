"""Caches in the lab: our ways to read one, the functions that other libraries have for it, and the suites."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from test_rivals import attend, by_sequence, stand_in

from support import assert_close, budget, make_problem
from tilewise.lab.candidates import cached, varlen
from tilewise.lab.candidates.names import Candidate
from tilewise.lab.candidates.rivals import FA3, FLASHINFER
from tilewise.lab.measure import compare
from tilewise.lab.measure.worker import Worker
from tilewise.lab.studies import bench, suites
from tilewise.masks import Causal, Documents, Full, Mask, Window
from tilewise.plain import reference
from tilewise.terms import KeyLengths

if TYPE_CHECKING:
    from tilewise.problem import Problem

Tensor = torch.Tensor
BF16 = torch.bfloat16
LAST = "bottom-right"
LENGTHS = (40, 17)
RAGGED = f"padding:{','.join(map(str, LENGTHS))}"


def decoding(tokens: int = 1, mask: Mask | None = None, ragged: bool = False, **fields: Any) -> Problem:
    mask = mask or (Full() if tokens == 1 else Causal(LAST))
    scores = (KeyLengths(),) if ragged else ()
    return make_problem((2, 4, tokens, 64), heads_kv=2, seq_kv=40, mask=mask, scores=scores, **fields)


PROBLEMS = {
    "one token": decoding(),
    "ragged": decoding(ragged=True),
    "three tokens": decoding(3),
    "a window": decoding(3, Window(7, 0, LAST)),
    "a softcap": decoding(softcap=3.0),
}
CHUNKS = {
    "a chunk": decoding(20),
    "a chunk under a window": decoding(20, Window(7, 0, LAST)),
    # Two decodes and a chunk, whose caches end within a page.
    "a mixed batch": make_problem(
        (1, 4, 22, 64), heads_kv=2, seq_kv=100, mask=Documents((0, 1, 2, 22), (0, 17, 57, 100), Causal(LAST))
    ),
}


def assert_right(name: str, problem: Problem) -> None:
    candidate = Candidate(name)
    contents = RAGGED if cached.has_lengths(problem) else ""
    inputs = candidate.inputs(problem, 0, "cpu", contents=contents)
    want, _ = reference.forward(inputs.q, inputs.k, inputs.v, problem, operands=inputs.operands)
    assert_close(candidate.forward(problem, inputs)(), want, budget(problem.dtype, problem.seq_kv))


@pytest.mark.parametrize("name", cached.WAYS)
@pytest.mark.parametrize("kind", [*PROBLEMS, *CHUNKS])
def test_our_ways_to_read_a_cache_are_candidates(name: str, kind: str) -> None:
    problem = (PROBLEMS | CHUNKS)[kind]
    assert Candidate(name).is_ours
    assert not Candidate(name).why_not(problem, "cpu")
    assert_right(name, problem)


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ("mask causal", decoding(3, Causal())),
        ("at the last key", decoding(3, ragged=True)),
        ("no gradient", decoding(needs_grad=True)),
        ("no dropout", decoding(dropout=0.5)),
        ("an lse", decoding(needs_lse=True)),
    ],
)
def test_what_is_not_compared_of_caches_is_said(wrong: str, problem: Problem) -> None:
    (reason,) = Candidate(cached.CACHED).why_not(problem, "cpu")
    assert wrong in reason.what


def test_pages_lie_in_no_order_and_hold_every_key() -> None:
    problem = decoding()
    k = Candidate(cached.PAGES_16).inputs(problem, 0, "cpu").k
    whole = cached.cache(problem, k)
    pages, table = cached.paged(whole, 16), cached.page_table(2, 40, 16, torch.device("cpu"))
    assert pages.shape == (6, 16, 2, 64)
    assert sorted(table.flatten().tolist()) == list(range(6)) != table.flatten().tolist()
    read = pages[table.long()].flatten(1, 2)  # (batch, places, heads, dim)
    assert torch.equal(read[:, :40], k.transpose(1, 2))
    assert not read[:, 40:].any()


def test_documents_have_room_for_the_longest() -> None:
    problem = CHUNKS["a mixed batch"]
    inputs = Candidate(cached.CACHED).inputs(problem, 0, "cpu")
    whole = cached.cache(problem, inputs.k)
    assert cached.lengths_of(problem, inputs).tolist() == [17, 40, 43]
    assert whole.shape == (3, 43, 2, 64)
    assert torch.equal(whole[1, :40], inputs.k[0, :, 17:57].transpose(0, 1))
    assert not whole[1, 40:].any()


def fake_flashinfer(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A decode wrapper that attends sequence by sequence, as its pages say."""
    planned: list[dict[str, Any]] = []

    class Wrapper:
        def __init__(self, workspace: Tensor, layout: str, *, use_tensor_cores: bool) -> None:
            assert (layout, use_tensor_cores) == ("NHD", True)

        def plan(
            self, indptr: Tensor, indices: Tensor, last: Tensor, heads: int, heads_kv: int, dim: int, page_size: int,
            **options: Any,
        ) -> None:  # fmt: skip
            self.told = indptr.tolist(), indices.tolist(), last.tolist(), page_size, options
            planned.append({"heads": (heads, heads_kv), "dim": dim, "page_size": page_size, **options})

        def run(self, q: Tensor, pages: tuple[Tensor, Tensor]) -> Tensor:
            indptr, indices, last, page_size, options = self.told
            tokens = options.get("q_len_per_req", 1)
            assert q.is_contiguous()
            assert q.shape[0] == tokens * len(last)
            found = []
            for number, ending in enumerate(last):
                mine = indices[indptr[number] : indptr[number + 1]]
                length = (len(mine) - 1) * page_size + ending
                k, v = (cache[mine].flatten(0, 1)[:length] for cache in pages)
                own = q[number * tokens : (number + 1) * tokens]
                scale, cap = options["sm_scale"], options["logits_soft_cap"]
                found.append(attend(own, k, v, scale, options["window_left"], 0, cap))
            return torch.cat(found)

    stand_in(monkeypatch, "flashinfer", BatchDecodeWithPagedKVCacheWrapper=Wrapper)
    varlen._flashinfer_decoding.cache_clear()
    return planned


@pytest.mark.parametrize("kind", PROBLEMS)
def test_flashinfer_decodes_from_pages_planned_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = fake_flashinfer(monkeypatch)
    for _ in range(2):  # as for the sets of tensors of a rotation
        assert_right(FLASHINFER, PROBLEMS[kind])
    (plan,) = planned
    assert (plan["heads"], plan["dim"], plan["page_size"]) == ((4, 2), 64, 16)
    assert plan.get("q_len_per_req", 1) == PROBLEMS[kind].seq_q
    varlen._flashinfer_decoding.cache_clear()


@pytest.mark.parametrize("kind", CHUNKS)
def test_flashinfer_takes_chunks_in_pages_planned_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[dict[str, Any]] = []

    class Wrapper:
        def __init__(self, workspace: Tensor, layout: str) -> None:
            assert (workspace.dtype, layout) == (torch.uint8, "NHD")

        def plan(
            self, qo_indptr: Tensor, paged_kv_indptr: Tensor, paged_kv_indices: Tensor, paged_kv_last_page_len: Tensor,
            num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, page_size: int, **options: Any,
        ) -> None:  # fmt: skip
            self.starts, self.options, self.page_size = qo_indptr, options, page_size
            self.pages = paged_kv_indptr.tolist(), paged_kv_indices.tolist(), paged_kv_last_page_len.tolist()
            planned.append({"heads": (num_qo_heads, num_kv_heads), "dim": head_dim_qk, **options})

        def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor:
            indptr, indices, last = self.pages
            assert q.is_contiguous()
            assert all(cache.shape[1] == self.page_size for cache in paged_kv_cache)
            ends = zip(indptr, indptr[1:], last, strict=False)
            mine = [(indices[a:b], (b - a - 1) * self.page_size + ending) for a, b, ending in ends]
            k, v = (torch.cat([cache[at].flatten(0, 1)[:n] for at, n in mine]) for cache in paged_kv_cache)
            starts = torch.tensor([0, *(n for _, n in mine)]).cumsum(0)
            o = self.options
            return by_sequence(
                self.starts, starts, q, k, v, scale=o["sm_scale"], left=o["window_left"], right=0 if o["causal"] else -1
            )

    stand_in(monkeypatch, "flashinfer", BatchPrefillWithPagedKVCacheWrapper=Wrapper)
    varlen._flashinfer_chunks.cache_clear()
    monkeypatch.setattr(varlen, "_CHUNK_PAGE_SIZE", 16)
    for _ in range(2):
        assert_right(FLASHINFER, CHUNKS[kind])
    (plan,) = planned
    assert (plan["heads"], plan["dim"], plan["causal"]) == ((4, 2), 64, True)
    varlen._flashinfer_chunks.cache_clear()


def fake_fa3(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    called: list[dict[str, Any]] = []

    def with_kvcache(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        called.append(options)
        lengths = options.get("cache_seqlens")
        ends = [k.shape[1]] * q.shape[0] if lengths is None else lengths.tolist()
        right = 0 if options["causal"] else -1
        scale, cap = options["softmax_scale"], options["softcap"]
        parts = zip(q, k, v, ends, strict=True)
        return torch.stack([attend(a, b[:end], c[:end], scale, -1, right, cap) for a, b, c, end in parts])

    def with_documents(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_q: int, max_k: int,
        *, softmax_scale: float, causal: bool, softcap: float,
    ) -> Tensor:  # fmt: skip
        called.append({"max": (max_q, max_k)})
        right = 0 if causal else -1
        options: dict[str, Any] = {"scale": softmax_scale, "left": -1, "right": right, "cap": softcap}
        return by_sequence(cu_seqlens_q, cu_seqlens_k, q, k, v, **options)

    members: dict[str, Any] = {
        "flash_attn_varlen_func": with_documents,
        "flash_attn_with_kvcache": with_kvcache,
        "get_scheduler_metadata": lambda *sizes, **options: (*sizes[:6], *sizes[6].tolist()),
        "flash_attn_func": None,
    }
    stand_in(monkeypatch, "fa3_fwd_interface", **members)
    return called


@pytest.mark.parametrize("kind", [kind for kind in PROBLEMS if kind != "a window"])
def test_flash_attention_3_reads_a_cache_by_its_own_function(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = fake_fa3(monkeypatch)
    problem = PROBLEMS[kind]
    assert_right(FA3, problem)
    (options,) = called
    assert ("scheduler_metadata" in options) == cached.has_lengths(problem)
    if cached.has_lengths(problem):
        assert options["scheduler_metadata"] == (2, 1, 40, 4, 2, 64, *LENGTHS)


@pytest.mark.parametrize("kind", ["a chunk", "a mixed batch"])
def test_flash_attention_3_takes_chunks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its function for caches, which divides keys, or packed, which is all that it has for other lengths."""
    called = fake_fa3(monkeypatch)
    assert_right(FA3, CHUNKS[kind])
    (options,) = called
    assert ("max" in options) == (kind == "a mixed batch")


def test_lengths_of_other_than_decoding_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fa3(monkeypatch)
    fake_flashinfer(monkeypatch)
    prompt = make_problem((2, 4, 64, 64), BF16, heads_kv=2, scores=(KeyLengths(),))
    for name in (FA3, FLASHINFER):
        assert not Candidate(name).why_not(decoding(ragged=True, dtype=BF16))
        (reason,) = Candidate(name).why_not(prompt)
        assert "key lengths" in reason.what


def test_the_suite_has_pages_lengths_and_every_library_that_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_fa3(monkeypatch)
    fake_flashinfer(monkeypatch)
    rows = suites.suite("decode")
    assert len({row.name for row in rows}) == len(rows)
    assert all({FA3, FLASHINFER, "torch-cudnn"} <= set(row.candidates) for row in rows)
    assert all(row.candidates[0] == "tilewise" for row in rows)
    paged = [row for row in rows if {cached.CACHED, cached.PAGES_16, cached.PAGES_64} <= set(row.candidates)]
    assert {8, 64} <= {row.problem.batch for row in paged}
    ragged = [row for row in rows if cached.has_lengths(row.problem)]
    assert len(ragged) > 1
    for row in rows:
        for name in row.candidates:
            assert name.startswith("torch") or not Candidate(name).why_not(row.problem), (row.name, name)


def test_the_bound_of_memory_counts_the_keys_that_are_there() -> None:
    row = next(row for row in suites.rows_of("decode") if cached.has_lengths(row.problem))
    outcome = compare.Outcome("tilewise", compare.VERIFIED, forward=[[1e-3]])
    (line,) = bench.memory_lines([compare.Comparison(row, [outcome])], "NVIDIA H200")
    assert row.plain is not None
    lengths = cached.lengths_of(
        row.problem, Candidate(cached.CACHED).inputs(small(row), 0, "cpu", contents=row.contents)
    )
    assert row.plain.share == pytest.approx(lengths.sum().item() / (row.problem.batch * row.problem.seq_kv))
    want = row.plain.share * row.problem.min_bytes() / 4.8e12
    assert line[2] == f"{want * 1e6:.1f}"


def small(row: compare.Row) -> Problem:
    return row.problem.with_(seq_kv=16, head_dim=8, head_dim_v=8)


def test_scores_say_what_pages_and_invariance_cost() -> None:
    row = next(row for row in suites.rows_of("decode") if cached.PAGES_16 in row.candidates)
    seconds = {"tilewise": 1.0, cached.CACHED: 1.0, cached.PAGES_16: 1.25, cached.PAGES_64: 1.0, cached.INVARIANT: 2.0}
    outcomes = [compare.Outcome(name, compare.VERIFIED, forward=[[each]] * 7) for name, each in seconds.items()]
    scores = bench.scores([compare.Comparison(row, outcomes)])
    assert scores["pages of 16 against one piece"].geomean == pytest.approx(0.8)
    assert scores["pages of 64 against one piece"].geomean == pytest.approx(1.0)
    assert scores["batch invariant against default"].geomean == pytest.approx(0.5)


def test_a_rotation_has_the_lengths_of_its_row() -> None:
    worker = Worker()
    worker.prepare(cached.CACHED, decoding(ragged=True).to_dict(), 0, "cpu", contents=RAGGED)
    rotation: Any = worker._rotation()
    one, other = rotation(), rotation()
    assert one.shape == other.shape == (2, 4, 1, 64)
    assert not torch.equal(one, other)
    worker.forget()
