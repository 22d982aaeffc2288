"""Scores: what is done to a score between the two products. A term is a value: frozen, hashable, without tensors.

A problem has a tuple of terms. They are applied in order to s = scale * q k^T, before the mask hides:

    Softcap(cap)    s -> cap * tanh(s / cap)

A term is a class here, with what it means (`bend`, in torch operations: the specification), and a struct in
kernels/common/scores.cuh, which the kernels compose at compile time; `cpp_type` names it and `params` fills what it
reads. A term without a struct runs in the backends that are made of torch operations, and all others refuse it by name.

Terms have a text form, used by operator arguments and in results: `parse(str(term)) == term`. A class is found by its
`kind` as soon as it is defined.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, NamedTuple, Protocol

import torch

from .errors import InvalidInput

Tensor = torch.Tensor
LOG2_E = math.log2(math.e)
_KINDS: dict[str, type[Term]] = {}


class Asked(Protocol):
    """What terms ask of a Problem, which is made of them."""

    @property
    def heads_q(self) -> int: ...
    @property
    def heads_kv(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def scale(self) -> float: ...
    @property
    def scores(self) -> tuple[Term, ...]: ...


class Where(NamedTuple):
    """Which scores a term is given: a rectangle of rows and keys of all heads, as (batch, heads, rows, keys).

    `stacked`: the query heads of a KV head lie behind one another, (batch, heads_kv, group * rows, keys).
    """

    problem: Asked
    rows: range
    keys: range
    stacked: bool = False

    def row_numbers(self, device: torch.device) -> Tensor:
        """The row of every score, as a column that broadcasts to them."""
        numbers = torch.arange(self.rows.start, self.rows.stop, device=device)
        return (numbers.repeat(self.problem.group) if self.stacked else numbers)[:, None]

    def key_numbers(self, device: torch.device) -> Tensor:
        """The key of every score, as a row that broadcasts to them."""
        return torch.arange(self.keys.start, self.keys.stop, device=device)

    def head_numbers(self, device: torch.device) -> Tensor:
        """The query head of every score."""
        heads = torch.arange(self.problem.heads_q, device=device)
        if not self.stacked:
            return heads[:, None, None]
        grouped = heads.view(self.problem.heads_kv, self.problem.group, 1)
        return grouped.expand(-1, -1, len(self.rows)).reshape(self.problem.heads_kv, -1, 1)


class Term:
    """What all terms share. A subclass is a frozen dataclass of numbers with a `kind`, and defines `bend`."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    transforms: ClassVar[bool] = True  # it changes scores; not so a term that drops weights or finishes rows

    def __init_subclass__(cls) -> None:
        if cls.kind:
            _KINDS[cls.kind] = cls

    def bend(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        """The scores after this term, and its derivative with respect to the scores before it (None: 1)."""
        raise NotImplementedError

    def check(self, problem: Asked) -> None:
        """Raise InvalidInput if the term does not fit the problem."""

    def cpp_type(self, *, precise: bool) -> str:
        """Its struct in kernels/common/scores.cuh, by its full name; empty where there is none.

        `precise`: in float32 arithmetic, where kernels of 16-bit numbers may use approximate instructions.
        """
        return ""

    @property
    def cpp_source(self) -> str:
        """The struct itself, where it is not in that header."""
        return ""

    @property
    def operands(self) -> dict[str, type[Any]]:
        """The members of its C++ `Operands`, by name, as ctypes; what all kernels have is not among them."""
        return {}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        """What the struct reads of a kernel's parameters. A score before this term is `unit` times a kernel's value."""
        return {}

    def unit_after(self, unit: float) -> float:
        """What a kernel's value is in units of after this term."""
        return unit

    @classmethod
    def from_text(cls, text: str) -> Term:
        """From what stands behind `kind:` in the text form."""
        return cls(*map(float, text.split(","))) if text else cls()

    def __str__(self) -> str:
        numbers = ",".join(f"{getattr(self, field.name):.17g}" for field in fields(self))  # type: ignore[arg-type]
        return f"{self.kind}:{numbers}" if numbers else self.kind


@dataclass(frozen=True, slots=True)
class Softcap(Term):
    """s -> cap * tanh(s / cap): no score beyond the cap."""

    kind: ClassVar[str] = "softcap"

    cap: float

    def bend(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        bent = torch.tanh(scores / self.cap)
        return self.cap * bent, 1.0 - bent * bent

    def check(self, problem: Asked) -> None:
        limit = _MAX_CAP_FLOAT64 if problem.dtype is torch.float64 else _MAX_CAP_FLOAT32
        if not (1 / limit <= self.cap <= limit and abs(problem.scale) <= limit * self.cap):
            expected = f"a number from {1 / limit:.2g} to {limit:.2g}, or 0 for none"
            raise InvalidInput("softcap", self.cap, expected, "leave softcap out for the default")

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::Softcap<tilewise::Precision::{'precise' if precise else 'fast'}>"

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        """From a score to its part of the cap; for approximate instructions, in units of their exponential."""
        return {"softcap_in": unit / self.cap if precise else 2 * LOG2_E * unit / self.cap}

    def unit_after(self, unit: float) -> float:
        return self.cap


# Scores are divided by the cap: with a cap beyond these, or below their inverse, ordinary scores would leave the range
# of numbers with full precision.
_MAX_CAP_FLOAT32, _MAX_CAP_FLOAT64 = 2.0**100, 2.0**1000


def parse(text: str) -> Term:
    """The term that a text stands for: softcap:30."""
    kind, _, rest = text.strip().lower().partition(":")
    try:
        return _KINDS[kind].from_text(rest)
    except (KeyError, ValueError, TypeError):
        raise InvalidInput("scores", repr(text), f"one of {', '.join(_KINDS)}", "write e.g. softcap:30") from None


def bend_all(scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
    """The scores after all terms of the problem, and the product of their slopes."""
    slope: Tensor | None = None
    for term in where.problem.scores:
        scores, own = term.bend(scores, where)
        if own is not None:
            slope = own if slope is None else slope * own
    return scores, slope


def softcapped(cap: float) -> tuple[Term, ...]:
    """The terms of a softcap given as a number, where 0 stands for none."""
    return (Softcap(cap),) if cap != 0 else ()
