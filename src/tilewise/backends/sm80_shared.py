"""What the four modules of the backend `sm80` share: tensors as its kernels see them, and what fits a GPU."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING, Any

import torch

from ..target import TARGETS, Target
from .fused import Stage

if TYPE_CHECKING:
    from ..jit import Unit
    from .fused import Tensor

# Named targets that stand for all others, one of each size of shared memory: tests compile every kernel for them. On
# another architecture the assembler may spill a register or two, and that is better than a refusal.
COMPILED = tuple(TARGETS[name] for name in ("a100", "rtx-4090", "h200"))
_GATED = frozenset(target.arch for target in COMPILED)
_RESERVED_SMEM = 1024  # of a multiprocessor's shared memory, for each CTA on it
_REGISTERS = 65536


def is_gated(arch: str) -> bool:
    """Whether tests hold the kernels to no spills on this architecture."""
    return arch in _GATED


def fits(smem_bytes: int, ctas_per_sm: int, target: Target) -> bool:
    """Whether so many CTAs find their shared memory on one multiprocessor of the target."""
    return smem_bytes <= target.smem_per_block and ctas_per_sm * (smem_bytes + _RESERVED_SMEM) <= target.smem_per_sm


def register_limit(threads: int, ctas_per_sm: int) -> int:
    """What a thread may have if so many CTAs are to share a multiprocessor."""
    return min(_REGISTERS // (threads * ctas_per_sm) // 8 * 8, 255)


class Strided(ctypes.Structure):
    """A tensor as kernels/sm80 sees it: `tilewise::sm80::Tensor`, strides in elements."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("batch_stride", ctypes.c_longlong),
        ("head_stride", ctypes.c_longlong),
        ("seq_stride", ctypes.c_longlong),
    ]

    @classmethod
    def of(cls, tensor: Tensor) -> Strided:
        """The strides of a (batch, heads, seq, dim) tensor; its address is filled in for each launch.

        Copies count 16-bit numbers: a float32 is two.
        """
        halves = tensor.element_size() // 2
        return cls(None, *(halves * stride for stride in tensor.stride()[:3]))


class ForwardLaunch:
    """All that a call does not have to decide again: one per problem, strides and device. Safe to share by threads."""

    __slots__ = ("_arguments", "_device", "_launch")

    def __init__(
        self, unit: Unit, struct: type[Any], fixed: dict[str, Any], grid: int, threads: int, device: int
    ) -> None:
        stage = Stage(unit, struct, fixed, grid, threads, device)
        self._launch, self._arguments, self._device = stage.launch, stage.arguments, device

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        arguments = self._arguments()
        params = arguments.params
        params.q.data, params.k.data, params.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        params.out.data = out.data_ptr()
        params.lse = None if lse is None else lse.data_ptr()
        self._launch(torch._C._cuda_getCurrentRawStream(self._device), arguments)
