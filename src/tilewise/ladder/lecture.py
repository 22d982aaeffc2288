"""The lecture's plain CUDA C++ kernel through NVRTC, its indexing put right: kernels/ladder/lecture.cuh.

One block for 16 rows of a head, everything in float32, out in registers, no tensor cores. It runs on any GPU from
Ampere on. What it costs shows where the time of attention is: every product is a scalar multiply-add, and K and V are
read again for every 16 rows. `padding` 0 is the lecture's own layout of shared memory, in which the threads of a warp
meet on one bank; 1 spreads them.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..backend import ALL, NO_OPERANDS, empty_lse, empty_out
from ..errors import Reason, UnsupportedProblem
from ..jit import Arguments, Unit, cpp_constant, function_for, layout_asserts, params_struct
from ..jit import launch as driver
from ..target import Target
from .bands import FLOATS, refusals, shifts_of

if TYPE_CHECKING:
    from ..backend import Grads, Operands, Wants
    from ..problem import Problem

HEAD_DIM_LIMIT = 256
BLOCK = 16  # rows and keys of a tile, as in the lecture
_COLUMNS = 32  # threads that share a row
_MAX_BLOCKS = 65535  # of a grid's second and third dimension
_ELEMENTS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_ARCHS = ("sm_80", "sm_90")  # that CI compiles for


@dataclass(frozen=True, slots=True)
class Config:
    """Field for field the C++ aggregate LectureConfig."""

    cpp_type: ClassVar[str] = "tilewise::ladder::LectureConfig"

    element: int
    block_q: int
    block_kv: int
    head_dim: int
    head_dim_v: int
    padding: int

    @property
    def threads(self) -> int:
        return _COLUMNS * self.block_q

    @property
    def smem_bytes(self) -> int:
        """`sizeof(LectureSmem<config>)`; the generated source asserts it."""
        q = self.block_q * (self.head_dim + self.padding)
        k, v = (self.block_kv * (dim + self.padding) for dim in (self.head_dim, self.head_dim_v))
        return 4 * (q + k + v + self.block_q * (self.block_kv + self.padding))

    @property
    def label(self) -> str:
        return f"{self.block_q}x{self.block_kv}{'' if self.padding else ', the lecture banks'}"

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.threads} threads"
        return f"{tile}, {self.smem_bytes / 1024:.0f} KiB shared, rows padded by {self.padding}"


def why_not(problem: Problem, target: Target) -> list[Reason]:
    reasons = refusals(problem, dtypes=FLOATS, head_dim=HEAD_DIM_LIMIT)
    if target.capability < (8, 0):
        reasons.append(Reason(f"the device, {target.name}, is no GPU from sm_80 on: this is CUDA C++", "run on one"))
    if not target.has_jit:
        reasons.append(Reason("cuda.bindings is not installed", "pip install 'tilewise[cuda]'"))
    if max(problem.batch, problem.heads_q) > _MAX_BLOCKS:
        reasons.append(Reason(f"batch or heads over {_MAX_BLOCKS}: more than a grid has", "split the batch"))
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    return ["reads K and V again for every 16 rows, and multiplies without tensor cores"]


def configs(problem: Problem, target: Target) -> list[Config]:
    """Padded, then as the lecture has it."""
    dims = (-(-dim // _COLUMNS) * _COLUMNS for dim in (problem.head_dim, problem.head_dim_v))
    element, (head_dim, head_dim_v) = _ELEMENTS[problem.dtype], dims
    return [Config(element, BLOCK, BLOCK, head_dim, head_dim_v, padding) for padding in (1, 0)]


shipped = configs


def all_units() -> list[Unit]:
    """What `forward` may launch for the usual heads, on both generations of GPU."""
    heads = ((64, 64, 1), (128, 128, 1), (192, 128, 1), (256, 256, 1), (128, 128, 0))
    fields = product(_ARCHS, _ELEMENTS.values(), heads)
    return [unit(Config(element, BLOCK, BLOCK, *of_head), arch) for arch, element, of_head in fields]


@functools.cache
def unit(config: Config, arch: str) -> Unit:
    numbers = "_".join(str(getattr(config, name)) for name in config.__slots__)
    name = f"lecture_{numbers}"
    source = f"""#include "ladder/lecture.cuh"
{layout_asserts(_Params, "tilewise::ladder::LectureParams")}
{cpp_constant("config", config)}
static_assert(sizeof(tilewise::ladder::LectureSmem<config>) == {config.smem_bytes}, "Config.smem_bytes");
extern "C" __global__ void __launch_bounds__({config.threads}, 1)
{name}(const __grid_constant__ tilewise::ladder::LectureParams params) {{
  tilewise::ladder::lecture<config>(params);
}}
"""
    return Unit(name, source, arch, smem_bytes=config.smem_bytes)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    operands: Operands = NO_OPERANDS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    target = Target.of(q.device)
    config = config or configs(problem, target)[0]
    out = empty_out(q, problem.head_dim_v, problem.layout)
    lse = empty_lse(q) if problem.needs_lse else None
    if problem.empty:
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)
    function = function_for(unit(config, target.arch), q.device.index or 0)
    arguments = Arguments(_Params)
    _fill(arguments.params, problem, q, k, v, out, lse)
    grid = (-(-problem.seq_q // config.block_q), problem.heads_q, problem.batch)
    stream = torch._C._cuda_getCurrentRawStream(function.device)
    driver.launch(function, grid, (config.block_q, _COLUMNS, 1), config.smem_bytes, stream, arguments)
    return out, lse


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    config: Any = None,
    operands: Operands = NO_OPERANDS,
    wants: Wants = ALL,
) -> Grads:
    raise UnsupportedProblem("the lecture's rung is forward only", problem, remedy="use backend='auto'")


class _Strides(ctypes.Structure):
    _fields_ = [(name, ctypes.c_longlong) for name in ("batch", "head", "seq", "dim")]


_Params = params_struct(
    "Params",
    q=ctypes.c_void_p,
    k=ctypes.c_void_p,
    v=ctypes.c_void_p,
    out=ctypes.c_void_p,
    lse=ctypes.c_void_p,
    q_strides=_Strides,
    k_strides=_Strides,
    v_strides=_Strides,
    out_strides=_Strides,
    heads=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    head_dim=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    scale=ctypes.c_float,
    softcap=ctypes.c_float,
)


def _fill(
    params: Any,
    problem: Problem,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
) -> None:
    for name, tensor in (("q", q), ("k", k), ("v", v), ("out", out)):
        setattr(params, name, tensor.data_ptr())
        setattr(params, f"{name}_strides", _Strides(*tensor.stride()))
    params.lse = None if lse is None else lse.data_ptr()
    params.heads, params.heads_per_kv = problem.heads_q, problem.group
    params.seq_q, params.seq_k = problem.seq_q, problem.seq_kv
    params.head_dim, params.head_dim_v = problem.head_dim, problem.head_dim_v
    params.band_first_shift, params.band_end_shift = shifts_of(problem)
    params.scale, params.softcap = problem.scale, problem.softcap
