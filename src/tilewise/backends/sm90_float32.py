"""The float32 forward of Hopper: operands split into 16-bit parts, kernels/sm90/float32_forward.cuh.

Four launches: a split of q, k and v into parts of fp16, attention with them, and behind each what serves the rows that
the device refused for their range: a split into three parts of bf16, and attention with those. The latter two end at
once when nothing was refused, and only the device knows. Part of the backend sm90, which imports this module.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..jit import TensorMap, Unit, cpp_literal, layout_asserts, params_struct, rows_map
from ..masks import Causal
from ..target import Target
from . import fused_rules as rules
from .fused import (
    LOG2_E,
    BoundForward,
    Stage,
    bound_forward,
    head_sections,
    matrix_bytes,
    query_tiles,
    shape_params,
    stride_params,
)
from .score_policy import scores_type

if TYPE_CHECKING:
    from ..jit import TiledMap
    from ..problem import Problem
    from .fused import Tensor

ARCH = "sm_90a"
# Largest log2 of max |q| * max |k| * scale * sqrt(head_dim) that parts of fp16 serve: their error in a logit is about
# 2^-42 of it.
_MOST_LOGIT_BOUND = 20
MOST_OPERANDS = 4  # of a split: the backward's has dout too
SPLIT_THREADS = 256
SPLIT_SMEM = 4 * (2 + 128 + 256)
SPLITS_PER_SM = 8
_FACT_BYTES = 8
_PLAN_BYTES = 80


@dataclass(frozen=True, slots=True)
class Config:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/float32_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::float32::Config"

    parts: int
    head_dim: int
    head_dim_v: int
    consumers: int
    block_kv: int
    k_stages: int
    v_stages: int
    value_columns: int
    softcap: bool
    turns: bool

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def launch_registers(self) -> int:
        """What every thread has when the kernel starts, before setmaxnreg moves some to the consumers."""
        return min(65536 // self.threads // 8 * 8, 240)

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        q = self.consumers * matrix_bytes(64, self.head_dim)
        k = self.k_stages * matrix_bytes(self.block_kv, self.head_dim)
        v = self.v_stages * matrix_bytes(self.block_kv, self.head_dim_v)
        barriers = 8 * (self.consumers + 2 * self.k_stages + 2 * self.v_stages)
        return -(-(self.parts * (q + k + v) + barriers + _PLAN_BYTES) // 1024) * 1024

    @property
    def name(self) -> str:
        shape = f"d{self.head_dim}x{self.head_dim_v}_q{self.block_q}_kv{self.block_kv}_k{self.k_stages}v{self.v_stages}"
        return f"float32_{_PART_NAMES[self.parts]}_{shape}{'_softcap' if self.softcap else ''}"

    @property
    def label(self) -> str:
        """What a search varies, in a few words."""
        return f"{_PART_NAMES[self.parts]} {self.block_q}x{self.block_kv} K{self.k_stages}V{self.v_stages}"

    def __str__(self) -> str:
        terms = self.parts * (self.parts + 1) // 2
        tile = f"tile {self.block_q} x {self.block_kv}, {self.consumers} + 1 warpgroups"
        operands = f"{terms} product{'s' if terms > 1 else ''} of {'fp16' if self.parts < 3 else 'bf16'} parts"
        return (
            f"{operands}, {tile}, stages K {self.k_stages} V {self.v_stages}, {self.smem_bytes / 1024:.0f} KiB shared"
        )


_PART_NAMES = {1: "fp16x1", 2: "fp16x3", 3: "bf16x6"}

# (q and k, v and out) -> consumers, block_kv, k_stages, v_stages, value_columns; by parts. docs/kernels/float32.md has
# the registers and the shared memory that this leads to.
_Shape = tuple[int, int, int, int, int]
_TWO_PARTS: dict[tuple[int, int], _Shape] = {
    (64, 64): (2, 128, 2, 2, 64),
    (96, 96): (2, 64, 2, 2, 96),
    (128, 128): (2, 64, 2, 2, 128),
    (192, 128): (2, 64, 1, 1, 128),
    (192, 192): (2, 64, 1, 1, 64),
    (256, 256): (2, 32, 1, 1, 64),
}
_SHAPES: dict[int, dict[tuple[int, int], _Shape]] = {
    1: {
        **_TWO_PARTS,
        (192, 128): (2, 64, 2, 2, 128),
        (192, 192): (2, 64, 2, 2, 64),
        (256, 256): (2, 32, 2, 2, 64),
    },
    2: _TWO_PARTS,
    3: {
        (64, 64): (2, 64, 2, 2, 64),
        (96, 96): (2, 32, 2, 2, 96),
        (128, 128): (2, 32, 2, 2, 128),
        (192, 128): (2, 32, 1, 1, 128),
        (192, 192): (2, 32, 1, 1, 64),
        (256, 256): (1, 32, 1, 1, 64),
    },
}


def configs(problem: Problem, target: Target) -> list[Config]:
    """The config of the kernel for ordinary ranges; `wide_range` is the one behind it.

    Where gradients will be wanted there is only the latter, whose scores are those of the backward, bit by bit.
    """
    parts = 3 if problem.needs_grad else 2 if problem.precision == "exact" else 1
    return [_config(parts, rules.class_of(problem), problem.softcap > 0)]


def wide_range(config: Config) -> Config:
    """The config of the kernel for the rows that `config`'s kernel refuses."""
    return _config(3, (config.head_dim, config.head_dim_v), config.softcap)


