"""Parts of a longer sequence: bands at any offset, in every form of a call and in the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import emulation
import tilewise
from support import assert_close, budget, check_against_the_reference, exact, make_inputs, make_problem
from tilewise import Causal, Target, Window
from tilewise.partials import Partial, merge_all
from tilewise.plan import BACKENDS

if TYPE_CHECKING:
    from tilewise.masks import Band

CPU, H200, A100 = (Target.named(name) for name in ("cpu", "h200", "a100"))
WHOLE = [Causal(), Causal("bottom-right"), Window(7, 0), Window(5, 3, offset=-4)]


def shard_of(band: Band, first_row: int, first_key: int) -> Window:
    """The part of a band from a row and a key on."""
    left, right = (size if size < 1000 else None for size in (band.left, band.right))
    return Window(left, right, offset=band.offset + first_row - first_key)


@pytest.mark.parametrize("mask", WHOLE, ids=str)
def test_shards_of_a_sequence_merge_into_the_whole(mask):
    """As in context parallelism: every rank has some rows, and the keys of one rank after another."""
    problem = make_problem((2, 4, 24, 8), torch.float64, heads_kv=2, seq_kv=36, mask=mask)
    q, k, v = make_inputs(problem)
    whole, lse = exact(q, k, v, problem)
    for rows in (slice(0, 7), slice(7, 24)):
        parts = []
        for keys in (slice(0, 11), slice(11, 30), slice(30, 36)):
            shard = shard_of(mask.band(24, 36), rows.start, keys.start)
            part = tilewise.attention(
                q[:, :, rows], k[:, :, keys], v[:, :, keys], mask=shard, return_lse=True, backend="tiled"
            )
            parts.append(Partial(*part))
        merged = merge_all(parts)
        assert_close(merged.out, whole[:, :, rows], budget(torch.float64, 36))
        assert_close(merged.lse, lse[:, :, rows], budget(torch.float64, 36), "lse")


@pytest.mark.parametrize(
    "name", [name for name in BACKENDS if not BACKENDS[name].why_not(make_problem((1, 1, 8, 8)), CPU)]
)
@pytest.mark.parametrize("mask", [Causal(offset=-20), Window(2, 2, offset=99), Window(0, 0, offset=-5)], ids=str)
def test_rows_that_see_no_key_give_out_zero(name, mask):
    problem = make_problem((1, 2, 16, 8), mask=mask, needs_grad=True)
    q, k, v = make_inputs(problem)
    out = tilewise.attention(*(tensor.requires_grad_() for tensor in (q, k, v)), mask=mask, backend=name)
    unseen = ~mask.to_bool(range(16), range(16), 16, 16).any(-1)
    assert unseen.any()
    assert (out[:, :, unseen] == 0).all()
    if not BACKENDS[name].why_not(problem.with_(needs_lse=True), CPU):
        _, lse = tilewise.attention(q, k, v, mask=mask, return_lse=True, backend=name)
        assert torch.equal(lse.isneginf().any((0, 1)), unseen)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(grad.isfinite().all() for grad in grads)
    assert (grads[0][:, :, unseen] == 0).all()


@pytest.mark.parametrize("inner", [Causal(offset=2), Causal("bottom-right", -2), Window(3, 0, offset=1)], ids=str)
def test_packed_sequences_have_the_offset_each(inner):
    starts_q, starts_k = (torch.tensor(starts, dtype=torch.int32) for starts in ((0, 5, 5, 14), (0, 7, 9, 20)))
    q, k, v = torch.randn(14, 4, 8), torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    got = tilewise.attention_packed(q, k, v, starts_q, starts_k, mask=inner)
    for (q0, q1), (k0, k1) in (((0, 5), (0, 7)), ((5, 14), (9, 20))):
        one = [tensor[None, a:b].transpose(1, 2) for tensor, a, b in ((q, q0, q1), (k, k0, k1), (v, k0, k1))]
        want = tilewise.attention(*one, mask=inner, backend="reference")
        assert_close(got[q0:q1], want[0].transpose(0, 1), budget(torch.float32, 20))


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("inner", [Causal(offset=2), Window(3, 0, "bottom-right", -1)], ids=str)
def test_documents_of_a_tensor_have_the_offset_each(inner, same):
    starts_q = (0, 5, 5, 14)
    starts_k = starts_q if same else (0, 7, 9, 20)
    q, k, v = torch.randn(1, 4, 14, 8), torch.randn(1, 2, starts_k[-1], 8), torch.randn(1, 2, starts_k[-1], 8)
    mask = tilewise.Documents(starts_q, starts_k, inner)
    seen = mask.to_bool(range(14), range(starts_k[-1]), 14, starts_k[-1])
    want = tilewise.attention(q, k, v, mask=seen, backend="reference")
    for backend in ("tiled", "reference", "torch-math"):
        assert_close(tilewise.attention(q, k, v, mask=mask, backend=backend), want, budget(torch.float32, 20))


@pytest.mark.parametrize("inner", [Causal("bottom-right", -2), Window(3, 0, "bottom-right", 1)], ids=str)
def test_a_cache_has_the_offset_in_each_sequence(inner):
    lengths = torch.tensor([9, 4], dtype=torch.int32)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 16, 2, 8), torch.randn(2, 16, 2, 8)
    got = tilewise.attention_cached(q, k, v, lengths, mask=inner)
    for n, length in enumerate(lengths.tolist()):
        one = q[n : n + 1], k[n : n + 1, :length], v[n : n + 1, :length]
        want = tilewise.attention(*one, mask=inner, backend="reference", layout="bshd")
        assert_close(got[n : n + 1], want, budget(torch.float32, 9))


@pytest.mark.parametrize("family", ["sm80", "sm90"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (Causal(offset=-70), (150, 90)),
        (Causal(offset=45), (90, 150)),
        (Causal(offset=200), (70, 90)),
        (Causal(offset=-200), (70, 90)),
        (Window(30, 4, offset=-50), (150, 90)),
        (Window(10, 0, "bottom-right", 25), (70, 140)),
    ],
    ids=str,
)
@emulation.emulated
def test_shards_in_the_kernels_both_ways(monkeypatch, family, dtype, mask, lengths):
    backend, target = BACKENDS[family], H200 if family == "sm90" else A100
    problem = make_problem((1, 2, lengths[0], 64), dtype, heads_kv=1, seq_kv=lengths[1], mask=mask, needs_grad=True)
    emulation.install(monkeypatch)
    allowed = budget(dtype, lengths[1]), 2 * budget(dtype, lengths[1])
    lse = check_against_the_reference(backend, target, problem, {}, make_inputs(problem), allowed=allowed)
    assert_close(*lse, budget(torch.float32, lengths[1]), "lse")
