"""A bias whose tiles the kernels of Hopper have in shared memory: kernels/sm90/staged_bias.cuh.

TMA brings them, ahead of their use. It asks for 16-bit numbers, keys side by side and rows that begin at multiples of
16 bytes. A problem says the first; the strides and the address of a call decide the others
(`Program.fallback_without_tma`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from ...jit import TensorMap
from ...masks import Packed
from ...operands import SCORE_DIMS
from ...scores import Softcap
from ...terms import Bias
from ...terms.shared import members

if TYPE_CHECKING:
    from ...problem import Problem


@dataclass(frozen=True, slots=True)
class StagedBias(Bias):
    """A bias for kernels that load its tiles ahead of their use."""

    kind: ClassVar[str] = "staged_bias"
    struct: ClassVar[str] = "tilewise::sm90::StagedBias"
    header: ClassVar[str] = "sm90/staged_bias.cuh"

    @property
    def operands(self) -> dict[str, type[Any]]:
        strides = {f"bias_{dim}_stride": ctypes.c_longlong for dim in ("batch", "head")}
        factors = {"bias_in": ctypes.c_float, "bias_out": ctypes.c_float}
        return {"bias_map": TensorMap, **strides, **members("dbias", SCORE_DIMS), **factors}


def may_stage(problem: Problem) -> bool:
    """Whether the problem has a bias that kernels may have in shared memory.

    Behind a softcap it is asked for again, when its tile may be gone; of packed sequences, tiles begin anywhere.
    """
    if isinstance(problem.mask, Packed) or any(isinstance(term, Softcap) for term in problem.scores):
        return False
    biases = [term for term in problem.scores if isinstance(term, Bias)]
    return len(biases) == 1 and biases[0].number != "float32" and not {"row", "key"} & set(biases[0].over)


def staged(problem: Problem) -> Problem:
    """The problem for kernels that have its bias in shared memory."""
    return problem.with_(scores=tuple(_staged(term) if isinstance(term, Bias) else term for term in problem.scores))


def _staged(bias: Bias) -> StagedBias:
    return StagedBias(*[getattr(bias, field.name) for field in fields(bias)])
