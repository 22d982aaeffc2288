"""Values that live on both sides of the language border: a Config and a Params struct, in Python and in C++.

A `Config` dataclass becomes a C++20 literal with designated initialisers, so a field that one side lacks, or that
stands in another order, is a compile error. A `Params` struct is a ctypes class whose every offset and size is asserted
in the generated source, so a launch can never hand over bytes that the kernel reads differently.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import math
import threading
from typing import Any

from .memo import keep

TENSOR_MAP_ALIGNMENT = 64
MAX_THREADS = 256  # for which arguments are kept


class TensorMap(ctypes.Structure):
    """The 128 opaque bytes of a CUtensorMap. In C++ it is `alignas(64)`; `params_struct` keeps its offsets so."""

    _fields_ = [("opaque", ctypes.c_uint64 * 16)]


def cpp_literal(value: Any) -> str:
    """The C++ literal of a dataclass instance: `ns::Config{.block_q = 128, .causal = true}`.

    The dataclass names its C++ aggregate in a class variable `cpp_type`. Fields may be bool, int, float (finite),
    enums whose members have a `cpp_name` or are ints, or such dataclasses in turn; floats are written in hexadecimal
    and arrive bit for bit.
    """
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return _scalar_literal(value)
    cpp_type = getattr(value, "cpp_type", None)
    if not isinstance(cpp_type, str):
        raise TypeError(f"{type(value).__name__} does not name its C++ type: give it a ClassVar `cpp_type`")
    fields = (f".{field.name} = {cpp_literal(getattr(value, field.name))}" for field in dataclasses.fields(value))
    return f"{cpp_type}{{{', '.join(fields)}}}"


def cpp_constant(name: str, config: Any) -> str:
    """C++ that defines `constexpr auto name` as `config`, and does not compile unless both sides have as many fields.

    Designated initialisers alone would let C++ default a field that Python has forgotten.
    """
    fields = ", ".join(f"field{i}" for i in range(len(dataclasses.fields(config))))
    return (
        f"constexpr auto {name} = {cpp_literal(config)};\n"
        f"__device__ constexpr bool {name}_is_whole() {{ [[maybe_unused]] auto [{fields}] = {name}; return true; }}\n"
        f"static_assert({name}_is_whole());\n"
    )


def _scalar_literal(value: Any) -> str:
    if isinstance(value, enum.Enum):
        if hasattr(value, "cpp_name"):
            return str(value.cpp_name)
        value = value.value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return _int_literal(value)
    if isinstance(value, float) and math.isfinite(value):
        return value.hex()
    raise TypeError(f"{value!r} has no C++ literal: expected bool, int, a finite float, an int enum or a dataclass")


def _int_literal(value: int) -> str:
    if not -(2**63) < value < 2**64:
        raise TypeError(f"{value} has no C++ literal: it does not fit 64 bits")
    return f"{value}ULL" if value >= 2**63 else str(value)


def params_struct(name: str, **fields: type[Any]) -> type[ctypes.Structure]:
    """A ctypes class laid out as C++ lays out the same members, `TensorMap` members at multiples of 64 bytes.

    Gaps that C++ leaves for alignment are made explicit (`_pad0`, ...), since ctypes knows no 64-byte alignment.
    """
    members: list[tuple[str, type[Any]]] = []
    offset, struct_alignment, pads = 0, 1, 0

    def pad_to(alignment: int) -> None:
        nonlocal offset, pads
        if gap := -offset % alignment:
            members.append((f"_pad{pads}", ctypes.c_char * gap))
            offset, pads = offset + gap, pads + 1

    for field, kind in fields.items():
        alignment = TENSOR_MAP_ALIGNMENT if issubclass(kind, TensorMap) else ctypes.alignment(kind)
        pad_to(alignment)
        members.append((field, kind))
        offset += ctypes.sizeof(kind)
        struct_alignment = max(struct_alignment, alignment)
    pad_to(struct_alignment)
    struct = type(name, (ctypes.Structure,), {"_fields_": members})
    assert ctypes.sizeof(struct) == offset, f"{name}: ctypes made {ctypes.sizeof(struct)} bytes of {offset}"
    return struct


def layout_asserts(struct: type[ctypes.Structure], cpp_type: str) -> str:
    """`static_assert` lines that hold the C++ struct `cpp_type` to the size, offsets and member sizes of `struct`.

    Offsets are spelled with the compiler's own `__INTADDR__`: NVRTC 13.0 has neither `offsetof` nor a builtin for it.
    """
    size = ctypes.sizeof(struct)
    lines = [f'static_assert(sizeof({cpp_type}) == {size}, "in Python {cpp_type} has {size} bytes");']
    for field, *_ in struct._fields_:
        if field.startswith("_pad"):
            continue
        place, member = getattr(struct, field), f"{cpp_type}::{field}"
        offset = f"__INTADDR__(&(({cpp_type}*)0)->{field})"
        lines.append(f'static_assert({offset} == {place.offset}, "in Python {member} is at byte {place.offset}");')
        lines.append(f'static_assert(sizeof({member}) == {place.size}, "in Python {member} has {place.size} bytes");')
    return "\n".join(lines) + "\n"


class Arguments:
    """One Params struct at a fixed address, with the pointer array that the driver wants; refilled for every launch.

    The driver copies the bytes before a launch returns, so an instance may be refilled right after. It must not be
    filled by two threads at once: keep one per thread.
    """

    __slots__ = ("_pointers", "params", "pointer")

    def __init__(self, struct: type[ctypes.Structure]) -> None:
        self.params: Any = struct()
        self._pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.params))
        self.pointer = ctypes.addressof(self._pointers)


class ArgumentsPerThread:
    """`Arguments` with what no call changes filled in, one set per thread: each refills only its own.

    Those of threads that have ended go when there are many; a thread that is at work holds its own meanwhile.
    """

    __slots__ = ("_fixed", "_of_thread", "_struct")

    def __init__(self, struct: type[ctypes.Structure], fixed: dict[str, Any]) -> None:
        self._struct, self._fixed = struct, fixed
        self._of_thread: dict[int, Arguments] = {}

    def mine(self) -> Arguments:
        return self._of_thread.get(threading.get_ident()) or self._new()

    def _new(self) -> Arguments:
        arguments = Arguments(self._struct)
        for name, value in self._fixed.items():
            setattr(arguments.params, name, value)
        return keep(self._of_thread, threading.get_ident(), arguments, MAX_THREADS)
