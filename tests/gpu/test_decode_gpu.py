"""Few queries and keys in caches on a GPU: lengths, pages, groups, terms, NaN wherever no key is, graphs and bits.

Run as a program it launches a few cases and no reference, for the memory and race checkers:

    PYTHONPATH=src:tests compute-sanitizer --report-api-errors no --tool memcheck python tests/gpu/test_decode_gpu.py
"""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch

import kvcache_suite
import tilewise
from cache_cases import Case, Made, assert_as_expected, make
from support import assert_close, assert_near, budget, make_inputs, make_problem
from tilewise import Causal, Full, InvalidInput, KeyLengths, Target, Window, api
from tilewise.call.resolve import resolve
from tilewise.engine import SM80, SM90, decode
from tilewise.integrations.flash_attn import flash_attn_with_kvcache
from tilewise.jit import build_all

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
BF16, FP16 = torch.bfloat16, torch.float16
hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
BACKEND = SM90 if hopper else SM80

LENGTHS = (0, 1, 63, 64, 65, 777, 4096, 8191)
MATRIX = [
    # lengths, with every number of new tokens and group
    *(Case(LENGTHS, tokens=tokens, heads=heads, dims=(128, 128), page=16, seed=tokens)
      for tokens, heads in ((1, (8, 2)), (2, (4, 4)), (3, (8, 1)), (4, (16, 4)), (5, (6, 2)),
                            (7, (7, 1)), (8, (8, 2)))),
    # heads, in both dtypes, in one piece and in pages
    *(Case((3000, 17, 0, 512), tokens=2, heads=(4, 2), dims=dims, dtype=dtype, page=page)
      for dims in ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (40, 24))
      for dtype, page in ((BF16, 64), (FP16, 0))),
    Case((65536,), heads=(16, 1), dims=(256, 256)),
    Case((20000, 9000), tokens=16, heads=(4, 1), dims=(64, 64), page=32),
    # pages
    *(Case((1000, 333, 1), page=page, heads=(8, 2)) for page in (1, 16, 17, 48, 128, 256)),
    # where sequences begin, and in which row they are
    Case((1000, 333, 20), tokens=3, starts=(13, 333, 0), page=16),
    Case((1000, 333, 20), tokens=2, starts=(100, 5, 19), rows=(5, 0, 2), capacity=1500),
    # masks and terms
    Case((5000, 300), tokens=4, window=128, page=16),
    Case((5000, 300), tokens=4, window=1000, causal=False, heads=(8, 2)),
    Case((5000, 300), tokens=4, causal=False, page=64),
    *(Case((3000, 40), tokens=3, page=16, heads=(8, 2), dims=(128, 128), terms=terms)
      for terms in (("softcap",), ("sink",), ("alibi",), ("alibi_batched",), ("keep",), ("softcap", "alibi", "sink"))),
    # prefill, chunks and decoding in one call
    Case((700, 2000, 130, 0, 64), tokens=(300, 1, 130, 2, 0), heads=(8, 2), dims=(128, 128), page=16),
    Case((700, 2000, 130), tokens=(300, 1, 130), heads=(4, 1), terms=("alibi_batched", "sink")),
    Case((0, 0), tokens=(3, 1), page=16, capacity=64),
]  # fmt: skip


