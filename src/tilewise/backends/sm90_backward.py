"""Hopper (sm_90a): our own backward, kernels/sm90/backward.cuh. The other half of the backend `sm90`.

`preprocess` makes the row terms of the main kernel, which makes dK and dV and adds up dQ in float32 over the tiles of
keys: `Order` says how. Few of them, and those whose gradients shall be deterministic, take turns, and the last one
writes dQ; else its sums are zeroed before, and `postprocess` rounds them. Tiles of keys that are few or long are cut
into pieces (division.py), which add up dK and dV in float32. Extra memory is O(N): these sums and two floats per query
row.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace
from enum import IntEnum
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..jit import TensorMap, Unit, cpp_literal, layout_asserts, params_struct, rows_map
from ..masks import Causal
from ..target import Target
from . import division
from . import fused_rules as rules
from .fused import (
    LOG2_E,
    Stage,
    Workspace,
    bound_backward,
    kv_head_sections,
    matrix_bytes,
    score_params,
    shape_params,
    stride_params,
)
from .score_policy import scores_type

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants
    from .fused import BoundBackward, Given, Tensor

ARCH = "sm_90a"
# Mean of 2^-8 / m over mantissas m, as weights are spread in the logarithm: half a unit in the last place of bf16.
TRUNCATION_BIAS = 2.0**-8 / (2 * math.log(2))
EDGE_ROWS, EDGE_THREADS = 64, 256
TURN_STAGES = 4
_LANES = {64: 8, 96: 16, 128: 16, 192: 32, 256: 32}  # of preprocess, 8 columns each


class Order(IntEnum):
    """How the tiles of keys add up dQ: kernels/sm90/backward_config.cuh."""

    BY_KEYS = 0
    BY_CLAIM = 1
    FREELY = 2


class Walk(IntEnum):
    """In which order a grid goes through tiles of keys, and a CTA through its steps: likewise."""

    AROUND = 0
    DOWN = 1
    STAIRS = 2


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::BackwardConfig"
    threads: ClassVar[int] = 512
    launch_registers: ClassVar[int] = 128

    bf16: bool
    head_dim: int
    head_dim_v: int
    block_q: int
    by_keys: bool
    stages: int
    ds_stages: int
    softcap: bool
    writes_dq: bool
    makes_dq: bool
    makes_dkv: bool
    dq_columns: int
    query_registers: int
    product_registers: int

    @property
    def block_kv(self) -> int:
        return 128 if self.by_keys else 64

    @property
    def weight_factor(self) -> float:
        """What all weights are raised by, so that truncating them to bf16 is right on average."""
        return 1.0 + TRUNCATION_BIAS if self.bf16 and self.by_keys else 1.0

    @property
    def smem_bytes(self) -> int:
        """`sizeof(BackwardSmem<config>)`; the generated source asserts it."""
        kv = matrix_bytes(self.block_kv, self.head_dim) + matrix_bytes(self.block_kv, self.head_dim_v)
        rings = self.stages * (matrix_bytes(self.block_q, self.head_dim) + matrix_bytes(self.block_q, self.head_dim_v))
        ds = self.ds_stages * matrix_bytes(self.block_kv, self.block_q)
        weights = 16 if self.by_keys else self.block_q * 64 * 4
        vectors = 2 * self.stages * self.block_q * 4 + self.stages * 2 * 4
        barriers = 8 * (2 + 4 * self.stages + 2 * self.ds_stages + 2 + 2 * TURN_STAGES)
        before_turns = -(-(kv + rings + ds + weights + vectors + barriers + 2 * 4) // 16) * 16
        return -(-(before_turns + TURN_STAGES * 8 + 16 * 4 + self.stages * 4) // 1024) * 1024

    @property
    def name(self) -> str:
        kind = f"{'bf16' if self.bf16 else 'fp16'}_d{self.head_dim}x{self.head_dim_v}"
        extras = f"{'_softcap' if self.softcap else ''}{'_one_tile' if self.writes_dq else ''}"
        extras += "" if self.makes_dq and self.makes_dkv else "_dq_only" if self.makes_dq else "_dkv_only"
        return f"backward_{kind}_q{self.block_q}_kv{self.block_kv}{extras}"

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, 4 warpgroups"
        return f"{tile}, {self.stages} stages, {self.smem_bytes / 1024:.0f} KiB shared"


def configs(problem: Problem, target: Target) -> list[BackwardConfig]:
    """Legal configs, best first, from the measured table."""
    return [
        _config(row, problem.dtype is torch.bfloat16, problem.softcap > 0)
        for row in _table()[rules.class_of(problem)]
        if not row["writes_dq"] or _has_one_tile(problem, row)
    ]


def all_units() -> list[Unit]:
    """Every kernel a backward may launch."""
    units: dict[str, Unit] = {}
    for bf16 in (True, False):
        units |= {kernel.name: kernel for kernel in (postprocess_unit(bf16), *_preprocess_units(bf16))}
        for rows, softcap in product(_table().values(), (False, True)):
            for row in rows:
                if not (softcap and row["writes_dq"]):
                    config = _config(row, bf16, softcap)
                    units[config.name] = main_unit(config)
                if bf16 and not softcap:
                    for wants in ((True, False, False), (False, True, True)):
                        config = _only(_config(row, bf16, softcap), wants)
                        units[config.name] = main_unit(config)
    return list(units.values())


def _preprocess_units(bf16: bool) -> list[Unit]:
    return [preprocess_unit(bf16, lanes) for lanes in sorted({*_LANES.values()})]


@functools.cache
def main_unit(config: BackwardConfig) -> Unit:
    source = f"""#include "sm90/backward.cuh"
{layout_asserts(_MainParams, "tilewise::sm90::BackwardParams")}
constexpr tilewise::sm90::BackwardConfig config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm90::BackwardSmem<config>) == {config.smem_bytes}, "BackwardConfig.smem_bytes");
static_assert(config.block_kv() == {config.block_kv} && config.threads() == {config.threads});
extern "C" __global__ void __launch_bounds__(config.threads(), 1)
{config.name}(const __grid_constant__ tilewise::sm90::BackwardParams params) {{
  tilewise::sm90::backward<config, {scores_type(softcap=config.softcap)}>(params);
}}
"""
    return Unit(config.name, source, ARCH, smem_bytes=config.smem_bytes)


@functools.cache
def preprocess_unit(bf16: bool, lanes: int) -> Unit:
    name = f"preprocess_{'bf16' if bf16 else 'fp16'}_{lanes}"
    source = f"""#include "sm90/backward_edges.cuh"
{layout_asserts(_PreprocessParams, "tilewise::sm90::PreprocessParams")}
static_assert(tilewise::sm90::edge_threads == {EDGE_THREADS} && tilewise::sm90::edge_rows == {EDGE_ROWS});
extern "C" __global__ void __launch_bounds__({EDGE_THREADS})
{name}(const __grid_constant__ tilewise::sm90::PreprocessParams params) {{
  tilewise::sm90::preprocess<{str(bf16).lower()}, {lanes}>(params);
}}
"""
    return Unit(name, source, ARCH)


@functools.cache
def postprocess_unit(bf16: bool) -> Unit:
    name = f"postprocess_{'bf16' if bf16 else 'fp16'}"
    source = f"""#include "sm90/backward_edges.cuh"
{layout_asserts(_PostprocessParams, "tilewise::sm90::PostprocessParams")}
extern "C" __global__ void __launch_bounds__({EDGE_THREADS})
{name}(const __grid_constant__ tilewise::sm90::PostprocessParams params) {{
  tilewise::sm90::postprocess<{str(bf16).lower()}>(params);
}}
"""
    return Unit(name, source, ARCH)


def bind(problem: Problem, config: BackwardConfig | None = None) -> BoundBackward:
    return bound_backward(problem, functools.partial(_Launch, problem, config))


_MainParams = params_struct(
    "BackwardParams",
    q_map=TensorMap,
    k_map=TensorMap,
    v_map=TensorMap,
    dout_map=TensorMap,
    dk_map=TensorMap,
    dv_map=TensorMap,
    start_s=ctypes.c_void_p,
    start_dp=ctypes.c_void_p,
    dq_sums=ctypes.c_void_p,
    turns=ctypes.c_void_p,
    dkv_sums=ctypes.c_void_p,
    piece_turns=ctypes.c_void_p,
    dq=ctypes.c_void_p,
    dq_batch_stride=ctypes.c_longlong,
    dq_head_stride=ctypes.c_longlong,
    dq_seq_stride=ctypes.c_longlong,
    batch=ctypes.c_int,
    heads_kv=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    head_dim=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    q_tiles=ctypes.c_int,
    kv_tiles=ctypes.c_int,
    pieces=ctypes.c_int,
    piece_steps=ctypes.c_int,
    sections=ctypes.c_int,
    order=ctypes.c_int,
    walk=ctypes.c_int,
    store_dk=ctypes.c_int,
    store_dv=ctypes.c_int,
    scale_log2=ctypes.c_float,
    inverse_scale_log2=ctypes.c_float,
    softcap_in=ctypes.c_float,
    dqk_scale=ctypes.c_float,
)

_PreprocessParams = params_struct(
    "PreprocessParams",
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
    start_s=ctypes.c_void_p,
    start_dp=ctypes.c_void_p,
    dq_sums=ctypes.c_void_p,
    turns=ctypes.c_void_p,
    piece_turns=ctypes.c_void_p,
    piece_turn_count=ctypes.c_int,
    heads=ctypes.c_int,
    seq_q=ctypes.c_int,
    rows=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    row_floats=ctypes.c_int,
    block_q=ctypes.c_int,
    lse_factor=ctypes.c_float,
    start_bias=ctypes.c_float,
)


_PostprocessParams = params_struct(
    "PostprocessParams",
    dq_sums=ctypes.c_void_p,
    dq=ctypes.c_void_p,
    batch_stride=ctypes.c_longlong,
    head_stride=ctypes.c_longlong,
    seq_stride=ctypes.c_longlong,
    heads=ctypes.c_int,
    seq_q=ctypes.c_int,
    rows=ctypes.c_int,
    head_dim=ctypes.c_int,
    row_floats=ctypes.c_int,
    scale=ctypes.c_float,
)


def workspace(
    problem: Problem, config: BackwardConfig, wants_dq: bool, divided: division.Division | None = None
) -> Workspace:
    rows = problem.batch * problem.heads_q * _padded_rows(problem, config)
    tiles = problem.batch * problem.heads_kv * _kv_tiles(problem, config)
    cut = divided is not None and divided.cut and config.makes_dkv
    sums_dq = wants_dq and not config.writes_dq
    return Workspace.of(
        rows,
        2 * rows // config.block_q if sums_dq and _takes_turns(problem, config) else 0,
        config.head_dim if sums_dq else 0,
        piece_turns=4 * tiles if cut else 0,
        dkv_sums=tiles * config.block_kv * (config.head_dim + config.head_dim_v) if cut else 0,
    )


class _Launch:
    """All that a call does not have to decide again: one per problem, strides, wants and device."""

    def __init__(self, problem: Problem, config: BackwardConfig | None, given: Given, wants: Wants) -> None:
        dout, q, k, v, out = given
        target = Target.of(q.device)
        self._device = q.device.index
        config = _only(config or configs(problem, target)[0], wants)
        divided = divide(problem, config, target)
        self._wants = wants
        self._work = workspace(problem, config, wants[0], divided)
        self._sums_dq = wants[0] and not config.writes_dq
        self._turns = self._sums_dq and _takes_turns(problem, config)
        self._blind = self._turns and not _every_tile_sees_keys(problem, config.block_q)
        self._cut = divided.cut and config.makes_dkv
        self._q, self._dout = rows_map(q, config.block_q), rows_map(dout, config.block_q)
        self._k, self._v = rows_map(k, config.block_kv), rows_map(v, config.block_kv)
        self._dk = rows_map(torch.empty_like(k, device="meta"), 16)
        self._dv = rows_map(torch.empty_like(v, device="meta"), 16)
        dq = torch.empty_like(q, device="meta")
        rows = _padded_rows(problem, config)
        blocks = problem.batch * problem.heads_q * rows // EDGE_ROWS
        self._pre = Stage(
            preprocess_unit(config.bf16, _LANES[config.head_dim_v]),
            _PreprocessParams,
            _preprocess_params(problem, config, out, dout),
            blocks,
            EDGE_THREADS,
            self._device,
        )
        self._main = Stage(
            main_unit(config),
            _MainParams,
            _main_params(problem, config, divided, wants, dq),
            divided.grid,
            config.threads,
            self._device,
            overlap_previous=True,
        )
        self._post = Stage(
            postprocess_unit(config.bf16),
            _PostprocessParams,
            _postprocess_params(problem, config, dq),
            blocks,
            EDGE_THREADS,
            self._device,
            overlap_previous=True,
        )

    def run(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Grads:
        wants_dq, wants_dk, wants_dv = self._wants
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        dq = (torch.zeros_like(q) if self._blind else torch.empty_like(q)) if wants_dq else None
        dk = torch.empty_like(k) if wants_dk else None
        dv = torch.empty_like(v) if wants_dv else None
        work = self._work
        scratch = q.new_empty(work.floats, dtype=torch.float32)
        base = scratch.data_ptr()
        start_s, start_dp = base + 4 * work.lse, base + 4 * work.row_terms
        sums = base + 4 * work.dq_sums if self._sums_dq else None
        turns = base + 4 * work.turns if self._turns else None
        piece_turns = base + 4 * work.piece_turns if self._cut else None

        arguments = self._pre.arguments()
        params = arguments.params
        params.out, params.dout, params.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        params.dlse = None if dlse is None else dlse.data_ptr()
        params.start_s, params.start_dp, params.turns = start_s, start_dp, turns
        params.dq_sums = None if turns else sums
        params.piece_turns = piece_turns
        self._pre.launch(stream, arguments)

        arguments = self._main.arguments()
        params = arguments.params
        params.q_map, params.k_map = self._q.at(q.data_ptr()), self._k.at(k.data_ptr())
        params.v_map, params.dout_map = self._v.at(v.data_ptr()), self._dout.at(dout.data_ptr())
        if dk is not None:
            params.dk_map = self._dk.at(dk.data_ptr())
        if dv is not None:
            params.dv_map = self._dv.at(dv.data_ptr())
        params.start_s, params.start_dp, params.dq_sums, params.turns = start_s, start_dp, sums, turns
        params.dkv_sums = base + 4 * work.dkv_sums if piece_turns else None
        params.piece_turns = piece_turns
        params.dq = None if dq is None else dq.data_ptr()
        self._main.launch(stream, arguments)

        if dq is not None and self._sums_dq and not turns:
            arguments = self._post.arguments()
            params = arguments.params
            params.dq_sums, params.dq = sums, dq.data_ptr()
            self._post.launch(stream, arguments)
        return dq, dk, dv


def _main_params(
    problem: Problem, config: BackwardConfig, divided: division.Division, wants: Wants, dq: Tensor
) -> dict[str, Any]:
    score = score_params(problem)
    return {
        **stride_params(dq=dq),
        **shape_params(problem),
        **score,
        "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim,
        "q_tiles": _padded_rows(problem, config) // config.block_q,
        "kv_tiles": _kv_tiles(problem, config),
        "pieces": divided.pieces,
        "piece_steps": divided.piece_steps,
        "sections": divided.sections,
        "order": int(_order(problem, config)),
        "walk": int(_walk(problem, config, divided.cut)),
        "store_dk": int(wants[1]),
        "store_dv": int(wants[2]),
        "inverse_scale_log2": 1.0 / score["scale_log2"],
        "dqk_scale": problem.scale / config.weight_factor,
    }


def _preprocess_params(problem: Problem, config: BackwardConfig, out: Tensor, dout: Tensor) -> dict[str, Any]:
    """S starts from -lse in its own units: before the scale, or with a softcap after it."""
    unit = 1.0 if problem.softcap > 0 else problem.scale * LOG2_E
    return {
        **stride_params(out=out, dout=dout),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": _padded_rows(problem, config),
        "head_dim_v": problem.head_dim_v,
        "row_floats": config.head_dim,
        "block_q": config.block_q,
        "piece_turn_count": 2 * problem.batch * problem.heads_kv * _kv_tiles(problem, config),
        "lse_factor": -LOG2_E / unit,
        "start_bias": math.log2(config.weight_factor) / unit,
    }


def _postprocess_params(problem: Problem, config: BackwardConfig, dq: Tensor) -> dict[str, Any]:
    return {
        "batch_stride": dq.stride(0),
        "head_stride": dq.stride(1),
        "seq_stride": dq.stride(2),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": _padded_rows(problem, config),
        "head_dim": problem.head_dim,
        "row_floats": config.head_dim,
        "scale": problem.scale / config.weight_factor,
    }


def _has_one_tile(problem: Problem, row: dict[str, Any]) -> bool:
    """One tile holds all keys, and every tile of queries sees some of them."""
    if problem.softcap or problem.seq_kv > (128 if row["by_keys"] else 64):
        return False
    return _every_tile_sees_keys(problem, row["block_q"])


def _every_tile_sees_keys(problem: Problem, block_q: int) -> bool:
    left, right, offset = problem.mask.band(problem.seq_q, problem.seq_kv)  # type: ignore[attr-defined]
    first_row, end_row = -(offset + right), problem.seq_kv + left - offset
    last_tile = (problem.seq_q - 1) // block_q * block_q
    return bool(first_row < block_q and end_row > last_tile)


# Tiles of keys up to which waiting for the first and the last at a dQ costs less than zeroing and rounding its sums.
MAX_BY_CLAIM = 16
# With more queries than keys the first tile of keys is the last at most of them, which it must load again: all others
# wait for it in the end, unless the L2 cache holds all sums.
MAX_CLAIMED_BYTES = 40 * 2**20


def _order(problem: Problem, config: BackwardConfig) -> Order:
    if problem.deterministic:
        return Order.BY_KEYS
    sums = problem.batch * problem.heads_q * problem.seq_q * config.head_dim * 4
    if problem.seq_kv > MAX_BY_CLAIM * config.block_kv or (problem.seq_q > problem.seq_kv and sums > MAX_CLAIMED_BYTES):
        return Order.FREELY
    return Order.BY_CLAIM


def _walk(problem: Problem, config: BackwardConfig, cut: bool) -> Walk:
    """Down where tiles stay together that way, and pieces of them can take turns: kernels/sm90/backward_config.cuh."""
    by_keys = _order(problem, config) is Order.BY_KEYS
    if isinstance(problem.mask, Causal) and (problem.group > 1 or (by_keys and cut)):
        return Walk.DOWN
    return Walk.STAIRS if by_keys else Walk.AROUND


def _takes_turns(problem: Problem, config: BackwardConfig) -> bool:
    return _order(problem, config) is not Order.FREELY


def _padded_rows(problem: Problem, config: BackwardConfig) -> int:
    return -(-problem.seq_q // config.block_q) * config.block_q


def _kv_tiles(problem: Problem, config: BackwardConfig) -> int:
    return -(-problem.seq_kv // config.block_kv)


# Fitted to measurements of uncut and cut tiles on an NVIDIA H200.
COSTS = division.Costs(start=2.0, merge=0.5)


def divide(problem: Problem, config: BackwardConfig, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    steps = division.tile_steps(problem, config.block_q, config.block_kv)
    costs = COSTS if config.makes_dkv else COSTS._replace(merge=0.0)
    if problem.deterministic and config.makes_dkv:
        costs = costs._replace(turn=1.0)
    pairs = problem.batch * problem.heads_kv
    whole = division.divide(steps, pairs, target.sms, costs, _sections(problem, config, target, False))
    if not whole.cut:
        return whole
    return division.divide(steps, pairs, target.sms, costs, _sections(problem, config, target, True))


def _sections(problem: Problem, config: BackwardConfig, target: Target, cut: bool) -> int | None:
    """Into how many runs the KV heads are divided that are worked on one after another; None: as division.py says.

    Equal tiles: one head per run, since its tiles read the same queries and add to the same dQ. On stairs: several
    heads, since tiles of one head that start together wait for one another; the more tiles, the more heads.
    """
    walk = _walk(problem, config, cut)
    if walk is Walk.STAIRS:
        tiles = _kv_tiles(problem, config)
        share = 1 / 6 if tiles < 8 else 1 / 3 if tiles < 16 else 2 / 3  # of the L2 cache; measured
        return kv_head_sections(problem, target, 2, share)
    return None if isinstance(problem.mask, Causal) else problem.batch * problem.heads_kv


def _only(config: BackwardConfig, wants: Wants) -> BackwardConfig:
    """The config of a kernel that makes no gradient but these; dK and dV share their products."""
    wants_dq, wants_dkv = wants[0], wants[1] or wants[2]
    return replace(config, writes_dq=config.writes_dq and wants_dq, makes_dq=wants_dq, makes_dkv=wants_dkv)


def _config(row: dict[str, Any], bf16: bool, softcap: bool) -> BackwardConfig:
    return BackwardConfig(
        bf16=bf16,
        head_dim=row["head_dims"][0],
        head_dim_v=row["head_dims"][1],
        block_q=row["block_q"],
        by_keys=row["by_keys"],
        stages=row["stages"],
        ds_stages=row["ds_stages"],
        softcap=softcap,
        writes_dq=row["writes_dq"],
        makes_dq=True,
        makes_dkv=True,
        dq_columns=row["dq_columns"],
        query_registers=row["query_registers"],
        product_registers=row["product_registers"],
    )


@functools.cache
def _table() -> dict[tuple[int, int], list[rules.Row]]:
    """Head-dim class -> rows, best first."""
    return rules.rows_by("sm90_backward", "backward", lambda row: [tuple(row["head_dims"])])
