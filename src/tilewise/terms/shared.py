"""What the terms have in common: how they find their operands, in torch operations and in C++."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import InvalidInput
from ..operands import SCORE_DIMS, address
from ..scores import Term

if TYPE_CHECKING:
    from ..operands import Operand, Sizes, Wants
    from ..scores import Where

Tensor = torch.Tensor


class Learner(Term):
    """A term with operands that may be learned: `learned` says whether its struct makes their gradients.

    What a call asks for decides that (`learning`), and nothing but kernels depends on it.
    """

    __slots__ = ()
    learned: bool

    @property
    def cpp_gradients(self) -> Wants:
        return frozenset(operand.name for operand in self.tensors if operand.differentiable)

    @property
    def learned_tensors(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.tensors if operand.differentiable) if self.learned else ()

    def learning(self, wants: Wants) -> Learner:
        learned = bool(self.cpp_gradients & wants)
        return self if learned == self.learned else replace(self, learned=learned)  # type: ignore[type-var]


def broadcast_dims(tensor: Tensor, problem: Sizes, *, by_stride: bool) -> tuple[str, ...]:
    """The dimensions of the scores that a tensor, given with up to four, is broadcast over.

    By size, or `by_stride`, which must not be where its gradient is made: that has all of its size.
    """
    full = (problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)
    if tensor.ndim > 4:
        raise InvalidInput("scores", f"a tensor of {tensor.ndim} dimensions", "at most 4", "reshape it")
    missing = 4 - tensor.ndim
    return tuple(
        dim
        for i, dim in enumerate(SCORE_DIMS)
        if full[i] > 1
        and (i < missing or tensor.shape[i - missing] == 1 or (by_stride and tensor.stride(i - missing) == 0))
    )


def is_paired(tensor: Tensor, problem: Sizes) -> bool:
    """Two keys of a row may be read as one number, whatever the row. Of a trace, which has no addresses, none may."""
    if torch.compiler.is_compiling() or not tensor.ndim:
        return False
    width = tensor.element_size()
    steps = [step for size, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if size > 1]
    contiguous = tensor.shape[-1] == problem.seq_kv and tensor.stride(-1) == 1
    aligned = _address(tensor) % (2 * width) == 0 and all(step % 2 == 0 for step in steps)
    return bool(contiguous and aligned and problem.seq_kv % 2 == 0)


def check_paired(name: str, tensor: Tensor, problem: Sizes) -> None:
    """Raise InvalidInput unless two keys may be read as one number."""
    if not torch.compiler.is_compiling() and not is_paired(tensor, problem):
        raise InvalidInput(
            name,
            f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
            "keys side by side, and all addresses of rows multiples of two numbers, as its term says (`paired`)",
            "make the term without `paired`, or the tensor contiguous",
        )


def _address(tensor: Tensor) -> int:
    if type(tensor) not in (Tensor, torch.nn.Parameter):  # a fake tensor warns when it is asked
        return 0
    try:
        return address(tensor)
    except RuntimeError:  # it is traced: the call that runs says it again
        return 0


def operand_of(where: Where, operand: Operand, dtype: torch.dtype | None = None) -> Tensor:
    """The operand of a call, with the dimensions of scores and broadcastable to them, in its own dtype or this one."""
    problem = where.problem
    given = where.operands[operand.name]
    tensor = operand.expanded(given if dtype is None else given.to(dtype), problem)
    tensor = tensor[tuple(slice(None) if dim in operand.dims else None for dim in SCORE_DIMS)]
    if "row" in operand.dims:
        tensor = tensor[:, :, where.rows.start : where.rows.stop]
    if "key" in operand.dims:
        tensor = tensor[:, :, :, where.keys.start : where.keys.stop]
    if not where.stacked or not {"head", "row"} & set(operand.dims):
        return tensor
    batch, _, _, keys = tensor.shape
    tensor = tensor.expand(batch, problem.heads_q, len(where.rows), keys)
    return tensor.reshape(batch, problem.heads_kv, problem.group * len(where.rows), keys)


def members(name: str, dims: tuple[str, ...]) -> dict[str, type[Any]]:
    """The members of a C++ struct for a tensor: its address, and one stride per dimension."""
    return {name: ctypes.c_void_p} | {f"{name}_{dim}_stride": ctypes.c_longlong for dim in dims}
