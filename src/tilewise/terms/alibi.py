"""ALiBi: a linear bias by distance, with a slope per head."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..operands import SCORE_DIMS, Operand, Sums
from .shared import Learner, members, operand_of

if TYPE_CHECKING:
    from ..operands import Wants
    from ..scores import Asked, Rows, Tensor, Where

BLOCK = 16  # keys whose sums a deterministic backward keeps apart
MAX_TILE = 128  # rows or keys, which may be behind the last
SLOPE_SUMS = 3  # per query: kernels/common/terms/alibi.cuh


@dataclass(frozen=True, slots=True)
class Alibi(Learner):
    """s -> s - slope * |row + seq_kv - seq_q - key|: the last query stands at the last key.

    Reads `slopes` in float32, (heads,), or (batch, heads) if `batched`.
    """

    kind: ClassVar[str] = "alibi"
    takes_packed: ClassVar[bool] = True
    takes_cache: ClassVar[bool] = True
    adds_line: ClassVar[bool] = True
    magnifies_delta: ClassVar[Wants] = frozenset({"slopes"})

    batched: bool = False
    learned: bool = False

    @property
    def tensors(self) -> tuple[Operand, ...]:
        over = () if self.batched else ("batch",)
        return (Operand("slopes", True, ("batch", "head"), over, torch.float32),)

    def apply(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        problem, device = where.problem, scores.device
        distance = where.row_numbers(device) + (problem.seq_kv - problem.seq_q) - where.key_numbers(device)
        return scores - operand_of(where, self.tensors[0], scores.dtype) * distance.abs(), None

    def sums(self, operand: Operand, problem: Asked) -> Sums:
        """Three per query, next to one another along the rows; deterministic: also per block of keys."""
        rows, blocks = problem.seq_q + MAX_TILE, (problem.seq_kv + MAX_TILE) // BLOCK
        full = (problem.batch, problem.heads_q, rows * SLOPE_SUMS, blocks)
        shape = full if problem.deterministic else (*full[:3], 1)
        return Sums(SCORE_DIMS, shape, full, torch.float32)

    def settled(self, sums: Tensor, rows: Rows) -> Tensor:
        """Without what the errors of delta have added: each times the mean distance of its row's keys."""
        of_queries = sums[:, :, : rows.lse.shape[2] * SLOPE_SUMS].sum(3, keepdim=True)
        parts: tuple[Tensor, ...] = of_queries.unflatten(2, (-1, SLOPE_SUMS)).unbind(3)  # SlopeSums of alibi.cuh
        minus_ds_distances, all_ds, p_distances = parts
        return minus_ds_distances - rows.error_of_delta(all_ds) * p_distances

    def one_sided(self) -> Alibi:
        return OneSidedAlibi(self.batched, self.learned)

    def cpp_type(self, *, precise: bool) -> str:
        return _cpp_type(self.learned, False, precise)

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/alibi.cuh"'

    @property
    def suffix(self) -> str:
        return "alibi_learned" if self.learned else "alibi"

    @property
    def operands(self) -> dict[str, type[Any]]:
        tensors = members("slopes", ("batch", "head")) | members("dslopes", SCORE_DIMS)
        return tensors | {"alibi_unit": ctypes.c_float}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"alibi_unit": 1.0 / unit}


def _cpp_type(learned: bool, one_sided: bool, precise: bool) -> str:
    flags = ", ".join(str(flag).lower() for flag in (learned, one_sided, precise))
    return f"tilewise::Alibi<{flags}>"


@dataclass(frozen=True, slots=True)
class OneSidedAlibi(Alibi):
    """The same for kernels whose queries see no key behind the one that they stand at."""

    kind: ClassVar[str] = "one_sided_alibi"

    def cpp_type(self, *, precise: bool) -> str:
        return _cpp_type(self.learned, True, precise)

    @property
    def suffix(self) -> str:
        return "alibi_one_sided_learned" if self.learned else "alibi_one_sided"
