"""How a kernel sits on the GPU: occupancy and what limits it, waves and their tail, and what its build log says.

The rules are those of NVIDIA's occupancy calculator. Registers are given out by the warp in units of 256, a quarter of
the register file to each of the four schedulers; shared memory in units of 128 bytes, with 1 KiB more for the system on
sm_80 and later.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ...errors import CompileError
from ...jit import build
from ...jit.sass import disassemble, opcodes
from ...plan import BACKENDS
from ..units import counted
from .covering import units_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...jit import Unit
    from ...target import Target

_WARP = 32
_SCHEDULERS = 4
_REGISTER_UNIT = 256
_SMEM_UNIT = 128
_SYSTEM_SMEM = 1024
# capability -> (warps, blocks) a multiprocessor holds at most
_MAX_RESIDENT = {
    (7, 5): (32, 16), (8, 0): (64, 32), (8, 6): (48, 16), (8, 9): (48, 24), (9, 0): (64, 32), (10, 0): (64, 32),
    (12, 0): (48, 24),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Blocks and warps that fit on a multiprocessor at once, and why no more do."""

    blocks_per_sm: int
    warps_per_sm: int
    share: float  # of the warps a multiprocessor can hold
    limiter: str
    waves: float  # times that the grid fills the GPU
    tail: float  # share of the last wave's places that stay empty

    def __str__(self) -> str:
        blocks = counted(self.blocks_per_sm, "block")
        full = f"occupancy {self.share:.0%} ({blocks} per SM, limited by {self.limiter})"
        return f"{full}, {self.waves:.2f} waves" + (
            f", {self.tail:.0%} of the last empty" if self.tail >= 0.005 else ""
        )


def occupancy(
    grid: Sequence[int], block: Sequence[int], registers: int, smem_bytes: int, target: Target
) -> Occupancy | None:
    """None where the target is not known well enough, or nothing fits."""
    if target.capability not in _MAX_RESIDENT or not target.smem_per_sm or not target.sms:
        return None
    max_warps, max_blocks = _MAX_RESIDENT[target.capability]
    warps = math.ceil(math.prod(block) / _WARP)
    per_warp = math.ceil(registers * _WARP / _REGISTER_UNIT) * _REGISTER_UNIT
    system = _SYSTEM_SMEM if target.capability >= (8, 0) else 0
    smem = math.ceil((smem_bytes + system) / _SMEM_UNIT) * _SMEM_UNIT
    by_registers = target.registers_per_sm // _SCHEDULERS // max(per_warp, 1) * _SCHEDULERS // warps
    limits = {
        "registers": by_registers if registers else max_blocks,
        "shared memory": target.smem_per_sm // smem if smem else max_blocks,
        "warps": max_warps // warps,
        "blocks": max_blocks,
    }
    limiter = min(limits, key=lambda name: limits[name])
    blocks = limits[limiter]
    if blocks == 0:
        return None
    waves = math.prod(grid) / (blocks * target.sms)
    tail = math.ceil(waves) - waves
    if waves < 1:
        limiter = f"{limiter}; the grid does not fill the GPU"
    return Occupancy(blocks, blocks * warps, blocks * warps / max_warps, limiter, waves, tail)


def as_dict(fits: Occupancy | None) -> dict[str, Any] | None:
    """Plain values for JSON, with the sentence."""
    return None if fits is None else asdict(fits) | {"text": str(fits)}


def our_units(backends: dict[str, Any] | None = None, arch: str = "") -> dict[str, Unit]:
    """Every kernel of ours by the name it has on the GPU; of those for several architectures the one for `arch`."""
    modules = (BACKENDS if backends is None else backends).values()
    units = [unit for module in modules for unit in units_of(module)]
    return {unit.name: unit for unit in sorted(units, key=lambda unit: unit.arch.startswith(arch))}


def find_unit(kernel_name: str, units: dict[str, Unit]) -> Unit | None:
    """The unit behind a name that a profiler shows, with or without its parameters."""
    return units.get(kernel_name.partition("(")[0].split("::")[-1].strip())


def build_facts(unit: Unit, *, sass: bool = False) -> dict[str, Any]:
    """Registers, spills, shared memory and, if asked, the instruction mix of a kernel of ours; or why it has none."""
    try:
        kernel = build(unit, announce=False)
        resources = kernel.resources
        facts: dict[str, Any] = {
            "kernel": unit.name,
            "arch": unit.arch,
            "registers": resources.registers,
            "spill_bytes": resources.spill_store_bytes + resources.spill_load_bytes,
            "stack_bytes": resources.stack_bytes,
            "smem_bytes": unit.smem_bytes + resources.static_smem_bytes,
            "barriers": resources.barriers,
        }
        if sass:
            facts["instructions"] = instruction_mix(disassemble(kernel))
    except CompileError as error:
        return {"kernel": unit.name, "arch": unit.arch, "error": str(error)}
    return facts


# What an instruction is for, by how its name begins; the first that fits.
_KINDS = (
    ("matrix products", ("HGMMA", "HMMA", "IGMMA", "QGMMA", "IMMA", "DMMA", "WARPGROUP")),
    ("exponentials and other special functions", ("MUFU",)),
    ("float arithmetic", ("FFMA", "FMUL", "FADD", "FMNMX", "FSEL", "FSETP", "FSET", "HFMA2", "HADD2", "HMUL2", "FCHK")),
    ("conversions", ("F2F", "F2I", "I2F", "F2FP", "I2FP")),
    ("copies by the copy engine", ("UTMA", "UBLKCP", "LDGSTS", "CP")),
    ("global memory", ("LDG", "STG", "RED", "ATOM", "LD.", "ST.")),
    ("shared memory", ("LDS", "STS", "LDSM", "STSM", "ATOMS", "MOVM")),
    ("local memory (spills)", ("LDL", "STL")),
    ("shuffles", ("SHFL", "VOTE", "REDUX", "MATCH", "R2UR", "S2UR")),
    ("synchronisation", ("BAR", "SYNCS", "MEMBAR", "FENCE", "DEPBAR", "LDGDEPBAR", "ERRBAR", "NANOSLEEP", "ACQBULK")),
    ("branches", ("BRA", "BRX", "JMP", "EXIT", "BSYNC", "BSSY", "CALL", "RET", "WARPSYNC", "NOP", "YIELD", "BREAK")),
    ("constants and moves", ("MOV", "UMOV", "LDC", "ULDC", "CS2R", "S2R", "PRMT", "UPRMT", "SEL", "USEL")),
    ("predicates and integers", ("",)),
)  # fmt: skip


def instruction_mix(sass: str) -> dict[str, int]:
    """How many instructions of each kind the code holds; most frequent first. A static count, not an executed one."""
    mix: dict[str, int] = {}
    for opcode, count in opcodes(sass).items():
        kind = next(kind for kind, prefixes in _KINDS if opcode.startswith(prefixes))
        mix[kind] = mix.get(kind, 0) + count
    return dict(sorted(mix.items(), key=lambda item: -item[1]))
