"""flash_attn_with_kvcache on the CPU against its meaning (kvcache_suite); tests/gpu has the same on a GPU."""

from __future__ import annotations

import inspect
import sys

import pytest
import torch

import flash_attn_own
import kvcache_suite as suite
import tilewise
from tilewise import cached
from tilewise.errors import InvalidInput
from tilewise.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache


@pytest.mark.parametrize("case", suite.CASES, ids=str)
def test_meaning(case):
    suite.check(case, "cpu")


def test_the_signature_of_flash_attn_2_8():
    names = (
        "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad block_table "
        "softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits return_softmax_lse"
    )
    parameters = list(inspect.signature(flash_attn_with_kvcache).parameters.values())
    assert [one.name for one in parameters if one.kind is not one.KEYWORD_ONLY] == names.split()


def test_packed_queries_against_pages_are_those_of_gathered_keys():
    torch.manual_seed(0)
    k, v = torch.randn(2, 9, 16, 2, 32).unbind(0)
    table = torch.tensor([[4, 1, 7], [0, 3, 8]])
    lengths, tokens = (40, 21), (7, 3)
    cu_q, cu_k = (torch.tensor([0, n[0], sum(n)], dtype=torch.int32) for n in (tokens, lengths))
    q = torch.randn(10, 4, 32)
    gathered = [torch.cat([x[row].flatten(0, 1)[:n] for row, n in zip(table, lengths, strict=True)]) for x in (k, v)]
    want = flash_attn_varlen_func(q, *gathered, cu_q, cu_k, 7, 40, causal=True)
    got = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 7, 40, causal=True, block_table=table)
    torch.testing.assert_close(got, want)


def refused():
    q, cache, new = torch.randn(2, 1, 4, 16), torch.randn(2, 32, 2, 16), torch.randn(2, 1, 2, 16)
    lengths, table = torch.tensor([3, 4], dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    return {
        "keys without values": lambda: flash_attn_with_kvcache(q, cache, cache, new, cache_seqlens=lengths),
        "an append without lengths": lambda: flash_attn_with_kvcache(q, cache, cache, new, new),
        "new keys of other heads": lambda: flash_attn_with_kvcache(q, cache, cache, q, q, cache_seqlens=lengths),
        "a length beyond the cache": lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths + 30),
        "a page that does not exist": lambda: flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, block_table=table + 2
        ),
        "rows and pages": lambda: flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, block_table=table, cache_batch_idx=lengths
        ),
        "fewer rows than sequences": lambda: flash_attn_with_kvcache(q, cache[:1], cache[:1], cache_seqlens=lengths),
        "slopes": lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, alibi_slopes=torch.ones(3)),
        "no scale": lambda: flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, softmax_scale=0.0),
        "complex slopes": lambda: flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, alibi_slopes=torch.ones(4, dtype=torch.complex64)
        ),
        "rotary tables without new keys": lambda: flash_attn_with_kvcache(
            q, cache, cache, cache_seqlens=lengths, rotary_cos=torch.ones(32, 8), rotary_sin=torch.ones(32, 8)
        ),
    }


