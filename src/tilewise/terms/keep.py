"""Masks that are data: a boolean tensor, or the lengths of padded keys."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..operands import SCORE_DIMS, Operand
from ..scores import Term
from .shared import broadcast_dims, check_paired, is_paired, members, operand_of

if TYPE_CHECKING:
    from ..operands import Sizes
    from ..scores import Asked, Tensor, Where


@dataclass(frozen=True, slots=True)
class Keep(Term):
    """Hides the keys where `keep`, a boolean tensor (batch, heads, rows, keys), is false.

    It is broadcast `over` some of these dimensions. `paired`: as `is_paired` says.
    """

    kind: ClassVar[str] = "keep"
    takes_cache: ClassVar[bool] = True
    transforms: ClassVar[bool] = False
    hides: ClassVar[bool] = True

    over: tuple[str, ...] = ()
    paired: bool = False

    @classmethod
    def of(cls, keep: Tensor, problem: Sizes) -> Keep:
        """The term that reads this tensor."""
        return cls(broadcast_dims(keep, problem, by_stride=True), is_paired(keep, problem))

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return (Operand("keep", False, SCORE_DIMS, self.over, torch.bool),)

    def check_tensor(self, name: str, tensor: Tensor, problem: Asked) -> None:
        self.tensors[0].check(tensor, problem)
        if self.paired:
            check_paired(name, tensor, problem)

    def visible(self, where: Where) -> Tensor | None:
        return operand_of(where, self.tensors[0])

    @property
    def rows_alike(self) -> bool:
        return "row" in self.over

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::Keep<{str(self.paired).lower()}, {str(self.rows_alike).lower()}>"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/keep.cuh"'

    @property
    def suffix(self) -> str:
        return f"keep{'_keys' * self.rows_alike}{'_paired' * self.paired}"

    @property
    def operands(self) -> dict[str, type[Any]]:
        return members("keep", SCORE_DIMS)


@dataclass(frozen=True, slots=True)
class PackedKeep(Keep):
    """The same for kernels that read one bit per pair, which other kernels made of `keep` before.

    `lines` says whether a line of bits belongs to a query or to a key: "queries" or "keys".
    """

    kind: ClassVar[str] = "packed_keep"
    narrows: ClassVar[bool] = True
    hides_band: ClassVar[bool] = True

    lines: str = "queries"

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::KeptBits<{str(self.rows_alike).lower()}, {str('head' in self.over).lower()}>"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/kept_bits.cuh"'

    @property
    def suffix(self) -> str:
        kept = "kept_bits_of_keys" if self.rows_alike else "kept_bits"
        return kept if "head" in self.over else f"{kept}_by_head"

    @property
    def operands(self) -> dict[str, type[Any]]:
        strides = {f"keep_bits_{dim}_stride": ctypes.c_longlong for dim in ("batch", "head")}
        made = {"keep_bits": ctypes.c_void_p, **strides, "keep_bits_line_stride": ctypes.c_int}
        return members("keep", SCORE_DIMS) | made


@dataclass(frozen=True, slots=True)
class KeyLengths(Term):
    """Of each batch only `key_lengths` (batch,) keys are there, in int32; the others, behind or before, are padding."""

    kind: ClassVar[str] = "key_lengths"
    transforms: ClassVar[bool] = False
    hides: ClassVar[bool] = True
    narrows: ClassVar[bool] = True
    hides_band: ClassVar[bool] = True

    padded_left: bool = False

    @property
    def hides_first_keys(self) -> bool:
        return self.padded_left

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return (Operand("key_lengths", False, ("batch",), (), torch.int32),)

    def visible(self, where: Where) -> Tensor | None:
        lengths = operand_of(where, self.tensors[0]).clamp(0, where.problem.seq_kv)
        keys = where.key_numbers(lengths.device)
        return keys >= where.problem.seq_kv - lengths if self.padded_left else keys < lengths

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::KeyLengths<{str(self.padded_left).lower()}>"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/key_lengths.cuh"'

    @property
    def suffix(self) -> str:
        return "key_lengths_left" if self.padded_left else "key_lengths"

    @property
    def operands(self) -> dict[str, type[Any]]:
        return members("key_lengths", ("batch",))
