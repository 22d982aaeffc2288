"""A tensor that is added to the scores."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import InvalidInput
from ..operands import SCORE_DIMS, Operand, Sums
from .shared import Learner, broadcast_dims, check_paired, is_paired, members, operand_of

if TYPE_CHECKING:
    from ..operands import Sizes
    from ..scores import Asked, Tensor, Where

NUMBERS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
CPP_NUMBERS = {"bfloat16": "bf16", "float16": "fp16", "float32": "float32"}
# A bias below this hides, as -inf does: in units of log2 a float cannot hold it.
LOWEST = -torch.finfo(torch.float32).max * 0.69


@dataclass(frozen=True, slots=True)
class Bias(Learner):
    """s -> s + bias, a tensor (batch, heads, rows, keys) broadcast `over` some of these dimensions.

    Its numbers are those of q or float32. `paired`: as `is_paired` says.
    """

    kind: ClassVar[str] = "bias"
    struct: ClassVar[str] = "tilewise::Bias"
    header: ClassVar[str] = "common/terms/bias.cuh"

    number: str = "bfloat16"
    over: tuple[str, ...] = ()
    paired: bool = False
    learned: bool = False

    @classmethod
    def of(cls, bias: Tensor, problem: Sizes) -> Bias:
        """The term that reads this tensor; `learned` where it requires grad."""
        number = str(bias.dtype).removeprefix("torch.")
        return cls(number, broadcast_dims(bias, problem, by_stride=False), is_paired(bias, problem), bias.requires_grad)

    @property
    def tensors(self) -> tuple[Operand, ...]:
        dtype = NUMBERS[self.number]
        return (Operand("bias", True, SCORE_DIMS, self.over, dtype),)

    def check(self, problem: Asked) -> None:
        own = str(problem.dtype).removeprefix("torch.")
        if self.number not in (own, "float32") and problem.dtype is not torch.float64:
            raise InvalidInput("bias.dtype", self.number, f"{own}, the dtype of q, or float32", "cast the bias")

    def check_tensor(self, name: str, tensor: Tensor, problem: Asked) -> None:
        self.tensors[0].check(tensor, problem)
        if self.paired:
            check_paired(name, tensor, problem)

    def apply(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        bias = operand_of(where, self.tensors[0], scores.dtype)
        return scores + bias.masked_fill(bias < LOWEST, -torch.inf), None

    def sums(self, operand: Operand, problem: Asked) -> Sums:
        """In the bias's own numbers, or float32 sums; deterministic: of each score by itself."""
        full = operand.full_shape(problem)
        if not self.over:
            return Sums(SCORE_DIMS, full, full, NUMBERS[self.number])
        shape = full if problem.deterministic else operand.shape(problem)
        return Sums(SCORE_DIMS, shape, full, torch.float32)

    def cpp_type(self, *, precise: bool) -> str:
        if self.number not in CPP_NUMBERS:
            return ""
        learned = ("added" if self.over else "stored") if self.learned else "no"
        paired = str(self.paired).lower()
        number = f"tilewise::Element::{CPP_NUMBERS[self.number]}"
        return f"{self.struct}<{number}, {paired}, tilewise::Learned::{learned}>"

    @property
    def cpp_source(self) -> str:
        return f'#include "{self.header}"'

    @property
    def suffix(self) -> str:
        learned = ("_sums" if self.over else "_grad") if self.learned else ""
        return f"{self.kind}_{CPP_NUMBERS.get(self.number, self.number)}{'_paired' * self.paired}{learned}"

    @property
    def operands(self) -> dict[str, type[Any]]:
        tensors = members("bias", SCORE_DIMS) | members("dbias", SCORE_DIMS)
        return tensors | {"bias_in": ctypes.c_float, "bias_out": ctypes.c_float}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {"bias_in": unit, "bias_out": 1.0 / unit}

    def unit_after(self, unit: float) -> float:
        return 1.0
