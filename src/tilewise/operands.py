"""Operands: the tensors of a call beside q, k and v, by name, and the gradients of all of them.

A mask or a score term says which operands it reads (`Mask.operands`, `Term.tensors`), and a Problem lists them in one
order. Wherever tensors travel they are a mapping under these names; gradients come back under the same names, beside
"q", "k" and "v".
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import contextmanager
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from .errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

Operands = Mapping[str, torch.Tensor]
Wants = frozenset[str]
"""The inputs whose gradients are asked for."""
Grads = dict[str, torch.Tensor]
"""Those gradients, and no others."""

INPUTS = ("q", "k", "v")
SCORE_DIMS = ("batch", "head", "row", "key")
ALL: Wants = frozenset(INPUTS)
NO_OPERANDS: Operands = MappingProxyType({})


CHECK = "TILEWISE_CHECK"
"""Set in the environment, to anything but 0: what tensors on a device hold is read and checked in every call."""


def are_checked() -> bool:
    return os.environ.get(CHECK, "0") not in ("", "0")


def copies_to_check(tensors: Iterable[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Where checks are asked for, what `check_unchanged` compares with; else nothing."""
    return tuple(tensor.clone() for tensor in tensors) if are_checked() else ()


def check_unchanged(name: str, tensors: Iterable[torch.Tensor], copies: tuple[torch.Tensor, ...]) -> None:
    """Raise InvalidInput if tensors differ from their `copies_to_check`, though their versions are the same."""
    if not all(torch.equal(tensor, copy) for tensor, copy in zip(tensors, copies, strict=False)):
        raise InvalidInput(
            name,
            "a tensor that has changed in a way that PyTorch does not count, such as `.data` or a kernel of another "
            "library",
            "a tensor that is as it was when it was first used, or whose version says that it has changed",
            "change it by an operation of PyTorch, or pass a new tensor or mask",
        )


