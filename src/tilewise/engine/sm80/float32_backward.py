"""The float32 backward of every NVIDIA GPU from sm_80 on: kernels/sm80/float32_backward.cuh.

Two launches: `float32_preprocess` makes the row terms and zeroes dQ, the main kernel makes dK and dV and adds up dQ in
place. Tiles of keys that are few or long are cut into pieces (division.py), which add up dK and dV in place. Extra
memory is two floats per query row, and the turns of tiles and pieces.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from ...errors import Reason
from .. import division, rules
from ..edges import edge_launches
from ..params import FLOAT, INT, POINTER, Strided, struct, tiles
from ..policy import Policy, params_for, term_params, unit_of
from ..program import Address, Launch, Layout, Program, View
from ..source import kernel_unit
from . import shared
from .backward import backward_fields, key_sections, keys_of_row
from .float32_forward import kind_name, products_text

if TYPE_CHECKING:
    from ...backends import Wants
    from ...jit import Unit
    from ...problem import Problem
    from ...scores import Term
    from ...target import Target

HEAD_DIM_LIMIT = 128  # dK and dV of 16 keys per warp are held in registers
EDGE_ROWS, EDGE_THREADS = 32, 256
_LANES = {64: 16, 96: 32, 128: 32}  # of float32_preprocess, 4 columns each


@dataclass(frozen=True, slots=True)
class Config:
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
        return shared.fits(self.smem_bytes, self.ctas_per_sm, target)


def why_not(problem: Problem, target: Target) -> list[Reason]:
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= HEAD_DIM_LIMIT:
        return []
    what = f"head_dim {widest} is over {HEAD_DIM_LIMIT}, the limit of the float32 backward, which keeps dk and dv in "
    return [Reason(what + "registers", "call it under torch.no_grad(), or use backend='auto'")]


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first."""
    exact, capped = problem.precision == "exact", bool(problem.scores)
    rows = _table().get((rules.class_of(problem), capped), [])
    found = (_config(row, exact, capped, target) for row in rows)
    return [config for config in found if config.fits(target)]


def units() -> list[Unit]:
    """Every kernel of this family for the named targets, one GPU of each size of shared memory."""
    found: list[Unit] = []
    for target in shared.COMPILED:
        found += [preprocess_unit(lanes, target.arch) for lanes in sorted({*_LANES.values()})]
        for ((_, capped), rows), exact in product(_table().items(), (True, False)):
            fitting = [config for row in rows if (config := _config(row, exact, capped, target)).fits(target)]
            found += [unit(config, target.arch) for config in fitting]
            if exact and not capped:
                found += [unit(dq_only(config), target.arch) for config in fitting[:1]]
    return list({one.label: one for one in found}.values())


@functools.cache
def unit(config: Config, arch: str, terms: tuple[Term, ...] | None = None) -> Unit:
    """The kernel for these terms of the scores, by default those that the config is made for."""
    policy = Policy.of(terms, config, True)
    return kernel_unit(
        config.name + policy.suffix,
        "sm80/float32_backward.cuh",
        "float32_backward<config, Policy>",
        _MainParams,
        "tilewise::sm80::Float32BackwardParams",
        arch,
        config=config,
        policy=policy,
        smem="Float32BackwardSmem<config>",
        smem_bytes=config.smem_bytes,
        bounds="config.threads(), config.ctas_per_sm",
        checks=(f"config.threads() == {config.threads} && config.block_kv() == {config.block_kv}",),
        strict=shared.is_gated(arch),
    )


@functools.cache
def preprocess_unit(lanes: int, arch: str) -> Unit:
    return kernel_unit(
        f"preprocess_float32_{lanes}_of_32",
        "sm80/float32_backward.cuh",
        f"float32_preprocess<{lanes}>",
        _PreprocessParams,
        "tilewise::sm80::Float32PreprocessParams",
        arch,
        bounds=str(EDGE_THREADS),
        checks=(f"float32_edge_threads == {EDGE_THREADS} && float32_edge_rows == {EDGE_ROWS}",),
    )


_MainParams = struct(
    "Float32BackwardParams",
    (Strided, "q k v dout dq dk dv"),
    (POINTER, "lse row_terms turns piece_turns"),
    (INT, "batch heads_kv heads_per_kv seq_q seq_k head_dim head_dim_v band_first_shift band_end_shift"),
    (INT, "q_tiles kv_tiles pieces piece_steps sections rows_descend in_order"),
    (FLOAT, "scale softmax_scale softcap_in"),
)

