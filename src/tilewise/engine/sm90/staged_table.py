"""A table of distances whose parts the forward of Hopper has in shared memory: kernels/sm90/staged_table.cuh."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar

from ...terms import RelativeBias

if TYPE_CHECKING:
    from ...problem import Problem


@dataclass(frozen=True, slots=True)
class StagedRelativeBias(RelativeBias):
    """A bias by distance for kernels that copy parts of its table ahead of their use."""

    kind: ClassVar[str] = "staged_relative_bias"
    struct: ClassVar[str] = "tilewise::sm90::StagedRelativeBias"
    header: ClassVar[str] = "sm90/staged_table.cuh"


def with_staged_table(problem: Problem) -> Problem:
    """The problem for kernels that have such parts in shared memory."""
    terms = [_staged(term) if isinstance(term, RelativeBias) else term for term in problem.scores]
    return problem.with_(scores=tuple(terms))


def _staged(bias: RelativeBias) -> StagedRelativeBias:
    return StagedRelativeBias(*[getattr(bias, field.name) for field in fields(bias)])
