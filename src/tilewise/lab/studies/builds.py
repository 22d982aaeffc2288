"""compile: every CUDA kernel built ahead, with what each needs of the GPU."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ...errors import CompileError, InvalidInput
from ...jit import build_all
from ...plan import BACKENDS
from .. import report
from ..model.covering import units_of

if TYPE_CHECKING:
    from ...jit import Kernel, Unit

# Architectures without kernels of their own, and whose they run, built for themselves: with as much shared memory.
_RELATIVES = {"sm_86": "sm_89", "sm_100": "sm_80", "sm_103": "sm_80", "sm_120": "sm_89", "sm_121": "sm_89"}
_COLUMNS = ("kernel", "arch", ">registers", ">smem KiB", ">seconds", "from")


@dataclass(frozen=True, slots=True)
class Build:
    """The outcome of building one unit: a kernel, or an error."""

    unit: Unit
    kernel: Kernel | None
    error: str = ""

    def to_dict(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"kernel": self.unit.name, "arch": self.unit.arch, "error": self.error}
        if self.kernel is not None:
            facts |= {"seconds": self.kernel.seconds, "from_cache": self.kernel.from_cache}
            facts |= {"smem_bytes": self.unit.smem_bytes, **asdict(self.kernel.resources)}
        return facts


def units_for(arch: str) -> list[Unit]:
    """The kernels of all backends for one architecture; InvalidInput if there are none."""
    listed = [unit for backend in BACKENDS.values() for unit in units_of(backend)]
    units = [unit for unit in listed if unit.arch == arch]
    if not units and arch in _RELATIVES:
        # As a call has them there: a register or two that spill are better than a refusal.
        units = [replace(unit, arch=arch, strict=False) for unit in listed if unit.arch == _RELATIVES[arch]]
    if not units:
        archs = ", ".join(sorted({unit.arch for unit in listed})) or "none"
        raise InvalidInput("--target", repr(arch), f"an architecture that has kernels: {archs}", "choose one of these")
    return units


def build_kernels(arch: str) -> list[Build]:
    """Build them all side by side, in the order of their names."""
    units = units_for(arch)
    done: list[Build] = []
    with report.Bar(len(units)) as bar:
        bar.tick(f"building {len(units)} kernels for {arch}")
        for unit, result in build_all(units):
            failed = isinstance(result, CompileError)
            done.append(Build(unit, None if failed else result, str(result) if failed else ""))  # type: ignore[arg-type]
            bar.tick(f"built {unit.name}")
    return sorted(done, key=lambda built: built.unit.name)


def show(built: list[Build]) -> None:
    """One line per kernel, then the errors in full: the same error once, however many kernels met it."""
    by_error: dict[str, list[str]] = {}
    for result in built:
        if result.error:
            by_error.setdefault(_without_name(result), []).append(result.unit.name)
    if len(by_error) == 1 and len(next(iter(by_error.values()))) == len(built) > 1:
        print(f"none of {len(built)} kernels was built: {next(iter(by_error))}")
        return
    report.print_table(_COLUMNS, [_cells(result) for result in built])
    for error, names in by_error.items():
        print(f"{names[0] if len(names) == 1 else f'{len(names)} kernels, {names[0]} among them'}: {error}")
    fresh = [result.kernel for result in built if result.kernel is not None and not result.kernel.from_cache]
    print(f"{len(built)} kernels: {len(fresh)} built, {sum(bool(result.error) for result in built)} failed")


def _without_name(result: Build) -> str:
    """The error as all kernels that met it have it: less what is the kernel's own."""
    return result.error.replace(f"{result.unit.name} for {result.unit.arch} ", "it ")


def _cells(result: Build) -> list[str]:
    unit, kernel = result.unit, result.kernel
    if kernel is None:
        return [unit.name, unit.arch, "-", "-", "-", "failed"]
    smem = (unit.smem_bytes + kernel.resources.static_smem_bytes) / 1024
    origin = "cache" if kernel.from_cache else "source"
    return [unit.name, unit.arch, str(kernel.resources.registers), f"{smem:.1f}", f"{kernel.seconds:.1f}", origin]
