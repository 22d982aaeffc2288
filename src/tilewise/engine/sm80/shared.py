"""What the families of kernels/sm80 share: which GPUs stand for all others, and what fits a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...target import Target

_RESERVED_SMEM = 1024  # of a multiprocessor's shared memory, for each CTA on it
_REGISTERS = 65536
VECTOR_SUMS_FROM = (9, 0)  # red.global.add.v4.f32
PLAN_BYTES = 36  # per warp


def fits(smem_bytes: int, ctas_per_sm: int, target: Target) -> bool:
    """Whether so many CTAs find their shared memory on one multiprocessor of the target."""
    return smem_bytes <= target.smem_per_block and ctas_per_sm * (smem_bytes + _RESERVED_SMEM) <= target.smem_per_sm


def register_limit(threads: int, ctas_per_sm: int) -> int:
    """What a thread may have if so many CTAs are to share a multiprocessor."""
    return min(_REGISTERS // (threads * ctas_per_sm) // 8 * 8, 255)
