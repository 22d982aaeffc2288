"""The fused loop in Triton: tiles as values, tensor cores and pipelining left to its compiler.

A program owns block_q rows of one (batch, head) and walks over the keys that its mask lets it see, in two stretches:
tiles that every row sees in full, which need no mask, and tiles that a bound cuts.

    1. S = Q K_j^T                         tl.dot: wgmma on Hopper, mma.sync before, plain loops in the interpreter
    2. S = c S (softcap as the others), -inf where hidden
    3. m' = max(m, rowmax S), P = 2^(S - m'), alpha = 2^(m - m')
    4. l = alpha l + rowsum P, O = alpha O + P V_j
    5. out = O / l, lse = ln 2 (m + log2 l)

With TRITON_INTERPRET=1 it runs without a GPU, slowly: so CI runs it.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..backends import empty_lse, empty_out
from ..errors import Reason, UnsupportedProblem
from ..target import Target
from . import missing
from .bands import FLOATS, refusals, shifts_of

if TYPE_CHECKING:
    from ..backends import Grads, Wants
    from ..problem import Problem

HEAD_DIM_LIMIT = 256
INTERPRETER = "TRITON_INTERPRET"
_LOG2_E = math.log2(math.e)
# Sizes that say nothing of how memory is aligned: a kernel for each that 16 divides, or that is 1, would be no faster.
_SIZES = ("heads", "group", "seq_q", "seq_k", "first", "end")
_INTERPRETED_WORK = 1 << 26  # multiply-adds: the interpreter takes seconds for so many


@dataclass(frozen=True, slots=True)
class Config:
    block_q: int
    block_kv: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        return f"{self.block_q}x{self.block_kv}, {self.warps} warps, {self.stages} stages"


def interpreted() -> bool:
    """Whether Triton was told to interpret its kernels; it reads the variable when it is imported."""
    return os.environ.get(INTERPRETER, "0") not in ("", "0")


def why_not(problem: Problem, target: Target) -> list[Reason]:
    reasons = refusals(problem, dtypes=FLOATS, head_dim=HEAD_DIM_LIMIT)
    if lacking := missing("triton"):
        reasons.append(Reason(f"{lacking[0]} is not installed", "pip install 'tilewise[triton]'"))
    if target.is_cpu and not interpreted():
        reasons.append(Reason("there is no GPU, and Triton's interpreter is off", f"set {INTERPRETER}=1"))
    if not target.is_cpu and target.capability < (8, 0):
        reasons.append(Reason(f"{target.name} is {target.arch}, before sm_80", "run on Ampere or later"))
    if not target.is_cpu and interpreted():
        reasons.append(Reason(f"{INTERPRETER} is set: Triton would interpret the kernel", "unset it"))
    if target.is_cpu and problem.dtype == torch.bfloat16:
        reasons.append(Reason("Triton's interpreter computes with NumPy, which has no bfloat16", "use float16"))
    work = problem.flops() // 2
    if target.is_cpu and work > _INTERPRETED_WORK:
        reasons.append(Reason(f"{work} multiply-adds: the interpreter would take minutes", "try --shape 1,2,128,64"))
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    told = ["a hidden inf or NaN in V shows in rows that share a tile with it: 0 * inf is NaN"]
    if problem.dtype == torch.float32 and not target.is_cpu:
        told.append("multiplies float32 without tensor cores, in full precision")
    return told


def configs(problem: Problem, target: Target) -> list[Config]:
    """Usual tiles, the one that should be best first."""
    wide = max(problem.head_dim, problem.head_dim_v) > 128
    if problem.dtype == torch.float32:
        return [Config(32, 32, 4, 2), Config(16, 16, 4, 1)]
    if target.is_cpu:
        return [Config(32, 32, 4, 1), Config(16, 64, 4, 1)]
    if wide:
        return [Config(128, 64, 8, 2), Config(64, 64, 4, 2)]
    return [Config(128, 128, 8, 2), Config(128, 64, 8, 3), Config(128, 64, 4, 2), Config(64, 64, 4, 3)]


shipped = configs


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Tiles, warps and stages in all combinations; what does not fit, its compiler tells."""
    sides = ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (256, 64))
    space = [Config(q, kv, warps, stages) for q, kv in sides for warps in (4, 8) for stages in (1, 2, 3, 4)]
    return list(dict.fromkeys([*configs(problem, target), *space]))


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    config = config or configs(problem, Target.of(q.device))[0]
    out, lse = empty_out(q, problem.head_dim_v, problem.layout), empty_lse(q)
    if problem.empty:
        return out.zero_(), lse.fill_(-math.inf)
    _check_reach(problem, q, k, v, out)
    first, end = shifts_of(problem)
    grid = (-(-problem.seq_q // config.block_q), problem.batch * problem.heads_q)
    capped = problem.softcap > 0
    _kernel()[grid](
        q, k, v, out, lse,
        *q.stride(), *k.stride(), *v.stride(), *out.stride(),
        problem.heads_q, problem.group, problem.seq_q, problem.seq_kv, first, end,
        _LOG2_E * (problem.softcap if capped else problem.scale),
        2 * _LOG2_E * problem.scale / problem.softcap if capped else 0.0,
        head_dim=problem.head_dim, head_dim_v=problem.head_dim_v,
        block_d=_block(problem.head_dim), block_dv=_block(problem.head_dim_v),
        block_q=config.block_q, block_kv=config.block_kv, capped=capped,
        num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
    return out, lse


def _check_reach(problem: Problem, *tensors: torch.Tensor) -> None:
    """Offsets inside a head are counted in 32 bits."""
    farthest = max(tensor.shape[2] * abs(tensor.stride(2)) for tensor in tensors)
    if farthest >= 1 << 31:
        raise UnsupportedProblem(f"a head reaches over {farthest} elements, past 2^31", problem, remedy="use sm90")


def _block(dim: int) -> int:
    """Triton's tiles have sides that are powers of two, 16 at least for a product."""
    return max(16, 1 << (dim - 1).bit_length())


# Why globals: Triton finds what a kernel calls among the globals of its module, and compiles nothing it cannot find.
triton: Any = None
tl: Any = None
_tiles: Any = None


@functools.cache
def _kernel() -> Any:
    """The kernel, made on first use so that this module can be imported without Triton."""
    global triton, tl, _tiles
    triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
    _tiles = triton.jit(_attend)
    return triton.jit(_attention, do_not_specialize=_SIZES)


def _attend(  # type: ignore[no-untyped-def]
    q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd, o, m, total, rows, begin, stop,
    seq_k, first, end, scale, cap_in,
    head_dim, head_dim_v, block_d: tl.constexpr, block_dv: tl.constexpr, block_kv: tl.constexpr,
    capped: tl.constexpr, masked: tl.constexpr,
):  # fmt: skip
    """Steps 1 to 4 over the keys from `begin` to `stop`, both multiples of block_kv."""
    d, dv = tl.arange(0, block_d), tl.arange(0, block_dv)
    for start in range(begin, stop, block_kv):
        keys = start + tl.arange(0, block_kv)
        there = keys < seq_k
        k = tl.load(
            k_base + keys[None, :] * stride_ks + d[:, None] * stride_kd,
            mask=there[None, :] & (d < head_dim)[:, None],
            other=0.0,
        )
        s = tl.dot(q, k, input_precision="ieee")
        if capped:
            s = 1.0 - 2.0 / (1.0 + tl.exp2(s * cap_in))
        s = s * scale
        if masked:
            seen = (keys[None, :] >= rows[:, None] + first) & (keys[None, :] < rows[:, None] + end) & there[None, :]
            s = tl.where(seen, s, -float("inf"))
        top = tl.maximum(m, tl.max(s, 1))
        base = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2(s - base[:, None])
        alpha = tl.exp2(m - base)
        total = total * alpha + tl.sum(p, 1)
        v = tl.load(
            v_base + keys[:, None] * stride_vs + dv[None, :] * stride_vd,
            mask=there[:, None] & (dv < head_dim_v)[None, :],
            other=0.0,
        )
        o = tl.dot(p.to(v.dtype), v, o * alpha[:, None], input_precision="ieee")
        m = top
    return o, m, total


def _attention(  # type: ignore[no-untyped-def]
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    stride_qb, stride_qh, stride_qs, stride_qd, stride_kb, stride_kh, stride_ks, stride_kd,
    stride_vb, stride_vh, stride_vs, stride_vd, stride_ob, stride_oh, stride_os, stride_od,
    heads, group, seq_q, seq_k, first, end, scale, cap_in,
    head_dim: tl.constexpr, head_dim_v: tl.constexpr, block_d: tl.constexpr, block_dv: tl.constexpr,
    block_q: tl.constexpr, block_kv: tl.constexpr, capped: tl.constexpr,
):  # fmt: skip
    row_begin = tl.program_id(0) * block_q
    pair = tl.program_id(1)
    batch, head = (pair // heads).to(tl.int64), (pair % heads).to(tl.int64)
    rows = row_begin + tl.arange(0, block_q)
    d, dv = tl.arange(0, block_d), tl.arange(0, block_dv)
    k_base = k_ptr + batch * stride_kb + (head // group) * stride_kh
    v_base = v_ptr + batch * stride_vb + (head // group) * stride_vh
    q = tl.load(
        q_ptr + batch * stride_qb + head * stride_qh + rows[:, None] * stride_qs + d[None, :] * stride_qd,
        mask=(rows < seq_q)[:, None] & (d < head_dim)[None, :],
        other=0.0,
    )
    m = tl.full([block_q], -float("inf"), tl.float32)
    total = tl.zeros([block_q], tl.float32)
    o = tl.zeros([block_q, block_dv], tl.float32)

    # [begin, stop): keys that some row sees; [full_begin, full_stop): tiles that every row sees in full.
    last = tl.minimum(row_begin + block_q, seq_q) - 1
    begin = tl.maximum(0, row_begin + first) // block_kv * block_kv
    stop = tl.minimum(seq_k, last + end)
    full_begin = (tl.maximum(0, last + first) + block_kv - 1) // block_kv * block_kv
    full_stop = tl.maximum(0, tl.minimum(seq_k, row_begin + end)) // block_kv * block_kv
    full_begin = tl.minimum(tl.maximum(full_begin, begin), tl.maximum(stop, begin))
    full_stop = tl.maximum(full_stop, full_begin)
    o, m, total = _tiles(
        q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd, o, m, total, rows, begin, full_begin,
        seq_k, first, end, scale, cap_in, head_dim, head_dim_v, block_d, block_dv, block_kv, capped, True,
    )  # fmt: skip
    o, m, total = _tiles(
        q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd, o, m, total, rows, full_begin, full_stop,
        seq_k, first, end, scale, cap_in, head_dim, head_dim_v, block_d, block_dv, block_kv, capped, False,
    )  # fmt: skip
    o, m, total = _tiles(
        q, k_base, v_base, stride_ks, stride_kd, stride_vs, stride_vd, o, m, total, rows, full_stop, stop,
        seq_k, first, end, scale, cap_in, head_dim, head_dim_v, block_d, block_dv, block_kv, capped, True,
    )  # fmt: skip

    safe = tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + batch * stride_ob + head * stride_oh + rows[:, None] * stride_os + dv[None, :] * stride_od,
        (o / safe[:, None]).to(out_ptr.dtype.element_ty),
        mask=(rows < seq_q)[:, None] & (dv < head_dim_v)[None, :],
    )
    lse = tl.where(total == 0.0, -float("inf"), (m + tl.log2(safe)) * 0.6931471805599453)
    tl.store(lse_ptr + pair.to(tl.int64) * seq_q + rows, lse, mask=rows < seq_q)


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
    bias: torch.Tensor | None = None,
    wants: Wants = (True, True, True),
) -> Grads:
    raise UnsupportedProblem("the Triton rung is forward only", problem, remedy="use backend='auto'")