def _chain(config: Config) -> tuple[Config, ...]:
    """The kernels of a call, one after another."""
    return (config,) if config.parts == 3 else (config, wide_range(config))


def notices(problem: Problem) -> list[str]:
    said = {
        "exact": "float32 by 3 products of fp16 parts: relative error about 4e-7, as of plain float32 arithmetic",
        "tf32": "float32 by 1 product of fp16 parts: inputs and weights keep 11 bits, relative error about 4e-4",
    }[problem.precision]
    range_note = "rows whose range fp16 cannot hold run by 6 products of bf16 parts, as the device finds them"
    found = [said, range_note]
    if problem.needs_grad:
        found = ["float32 by 6 products of bf16 parts, forward and backward: error as of plain float32 arithmetic"]
        if problem.precision != "exact":
            found.append(f"precision {problem.precision} serves calls without gradients alone: with them all is exact")
    return [*found, *rules.zero_filled(problem)]


def details(problem: Problem, config: Config) -> list[str]:
    """How the launches fill the GPU, for `explain`."""
    work = query_tiles(problem, config.block_q)
    held = _Scratch(problem, config).total
    grid = f"{work} CTAs of {config.threads} threads, {config.launch_registers} registers a thread"
    return [f"{grid}; before it a kernel that splits q, k and v, {held / 2**20:.1f} MiB of scratch"]


def all_units() -> list[Unit]:
    """Every kernel of this module."""
    units = [split_unit(parts) for parts in _SHAPES]
    for parts, shapes in _SHAPES.items():
        units += [unit(_config(parts, classes, softcap)) for classes in shapes for softcap in (False, True)]
    return units


@functools.cache
def unit(config: Config) -> Unit:
    source = f"""#include "sm90/float32_forward.cuh"
{layout_asserts(_Params, "tilewise::sm90::float32::Params")}
constexpr tilewise::sm90::float32::Config config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm90::float32::Smem<config>) == {config.smem_bytes}, "Config.smem_bytes");
extern "C" __global__ void __launch_bounds__(config.threads(), 1)
{config.name}(const __grid_constant__ tilewise::sm90::float32::Params params) {{
  tilewise::sm90::float32::forward<config, {scores_type(softcap=config.softcap, precise=True)}>(params);
}}
"""
    return Unit(config.name, source, ARCH, smem_bytes=config.smem_bytes)


@functools.cache
def split_unit(parts: int) -> Unit:
    """The kernel that splits q, k and v."""
    name = f"split_float32_{parts}"
    source = f"""#include "sm90/float32_split.cuh"
{layout_asserts(SplitParams, "tilewise::sm90::float32::SplitParams")}
static_assert(sizeof(tilewise::sm90::float32::SplitSmem) == {SPLIT_SMEM});
static_assert(tilewise::sm90::float32::split_threads == {SPLIT_THREADS});
static_assert(sizeof(tilewise::sm90::float32::TileFact) == {_FACT_BYTES});
extern "C" __global__ void __launch_bounds__({SPLIT_THREADS})
{name}(const __grid_constant__ tilewise::sm90::float32::SplitParams params) {{
  tilewise::sm90::float32::split<{parts}>(params);
}}
"""
    return Unit(name, source, ARCH, smem_bytes=SPLIT_SMEM)