class Sizes(Protocol):
    """What operands ask of a Problem; also its `sequences`, if it has them: as many as batches, or packed into one."""

    @property
    def batch(self) -> int: ...
    @property
    def heads_q(self) -> int: ...
    @property
    def seq_q(self) -> int: ...
    @property
    def seq_kv(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...


class Operand(NamedTuple):
    """A tensor that a mask or a term reads. One that is not differentiable must not require grad.

    One that kernels read has `dims`: a call gives it with the shape `shape(problem)`, or any that broadcasts to
    `full_shape(problem)`. Kernels read its address and one stride per dimension, 0 along those that it is broadcast
    `over`. The backward makes its gradient under the name `d` + name.
    """

    name: str
    differentiable: bool = False
    dims: tuple[str, ...] = ()  # some of SCORE_DIMS, or "span", whose size is `span`
    over: tuple[str, ...] = ()  # the dimensions that it is broadcast over: of size 1
    dtype: torch.dtype | None = None  # None: that of q
    span: int = 0

    def full_shape(self, problem: Sizes) -> tuple[int, ...]:
        sizes = {
            "batch": getattr(problem, "sequences", problem.batch),
            "head": problem.heads_q,
            "row": problem.seq_q,
            "key": problem.seq_kv,
            "span": self.span,
        }
        return tuple(sizes[dim] for dim in self.dims)

    def shape(self, problem: Sizes) -> tuple[int, ...]:
        full = self.full_shape(problem)
        return tuple(1 if dim in self.over else size for dim, size in zip(self.dims, full, strict=True))

    def check(self, tensor: torch.Tensor, problem: Sizes) -> None:
        """Raise InvalidInput for a tensor of another shape or dtype."""
        full, missing = self.expanded(tensor, problem).shape, len(self.dims) - tensor.ndim
        for i, dim in enumerate(self.dims):
            # The gradient of one that is broadcast by its strides has all of its size.
            alike = i < missing or tensor.shape[i - missing] == 1
            alike = alike or (tensor.stride(i - missing) == 0 and not self.differentiable)
            if dim in self.over and full[i] > 1 and not alike:
                raise InvalidInput(
                    self.name,
                    f"shape {tuple(tensor.shape)}",
                    f"{self.shape(problem)}: its term says that it is the same for every {dim}",
                    "give that dimension a size of 1, or take it out of the term's `over`",
                )
        dtype = self.dtype or problem.dtype
        if tensor.dtype != dtype:
            raise InvalidInput(f"{self.name}.dtype", tensor.dtype, f"{dtype}", "cast it")

    def expanded(self, tensor: torch.Tensor, problem: Sizes) -> torch.Tensor:
        """The tensor as kernels read it. Raises InvalidInput for one of another shape."""
        full = self.full_shape(problem)
        sizes = (1,) * (len(full) - tensor.ndim) + tuple(tensor.shape)
        fits = len(sizes) == len(full) and all(n in (1, m) for n, m in zip(sizes, full, strict=True))
        if not fits:
            expected = f"{self.shape(problem)}, the sizes of {self.dims}"
            raise InvalidInput(self.name, f"shape {tuple(tensor.shape)}", expected, "reshape or expand it")
        return tensor.expand(full)


class Sums(NamedTuple):
    """What a backward kernel leaves of an operand's gradient: a tensor of this shape and dtype, zeroed before.

    Kernels see it as expanded to `full` (dimensions `dims`). Its sum over the dimensions that the operand does not
    have, or is broadcast over, is the gradient: `gradient`. With `zero` it has the dimensions of scores, and its sum
    over each distance of a key from its row is the gradient of a number in a table: of number `zero` where the two are
    the same.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    full: tuple[int, ...]
    dtype: torch.dtype
    zero: int | None = None

    def gradient(self, sums: torch.Tensor, operand: Operand, tensor: torch.Tensor) -> torch.Tensor:
        """The gradient, in the shape of the operand that the call was given."""
        if self.zero is not None:
            own = by_distance(sums, operand.span, self.zero)
        else:
            extra = tuple(i for i, dim in enumerate(self.dims) if dim not in operand.dims)
            own = sums.sum(extra) if extra else sums
        own = own.sum_to_size((1,) * (own.ndim - tensor.ndim) + tuple(tensor.shape))
        return own.reshape(tensor.shape).to(tensor.dtype)


def by_distance(scores: torch.Tensor, span: int, zero: int) -> torch.Tensor:
    """(heads, span): the sums over (batch, heads, rows, keys) of what has the same key - row + zero; what lies beyond
    an end counts there. Always added in the same order."""
    _, heads, rows, keys = scores.shape
    lines = []
    for head in range(heads):  # one after another, for the sake of memory
        # The last row first, and each row one place behind the one above it: distances are columns then.
        wide = torch.nn.functional.pad(scores[:, head].sum(0).flip(0), (0, rows))
        lines.append(wide.flatten()[: rows * (keys + rows - 1)].view(rows, keys + rows - 1).sum(0))
    sums = torch.stack(lines)
    first = rows - 1 - zero  # the column of number 0
    begin, end = (max(0, min(column, keys + rows - 1)) for column in (first + 1, max(first + 1, first + span - 1)))
    found = sums.new_zeros(heads, span)
    found[:, begin - first : end - first] = sums[:, begin:end]
    found[:, 0] += sums[:, :begin].sum(1)
    found[:, -1] += sums[:, end:].sum(1)
    return found


def address(tensor: torch.Tensor) -> int:
    """Where a tensor begins; 0 for one without elements. Raises RuntimeError for one without memory of its own.

    `data_ptr` asks for memory to write to, so it copies what a lazy clone shares, and warns of fake tensors.
    """
    if tensor.numel() == 0:
        return 0
    return _storage_address(tensor) + tensor.storage_offset() * tensor.element_size()  # type: ignore[return-value]


_storage_address: Callable[[torch.Tensor], int] = torch._C._data_address  # type: ignore[attr-defined]


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