def run(made: Made, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    found = tilewise.attention_cached(made.q, made.k, made.v, **made.told, return_lse=True, **more)
    assert isinstance(found, tuple)
    return found


def problem_of(case: Case, invariant: bool = False) -> Any:
    made = make(case.with_(lengths=tuple(min(n, 64) for n in case.lengths), starts=(0,) * len(case.starts)))
    told = {"mask": "full", "return_lse": True, "batch_invariant": invariant} | made.told
    return resolve(api.cached_request(made.q, made.k, made.v, **told)).problem()


PLAIN = [
    make_problem(
        (batch, heads[0], tokens, dims[0]), dtype, heads_kv=heads[1], seq_kv=keys, head_dim_v=dims[1], mask=mask,
        needs_lse=True, softcap=softcap,
    )
    for batch, tokens, keys, heads, dims, dtype, mask, softcap in (
        (1, 1, 1024, (32, 8), (128, 128), BF16, Full(), 0.0),
        (1, 1, 131072, (8, 2), (128, 128), FP16, Full(), 0.0),
        (64, 1, 300, (8, 8), (64, 64), BF16, Full(), 0.0),
        (4, 4, 8192, (8, 2), (128, 128), BF16, Causal("bottom-right"), 0.0),
        (3, 8, 1111, (8, 2), (128, 128), BF16, Causal("bottom-right"), 30.0),
        (2, 16, 2000, (4, 1), (64, 64), FP16, Causal("bottom-right"), 0.0),
        (2, 5, 513, (4, 2), (96, 96), BF16, Window(100, 0, "bottom-right"), 0.0),
        (2, 2, 700, (4, 2), (72, 40), BF16, Window(None, 3), 0.0),
        (1, 1, 65536, (16, 1), (256, 256), BF16, Full(), 0.0),
        (2, 3, 400, (4, 1), (192, 128), FP16, Causal("bottom-right"), 0.0),
        (300, 1, 129, (2, 1), (128, 128), BF16, Full(), 0.0),
    )
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    """All kernels, side by side, before the first test needs one."""
    if not torch.cuda.is_available():
        return
    target, units = Target.of("cuda"), {}
    for problem in (*map(problem_of, MATRIX), *PLAIN):
        program = BACKEND.program(problem, target, BACKEND.configs(problem, target)[0])
        units |= {unit.label: unit for unit in program.units}
    for _ in build_all(units.values()):
        pass


@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_caches(case: Case) -> None:
    made = make(case, "cuda")
    assert_as_expected(case, made, *run(made))


@pytest.mark.parametrize("problem", PLAIN, ids=str)
def test_few_queries(problem: Any) -> None:
    assert BACKEND.families(problem)[0] is decode
    torch.manual_seed(0)
    tensors = make_inputs(problem, "cuda")
    out, lse = BACKEND.forward(*tensors, problem)
    assert lse is not None
    assert_near(out, lse, tensors, problem)


def test_the_other_backend_has_the_same_kernel() -> None:
    case = MATRIX[0]
    made = make(case, "cuda")
    for a, b in zip(run(made), run(made, backend="sm80"), strict=True):
        assert torch.equal(a, b)


def test_lengths_of_a_mask_shorten_the_work() -> None:
    """`KeyLengths` through `attention`, NaN behind the lengths."""
    lengths = torch.tensor([0, 1, 500, 2048], dtype=torch.int32)
    q, k, v = (torch.randn(4, heads, n, 64, dtype=BF16) for heads, n in ((8, 2), (2, 2048), (2, 2048)))
    for number, length in enumerate(lengths.tolist()):
        k[number, :, length:], v[number, :, length:] = math.nan, math.nan
    out = tilewise.attention(q.cuda(), k.cuda(), v.cuda(), mask=KeyLengths(lengths.cuda()))
    for number, length in enumerate(lengths.tolist()):
        own = slice(number, number + 1)
        keys = [x[own, :, :length].double().repeat_interleave(4, 1) for x in (k, v)]
        weights = torch.softmax(q[own].double() @ keys[0].transpose(2, 3) / 8, -1)
        assert_close(out[own].cpu(), weights @ keys[1], budget(BF16, length))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_values_stay_hidden_and_seen_ones_show(bad: float) -> None:
    problem = make_problem((1, 1, 4, 128), BF16, seq_kv=3000, mask=Causal("bottom-right"), needs_lse=True)
    torch.manual_seed(0)
    q, k, v = make_inputs(problem, "cuda")
    clean, _ = BACKEND.forward(q, k, v, problem)
    for key, blind in ((2998, 2), (20, 0)):
        spoilt_k, spoilt_v = k.clone(), v.clone()
        spoilt_k[:, :, key], spoilt_v[:, :, key] = bad, bad
        for keys in (k, spoilt_k):
            out, lse = BACKEND.forward(q, keys, spoilt_v, problem)
            assert torch.equal(out[:, :, :blind], clean[:, :, :blind])
            assert lse is not None
            assert not lse[:, :, :blind].isnan().any()
            assert not out[:, :, blind:].isfinite().any()


# --- bits ---


@pytest.mark.parametrize("invariant", [False, True])
def test_twenty_runs_have_the_same_bits(invariant: bool) -> None:
    case = Case((9000, 3000, 17, 0, 500), tokens=2, heads=(8, 2), dims=(128, 128), page=16)
    made = make(case, "cuda")
    first = run(made, batch_invariant=invariant)
    assert_as_expected(case, made, *first)
    for _ in range(20):
        for a, b in zip(first, run(made, batch_invariant=invariant), strict=True):
            assert torch.equal(a, b)


def test_batch_invariant_rows_know_nothing_of_the_batch() -> None:
    case = Case((9000, 3000, 17, 0, 500, 20000), tokens=2, heads=(8, 2), dims=(128, 128), page=16)
    made = make(case, "cuda")
    out, lse = run(made, batch_invariant=True)
    told = made.told
    for chosen in ([0], [1], [2, 3], [5, 0], [4, 4, 4, 1], [5, 4, 3, 2, 1, 0]):
        rows = torch.tensor(chosen, device="cuda")
        some = Made(made.q[rows], made.k, made.v, told | {name: told[name][rows] for name in ("lengths", "page_table")})  # type: ignore[index]
        found = run(some, batch_invariant=True)
        assert torch.equal(found[0], out[rows])
        assert torch.equal(found[1], lse[rows])


def test_streams_do_not_share_tickets() -> None:
    case = Case((5000, 100, 3000), tokens=2, heads=(8, 2), page=16)
    made = make(case, "cuda")
    want, _ = run(made)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    found = []
    for _ in range(50):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(run(made)[0])
    torch.cuda.synchronize()
    assert all(torch.equal(out, want) for out in found)


# --- graphs ---


@pytest.mark.parametrize("invariant", [False, True])
def test_one_graph_serves_all_lengths(invariant: bool) -> None:
    case = Case((900, 40, 0), tokens=2, heads=(8, 2), dims=(128, 128), page=16, capacity=4000)
    made = make(case, "cuda")
    run(made, batch_invariant=invariant)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = run(made, batch_invariant=invariant)
    for seed, lengths in enumerate(((900, 40, 0), (4000, 1, 333), (2, 0, 3999), (64, 64, 64))):
        other = case.with_(lengths=lengths, seed=seed)
        filled = make(other, "cuda")
        for name in ("q", "k", "v"):
            getattr(made, name).copy_(getattr(filled, name))
        for name in ("lengths", "page_table"):
            made.told[name].copy_(filled.told[name])  # type: ignore[attr-defined]
        graph.replay()
        torch.cuda.synchronize()
        assert_as_expected(other, filled, out, lse)


def test_a_graph_of_an_append_goes_on_from_token_to_token() -> None:
    """Each replay appends one token and attends to it."""
    torch.manual_seed(0)
    steps, start = 6, 100
    tokens = torch.randn(3, steps, 2, 1, 4, 64, dtype=BF16, device="cuda")
    q, k, v = (torch.zeros_like(tokens[0, 0]) for _ in range(3))
    caches = torch.randn(2, 2, 256, 4, 64, dtype=BF16, device="cuda")
    lengths = torch.tensor([start, start - 7], dtype=torch.int32, device="cuda")
    whole = caches.clone()

    def step() -> torch.Tensor:
        out = flash_attn_with_kvcache(q, caches[0], caches[1], k, v, cache_seqlens=lengths, causal=True)
        lengths.add_(1)
        assert isinstance(out, torch.Tensor)
        return out

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    caches.copy_(whole)
    lengths.copy_(torch.tensor([start, start - 7]))
    for number in range(steps):
        for room, given in zip((q, k, v), tokens[:, number], strict=True):
            room.copy_(given)
        graph.replay()
        for sequence, length in enumerate((start, start - 7)):
            whole[0, sequence, length + number] = tokens[1, number, sequence, 0]
            whole[1, sequence, length + number] = tokens[2, number, sequence, 0]
            keys, values = whole[:, sequence, : length + number + 1].double().unbind(0)
            scores = torch.einsum("hd,jhd->hj", tokens[0, number, sequence, 0].double(), keys) / 8
            want = torch.einsum("hj,jhd->hd", torch.softmax(scores, -1), values)
            assert_close(out[sequence, 0], want, budget(BF16, length + number + 1))
    assert torch.equal(caches, whole)


# --- flash_attn_with_kvcache, and bad input ---


@pytest.mark.parametrize("case", kvcache_suite.CASES, ids=str)
def test_kvcache(case: Any) -> None:
    kvcache_suite.check(case, "cuda")


def test_numbers_that_name_nothing_are_found_in_check_mode_and_harmless_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = Case((900, 40), tokens=2, heads=(8, 2), page=16, poison=0.0)
    made = make(case, "cuda")
    wild = {
        "page_table": made.told["page_table"] + (1 << 20),  # type: ignore[operator]
        "lengths": made.told["lengths"] + (1 << 28),  # type: ignore[operator]
    }
    for name, tensor in wild.items():
        bad = Made(made.q, made.k, made.v, made.told | {name: tensor})
        monkeypatch.setenv("TILEWISE_CHECK", "1")
        with pytest.raises(InvalidInput, match=name):
            run(bad)
        monkeypatch.delenv("TILEWISE_CHECK")
        out, _ = run(bad)
        torch.cuda.synchronize()
        assert out.isfinite().all()


def test_new_keys_with_one_place_are_found_in_check_mode_and_harmless_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sequences that write to one page; a page that does not exist; a length beyond the cache."""
    torch.manual_seed(0)
    q, new = torch.randn(2, 1, 4, 64, device="cuda").half(), torch.randn(2, 1, 2, 64, device="cuda").half()
    room = torch.randn(6, 16, 2, 64, device="cuda").half()
    pages, before = room[1:5], room.clone()
    wild = {
        "more than one new key": ([[0, 3], [1, 3]], [20, 20]),
        "no place for new key": ([[0, 3], [1, 1 << 20]], [20, 20]),
        "places taken": ([[0, 3], [1, 2]], [20, 1 << 28]),
    }
    for text, (table, lengths) in wild.items():
        numbers = (torch.tensor(given, dtype=torch.int32, device="cuda") for given in (table, lengths))
        named = dict(zip(("block_table", "cache_seqlens"), numbers, strict=True))
        monkeypatch.setenv("TILEWISE_CHECK", "1")
        with pytest.raises(InvalidInput, match=text):
            flash_attn_with_kvcache(q, pages, pages, new, new, causal=True, **named)
        monkeypatch.delenv("TILEWISE_CHECK")
        out = flash_attn_with_kvcache(q, pages, pages, new, new, causal=True, **named)
        torch.cuda.synchronize()
        assert out.isfinite().all()
        assert torch.equal(room[[0, 5]], before[[0, 5]])


if __name__ == "__main__":
    os.environ.pop("TILEWISE_CHECK", None)
    for number in (0, 7, 20, 30, -2):
        given = MATRIX[number]
        run(make(given.with_(lengths=tuple(min(n, 600) for n in given.lengths)), "cuda"))
    torch.cuda.synchronize()
