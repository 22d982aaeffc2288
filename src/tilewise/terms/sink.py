"""A sink: a logit per head that joins the sum of every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..operands import Operand, Sums
from .shared import Learner, members, operand_of

if TYPE_CHECKING:
    from ..scores import Asked, Tensor, Where

ROWS = 1024  # whose sum a warp makes


@dataclass(frozen=True, slots=True)
class Sink(Learner):
    """e^sink is added to the sum of every row: one more key, without a value. Reads `sink` (heads,) in float32."""

    kind: ClassVar[str] = "sink"
    takes_packed: ClassVar[bool] = True
    takes_cache: ClassVar[bool] = True
    transforms: ClassVar[bool] = False
    joins_rows: ClassVar[bool] = True

    learned: bool = False

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return (Operand("sink", True, ("head",), (), torch.float32),)

    def row_logits(self, where: Where) -> Tensor | None:
        return operand_of(where, self.tensors[0])

    def why_not(self, problem: Asked) -> str:
        return "" if problem.seq_kv else "there are no keys, and no kernel runs"

    def sums(self, operand: Operand, problem: Asked) -> Sums:
        """Of 1024 rows each, by a kernel of their own, always in the same order."""
        full = (problem.batch, problem.heads_q, -(-problem.seq_q // ROWS))
        return Sums(("batch", "head", "row"), full, full, torch.float32)

    def cpp_type(self, *, precise: bool) -> str:
        return "tilewise::Sink"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/sink.cuh"'

    @property
    def operands(self) -> dict[str, type[Any]]:
        return members("sink", ("head",))
