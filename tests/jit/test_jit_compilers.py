"""One kernel of every source, built by the compiler of the environment that runs this.

NVRTC comes with PyTorch, and releases differ in what they accept. `make kernel-gates` builds every kernel with the one
of our own environment; `make libraries` runs this file with that of PyTorch's build for CUDA, which is older.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tilewise import CompileError
from tilewise.engine import SM80, SM90
from tilewise.jit import build_all, nvrtc_version
from tilewise.lab.model.covering import units_of

if TYPE_CHECKING:
    from tilewise.jit import Unit

pytestmark = pytest.mark.kernel_gate


def one_of_each() -> list[Unit]:
    """By what a kernel does, which its name begins with, and by the headers that it is made of."""
    found: dict[tuple[str, ...], Unit] = {}
    for backend in (SM80, SM90):
        for unit in units_of(backend):
            headers = (line for line in unit.source.splitlines() if line.startswith("#include"))
            if unit.arch.startswith("sm_90"):
                found.setdefault((unit.name.partition("_")[0], *headers), unit)
    return list(found.values())


def test_one_kernel_of_every_source_builds() -> None:
    units = one_of_each()
    assert len(units) > 20
    failed = [str(built) for _, built in build_all(units) if isinstance(built, CompileError)]
    assert not failed, f"NVRTC {nvrtc_version()}: {failed[0]}"
