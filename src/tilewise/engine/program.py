"""Program: all that a call of ours does on a GPU, as a value: which kernels, with which grids and which arguments.

A family (sm90.forward, sm80.backward, ...) makes a Program from a problem, a target and a config, without a tensor, a
driver or a GPU. `run.load` is the only reader that knows addresses and streams; `explain`, `inspect --static`,
`compile`, `tune`, the emulator of the tests and the planner read the same value.

The arguments of a kernel are fields of its Params struct. A field is a constant, or a slot that is filled in later:

    Address("q")          where an operand begins
    Map("k", rows=128)    the tensor map of an operand, in boxes of so many rows and 64 columns
    Stride("v", 2)        a stride of an operand, in elements, by its dimension
    View("out")           address and strides together, as kernels/sm80 reads a tensor
    Counter()             zeroed integers that the CTAs of one launch share

or a tuple of these for an array. Operands are the tensors of a call by name, all as (batch, heads, seq, head_dim)
views: q, k, v, out, lse; dout, dlse, dq, dk, dv; and `scratch.NAME` for a region of the program's own scratch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping

    import torch

    from ..jit import Unit
    from ..operands import Sums

SCRATCH = "scratch."
_ALIGNMENT = 256  # bytes, of every region: what tensor maps and vector loads want, and whole lines of the L2 cache

Shape = tuple[int, ...]


class Address(NamedTuple):
    """Where an operand begins; null if it is `optional` and the call has none."""

    operand: str
    optional: bool = False


class Map(NamedTuple):
    """The tensor map of a 16-bit operand: boxes of `rows` x 64 columns. Of scratch, shape and dtype are said here.

    `shared`: a dimension that the operand is broadcast over has size 1 in the map, and kernels ask for place 0 there.
    """

    operand: str
    rows: int
    shape: Shape | None = None
    dtype: torch.dtype | None = None
    shared: bool = False


class Stride(NamedTuple):
    """A stride of an operand, in elements."""

    operand: str
    dim: int


class View(NamedTuple):
    """An operand's address and its strides of batch, head and sequence, in 16-bit numbers: `tilewise::sm80::Tensor`."""

    operand: str


class Counter(NamedTuple):
    """The address of integers that are zero when the launch begins, and that the kernel leaves zero; or null."""

    integers: int = 1


class Region(NamedTuple):
    """A part of the scratch that a program allocates for one call."""

    name: str
    offset: int
    bytes: int


class Layout(NamedTuple):
    """Where everything lies in one allocation of scratch."""

    regions: tuple[Region, ...] = ()
    bytes: int = 0

    @classmethod
    def of(cls, **sizes: int) -> Layout:
        """Regions of so many bytes, one after another; those of no bytes are left out."""
        regions: list[Region] = []
        end = 0
        for name, size in sizes.items():
            if size:
                regions.append(Region(name, end, size))
                end += -(-size // _ALIGNMENT) * _ALIGNMENT
        return cls(tuple(regions), end)

    def offset(self, name: str) -> int:
        return next(region.offset for region in self.regions if region.name == name)

    def addresses(self, *names: str) -> dict[str, Address | None]:
        """The slots of regions, as fields of their names."""
        return {name: self.address(name) for name in names}

    def address(self, name: str) -> Address | None:
        """The slot of a region; null where there is none of that name."""
        return Address(SCRATCH + name) if any(region.name == name for region in self.regions) else None


class Launch(NamedTuple):
    """One kernel of a program: what is built, how it is launched, and its arguments."""

    unit: Unit
    params: type[Any]  # the ctypes mirror of its Params struct
    fields: Mapping[str, Any]
    grid: int
    threads: int
    overlap: bool = False  # may begin before the launch ahead of it has ended; the kernel itself waits for its results


class Prepared(NamedTuple):
    """What a program makes of operands, in int32, before its own launches: slots of its fields, by name and shape.

    It depends on the operands alone, so it is made once and kept until one of these tensors changes. An operand may be
    a result of another that a program prepares before. `shared`: programs that give it the same name, for operands of
    the same shape and strides, have it made once for all of them.
    """

    operand: str
    program: Program
    results: tuple[tuple[str, Shape], ...]
    others: tuple[str, ...] = ()
    shared: Hashable | None = None

    @property
    def operands(self) -> tuple[str, ...]:
        return self.operand, *self.others


class Program(NamedTuple):
    """Launches in the order of a stream, and what they share.

    `views`: operands that the launches see with another shape. `fallback_without_views` is launched instead where the
    strides of a call do not allow that, and `fallback_without_tma` where the strides or the address of an operand do
    not allow a tensor map of it. `sums`: what a backward leaves of the gradients of operands, all of it written, where
    that differs from what their terms state.
    """

    launches: tuple[Launch, ...]
    scratch: Layout = Layout()
    zeroed: frozenset[str] = frozenset()  # results that must be zero before the first launch
    summary: tuple[str, ...] = ()  # for `explain`
    views: tuple[tuple[str, Shape], ...] = ()
    fallback_without_views: Program | None = None
    prepared: tuple[Prepared, ...] = ()
    fallback_without_tma: tuple[str, Program] | None = None
    sums: tuple[tuple[str, Sums], ...] = ()

    @property
    def units(self) -> tuple[Unit, ...]:
        """Every kernel that a call may launch. Those of `fallback_without_tma` are built when a call needs them."""
        others = () if self.fallback_without_views is None else self.fallback_without_views.units
        before = [unit for one in self.prepared for unit in one.program.units]
        return tuple(dict.fromkeys([*(launch.unit for launch in self.launches), *before, *others]))


def lenient(program: Program) -> Program:
    """The program of which no other takes the place: its kernels may spill a few registers."""
    launches = [launch._replace(unit=replace(launch.unit, strict=False)) for launch in program.launches]
    return program._replace(launches=tuple(launches))


def slots_of(fields: Mapping[str, Any]) -> Iterator[tuple[str, int | None, Any]]:
    """All slots among the fields of a launch: (field, place in its array or None, slot)."""
    for name, value in fields.items():
        if isinstance(value, SLOTS):
            yield name, None, value
        elif type(value) is tuple:
            for place, item in enumerate(value):
                if isinstance(item, SLOTS):
                    yield name, place, item


SLOTS = (Address, Map, Stride, View, Counter)


def strides(*operands: str, name: str = "{}_{}_stride") -> dict[str, Stride]:
    """`v_batch_stride`, `v_head_stride` and `v_seq_stride` of an operand `v`, as kernels/sm90 names them."""
    dims = ("batch", "head", "seq")
    return {name.format(operand, dim): Stride(operand, i) for operand in operands for i, dim in enumerate(dims)}
