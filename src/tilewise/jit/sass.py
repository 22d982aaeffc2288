"""The machine code of a built kernel, as text: what the assembler really made of the source."""

from __future__ import annotations

import collections
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import CompileError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .compile import Kernel

# An instruction as nvdisasm prints it: /*0010*/ @!P0 HGMMA.64x128x16.F32.BF16 R24, ... ;
_OPCODE = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", re.MULTILINE)
# A minimum or maximum with a predicate among its results: VIMNMX.RELU R6, P1, P1, R2, 0x10, PT ;
_TESTED_EXTREMUM = re.compile(r"\b[A-Z]*MNMX\d?[\w.]* U?R\w+, U?P\d[^;]*")


def disassemble(kernel: Kernel) -> str:
    """The SASS of `kernel`, by nvdisasm; CompileError where there is no nvdisasm."""
    with tempfile.TemporaryDirectory(prefix="tilewise-sass-") as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(kernel.cubin)
        done = subprocess.run([_nvdisasm(), "-c", str(cubin)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompileError(f"nvdisasm cannot read {kernel.name} ({kernel.arch}): {done.stderr.strip()}")
    return done.stdout


def opcodes(sass: str) -> collections.Counter[str]:
    """How often each instruction, with its modifiers, stands in the code."""
    return collections.Counter(_OPCODE.findall(sass))


def tested_extrema(sass: str) -> list[str]:
    """The instructions that take a minimum or maximum of integers and compare it with its bound at once.

    The assembler of CUDA 13.0 makes one of `max(0, min(x, n)) == n` where other code needs the clamped value too. It
    names one predicate for two answers, and kernels on an NVIDIA H200 took the wrong branch by it. That of CUDA 13.4
    compares with an instruction of its own.
    """
    return _TESTED_EXTREMUM.findall(sass)


def _nvdisasm() -> str:
    found = shutil.which("nvdisasm") or next((str(path) for path in _candidates() if path.is_file()), None)
    if found is None:
        raise CompileError("nvdisasm is not installed.\n  What to do: pip install nvidia-cuda-nvdisasm")
    return found


def _candidates() -> Iterator[Path]:
    """NVIDIA's wheel, Triton's copy, a CUDA toolkit."""
    for package, folder in (("nvidia", "cu13/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations or ()) if spec else ():
            yield Path(place) / folder / "nvdisasm"
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if os.environ.get(name):
            yield Path(os.environ[name]) / "bin" / "nvdisasm"
    yield Path("/usr/local/cuda/bin/nvdisasm")
