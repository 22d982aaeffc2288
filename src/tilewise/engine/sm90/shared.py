"""What the Configs of kernels/sm90 have in common: warpgroups with roles, which pass registers to one another."""

from __future__ import annotations

from typing import ClassVar

from ..config import TileConfig


class WarpgroupConfig(TileConfig):
    """What every thread has when the kernel starts (`register_limit`), setmaxnreg moves to those that need more."""

    __slots__ = ()
    max_registers: ClassVar[int] = 240

    @property
    def workers(self) -> str:
        return "4 warpgroups"


class ForwardConfig(WarpgroupConfig):
    """One warpgroup loads, and every consumer makes 64 rows of a tile."""

    __slots__ = ()
    consumers: int
    k_stages: int
    v_stages: int

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def workers(self) -> str:
        return f"{self.consumers} + 1 warpgroups"

    @property
    def depth(self) -> str:
        return f"stages K {self.k_stages} V {self.v_stages}"
