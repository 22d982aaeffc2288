"""Every NVIDIA GPU from sm_80 on: our own backward, kernels/sm80/backward.cuh. The other half of the backend `sm80`.

Three launches: `preprocess` makes the row terms and zeroes the sums of dQ, the main kernel makes dK and dV and adds up
dQ in float32, `postprocess` rounds dQ. Tiles of keys that are few or long are cut into pieces (division.py), which add
up dK and dV in float32. Extra memory is O(N): these sums and two floats per query row.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..jit import Unit, cpp_literal, layout_asserts, params_struct
from ..masks import Causal
from ..target import Target
from . import division, sm80_shared
from . import fused_rules as rules
from .fused import Stage, Workspace, bound_backward, matrix_bytes, score_params, shape_params
from .score_policy import scores_type
from .sm80_shared import COMPILED, Strided, is_gated

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants
    from .fused import BoundBackward, Given, Tensor

EDGE_ROWS, EDGE_THREADS = 32, 256
VECTOR_SUMS_FROM = (9, 0)  # red.global.add.v4.f32
_LANES = {64: 8, 96: 16, 128: 16, 192: 32, 256: 32}  # of preprocess, 8 columns each


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::BackwardConfig"

    bf16: bool
    head_dim: int
    head_dim_v: int
    block_q: int
    block_kv: int
    warps: int
    score_rows: int
    key_rows: int
    query_rows: int
    stages: int
    softcap: bool
    vector_sums: bool
    makes_dkv: bool
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """`sizeof(BackwardSmem<config>)`; the generated source asserts it."""
        kv = matrix_bytes(self.block_kv, self.head_dim) + matrix_bytes(self.block_kv, self.head_dim_v)
        step = matrix_bytes(self.block_q, self.head_dim) + matrix_bytes(self.block_q, self.head_dim_v)
        weights = 2 * matrix_bytes(self.block_q, self.block_kv)
        vectors = 2 * self.stages * self.block_q * 4
        plan = 13 * 4
        return -(-(kv + self.stages * step + weights + vectors + plan) // 1024) * 1024

    @property
    def name(self) -> str:
        kind = f"{'bf16' if self.bf16 else 'fp16'}_d{self.head_dim}x{self.head_dim_v}"
        grids = f"w{self.warps}_{self.score_rows}{self.key_rows}{self.query_rows}"
        extras = f"{'_softcap' * self.softcap}{'_v4' * self.vector_sums}{'' if self.makes_dkv else '_dq_only'}"
        return (
            f"fa2_backward_{kind}_q{self.block_q}_kv{self.block_kv}_{grids}_s{self.stages}_x{self.ctas_per_sm}{extras}"
        )

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.warps} warps"
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        return f"{tile}, {stages}, {self.smem_bytes / 1024:.0f} KiB shared"

    def fits(self, target: Target) -> bool:
        return sm80_shared.fits(self.smem_bytes, self.ctas_per_sm, target)


def configs(problem: Problem, target: Target) -> list[BackwardConfig]:
    """Legal configs that fit the target, best first."""
    bf16, capped = problem.dtype is torch.bfloat16, problem.softcap > 0
    found = (_config(row, bf16, capped, target) for row in _table()[rules.class_of(problem), capped])
    return [config for config in found if config.fits(target)]


def all_units() -> list[Unit]:
    """Every kernel a backward may launch on the named targets, one GPU of each size of shared memory."""
    units: list[Unit] = []
    for target in COMPILED:
        for bf16 in (True, False):
            units += [preprocess_unit(bf16, lanes, target.arch) for lanes in sorted({*_LANES.values()})]
            for (_, softcap), rows in _table().items():
                fitting = [config for row in rows if (config := _config(row, bf16, softcap, target)).fits(target)]
                units += [main_unit(config, target.arch) for config in fitting]
                units += [postprocess_unit(config, target.arch) for config in fitting if not softcap]
                if bf16 and not softcap:
                    units += [main_unit(dq_only(config), target.arch) for config in fitting[:1]]
    return list({unit.label: unit for unit in units}.values())


@functools.cache
def main_unit(config: BackwardConfig, arch: str) -> Unit:
    source = f"""#include "sm80/backward.cuh"
{layout_asserts(_MainParams, "tilewise::sm80::BackwardParams")}
constexpr tilewise::sm80::BackwardConfig config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm80::BackwardSmem<config>) == {config.smem_bytes}, "BackwardConfig.smem_bytes");
static_assert(config.threads() == {config.threads});
extern "C" __global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
{config.name}(const __grid_constant__ tilewise::sm80::BackwardParams params) {{
  tilewise::sm80::backward<config, {scores_type(softcap=config.softcap)}>(params);
}}
"""
    return Unit(config.name, source, arch, strict=is_gated(arch), smem_bytes=config.smem_bytes)


@functools.cache
def preprocess_unit(bf16: bool, lanes: int, arch: str) -> Unit:
    name = f"preprocess_{'bf16' if bf16 else 'fp16'}_{lanes}_of_32"
    source = f"""#include "sm80/backward_edges.cuh"
{layout_asserts(_PreprocessParams, "tilewise::sm80::PreprocessParams")}
static_assert(tilewise::sm80::edge_threads == {EDGE_THREADS} && tilewise::sm80::edge_rows == {EDGE_ROWS});
extern "C" __global__ void __launch_bounds__({EDGE_THREADS})
{name}(const __grid_constant__ tilewise::sm80::PreprocessParams params) {{
  tilewise::sm80::preprocess<{str(bf16).lower()}, {lanes}>(params);
}}
"""
    return Unit(name, source, arch)


def postprocess_unit(config: BackwardConfig, arch: str) -> Unit:
    """Depends on how dQ is divided over the warps, and on nothing else of the config."""
    plain = _plain(config)
    name = plain.name.replace("fa2_backward", "postprocess")
    source = f"""#include "sm80/backward_edges.cuh"
{layout_asserts(_PostprocessParams, "tilewise::sm80::PostprocessParams")}
constexpr tilewise::sm80::BackwardConfig config = {cpp_literal(plain)};
extern "C" __global__ void __launch_bounds__({EDGE_THREADS})
{name}(const __grid_constant__ tilewise::sm80::PostprocessParams params) {{
  tilewise::sm80::postprocess<config>(params);
}}
"""
    return Unit(name, source, arch)


def _plain(config: BackwardConfig) -> BackwardConfig:
    """The config with what postprocess does not depend on made the same."""
    fields = {name: getattr(config, name) for name in config.__slots__}
    return BackwardConfig(**(fields | {"softcap": False, "makes_dkv": True, "ctas_per_sm": 1}))


def bind(problem: Problem, config: BackwardConfig | None = None) -> BoundBackward:
    return bound_backward(problem, functools.partial(_Launch, problem, config))


_MainParams = params_struct(
    "BackwardParams",
    q=Strided,
    k=Strided,
    v=Strided,
    dout=Strided,
    dk=Strided,
    dv=Strided,
    lse_log2=ctypes.c_void_p,
    row_terms=ctypes.c_void_p,
    dq_sums=ctypes.c_void_p,
    turns=ctypes.c_void_p,
    dkv_sums=ctypes.c_void_p,
    piece_turns=ctypes.c_void_p,
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
    rows_descend=ctypes.c_int,
    in_order=ctypes.c_int,
    scale=ctypes.c_float,
    scale_log2=ctypes.c_float,
    inverse_scale_log2=ctypes.c_float,
    softcap_in=ctypes.c_float,
)

_PreprocessParams = params_struct(
    "PreprocessParams",
    out=Strided,
    dout=Strided,
    lse=ctypes.c_void_p,
    dlse=ctypes.c_void_p,
    lse_log2=ctypes.c_void_p,
    row_terms=ctypes.c_void_p,
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
)

_PostprocessParams = params_struct(
    "PostprocessParams",
    dq_sums=ctypes.c_void_p,
    dq=Strided,
    heads=ctypes.c_int,
    seq_q=ctypes.c_int,
    q_tiles=ctypes.c_int,
    head_dim=ctypes.c_int,
    scale=ctypes.c_float,
)


def workspace(
    problem: Problem, config: BackwardConfig, wants_dq: bool, divided: division.Division | None = None
) -> Workspace:
    rows = problem.batch * problem.heads_q * _padded_rows(problem, config)
    tiles = problem.batch * problem.heads_kv * _kv_tiles(problem, config)
    cut = divided is not None and divided.cut and config.makes_dkv
    return Workspace.of(
        rows,
        rows // config.block_q if wants_dq and problem.deterministic else 0,
        config.head_dim if wants_dq else 0,
        piece_turns=2 * tiles if cut else 0,
        dkv_sums=tiles * config.block_kv * (config.head_dim + config.head_dim_v) if cut else 0,
    )


class _Launch:
    """All that a call does not have to decide again: one per problem, strides, wants and device."""

    def __init__(self, problem: Problem, config: BackwardConfig | None, given: Given, wants: Wants) -> None:
        dout, q, k, v, out = given
        target = Target.of(q.device)
        self._device = q.device.index
        config = config or configs(problem, target)[0]
        if not (wants[1] or wants[2]):
            config = dq_only(config)
        divided = divide(problem, config, target)
        self._wants = wants
        self._work = workspace(problem, config, wants[0], divided)
        self._in_order = wants[0] and problem.deterministic
        self._cut = divided.cut and config.makes_dkv
        arch = target.arch
        heads = problem.batch * problem.heads_q
        rows = _padded_rows(problem, config)
        self._pre = Stage(
            preprocess_unit(config.bf16, _LANES[config.head_dim_v], arch),
            _PreprocessParams,
            _preprocess_params(problem, config, out, dout),
            heads * rows // EDGE_ROWS,
            EDGE_THREADS,
            self._device,
        )
        self._main = Stage(
            main_unit(config, arch),
            _MainParams,
            _main_params(problem, config, divided) | _strides({"q": q, "k": k, "v": v, "dout": dout, "dk": k, "dv": v}),
            divided.grid,
            config.threads,
            self._device,
        )
        self._post = Stage(
            postprocess_unit(config, arch),
            _PostprocessParams,
            _postprocess_params(problem, config) | _strides({"dq": q}),
            heads * rows // config.block_q,
            EDGE_THREADS,
            self._device,
        )

    def run(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Grads:
        wants_dq, wants_dk, wants_dv = self._wants
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        dq = torch.empty_like(q) if wants_dq else None
        dk = torch.empty_like(k) if wants_dk else None
        dv = torch.empty_like(v) if wants_dv else None
        work = self._work
        scratch = q.new_empty(work.floats, dtype=torch.float32)
        base = scratch.data_ptr()
        lse_log2, row_terms = base + 4 * work.lse, base + 4 * work.row_terms
        sums = base + 4 * work.dq_sums if wants_dq else None
        turns = base + 4 * work.turns if self._in_order else None
        piece_turns = base + 4 * work.piece_turns if self._cut else None

        arguments = self._pre.arguments()
        params = arguments.params
        params.out.data, params.dout.data, params.lse = out.data_ptr(), dout.data_ptr(), lse.data_ptr()
        params.dlse = None if dlse is None else dlse.data_ptr()
        params.lse_log2, params.row_terms, params.dq_sums, params.turns = lse_log2, row_terms, sums, turns
        params.piece_turns = piece_turns
        self._pre.launch(stream, arguments)

        if sums is not None or dk is not None or dv is not None:
            arguments = self._main.arguments()
            params = arguments.params
            params.q.data, params.k.data, params.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
            params.dout.data = dout.data_ptr()
            params.dk.data = None if dk is None else dk.data_ptr()
            params.dv.data = None if dv is None else dv.data_ptr()
            params.lse_log2, params.row_terms, params.dq_sums, params.turns = lse_log2, row_terms, sums, turns
            params.dkv_sums = base + 4 * work.dkv_sums if piece_turns else None
            params.piece_turns = piece_turns
            self._main.launch(stream, arguments)

        if dq is not None:
            arguments = self._post.arguments()
            params = arguments.params
            params.dq_sums, params.dq.data = sums, dq.data_ptr()
            self._post.launch(stream, arguments)
        return dq, dk, dv


def _strides(tensors: dict[str, Tensor]) -> dict[str, Strided]:
    """Gradients are given by the tensors they are of: `empty_like` decides their strides."""
    return {
        name: Strided.of(torch.empty_like(tensor, device="meta") if name in ("dq", "dk", "dv") else tensor)
        for name, tensor in tensors.items()
    }


def _main_params(problem: Problem, config: BackwardConfig, divided: division.Division) -> dict[str, Any]:
    score = score_params(problem)
    return {
        **shape_params(problem),
        **score,
        "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": _padded_rows(problem, config) // config.block_q,
        "kv_tiles": _kv_tiles(problem, config),
        "pieces": divided.pieces,
        "piece_steps": divided.piece_steps,
        "sections": divided.sections,
        "rows_descend": int(problem.deterministic and isinstance(problem.mask, Causal)),
        "in_order": int(problem.deterministic),
        "scale": problem.scale,
        "inverse_scale_log2": 1.0 / score["scale_log2"],
    }


def _preprocess_params(problem: Problem, config: BackwardConfig, out: Tensor, dout: Tensor) -> dict[str, Any]:
    return _strides({"out": out, "dout": dout}) | {
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": _padded_rows(problem, config),
        "head_dim_v": problem.head_dim_v,
        "row_floats": config.head_dim,
        "block_q": config.block_q,
        "piece_turn_count": problem.batch * problem.heads_kv * _kv_tiles(problem, config),
    }


def _postprocess_params(problem: Problem, config: BackwardConfig) -> dict[str, Any]:
    return {
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "q_tiles": _padded_rows(problem, config) // config.block_q,
        "head_dim": problem.head_dim,
        "scale": problem.scale,
    }


def _padded_rows(problem: Problem, config: BackwardConfig) -> int:
    return -(-problem.seq_q // config.block_q) * config.block_q


def _kv_tiles(problem: Problem, config: BackwardConfig) -> int:
    return -(-problem.seq_kv // config.block_kv)


# Estimates, until somebody measures them. A step is five products of block_q x block_kv; a CTA begins with a load of K
# and V and ends with a store of dK and dV, and a piece passes on both in float32.
COSTS = division.Costs(start=1.5, merge=1.5)


def divide(problem: Problem, config: BackwardConfig, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    costs = COSTS if config.makes_dkv else COSTS._replace(merge=0.0)
    steps = division.tile_steps(problem, config.block_q, config.block_kv)
    slots = target.sms * config.ctas_per_sm
    return division.divide(steps, problem.batch * problem.heads_kv, slots, costs, key_sections(problem))


def key_sections(problem: Problem) -> int | None:
    """Into how many runs the KV heads are divided that are worked on one after another; None: as division.py says.

    Equal tiles: one head per run, since its tiles read the same queries and add to the same dQ.
    """
    return None if isinstance(problem.mask, Causal) else problem.batch * problem.heads_kv


def dq_only(config: BackwardConfig) -> BackwardConfig:
    return replace(config, makes_dkv=False)


def _config(row: dict[str, Any], bf16: bool, softcap: bool, target: Target) -> BackwardConfig:
    return BackwardConfig(
        bf16=bf16,
        head_dim=row["head_dims"][0],
        head_dim_v=row["head_dims"][1],
        block_q=row["block_q"],
        block_kv=row["block_kv"],
        warps=row["warps"],
        score_rows=row["score_rows"],
        key_rows=row["key_rows"],
        query_rows=row["query_rows"],
        stages=row["stages"],
        softcap=softcap,
        vector_sums=target.capability >= VECTOR_SUMS_FROM,
        makes_dkv=True,
        ctas_per_sm=row["ctas_per_sm"],
    )


def keys_of_row(row: rules.Row) -> list[tuple[tuple[int, int], bool]]:
    return [(tuple(row["head_dims"]), softcap) for softcap in row.get("softcap", (False, True))]


@functools.cache
def _table() -> dict[tuple[tuple[int, int], bool], list[rules.Row]]:
    """(head-dim class, softcap) -> rows, best first; a row is for both unless it says for which."""
    return rules.rows_by("sm80", "backward", keys_of_row)
