"""What the Configs of all families have in common: the compile-time choices of a kernel, and what they ask of a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from ..target import Target

_RESERVED_SMEM = 1024  # of a multiprocessor's shared memory, for each CTA on it
_REGISTERS = 65536


class TileConfig:
    """Base of frozen dataclasses that are, field for field, the C++ aggregate `cpp_type`.

    They have a `name`, head dims, `block_q`, `block_kv`, `stages`, `threads`, `ctas_per_sm`, `smem_bytes` and `workers`
    (in words): as fields, as properties or for all kernels of a family.
    """

    __slots__ = ()
    cpp_type: ClassVar[str]
    max_registers: ClassVar[int] = 255  # of a thread

    @property
    def register_limit(self: Any) -> int:
        """What a thread may have if so many CTAs are to share a multiprocessor."""
        return int(min(_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8, self.max_registers))

    def fits(self: Any, target: Target) -> bool:
        """Whether so many CTAs find their shared memory on one multiprocessor of the target."""
        whole = self.ctas_per_sm * (self.smem_bytes + _RESERVED_SMEM)
        return bool(self.smem_bytes <= target.smem_per_block and whole <= target.smem_per_sm)

    @property
    def heads_name(self: Any) -> str:
        """The part of a kernel's name that says which numbers of 16 bits and which heads it is for."""
        numbers = f"{self.element.name}_" if hasattr(self, "element") else ""
        return f"{numbers}d{self.head_dim}x{self.head_dim_v}"

    @property
    def depth(self: Any) -> str:
        """How many tiles are loaded ahead, in words."""
        return f"{self.stages} stage{'s' * (self.stages > 1)}"

    def __str__(self: Any) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.workers}, {self.depth}"
        return f"{tile}, {self.smem_bytes / 1024:.0f} KiB shared"
