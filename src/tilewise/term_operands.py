"""The tensors that terms of scores read, as values, and what a backward makes their gradients of."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch

from .errors import InvalidInput

Tensor = torch.Tensor
SCORE_DIMS = ("batch", "head", "row", "key")


class Sizes(Protocol):
    """What is asked of a Problem here."""

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
    """A tensor that a term reads.

    A call gives it with the shape `shape(problem)`, or as a view expanded to `full_shape(problem)`. Kernels read its
    address and one stride per dimension, 0 along those that it is broadcast `over`. The gradient of a `learned` one is
    made by the backward under the name `d` + name.
    """

    name: str
    dims: tuple[str, ...]  # some of SCORE_DIMS, or "span", whose size is `span`
    over: tuple[str, ...] = ()  # the dimensions that it is broadcast over: of size 1
    dtype: torch.dtype | None = None  # None: that of q
    learned: bool = False
    differentiable: bool = False  # whether it could be learned
    span: int = 0

    def full_shape(self, problem: Sizes) -> tuple[int, ...]:
        sizes = {
            "batch": problem.batch,
            "head": problem.heads_q,
            "row": problem.seq_q,
            "key": problem.seq_kv,
            "span": self.span,
        }
        return tuple(sizes[dim] for dim in self.dims)

    def shape(self, problem: Sizes) -> tuple[int, ...]:
        full = self.full_shape(problem)
        return tuple(1 if dim in self.over else size for dim, size in zip(self.dims, full, strict=True))

    def expanded(self, tensor: Tensor, problem: Sizes) -> Tensor:
        """The tensor as kernels read it. Raises InvalidInput for one of another shape or dtype."""
        full, dtype = self.full_shape(problem), self.dtype or problem.dtype
        sizes = (1,) * (len(full) - tensor.ndim) + tuple(tensor.shape)
        fits = len(sizes) == len(full) and all(n in (1, m) for n, m in zip(sizes, full, strict=True))
        if not fits:
            expected = f"{self.shape(problem)}, the sizes of {self.dims}"
            raise InvalidInput(self.name, f"shape {tuple(tensor.shape)}", expected, "reshape or expand it")
        if tensor.dtype != dtype:
            raise InvalidInput(f"{self.name}.dtype", tensor.dtype, f"{dtype}", "cast it")
        return tensor.expand(full)


class Sums(NamedTuple):
    """What a backward kernel leaves of an operand's gradient: a tensor of this shape and dtype, zeroed before.

    It is seen by kernels as expanded to `full` (dimensions `dims`). Its sum over the dimensions that the operand does
    not have, or is broadcast over, is the gradient: `gradient`.
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    full: tuple[int, ...]
    dtype: torch.dtype

    def gradient(self, sums: Tensor, operand: Operand, problem: Sizes) -> Tensor:
        sums = sums.reshape(self.shape)
        extra = tuple(i for i, dim in enumerate(self.dims) if dim not in operand.dims)
        own = sums.sum(extra) if extra else sums
        over = tuple(i for i, n in enumerate(operand.shape(problem)) if n == 1 and own.shape[i] > 1)
        total = own.sum(over, keepdim=True) if over else own
        return total.to(operand.dtype or problem.dtype)
