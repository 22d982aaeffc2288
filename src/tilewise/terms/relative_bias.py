"""A bias by distance, from a table of every head."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import InvalidInput
from ..operands import SCORE_DIMS, Operand, Sums
from .bias import CPP_NUMBERS, NUMBERS
from .shared import Learner, members

if TYPE_CHECKING:
    from ..operands import Wants
    from ..scores import Asked, Tensor, Where


MOST_SCORES = 1 << 32  # that a deterministic gradient keeps apart, in 16 GiB


@dataclass(frozen=True, slots=True)
class RelativeBias(Learner):
    """s -> s + table[head, key - row + zero], from a tensor (heads, span); beyond its ends the table goes on as there.

    Its numbers are those of q or float32.
    """

    kind: ClassVar[str] = "relative_bias"
    takes_packed: ClassVar[bool] = True
    takes_cache: ClassVar[bool] = True
    struct: ClassVar[str] = "tilewise::RelativeBias"
    header: ClassVar[str] = "common/terms/relative_bias.cuh"

    span: int
    zero: int
    number: str = "float32"
    learned: bool = False

    @property
    def tensors(self) -> tuple[Operand, ...]:
        dtype = NUMBERS[self.number]
        return (Operand("table", True, ("head", "span"), (), dtype, self.span),)

    def check(self, problem: Asked) -> None:
        if self.span < 1 or not -(1 << 29) < self.zero < 1 << 29:
            raise InvalidInput("relative_bias", f"span {self.span}, zero {self.zero}", "a table", "check its shape")

    def why_not(self, problem: Asked) -> str:
        scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
        if not (self.learned and problem.deterministic) or scores <= MOST_SCORES:
            return ""
        return (
            f"a deterministic gradient of a table keeps that of every score, and {4 * scores / 2**30:.0f} GiB are over "
            f"{4 * MOST_SCORES / 2**30:.0f}"
        )

    def apply(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        device = scores.device
        index = where.key_numbers(device) - where.row_numbers(device) + self.zero
        table = where.operands["table"].to(scores.dtype)
        return scores + table[where.head_numbers(device), index.clamp(0, self.span - 1)], None

    def sums(self, operand: Operand, problem: Asked) -> Sums:
        """One per number; deterministic: of each score by itself."""
        if problem.deterministic:
            scores = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
            return Sums(SCORE_DIMS, scores, scores, torch.float32, self.zero)
        full = operand.full_shape(problem)
        return Sums(operand.dims, full, full, torch.float32)

    def ordered(self) -> RelativeBias:
        return OrderedRelativeBias(self.span, self.zero, self.number, self.learned) if self.learned else self

    def cpp_type(self, *, precise: bool) -> str:
        if self.number not in CPP_NUMBERS:
            return ""
        return f"{self.struct}<tilewise::Element::{CPP_NUMBERS[self.number]}, {str(self.learned).lower()}>"

    @property
    def cpp_source(self) -> str:
        return f'#include "{self.header}"'

    @property
    def suffix(self) -> str:
        return f"relative_{CPP_NUMBERS.get(self.number, self.number)}{'_grad' * self.learned}"

    @property
    def operands(self) -> dict[str, type[Any]]:
        tensors = members("table", ("head", "span")) | members("dtable", ("head", "span"))
        numbers = {"table_in": ctypes.c_float, "table_out": ctypes.c_float}
        return tensors | numbers | {"table_zero": ctypes.c_int, "table_span": ctypes.c_int}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"table_in": unit, "table_out": 1.0 / unit, "table_zero": self.zero, "table_span": self.span}

    def unit_after(self, unit: float) -> float:
        return 1.0


@dataclass(frozen=True, slots=True)
class OrderedRelativeBias(RelativeBias):
    """The same for kernels that store the gradient of every score, which is added up by distance behind them."""

    kind: ClassVar[str] = "ordered_relative_bias"
    struct: ClassVar[str] = "tilewise::OrderedRelativeBias"

    def learning(self, wants: Wants) -> Learner:
        """The other term where nothing is learned, as in a kernel that computes scores once more."""
        return self if self.cpp_gradients & wants else RelativeBias(self.span, self.zero, self.number)

    @property
    def suffix(self) -> str:
        return f"relative_{CPP_NUMBERS.get(self.number, self.number)}_ordered"

    @property
    def operands(self) -> dict[str, type[Any]]:
        tensors = members("table", ("head", "span")) | members("dtable", (*SCORE_DIMS, "span"))
        numbers = {"table_in": ctypes.c_float, "table_out": ctypes.c_float}
        return tensors | numbers | {"table_zero": ctypes.c_int, "table_span": ctypes.c_int}
