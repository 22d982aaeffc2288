"""What spoils a measurement, told beside it: a machine with more work than cores, a GPU that is held back or shared.

The load average counts the machine's runnable threads, ours among them: before anything is measured it is that of
others, afterwards as many of it are ours as there are cores. A GPU is asked through `nvidia-smi`, where there is one.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import time

_TOOL_SECONDS = 20.0
_EVERY_SECONDS = 10.0  # a question to the driver takes as long as a few rounds of a small problem
_BUSY_PERCENT = 5  # of a GPU that should be idle
# Bits of `clocks_throttle_reasons.active`, from NVML's header. Not among them: idle, a clock set by the user, and the
# power cap, which is how a GPU with much to do runs.
_HELD_BACK = {0x08: "hardware slowdown", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}


class Machine:
    """Made before the measurements; `told` says what was wrong then, and is wrong now."""

    def __init__(self, device: str) -> None:
        self._index = (device.partition(":")[2] or "0") if device.startswith("cuda") else ""
        self._before = [text for text in (busy(load(), cores()), shared_at_start(self._index)) if text]
        self._asked = 0.0
        self._throttled = ""

    def told(self) -> list[str]:
        now = time.monotonic()
        if self._index and now - self._asked > _EVERY_SECONDS:
            self._asked, self._throttled = now, held_back(_smi(self._index, "clocks_throttle_reasons.active"))
        during = busy(load(), cores(), ours=cores() + 1) if not self._before else ""
        return [*self._before, *(text for text in (during, self._throttled) if text)]


@functools.cache
def shared_at_start(index: str) -> str:
    """Whether the GPU was in use when this process first asked: later the use may be our own."""
    return shared(_smi(index, "utilization.gpu")) if index else ""


def _smi(index: str, field: str) -> str:
    """The value of one field; empty where the tool is missing, or does not know it."""
    command = ["nvidia-smi", f"--id={index}", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    if shutil.which(command[0]) is None:
        return ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def load() -> float:
    """Runnable threads in the last minute; 0 where the system does not tell."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def cores() -> int:
    return os.cpu_count() or 1


def overload() -> float:
    """Runnable threads per core, 1 where there is a core for each."""
    return max(1.0, load() / cores())


def busy(average: float, count: int, ours: int = 0) -> str:
    """Empty while there is a core for everybody; `ours`: threads that may be our own."""
    if average <= max(count, ours):
        return ""
    return f"the machine is busy: a load of {average:.1f} on {count} cores; end what else runs, and measure again"


def shared(utilization: str) -> str:
    """A warning if others use a GPU on which nothing of ours runs yet; else empty."""
    try:
        percent = int(utilization)
    except ValueError:
        return ""
    if percent < _BUSY_PERCENT:
        return ""
    return f"another process uses the GPU: it was {percent}% busy before this began; wait for it, and measure again"


def held_back(reasons: str) -> str:
    """Of the bits that `nvidia-smi` gives, such as 0x0000000000000040."""
    try:
        bits = int(reasons, 16)
    except ValueError:
        return ""
    found = [name for bit, name in _HELD_BACK.items() if bits & bit]
    return f"the GPU's clocks are throttled: {', '.join(found)}; let it cool down, and measure again" if found else ""
