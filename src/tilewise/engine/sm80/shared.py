"""What the families of kernels/sm80 share: what a Config is, and how it is found."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from .. import config, rules

if TYPE_CHECKING:
    from ...problem import Problem
    from ...target import Target

VECTOR_SUMS_FROM = (9, 0)  # red.global.add.v4.f32
PLAN_BYTES = 36  # per warp


class TileConfig(config.TileConfig):
    """What the Configs of this folder have in common; all warps do the same."""

    __slots__ = ()
    warps: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def workers(self) -> str:
        return f"{self.warps} warps"


_Config = TypeVar("_Config", bound=TileConfig)


def fitting(
    made: type[_Config], section: str, problem: Problem, target: Target, *, has_terms: bool, **facts: Any
) -> list[tuple[rules.Row, _Config]]:
    """The rows of a section of the table whose configs fit the target, best first."""
    rows = rules.rows("sm80", section, rules.class_of(problem), has_terms)
    found = [(row, rules.from_row(made, row, **facts)) for row in rows]
    return [(row, config) for row, config in found if config.fits(target)]
