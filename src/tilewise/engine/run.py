"""run: the only code of the engine that touches addresses, streams and the driver.

`load` turns a Program into a function of tensors: kernels are built and loaded, strides and shapes decided, and what
is left for a call (addresses, the stream) is written down as straight-line Python, once per program, because a call
takes 20 us in all and a loop over slots would be a good part of that. `bind_forward` and `bind_backward` put the
allocation of results around it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from ..backend import empty_out
from ..errors import CompileError
from ..jit import ArgumentsPerThread, function_for, rows_map
from ..jit import Launch as DriverLaunch
from ..jit import launch as driver
from ..jit.memo import keep
from .program import SCRATCH, Address, Counter, Map, Stride, View, slots_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..backend import Grads, Wants
    from ..problem import Problem
    from .program import Launch, Program

Tensor = torch.Tensor
Run = Callable[..., None]
"""Of the operands that `load` was given, in that order."""
BoundForward = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None]]
"""Of (q, k, v, bias)."""
BoundBackward = Callable[..., "Grads"]
"""Of (dout, dlse, q, k, v, out, lse, wants)."""
MAX_LAUNCHES = 64  # of a backward: strides of dout and out, and what is wanted, may vary
ALL: Wants = (True, True, True)


# ---------------------------------------------------------------------------------------------------------------------
# Programs


def load(program: Program, operands: Mapping[str, Tensor | None], device: int) -> Run:
    """`program` for operands of these shapes and strides on a device: a function of them that enqueues its launches.

    Operands that are None here are None in every call, or they are of slots that say they may be. Tensors may be
    without memory. Raises CompileError for a kernel that does not build.
    """
    if program.unless_viewed is not None:
        viewed = _viewed(program, operands)
        if viewed is None:
            return load(program.unless_viewed, operands, device)
        operands = viewed
    names: dict[str, Any] = {"stream_of": torch._C._cuda_getCurrentRawStream, "bytes": torch.uint8}
    lines = [f"stream = stream_of({device})"]
    if program.scratch.bytes:
        lines += [f"scratch = q.new_empty({program.scratch.bytes}, dtype=bytes)", "base = scratch.data_ptr()"]
    lines += [f"at_{name} = {text}" for name, text in _addresses(program)]
    for number, launch in enumerate(program.launches):
        shape = ((launch.grid, 1, 1), (launch.threads, 1, 1), launch.unit.smem_bytes)
        function = function_for(launch.unit, device)
        names[f"launch{number}"] = DriverLaunch(function, *shape, overlap_previous=launch.overlap)
        names[f"arguments{number}"] = ArgumentsPerThread(launch.params, _fixed(launch, operands)).mine
        lines += [f"arguments = arguments{number}()", "params = arguments.params"]
        for index, (field, place, slot) in enumerate(slots_of(launch.fields)):
            goal = f"params.{field}" if place is None else f"params.{field}[{place}]"
            if isinstance(slot, Address):
                lines.append(f"{goal} = {_address(slot.operand, program)}")
            elif isinstance(slot, View):
                lines.append(f"{goal}.data = {_address(slot.operand, program)}")
            elif isinstance(slot, Map):
                names[f"map{number}_{index}"] = _tensor_map(slot, operands).at
                lines.append(f"{goal} = map{number}_{index}({_address(slot.operand, program)})")
            elif isinstance(slot, Counter):
                names["counter"] = work_counter
                lines.append(f"{goal} = counter({device}, stream)")
        lines.append(f"launch{number}(stream, arguments)")
    body = "\n".join(f"    {line}" for line in lines)
    exec(f"def run({', '.join(operands)}):\n{body}\n", names)
    return names["run"]  # type: ignore[no-any-return]


def _viewed(program: Program, operands: Mapping[str, Tensor | None]) -> dict[str, Tensor | None] | None:
    """The operands as the launches see them, or None where their strides do not allow it."""
    seen = dict(operands)
    for name, shape in program.views:
        tensor = operands[name]
        assert tensor is not None
        try:
            seen[name] = tensor.view(shape)
        except RuntimeError:
            return None
    return seen


def _addresses(program: Program) -> list[tuple[str, str]]:
    """The operands whose addresses the launches ask for, and the text that gives each."""
    found: dict[str, str] = {}
    for launch in program.launches:
        for _, _, slot in slots_of(launch.fields):
            if isinstance(slot, Address | View | Map) and not slot.operand.startswith(SCRATCH):
                name = slot.operand
                may_lack = isinstance(slot, Address) and slot.optional
                found[name] = f"None if {name} is None else {name}.data_ptr()" if may_lack else f"{name}.data_ptr()"
    return list(found.items())


def _address(operand: str, program: Program) -> str:
    if operand.startswith(SCRATCH):
        return f"base + {program.scratch.offset(operand.removeprefix(SCRATCH))}"
    return f"at_{operand}"


def _fixed(launch: Launch, operands: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """What no call changes: constants, and the strides of operands."""

    def settled(value: Any) -> Any:
        if isinstance(value, Stride | View):
            tensor = operands[value.operand]
            assert tensor is not None
            if isinstance(value, Stride):
                return tensor.stride(value.dim)
            halves = tensor.element_size() // 2
            return (None, *(halves * stride for stride in tensor.stride()[:3]))
        if isinstance(value, Address | Map | Counter):
            return None
        return tuple(map(settled, value)) if type(value) is tuple else value

    found = {name: settled(value) for name, value in launch.fields.items()}
    return {name: value for name, value in found.items() if value is not None}


def _tensor_map(slot: Map, operands: Mapping[str, Tensor | None]) -> Any:
    if slot.shape is not None:
        return rows_map(torch.empty(slot.shape, dtype=slot.dtype, device="meta"), slot.rows)
    tensor = operands[slot.operand]
    assert tensor is not None
    return rows_map(tensor, slot.rows)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def bind_forward(program: Callable[[], Program], problem: Problem, q: Tensor, k: Tensor, v: Tensor) -> BoundForward:
    """A forward for tensors of these shapes, strides and device, which allocates out and lse.

    Where there are no keys there is no program.
    """
    needs_lse = problem.needs_lse or problem.needs_grad
    like, no_floats = empty_out(q, problem.head_dim_v, problem.layout), q.new_empty(0, dtype=torch.float32)
    shape, strides, lse_shape = tuple(like.shape), like.stride(), tuple(like.shape[:3])
    run = None
    if not problem.empty:
        operands = {"q": q, "k": k, "v": v, "out": like, "lse": no_floats if needs_lse else None}
        run = load(program(), operands, _index(q.device))

    def bound(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
        out = q.new_empty_strided(shape, strides)
        lse = no_floats.new_empty(*lse_shape) if needs_lse else None
        if run is None:
            return out.zero_(), lse if lse is None else lse.fill_(-math.inf)
        run(q, k, v, out, lse)
        return out, lse

    return bound


def bind_backward(programs: Callable[[torch.device, Wants], Program], problem: Problem) -> BoundBackward:
    """A backward for q, k and v of one shape, strides and device. What else varies decides between a few launches.

    `programs` gives the program that makes the wanted gradients on a device. Where the kernel that makes some
    alone does not build, all are made.
    """
    known: dict[tuple[Any, ...], BoundBackward] = {}
    empty = problem.empty

    def bound(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, wants: Wants
    ) -> Grads:
        if dlse is not None:
            dlse = dlse.float().contiguous()
        if not lse.is_contiguous():
            lse = lse.contiguous()
        key = (dout.stride(), out.stride(), wants)
        run = known.get(key)
        if run is None or (dout.data_ptr() | out.data_ptr()) & 15:
            if empty or not any(wants):
                return tuple(  # type: ignore[return-value]
                    torch.zeros_like(tensor) if want else None for tensor, want in zip((q, k, v), wants, strict=True)
                )
            dout, out = _readable(dout), _readable(out)
            key = (dout.stride(), out.stride(), wants)
            run = known.get(key)
            if run is None:
                run = keep(known, key, _loaded_backward(programs, wants, (dout, q, k, v, out)), MAX_LAUNCHES)
        return run(dout, dlse, q, k, v, out, lse)

    return bound


def _loaded_backward(
    programs: Callable[[torch.device, Wants], Program],
    wants: Wants,
    given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
) -> BoundBackward:
    """Of (dout, dlse, q, k, v, out, lse): allocates the gradients, and makes them."""
    try:
        return _backward(programs(given[1].device, wants), wants, given)
    except CompileError:
        if wants == ALL:
            raise
        make_all = _backward(programs(given[1].device, ALL), ALL, given)

    def selected(*operands: Tensor) -> Grads:
        return tuple(grad if want else None for grad, want in zip(make_all(*operands), wants, strict=True))  # type: ignore[return-value]

    return selected


def _backward(program: Program, wants: Wants, given: tuple[Tensor, Tensor, Tensor, Tensor, Tensor]) -> BoundBackward:
    dout, q, k, v, out = given
    grads = {
        name: torch.empty_like(of, device="meta") if want else None
        for name, of, want in zip(("dq", "dk", "dv"), (q, k, v), wants, strict=True)
    }
    lse = torch.empty(0, device="meta")
    operands = {"dout": dout, "dlse": None, "q": q, "k": k, "v": v, "out": out, "lse": lse, **grads}
    run = load(program, operands, _index(q.device))
    wants_dq, wants_dk, wants_dv = wants
    new_dq, new_dk, new_dv = (torch.zeros_like if name in program.zeroed else torch.empty_like for name in grads)

    def bound(dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> Grads:
        dq = new_dq(q) if wants_dq else None
        dk = new_dk(k) if wants_dk else None
        dv = new_dv(v) if wants_dv else None
        run(dout, dlse, q, k, v, out, lse, dq, dk, dv)
        return dq, dk, dv

    return bound


def remembered(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` gave for this key the first time; now and then all is forgotten, so that not too much is kept."""
    found = _bound.get(key)
    return keep(_bound, key, make(), _MAX_BOUND) if found is None else found


