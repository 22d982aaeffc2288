"""Variants: candidates that say more than the planner would: a backend with its config spelled out, or a rung.

    sm90@consumers=2,block_kv=128,...   a backend of the planner with exactly these compile-time choices
    sm90:backward@block_q=64,...        the same for its backward; the forward is the planner's
    ladder:three-kernel                 a rung of the ladder, with its own choice of config
    ladder:three-kernel@block_m=64,...  the same with exactly these

Every field of the backend's Config must be named: a variant means the same in every process and every release.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ... import ladder
from ...element import from_number
from ...engine.backend import Direction, Fused
from ...errors import InvalidInput, UnsupportedProblem
from ...operands import INPUTS
from ...plan import BACKENDS
from ...problem import mask_operands
from ...target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...jit import Unit
    from ...operands import Operands
    from ...problem import Problem
    from .inputs import Inputs

Tensor = torch.Tensor
RUNG = "ladder:"
THREE_KERNEL = f"{RUNG}three-kernel"
BACKWARD = ":backward"
_AT = "@"


def is_variant(name: str) -> bool:
    return name.startswith(RUNG) or (_AT in name and name.partition(_AT)[0].removesuffix(BACKWARD) in BACKENDS)


def has_backward(backend: str) -> bool:
    """The backend chooses its backward's config apart from the forward's."""
    return isinstance(BACKENDS.get(backend), Fused)


def name_of(backend: str, config: Any) -> str:
    """The name under which every process finds the backend with this config again."""
    fields = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return f"{backend}{_AT}{','.join(f'{name}={int(value)}' for name, value in fields)}"


def backend_of(name: str) -> Any:
    """What is behind a backend's or a rung's name, or `sm90:backward`; an optional package that it needs may be missing
    still."""
    if name.startswith(RUNG):
        return ladder.module(name.removeprefix(RUNG))
    backend: Any = BACKENDS[name.removesuffix(BACKWARD)]
    return backend.backward_direction if name.endswith(BACKWARD) else backend


def resolve(name: str) -> tuple[Any, Any]:
    """The backend and the config (None: its own choice) that a variant names."""
    head, _, tail = name.partition(_AT)
    backend = backend_of(head)
    return backend, _config(backend, head, tail) if tail else None


def units_of(backend: Any, problem: Problem, config: Any, arch: str) -> list[Unit]:
    """What is compiled for a config: a kernel, or those that a backend of several makes of it; nothing for Python."""
    if not hasattr(backend, "unit"):
        return []
    own_arch = [] if hasattr(backend, "ARCH") else [arch]
    return [backend.unit(stage, *own_arch) for stage in stages_of(backend, problem, config)]


def stages_of(backend: Any, problem: Problem, config: Any) -> tuple[Any, ...]:
    """The configs of a backend's kernels, one after the other."""
    return tuple(backend.stages_of(problem, config)) if hasattr(backend, "stages_of") else (config,)


def forward(name: str, problem: Problem, inputs: Inputs) -> Callable[[], Any]:
    """A call without arguments; UnsupportedProblem, with every reason, if the backend refuses the problem."""
    backend, config = resolve(name)
    q, k, v, operands = inputs.q, inputs.k, inputs.v, mask_operands(inputs.bias)
    reasons = backend.why_not(problem, Target.of(q.device))
    if reasons:
        raise UnsupportedProblem("; ".join(map(str, reasons)), problem)
    of_backward = isinstance(backend, Direction)
    whole = backend_of(name.partition(_AT)[0].removesuffix(BACKWARD)) if of_backward else backend
    call = _Call(whole, problem, None if of_backward else config, config, operands)
    if problem.needs_grad:
        return lambda: _Differentiable.apply(q, k, v, call)  # type: ignore[no-untyped-call]
    if problem.needs_lse:
        return lambda: call.forward(q, k, v)
    return lambda: call.forward(q, k, v)[0]


class _Call(NamedTuple):
    """A backend with its configs; None: its own choice. A backward passes over a config that is a forward's."""

    backend: Any
    problem: Problem
    config: Any
    backward_config: Any
    operands: Operands

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        found: tuple[Tensor, Tensor | None] = self.backend.forward(q, k, v, self.problem, self.config, self.operands)
        return found

    def backward(self, dout: Tensor, *saved: Tensor) -> tuple[Tensor | None, ...]:
        """`saved` are q, k, v, out and lse."""
        grads = self.backend.backward(dout, None, *saved, self.problem, self.backward_config, self.operands)
        return tuple(grads.get(name) for name in INPUTS)


class _Differentiable(torch.autograd.Function):
    """One config after another in one process: nothing of the planner's choice comes in between."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        out, lse = call.forward(q, k, v)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        return (*ctx.call.backward(dout, *ctx.saved_tensors), None)


def _config(backend: Any, head: str, text: str) -> Any:
    """Of the one of the backend's configs that has these fields: that of 16 bits, or that of float32."""
    try:
        given = {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        given = {}
    for made in getattr(backend, "config_types", None) or (backend.Config,):
        fields = {field.name: field for field in dataclasses.fields(made)}
        if set(given) == set(fields):
            return made(**{name: from_number(str(fields[name].type), n) for name, n in given.items()})
    wanted = ",".join(f"{name}=N" for name in fields)
    raise InvalidInput("candidate", repr(f"{head}{_AT}{text}"), f"{head}{_AT}{wanted}", "name every field once")
