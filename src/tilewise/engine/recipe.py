"""recipe: a Program as plain data, for its compiled reader (native/calls.cpp).

`run.load` turns a Program into a function of Python. This turns the same value, by the same functions, into what a
reader without Python needs: the bytes of every kernel's arguments with all that no call changes, and a list of the
places that a call fills in.

    recipe  (bytes of scratch, launches, prepared)
    prepared  None, or (bytes, launches, sources): what is made before of extra tensors, those of EXTRAS with these
            numbers (offsets of packed sequences, or `keep`), and kept while they stay as they are
    launch  (name, function, context, grid, threads, bytes of shared memory, may overlap, arguments, fills)
    fill    (ADDRESS, offset, operand, bytes behind it, None)
            (MAP, offset, operand, bytes behind it, what `TiledMap.described` says)
            (COUNTER, offset, 0, how many integers, None)
"""

from __future__ import annotations

import ctypes
import math
from typing import TYPE_CHECKING, Any

from . import run
from .params import Strided
from .program import SCRATCH, Address, Counter, Layout, Map, Stride, View, slots_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from .program import Launch, Program

Launches = tuple[tuple[Any, ...], ...]
Recipe = tuple[int, Launches, "tuple[int, Launches, tuple[int, ...]] | None"]

# Operands that a caller may give in addition to q, k and v: as the enumeration `Slot` of native/calls.h has them.
EXTRAS = (
    "slopes",
    "keep",
    "sink",
    "cu_seqlens_q",
    "cu_seqlens_kv",
    "seqused_k",
    "leftpad_k",
    "cache_lengths",
    "cache_starts",
    "cache_rows",
    "page_table",
)
PREPARED = "prepared"
# As the enumeration `Operand` there.
OPERANDS = ("q", "k", "v", "out", "lse", "dout", "dlse", "dq", "dk", "dv", "scratch", PREPARED, *EXTRAS)
MAX_SOURCES = 2  # `Prologue::max_sources`
ADDRESS, MAP, COUNTER = range(3)  # `Fill::Kind`
MAX_ARGUMENTS = 4096  # bytes, of one kernel


def recipe_of(program: Program, operands: Mapping[str, torch.Tensor | None], device: int) -> Recipe | None:
    """The recipe of a program for operands of these shapes and strides; None where a call needs more than addresses.

    Operands that are not among OPERANDS are constants: their addresses are part of the recipe, and its owner keeps them
    alive. Kernels are built and loaded, which raises CompileError where one does not build.
    """
    program, operands = run.fitting(program, operands)
    if program.fallback_without_tma is not None:
        return None
    results = dict(result for before in program.prepared for result in before.results)
    sources = tuple(dict.fromkeys(name for one in program.prepared for name in one.operands if name not in results))
    if any(before.program.prepared or before.program.scratch.bytes for before in program.prepared):
        return None
    if len(sources) > MAX_SOURCES or not {*sources} <= {*EXTRAS}:
        return None
    slots = tuple(EXTRAS.index(name) for name in sources)
    made = Layout.of(**{name: 4 * math.prod(shape) for name, shape in results.items()})
    before = [(launch, one.program) for one in program.prepared for launch in one.program.launches]
    first = [_launch(launch, of, operands, made, device) for launch, of in before]
    launches = [_launch(launch, program, operands, made, device) for launch in program.launches]
    if None in first or None in launches:
        return None
    kept = (made.bytes, tuple(one for one in first if one is not None), slots) if program.prepared else None
    return program.scratch.bytes, tuple(one for one in launches if one is not None), kept


def counts(recipe: Recipe) -> bool:
    """Whether a launch takes a counter."""
    return any(fill[0] == COUNTER for launch in recipe[1] for fill in launch[-1])


def _launch(
    launch: Launch, program: Program, operands: Mapping[str, torch.Tensor | None], made: Layout, device: int
) -> tuple[Any, ...] | None:
    """`made`: where the results of what is prepared lie."""
    params = launch.params()
    if ctypes.sizeof(params) > MAX_ARGUMENTS:
        return None
    for field, value in run.fixed_fields(launch, operands).items():
        setattr(params, field, value)
    arguments, fills = bytearray(params), []
    for field, place, slot in slots_of(launch.fields):
        if isinstance(slot, Stride):
            continue
        offset = _offset(launch.params, field, place)
        if isinstance(slot, Counter):
            fills.append((COUNTER, offset, 0, slot.integers, None))
            continue
        name, plus = slot.operand, 0
        if name.startswith(SCRATCH):
            name, plus = "scratch", program.scratch.offset(name.removeprefix(SCRATCH))
        elif any(region.name == name for region in made.regions):
            name, plus = PREPARED, made.offset(name)
        if isinstance(slot, View):
            offset += Strided.data.offset
        if name in OPERANDS:
            kind, told = (MAP, run.tensor_map(slot, operands).described) if isinstance(slot, Map) else (ADDRESS, None)
            fills.append((kind, offset, OPERANDS.index(name), plus, told))
        elif isinstance(slot, Map):
            return None
        elif not (isinstance(slot, Address) and slot.optional and operands.get(name) is None):
            constant = operands[name]
            assert constant is not None
            ctypes.c_uint64.from_buffer(arguments, offset).value = constant.data_ptr()
    function = run.function_of(launch, device)
    shape = launch.grid, launch.threads, launch.unit.smem_bytes, launch.overlap
    return launch.unit.label, int(function.handle), int(function.context), *shape, bytes(arguments), tuple(fills)


def _offset(params: type[Any], field: str, place: int | None) -> int:
    """In bytes, of a field, or of an element of one that is an array."""
    begin: int = getattr(params, field).offset
    if place is None:
        return begin
    (kind,) = [kind for name, kind, *_ in params._fields_ if name == field]
    return begin + place * ctypes.sizeof(kind._type_)
