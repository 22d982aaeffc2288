"""The ladder: attention written nine ways, each a lesson over the one before. For learning and measuring only.

Every rung has the functions of a backend (see `tilewise.backend`) and is tested like one, but the planner never
chooses it: `tilewise ladder` runs them all side by side. Rungs that are backends already (tiled, triton, sm80, sm90)
are only named here. What a rung moves, in theory, is in `traffic`.

    rung          new in it                                            what it teaches
    math          nothing: PyTorch's composite, in float32             every score goes to memory and back, twice
    tiled         blocks of keys with a running softmax, in torch      memory O(N), but still a kernel per operation
    numba         one kernel, tiles in shared memory, from Python      fusion; shared memory ends at 48 KB
    lecture       the same in CUDA C++, out in registers               registers hold what shared memory cannot
    matmul        two cuBLAS products around a softmax                 tensor cores are worth more than fusion
    three-kernel  our own tensor-core products around a softmax        what three kernels can do at best
    triton        fused, on tensor cores, in a tile language           the compiler schedules what it can see
    sm80          fused, mma.sync and cp.async by hand                 registers are the budget
    sm90          fused, wgmma and TMA, warps with roles               loads, products and softmax at the same time
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

from ..errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Rung:
    """One way to compute attention: how the lab calls it, and the lesson in a line.

    `candidate` is its name there; `module` the one in this package, empty for what lives elsewhere.
    """

    name: str
    title: str
    candidate: str
    lesson: str
    module: str = ""


RUNGS: tuple[Rung, ...] = (
    Rung("math", "PyTorch's math", "torch-math", "every score goes to memory and back, twice, in float32"),
    Rung("tiled", "tiles in torch", "tiled", "a running softmax needs O(N) memory, but a launch per operation"),
    Rung("numba", "Numba CUDA", "ladder:numba", "one kernel; the tiles must share 48 KB of shared memory", "numba"),
    Rung("lecture", "plain CUDA C++", "ladder:lecture", "out moves to registers; without tensor cores", "lecture"),
    Rung("matmul", "cuBLAS in three calls", "ladder:matmul", "tensor cores are worth more than fusion", "matmul"),
    Rung("three-kernel", "wgmma + TMA in three kernels", "ladder:three-kernel",
         "the same bytes as cuBLAS: scores through memory are the ceiling", "three_kernel"),
    Rung("triton", "Triton, fused", "triton", "fused on tensor cores: scores never leave the chip"),
    Rung("sm80", "mma.sync, fused", "sm80", "registers are the budget: every fragment placed by hand"),
    Rung("sm90", "wgmma + TMA, fused", "sm90", "loads, products and softmax overlap: warps with roles"),
)  # fmt: skip


def rung(name: str) -> Rung:
    found = next((rung for rung in RUNGS if rung.name == name), None)
    if found is None:
        names = ", ".join(rung.name for rung in RUNGS)
        raise InvalidInput("rung", repr(name), f"one of {names}", "choose one of these")
    return found


def module(name: str) -> Any:
    """The module of a rung of this package, imported only now: some need packages that are optional."""
    found = rung(name)
    if not found.module:
        raise InvalidInput("rung", repr(name), "a rung that lives here", f"call it {found.candidate!r}")
    return importlib.import_module(f"{__name__}.{found.module}")


def missing(*packages: str) -> list[str]:
    """Those of the packages that cannot be imported."""
    return [package for package in packages if importlib.util.find_spec(package) is None]
