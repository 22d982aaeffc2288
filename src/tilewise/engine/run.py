"""run: the only code of the engine that touches addresses, streams and the driver.

`load` turns a Program into a function of tensors: kernels are built and loaded, strides and shapes decided, and what
is left for a call (addresses, the stream) is written down as straight-line Python, once per program, because a call
takes 20 us in all and a loop over slots would be a good part of that. `bind_forward` and `bind_backward` put the
allocation of results around it.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.weak import TensorWeakRef

from .. import fresh
from ..backend import empty_out
from ..errors import CompileError
from ..jit import ArgumentsPerThread, function_for, rows_map
from ..jit import Launch as DriverLaunch
from ..jit import launch as driver
from ..jit.memo import keep
from ..masks import Packed
from ..memo import Memo
from ..operands import ALL, INPUTS, NO_OPERANDS, check_unchanged, copies_to_check, zero_grads
from ..problem import check_operands
from ..scores import Rows, Where, join_all
from ..sequences import operands_as_spans, with_spans
from .mask_spans import mask_operands
from .program import SCRATCH, Address, Counter, Map, Stride, View, slots_of
from .rules import in_terms, is_packed

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import CodeType

    from ..operands import Grads, Operand, Operands, Wants
    from ..problem import Problem
    from ..scores import Term
    from .program import Launch, Prepared, Program

Tensor = torch.Tensor
Run = Callable[..., None]
"""Of the operands that `load` was given, in that order."""
BoundForward = Callable[..., tuple[Tensor, Tensor | None]]
"""Of (q, k, v, operands)."""
BoundBackward = Callable[..., "Grads"]
"""Of (dout, dlse, q, k, v, out, lse, operands, wants)."""
MAX_PREPARED = 8  # masks that a model alternates between
MAX_LAUNCHES = 64  # of a backward: strides of dout and out, and what is wanted, may vary


# ---------------------------------------------------------------------------------------------------------------------
# Programs


def load(program: Program, operands: Mapping[str, Tensor | None], device: int) -> Run:
    """`program` for operands of these shapes and strides on a device: a function of them that enqueues its launches.

    Operands that are None here are None in every call, or they are of slots that say they may be. Tensors may be
    without memory. Raises CompileError for a kernel that does not build.
    """
    program, operands = fitting(program, operands)
    names: dict[str, Any] = {
        "stream_of": torch._C._cuda_getCurrentRawStream,
        "new_empty": fresh.new_empty,
        "bytes": torch.uint8,
    }
    lines = [f"stream = stream_of({device})"]
    if program.fallback_without_tma is not None:
        name, other = program.fallback_without_tma
        names["unmapped"] = _Later(other, operands, device)
        lines.insert(0, f"if {name}.data_ptr() & 15: return unmapped({', '.join(operands)})")
    made: dict[str, Tensor] = {}
    for number, one in enumerate(program.prepared):
        read = {name: made[name] if name in made else operands[name] for name in one.operands}
        names[f"prepared{number}"] = _preparation(one, read, device)
        made |= {name: torch.empty(shape, dtype=torch.int32, device="meta") for name, shape in one.results}
        results = "".join(f"{name}, " for name, _ in one.results)
        lines.append(f"{results}= prepared{number}(stream, {', '.join(one.operands)})")
    if program.scratch.bytes:
        first = next(iter(operands))
        lines += [f"scratch = new_empty({first}, {program.scratch.bytes}, dtype=bytes)", "base = scratch.data_ptr()"]
    lines += [f"at_{name} = {text}" for name, text in _addresses(program, operands)]
    for number, launch in enumerate(program.launches):
        shape = ((launch.grid, 1, 1), (launch.threads, 1, 1), launch.unit.smem_bytes)
        function = function_of(launch, device)
        # Its method: calling an object goes through a slot of its type first.
        names[f"launch{number}"] = DriverLaunch(function, *shape, overlap_previous=launch.overlap).__call__
        names[f"arguments{number}"] = ArgumentsPerThread(launch.params, fixed_fields(launch, operands)).mine
        lines += [f"arguments = arguments{number}()", "params = arguments.params"]
        for index, (field, place, slot) in enumerate(slots_of(launch.fields)):
            goal = f"params.{field}" if place is None else f"params.{field}[{place}]"
            if isinstance(slot, Address):
                lines.append(f"{goal} = {_address(slot.operand, program)}")
            elif isinstance(slot, View):
                lines.append(f"{goal}.data = {_address(slot.operand, program)}")
            elif isinstance(slot, Map):
                names[f"map{number}_{index}"] = tensor_map(slot, operands).at
                lines.append(f"{goal} = map{number}_{index}({_address(slot.operand, program)})")
            elif isinstance(slot, Counter):
                names["counter"] = work_counter
                lines.append(f"{goal} = counter({device}, stream, {slot.integers})")
        lines.append(f"launch{number}(stream, arguments)")
    body = "\n".join(f"    {line}" for line in lines)
    exec(_code(f"def run({', '.join(operands)}):\n{body}\n"), names)
    return names["run"]  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=256)
def _code(text: str) -> CodeType:
    """Programs that differ in constants alone, such as the length of a cache that grows, have one text."""
    return compile(text, "<tilewise program>", "exec")


def fitting(program: Program, operands: Mapping[str, Tensor | None]) -> tuple[Program, Mapping[str, Tensor | None]]:
    """What runs for operands of these strides, the program or one that takes its place, and the operands as it sees
    them."""
    if program.fallback_without_views is not None:
        viewed = _viewed(program, operands)
        if viewed is None:
            return fitting(program.fallback_without_views, operands)
        operands = viewed
    if program.fallback_without_tma is not None:
        name, other = program.fallback_without_tma
        if not _can_be_mapped(operands[name]):
            return fitting(other, operands)
    return program, operands


def function_of(launch: Launch, device: int) -> Any:
    """The kernel of a launch, loaded on a device."""
    return function_for(launch.unit, device)


class _Later:
    """A program that few calls need, loaded for the first of them."""

    def __init__(self, program: Program, operands: Mapping[str, Tensor | None], device: int) -> None:
        meta = {
            name: None if one is None else torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="meta")
            for name, one in operands.items()
        }
        self._load = functools.cache(lambda: load(program, meta, device))

    def __call__(self, *operands: Tensor | None) -> None:
        self._load()(*operands)


def _can_be_mapped(tensor: Tensor | None) -> bool:
    """Whether boxes of the last two dimensions can be copied in bulk, if the tensor begins at a multiple of 16 bytes.

    It may be broadcast over the others: a tensor map leaves those out.
    """
    assert tensor is not None
    *sizes, rows, keys = tensor.shape
    *strides, row, key = tensor.stride()
    of_dims = zip((*sizes, rows), (*strides, row), strict=True)
    steps = [stride * tensor.element_size() for size, stride in of_dims if size > 1]
    in_lines = (keys == 1 or key == 1) and (rows == 1 or row != 0)
    return in_lines and all(step % 16 == 0 and step < 2**40 for step in steps)


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor map can describe this tensor at its address."""
    return _can_be_mapped(tensor) and tensor.data_ptr() % 16 == 0


