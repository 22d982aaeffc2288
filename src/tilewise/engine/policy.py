"""The score policy of a kernel: the terms of a problem, as kernels/common/scores.cuh composes them at compile time.

A score in nats is `unit` times the value that a kernel has of it. The unit of a product is the scale of the problem;
a term may change it (a softcap makes it the cap), and what it is after the last term goes to the softmax.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

from ..scores import Softcap
from .params import extended
from .program import Address, Stride

if TYPE_CHECKING:
    import ctypes

    from ..problem import Problem
    from ..scores import Term


class Bounds(Enum):
    """Which ends of a query's band of keys a kernel looks at, in the tiles that the mask cuts."""

    END_OF_KEYS = "end_of_keys"
    END = "end"
    BOTH = "both"


class Policy(NamedTuple):
    """What a kernel does to scores. `precise`: in float32, where 16-bit kernels use approximate instructions."""

    terms: tuple[Term, ...]
    precise: bool = False
    bounds: Bounds = Bounds.BOTH

    @classmethod
    def of(cls, terms: tuple[Term, ...] | None, config: Any, precise: bool, bounds: Bounds = Bounds.BOTH) -> Policy:
        """Of these terms; without any, of those that a config of the shipped tables is made for."""
        shipped = (Softcap(1.0),) if config.has_terms else ()
        return cls(shipped if terms is None else terms, precise, bounds)

    @property
    def cpp_type(self) -> str:
        terms = [term.cpp_type(precise=self.precise) for term in self.terms]
        if not any(term.hides_band for term in self.terms):
            terms.append(f"tilewise::BandMask<tilewise::Bounds::{self.bounds.value}>")
        return f"tilewise::Scores<{', '.join(terms)}>"

    @property
    def cpp_source(self) -> str:
        """Structs that are not in the header."""
        return "\n".join(dict.fromkeys(term.cpp_source for term in self.terms if term.cpp_source))

    @property
    def suffix(self) -> str:
        """The part of a kernel's name that stands for it."""
        return "".join(f"_{term.suffix}" for term in self.terms)

    def params(self, base: type[ctypes.Structure]) -> type[ctypes.Structure]:
        """The parameters of such a kernel: its own, then the operands of the terms."""
        return extended(base, tuple(member for term in self.terms for member in term.operands.items()))


def params_for(problem: Problem, base: type[ctypes.Structure]) -> type[ctypes.Structure]:
    """The parameters of a kernel for a problem: its own, then the operands of the terms."""
    return extended(base, tuple(member for term in problem.scores for member in term.operands.items()))


def unit_of(problem: Problem) -> float:
    """The unit of a kernel's scores after all terms."""
    unit = problem.scale
    for term in problem.scores:
        unit = term.unit_after(unit)
    return unit


def term_params(problem: Problem, *, precise: bool, backward: bool = False) -> dict[str, Any]:
    """The fields that the terms of a problem read: numbers, and slots of tensors; in a backward also of gradients."""
    fields: dict[str, Any] = {"softcap_in": 0.0}
    unit = problem.scale
    for term in problem.scores:
        fields |= term.params(unit, precise=precise) | term.problem_params(problem)
        for operand in () if backward else term.outputs:
            fields |= _slots(operand.name, operand.dims)
        for operand in term.tensors:
            slots = _slots(operand.name, operand.dims)
            fields |= {name: slot for name, slot in slots.items() if name in term.operands}
            if backward and operand in term.learned_tensors and f"d{operand.name}" in term.operands:
                fields |= _slots("d" + operand.name, term.sums(operand, problem).dims)
        unit = term.unit_after(unit)
    return fields


def _slots(name: str, dims: tuple[str, ...]) -> dict[str, Address | Stride]:
    strides = {f"{name}_{dim}_stride": Stride(name, i) for i, dim in enumerate(dims)}
    return {name: Address(name), **strides}
