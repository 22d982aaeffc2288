"""Three kernels: Q K^T on tensor cores, a softmax with a warp per row, P V on tensor cores (kernels/ladder/).

    1. scores   S = scale Q K^T        wgmma, TMA in and out          writes the scores, 2 bytes each
    2. softmax  P = softmax(mask(S))   in place, a row in registers   reads and writes them
    3. values   O = P V                wgmma, TMA in and out          reads them

So every visible score crosses the memory bus four times, 8 bytes, where a fused kernel moves none: that is the ceiling
of this rung, whatever the tiles. What can be chosen is in `Config`; `search_space` holds what `tilewise ladder --sweep`
measures. `slab_mib` limits the scores that exist at once: slabs that fit the L2 cache keep them off the DRAM, for three
more launches a slab. `overlap` lets a kernel be launched while the one before it still runs (programmatic dependent
launch).

The study this follows found small tiles best, and large ones slow for "11 us of launch overhead". A launch does not
depend on the tile: a kernel that does nothing (`empty_unit`), launched with the same grids, shows what it costs.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from .. import fresh
from ..backend import ALL, NO_OPERANDS, empty_lse, empty_out
from ..errors import Reason, UnsupportedProblem
from ..jit import Arguments, TensorMap, Unit, cpp_constant, function_for, layout_asserts, params_struct, rows_map
from ..jit import launch as driver
from ..jit.memo import keep
from ..jit.mirror import MAX_THREADS
from ..problem import Problem, Strides
from ..scores import softcapped
from ..target import Target
from .bands import HALVES, refusals, shifts_of

if TYPE_CHECKING:
    from ..backend import Grads, Operands, Wants

ARCH = "sm_90a"
HEAD_DIM_LIMIT = 256
_SMEM_PER_BLOCK = 227 * 1024
_MAX_PAIRS = 65535  # of a grid's second and third dimension
_SLAB_ROWS = 768  # a multiple of every tile's rows, so that no tile reaches into the next slab
_CHUNK = 256  # keys that a warp holds in 4 registers per lane
_MAX_CHUNKS = 32
ROW_THREADS = ((16, 4), (32, 4), (256, 8))  # per row of the softmax, and warps per CTA: what a search tries
_MULTIPROCESSORS = 132
_CTAS_WANTED = 8 * _MULTIPROCESSORS  # of the first kernel: a few waves of them
_LONG_ROW = 2048  # keys
_WORKING_REGISTERS = 32  # a thread's, beside its share of the product: with fewer the compiler gives up


@dataclass(frozen=True, slots=True)
class Config:
    """Tiles of the two products, and how the three kernels are launched."""

    scores_rows: int = 128
    scores_keys: int = 128
    scores_stages: int = 2
    scores_ctas: int = 1
    values_rows: int = 128
    values_keys: int = 64
    values_stages: int = 3
    values_ctas: int = 2
    softmax_warps: int = 4
    row_threads: int = 32  # of the softmax, per row
    slab_mib: int = 0  # of scores at once; 0: all of them
    overlap: bool = False

    @property
    def label(self) -> str:
        scores = f"QK {self.scores_rows}x{self.scores_keys} s{self.scores_stages} x{self.scores_ctas}"
        values = f"PV {self.values_rows}x{self.values_keys} s{self.values_stages} x{self.values_ctas}"
        extras = f"{f' slab {self.slab_mib} MiB' if self.slab_mib else ''}{' overlap' if self.overlap else ''}"
        return f"{scores}, {values}, {self.row_threads} of {32 * self.softmax_warps} threads per row{extras}"

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True)
class ScoresConfig:
    cpp_type: ClassVar[str] = "tilewise::ladder::ScoresConfig"

    bf16: bool
    head_dim: int
    consumers: int
    block_kv: int
    stages: int
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def smem_bytes(self) -> int:
        """`sizeof(ScoresSmem<config>)`; the generated source asserts it."""
        q, k = (2 * rows * self.head_dim for rows in (64 * self.consumers, self.block_kv))
        out = 2 * 64 * self.consumers * self.block_kv
        return _round_up(q + self.stages * k + out + 8 * (1 + 2 * self.stages), 1024)


@dataclass(frozen=True, slots=True)
class ValuesConfig:
    cpp_type: ClassVar[str] = "tilewise::ladder::ValuesConfig"

    bf16: bool
    head_dim_v: int
    consumers: int
    block_k: int
    stages: int
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return 128 * self.consumers + 32

    @property
    def smem_bytes(self) -> int:
        """`sizeof(ValuesSmem<config>)`."""
        stage = 2 * self.block_k * (64 * self.consumers + self.head_dim_v)
        room = max(self.stages * stage, 2 * 64 * self.consumers * self.head_dim_v)
        return _round_up(room + 16 * self.stages, 1024)


@dataclass(frozen=True, slots=True)
class SoftmaxConfig:
    cpp_type: ClassVar[str] = "tilewise::ladder::SoftmaxConfig"

    bf16: bool
    chunks: int
    row_threads: int
    warps: int
    softcap: bool
    values_rows: int
    values_keys: int

    ctas_per_sm: ClassVar[int] = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        return self.threads // self.row_threads

    @property
    def smem_bytes(self) -> int:
        """A number per warp, where the warps of a row meet."""
        return 4 * self.warps if self.row_threads > 32 else 0


class Stages(NamedTuple):
    """The three kernels of a problem."""

    scores: ScoresConfig
    softmax: SoftmaxConfig
    values: ValuesConfig


def why_not(problem: Problem, target: Target) -> list[Reason]:
    reasons = refusals(problem, dtypes=HALVES, head_dim=HEAD_DIM_LIMIT)
    dims = (problem.head_dim, problem.head_dim_v)
    if not target.has_jit:
        reasons.append(Reason("cuda.bindings is not installed", "pip install 'tilewise[cuda]'"))
    if target.capability != (9, 0):
        reasons.append(Reason(f"the device, {target.name}, is not of sm_90: no wgmma, no TMA", "run on a Hopper GPU"))
    if any(dim % 8 for dim in dims):
        reasons.append(Reason(f"head_dim {dims[0]}, v {dims[1]}: not multiples of 8", "pad the heads with zeros"))
    if problem.strides is not Strides.ALIGNED:
        reasons.append(Reason(f"strides are {problem.strides.value}: TMA needs 16-byte strides", "call .contiguous()"))
    if problem.batch * problem.heads_q > _MAX_PAIRS:
        reasons.append(Reason(f"{problem.batch * problem.heads_q} heads in all, over {_MAX_PAIRS}", "split the batch"))
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    held = scores_bytes(problem, configs(problem, target)[0]) / 2**20
    return [
        f"holds {held:.0f} MiB of scores in memory, rounded to 16 bits",
        "a hidden inf or NaN in V shows in rows that share a tile with it: 0 * inf is NaN",
    ]


def configs(problem: Problem, target: Target) -> list[Config]:
    """A few tiles that fit, the one that should be best first.

    Two CTAs per multiprocessor where they fit, so that one loads while the other stores; over long rows of keys, where
    a CTA overlaps with itself, more rows instead. Half the rows for P V where there would be too few tiles to go round.
    """
    tiles = problem.batch * problem.heads_q * -(-problem.seq_q // 128)
    rows = 128 if tiles >= 2 * _MULTIPROCESSORS else 64
    preferred = [
        Config(scores_ctas=2, values_rows=rows),
        Config(scores_ctas=2, scores_stages=1, values_rows=rows),
        Config(scores_rows=192, values_rows=rows),
        Config(values_rows=rows),
        Config(values_rows=rows, values_ctas=1),
        Config(scores_rows=64, values_rows=64, values_ctas=1),
    ]
    if problem.seq_kv > _LONG_ROW:
        del preferred[1]
    return [config for config in preferred if fits(problem, config)]


shipped = configs


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Tiles of both products, each around the usual choice of the other; then launches: slabs, overlap, threads."""
    base = configs(problem, target)[0]
    stages = (1, 2, 3, 4)
    scores = [
        Config(rows, keys, depth, ctas, base.values_rows, base.values_keys, base.values_stages, base.values_ctas)
        for rows, keys, depth, ctas in product((64, 128, 192, 256), (64, 128, 192, 256), (1, 2, 3), (1, 2, 3))
    ]
    values = [
        Config(base.scores_rows, base.scores_keys, base.scores_stages, base.scores_ctas, rows, keys, depth, ctas)
        for rows, keys, depth, ctas in product((64, 128, 192, 256), (64, 128), stages, (1, 2, 3))
    ]
    launches = [
        replace(base, softmax_warps=warps, slab_mib=slab, overlap=overlap)
        for warps, slab, overlap in product((1, 2, 4, 8), (0, 16, 32), (False, True))
    ]
    rows = [replace(base, row_threads=threads, softmax_warps=warps) for threads, warps in ROW_THREADS]
    found = dict.fromkeys([base, *scores, *values, *launches, *rows])
    return [config for config in found if fits(problem, config)]


