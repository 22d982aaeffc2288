"""Attention in float64, with its gradients and error bounds, written apart from the package: it imports nothing of it.

Everything is dense and literal: which pairs are visible is decided element by element from the documented rules, heads
that share keys get copies of them, and every score is held at once.

The bounds are those of a forward error analysis. A backend that works with relative error t (see `support.budget`)
computes each score to t * S, with S the sum of the absolute products; the weight p = exp(s - top) / total is then right
to p * t * (1 + 2 S), and what is summed from it to the same sum with absolute values.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch

Tensor = torch.Tensor


def band(rows: int, keys: int, left: int | None, right: int | None, align: str) -> Tensor:
    """Row i stands at key i (top-left), or at i + keys - rows (bottom-right), and sees so many before and after it."""
    shift = keys - rows if align == "bottom-right" else 0
    distance = torch.arange(keys)[None, :] - torch.arange(rows)[:, None] - shift
    visible = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None:
        visible &= distance >= -left
    if right is not None:
        visible &= distance <= right
    return visible


def documents(
    starts_q: tuple[int, ...], starts_kv: tuple[int, ...], left: int | None, right: int | None, align: str
) -> Tensor:
    visible = torch.zeros(starts_q[-1], starts_kv[-1], dtype=torch.bool)
    for (q0, q1), (k0, k1) in zip(pairwise(starts_q), pairwise(starts_kv), strict=True):
        visible[q0:q1, k0:k1] = band(q1 - q0, k1 - k0, left, right, align)
    return visible


class Attention(NamedTuple):
    """What is computed beside q, k and v. `visible` and `bias` broadcast to (batch, heads_q, seq_q, seq_kv)."""

    visible: Tensor
    bias: Tensor | None
    scale: float
    softcap: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """out and lse, differentiable as often as one likes."""
        weights, _, lse = self._weights(q, k)
        return weights @ _repeated(v, q), lse

    def _weights(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, the slope of the softcap, and lse."""
        raw = self.scale * (q @ _repeated(k, q).mT)
        slope = torch.ones_like(raw)
        scores = raw
        if self.softcap:
            tanh = torch.tanh(raw / self.softcap)
            scores, slope = self.softcap * tanh, 1 - tanh**2
        if self.bias is not None:
            scores = scores + self.bias
        visible = self.visible & (scores > -torch.inf)
        sees = visible.any(-1, keepdim=True)
        hidden = scores.masked_fill(~visible, -torch.inf)
        top = hidden.detach().amax(-1, keepdim=True) if k.shape[-2] else hidden.new_zeros(*hidden.shape[:-1], 1)
        shifted = torch.where(visible, scores - top.masked_fill(~sees, 0.0), 0.0)
        powers = torch.where(visible, shifted.exp(), 0.0)
        total = powers.sum(-1, keepdim=True)
        safe = torch.where(sees, total, 1.0)
        lse = (safe.log() + top.masked_fill(~sees, 0.0)).masked_fill(~sees, -torch.inf)
        return powers / safe, slope, lse.squeeze(-1)

    def bounded(
        self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, dlse: Tensor | None, tolerance: float
    ) -> tuple[Bounded, Bounded, tuple[Bounded, Bounded, Bounded]]:
        """out, lse and the gradients, each with the largest error allowed in every element."""
        group = q.shape[1] // k.shape[1] if k.shape[1] else 1
        wide_k, wide_v = _repeated(k, q), _repeated(v, q)
        weights, slope, lse = self._weights(q, k)
        out = weights @ wide_v
        sums = abs(self.scale) * (q.abs() @ wide_k.abs().mT)
        if self.bias is not None:
            sums = sums + self.bias.nan_to_num(neginf=0.0).abs()
        largest = (sums * (weights > 0)).amax(-1, keepdim=True) if k.shape[-2] else sums.new_zeros(*sums.shape[:-1], 1)
        error = tolerance * (1 + 2 * largest)
        out_error = error * (weights @ wide_v.abs())
        delta = (dout * out).sum(-1, keepdim=True)
        delta_sum = dout.abs().mul(weights @ wide_v.abs()).sum(-1, keepdim=True)
        if dlse is not None:
            delta, delta_sum = delta - dlse.unsqueeze(-1), delta_sum + dlse.abs().unsqueeze(-1)
        dscores = weights * (dout @ wide_v.mT - delta) * slope * self.scale
        # The slope 1 - tanh^2 cancels, so its error is that of 1: it is left out of the bound.
        dscores_error = 4 * error * weights * (dout.abs() @ wide_v.abs().mT + delta_sum) * abs(self.scale)

        def grouped(gradient: Tensor) -> Tensor:
            batch, heads, *rest = gradient.shape
            return gradient.reshape(batch, heads // group, group, *rest).sum(2)

        dq = Bounded(dscores @ wide_k, dscores_error @ wide_k.abs())
        dk = Bounded(grouped(dscores.mT @ q), grouped(dscores_error.mT @ q.abs()))
        dv = Bounded(grouped(weights.mT @ dout), grouped((4 * error * weights).mT @ dout.abs()))
        lse_error = (error * (lse.unsqueeze(-1) > -torch.inf)).squeeze(-1)
        return Bounded(out, out_error), Bounded(lse, lse_error), (dq, dk, dv)


class Bounded(NamedTuple):
    """A float64 value and the error allowed in each of its elements."""

    value: Tensor
    error: Tensor


def _repeated(keys: Tensor, q: Tensor) -> Tensor:
    return keys.repeat_interleave(q.shape[1] // keys.shape[1], dim=1) if keys.shape[1] else keys
