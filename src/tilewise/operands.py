"""Operands: the tensors of a call beside q, k and v, by name, and the gradients of all of them.

A mask or a score term says which operands it reads (`Mask.operands`, `Term.tensors`), and a Problem lists them in one
order. Wherever tensors travel they are a mapping under these names; gradients come back under the same names, beside
"q", "k" and "v".
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

Operands = Mapping[str, torch.Tensor]
Wants = frozenset[str]
"""The inputs whose gradients are asked for."""
Grads = dict[str, torch.Tensor]
"""Those gradients, and no others."""

INPUTS = ("q", "k", "v")
ALL: Wants = frozenset(INPUTS)
NO_OPERANDS: Operands = MappingProxyType({})


class Operand(NamedTuple):
    """A tensor that a mask or a term reads. One that is not differentiable must not require grad."""

    name: str
    differentiable: bool = False


@lru_cache(maxsize=256)
def chosen(names: tuple[str, ...], flags: tuple[bool, ...]) -> Wants:
    """Those of the names whose flag is set."""
    return frozenset(name for name, flag in zip(names, flags, strict=True) if flag)


def zero_grads(wants: Wants, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands) -> Grads:
    """The gradients of a problem in which nothing depends on anything."""
    given = {"q": q, "k": k, "v": v, **operands}
    return {name: torch.zeros_like(tensor) for name, tensor in given.items() if name in wants}


@contextmanager
def recording() -> Iterator[None]:
    """Autograd records what runs inside, also in an operator's kernel, which the dispatcher calls below autograd."""
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    for key in _AUTOGRAD:
        excluded = excluded.remove(key)
    with torch._C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        yield


_AUTOGRAD = tuple(getattr(torch._C.DispatchKey, name) for name in ("AutogradFunctionality", "AutogradOther"))
