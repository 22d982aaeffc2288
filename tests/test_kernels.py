"""Every kernel the package may launch, compiled without a GPU and held to its budgets.

`make test` builds one of each kind and architecture, `make kernel-gates` every other source for one architecture, and
`make nightly` the same sources for the other architectures.

`PYTHONPATH=src python tests/test_kernels.py` writes the budgets, tests/ratchet.json, as the kernels are now. A budget
that grows is a decision: it shows in the diff and wants its reason in the commit. Registers are the compiler's choice,
so their budgets bind the release of NVRTC that wrote them, which constraints-cpu.txt pins. Any other release
is held to the other tests, and the end of the run lists the kernels that it gives more registers (conftest.py).
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tilewise.engine import SM80, SM90
from tilewise.errors import CompileError
from tilewise.jit import Kernel, Unit, build_all, nvrtc, sass
from tilewise.jit.ptxas import broken_gates
from tilewise.lab.model.covering import units_of

if TYPE_CHECKING:
    from collections import Counter

    from tilewise.engine.backend import Fused

RATCHET = Path(__file__).resolve().parent / "ratchet.json"
PINS = RATCHET.parent.parent / "constraints-cpu.txt"
# The instruction that multiplies matrices, per backend with CUDA kernels, and what a block may have of shared memory.
BACKENDS = {SM80: "HMMA", SM90: "HGMMA"}
MAX_SMEM = {"sm_80": 163 * 1024, "sm_89": 99 * 1024, "sm_90": 227 * 1024, "sm_90a": 227 * 1024}
# Kernels whose names begin so hold no matrix product.
ELEMENTWISE = ("combine", "preprocess", "postprocess", "split", "table")
# Kernels whose machine code is read: of two that differ in a dtype, in the number of products or in the generation that
# the same source is built for, one.
READ_FOR, LIKE_OTHERS = ("sm_80", "sm_90a"), ("fp16", "tf32x1")
UNITS = [(backend, unit) for backend in BACKENDS for unit in units_of(backend)]
READ = [pair for pair in UNITS if pair[1].arch in READ_FOR and not any(kind in pair[1].name for kind in LIKE_OTHERS)]


def sampled() -> set[Unit]:
    """One of each kind (the name up to its sizes) and architecture, the first that is listed; of dtypes alike, one."""
    kinds: dict[tuple[str, str], list[Unit]] = {}
    for _, unit in UNITS:
        kind = re.split(r"_d\d|_\d", unit.name)[0]
        if not any(like in unit.name for like in LIKE_OTHERS):
            kinds.setdefault((unit.arch, kind), []).append(unit)
    return {units[0] for units in kinds.values()}


SAMPLE = sampled()


FIRST = {unit.name: unit for _, unit in reversed(UNITS)}  # of those that have a name in common


def job(unit: Unit) -> list[pytest.MarkDecorator]:
    """Kernels that differ from others in a dtype or the number of products alone, or in the GPU that the same source is
    built for, are built nightly, and by every GPU check."""
    if unit in SAMPLE:
        return []
    like_another = any(like in unit.name for like in LIKE_OTHERS)
    return [pytest.mark.kernel_gate if FIRST[unit.name] == unit and not like_another else pytest.mark.nightly]


def parametrized(pairs: list[tuple[Fused, Unit]]) -> pytest.MarkDecorator:
    rows = [pytest.param(backend, unit, id=unit.label, marks=job(unit)) for backend, unit in pairs]
    return pytest.mark.parametrize(("backend", "unit"), rows)


every_unit = parametrized(UNITS)


class Code(NamedTuple):
    """What is asked of the machine code of a kernel."""

    opcodes: Counter[str]
    tested_extrema: list[str]


def read(kernel: Kernel) -> Code:
    text = sass.disassemble(kernel)
    return Code(sass.opcodes(text), sass.tested_extrema(text))


def disassemble(kernels: dict[Unit, Kernel | CompileError]) -> dict[Unit, Code]:
    good = [(unit, kernel) for unit, kernel in kernels.items() if isinstance(kernel, Kernel)]
    with ThreadPoolExecutor() as pool:
        codes = pool.map(lambda pair: read(pair[1]), good)
        return {unit: code for (unit, _), code in zip(good, codes, strict=True)}


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest) -> dict[Unit, Kernel | CompileError]:
    """Those that a selected test asks for, side by side."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    return dict(build_all({row["unit"] for row in parameters if isinstance(row.get("unit"), Unit)}))


@pytest.fixture(scope="module")
def codes(built: dict[Unit, Kernel | CompileError]) -> dict[Unit, Code]:
    return disassemble({unit: built[unit] for _, unit in READ if unit in built})


@pytest.fixture(scope="module")
def ratchet() -> dict[str, dict[str, int]]:
    budgets: dict[str, dict[str, int]] = recorded()["kernels"]
    return budgets


def recorded() -> dict[str, Any]:
    table: dict[str, Any] = json.loads(RATCHET.read_text()) if RATCHET.is_file() else {"nvrtc": "", "kernels": {}}
    return table