# What is wrong beside new keys for two sequences in caches of 32 places, or in pages of 16.
WRONG = {
    "no cosines": {"rotary_cos": None},
    "no sines": {"rotary_sin": None},
    "angles for fewer places than the cache has": {"rotary_cos": torch.ones(31, 8), "rotary_sin": torch.ones(31, 8)},
    "more angles than columns": {"rotary_cos": torch.ones(32, 9), "rotary_sin": torch.ones(32, 9)},
    "angles that are integers": {"rotary_cos": torch.ones(32, 8).int()},
    "a position behind all angles": {"cache_seqlens": 31, "q": torch.randn(2, 2, 4, 16), "causal": True},
    "softcap": {"softcap": -1.0},
    "scale": {"softmax_scale": 0.0},
    "fractions of a window": {"window_size": (1.5, 0)},
    "a fraction as the length": {"cache_seqlens": 1.5},
    "fractions as lengths": {"cache_seqlens": torch.tensor([1.5, 2.0])},
    "a list of lengths": {"cache_seqlens": [3, 4]},
    "too many lengths": {"cache_seqlens": torch.tensor([3, 4, 5], dtype=torch.int32)},
    "one length for two": {"cache_seqlens": torch.tensor(3, dtype=torch.int32)},
    "a length below none": {"cache_seqlens": -2},
    "rows that are no numbers": {"cache_batch_idx": torch.tensor([0.0, 1.0])},
    "a row that does not exist": {"cache_batch_idx": torch.tensor([0, 2], dtype=torch.int32)},
    "padding behind the cache": {"cache_leftpad": torch.tensor([0, 33], dtype=torch.int32)},
    "a page that does not exist": {"block_table": torch.tensor([[0, 1], [2, 4]], dtype=torch.int32)},
    "a page whose number has 33 bits": {"block_table": torch.tensor([[0, 1], [2, 2**32 + 3]])},
    "pages of one sequence": {"block_table": torch.tensor([0, 1], dtype=torch.int32)},
    "one page": {"block_table": torch.tensor(0, dtype=torch.int32)},
    "fewer sequences with pages": {"block_table": torch.tensor([[0, 1]], dtype=torch.int32)},
    "a list of slopes": {"alibi_slopes": [0.5] * 4},
    "angles on another device": {"rotary_cos": torch.ones(32, 8, device="meta")},
    "sparse angles": {"rotary_sin": torch.ones(32, 8).to_sparse()},
    "new keys on another device": {"k": torch.randn(2, 1, 2, 16, device="meta")},
    "sparse new values": {"v": torch.randn(2, 1, 2, 16).to_sparse()},
    "complex slopes": {"alibi_slopes": torch.ones(4, dtype=torch.complex64)},
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_written_before_everything_is_checked(name):
    paged = "block_table" in WRONG[name]
    caches = [torch.randn(4, 16, 2, 16) if paged else torch.randn(2, 32, 2, 16) for _ in range(2)]
    before = [cache.clone() for cache in caches]
    k, v = torch.randn(2, 2, 1, 2, 16).unbind(0)
    angles = torch.rand(32, 8)
    given = {"q": torch.randn(2, 1, 4, 16), "rotary_cos": angles.cos(), "rotary_sin": angles.sin(), "cache_seqlens": 20}
    with pytest.raises(InvalidInput):
        flash_attn_with_kvcache(k_cache=caches[0], v_cache=caches[1], **(given | {"k": k, "v": v} | WRONG[name]))
    assert all(map(torch.equal, caches, before))


def test_one_compiled_graph_appends_and_attends():
    def step(q, k_cache, v_cache, k, v, cos, sin, lengths):
        return flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cos, sin, lengths, causal=True, window_size=(5, 0))

    q, angles = torch.randn(2, 1, 4, 16), torch.rand(32, 8)
    k, v = torch.randn(2, 2, 1, 2, 16).unbind(0)
    caches = torch.randn(2, 2, 32, 2, 16)
    others = caches.clone()
    more = (k, v, angles.cos(), angles.sin(), torch.tensor([7, 3], dtype=torch.int32))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, *caches.unbind(0), *more), step(q, *others.unbind(0), *more))
    torch.testing.assert_close(caches, others)


def test_float64_is_rotated_in_float64():
    q, k = torch.randn(1, 1, 2, 16, dtype=torch.float64), torch.randn(1, 1, 2, 16, dtype=torch.float64)
    cache, angles = torch.zeros(1, 8, 2, 16, dtype=torch.float64), torch.rand(8, 8, dtype=torch.float64)
    flash_attn_with_kvcache(q, cache, cache.clone(), k, k, angles.cos(), angles.sin(), cache_seqlens=5)
    want = suite.rotated(k[0, 0], angles.cos(), angles.sin(), 5, True)
    assert (cache[0, 5] - want).abs().max() < 1e-14


@pytest.mark.parametrize("name", refused())
def test_bad_input_is_named(name):
    with pytest.raises(InvalidInput):
        refused()[name]()