def fits(problem: Problem, config: Config) -> bool:
    """Shared memory and registers of all CTAs that shall share a multiprocessor."""
    stages = stages_of(problem, config)
    for kernel in (stages.scores, stages.values):
        if kernel.smem_bytes > _SMEM_PER_BLOCK or _held(kernel) + _WORKING_REGISTERS > _registers(kernel):
            return False
        if kernel.ctas_per_sm * (kernel.smem_bytes + 1024) > _SMEM_PER_BLOCK + 1024:
            return False
    return True


def _held(kernel: ScoresConfig | ValuesConfig) -> int:
    """Registers of a thread that its share of a 64-row product takes."""
    return (kernel.block_kv if isinstance(kernel, ScoresConfig) else kernel.head_dim_v) // 2


def _registers(kernel: ScoresConfig | ValuesConfig) -> int:
    """What the compiler may give a thread: a multiprocessor's registers lie in four parts, a warp's all in one."""
    warps = _round_up(kernel.threads // 32 * kernel.ctas_per_sm, 4)
    return min(65536 // (32 * warps) // 8 * 8, 255)


def stages_of(problem: Problem, config: Config) -> Stages:
    bf16 = problem.dtype is torch.bfloat16
    head_dim, head_dim_v = (_round_up(dim, 64) for dim in (problem.head_dim, problem.head_dim_v))
    chunks = 1 << max(0, -(-problem.seq_kv // (8 * config.row_threads)) - 1).bit_length()
    chunks = chunks if chunks <= _MAX_CHUNKS else 0
    return Stages(
        ScoresConfig(
            bf16, head_dim, config.scores_rows // 64, config.scores_keys, config.scores_stages, config.scores_ctas
        ),
        SoftmaxConfig(
            bf16,
            chunks,
            config.row_threads,
            config.softmax_warps,
            problem.softcap > 0,
            config.values_rows,
            config.values_keys,
        ),
        ValuesConfig(
            bf16, head_dim_v, config.values_rows // 64, config.values_keys, config.values_stages, config.values_ctas
        ),
    )


_KINDS = {ScoresConfig: ("scores", "Scores"), SoftmaxConfig: ("softmax", ""), ValuesConfig: ("values", "Values")}
StageConfig = ScoresConfig | SoftmaxConfig | ValuesConfig


@functools.cache
def unit(config: StageConfig) -> Unit:
    kind, smem = _KINDS[type(config)]
    numbers = "_".join(str(int(getattr(config, name))) for name in config.__slots__)
    name = f"three_kernel_{kind}_{numbers}"
    checked = f"tilewise::ladder::{smem}Smem<config>"
    size = f'static_assert(sizeof({checked}) == {config.smem_bytes}, "smem_bytes");' if smem else ""
    source = f"""#include "ladder/three_kernel.cuh"
{layout_asserts(_Params, "tilewise::ladder::ThreeKernelParams")}
{cpp_constant("config", config)}{size}
extern "C" __global__ void __launch_bounds__({config.threads}, {config.ctas_per_sm})
{name}(const __grid_constant__ tilewise::ladder::ThreeKernelParams params) {{
  tilewise::ladder::{kind}<config>(params);
}}
"""
    return Unit(name, source, ARCH, smem_bytes=config.smem_bytes)


@functools.cache
def empty_unit() -> Unit:
    """A kernel that does nothing, with the parameters of the others."""
    source = f"""#include "ladder/three_kernel.cuh"
{layout_asserts(_Params, "tilewise::ladder::ThreeKernelParams")}
extern "C" __global__ void three_kernel_nothing(const __grid_constant__ tilewise::ladder::ThreeKernelParams params) {{
  tilewise::ladder::nothing(params);
}}
"""
    return Unit("three_kernel_nothing", source, ARCH)


def all_units() -> list[Unit]:
    """Every kernel that `forward` may launch without a config of the caller's."""
    found = [unit_ for bf16 in (True, False) for unit_ in _default_units(bf16)]
    return list(dict.fromkeys([*found, empty_unit()]))


def _default_units(bf16: bool) -> list[Unit]:
    """Over heads, few and many of them, and rows of every length: what `configs` and `stages_of` may choose first."""
    units: list[Unit] = []
    lengths = [*(_CHUNK << power for power in range(6)), (_MAX_CHUNKS + 1) * _CHUNK]
    for dim, heads, seq, softcap in product((64, 128, 192, 256), (1, 256), lengths, (0.0, 1.0)):
        dtype = torch.bfloat16 if bf16 else torch.float16
        problem = Problem(1, heads, heads, 256, seq, dim, dim, dtype, scores=softcapped(softcap))
        units += map(unit, stages_of(problem, configs(problem, _hopper())[0]))
    return units


def _hopper() -> Target:
    """Tiles are chosen by the problem alone, for the one architecture there is."""
    return Target.named("h200")


def scores_bytes(problem: Problem, config: Config) -> int:
    """Bytes of the buffer of scores."""
    pairs, rows = _slab(problem, config)
    return pairs * rows * _round_up(problem.seq_kv, 8) * 2


def _slab(problem: Problem, config: Config) -> tuple[int, int]:
    """(pairs, rows) whose scores exist at once: whole heads, or else rows of one head."""
    pairs, rows = problem.batch * problem.heads_q, problem.seq_q
    if not config.slab_mib:
        return pairs, rows
    of_row = _round_up(problem.seq_kv, 8) * 2
    room = config.slab_mib * 2**20
    if of_row * rows <= room:
        return max(1, min(pairs, room // (of_row * rows))), rows
    return 1, min(rows, max(1, room // (of_row * _SLAB_ROWS)) * _SLAB_ROWS)


def launches(problem: Problem, config: Config) -> int:
    pairs, rows = _slab(problem, config)
    return 3 * -(-problem.batch * problem.heads_q // pairs) * -(-problem.seq_q // rows)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    operands: Operands = NO_OPERANDS,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out = empty_out(q, problem.head_dim_v, problem.layout)
    lse = empty_lse(q) if problem.needs_lse else None
    if problem.empty:
        return out.zero_(), None if lse is None else lse.fill_(-math.inf)
    pipeline(problem, config or configs(problem, _hopper())[0], q.device.index or 0).run(q, k, v, out, lse)
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
    raise UnsupportedProblem("the three-kernel rung is forward only", problem, remedy="use backend='auto'")


_Params = params_struct(
    "Params",
    q_map=TensorMap,
    k_map=TensorMap,
    scores_map=TensorMap,
    p_map=TensorMap,
    v_map=TensorMap,
    out_map=TensorMap,
    scores=ctypes.c_void_p,
    lse=ctypes.c_void_p,
    heads=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    pitch=ctypes.c_int,
    slab_rows=ctypes.c_int,
    first_pair=ctypes.c_int,
    first_row=ctypes.c_int,
    span=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    zero=ctypes.c_int,
    scale=ctypes.c_float,
    softcap=ctypes.c_float,
)


class Slab(NamedTuple):
    """Heads and rows whose scores exist at once."""

    first_pair: int
    pairs: int
    first_row: int
    rows: int


@functools.lru_cache(maxsize=256)
def pipeline(problem: Problem, config: Config, device: int) -> Pipeline:
    return Pipeline(problem, config, device)


class Pipeline:
    """The three kernels of a problem, loaded on a device. Safe to share by threads."""

    def __init__(self, problem: Problem, config: Config, device: int) -> None:
        self.problem, self.config, self.stages = problem, config, stages_of(problem, config)
        self._functions = [function_for(unit(stage), device) for stage in self.stages]
        self._nothing = function_for(empty_unit(), device)
        self._device = device
        self._of_thread: dict[int, Arguments] = {}

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """All kernels of all slabs, on the current stream."""
        scores = self.room(q)
        arguments = self.arguments(q, k, v, out, lse, scores)
        for slab in self.slabs():
            for number in range(3):
                self.launch(number, arguments, slab)

    def slabs(self) -> list[Slab]:
        pairs, rows = _slab(self.problem, self.config)
        every_pair, every_row = self.problem.batch * self.problem.heads_q, self.problem.seq_q
        return [
            Slab(pair, min(pairs, every_pair - pair), row, min(rows, every_row - row))
            for pair in range(0, every_pair, pairs)
            for row in range(0, every_row, rows)
        ]

    def room(self, q: torch.Tensor) -> torch.Tensor:
        """The buffer of a slab's scores (pairs, rows, pitch)."""
        pairs, rows = _slab(self.problem, self.config)
        return fresh.new_empty(q, (pairs, rows, _round_up(self.problem.seq_kv, 8)))

    def arguments(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        scores: torch.Tensor,
    ) -> Arguments:
        found = self._of_thread.get(threading.get_ident()) or self._new_arguments(scores)
        params = found.params
        of_scores, _, of_values = self.stages
        slab = scores[..., : self.problem.seq_kv].unsqueeze(0)
        params.q_map = rows_map(q, 64 * of_scores.consumers).at(q.data_ptr())
        params.k_map = rows_map(k, of_scores.block_kv).at(k.data_ptr())
        params.scores_map = rows_map(slab, 16).at(scores.data_ptr())
        params.p_map = rows_map(slab, 64 * of_values.consumers).at(scores.data_ptr())
        params.v_map = rows_map(v, of_values.block_k).at(v.data_ptr())
        params.out_map = rows_map(out, 16).at(out.data_ptr())
        params.scores = scores.data_ptr()
        params.lse = None if lse is None else lse.data_ptr()
        return found

    def _new_arguments(self, scores: torch.Tensor) -> Arguments:
        problem, arguments = self.problem, Arguments(_Params)
        first, end = shifts_of(problem)
        fixed = {
            "heads": problem.heads_q,
            "heads_per_kv": problem.group,
            "seq_q": problem.seq_q,
            "seq_k": problem.seq_kv,
            "pitch": scores.shape[2],
            "slab_rows": scores.shape[1],
            "span": self._span(),
            "band_first_shift": first,
            "band_end_shift": end,
            "scale": problem.scale,
            "softcap": problem.softcap,
        }
        for name, value in fixed.items():
            setattr(arguments.params, name, value)
        return keep(self._of_thread, threading.get_ident(), arguments, MAX_THREADS)

    def launch(self, number: int, arguments: Arguments, slab: Slab, *, really: bool = True) -> None:
        """One kernel for one slab; not `really`: a kernel that does nothing, with the same grid."""
        arguments.params.first_pair, arguments.params.first_row = slab.first_pair, slab.first_row
        stage = self.stages[number]
        function = self._functions[number] if really else self._nothing
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        overlap = self.config.overlap and number > 0 and really
        block = (stage.threads, 1, 1)
        grid = self._grid(number, slab)
        driver.launch(function, grid, block, stage.smem_bytes, stream, arguments, overlap_previous=overlap)

    def _grid(self, number: int, slab: Slab) -> tuple[int, int, int]:
        if number == 0:
            tiles = -(-self.problem.seq_kv // self.config.scores_keys)
            return -(-tiles // self._span()), -(-slab.rows // self.config.scores_rows), slab.pairs
        rows = self.stages.softmax.rows if number == 1 else self.config.values_rows
        return -(-slab.rows // rows), slab.pairs, 1

    def _span(self) -> int:
        """Tiles of keys for one CTA of the first kernel: all that share its rows, unless that leaves too few CTAs."""
        pairs, rows = _slab(self.problem, self.config)
        tiles = -(-self.problem.seq_kv // self.config.scores_keys)
        columns = -(-_CTAS_WANTED // (pairs * -(-rows // self.config.scores_rows)))
        return -(-tiles // min(tiles, max(1, columns)))


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step