@functools.cache
def compiler() -> str:
    """The release of NVRTC that compiles here, as its PTX names it: nvrtcVersion has the first two numbers alone."""
    ptx = nvrtc.run(importlib.import_module("cuda.bindings.nvrtc"), nvrtc.Program("", "empty.cu", [], "PTX")).product
    found = re.search(rb"V(\d+\.\d+\.\d+)", ptx)
    assert found, ptx
    return found[1].decode()


def kernel_of(unit: Unit, built: dict[Unit, Kernel | CompileError]) -> Kernel:
    kernel = built[unit]
    if isinstance(kernel, CompileError):
        pytest.skip("it does not build, which is a failure of its own above")
    return kernel


def resources(unit: Unit, kernel: Kernel) -> dict[str, int]:
    return {
        "registers": kernel.resources.registers,
        "smem_bytes": unit.smem_bytes + kernel.resources.static_smem_bytes,
    }


def facts(unit: Unit, kernel: Kernel, codes: Counter[str]) -> dict[str, int]:
    return resources(unit, kernel) | {
        "instructions": sum(codes.values()),
        "matrix_instructions": sum(number for code, number in codes.items() if "MMA" in code),
    }


@pytest.mark.parametrize("backend", BACKENDS, ids=str)
def test_a_backend_lists_its_kernels_once_each(backend: Fused) -> None:
    labels = [unit.label for unit in units_of(backend)]
    assert labels
    assert len(labels) == len(set(labels))


@every_unit
def test_it_builds_without_spills_or_serialised_products(
    backend: Fused, unit: Unit, built: dict[Unit, Kernel | CompileError]
) -> None:
    kernel = built[unit]
    if isinstance(kernel, CompileError):
        raise kernel
    used, broken = kernel.resources, broken_gates(kernel.log)
    assert broken == []
    assert (used.stack_bytes, used.spill_store_bytes, used.spill_load_bytes) == (0, 0, 0)


@every_unit
def test_it_fits_the_chip(backend: Fused, unit: Unit, built: dict[Unit, Kernel | CompileError]) -> None:
    used = kernel_of(unit, built).resources
    assert unit.smem_bytes + used.static_smem_bytes <= MAX_SMEM[unit.arch]
    assert used.registers <= 255


@every_unit
def test_it_keeps_its_budget(
    backend: Fused,
    unit: Unit,
    built: dict[Unit, Kernel | CompileError],
    ratchet: dict[str, dict[str, int]],
    request: pytest.FixtureRequest,
) -> None:
    assert unit.label in ratchet, (
        "no budget: run PYTHONPATH=src python tests/test_kernels.py and commit its ratchet.json"
    )
    used, budget = resources(unit, kernel_of(unit, built)), ratchet[unit.label]
    assert used["smem_bytes"] <= budget["smem_bytes"]
    if (here := compiler()) == recorded()["nvrtc"]:
        assert used["registers"] <= budget["registers"]
    elif used["registers"] > budget["registers"]:
        more = f"{unit.label} {budget['registers']} -> {used['registers']}"
        request.node.user_properties.append((f"more registers by NVRTC {here}", more))


@parametrized(READ)
def test_its_machine_code_multiplies_on_tensor_cores_and_keeps_out_of_local_memory(
    backend: Fused, unit: Unit, built: dict[Unit, Kernel | CompileError], codes: dict[Unit, Code]
) -> None:
    kernel_of(unit, built)
    names = {code.split(".")[0] for code in codes[unit].opcodes}
    assert BACKENDS[backend] in names or unit.name.startswith(ELEMENTWISE)
    assert not {"LDL", "STL"} & names


@parametrized(READ)
def test_its_machine_code_compares_no_clamped_number_in_the_instruction_that_clamps(
    backend: Fused, unit: Unit, built: dict[Unit, Kernel | CompileError], codes: dict[Unit, Code]
) -> None:
    """Of the compiler that is installed: that of CUDA 13.0 gets it wrong (sass.tested_extrema)."""
    kernel_of(unit, built)
    assert codes[unit].tested_extrema == []


def test_no_budget_is_left_of_a_kernel_that_is_gone(ratchet: dict[str, dict[str, int]]) -> None:
    assert set(ratchet) == {unit.label for _, unit in UNITS}


def test_the_compiler_of_the_budgets_is_the_one_that_is_pinned() -> None:
    assert f"nvidia-cuda-nvrtc=={recorded()['nvrtc']}" in PINS.read_text().splitlines()


def write_ratchet() -> None:
    kernels = dict(build_all([unit for _, unit in UNITS]))
    for outcome in kernels.values():
        if isinstance(outcome, CompileError):
            raise outcome
    codes = disassemble(kernels)
    table: dict[str, Any] = {
        unit.label: facts(unit, kernel, codes[unit].opcodes)
        for unit, kernel in kernels.items()
        if isinstance(kernel, Kernel)
    }
    rows = ",\n".join(f'    "{label}": {json.dumps(table[label])}' for label in sorted(table))
    RATCHET.write_text(f'{{\n  "nvrtc": "{compiler()}",\n  "kernels": {{\n{rows}\n  }}\n}}\n')
    print(f"{RATCHET}: {len(table)} kernels")


if __name__ == "__main__":
    write_ratchet()
