"""Attention of one sequence in float64, one score at a time, from the documentation of flash-attn and of caches.

It shares nothing with the package: no mask, no bias and no softmax of ours.
"""

from __future__ import annotations

import math

import torch

Tensor = torch.Tensor


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = False,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    slopes: Tensor | None = None,
    sink: Tensor | None = None,
    keep: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out (rows, heads, dim) and lse (heads, rows) of q (rows, heads, dim) and k, v (keys, heads_kv, dim).

    "If seqlen_q != seqlen_k, the causal mask is aligned to the bottom right corner"; "query at position i will only
    attend to keys between [i + seqlen_k - seqlen_q - left, i + seqlen_k - seqlen_q + right] inclusive"; "a bias of
    (-alibi_slope * |i + seqlen_k - seqlen_q - j|) is added"; "if the row of the mask is all zero, the output is zero".
    A sink (heads,) has a share of every row's weights; `keep` (heads or 1, rows, keys) says which keys a row may see.
    """
    (rows, heads, dim), keys = q.shape, len(k)
    q, k, v = q.double(), *(x.double().repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * (scale or 1 / math.sqrt(dim))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    i = torch.arange(rows, device=q.device)[:, None] + keys - rows
    j = torch.arange(keys, device=q.device)[None]
    if slopes is not None:
        scores = scores - slopes.double()[:, None, None] * (i - j).abs()
    left, right = window[0], 0 if causal else window[1]
    hidden = torch.zeros_like(scores, dtype=torch.bool) if keep is None else ~keep.expand_as(scores)
    if left >= 0:
        hidden = hidden | (j < i - left)
    if right >= 0:
        hidden = hidden | (j > i + right)
    scores = scores.masked_fill(hidden, -torch.inf)
    # Beside a sink; without one beside nothing, so that a row has a sum also where there are no keys.
    none = torch.full((heads,), -torch.inf, dtype=torch.float64, device=q.device)
    beside = (none if sink is None else sink.double())[:, None, None].expand(heads, rows, 1)
    lse = torch.logsumexp(torch.cat([scores, beside], -1), -1)
    weights = torch.where(hidden, 0.0, torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]))
    return torch.einsum("hij,jhd->ihd", weights, v), lse
