"""Variants: candidates that say more than the planner would: a backend with its config spelled out, or a rung.

    sm90@consumers=2,block_kv=128,...   a backend of the planner with exactly these compile-time choices
    ladder:three-kernel                 a rung of the ladder, with its own choice of config
    ladder:three-kernel@block_m=64,...  the same with exactly these

Every field of the backend's Config must be named: a variant means the same in every process and every release.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from ... import ladder
from ...errors import InvalidInput, UnsupportedProblem
from ...plan import BACKENDS
from ...target import Target

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...problem import Problem
    from .inputs import Inputs

RUNG = "ladder:"
_AT = "@"


def is_variant(name: str) -> bool:
    return name.startswith(RUNG) or (_AT in name and name.partition(_AT)[0] in BACKENDS)


def name_of(backend: str, config: Any) -> str:
    """The name under which every process finds the backend with this config again."""
    fields = ((field.name, getattr(config, field.name)) for field in dataclasses.fields(config))
    return f"{backend}{_AT}{','.join(f'{name}={int(value)}' for name, value in fields)}"


def backend_of(name: str) -> Any:
    """The module behind a backend's or a rung's name; an optional package that it needs may be missing still."""
    return ladder.module(name.removeprefix(RUNG)) if name.startswith(RUNG) else BACKENDS[name]


def resolve(name: str) -> tuple[Any, Any]:
    """The backend and the config (None: its own choice) that a variant names."""
    head, _, tail = name.partition(_AT)
    backend = backend_of(head)
    return backend, _config(backend, head, tail) if tail else None


def forward(name: str, problem: Problem, inputs: Inputs) -> Callable[[], Any]:
    """A call without arguments; UnsupportedProblem, with every reason, if the backend refuses the problem."""
    backend, config = resolve(name)
    q, k, v, bias = inputs.q, inputs.k, inputs.v, inputs.bias
    reasons = backend.why_not(problem, Target.of(q.device))
    if reasons:
        raise UnsupportedProblem("; ".join(map(str, reasons)), problem)
    if problem.needs_lse:
        return lambda: backend.forward(q, k, v, problem, config, bias)
    return lambda: backend.forward(q, k, v, problem, config, bias)[0]


def _config(backend: Any, head: str, text: str) -> Any:
    fields = {field.name: field for field in dataclasses.fields(backend.Config)}
    try:
        given = {name: int(value) for name, value in (part.split("=") for part in text.split(","))}
    except ValueError:
        given = {}
    if set(given) != set(fields):
        wanted = ",".join(f"{name}=N" for name in fields)
        raise InvalidInput("candidate", repr(f"{head}{_AT}{text}"), f"{head}{_AT}{wanted}", "name every field once")
    return backend.Config(**{name: bool(n) if fields[name].type == "bool" else n for name, n in given.items()})
