"""flash_attn_with_kvcache on the CPU against its meaning (kvcache_suite); tests/gpu has the same on a GPU."""

from __future__ import annotations

import inspect

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
