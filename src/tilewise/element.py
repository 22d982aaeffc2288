"""Element: the numbers of a tensor, as kernels name them (kernels/common/element.cuh).

The numbers that memory holds are those of a tensor's dtype. Tensor cores may multiply others: the float32 kernels of
Hopper multiply parts of fp16 or bf16.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from typing import Any


class Element(IntEnum):
    """The values are those of the enumeration in C++, and stand for it where a config is written down as numbers."""

    fp16 = 0
    bf16 = 1
    float32 = 2

    @classmethod
    def of(cls, dtype: torch.dtype) -> Element:
        """Raises KeyError for numbers that no kernel has."""
        return _OF_DTYPE[dtype]

    @property
    def cpp_name(self) -> str:
        return f"tilewise::Element::{self.name}"


_OF_DTYPE = {torch.float16: Element.fp16, torch.bfloat16: Element.bf16, torch.float32: Element.float32}


def from_number(kind: str, number: Any) -> Any:
    """A field of a config, by the name of its type, from how it is written down."""
    return {"bool": bool, "Element": Element}.get(kind, lambda value: value)(number)
