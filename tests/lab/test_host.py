"""The suite `host`: what is called, with which tensors. Nothing here is timed."""

from __future__ import annotations

import torch

from support import assert_close, budget
from tilewise import attention
from tilewise.lab.studies import host

SHAPE = (3, 2, 8, 16)


def test_every_way_and_kind_of_call_has_a_sample_of_every_round() -> None:
    costs = host.measure("cpu", SHAPE, torch.float32, rounds=2)
    assert {(cost.kind, cost.way) for cost in costs} == {
        (kind, way.name) for kind in host.KINDS for way in host.ways("cpu")
    }
    assert {len(cost.seconds) for cost in costs} == {2}


def test_packed_sequences_are_called_where_they_have_a_kernel() -> None:
    assert [way.name for way in host.ways("cuda") if way.packed] == ["tilewise.attention_packed"]
    assert not any(way.packed for way in host.ways("cpu"))


def test_the_packed_call_attends_as_the_batched_one() -> None:
    (way,) = (way for way in host.ways("cuda") if way.packed)
    batch, heads, seq, dim = SHAPE
    q, k, v = torch.randn(3, *SHAPE)
    rows = [tensor.transpose(1, 2).reshape(batch * seq, heads, dim) for tensor in (q, k, v)]
    out = way.call(*rows, batch, seq).view(batch, seq, heads, dim).transpose(1, 2)
    assert_close(out, attention(q, k, v).double(), budget(torch.float32, seq))
