"""The Triton kernels compiled for a GPU that is not there: `python tests/triton_compile.py h200 [--all]`.

Triton compiles for the GPU that its driver names; here a stand-in names one. A line a kernel: its registers and bytes
of stack, where registers spill to, by cuobjdump, and its shared memory. Fails if a kernel spills or does not fit.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from support import make_inputs, make_problem
from tilewise import Causal, Full, Problem, Target
from tilewise.masks import Packed
from tilewise.target import assumed
from tilewise.triton import backend

MAX_STACK = 64  # bytes of a thread: a few values spilled outside of the loops do not show
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class StandIn:
    """As much of Triton's driver as compiling asks for."""

    def __init__(self, target: Target) -> None:
        self._target = GPUTarget("cuda", 10 * target.capability[0] + target.capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0


def problems(everything: bool) -> list[Problem]:
    dims = [(64, 64), (128, 128), (192, 128), (256, 256)] if everything else [(128, 128)]
    dtypes = [torch.bfloat16, torch.float16, torch.float32] if everything else [torch.bfloat16]
    caps = [0.0, 20.0] if everything else [20.0]
    masks = [Full(), Packed(3, 256, 256, Causal("bottom-right"))]
    return [
        make_problem((1, 2, 256, dim), dtype, head_dim_v=dim_v, softcap=cap, mask=mask, needs_grad=True)
        for (dim, dim_v), dtype, cap, mask in product(dims, dtypes, caps, masks)
    ]


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers a thread, and bytes of its stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / "cuobjdump"), "-res-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return tuple(int(re.search(rf"{name}:(\d+)", told)[1]) for name in ("REG", "STACK"))  # type: ignore[index, return-value]


def check(launch: Any, problem: Problem, target: Target) -> bool:
    built = launch.compile()
    registers, stack = resources(built.asm["cubin"])
    fine = stack <= MAX_STACK and built.metadata.shared <= target.smem_per_block
    sizes = f"{registers} registers, {stack} bytes of stack, {built.metadata.shared} bytes shared"
    print(f"{'right' if fine else 'WRONG'}: {target.name} {problem}: {launch.kernel}: {sizes}", flush=True)
    products = "mma" in built.asm["ptx"]
    return fine and (products or launch.kernel == "row_terms" or problem.dtype == torch.float32)


def main(name: str, everything: bool) -> int:
    target = Target.named(name)
    driver.set_active(StandIn(target))
    fine = True
    with assumed(target):  # the backend's own functions run, on tensors of the CPU
        for problem in problems(everything):
            config = backend.configs(problem, target)[0]
            starts = torch.tensor((0, 100, 100, 256), dtype=torch.int32)
            operands = {"cu_seqlens_q": starts, "cu_seqlens_kv": starts}
            for launch in backend._launches(*make_inputs(problem), problem, config, operands):
                fine = check(launch, problem, target) and fine
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], "--all" in sys.argv))
