"""A Problem as a Call: planned, built and bound to tensors of one layout. What does not build is left out."""

from __future__ import annotations

import functools
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..engine import run as engine
from ..engine.backend import Fused
from ..errors import CompileError, UnsupportedProblem
from ..jit import build_all, is_loaded, tuned
from ..jit.compile import notice
from ..masks import Cached, Packed
from ..operands import INPUTS, address
from ..plan import AUTO, BACKENDS, leave_out, plan
from ..target import Target
from ..torch_seam.switches import determinism
from .request import Lowered

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ..backend import Backend
    from ..engine.program import Program
    from ..operands import Grads, Operands, Wants
    from ..plan import Plan
    from ..problem import Problem

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")


class Call(NamedTuple):
    """A planned call: everything but the tensors. `forward` gives out, and lse where it is needed and there is one."""

    problem: Problem
    backend: Backend
    config: Any
    asked: str  # the name of a backend, or AUTO
    names: tuple[str, ...]  # of its operands
    forward: Callable[..., tuple[Tensor, Tensor | None]]  # of (q, k, v, operands), which are views
    gradient: Callable[..., Grads] | None  # of (dout, dlse, q, k, v, out, lse, operands, wants), where it is bound
    layouts: tuple[Any, ...]  # of q, k and v, that it is for: `layouts_of`
    lacks_memory: bool = False  # q, k or v is empty, or has no memory that holds its values
    is_ours: bool = False  # kernels of ours, which read addresses: views of the tensors are not needed
    is_plain: bool = False  # nothing but q, k and v, no gradient, and no results of terms
    reads_places: bool = False  # operands say where the keys of each sequence are
    plan: Plan | None = None  # of our own kernels
    native: dict[Any, Any] | None = None  # by form, what the native extension knows of it (native.py)

    @property
    def backend_name(self) -> str:
        return next(name for name, backend in BACKENDS.items() if backend is self.backend)

    @property
    def lowered(self) -> Lowered:
        """As the registered operators take it."""
        return Lowered.of(self.problem, self.asked)

    def backward(
        self, dout: Tensor, dlse: Tensor | None, saved: tuple[Any, ...], operands: Operands, wants: Wants
    ) -> Grads:
        if self.gradient is not None:
            return self.gradient(dout, dlse, *saved, operands, wants)
        q, k, v, out, lse = saved
        with _deterministic_as(self.problem, self.backend):
            return self.backend.backward(dout, dlse, q, k, v, out, lse, self.problem, self.config, operands, wants)


def _deterministic_as(problem: Problem, backend: Backend) -> AbstractContextManager[None]:
    """What was planned to be deterministic stays so, wherever the switch stands when the backward runs.

    PyTorch's fused kernels read the switch, and with warn_only they warn and add in any order all the same: it has to
    be strict. So another thread that runs an operation without a deterministic algorithm, just while such a backward is
    launched, meets PyTorch's error. All other backends go by the Problem or have one order only, and need no switch.
    """
    if problem.deterministic and backend in _OBEY_THE_SWITCH:
        return determinism.held(strict=True)
    return _AS_IT_IS


_OBEY_THE_SWITCH = BACKENDS["torch-flash"], BACKENDS["torch-efficient"]
_AS_IT_IS: AbstractContextManager[None] = nullcontext()


def build(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, operands: Operands, backend: str, now: Callable[[], int]
) -> tuple[Call, int]:
    """The Call of a problem with these views: planned, and every kernel of it built.

    What does not build is left out, and the plan is made again. Also returns what `now`, the generation of the memory,
    was before the plan was made.
    """
    generation = now()
    planned = plan(problem, Target.of(q.device), backend)
    failed: CompileError | None = None
    while True:
        try:
            _build(planned)
            return _bound_call(planned, q, k, v, operands, backend), generation
        except CompileError as error:
            failed = error
            _leave_out(planned, error, backend)
        generation = now()
        try:
            planned = plan(problem, planned.target, backend)
        except UnsupportedProblem:
            raise failed from None  # a backend that was asked for by name, and has nothing left