_bound: dict[Hashable, Any] = {}
_MAX_BOUND = 1024


def _index(device: torch.device) -> int:
    return device.index if device.index is not None else 0


def _readable(tensor: Tensor) -> Tensor:
    """The tensor itself if copies of 16 bytes can read it, else a copy."""
    aligned = tensor.data_ptr() % 16 == 0 and all(stride % 8 == 0 for stride in tensor.stride()[:3])
    return tensor if aligned and tensor.stride(3) == 1 else tensor.contiguous()


# ---------------------------------------------------------------------------------------------------------------------
# Counters


class _WorkCounters:
    """Zeroed integers on a device that hand out work; a kernel leaves its own at zero again.

    Launches take them in turn, whatever their stream, so that two launches that run at the same time never share one:
    handles of streams that are gone come back, and say nothing. A launch that is captured into a graph has its own for
    good, because the graph may run beside anything.
    """

    def __init__(self, device: int) -> None:
        with driver.capture_relaxed(driver.driver()):
            self._room = torch.zeros(_TURNS + _CAPTURED, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize(device)
        self._base = self._room.data_ptr()
        self._turn = 0
        self._free = iter(range(_TURNS, _TURNS + _CAPTURED))
        self._lock = threading.Lock()

    def take(self, capturing: bool) -> int:
        """The address of a counter for one launch; 0 when none is left."""
        with self._lock:
            if not capturing:
                self._turn = index = (self._turn + 1) % _TURNS
                return self._base + 4 * index
            found = next(self._free, None)
        return 0 if found is None else self._base + 4 * found


_TURNS, _CAPTURED = 1 << 20, 1 << 14  # a launch would have to outlast a million others
_counters: dict[int, _WorkCounters] = {}
_making_counters = threading.Lock()


def work_counter(device: int, stream: int) -> int:
    """A counter for one launch, or 0: the kernel then takes its tiles in a fixed order.

    Why 0 for a first launch under capture: the room would be allocated in the graph's own pool, and die with it.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    counters = _counters.get(device)
    if counters is None:
        if capturing:
            return 0
        with _making_counters:  # one that is not kept would be freed while a kernel counts with it
            counters = _counters.get(device) or _counters.setdefault(device, _WorkCounters(device))
    return counters.take(capturing)
