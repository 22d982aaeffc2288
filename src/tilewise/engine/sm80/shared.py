"""What the families of kernels/sm80 share: what a Config is, what fits a GPU, and which kernels are compiled in CI."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..source import COMPILED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ...jit import Unit
    from ...target import Target

_RESERVED_SMEM = 1024  # of a multiprocessor's shared memory, for each CTA on it
_REGISTERS = 65536
VECTOR_SUMS_FROM = (9, 0)  # red.global.add.v4.f32
PLAN_BYTES = 36  # per warp


class TileConfig:
    """What the Configs of this folder have in common; all warps do the same."""

    __slots__ = ()
    warps: int
    stages: int
    ctas_per_sm: int
    block_q: Any
    block_kv: Any
    smem_bytes: Any

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def register_limit(self) -> int:
        """What a thread may have if so many CTAs are to share a multiprocessor."""
        return min(_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8, 255)

    def fits(self, target: Target) -> bool:
        """Whether so many CTAs find their shared memory on one multiprocessor of the target."""
        whole = self.ctas_per_sm * (self.smem_bytes + _RESERVED_SMEM)
        return bool(self.smem_bytes <= target.smem_per_block and whole <= target.smem_per_sm)

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.warps} warps"
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        return f"{tile}, {stages}, {self.smem_bytes / 1024:.0f} KiB shared"


def units(made_for: Callable[[Target], Iterable[Unit]]) -> list[Unit]:
    """Every kernel of a family for the named targets, one GPU of each size of shared memory."""
    return list({unit.label: unit for target in COMPILED for unit in made_for(target)}.values())
