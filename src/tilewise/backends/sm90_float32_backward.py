"""The float32 backward of Hopper: operands in three parts of bf16, kernels/sm90/float32_backward.cuh.

Three launches: a split of q, k, v and dout, a kernel that makes the row terms, and the one that makes dK and dV and
adds to dQ, which was zeroed before. Tiles of keys that are few or long are cut into pieces (division.py), which add up
dK and dV in place. No range is refused. Part of the backend sm90, which imports this module.
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
from . import division
from . import fused_rules as rules
from .fused import Stage, bound_backward, kv_head_sections, matrix_bytes, shape_params, stride_params
from .score_policy import scores_type
from .sm90_float32 import SPLIT_THREADS, SPLITS_PER_SM, SplitParams, split_unit

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants
    from .fused import BoundBackward, Given, Tensor

ARCH = "sm_90a"
HEAD_DIM_LIMIT = 128
BLOCK = 64  # rows of a query tile and of a KV tile
PARTS = 3
_ROW_THREADS = 256
_ROW_SMEM = 16
_FACT_BYTES = 8


@dataclass(frozen=True, slots=True)
class GradConfig:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/float32_backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::float32::GradConfig"
    threads: ClassVar[int] = 512
    launch_registers: ClassVar[int] = 128

    head_dim: int
    head_dim_v: int
    stages: int
    rooms: int
    softcap: bool

    @property
    def smem_bytes(self) -> int:
        """`sizeof(GradSmem<config>)`; the generated source asserts it."""
        both = matrix_bytes(BLOCK, self.head_dim) + matrix_bytes(BLOCK, self.head_dim_v)
        rooms = self.rooms * PARTS * matrix_bytes(BLOCK, BLOCK)
        vectors = 2 * self.stages * BLOCK * 4
        barriers = 8 * (2 + 4 * self.stages + 3 * self.rooms)
        before_plan = -(-(PARTS * (1 + self.stages) * both + rooms + vectors + barriers) // 16) * 16
        return -(-(before_plan + 16 * 4 + 2 * 4) // 1024) * 1024

    @property
    def name(self) -> str:
        shape = f"d{self.head_dim}x{self.head_dim_v}_q{BLOCK}_kv{BLOCK}_s{self.stages}r{self.rooms}"
        return f"backward_float32_bf16x6_{shape}{'_softcap' if self.softcap else ''}"

    def __str__(self) -> str:
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        tile = f"tile {BLOCK} x {BLOCK}, 4 warpgroups, {stages}"
        return f"6 products of bf16 parts, {tile}, {self.smem_bytes / 1024:.0f} KiB shared"


# (q and k, v and out) -> stages of the rings of Q and dO, rooms for P and dS: as many as fit shared memory.
_SHAPES = {(64, 64): (2, 2), (96, 96): (1, 1), (128, 128): (1, 1)}


def configs(problem: Problem, target: Target) -> list[GradConfig]:
    """Legal configs, best first: each class of head dims has one."""
    return [_config(rules.class_of(problem), problem.softcap > 0)]


def _config(classes: tuple[int, int], softcap: bool) -> GradConfig:
    return GradConfig(*classes, *_SHAPES[classes], softcap)


def details(problem: Problem, target: Target) -> list[str]:
    """How the backward fills the GPU, for `explain`."""
    (config,) = configs(problem, target)
    held = f"{Scratch(problem).total / 2**20:.1f} MiB of scratch"
    return [
        f"backward: {config}, {config.threads} threads; before it two kernels that split and sum, {held}",
        f"backward: {divide(problem, target)}",
    ]


def all_units() -> list[Unit]:
    """Every kernel of this module but the split, which the forward has too."""
    return [
        row_terms_unit(),
        *(main_unit(_config(classes, softcap)) for classes in _SHAPES for softcap in (False, True)),
    ]


@functools.cache
def main_unit(config: GradConfig) -> Unit:
    source = f"""#include "sm90/float32_backward.cuh"
{layout_asserts(_MainParams, "tilewise::sm90::float32::GradParams")}
constexpr tilewise::sm90::float32::GradConfig config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm90::float32::GradSmem<config>) == {config.smem_bytes}, "GradConfig.smem_bytes");
static_assert(tilewise::sm90::float32::grad_block == {BLOCK} && config.threads() == {config.threads});
extern "C" __global__ void __launch_bounds__(config.threads(), 1)
{config.name}(const __grid_constant__ tilewise::sm90::float32::GradParams params) {{
  tilewise::sm90::float32::backward<config, {scores_type(softcap=config.softcap, precise=True)}>(params);
}}
"""
    return Unit(config.name, source, ARCH, smem_bytes=config.smem_bytes)


@functools.cache
def row_terms_unit() -> Unit:
    name = "preprocess_float32"
    source = f"""#include "sm90/float32_backward_rows.cuh"
{layout_asserts(_RowParams, "tilewise::sm90::float32::RowParams")}
static_assert(tilewise::sm90::float32::row_threads == {_ROW_THREADS});
extern "C" __global__ void __launch_bounds__({_ROW_THREADS})
{name}(const __grid_constant__ tilewise::sm90::float32::RowParams params) {{
  tilewise::sm90::float32::row_terms(params);
}}
"""
    return Unit(name, source, ARCH, smem_bytes=_ROW_SMEM)


_RowParams = params_struct(
    "RowParams",
    out=ctypes.c_void_p,
    out_batch_stride=ctypes.c_longlong,
    out_head_stride=ctypes.c_longlong,
    out_seq_stride=ctypes.c_longlong,
    dout=ctypes.c_void_p,
    dout_batch_stride=ctypes.c_longlong,
    dout_head_stride=ctypes.c_longlong,
    dout_seq_stride=ctypes.c_longlong,
    lse=ctypes.c_void_p,
    dlse=ctypes.c_void_p,
    padded_lse=ctypes.c_void_p,
    row_terms=ctypes.c_void_p,
    term_exponents=ctypes.c_void_p,
    turns=ctypes.c_void_p,
    piece_turns=ctypes.c_void_p,
    piece_turn_count=ctypes.c_int,
    heads=ctypes.c_int,
    seq_q=ctypes.c_int,
    q_tiles=ctypes.c_int,
    head_dim_v=ctypes.c_int,
)

_MainParams = params_struct(
    "GradParams",
    q_map=TensorMap,
    k_map=TensorMap,
    v_map=TensorMap,
    dout_map=TensorMap,
    q_facts=ctypes.c_void_p,
    k_facts=ctypes.c_void_p,
    v_facts=ctypes.c_void_p,
    dout_facts=ctypes.c_void_p,
    term_exponents=ctypes.c_void_p,
    lse=ctypes.c_void_p,
    row_terms=ctypes.c_void_p,
    turns=ctypes.c_void_p,
    piece_turns=ctypes.c_void_p,
    dq=ctypes.c_void_p,
    dq_batch_stride=ctypes.c_longlong,
    dq_head_stride=ctypes.c_longlong,
    dq_seq_stride=ctypes.c_longlong,
    dk=ctypes.c_void_p,
    dk_batch_stride=ctypes.c_longlong,
    dk_head_stride=ctypes.c_longlong,
    dk_seq_stride=ctypes.c_longlong,
    dv=ctypes.c_void_p,
    dv_batch_stride=ctypes.c_longlong,
    dv_head_stride=ctypes.c_longlong,
    dv_seq_stride=ctypes.c_longlong,
    batch=ctypes.c_int,
    heads_kv=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    head_dim=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    q_tiles=ctypes.c_int,
    kv_tiles=ctypes.c_int,
    pieces=ctypes.c_int,
    piece_steps=ctypes.c_int,
    sections=ctypes.c_int,
    in_order=ctypes.c_int,
    score_scale=ctypes.c_float,
    softcap_in=ctypes.c_float,
    scale=ctypes.c_float,
)


def bind(problem: Problem, config: GradConfig | None = None) -> BoundBackward:
    return bound_backward(problem, functools.partial(_Launch, problem, config))


class Scratch:
    """Where parts, facts and row terms lie, in bytes from the beginning of one allocation."""

    __slots__ = ("facts", "lse", "parts", "piece_turns", "row_terms", "term_exponents", "total", "turns")

    def __init__(self, problem: Problem) -> None:
        self.total = 0
        tiles = problem.batch * problem.heads_q * _tiles(problem.seq_q)
        self.turns = self._room(4 * tiles)
        self.piece_turns = self._room(16 * problem.batch * problem.heads_kv * _tiles(problem.seq_kv))
        self.term_exponents = self._room(4 * tiles)
        self.lse, self.row_terms = (self._room(4 * BLOCK * tiles) for _ in range(2))
        shapes = operand_shapes(problem)
        self.facts = [self._room(_FACT_BYTES * shape[0] * shape[1] * _tiles(shape[2])) for shape in shapes]
        self.parts = [self._room(2 * PARTS * math.prod(shape)) for shape in shapes]

    def _room(self, size: int) -> int:
        start = self.total
        self.total += -(-size // 256) * 256
        return start


class _Launch:
    """All that a call does not have to decide again: one per problem, strides, wants and device."""

    def __init__(self, problem: Problem, config: GradConfig | None, given: Given, wants: Wants) -> None:
        dout, q, k, v, out = given
        target = Target.of(q.device)
        device = q.device.index
        config = config or configs(problem, target)[0]
        shapes = operand_shapes(problem)
        tiles = [shape[0] * shape[1] * _tiles(shape[2]) for shape in shapes]
        self._device, self._wants, self._in_order = device, wants, problem.deterministic
        self._scratch = Scratch(problem)
        divided = divide(problem, target, makes_dkv=wants[1] or wants[2])
        self._cut = divided.cut and (wants[1] or wants[2])
        self._maps = [
            rows_map(torch.empty((PARTS * shape[0], *shape[1:]), dtype=torch.bfloat16, device="meta"), BLOCK)
            for shape in shapes
        ]
        grads = {name: torch.empty_like(of, device="meta") for name, of in (("dq", q), ("dk", k), ("dv", v))}
        self._split = Stage(
            split_unit(PARTS),
            SplitParams,
            _split_params(problem, (q, k, v, dout)),
            min(sum(tiles), SPLITS_PER_SM * target.sms),
            SPLIT_THREADS,
            device,
            overlap_previous=True,
        )
        self._rows = Stage(
            row_terms_unit(),
            _RowParams,
            _row_params(problem, out, dout),
            tiles[0],
            _ROW_THREADS,
            device,
            overlap_previous=True,
        )
        self._main = Stage(
            main_unit(config),
            _MainParams,
            _main_params(problem, divided, grads),
            divided.grid,
            config.threads,
            device,
            overlap_previous=True,
        )

    def run(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Grads:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        dq = torch.zeros_like(q) if self._wants[0] else None
        dk = torch.empty_like(k) if self._wants[1] else None
        dv = torch.empty_like(v) if self._wants[2] else None
        places = self._scratch
        scratch = q.new_empty(places.total, dtype=torch.uint8)
        base = scratch.data_ptr()
        turns = base + places.turns if self._in_order and dq is not None else None

        arguments = self._split.arguments()
        params = arguments.params
        for i, tensor in enumerate((q, k, v, dout)):
            params.x[i] = tensor.data_ptr()
            params.parts[i] = base + places.parts[i]
            params.facts[i] = base + places.facts[i]
        self._split.launch(stream, arguments)

        arguments = self._rows.arguments()
        params = arguments.params
        params.out, params.dout, params.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        params.dlse = None if dlse is None else dlse.data_ptr()
        params.padded_lse = base + places.lse
        self._point_to_terms(params, base, turns)
        self._rows.launch(stream, arguments)

        arguments = self._main.arguments()
        params = arguments.params
        params.q_map, params.k_map, params.v_map, params.dout_map = (
            tensor_map.at(base + place) for tensor_map, place in zip(self._maps, places.parts, strict=True)
        )
        params.q_facts, params.k_facts, params.v_facts, params.dout_facts = (base + place for place in places.facts)
        params.lse = base + places.lse
        self._point_to_terms(params, base, turns)
        params.dq, params.dk, params.dv = (None if grad is None else grad.data_ptr() for grad in (dq, dk, dv))
        self._main.launch(stream, arguments)
        return dq, dk, dv

    def _point_to_terms(self, params: Any, base: int, turns: int | None) -> None:
        places = self._scratch
        params.row_terms, params.term_exponents = base + places.row_terms, base + places.term_exponents
        params.turns = turns
        params.piece_turns = base + places.piece_turns if self._cut else None


def operand_shapes(problem: Problem) -> tuple[tuple[int, int, int, int], ...]:
    """Of q, k, v and dout."""
    return (
        (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim),
        (problem.batch, problem.heads_kv, problem.seq_kv, problem.head_dim_v),
        (problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v),
    )


def _split_params(problem: Problem, inputs: tuple[Tensor, ...]) -> dict[str, Any]:
    shapes = operand_shapes(problem)
    first = [0]
    for shape in shapes:
        first.append(first[-1] + shape[0] * shape[1] * _tiles(shape[2]))
    return {
        "batch_stride": tuple(x.stride(0) for x in inputs),
        "head_stride": tuple(x.stride(1) for x in inputs),
        "seq_stride": tuple(x.stride(2) for x in inputs),
        "heads": tuple(shape[1] for shape in shapes),
        "seq": tuple(shape[2] for shape in shapes),
        "dim": tuple(shape[3] for shape in shapes),
        "rows": (BLOCK,) * 4,
        "first_tile": tuple(first[:4]),
        "tiles": first[4],
        "batch": problem.batch,
        "aligned": int(problem.strides.value == "aligned"),
    }


def _row_params(problem: Problem, out: Tensor, dout: Tensor) -> dict[str, Any]:
    return {
        **stride_params(out=out, dout=dout),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "q_tiles": _tiles(problem.seq_q),
        "head_dim_v": problem.head_dim_v,
        "piece_turn_count": 2 * problem.batch * problem.heads_kv * _tiles(problem.seq_kv),
    }


def _main_params(problem: Problem, divided: division.Division, grads: dict[str, Tensor]) -> dict[str, Any]:
    capped = problem.softcap > 0
    return {
        **stride_params(**grads),
        **shape_params(problem),
        "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": _tiles(problem.seq_q),
        "kv_tiles": _tiles(problem.seq_kv),
        "pieces": divided.pieces,
        "piece_steps": divided.piece_steps,
        "sections": divided.sections,
        "in_order": int(problem.deterministic),
        "score_scale": problem.softcap if capped else problem.scale,
        "softcap_in": problem.scale / problem.softcap if capped else 0.0,
        "scale": problem.scale,
    }


def _tiles(seq: int) -> int:
    return -(-seq // BLOCK)


# Estimates, until somebody measures them. A step is 30 products of 64 x 64; a CTA begins with a load of K and V in
# three parts, and a piece ends with a sum of dK and dV in global memory.
COSTS = division.Costs(start=1.5, merge=1.0)


def divide(problem: Problem, target: Target, *, makes_dkv: bool = True) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    steps = division.tile_steps(problem, BLOCK, BLOCK)
    costs = COSTS if makes_dkv else COSTS._replace(merge=0.0)
    ordered = steps[::-1] if problem.deterministic else steps
    pairs = problem.batch * problem.heads_kv
    return division.divide(ordered, pairs, target.sms, costs, _sections(problem, target))


def _sections(problem: Problem, target: Target) -> int | None:
    """Into how many runs the KV heads are divided that are worked on one after another; as in sm90_backward."""
    if problem.deterministic:
        return kv_head_sections(problem, target, 2 * PARTS)
    return None if isinstance(problem.mask, Causal) else problem.batch * problem.heads_kv