_PreprocessParams = struct(
    "Float32PreprocessParams",
    (Strided, "out dout dq"),
    (POINTER, "lse dlse padded_lse row_terms turns piece_turns"),
    (INT, "piece_turn_count heads seq_q rows head_dim head_dim_v block_q"),
)


def program(problem: Problem, target: Target, config: Config, wants: Wants = (True, True, True)) -> Program:
    config = config if wants[1] or wants[2] else dq_only(config)
    divided = divide(problem, config, target)
    pairs, kv_pairs = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    # Whole tiles of the main kernel, and whole blocks of the one before it.
    whole = math.lcm(config.block_q, EDGE_ROWS)
    rows = tiles(problem.seq_q, whole) * whole
    kv_tiles = tiles(problem.seq_kv, config.block_kv)
    scratch = Layout.of(
        lse=4 * pairs * rows,
        row_terms=4 * pairs * rows,
        piece_turns=8 * kv_pairs * kv_tiles if divided.cut and config.makes_dkv else 0,
        turns=4 * pairs * rows // config.block_q if wants[0] and problem.deterministic else 0,
    )
    terms = {name: scratch.address(name) for name in ("row_terms", "turns", "piece_turns")}
    grads = {name: View(name) for name, want in zip(("dq", "dk", "dv"), wants, strict=True) if want}
    # Copies count 16-bit numbers: a float32 is two.
    dims = {"head_dim": 2 * problem.head_dim, "head_dim_v": 2 * problem.head_dim_v}
    preprocess = {
        "out": View("out"),
        "dout": View("dout"),
        "dq": grads.get("dq"),
        "lse": Address("lse"),
        "dlse": Address("dlse", optional=True),
        "padded_lse": scratch.address("lse"),
        **terms,
        "piece_turn_count": kv_pairs * kv_tiles,
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": rows,
        **dims,
        "block_q": config.block_q,
    }
    main = {
        **{name: View(name) for name in ("q", "k", "v", "dout")},
        **grads,
        "lse": scratch.address("lse"),
        **terms,
        **backward_fields(problem, divided, rows // config.block_q, kv_tiles),
        **dims,
        "scale": problem.scale,
        "softmax_scale": unit_of(problem),
        **term_params(problem, precise=True, backward=True),
    }
    pre = preprocess_unit(max(_LANES[config.head_dim], _LANES[config.head_dim_v]), target.arch)
    kernel = unit(config, target.arch, problem.scores)
    launches = (
        Launch(pre, _PreprocessParams, preprocess, pairs * rows // EDGE_ROWS, EDGE_THREADS),
        Launch(kernel, params_for(problem, _MainParams), main, divided.grid, config.threads),
        *edge_launches(problem, target.arch, scratch.address("row_terms"), rows, -1.0),
    )
    says = f"{config}; {divided}, {scratch.bytes / 2**20:.1f} MiB of scratch"
    return Program(launches, scratch, says=(says,))


# Estimates, until somebody measures them: steps of float32 are long beside the loads and stores of a CTA.
COSTS = division.Costs(start=1.0, merge=1.0)


def divide(problem: Problem, config: Config, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    costs = COSTS if config.makes_dkv else COSTS._replace(merge=0.0)
    steps = division.tile_steps(problem, config.block_q, config.block_kv)
    slots = target.sms * config.ctas_per_sm
    return division.divide(steps, problem.batch * problem.heads_kv, slots, costs, key_sections(problem))


def dq_only(config: Config) -> Config:
    return replace(config, makes_dkv=False)


def _config(row: dict[str, Any], exact: bool, softcap: bool, target: Target) -> Config:
    return Config(
        exact=exact,
        head_dim=row["head_dims"][0],
        head_dim_v=row["head_dims"][1],
        block_q=row["block_q"],
        warps=row["warps"],
        stages=row["stages"],
        softcap=softcap,
        vector_sums=target.capability >= shared.VECTOR_SUMS_FROM,
        makes_dkv=True,
        ctas_per_sm=row["ctas_per_sm"],
    )


@functools.cache
def _table() -> dict[tuple[tuple[int, int], bool], list[rules.Row]]:
    """(head-dim class, softcap) -> rows, best first; a row is for both unless it says for which."""
    return rules.rows_by("sm80", "float32_backward", keys_of_row)