@pytest.mark.parametrize(
    ("name", "error"),
    {
        "a length beyond the cache": "cache_seqlens: got 34 among its numbers, expected 0 to 32, the places of the",
        "a page that does not exist": "block_table: got 2 among its numbers, expected 0 to 1, the pages",
        "rows and pages": "cache_batch_idx: got beside a block_table",
        "no scale": "softmax_scale: got 0.0",
        "complex slopes": "alibi_slopes: got a tensor of torch.complex64",
    }.items(),
)
def test_what_is_wrong_has_the_name_and_the_type_that_flash_attn_gives_it(name, error):
    with pytest.raises(RuntimeError, match=f"^{error}"):
        refused()[name]()


def test_a_length_beyond_the_pages_names_them():
    q, cache = torch.randn(1, 1, 4, 16), torch.randn(4, 8, 2, 16)
    length, table = torch.tensor([16], dtype=torch.int32), torch.zeros(1, 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"^cache_seqlens: got 17 .* the places that block_table gives a sequence"):
        flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length + 1, block_table=table)


def overlapping():
    """Appends of two new keys by three sequences that write to one place."""
    q, new, lengths = torch.randn(3, 2, 4, 16), torch.randn(3, 2, 2, 16), torch.tensor([3, 9, 9], dtype=torch.int32)
    cache, pages = torch.randn(4, 32, 2, 16), torch.randn(6, 8, 2, 16)
    own = torch.tensor([[0, 1], [0, 2], [0, 3]], dtype=torch.int32)  # a page that is read by all, and written by one
    return {
        "one row for two": lambda lengths=lengths: cached.append(
            cache, cache.clone(), new, new, lengths, q=q, rows=torch.tensor([2, 1, 1], dtype=torch.int32)
        ),
        "one page for two": lambda lengths=lengths: cached.append(
            pages, pages.clone(), new, new, lengths, q=q, page_table=own - (own == 3).int()
        ),
        "one page twice in a sequence": lambda lengths=lengths: cached.append(
            torch.randn(6, 1, 2, 16), torch.randn(6, 1, 2, 16), new[:1], new[:1], lengths[:1] * 0, q=q[:1],
            page_table=torch.tensor([[4, 4]], dtype=torch.int32),
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", overlapping())
def test_new_keys_that_would_have_one_place_are_refused(name):
    with pytest.raises(InvalidInput, match="for more than one new key"):
        overlapping()[name]()


def test_shared_rows_and_pages_are_right_where_places_differ():
    overlapping()["one row for two"](torch.tensor([3, 9, 11], dtype=torch.int32))
    overlapping()["one page for two"](torch.tensor([3, 9, 11], dtype=torch.int32))
    padded = torch.tensor([3, 9, -7], dtype=torch.int32)
    overlapping()["one page for two"](padded)  # a sequence that is none


def test_new_keys_without_a_place_are_refused_where_checks_are_asked_for(monkeypatch):
    q, new, pages = torch.randn(2, 2, 4, 16), torch.randn(2, 2, 2, 16), torch.randn(6, 8, 2, 16)
    table = torch.tensor([[0, 1], [2, 7]], dtype=torch.int32)

    def append(*lengths):
        lengths = torch.tensor(lengths, dtype=torch.int32)
        return cached.append(pages, pages.clone(), new, new, lengths, q=q, page_table=table)[1].tolist()

    monkeypatch.delenv("TILEWISE_CHECK", raising=False)
    assert append(15, 7) == [16, 9]
    monkeypatch.setenv("TILEWISE_CHECK", "0")
    assert append(15, 7) == [16, 9]
    monkeypatch.setenv("TILEWISE_CHECK", "1")
    assert append(14, 6) == [16, 8]
    assert append(14, -2) == [16, 0]
    with pytest.raises(InvalidInput, match="15 places taken and 2 new keys"):
        append(15, 6)
    with pytest.raises(InvalidInput, match="no place for new key 1 of sequence 1"):
        append(14, 7)


def test_what_has_no_room_is_not_written():
    q, new = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 1, 16)
    room = torch.randn(3, 8, 1, 16)
    cache, before = room[1:2], room.clone()
    flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=8, causal=True)
    assert torch.equal(room, before)


