"""The float32 backward of the backend `sm80`: kernels/sm80/float32_backward.cuh.

Two launches: `float32_preprocess` makes the row terms and zeroes dQ, the main kernel makes dK and dV and adds up dQ in
place. Tiles of keys that are few or long are cut into pieces (division.py), which add up dK and dV in place. Extra
memory is two floats per query row, and the turns of tiles and pieces.
"""

from __future__ import annotations

import ctypes
import functools
import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..jit import Unit, cpp_literal, layout_asserts, params_struct
from ..masks import Causal
from ..target import Target
from . import division, sm80_shared
from . import fused_rules as rules
from .fused import Stage, bound_backward, shape_params
from .score_policy import scores_type
from .sm80_backward import VECTOR_SUMS_FROM, key_sections, keys_of_row
from .sm80_float32 import kind_name, products_text
from .sm80_shared import COMPILED, Strided, is_gated

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants
    from .fused import BoundBackward, Given, Tensor

HEAD_DIM_LIMIT = 128  # dK and dV of 16 keys a warp are held in registers
EDGE_ROWS, EDGE_THREADS = 32, 256
_LANES = {64: 16, 96: 32, 128: 32}  # of float32_preprocess, 4 columns each


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/float32_backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::Float32BackwardConfig"

    exact: bool
    head_dim: int
    head_dim_v: int
    block_q: int
    warps: int
    stages: int
    softcap: bool
    vector_sums: bool
    makes_dkv: bool
    ctas_per_sm: int

    @property
    def block_kv(self) -> int:
        return 16 * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Float32BackwardSmem<config>)`; the generated source asserts it."""
        dims = self.head_dim + self.head_dim_v
        matrices = self.block_kv * dims + self.stages * self.block_q * dims + self.block_q * self.block_kv
        vectors = 2 * self.stages * self.block_q
        plan, units = 14, 9
        return -(-4 * (matrices + vectors + plan + units) // 1024) * 1024

    @property
    def name(self) -> str:
        kind = f"{kind_name(self.exact)}_d{self.head_dim}x{self.head_dim_v}"
        shape = f"q{self.block_q}_kv{self.block_kv}_s{self.stages}_x{self.ctas_per_sm}"
        extras = f"{'_softcap' * self.softcap}{'_v4' * self.vector_sums}{'' if self.makes_dkv else '_dq_only'}"
        return f"fa2_backward_{kind}_{shape}{extras}"

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.warps} warps"
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        return f"{products_text(self.exact)}, {tile}, {stages}, {self.smem_bytes / 1024:.0f} KiB shared"

    def fits(self, target: Target) -> bool:
        return sm80_shared.fits(self.smem_bytes, self.ctas_per_sm, target)


def configs(problem: Problem, target: Target) -> list[BackwardConfig]:
    """Configs of the table that fit the target, best first."""
    exact, capped = problem.precision == "exact", problem.softcap > 0
    rows = _table().get((rules.class_of(problem), capped), [])
    found = (_config(row, exact, capped, target) for row in rows)
    return [config for config in found if config.fits(target)]


def all_units() -> list[Unit]:
    """Every kernel a backward may launch on the named targets, one GPU of each size of shared memory."""
    units: list[Unit] = []
    for target in COMPILED:
        units += [preprocess_unit(lanes, target.arch) for lanes in sorted({*_LANES.values()})]
        for ((_, capped), rows), exact in product(_table().items(), (True, False)):
            found = (_config(row, exact, capped, target) for row in rows)
            fitting = [config for config in found if config.fits(target)]
            units += [main_unit(config, target.arch) for config in fitting]
            if exact and not capped:
                units += [main_unit(dq_only(config), target.arch) for config in fitting[:1]]
    return list({unit.label: unit for unit in units}.values())


@functools.cache
def main_unit(config: BackwardConfig, arch: str) -> Unit:
    source = f"""#include "sm80/float32_backward.cuh"
{layout_asserts(_MainParams, "tilewise::sm80::Float32BackwardParams")}
constexpr tilewise::sm80::Float32BackwardConfig config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm80::Float32BackwardSmem<config>) == {config.smem_bytes}, "BackwardConfig.smem_bytes");
static_assert(config.threads() == {config.threads} && config.block_kv() == {config.block_kv});
extern "C" __global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
{config.name}(const __grid_constant__ tilewise::sm80::Float32BackwardParams params) {{
  tilewise::sm80::float32_backward<config, {scores_type(softcap=config.softcap, precise=True)}>(params);
}}
"""
    return Unit(config.name, source, arch, strict=is_gated(arch), smem_bytes=config.smem_bytes)


@functools.cache
def preprocess_unit(lanes: int, arch: str) -> Unit:
    name = f"preprocess_float32_{lanes}_of_32"
    edges = "tilewise::sm80::float32_edge_"
    source = f"""#include "sm80/float32_backward.cuh"
{layout_asserts(_PreprocessParams, "tilewise::sm80::Float32PreprocessParams")}
static_assert({edges}threads == {EDGE_THREADS} && {edges}rows == {EDGE_ROWS});
extern "C" __global__ void __launch_bounds__({EDGE_THREADS})
{name}(const __grid_constant__ tilewise::sm80::Float32PreprocessParams params) {{
  tilewise::sm80::float32_preprocess<{lanes}>(params);
}}
"""
    return Unit(name, source, arch)


def bind(problem: Problem, config: BackwardConfig | None = None) -> BoundBackward:
    return bound_backward(problem, functools.partial(_Launch, problem, config))


_MainParams = params_struct(
    "Float32BackwardParams",
    q=Strided,
    k=Strided,
    v=Strided,
    dout=Strided,
    dq=Strided,
    dk=Strided,
    dv=Strided,
    lse=ctypes.c_void_p,
    row_terms=ctypes.c_void_p,
    turns=ctypes.c_void_p,
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
    softmax_scale=ctypes.c_float,
    softcap_in=ctypes.c_float,
)

_PreprocessParams = params_struct(
    "Float32PreprocessParams",
    out=Strided,
    dout=Strided,
    dq=Strided,
    lse=ctypes.c_void_p,
    dlse=ctypes.c_void_p,
    padded_lse=ctypes.c_void_p,
    row_terms=ctypes.c_void_p,
    turns=ctypes.c_void_p,
    piece_turns=ctypes.c_void_p,
    piece_turn_count=ctypes.c_int,
    heads=ctypes.c_int,
    seq_q=ctypes.c_int,
    rows=ctypes.c_int,
    head_dim=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    block_q=ctypes.c_int,
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
        self._rows = problem.batch * problem.heads_q * _padded_rows(problem, config)
        self._turns = self._rows // config.block_q if wants[0] and problem.deterministic else 0
        cut = divided.cut and config.makes_dkv
        self._piece_turns = 2 * problem.batch * problem.heads_kv * _kv_tiles(problem, config) if cut else 0
        lanes = max(_LANES[config.head_dim], _LANES[config.head_dim_v])
        gradients = {name: torch.empty_like(of, device="meta") for name, of in (("dq", q), ("dk", k), ("dv", v))}
        self._pre = Stage(
            preprocess_unit(lanes, target.arch),
            _PreprocessParams,
            _preprocess_params(problem, config) | _strides({"out": out, "dout": dout, "dq": gradients["dq"]}),
            self._rows // EDGE_ROWS,
            EDGE_THREADS,
            self._device,
        )
        self._main = Stage(
            main_unit(config, target.arch),
            _MainParams,
            _main_params(problem, config, divided) | _strides({"q": q, "k": k, "v": v, "dout": dout} | gradients),
            divided.grid,
            config.threads,
            self._device,
        )

    def run(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> Grads:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        dq, dk, dv = (torch.empty_like(of) if want else None for of, want in zip((q, k, v), self._wants, strict=True))
        scratch = q.new_empty(2 * self._rows + self._piece_turns + self._turns)
        padded_lse = scratch.data_ptr()
        row_terms = padded_lse + 4 * self._rows
        first_turn = row_terms + 4 * self._rows
        piece_turns = first_turn if self._piece_turns else None
        turns = first_turn + 4 * self._piece_turns if self._turns else None

        arguments = self._pre.arguments()
        params = arguments.params
        params.out.data, params.dout.data, params.dq.data = out.data_ptr(), dout.data_ptr(), _address(dq)
        params.lse, params.dlse = lse.data_ptr(), _address(dlse)
        params.padded_lse, params.row_terms = padded_lse, row_terms
        params.turns, params.piece_turns = turns, piece_turns
        self._pre.launch(stream, arguments)

        arguments = self._main.arguments()
        params = arguments.params
        params.q.data, params.k.data, params.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        params.dout.data, params.dq.data = dout.data_ptr(), _address(dq)
        params.dk.data, params.dv.data = _address(dk), _address(dv)
        params.lse, params.row_terms = padded_lse, row_terms
        params.turns, params.piece_turns = turns, piece_turns
        self._main.launch(stream, arguments)
        return dq, dk, dv


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _strides(tensors: dict[str, Tensor]) -> dict[str, Strided]:
    return {name: Strided.of(tensor) for name, tensor in tensors.items()}


def _main_params(problem: Problem, config: BackwardConfig, divided: division.Division) -> dict[str, Any]:
    return {
        **shape_params(problem),
        "heads_kv": problem.heads_kv,
        "head_dim": 2 * problem.head_dim,
        "head_dim_v": 2 * problem.head_dim_v,
        "q_tiles": _padded_rows(problem, config) // config.block_q,
        "kv_tiles": _kv_tiles(problem, config),
        "pieces": divided.pieces,
        "piece_steps": divided.piece_steps,
        "sections": divided.sections,
        "rows_descend": int(problem.deterministic and isinstance(problem.mask, Causal)),
        "in_order": int(problem.deterministic),
        "scale": problem.scale,
        "softmax_scale": problem.softcap or problem.scale,
        "softcap_in": problem.scale / problem.softcap if problem.softcap else 0.0,
    }


def _preprocess_params(problem: Problem, config: BackwardConfig) -> dict[str, Any]:
    return {
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": _padded_rows(problem, config),
        "head_dim": 2 * problem.head_dim,
        "head_dim_v": 2 * problem.head_dim_v,
        "block_q": config.block_q,
        "piece_turn_count": problem.batch * problem.heads_kv * _kv_tiles(problem, config),
    }


def _padded_rows(problem: Problem, config: BackwardConfig) -> int:
    """Whole tiles of the main kernel, and whole blocks of the one before it."""
    whole = math.lcm(config.block_q, EDGE_ROWS)
    return -(-problem.seq_q // whole) * whole


def _kv_tiles(problem: Problem, config: BackwardConfig) -> int:
    return -(-problem.seq_kv // config.block_kv)


# Estimates, until somebody measures them: steps of float32 are long beside the loads and stores of a CTA.
COSTS = division.Costs(start=1.0, merge=1.0)


def divide(problem: Problem, config: BackwardConfig, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    costs = COSTS if config.makes_dkv else COSTS._replace(merge=0.0)
    steps = division.tile_steps(problem, config.block_q, config.block_kv)
    slots = target.sms * config.ctas_per_sm
    return division.divide(steps, problem.batch * problem.heads_kv, slots, costs, key_sections(problem))


def dq_only(config: BackwardConfig) -> BackwardConfig:
    return replace(config, makes_dkv=False)


def _config(row: dict[str, Any], exact: bool, softcap: bool, target: Target) -> BackwardConfig:
    return BackwardConfig(
        exact=exact,
        head_dim=row["head_dims"][0],
        head_dim_v=row["head_dims"][1],
        block_q=row["block_q"],
        warps=row["warps"],
        stages=row["stages"],
        softcap=softcap,
        vector_sums=target.capability >= VECTOR_SUMS_FROM,
        makes_dkv=True,
        ctas_per_sm=row["ctas_per_sm"],
    )


@functools.cache
def _table() -> dict[tuple[tuple[int, int], bool], list[rules.Row]]:
    """(head-dim class, softcap) -> rows, best first; a row is for both unless it says for which."""
    return rules.rows_by("sm80", "float32_backward", keys_of_row)
