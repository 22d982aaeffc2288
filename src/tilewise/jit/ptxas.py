"""What the assembler said about a kernel: its resources, and the lines that make it unfit to ship.

The log of `ptxas -v` is the only place where register spills and serialised wgmma pipelines show before a kernel runs.
Both cost far more than any tuning gains, so they are build failures, not remarks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_ENTRY = re.compile(r"Compiling entry function '(?P<name>[^']+)'")
_FUNCTION = re.compile(r"Function properties for (?P<name>\S+)")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_STATIC_SMEM = re.compile(r"(\d+)(?:\+0)? bytes smem")
_CODE = re.compile(r"\(C(\d{4})\)")

SETMAXNREG_IGNORED = range(7506, 7509)
WGMMA_SERIALISED = range(7510, 7518)


@dataclass(frozen=True, slots=True)
class Resources:
    """Per-thread and per-block needs of one kernel, from the assembler's log; device functions it calls included."""

    registers: int
    barriers: int
    static_smem_bytes: int
    stack_bytes: int
    spill_store_bytes: int
    spill_load_bytes: int


def parse_resources(log: str, name: str) -> Resources:
    """Resources of the kernel `name` in a `ptxas -v` log; ValueError if the log does not speak of it."""
    frames: dict[str, tuple[int, ...]] = {}
    used: dict[str, str] = {}
    entry = function = ""
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            entry = match["name"]
        elif match := _FUNCTION.search(line):
            function = match["name"]
        elif match := _FRAME.search(line):
            frames[function] = tuple(map(int, match.groups()))
        elif _USED.search(line):
            used[entry] = line
    if name not in used or name not in frames:
        raise ValueError(f"the build log has no resources for {name!r}; it names {sorted(used) or 'no kernel'}")
    stack, stores, loads = (max(column) for column in zip(*frames.values(), strict=True))
    return Resources(
        registers=_number(_USED, used[name]),
        barriers=_number(_BARRIERS, used[name]),
        static_smem_bytes=_number(_STATIC_SMEM, used[name]),
        stack_bytes=stack,
        spill_store_bytes=stores,
        spill_load_bytes=loads,
    )


def _number(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else 0


def broken_gates(log: str) -> list[str]:
    """Every gate the log breaks, each as what is wrong and the log line that says so; empty for a fit kernel."""
    found = (_broken_gate(line) for line in log.splitlines())
    return [gate for gate in found if gate]


def _broken_gate(line: str) -> str:
    if frame := _FRAME.search(line):
        stack, stores, loads = map(int, frame.groups())
        if stores or loads:
            return f"registers spill to local memory: {line.strip()}"
        if stack:
            return f"a local array is not held in registers: {line.strip()}"
    if code := _CODE.search(line):
        if int(code[1]) in SETMAXNREG_IGNORED:
            return f"setmaxnreg is ignored: {line.strip()}"
        if int(code[1]) in WGMMA_SERIALISED:
            return f"the wgmma pipeline is serialised: {line.strip()}"
    return ""
