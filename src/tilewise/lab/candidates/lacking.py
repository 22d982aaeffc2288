"""What the other libraries' attention shares: how one says what it lacks, and a problem's sequences laid end to end."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import Reason
from ...masks import Causal, Documents, Full, Window
from ...scores import Softcap

if TYPE_CHECKING:
    from ...masks import Mask
    from ...problem import Problem
    from ...scores import Term
    from .inputs import Inputs

Tensor = torch.Tensor
Forward = Callable[[], Any]


class Rival(NamedTuple):
    """A library's attention: what it lacks, and how it is called.

    `packs`: the masks under which it takes sequences laid end to end, (tokens, heads, head_dim). Its tensors are then
    stored that way, so that no copy of ours is in its time.
    """

    module: str
    install: str
    lacks: Callable[[Problem, str], list[Reason]]
    forward: Callable[[Problem, Inputs], Forward]
    packs: tuple[type[Mask], ...] = ()
    terms: tuple[type[Term], ...] = ()  # of scores that it can compute, beside a softcap

    def why_not(self, problem: Problem, device: str) -> list[Reason]:
        missing = [Reason(f"the module {self.module} cannot be imported", self.install)]
        return (
            ([] if importable(self.module) else missing)
            + unknown_terms(problem, self.terms)
            + self.lacks(problem, device)
        )


def importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # not even the package above it, or one that cannot be imported
        return False


def reasons(*checks: tuple[bool, str, str]) -> list[Reason]:
    return [Reason(what, remedy) for wrong, what, remedy in checks if wrong]


def unknown_terms(problem: Problem, known: tuple[type[Term], ...] = ()) -> list[Reason]:
    """Terms other than a softcap, which each library answers for itself, and those that are known to it."""
    others = [term for term in problem.scores if not isinstance(term, (Softcap, *known))]
    return [Reason(f"the term {term}: not compared here with others' attention", "drop it") for term in others]


def on_cpu(device: str) -> tuple[bool, str, str]:
    return not device.startswith("cuda"), f"device {device}: the library has CUDA kernels alone", "run it on a GPU"


def not_16_bits(problem: Problem, library: str) -> tuple[bool, str, str]:
    wrong = problem.dtype not in (torch.float16, torch.bfloat16)
    return wrong, f"{problem.dtype}: {library} takes float16 and bfloat16", "cast q, k and v"


def inner_mask(mask: Mask) -> Mask:
    """What holds inside a sequence."""
    return mask.inner if isinstance(mask, Documents) else mask


def is_aligned(problem: Problem, align: str) -> bool:
    """The mask's alignment is one the library has, or makes no difference here."""
    mask = problem.mask
    square = problem.seq_q == problem.seq_kv
    if isinstance(mask, Documents):
        square = mask.cu_seqlens_q == mask.cu_seqlens_kv
    inner = inner_mask(mask)
    return getattr(inner, "offset", 0) == 0 and (square or getattr(inner, "align", align) == align)


def is_banded(problem: Problem) -> bool:
    """Full, causal or a window, inside each document too, aligned as FlashAttention's kernels have it."""
    return isinstance(inner_mask(problem.mask), Full | Causal | Window) and is_aligned(problem, "bottom-right")


def window_sizes(mask: Mask, unlimited: int | None) -> tuple[int | None, int | None]:
    """(left, right) of a full, causal or windowed mask."""
    if isinstance(mask, Window):
        left, right = (unlimited if size is None else size for size in (mask.left, mask.right))
        return left, right
    return unlimited, 0 if isinstance(mask, Causal) else unlimited


class Sequences(NamedTuple):
    """A problem's sequences, laid end to end: those of the batch, or the documents of each of them."""

    starts_q: Tensor  # int32: of every sequence, and the total
    starts_kv: Tensor
    max_q: int
    max_kv: int


def sequences(problem: Problem, device: torch.device) -> Sequences:
    mask = problem.mask
    starts_q: tuple[int, ...] = (0, problem.seq_q)
    starts_kv: tuple[int, ...] = (0, problem.seq_kv)
    if isinstance(mask, Documents):
        starts_q, starts_kv = mask.cu_seqlens_q, mask.cu_seqlens_kv
    return Sequences(
        _repeated(starts_q, problem.batch, device),
        _repeated(starts_kv, problem.batch, device),
        *(max(end - start for start, end in pairwise(starts)) for starts in (starts_q, starts_kv)),
    )


def _repeated(starts: tuple[int, ...], batch: int, device: torch.device) -> Tensor:
    total = starts[-1]
    every = chain.from_iterable((n * total + start for start in starts[:-1]) for n in range(batch))
    return torch.tensor([*every, batch * total], dtype=torch.int32, device=device)


def packed(tensor: Tensor) -> Tensor:
    """(batch, heads, seq, dim) as (tokens, heads, dim): a view where sequences lie end to end in memory."""
    return tensor.transpose(1, 2).flatten(0, 1)


def unpacked(tensor: Tensor, problem: Problem) -> Tensor:
    """(tokens, heads, dim) as (batch, heads, seq_q, dim)."""
    return tensor.view(problem.batch, problem.seq_q, *tensor.shape[1:]).transpose(1, 2)