@pytest.mark.parametrize("change", ["no new keys", "no pages"])
def test_an_append_of_nothing_writes_nothing(change):
    q, cache = torch.randn(2, 1, 4, 16), torch.randn(2, 8, 2, 16)
    before = cache.clone()
    new = torch.randn(2, 0 if change == "no new keys" else 1, 2, 16)
    pages = {"block_table": torch.zeros(2, 0, dtype=torch.int32)} if change == "no pages" else {}
    length = 0 if pages else 5
    got = flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=length, causal=True, **pages)
    want = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=length, causal=True, **pages)
    assert torch.equal(got, want)
    assert torch.equal(cache, before)


@pytest.mark.parametrize(
    "length", [torch.tensor([2**32 + 5]), torch.tensor([2**31 - 1], dtype=torch.int32), 2**40], ids=str
)
def test_a_length_beyond_all_caches_is_one_of_a_full_cache(length):
    q, new, cache = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 1, 16), torch.randn(1, 8, 1, 16)
    want = flash_attn_with_kvcache(q, cache, cache, cache_seqlens=8)
    assert torch.equal(flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=length), want)


@pytest.mark.parametrize("number", [-1, 2])
@pytest.mark.parametrize("paged", [False, True])
def test_a_page_or_row_just_outside_is_not_written(paged, number):
    """The next to the last is no other's, as it would be if it were clamped."""
    q, new = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 1, 16)
    cache = torch.randn(2, 4, 1, 16)
    before = cache.clone()
    pages = {"page_table": torch.tensor([[0, number]], dtype=torch.int32)}
    rows = {"rows": torch.tensor([number], dtype=torch.int32)}
    cached.append(
        cache, cache.clone(), new, new, torch.tensor([5 if paged else 1]).int(), q=q, **(pages if paged else rows)
    )
    assert torch.equal(cache, before)
    with pytest.raises(InvalidInput, match=f"{number} among its numbers"):
        tilewise.attention_cached(
            q, cache, cache, torch.tensor([7 if paged else 3]).int(), **(pages if paged else rows)
        )