def _preparation(prepared: Prepared, operands: Mapping[str, Tensor | None], device: int) -> _Preparation:
    """The one of all programs that share it, or one of its own."""
    if prepared.shared is None:
        return _Preparation(prepared, operands, device)
    shapes = tuple((one.shape, one.stride()) for one in operands.values() if one is not None)
    found: _Preparation = remembered(
        ("prepared", prepared.shared, shapes, device), lambda: _Preparation(prepared, operands, device)
    )
    return found


class _Preparation:
    """Makes the results of a Prepared, or gives those that it made before of the same tensors in the same state.

    Why not while a graph is captured: the graph runs again with whatever the memory holds then. Why per stream: on
    another one nothing says that they are finished. Tensors are the same that share their version, as views do with
    their base; not those that merely share memory, as `.data` does, since a change of one is not counted for the other.
    """

    def __init__(self, prepared: Prepared, operands: Mapping[str, Tensor | None], device: int) -> None:
        self._shapes = [shape for _, shape in prepared.results]
        unmade = {name: torch.empty(shape, dtype=torch.int32, device="meta") for name, shape in prepared.results}
        self._run = load(prepared.program, {**operands, **unmade}, device)
        self._names = prepared.operands
        self._known: dict[tuple[int, ...], _Made] = {}

    def __call__(self, stream: int, *operands: Tensor) -> list[Tensor]:
        if torch.cuda.is_current_stream_capturing():
            return self._make(operands)
        key: tuple[int, ...] = (stream,)
        owners: list[Tensor] = []
        last: Tensor | None = None
        for operand in operands:
            if operand is last:  # as offsets of queries and of keys may be
                continue
            last = operand
            if operand.is_inference():
                return self._make(operands)
            base: Tensor | None = operand._base
            owners.append(operand if base is None else base)
            key += (id(owners[-1]), operand.data_ptr(), operand._version)
        found = self._known.get(key)
        if found is None or any(ref() is not owner for ref, owner in zip(found.owners, owners, strict=True)):
            for gone in [one for one, made in list(self._known.items()) if any(ref() is None for ref in made.owners)]:
                self._known.pop(gone, None)
            made = _Made([*map(TensorWeakRef, owners)], self._make(operands), copies_to_check(operands))
            found = keep(self._known, key, made, MAX_PREPARED)
        check_unchanged(self._names[0], operands, found.copies)
        return found.results

    def _make(self, operands: tuple[Tensor, ...]) -> list[Tensor]:
        with torch.inference_mode(False):  # tensors whose state can be asked: another may be made of them
            results = [fresh.new_empty(operands[0], shape, dtype=torch.int32) for shape in self._shapes]
        self._run(*operands, *results)
        return results


