"""The float32 backward of every NVIDIA GPU from sm_80 on: kernels/sm80/float32_backward.cuh.

Two launches: `float32_preprocess` makes the row terms and zeroes dQ, the main kernel makes dK and dV and adds up dQ in
place. Tiles of keys that are few or long are cut into pieces (division.py), which add up dK and dV in place. Extra
memory is two floats per query row, and the tickets of tiles and pieces.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...errors import Reason
from ...operands import ALL, INPUTS
from .. import division, rules
from ..edges import edge_launches
from ..extents import BATCHED, row_fields
from ..params import mirror, tiles
from ..policy import params_for, term_params, unit_of
from ..program import Launch, Layout, Program, View
from ..source import Kernel, kernel_unit
from . import shared
from .backward import backward_fields, divided_by, dq_only, fitting
from .float32_forward import kind_name, products_text

if TYPE_CHECKING:
    from ...jit import Unit
    from ...operands import Wants
    from ...problem import Problem
    from ...target import Target

HEAD_DIM_LIMIT = 128  # dK and dV of 16 keys per warp are held in registers
EDGE_ROWS, EDGE_THREADS = 32, 256
_LANES = {64: 16, 96: 32, 128: 32}  # of float32_preprocess, 4 columns each


@dataclass(frozen=True, slots=True)
class Config(shared.TileConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/float32_backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::Float32BackwardConfig"

    exact: bool
    head_dim: int
    head_dim_v: int
    block_q: int
    warps: int
    stages: int
    has_terms: bool
    vector_sums: bool
    makes_dkv: bool
    ctas_per_sm: int

    @property
    def block_kv(self) -> int:
        return 16 * self.warps

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
        kind = f"{kind_name(self.exact)}_{self.heads_name}"
        shape = f"q{self.block_q}_kv{self.block_kv}_s{self.stages}_x{self.ctas_per_sm}"
        extras = f"{'_v4' * self.vector_sums}{'' if self.makes_dkv else '_dq_only'}"
        return f"fa2_backward_{kind}_{shape}{extras}"

    def __str__(self) -> str:
        return f"{products_text(self.exact)}, {shared.TileConfig.__str__(self)}"


# What a search varies of the configs that ship.
SEARCHED = {"block_q": (16, 32, 48, 64), "warps": (4, 8), "stages": (1, 2), "ctas_per_sm": (1, 2, 3)}


def takes(problem: Problem) -> bool:
    return rules.is_float32(problem)


def why_not(problem: Problem, target: Target) -> list[Reason]:
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest <= HEAD_DIM_LIMIT:
        return []
    what = f"head_dim {widest} is over {HEAD_DIM_LIMIT}, the limit of the float32 backward, which keeps dk and dv in "
    return [Reason(what + "registers", "call it under torch.no_grad(), or use backend='auto'")]


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first."""
    facts = {"has_terms": bool(problem.scores), "exact": problem.precision == "exact"}
    return fitting(Config, "float32_backward", problem, target, **facts)


@functools.cache
def preprocess_unit(lanes: int, arch: str) -> Unit:
    return kernel_unit(
        f"preprocess_float32_{lanes}_of_32",
        "sm80/float32_backward.cuh",
        f"float32_preprocess<{lanes}, Extents>",
        _PreprocessParams,
        arch,
        extents=BATCHED,
        threads=EDGE_THREADS,
        checks=(f"float32_edge_threads == {EDGE_THREADS} && float32_edge_rows == {EDGE_ROWS}",),
    )


_MainParams = mirror("sm80/float32_backward_config.cuh", "Float32BackwardParams")

unit = Kernel(
    "sm80/float32_backward.cuh",
    "float32_backward",
    _MainParams,
    "Float32BackwardSmem",
    ("threads", "block_kv"),
    precise=True,
).unit

_PreprocessParams = mirror("sm80/float32_backward.cuh", "Float32PreprocessParams")


def program(problem: Problem, target: Target, config: Config, wants: Wants = ALL) -> Program:
    config = config if wants & {"k", "v"} else dq_only(config)
    divided = divide(problem, config, target)
    pairs, kv_pairs = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    # Whole tiles of the main kernel, and whole blocks of the one before it.
    whole = math.lcm(config.block_q, EDGE_ROWS)
    rows = tiles(problem.seq_q, whole) * whole
    kv_tiles = tiles(problem.seq_kv, config.block_kv)
    scratch = Layout.of(
        lse=4 * pairs * rows,
        row_terms=4 * pairs * rows,
        piece_tickets=8 * kv_pairs * kv_tiles if divided.cut and config.makes_dkv else 0,
        work_tickets=4 if problem.deterministic else 0,
        dq_tickets=4 * pairs * rows // config.block_q if "q" in wants and problem.deterministic else 0,
    )
    terms = scratch.addresses("row_terms", "dq_tickets", "piece_tickets", "work_tickets")
    grads = {f"d{name}": View(f"d{name}") for name in INPUTS if name in wants}
    # Copies count 16-bit numbers: a float32 is two.
    dims = {"head_dim": 2 * problem.head_dim, "head_dim_v": 2 * problem.head_dim_v}
    preprocess = {
        "out": View("out"),
        "dout": View("dout"),
        "dq": grads.get("dq"),
        **row_fields(problem),
        "padded_lse": scratch.address("lse"),
        **terms,
        "piece_ticket_count": kv_pairs * kv_tiles,
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
    return Program(launches, scratch, summary=(says,))


# Estimates, not measured: steps of float32 are long compared with the loads and stores of a CTA.
COSTS = division.Costs(start=1.0, merge=1.0)


def divide(problem: Problem, config: Config, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    return divided_by(problem, config, target, COSTS)
