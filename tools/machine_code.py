"""The machine code that the compiler makes of our kernels: a record of it, and a comparison with other sources.

    python tools/machine_code.py                   # enters the kernels that records name and the table lacks
    python tools/machine_code.py --check           # fails where the table does not say what the compiler makes of them
    python tools/machine_code.py --against main    # fails where the kernels that CI compiles differ from those of main
    python tools/machine_code.py --against main --every 8    # an eighth of them

Records name each kernel by a digest of its translation unit (tilewise.lab.model.launched). The table,
benchmarks/machine_code.json, has a digest of the machine code for each of these. Run the first command before and after
a change that must not change what kernels do: a unit with one digest before and another one after it is the same kernel
where both became the same machine code, and its figures remain evidence. A unit that neither a record names nor the
sources at hand make leaves the table. No GPU is needed, but the compiler of constraints-cpu.txt.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tilewise.errors import TilewiseError
from tilewise.jit import Kernel, build_all, nvrtc_version
from tilewise.jit.sass import disassemble
from tilewise.lab.measure.compare import read_comparison
from tilewise.lab.model import covering, launched
from tilewise.lab.studies import bench, kept, records
from tilewise.plan import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tilewise.jit import Unit

ROOT = Path(__file__).resolve().parent.parent
_DIGITS = 16
# Of an ELF file: the place of its table of sections; the size and the number of its entries, and which of them has the
# names; one entry.
_TABLE, _ENTRIES, _SECTION = (40, "<Q"), (58, "<HHH"), "<IIQQQQIIQQ"
_SYMBOL, _RELOCATION = "<IBBHQQ", "<QIIq"
_NO_BITS, _CODE = 8, b".text."
# Variables, those that are constexpr among them, and the table of their addresses, which is bank 4 of the constants.
_VARIABLES, _BANK_OF_ADDRESSES = (b".nv.global", b".nv.constant4"), "c[0x4]"
_LOADED = (_CODE, b".nv.constant", b".nv.shared", b".nv.global", b".nv.local")


def code_digest(kernel: Kernel) -> str:
    """A digest of what a kernel does: its instructions, the constants that they reach, and the resources that it takes.

    The names of functions, line numbers and symbols are not part of it, nor is the order of the sections, which follows
    those names. The compiler keeps constexpr members of classes as variables; these count where instructions can reach
    any variable.
    """
    sections = _sections(kernel.cubin)
    reached = _refers_to_variables(sections) or _BANK_OF_ADDRESSES in disassemble(kernel)
    loaded = [
        b"%d %d " % (section.kind, len(section.content)) + section.content
        for section in sections
        if section.name.startswith(_LOADED) and (reached or not section.name.startswith(_VARIABLES))
    ]
    parts = [repr(kernel.resources).encode(), *sorted(loaded)]
    return hashlib.sha256(b"".join(b"%d " % len(part) + part for part in parts)).hexdigest()[:_DIGITS]


class _Section(NamedTuple):
    """Of an ELF file. One without content in the file has as many zeros."""

    name: bytes
    kind: int
    content: bytes


def _sections(cubin: bytes) -> list[_Section]:
    (start,) = struct.unpack_from(_TABLE[1], cubin, _TABLE[0])
    size, count, names = struct.unpack_from(_ENTRIES[1], cubin, _ENTRIES[0])
    entries = [struct.unpack_from(_SECTION, cubin, start + size * i) for i in range(count)]
    found = []
    for name, kind, _, _, offset, length, *_ in entries:
        content = bytes(length) if kind == _NO_BITS else cubin[offset : offset + length]
        found.append(_Section(cubin[entries[names][4] + name :].partition(b"\0")[0], kind, content))
    return found


def _refers_to_variables(sections: list[_Section]) -> bool:
    """Whether an instruction holds the address of a variable."""
    symbols = next(section.content for section in sections if section.name == b".symtab")
    homes = [home for _, _, _, home, _, _ in struct.iter_unpack(_SYMBOL, symbols)]
    relocations = [section.content for section in sections if section.name.startswith(b".rela" + _CODE)]
    named = {symbol for content in relocations for _, _, symbol, _ in struct.iter_unpack(_RELOCATION, content)}
    return any(homes[one] < len(sections) and sections[homes[one]].name.startswith(_VARIABLES) for one in named)


def built(units: Iterable[Unit]) -> dict[Unit, str]:
    """The digests of their machine code. Raises CompileError for a kernel that does not build."""
    wanted = list(units)
    found = {}
    for unit, kernel in build_all(wanted):
        if not isinstance(kernel, Kernel):
            raise kernel
        found[unit] = code_digest(kernel)
        print(f"{len(found)} of {len(wanted)}: {unit.label} {found[unit]}", file=sys.stderr, flush=True)
    return found


def named(value: Any) -> Iterator[launched.Launched]:
    """What a record says that calls launched, wherever it says it."""
    if isinstance(value, list):
        for item in value:
            yield from named(item)
    elif isinstance(value, dict) and value.keys() >= {"row", "timing", "candidates"}:
        yield from (one.kernels for one in read_comparison(value).outcomes if one.kernels is not None)
    elif isinstance(value, dict) and value.keys() >= {"problem", "asked", "program", "units"}:
        yield value
    elif isinstance(value, dict):
        yield from named(list(value.values()))


def kept_records(root: Path) -> Iterator[dict[str, Any]]:
    """Without the notes of studies, which name no kernels."""
    for path in sorted((root / bench.RESULTS).glob("*.json")):
        with contextlib.suppress(TilewiseError):
            yield kept.read(path)


def recorded(root: Path) -> tuple[dict[str, Unit], set[str]]:
    """The kernels that records name: their units by the sources at hand, under digests; and all digests in records."""
    units: dict[str, Unit] = {}
    measured: set[str] = set()
    for record in kept_records(root):
        for known in named(record):
            measured |= set(known["units"].values())
            target = records.target_of(record["provenance"], on_gpu=bool(record["provenance"]["gpus"]))
            try:
                found = launched.kernels_of(known, target) if target is not None else []
            except TilewiseError:
                continue  # nothing runs this call today: `make evidence-check` says why
            units |= {launched.unit_digest(unit): unit for unit in found if unit.label in known["units"]}
    return units, measured


def recorded_modules(root: Path) -> dict[str, str]:
    """The kernels that records name and that are written in Python: the digest of each module by the sources at hand,
    and that of what it does."""
    labels = {label for record in kept_records(root) for known in named(record) for label in known["units"]}
    sources = [launched.source_of(f"tilewise.{label}") for label in labels if launched.is_module(label)]
    return {launched.python_digest(source): launched.python_code(source) for source in sources}


def enter(root: Path) -> None:
    """Enter what records name and the table lacks; drop what nothing names."""
    units, measured = recorded(root)
    modules = recorded_modules(root)
    code = launched.machine_code()
    missing = {digest: unit for digest, unit in units.items() if digest not in code}
    found = built(missing.values())
    code = code | {digest: found[unit] for digest, unit in missing.items()} | modules
    table = {
        digest: code[digest] for digest in sorted(code) if digest in units or digest in modules or digest in measured
    }
    text = json.dumps({"nvrtc": nvrtc_version(), "units": table}, indent=1)
    launched.MACHINE_CODE.write_text(text + "\n", encoding="utf-8")


def wrong_entries(root: Path) -> list[str]:
    """The kernels of which the table does not say what the compiler makes of them."""
    units, _ = recorded(root)
    code, found = launched.machine_code(), built(units.values())
    wrong = [digest for digest, one in recorded_modules(root).items() if code.get(digest) != one]
    return [*wrong, *(unit.label for digest, unit in units.items() if code.get(digest) != found[unit])]


def sample(every: int) -> dict[str, str]:
    """The machine code of the kernels that CI compiles, or of some of them, by their labels."""
    units = [unit for backend in BACKENDS.values() for unit in covering.units_of(backend)]
    chosen = sorted(units, key=lambda unit: unit.label)[::every]
    return {unit.label: code for unit, code in built(chosen).items()}


def changed_since(revision: str, every: int) -> list[str]:
    """The kernels of the sample whose machine code is another one by the sources of a revision, or that it lacks."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder) / "tree", Path(folder) / "code.json"
        subprocess.run(["git", "worktree", "add", "--detach", before, revision], cwd=ROOT, check=True)
        try:
            command = [sys.executable, __file__, "--every", str(every), "--write", str(after)]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": str(before / "src")}, check=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", before], cwd=ROOT, check=True)
        known = json.loads(after.read_text(encoding="utf-8"))
    now = sample(every)
    return sorted(label for label in known.keys() | now.keys() if known.get(label) != now.get(label))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the table is wrong")
    parser.add_argument("--against", metavar="REVISION", help="compare with the kernels of another revision")
    parser.add_argument("--every", type=int, default=1, help="of the kernels that CI compiles, every Nth; default 1")
    parser.add_argument("--write", metavar="FILE", help="write the digests of the kernels that CI compiles")
    asked = parser.parse_args()
    if asked.write:
        Path(asked.write).write_text(json.dumps(sample(asked.every)), encoding="utf-8")
        return 0
    if asked.against:
        differing = changed_since(asked.against, asked.every)
    elif asked.check:
        differing = wrong_entries(ROOT)
    else:
        enter(ROOT)
        differing = []
    for label in differing:
        print(f"{label}: other machine code")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