class _Made(NamedTuple):
    """The results for tensors whose versions `owners` have, and what the tensors held, where that is checked."""

    owners: list[TensorWeakRef]
    results: list[Tensor]
    copies: tuple[Tensor, ...]


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


def _addresses(program: Program, operands: Mapping[str, Tensor | None]) -> list[tuple[str, str]]:
    """The operands whose addresses the launches ask for, and the text that gives each; null for one that a call may
    lack and this one has no name for, as the gradient of an operand in a forward."""
    found: dict[str, str] = {}
    for launch in program.launches:
        for _, _, slot in slots_of(launch.fields):
            if isinstance(slot, Address | View | Map) and not slot.operand.startswith(SCRATCH):
                name = slot.operand
                may_lack = isinstance(slot, Address) and slot.optional
                if may_lack and name not in operands:
                    found[name] = "None"
                else:
                    found[name] = f"None if {name} is None else {name}.data_ptr()" if may_lack else f"{name}.data_ptr()"
    return list(found.items())


def _address(operand: str, program: Program) -> str:
    if operand.startswith(SCRATCH):
        return f"base + {program.scratch.offset(operand.removeprefix(SCRATCH))}"
    return f"at_{operand}"


def fixed_fields(launch: Launch, operands: Mapping[str, Tensor | None]) -> dict[str, Any]:
    """What no call changes: constants, and the strides of operands."""
    found = {name: _settled(value, operands) for name, value in launch.fields.items()}
    return {name: value for name, value in found.items() if value is not None}


def _settled(value: Any, operands: Mapping[str, Tensor | None]) -> Any:
    """Why no closure: one that calls itself is a cycle, which would keep the tensors of a first call."""
    if isinstance(value, Stride | View):
        tensor = operands[value.operand]
        assert tensor is not None
        if isinstance(value, Stride):
            return tensor.stride(value.dim)
        halves = tensor.element_size() // 2
        return (None, *(halves * stride for stride in tensor.stride()[:3]))
    if isinstance(value, Address | Map | Counter):
        return None
    return tuple(_settled(item, operands) for item in value) if type(value) is tuple else value


