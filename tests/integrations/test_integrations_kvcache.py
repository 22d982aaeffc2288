"""flash_attn_with_kvcache on the CPU against its meaning (kvcache_suite); tests/gpu has the same on a GPU."""

from __future__ import annotations

import argparse
import inspect
import sys

import pytest
import torch

import kvcache_suite as suite
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
    }


@pytest.mark.parametrize("name", refused())
def test_bad_input_is_named(name):
    with pytest.raises(InvalidInput):
        refused()[name]()


def test_what_has_no_room_is_not_written():
    q, new = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 1, 16)
    room = torch.randn(3, 8, 1, 16)
    cache, before = room[1:2], room.clone()
    flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=8, causal=True)
    assert torch.equal(room, before)


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
"""


def test_flash_attns_own_file_runs_against_this_package(tmp_path, monkeypatch):
    """Of a file like theirs: cases are drawn, none of those it would skip at once, and told apart."""
    import flash_attn_own

    for name, module in flash_attn_own.stand_ins().items():
        monkeypatch.setitem(sys.modules, name, module)
    path = tmp_path / "test_flash_attn.py"
    path.write_text(FAKE)
    found = []
    for part in range(2):
        options = argparse.Namespace(file=path, device="cpu", count=40, seed=0, part=(part, 2))
        found += flash_attn_own.run(options)
    assert len(found) == 40
    assert {what for _, _, what in found} == {"passed", "skipped", "AssertionError: two"}
    for _, case, what in found:
        assert ("d=32" in case) == (what == "skipped")
        assert not ("has_leftpad=True" in case and "paged_kv_block_size=256" in case)
