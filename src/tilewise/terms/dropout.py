"""Dropout with counter-based random bits: the same for a seed whatever computes them, and never stored."""

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
    from collections.abc import Sequence

    from ..scores import Asked, Tensor, Where

CHANCES = 1 << 16
_NANS = 2046  # of all fp16 numbers
_BELOW_ZERO = _NANS + 0x7C00  # these, and all that are less than 0
_MASK = 0xFFFFFFFF
_ROUNDS = 7
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)
_QUERY_STEP, _KEY_STEP = 0x6A09E667, 0xBB67AE85
_MIX_FACTORS = (0x3C6EF373, 0xA54FF53B, 0x510E527F, 0x9B05688D, 0x1F83D9AB, 0x5BE0CD19)


@dataclass(frozen=True, slots=True)
class Dropout(Term):
    """A weight stays with a chance of 1 - probability, rounded to a multiple of 2^-16, and is divided by that.

    Reads `seed`: two int64 on the device, a seed and an offset. kernels/common/terms/dropout.cuh says which bits belong
    to which score.
    """

    kind: ClassVar[str] = "dropout"
    takes_packed: ClassVar[bool] = True
    transforms: ClassVar[bool] = False

    probability: float

    @property
    def tensors(self) -> tuple[Operand, ...]:
        return (Operand("seed", False, ("span",), (), torch.int64, 2),)

    @property
    def threshold(self) -> int:
        """The weights that stay, of 65536. No bound lies between the two zeros of fp16: one number is missing."""
        count = max(1, round(CHANCES * (1.0 - self.probability)))
        return count + (count == _BELOW_ZERO + 1)

    def check(self, problem: Asked) -> None:
        if not 0.0 <= self.probability < 1.0:
            raise InvalidInput("dropout", self.probability, "a probability from 0 to below 1", "leave it out for none")

    def kept(self, where: Where) -> tuple[Tensor, float] | None:
        seed, offset, *before = where.operands["seed"].unbind()
        return stays(random_bits(seed, offset, where, *before), self.threshold), self.kept_weight

    @property
    def kept_weight(self) -> float:
        return CHANCES / self.threshold

    def cpp_type(self, *, precise: bool) -> str:
        return "tilewise::Dropout"

    @property
    def cpp_source(self) -> str:
        return '#include "common/terms/dropout.cuh"'

    @property
    def operands(self) -> dict[str, type[Any]]:
        numbers = {"dropout_weight": ctypes.c_float, "dropout_bound": ctypes.c_uint, "dropout_turned": ctypes.c_uint}
        return members("seed", ("span",)) | numbers | {"dropout_heads": ctypes.c_int}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        return {}

    def problem_params(self, problem: Asked) -> dict[str, float]:
        bound, turned = bound_of(self.threshold)
        return {
            "dropout_weight": self.kept_weight,
            "dropout_bound": bound * 0x10001,
            "dropout_turned": _MASK * turned,
            "dropout_heads": problem.heads_q,
        }


def bound_of(count: int) -> tuple[int, bool]:
    """Of all 16-bit patterns, taken as fp16 numbers, `count` are not at least this one; or if True, all others."""
    turned = count < _NANS
    count = CHANCES - count if turned else count
    if count == CHANCES:
        return 0x7FFF, turned  # NaN
    return (count - _BELOW_ZERO - 1 if count > _BELOW_ZERO else 0x8000 | _BELOW_ZERO - count), turned


def stays(bits: Tensor, count: int) -> Tensor:
    """Of 16 random bits each, whether they are among the `count` patterns whose weights stay."""
    bound, turned = bound_of(count)
    numbers = _fp16(bits)
    return ~(numbers >= _fp16(torch.tensor(bound, device=bits.device))) ^ turned


def _fp16(bits: Tensor) -> Tensor:
    return torch.where(bits < 0x8000, bits, bits - CHANCES).to(torch.int16).view(torch.float16)


def random_bits(seed: Tensor, offset: Tensor, where: Where, before: Tensor | int = 0) -> Tensor:
    """The 16 bits of every score of a rectangle, (batch, heads, rows, keys) in int64.

    `before`: heads of the sequences in front, where the rectangle is of one of packed sequences: each is drawn for as
    the batch of its number.
    """
    problem, device = where.problem, seed.device
    rows = torch.arange(where.rows.start, where.rows.stop, device=device)[:, None]
    keys = torch.arange(where.keys.start, where.keys.stop, device=device)
    pairs = torch.arange(problem.batch * problem.heads_q, device=device).view(problem.batch, problem.heads_q, 1, 1)
    pairs, nothing = pairs + before, torch.zeros_like(pairs)
    head = _philox4([pairs, nothing, nothing + (offset & _MASK), nothing + (offset >> 32 & _MASK)], _halves(seed))
    queries, pairs_of_keys = rows // 16 * 8 + rows % 8, keys // 16 * 4 + keys % 8 // 2
    words = spread(*_mix(queries * _QUERY_STEP + head[1], pairs_of_keys * _KEY_STEP + head[2], head[0]))
    which = 2 * (keys % 16 // 8) + rows % 16 // 8
    word = torch.stack(words, -1).gather(-1, which.expand(words[0].shape)[..., None])[..., 0]
    bits = torch.where(keys % 2 == 0, word, word >> 16) & 0xFFFF
    if not where.stacked:
        return bits
    return bits.reshape(problem.batch, problem.heads_kv, problem.group * len(where.rows), len(where.keys))


def spread(a: Tensor, b: Tensor) -> list[Tensor]:
    """Four words, whose halves are eight numbers, from the two of a call: any three of the numbers are independent."""
    return [a, b, a ^ b ^ _swapped(a), a ^ b ^ _swapped(b)]


def _swapped(word: Tensor) -> Tensor:
    return word >> 16 | (word & 0xFFFF) << 16


def _halves(word: Tensor) -> list[Tensor]:
    return [word & _MASK, word >> 32 & _MASK]


def _philox4(counter: Sequence[Tensor], key: Sequence[Tensor]) -> list[Tensor]:
    """Four words of 32 bits in int64, from four of a counter and two of a key."""
    c, k = list(counter), list(key)
    for _ in range(_ROUNDS):
        high0, low0 = _product(_FACTORS[0], c[0])
        high1, low1 = _product(_FACTORS[1], c[2])
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(word + step) & _MASK for word, step in zip(k, _STEPS, strict=True)]
    return c


def _mix(a: Tensor, b: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Two words, from two others, of which the low 32 bits count, and a key."""
    a, b = torch.broadcast_tensors(a & _MASK, b & _MASK)
    for factor in _MIX_FACTORS:
        b = b + _product(factor, a)[1] & _MASK
        a, b = b ^ b >> 16 ^ key, a
    return a, b


def _product(factor: int, word: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low 32 bits of a product of 32-bit numbers, in signed 64 bits."""
    low = factor * (word & 0xFFFF)
    high = factor * (word >> 16) + (low >> 16)
    return high >> 16, (high & 0xFFFF) << 16 | low & 0xFFFF