SplitParams = params_struct(
    "SplitParams",
    x=ctypes.c_void_p * MOST_OPERANDS,
    batch_stride=ctypes.c_longlong * MOST_OPERANDS,
    head_stride=ctypes.c_longlong * MOST_OPERANDS,
    seq_stride=ctypes.c_longlong * MOST_OPERANDS,
    parts=ctypes.c_void_p * MOST_OPERANDS,
    facts=ctypes.c_void_p * MOST_OPERANDS,
    wanted=ctypes.c_void_p,
    refusals=ctypes.c_void_p,
    heads=ctypes.c_int * MOST_OPERANDS,
    seq=ctypes.c_int * MOST_OPERANDS,
    dim=ctypes.c_int * MOST_OPERANDS,
    rows=ctypes.c_int * MOST_OPERANDS,
    first_tile=ctypes.c_int * MOST_OPERANDS,
    tiles=ctypes.c_int,
    batch=ctypes.c_int,
    aligned=ctypes.c_int,
)

_Params = params_struct(
    "Params",
    q_map=TensorMap,
    k_map=TensorMap,
    v_map=TensorMap,
    q_facts=ctypes.c_void_p,
    k_facts=ctypes.c_void_p,
    v_facts=ctypes.c_void_p,
    any_refused=ctypes.c_void_p,
    refused=ctypes.c_void_p,
    v=ctypes.c_void_p,
    v_batch_stride=ctypes.c_longlong,
    v_head_stride=ctypes.c_longlong,
    v_seq_stride=ctypes.c_longlong,
    out=ctypes.c_void_p,
    out_batch_stride=ctypes.c_longlong,
    out_head_stride=ctypes.c_longlong,
    out_seq_stride=ctypes.c_longlong,
    lse=ctypes.c_void_p,
    batch=ctypes.c_int,
    heads=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    q_tiles=ctypes.c_int,
    sections=ctypes.c_int,
    longest_first=ctypes.c_int,
    most_exponents=ctypes.c_int,
    scale_log2=ctypes.c_float,
    softcap_in=ctypes.c_float,
    lse_scale=ctypes.c_float,
)


def bind(q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Config | None) -> BoundForward:
    """`forward` for tensors with these shapes, strides and device: kernels are loaded, all but addresses decided."""
    return bound_forward(q, problem, lambda out: _Attention((q, k, v), out, problem, config).run)


