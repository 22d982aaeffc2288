"""What `flash_attn_with_kvcache` means, in float64, and checks of any device against it.

The reference goes sequence by sequence and place by place, as flash-attn documents the function: new keys are rotated
and written behind the old ones, queries are rotated, and each sequence attends to what its cache holds then. It shares
nothing with the package.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from one_sequence import attend
from support import rounding_budget
from tilewise.integrations.flash_attn import flash_attn_with_kvcache

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A call. `rotary`: its share of head_dim, 0 = none; `page` 0: the cache is in one piece per sequence."""

    lengths: tuple[int, ...] = (5, 37, 0)
    seq_q: int = 1
    new: int = 1
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    capacity: int = 64
    page: int = 0
    rotary: float = 0.0
    interleaved: bool = True
    causal: bool = True
    window: tuple[int, int] = (-1, -1)
    leftpad: bool = False
    batch_idx: bool = False
    softcap: float = 0.0
    alibi: bool = False
    as_int: bool = False  # cache_seqlens is one number
    dtype: torch.dtype = torch.bfloat16
    invariant: bool = False

    def __str__(self) -> str:
        words = [f"{self.lengths}".replace(" ", ""), f"q{self.seq_q}", f"new{self.new}", f"d{self.head_dim}"]
        words += [f"page{self.page}"] * (self.page > 0) + [f"rotary{self.rotary}"] * (self.rotary > 0)
        flags = ("interleaved", "causal", "leftpad", "batch_idx", "alibi", "as_int", "invariant")
        words += [name for name in flags if getattr(self, name)]
        words += [f"window{self.window}".replace(" ", "")] * (self.window != (-1, -1))
        return " ".join([*words, *([f"softcap{self.softcap:g}"] if self.softcap else []), str(self.dtype)[6:]])


