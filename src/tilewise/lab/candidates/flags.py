"""PyTorch's switches for its attention kernels, as candidates that turn them.

An article on how PyTorch chooses attention kernels turned the switches of `torch.backends.cuda.sdp_kernel`
(enable_flash, enable_math, enable_mem_efficient) through four settings, and found that with everything off cuDNN runs.
The call has a fourth switch, `enable_cudnn`, which is on unless it is named: not everything was off. The candidates
here set the switches exactly as the article did; `flags:none` turns off all four.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.backends import cuda as switchboard

if TYPE_CHECKING:
    from collections.abc import Iterator


@dataclass(frozen=True, slots=True)
class Setting:
    """Which of PyTorch's kernels may run, and what the article saw run with it (fp16 (2, 8, 512, 64), RTX A6000)."""

    flash: bool
    efficient: bool
    math: bool
    cudnn: bool = True
    seen: str = ""
    microseconds: float = 0.0

    def __str__(self) -> str:
        names = ("flash", "efficient", "math", "cudnn")
        return "on: " + (", ".join(name for name in names if getattr(self, name)) or "none")


# fmt: off
SWITCHES: dict[str, Setting] = {
    "flags:all-off":   Setting(False, False, False, seen="cudnn", microseconds=16.26),
    "flags:flash":     Setting(True,  False, False, seen="flash", microseconds=17.53),
    "flags:math":      Setting(False, False, True,  seen="math", microseconds=1631.0),
    "flags:efficient": Setting(False, True,  False, seen="efficient", microseconds=29.58),
    "flags:none":      Setting(False, False, False, cudnn=False),
}
# fmt: on


@contextlib.contextmanager
def switched(name: str) -> Iterator[None]:
    """PyTorch's switches as the candidate `name` wants them; as they are for any other name."""
    if name not in SWITCHES:
        yield
        return
    setting = SWITCHES[name]
    before = (
        switchboard.flash_sdp_enabled(),
        switchboard.mem_efficient_sdp_enabled(),
        switchboard.math_sdp_enabled(),
        switchboard.cudnn_sdp_enabled(),
    )
    _turn(setting.flash, setting.efficient, setting.math, setting.cudnn)
    try:
        yield
    finally:
        _turn(*before)


def _turn(flash: bool, efficient: bool, math: bool, cudnn: bool) -> None:
    switchboard.enable_flash_sdp(flash)
    switchboard.enable_mem_efficient_sdp(efficient)
    switchboard.enable_math_sdp(math)
    switchboard.enable_cudnn_sdp(cudnn)


def ran_backend(profiled: dict[str, Any] | None) -> str:
    """The one of PyTorch's kernels that a profile shows; empty if it shows none."""
    ops = profiled.get("forward", {}).get("ops", []) if profiled else []
    return str(ops[0]["backend"]) if ops else ""