class _Scratch:
    """Where parts, facts and refusals lie, in bytes from the beginning of one allocation.

    The parts of bf16 take the place of those of fp16, which nobody reads any more by then; facts do not.
    """

    __slots__ = ("any_refused", "facts", "parts", "refused", "total")

    def __init__(self, problem: Problem, config: Config) -> None:
        self.total = 0
        self.any_refused = self._room(4)
        self.refused = self._room(4 * _tiles(problem.batch * problem.heads_q, problem.seq_q, 64))
        self.facts = {
            chosen.parts: [self._room(_FACT_BYTES * tiles) for tiles in _tiles_of_operands(problem, chosen)]
            for chosen in _chain(config)
        }
        most = wide_range(config).parts
        self.parts = [self._room(2 * most * math.prod(shape)) for shape in _operand_shapes(problem)]

    def _room(self, size: int) -> int:
        start = self.total
        self.total += -(-size // 256) * 256
        return start


class _Attention:
    """All that a call does not have to decide again: one per problem, strides and device. Safe to share by threads."""

    __slots__ = ("_device", "_passes", "_refuses", "_scratch")

    def __init__(
        self, inputs: tuple[Tensor, Tensor, Tensor], out: Tensor, problem: Problem, config: Config | None
    ) -> None:
        target = Target.of(out.device)
        config = config or configs(problem, target)[0]
        self._device = out.device.index
        self._scratch = _Scratch(problem, config)
        self._passes = [_Pass(inputs, out, problem, chosen, self._scratch, target) for chosen in _chain(config)]
        self._refuses = len(self._passes) > 1

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        scratch = q.new_empty(self._scratch.total, dtype=torch.uint8)
        inputs = (q.data_ptr(), k.data_ptr(), v.data_ptr())
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        refusals = scratch.data_ptr() + self._scratch.any_refused if self._refuses else None
        for one in self._passes:
            one.run(
                stream, inputs, scratch.data_ptr(), refusals, out.data_ptr(), None if lse is None else lse.data_ptr()
            )


class _Pass:
    """A split and the attention with its parts."""

    __slots__ = (
        "_attend",
        "_facts",
        "_maps",
        "_scratch",
        "_split",
        "_takes_refused",
    )

    def __init__(
        self,
        inputs: tuple[Tensor, Tensor, Tensor],
        out: Tensor,
        problem: Problem,
        config: Config,
        scratch: _Scratch,
        target: Target,
    ) -> None:
        device = inputs[0].device.index
        rows = (64, config.block_kv, config.block_kv)
        tiles = _tiles_of_operands(problem, config)
        shapes = _operand_shapes(problem)
        self._scratch, self._facts = scratch, scratch.facts[config.parts]
        self._takes_refused = config.parts == 3
        self._maps = [_map(shape, config.parts, count) for shape, count in zip(shapes, rows, strict=True)]
        split_fixed: dict[str, Any] = {
            "batch_stride": tuple(x.stride(0) for x in inputs),
            "head_stride": tuple(x.stride(1) for x in inputs),
            "seq_stride": tuple(x.stride(2) for x in inputs),
            "heads": tuple(shape[1] for shape in shapes),
            "seq": tuple(shape[2] for shape in shapes),
            "dim": tuple(shape[3] for shape in shapes),
            "rows": rows,
            "first_tile": (0, tiles[0], tiles[0] + tiles[1], sum(tiles)),
            "tiles": sum(tiles),
            "batch": problem.batch,
            "aligned": int(problem.strides.value == "aligned"),
        }
        blocks = min(sum(tiles), SPLITS_PER_SM * target.sms)
        kernel = split_unit(config.parts)
        self._split = Stage(kernel, SplitParams, split_fixed, blocks, SPLIT_THREADS, device, overlap_previous=True)
        fixed = _fixed_params(problem, config, target, inputs[2], out)
        grid = query_tiles(problem, config.block_q)
        self._attend = Stage(unit(config), _Params, fixed, grid, config.threads, device, overlap_previous=True)

    def run(
        self, stream: int, inputs: tuple[int, int, int], scratch: int, refusals: int | None, out: int, lse: int | None
    ) -> None:
        split, attend = self._split.arguments(), self._attend.arguments()
        params = split.params
        # The parts of bf16 are for what those of fp16 were refused for.
        params.wanted, params.refusals = (refusals, None) if self._takes_refused else (None, refusals)
        for i in range(3):
            params.x[i] = inputs[i]
            params.parts[i] = scratch + self._scratch.parts[i]
            params.facts[i] = scratch + self._facts[i]
        self._split.launch(stream, split)
        params = attend.params
        params.q_map, params.k_map, params.v_map = (
            tensor_map.at(scratch + place) for tensor_map, place in zip(self._maps, self._scratch.parts, strict=True)
        )
        params.q_facts, params.k_facts, params.v_facts = (scratch + place for place in self._facts)
        params.any_refused, params.refused = refusals, scratch + self._scratch.refused
        params.v, params.out, params.lse = inputs[2], out, lse
        self._attend.launch(stream, attend)


def _fixed_params(problem: Problem, config: Config, target: Target, v: Tensor, out: Tensor) -> dict[str, Any]:
    capped = problem.softcap > 0
    return {
        **stride_params(v=v, out=out),
        **shape_params(problem),
        "heads": problem.heads_q,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": head_sections(problem, target, 2 * config.parts),
        "longest_first": int(isinstance(problem.mask, Causal)),
        "most_exponents": most_exponents(problem),
        "scale_log2": (problem.softcap if capped else problem.scale) * LOG2_E,
        "softcap_in": problem.scale / problem.softcap if capped else 0.0,
        "lse_scale": problem.softcap if capped else problem.scale,
    }


def most_exponents(problem: Problem) -> int:
    """What the exponents of the largest |q| and |k|, rounded down, may add up to: both may be nearly twice as large."""
    spread = math.log2(abs(problem.scale) * math.sqrt(problem.head_dim))
    return _MOST_LOGIT_BOUND - 2 - math.ceil(spread - 1e-9)


def _operand_shapes(problem: Problem) -> tuple[tuple[int, int, int, int], ...]:
    """Of q, k and v."""
    return (
        (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim_v),
    )


def _tiles(pairs: int, seq: int, rows: int) -> int:
    return pairs * -(-seq // rows)


def _tiles_of_operands(problem: Problem, config: Config) -> tuple[int, int, int]:
    q = _tiles(problem.batch * problem.heads_q, problem.seq_q, 64)
    kv = _tiles(problem.batch * problem.heads_kv, problem.seq_kv, config.block_kv)
    return q, kv, kv


def _map(shape: tuple[int, int, int, int], parts: int, rows: int) -> TiledMap:
    """Boxes of `rows` x 64 columns of a contiguous (parts * batch, heads, seq, dim)."""
    dtype = torch.bfloat16 if parts == 3 else torch.float16
    return rows_map(torch.empty((parts * shape[0], *shape[1:]), dtype=dtype, device="meta"), rows)


def _config(parts: int, classes: tuple[int, int], softcap: bool) -> Config:
    consumers, block_kv, k_stages, v_stages, columns = _SHAPES[parts][classes]
    return Config(parts, *classes, consumers, block_kv, k_stages, v_stages, columns, softcap, turns=consumers == 2)
