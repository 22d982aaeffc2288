"""The largest score of every head, as one more result of the forward."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import InvalidInput
from ..operands import Operand
from ..scores import Term
from .shared import members

if TYPE_CHECKING:
    from ..scores import Asked, Tensor, Where


@dataclass(frozen=True, slots=True)
class MaxLogit(Term):
    """The last term of all. Writes `max_logit` (heads,), int32 zeroed before; `decoded` makes floats of it."""

    kind: ClassVar[str] = "max_logit"
    takes_packed: ClassVar[bool] = True
    transforms: ClassVar[bool] = False

    @property
    def outputs(self) -> tuple[Operand, ...]:
        return (Operand("max_logit", False, ("head",), (), torch.int32),)

    def check(self, problem: Asked) -> None:
        if problem.scores[-1] != self:
            raise InvalidInput("scores", "max_logit before other terms", "the last of all terms", "move it to the end")

    def observed(self, scores: Tensor, where: Where, results: dict[str, Tensor]) -> None:
        problem = where.problem
        lowest = scores.new_full((problem.heads_q,), -torch.inf)
        if scores.numel():
            lowest = scores.reshape(problem.batch, problem.heads_q, -1).amax((0, 2))
        results["max_logit"] = torch.maximum(results.get("max_logit", lowest), lowest)

    def cpp_type(self, *, precise: bool) -> str:
        return "tilewise::MaxLogit"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/max_logit.cuh"'

    @property
    def operands(self) -> dict[str, type[Any]]:
        return members("max_logit", ("head",)) | {"max_logit_unit": ctypes.c_float}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"max_logit_unit": unit}

    def decoded(self, written: Tensor) -> Tensor:
        """In float32; -inf for a head of which no query sees any key."""
        bits = torch.where(written < 0, written ^ -(1 << 31), ~written)  # the sign bit is set for numbers from 0 up
        return bits.view(torch.float32).masked_fill(written == 0, -torch.inf)