FAKE = """
import pytest
import torch
from flash_attn import flash_attn_with_kvcache
from flash_attn.bert_padding import pad_input, unpad_input
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

is_sm90 = torch.cuda.get_device_capability("cuda") == (9, 0)


@pytest.mark.parametrize("alibi", [False])
@pytest.mark.parametrize("new_kv", [True])
@pytest.mark.parametrize("rotary_fraction", [1.0])
@pytest.mark.parametrize("paged_kv_block_size", [None, 256])
@pytest.mark.parametrize("has_leftpad", [True, False])
@pytest.mark.parametrize("has_batch_idx", [False])
@pytest.mark.parametrize("d", [16, 32])
@pytest.mark.parametrize("seqlen_q,seqlen_k", [(1, 8), (2, 6)])
def test_flash_attn_kvcache(
    seqlen_q, seqlen_k, d, has_batch_idx, has_leftpad, paged_kv_block_size, rotary_fraction, new_kv, alibi
):
    device = "cuda"
    q, k, v = (torch.randn(1, seqlen_q, 2, d, device=device) for _ in range(3))
    angles = torch.rand(seqlen_k, d // 2, device=device)
    caches = [torch.zeros(1, seqlen_k, 2, d, device=device) for _ in range(2)]
    lengths = torch.tensor([3], dtype=torch.int32, device=device)
    flash_attn_with_kvcache(q, *caches, k, v, angles.cos(), angles.sin(), cache_seqlens=lengths, causal=True)
    want = apply_rotary_emb(k, angles.cos(), angles.sin(), interleaved=True, seqlen_offsets=lengths)
    assert torch.allclose(caches[0][:, 3 : 3 + seqlen_q], want)
    if d == 32:
        pytest.skip("not here")
    assert seqlen_q == 1, "two"


@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@pytest.mark.parametrize("softcap", [0.0, 50.0])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seqlen", [8, 1024])
def test_flash_attn_output(seqlen, deterministic, softcap, dropout_p):
    assert softcap == 0.0
    if dropout_p:
        raise ImportError("not of a private name")


def test_flash_attn_generator_arg_must_be_none():
    from flash_attn.flash_attn_interface import flash_attn_gpu
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """What flash_attn_own finds in a file like theirs, given options."""
    for name, module in flash_attn_own.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    path = tmp_path / "test_flash_attn.py"
    path.write_text(FAKE)

    def run(*given):
        return list(flash_attn_own.run(flash_attn_own.options_of([str(path), "--device", "cpu", *given])))

    return run


def test_flash_attns_own_file_runs_against_this_package(own):
    """All cases but those that it would skip at once, each in one process, and told apart."""
    found = [one for part in range(2) for one in own("--all", "--jobs", "2", "--part", str(part))]
    cached = [one for one in found if one.test == "test_flash_attn_kvcache"]
    assert len(cached) == len({one.number for one in cached}) == 12
    assert {one.what for one in cached} == {"passed", "skipped", "AssertionError: two"}
    for one in cached:
        assert ("d=32" in one.case) == (one.what == "skipped")
        assert not ("has_leftpad=True" in one.case and "paged_kv_block_size=256" in one.case)
    assert flash_attn_own.counts(found) == {
        "test_flash_attn_generator_arg_must_be_none": counted(allowed=1),
        "test_flash_attn_kvcache": counted(passed=3, failed=3, skipped=6),
        "test_flash_attn_output": counted(passed=2, failed=4),
        "all": counted(passed=5, failed=7, allowed=1, skipped=6),
    }
    lines = flash_attn_own.summary(found).splitlines()
    assert [line for line in lines if line.startswith("failed: test_flash_attn_output")] == [
        "failed: test_flash_attn_output, 2 times: ImportError: not of a private name",
        "failed: test_flash_attn_output, 2 times: AssertionError: line 41: assert softcap == 0.0",
    ]
    assert lines[-1].endswith("(calls flash_attn_gpu, their compiled module)")


def counted(**numbers):
    return dict.fromkeys(flash_attn_own.KINDS, 0) | {name.replace("_", " "): n for name, n in numbers.items()}


def test_cases_of_flash_attns_own_file_are_drawn(own):
    """As many as asked for, of one test, others with another seed; one by its number; none after the time."""
    given = ("--only", "test_flash_attn_kvcache", "--count", "6")
    first, again, other = own(*given), own(*given), own(*given, "--seed", "1")
    assert first == again
    assert len(first) == len(other) == 6
    assert {one.number for one in first} != {one.number for one in other}
    assert own(*given, "--case", str(first[3].number)) == [first[3]]
    assert {one.what for one in own(*given, "--minutes", "-1")} == {"not run"}


def test_flash_attns_own_file_runs_in_processes(own, tmp_path):
    options = flash_attn_own.options_of([str(tmp_path / "test_flash_attn.py"), "--device", "cpu", "--jobs", "2"])
    assert sorted(flash_attn_own.in_processes(options)) == sorted(own("--count", "40"))


def test_what_flash_attns_own_file_imports():
    x = torch.arange(2 * 3 * 4).view(2, 3, 4)
    rearrange = flash_attn_own.rearrange
    assert torch.equal(rearrange(x, "b s d -> (b s) 1 d"), x.view(6, 1, 4))
    assert torch.equal(rearrange(x, "b s ... -> s b ..."), x.transpose(0, 1))
    assert torch.equal(rearrange(x, "b s (h g) -> b h (s g)", g=2), x.view(2, 3, 2, 2).transpose(1, 2).flatten(2))
    assert torch.equal(rearrange(x, "b s d -> b s (d g)", g=2), x.repeat_interleave(2, -1))
    assert torch.equal(rearrange(x[0, 0], "d -> b 1 d", b=2), x[0, 0].expand(2, 1, 4))
    mask = torch.tensor([[True, False, True], [True, False, False]])
    rows, indices, offsets, longest, lengths = flash_attn_own.unpad_input(x, mask)
    assert torch.equal(rows, x[mask])
    assert (offsets.tolist(), longest, lengths.tolist()) == ([0, 2, 3], 2, [2, 1])
    assert torch.equal(flash_attn_own.pad_input(rows, indices, 2, 3), x * mask[..., None])