def _bound_call(planned: Plan, q: Tensor, k: Tensor, v: Tensor, operands: Operands, asked: str) -> Call:
    problem, backend, config = planned.problem, BACKENDS[planned.backend], planned.config
    forward, gradient = planned.forward, planned.backward
    if forward is None:
        bound = _bound(backend, q, k, v, problem, config, operands)
    else:
        bound = engine.bind_forward(lambda: forward, problem, q, k, v, operands)
    call = Call(
        problem,
        backend,
        config,
        asked,
        tuple(operand.name for operand in problem.operands),
        bound,
        _bound_gradient(backend, problem) if forward is None else None,
        layouts_of(q, k, v),
        _lacks_memory(q, k, v),
        isinstance(backend, Fused),
        reads_places=isinstance(problem.mask, Packed | Cached),
    )
    if forward is None:
        return call
    if gradient is not None:
        alone = isinstance(backend, Fused) and backend.makes_operands_alone(problem)
        programs = functools.partial(_backward_program, planned)
        call = call._replace(gradient=engine.bind_backward(programs, problem, operands_alone=alone))
    return call._replace(plan=planned, native={})


def _lacks_memory(*tensors: Tensor) -> bool:
    try:
        return any(not address(tensor) or tensor.is_neg() for tensor in tensors)
    except RuntimeError:  # addresses are out of reach
        return False


def layouts_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Any, ...]:
    """Shapes, dtypes and devices, then strides."""
    return (
        q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, q.stride(), k.stride(),
        v.stride(),
    )  # fmt: skip


STRIDES = 9  # where they begin


def backward_program(call: Call, wants: Wants) -> Program:
    """What makes these gradients of a call of our own kernels."""
    assert call.plan is not None
    return _backward_program(call.plan, None, wants)


def _backward_program(planned: Plan, device: torch.device | None, wants: Wants) -> Program:
    everything = frozenset((*INPUTS, *planned.problem.operand_grads))
    if planned.backward is not None and wants == everything:
        return planned.backward
    return planned.backward_for(wants)


def _build(chosen: Plan) -> None:
    """Every kernel of a plan, both directions side by side, before the first of them is needed."""
    missing = [unit for unit in chosen.units if not is_loaded(unit)]
    if not missing:
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _log.warning("tilewise: kernels are built while a CUDA graph is captured; call tilewise.warm_up before it")
    with notice(f"{', '.join(unit.name for unit in missing)} for {missing[0].arch}"):
        for unit, built in build_all(missing):
            if isinstance(built, CompileError):
                built.unit = unit.label
                raise built


def _leave_out(chosen: Plan, error: CompileError, backend: str) -> None:
    """Leave out what failed: the tuned config it came from, or the kernel, or the backend if it names none."""
    first_line = str(error).splitlines()[0]
    in_backward = chosen.backward is not None and error.unit in {unit.label for unit in chosen.backward.units}
    if tuned.does_not_build(chosen.backward_config if in_backward else chosen.config, first_line):
        again = plan(chosen.problem, chosen.target, backend)
        if (again.config, again.backward_config) != (chosen.config, chosen.backward_config):
            return
    what = error.unit or chosen.backend
    if error.unit == "" and backend != AUTO:
        raise error
    _log.warning("%s is left out from now on, it does not build here: %s", what, error)
    leave_out(what, first_line)


def _bound(
    backend: Backend, q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Any, operands: Operands
) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The backend's forward for tensors of one signature. Those with a `bind` settle there what no call need repeat."""
    bind = getattr(backend, "bind", None)
    if bind is not None:
        return bind(q, k, v, problem, config, operands=operands)  # type: ignore[no-any-return]
    forward: Any = backend.forward
    if any(term.outputs for term in problem.scores):
        return lambda q, k, v, operands, *results: forward(q, k, v, problem, config, operands, *results)
    return lambda q, k, v, operands: forward(q, k, v, problem, config, operands)


def _bound_gradient(backend: Backend, problem: Problem) -> Callable[..., Grads] | None:
    bind = getattr(backend, "bind_backward", None)
    return bind(problem) if bind is not None and problem.needs_grad else None
