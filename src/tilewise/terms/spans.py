"""Spans: of the keys of a query only those from one number to another are there, by what tensors say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..operands import Operand
from ..scores import Term
from .shared import members, operand_of

if TYPE_CHECKING:
    from ..scores import Tensor, Where

_OF_QUERIES, _OF_KEYS = ("batch", "row"), ("batch", "key")
_DIMS = {"first_key": _OF_QUERIES, "end_key": _OF_QUERIES, "first_row": _OF_KEYS, "end_row": _OF_KEYS}


@dataclass(frozen=True, slots=True)
class Spans(Term):
    """Query r sees the keys from `first_key[r]` to before `end_key[r]`: int32 tensors (batch or 1, rows).

    Neither of the two may fall from one row to the next. `first_row` and `end_row`, (batch or 1, keys), say the same
    the other way round, for kernels that go through the queries of a key: `operands_of` makes all four. What they hold
    is not checked, since it is on the device.
    """

    kind: ClassVar[str] = "spans"
    transforms: ClassVar[bool] = False
    hides: ClassVar[bool] = True
    narrows: ClassVar[bool] = True
    hides_band: ClassVar[bool] = True
    hides_first_keys: ClassVar[bool] = True  # of every span that begins behind the first

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return tuple(Operand(name, False, dims, (), torch.int32) for name, dims in _DIMS.items())

    def visible(self, where: Where) -> Tensor | None:
        first, end = (operand_of(where, operand) for operand in self.tensors[:2])
        keys = where.key_numbers(first.device)
        return (keys >= first) & (keys < end)

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::Spans<tilewise::Precision::{'precise' if precise else 'fast'}>"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/spans.cuh"'

    @property
    def operands(self) -> dict[str, type[Any]]:
        found: dict[str, type[Any]] = {}
        for name, dims in _DIMS.items():
            found |= members(name, dims)
        return found


@dataclass(frozen=True, slots=True)
class KnownSpans(Spans):
    """The same of a rule, whose spans the host knows: the most keys that one of them has, and whether none is empty."""

    kind: ClassVar[str] = "known_spans"

    longest: int = 0
    every_row_sees: bool = False

    @classmethod
    def of(cls, first_key: Tensor, end_key: Tensor) -> KnownSpans:
        lengths = end_key - first_key
        return cls(int(lengths.max()), bool((lengths > 0).all()))

    @property
    def suffix(self) -> str:
        return Spans.kind


def operands_of(first_key: Tensor, end_key: Tensor, seq_kv: int) -> dict[str, Tensor]:
    """The operands of `Spans`, from (batch or 1, rows) integers that never fall along the rows."""
    keys = torch.arange(seq_kv, device=first_key.device).expand(first_key.shape[0], seq_kv).contiguous()
    # Rows from the first whose span ends behind a key, to before the first whose span begins behind it.
    first_row = torch.searchsorted(end_key.contiguous(), keys, right=True)
    end_row = torch.searchsorted(first_key.contiguous(), keys, right=True)
    found = {"first_key": first_key, "end_key": end_key, "first_row": first_row, "end_row": end_row}
    return {name: tensor.to(torch.int32) for name, tensor in found.items()}
