"""What mask tensors of rows show: padding, causal padding and prefixes, by a text that every process reads alike.

padding:4096,3000          of each batch its first so many keys
causal+padding:4096,3000   the same under the causal rule
prefix:1000                the causal rule, and the first 1000 keys for every query
normal                     an additive mask that hides nothing
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ...errors import InvalidInput
from ...masks import Causal

if TYPE_CHECKING:
    from ...problem import Problem

Tensor = torch.Tensor
NORMAL = "normal"
_CAUSAL = "causal+"
_PADDING, _PREFIX = "padding:", "prefix:"


class Pattern(NamedTuple):
    """Of pairs (query, key) that stand at the same positions: a square of scores."""

    causal: bool = False
    lengths: tuple[int, ...] = ()  # keys per batch; none: all are there
    prefix: int = 0  # keys that every query sees

    @classmethod
    def parse(cls, text: str) -> Pattern:
        """InvalidInput for a text that stands for none."""
        try:
            if text.startswith(_PREFIX):
                return cls(causal=True, prefix=int(text.removeprefix(_PREFIX)))
            if text.removeprefix(_CAUSAL).startswith(_PADDING):
                lengths = text.rpartition(":")[2].split(",")
                return cls(text.startswith(_CAUSAL), tuple(map(int, lengths)))
        except ValueError:
            pass
        raise InvalidInput(
            "contents", repr(text), "padding:A,B, causal+padding:A,B, prefix:N or normal", "choose one of these"
        )

    def visible(self, seq_q: int, seq_kv: int, device: torch.device) -> Tensor:
        """(batch or 1, 1, seq_q or 1, seq_kv): True where a pair is visible."""
        keys = torch.arange(seq_kv, device=device)
        rows = torch.arange(seq_q, device=device)[:, None]
        shown = torch.ones(1, 1, 1, seq_kv, dtype=torch.bool, device=device)
        if self.lengths:
            shown = shown & (keys < torch.tensor(self.lengths, device=device)[:, None, None, None])
        if self.causal:
            shown = shown & ((keys <= rows) | (keys < self.prefix))
        return shown

    def pairs(self, problem: Problem) -> int:
        """Visible pairs over all batches and heads."""
        lengths = self.lengths or (problem.seq_kv,) * problem.batch
        if not self.causal:
            return problem.heads_q * problem.seq_q * sum(lengths)
        before = self.prefix * (self.prefix - 1) // 2  # what the causal rule would hide of the prefix
        return problem.heads_q * sum(Causal().pairs(problem.seq_q, length) + before for length in lengths)
