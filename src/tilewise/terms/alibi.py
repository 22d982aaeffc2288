"""ALiBi: a linear bias by distance, with a slope per head."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..operands import SCORE_DIMS, Operand, Sums
from ..scores import Registers
from .shared import Learner, members, operand_of

if TYPE_CHECKING:
    from ..scores import Asked, Tensor, Where

BLOCK = 16  # rows and keys whose sum a deterministic backward keeps apart


@dataclass(frozen=True, slots=True)
class Alibi(Learner):
    """s -> s - slope * |row + seq_kv - seq_q - key|: the last query stands at the last key.

    Reads `slopes` in float32, (heads,), or (batch, heads) if `batched`.
    """

    kind: ClassVar[str] = "alibi"
    adds_line: ClassVar[bool] = True

    batched: bool = False
    learned: bool = False

    @property
    def tensors(self) -> tuple[Operand, ...]:
        over = () if self.batched else ("batch",)
        return (Operand("slopes", True, ("batch", "head"), over, torch.float32),)

    def bend(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        problem, device = where.problem, scores.device
        distance = where.row_numbers(device) + (problem.seq_kv - problem.seq_q) - where.key_numbers(device)
        return scores - operand_of(where, self.tensors[0], scores.dtype) * distance.abs(), None

    def sums(self, operand: Operand, problem: Asked) -> Sums:
        """One per (batch, head), or head; deterministic: one per block of scores."""
        blocks = (-(-problem.seq_q // BLOCK), -(-problem.seq_kv // BLOCK))
        full = (problem.batch, problem.heads_q, *blocks)
        shape = full if problem.deterministic else (problem.batch if self.batched else 1, problem.heads_q, 1, 1)
        return Sums(SCORE_DIMS, shape, full, torch.float32)

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::Alibi<{str(self.learned).lower()}>"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/alibi.cuh"'

    @property
    def suffix(self) -> str:
        return "alibi_learned" if self.learned else "alibi"

    @property
    def registers(self) -> Registers:
        return Registers(8, 0)

    @property
    def fits_plain_tiles(self) -> frozenset[str]:
        return frozenset({"sm90"})

    @property
    def operands(self) -> dict[str, type[Any]]:
        tensors = members("slopes", ("batch", "head")) | members("dslopes", SCORE_DIMS)
        return tensors | {"alibi_unit": ctypes.c_float}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"alibi_unit": 1.0 / unit}