def check(case: Case, device: str) -> None:
    """A call gives what the reference gives, and leaves in the caches what it leaves."""
    torch.manual_seed(0)
    batch, (heads, heads_kv), dim = len(case.lengths), case.heads, case.head_dim
    lengths = (case.lengths[0],) * batch if case.as_int else case.lengths
    q = torch.randn(batch, case.seq_q, heads, dim).to(case.dtype)
    k, v = (torch.randn(batch, case.new, heads_kv, dim).to(case.dtype) for _ in range(2))
    pages = -(-case.capacity // case.page) if case.page else 0
    shape = (batch * pages + 2, case.page) if case.page else (batch + 2 * case.batch_idx, case.capacity)
    k_cache, v_cache = (torch.randn(*shape, heads_kv, dim).to(case.dtype) for _ in range(2))
    table = torch.randperm(shape[0])[: batch * pages].view(batch, pages).int() if case.page else None
    rows = torch.randperm(shape[0])[:batch].int() if case.batch_idx else None
    leftpad = torch.tensor([min(length, 3) for length in lengths], dtype=torch.int32) if case.leftpad else None
    half = int(case.rotary * dim) // 2
    angles = torch.rand(case.capacity + 8, half) * 2 * math.pi
    cos, sin = (angles.cos().to(case.dtype), angles.sin().to(case.dtype)) if half else (None, None)
    slopes = torch.rand(batch, heads) / 8 if case.alibi else None

    want_k, want_v = k_cache.clone(), v_cache.clone()
    want_out, want_lse = [], []
    for n in range(batch):

        def place(p: int, n: int = n) -> tuple[int, int]:
            if table is not None:
                return int(table[n, p // case.page]), p % case.page
            return (int(rows[n]) if rows is not None else n), p

        for i in range(case.new):
            at = lengths[n] + i
            want_k[place(at)] = rotated(k[n, i].double(), cos, sin, at, case.interleaved).to(case.dtype)
            want_v[place(at)] = v[n, i]
        told_apart = case.causal or case.window != (-1, -1)
        own_q = torch.stack(
            [
                rotated(q[n, i].double(), cos if case.new else None, sin, lengths[n] + i * told_apart, case.interleaved)
                for i in range(case.seq_q)
            ]
        ).to(case.dtype)
        first = int(leftpad[n]) if leftpad is not None else 0
        end = lengths[n] + case.new
        keys, values = (
            torch.stack([cache[place(p)] for p in range(first, end)]) if end > first else cache[0, :0]
            for cache in (want_k, want_v)
        )
        options = {"causal": case.causal, "window": case.window, "softcap": case.softcap}
        out, lse = attend(own_q, keys, values, slopes=None if slopes is None else slopes[n], **options)
        want_out.append(out)
        want_lse.append(lse)

    def there(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.to(device)

    got_k, got_v = k_cache.to(device, copy=True), v_cache.to(device, copy=True)
    seqlens = lengths[0] if case.as_int else torch.tensor(lengths, dtype=torch.int32, device=device)
    out, lse = flash_attn_with_kvcache(
        q.to(device), got_k, got_v, there(k) if case.new else None, there(v) if case.new else None, there(cos),
        there(sin), seqlens, there(rows), there(leftpad), there(table), causal=case.causal, window_size=case.window,
        softcap=case.softcap, rotary_interleaved=case.interleaved, alibi_slopes=there(slopes), return_softmax_lse=True,
        batch_invariant=case.invariant,
    )  # fmt: skip
    assert torch.equal(got_v.cpu(), want_v)
    step = torch.finfo(case.dtype).eps
    assert (got_k.cpu().double() - want_k.double()).abs().max() <= step * 4, "rotation rounds once"
    out, truth = out.cpu().double(), torch.stack(want_out)
    assert out.shape == truth.shape
    error = (out - truth).norm() / truth.norm().clamp(min=1e-9)
    allowed = (
        rounding_budget(case.dtype, 2) + (2 * step if half else 0) + 1e-6
    )  # of rotated q and k that round otherwise
    assert error <= allowed, f"{case}: out is off by {error:.2e}, allowed {allowed:.2e}"
    lse, truth = lse.cpu().double(), torch.stack(want_lse)
    none = truth == -math.inf
    assert (lse[none] == -math.inf).all()
    assert (lse - truth)[~none].abs().max() <= (4e-2 if half else 1e-3)


def rotated(x: Tensor, cos: Tensor | None, sin: Tensor | None, at: int, interleaved: bool) -> Tensor:
    """x (heads, head_dim) by the angles of a place."""
    if cos is None or sin is None:
        return x
    half, out = cos.shape[1], x.clone()
    for i in range(half):
        first, second = (2 * i, 2 * i + 1) if interleaved else (i, half + i)
        c, s = float(cos[at, i]), float(sin[at, i])
        out[:, first], out[:, second] = x[:, first] * c - x[:, second] * s, x[:, first] * s + x[:, second] * c
    return out


CASES = [
    Case(),
    Case(new=0, lengths=(5, 37, 0), seq_q=2),
    Case(as_int=True, seq_q=3, new=3),
    Case(page=16, seq_q=4, new=4),
    Case(page=16, seq_q=2, new=5, rotary=1.0, dtype=torch.float16),
    Case(page=32, seq_q=3, new=3, rotary=0.5, interleaved=False),
    Case(seq_q=3, new=3, rotary=1.0, interleaved=False, causal=False),
    Case(seq_q=2, new=2, rotary=0.5, causal=False, window=(7, 3), dtype=torch.float16),
    Case(seq_q=2, new=1, window=(9, -1)),
    Case(leftpad=True, seq_q=2, new=2),
    Case(leftpad=True, page=16, new=1),
    Case(batch_idx=True, seq_q=2, new=2, softcap=15.0),
    Case(alibi=True, seq_q=3, new=3, page=16),
    Case(heads=(8, 1), seq_q=8, new=8, page=16, invariant=True),
    Case(head_dim=128, heads=(4, 4), seq_q=1, new=1, page=64),
]