def tensor_map(slot: Map, operands: Mapping[str, Tensor | None]) -> Any:
    if slot.shape is not None:
        return rows_map(torch.empty(slot.shape, dtype=slot.dtype, device="meta"), slot.rows)
    tensor = operands[slot.operand]
    assert tensor is not None
    for dim in range(3) if slot.shared else ():
        if tensor.stride(dim) == 0:
            tensor = tensor.narrow(dim, 0, 1)
    return rows_map(tensor, slot.rows)


# ---------------------------------------------------------------------------------------------------------------------
# Calls


def bind_forward(
    program: Callable[[], Program],
    problem: Problem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    operands: Operands = NO_OPERANDS,
) -> BoundForward:
    """A forward for tensors of these shapes, strides and device, which allocates out and lse.

    `operands` are slots of the program under their names, like q, k and v; so are the outputs of terms, which a call
    puts into `results` by their names, where it is given.

    Where there are no keys there is no program.
    """
    if goes_by_spans(problem):
        spanned = bind_forward(program, with_spans(problem), q, k, v, operands_as_spans(problem, operands))
        return lambda q, k, v, operands, *results: spanned(q, k, v, operands_as_spans(problem, operands), *results)
    of_mask = mask_operands(problem, q.device)
    operands = {**operands, **of_mask} if of_mask else operands
    problem = in_terms(problem)
    needs_lse = makes_lse(problem)
    names = [operand.name for operand in problem.operands]
    like, no_floats = empty_out(q, problem.head_dim_v, problem.layout), q.new_empty(0, dtype=torch.float32)
    shape, strides, lse_shape = tuple(like.shape), like.stride(), tuple(like.shape[:3])
    outputs = [(operand, term) for term in problem.scores for operand in term.outputs]
    new_out, new_lse = fresh.new_empty_strided, fresh.new_empty
    run = None
    if not problem.empty:
        given = forward_operands(problem, q, k, v, like, operands)
        written = {operand.name: _room(q, operand.shape(problem), operand.dtype) for operand, _ in outputs}
        run = load(program(), {**given, **written}, device_index(q.device))
        if not names and not outputs:
            return _of_inputs(run, shape, strides, no_floats, lse_shape if needs_lse else None)

    def bound(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        operands: Operands | None = None,
        results: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = new_out(q, shape, strides)
        lse = new_lse(no_floats, lse_shape) if needs_lse else None
        if run is None:
            if results is not None:
                room = [_room(q, operand.shape(problem), operand.dtype) for operand, _ in outputs]
                results |= _decoded(outputs, room)
            return out.zero_(), lse if lse is None else lse.fill_(-math.inf)
        if of_mask:
            operands = {**(operands or NO_OPERANDS), **of_mask}
        if outputs:
            room = [_room(q, operand.shape(problem), operand.dtype) for operand, _ in outputs]
            run(q, k, v, out, lse, *[(operands or NO_OPERANDS)[name] for name in names], *room)
            if results is not None:
                results |= _decoded(outputs, room)
        elif operands:
            run(q, k, v, out, lse, *[operands[name] for name in names])
        else:
            run(q, k, v, out, lse)
        return out, lse

    return bound


def _of_inputs(
    run: Run, shape: tuple[int, ...], strides: tuple[int, ...], no_floats: Tensor, lse_shape: tuple[int, ...] | None
) -> BoundForward:
    """A forward that reads q, k and v alone."""
    new_out, new_lse = fresh.new_empty_strided, fresh.new_empty

    def bound(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        operands: Operands | None = None,
        results: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        out = new_out(q, shape, strides)
        lse = None if lse_shape is None else new_lse(no_floats, lse_shape)
        run(q, k, v, out, lse)
        return out, lse

    return bound


def makes_lse(problem: Problem) -> bool:
    return problem.needs_lse or problem.needs_grad


def forward_operands(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, out: Tensor, operands: Operands
) -> dict[str, Tensor | None]:
    """What a forward reads and writes, by the names that slots have; the outputs of terms come behind."""
    lse = q.new_empty(0, dtype=torch.float32) if makes_lse(problem) else None
    return {"q": q, "k": k, "v": v, "out": out, "lse": lse, **_as_read(problem, operands)}


def goes_by_spans(problem: Problem) -> bool:
    """Packed sequences for kernels that take spans of keys alone."""
    return isinstance(problem.mask, Packed) and not is_packed(problem.dropout_in_terms()) and not problem.empty


def _decoded(outputs: list[tuple[Operand, Term]], room: list[Tensor]) -> dict[str, Tensor]:
    made = zip(outputs, room, strict=True)
    return {operand.name: term.decoded(written) for (operand, term), written in made}


def _as_read(problem: Problem, tensors: Operands) -> dict[str, Tensor]:
    """The operands with the strides that kernels read of them, in the order of the problem's."""
    found = problem.operands
    return {one.name: one.expanded(tensors[one.name], problem) if one.dims else tensors[one.name] for one in found}


def _room(q: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    return q.new_zeros(shape, dtype=dtype)


def _unwritten(q: Tensor, shape: tuple[int, ...], dtype: torch.dtype | None) -> Tensor:
    return fresh.new_empty(q, shape, dtype=dtype)


def bind_backward(
    programs: Callable[[torch.device, Wants], Program], problem: Problem, *, operands_alone: bool = False
) -> BoundBackward:
    """A backward for q, k and v of one shape, strides and device. What else varies decides between a few launches.

    `programs` gives the program that makes the wanted gradients on a device, or with `operands_alone` one without any
    of q, k and v. Where the kernel that makes some alone does not build, all are made.
    """
    if goes_by_spans(problem):
        spanned, offsets = bind_backward(programs, with_spans(problem)), problem

        def by_spans(
            dout: Tensor,
            dlse: Tensor | None,
            q: Tensor,
            k: Tensor,
            v: Tensor,
            out: Tensor,
            lse: Tensor,
            operands: Operands = NO_OPERANDS,
            wants: Wants = ALL,
        ) -> Grads:
            return spanned(dout, dlse, q, k, v, out, lse, operands_as_spans(offsets, operands), wants)

        return by_spans
    asked, problem = problem, in_terms(problem)
    of_mask: Operands | None = None  # until the device is known
    known: dict[tuple[Any, ...], BoundBackward] = {}
    empty = problem.empty  # nothing is read then, and a mask has no operands
    names = () if empty else tuple(operand.name for operand in problem.operands)

    def bound(
        dout: Tensor,
        dlse: Tensor | None,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        operands: Operands = NO_OPERANDS,
        wants: Wants = ALL,
    ) -> Grads:
        nonlocal of_mask
        if of_mask is None:
            of_mask = mask_operands(asked, q.device)
        if of_mask:
            operands = {**operands, **of_mask}
        if dlse is not None:
            dlse = dlse.float().contiguous()
        if not lse.is_contiguous():
            lse = lse.contiguous()
        given = [operands[name] for name in names] if names else ()
        strides = tuple([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in given]) if names else ()
        key = (dout.stride(), out.stride(), wants, strides)
        run = known.get(key)
        if run is None or (dout.data_ptr() | out.data_ptr()) & 15:
            if empty or not wants:
                return zero_grads(wants, q, k, v, operands)
            dout, out = _readable(dout), _readable(out)
            key = (dout.stride(), out.stride(), wants, strides)
            run = known.get(key)
            if run is None:
                check_operands(problem, dict(zip(names, given, strict=True)))  # whose memory may have been exchanged
                tensors = {"dout": dout, "q": q, "k": k, "v": v, "out": out, **dict(zip(names, given, strict=True))}
                made = _loaded_backward(programs, problem, wants, tensors, operands_alone)
                run = keep(known, key, made, MAX_LAUNCHES)
        return run(dout, dlse, q, k, v, out, lse, *given)

    return bound


def _loaded_backward(
    programs: Callable[[torch.device, Wants], Program],
    problem: Problem,
    wants: Wants,
    given: Operands,
    operands_alone: bool,
) -> BoundBackward:
    """Of (dout, dlse, q, k, v, out, lse, *operands): allocates the gradients, and makes them.

    A kernel that makes gradients of operands makes one of q, k and v at least, unless it can do without.
    """
    device = given["q"].device
    more = wants if wants & ALL or operands_alone else wants | {"q"}
    try:
        make_all = _backward(programs(device, more), problem, more, given)
    except CompileError:
        if wants | ALL == more:
            raise
        more = wants | ALL
        make_all = _backward(programs(device, more), problem, more, given)
    if more == wants:
        return make_all

    def selected(*tensors: Tensor) -> Grads:
        return {name: grad for name, grad in make_all(*tensors).items() if name in wants}

    return selected


def _backward(program: Program, problem: Problem, wants: Wants, given: Operands) -> BoundBackward:
    """The gradient of an operand `x` is the slot `dx` of the program. It is zero before: kernels add to it, or store
    what they visit. Where its term says so, they leave sums there that the gradient is made of; where the program says
    so, all of these."""
    names = tuple(operand.name for operand in problem.operands)
    if program.fallback_without_tma is not None:
        return _mapped_backward(program, problem, wants, given)
    wanted = [name for name in (*INPUTS, *names) if name in wants]
    written = dict(program.sums)
    sums = {
        operand.name: (written.get(operand.name) or term.sums(operand, problem), operand, term)
        for term in problem.scores
        for operand in term.learning(wants).learned_tensors
    }
    rooms = {
        name: functools.partial(_unwritten if name in written else _room, shape=room.shape, dtype=room.dtype)
        for name, (room, _, _) in sums.items()
    }
    operands = backward_operands(problem, wants, given)
    for name, (room, _, _) in sums.items():
        operands[f"d{name}"] = torch.empty(room.shape, dtype=room.dtype, device="meta").expand(room.full)
    run = load(program, operands, device_index(given["q"].device))
    zeroed = {*program.zeroed, *(f"d{name}" for name in names)}
    new = {name: torch.zeros_like if f"d{name}" in zeroed else fresh.empty_like for name in wanted}
    if wants == ALL and not names:
        new_dq, new_dk, new_dv = new.values()

        def of_inputs(
            dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
        ) -> Grads:
            dq, dk, dv = new_dq(q), new_dk(k), new_dv(v)
            run(dout, dlse, q, k, v, out, lse, dq, dk, dv)
            return {"q": dq, "k": dk, "v": dv}

        return of_inputs

    def bound(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Tensor
    ) -> Grads:
        of = dict(zip((*INPUTS, *names), (q, k, v, *others), strict=True))
        made = {name: rooms[name](q) if name in sums else new[name](of[name]) for name in wanted}
        run(dout, dlse, q, k, v, out, lse, *others, *[made.get(name) for name in of])
        rows = rows_of(problem, out, dout, lse, dlse, of)
        return made | {
            name: room.gradient(term.settled(made[name], rows), one, of[name])
            for name, (room, one, term) in sums.items()
        }

    return bound


def rows_of(problem: Problem, out: Tensor, dout: Tensor, lse: Tensor, dlse: Tensor | None, operands: Operands) -> Rows:
    where = Where(problem, range(problem.seq_q), range(0), operands=operands)
    return Rows(out, dout, lse, dlse, tuple(join_all(where, torch.float32)))


def backward_operands(problem: Problem, wants: Wants, given: Operands) -> dict[str, Tensor | None]:
    """What a backward reads and writes, by the names that slots have: gradients as `empty_like` of what they are of."""
    names = tuple(operand.name for operand in problem.operands)
    read = {**given, **_as_read(problem, given), "lse": torch.empty(0, device="meta")}
    order = ("dout", "dlse", *INPUTS, "out", "lse", *names)
    grads = {
        f"d{name}": torch.empty_like(given[name], device="meta") if name in wants else None
        for name in (*INPUTS, *names)
    }
    return {**{name: read.get(name) for name in order}, **grads}


def _mapped_backward(program: Program, problem: Problem, wants: Wants, given: Operands) -> BoundBackward:
    """By the address of an operand: with a tensor map of it, or without. The two may leave other sums."""
    assert program.fallback_without_tma is not None
    operand, other = program.fallback_without_tma
    names = tuple(one.name for one in problem.operands)
    if not _can_be_mapped(_as_read(problem, given)[operand]):
        return _backward(other, problem, wants, given)
    mapped = _backward(program._replace(fallback_without_tma=None), problem, wants, given)
    unmapped: list[BoundBackward] = []  # once a call has needed it
    place = names.index(operand)

    def bound(
        dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *others: Tensor
    ) -> Grads:
        if others[place].data_ptr() & 15 == 0:
            return mapped(dout, dlse, q, k, v, out, lse, *others)
        if not unmapped:
            now = {"dout": dout, "q": q, "k": k, "v": v, "out": out, **dict(zip(names, others, strict=True))}
            unmapped.append(_backward(other, problem, wants, now))
        return unmapped[0](dout, dlse, q, k, v, out, lse, *others)

    return bound


def remembered(key: Hashable, make: Callable[[], Any]) -> Any:
    """What `make` gave for this key before, as long as it is kept."""
    found = _bound.get(key)
    if found is None:
        generation = _bound.generation
        found = make()
        _bound.put(key, found, generation)
    return found


_bound: Memo[Any] = Memo(max_entries=1024)


def device_index(device: torch.device) -> int:
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
    handles of destroyed streams are reused, so they identify nothing. A launch that is captured into a graph keeps its
    own counters, because the graph may run beside any other launch.
    """

    def __init__(self, device: int, reused: int, captured: int) -> None:
        self._room = _zeroed_integers(device, reused + captured)
        self._base = self._room.data_ptr()
        self._reused_end, self._end = reused, reused + captured
        self._next, self._captured = 0, reused
        self._lock = threading.Lock()

    def take(self, capturing: bool, count: int = 1) -> int:
        """The address of counters for one launch; 0 when none are left."""
        with self._lock:
            if capturing:
                index, after = self._captured, self._captured + count
                if after > self._end:
                    return 0
                self._captured = after
            else:
                index = self._next if self._next + count <= self._reused_end else 0
                if index + count > self._reused_end:
                    return 0
                self._next = index + count
        return self._base + 4 * index


def _zeroed_integers(device: int, count: int) -> Tensor:
    with driver.capture_relaxed(driver.driver()):
        room = torch.zeros(count, dtype=torch.int32, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
    return room


# (reused, captured). A launch would have to outlast a million others; of those with many counters, some thousands.
_ROOMS = {False: (1 << 20, 1 << 14), True: (1 << 21, 1 << 21)}
_counters: dict[tuple[int, bool], _WorkCounters] = {}
_making_counters = threading.Lock()


def work_counter(device: int, stream: int, count: int = 1) -> int:
    """Counters for one launch, or 0: the kernel then takes its work in a fixed order.

    Why 0 for a first launch under capture: the room would be allocated in the graph's own pool, and die with it.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    key = device, count > 1
    counters = _counters.get(key)
    if counters is None:
        if capturing:
            return 0
        with _making_counters:  # one that is not kept would be freed while a kernel counts with it
            counters = _counters.get(key) or _counters.setdefault(key, _WorkCounters(device, *_ROOMS[key[1]]))
    return counters.take(capturing, count)


def counter_room(device: int) -> tuple[int, int, int]:
    """Room for counters of other modules, never freed: its address, how many of them launches cycle through, and how
    many captured ones may keep. Not to be asked for under capture."""
    reused, captured = _ROOMS[True]
    with _making_counters:
        room = _rooms.get(device)
        if room is None:
            room = _rooms[device] = _zeroed_integers(device, reused + captured)
    return room.data_ptr(), reused, captured


_rooms: dict[int, Tensor] = {}
