"""The float32 backward of Hopper: operands in three parts of bf16, kernels/sm90/float32_backward.cuh.

Three launches: a split of q, k, v and dout, a kernel that makes the row terms, and the one that makes dK and dV and
adds to dQ, which was zeroed before. Tiles of keys that are few or long are cut into pieces (division.py), which add up
dK and dV in place. No range is refused.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from ...masks import Causal
from ...operands import ALL, INPUTS
from .. import division, rules
from ..edges import edge_launches
from ..extents import BATCHED, division_fields, row_fields
from ..params import kv_head_sections, matrix_bytes, mirror, tiles
from ..policy import params_for, term_params, unit_of
from ..program import Address, Launch, Layout, Program, strides
from ..source import Kernel, kernel_unit
from .float32_forward import FACT_BYTES, operands, split_launch
from .shared import WarpgroupConfig

if TYPE_CHECKING:
    from ...errors import Reason
    from ...jit import Unit
    from ...operands import Wants
    from ...problem import Problem
    from ...target import Target

ARCH = "sm_90a"
HEAD_DIM_LIMIT = 128
BLOCK = 64  # rows of a query tile and of a KV tile
PARTS = 3
_ROW_THREADS = 256
_ROW_SMEM = 16


@dataclass(frozen=True, slots=True)
class Config(WarpgroupConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/float32_backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::float32::GradConfig"
    threads: ClassVar[int] = 512
    ctas_per_sm: ClassVar[int] = 1
    block_q: ClassVar[int] = BLOCK
    block_kv: ClassVar[int] = BLOCK

    head_dim: int
    head_dim_v: int
    stages: int
    rooms: int
    has_terms: bool

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
        return f"backward_float32_bf16x6_{self.heads_name}_q{BLOCK}_kv{BLOCK}_s{self.stages}r{self.rooms}"

    def __str__(self) -> str:
        return f"6 products of bf16 parts, {WarpgroupConfig.__str__(self)}"


# (q and k, v and out) -> stages of the rings of Q and dO, rooms for P and dS: as many as fit shared memory.
_SHAPES = {(64, 64): (2, 2), (96, 96): (1, 1), (128, 128): (1, 1)}


def takes(problem: Problem) -> bool:
    return rules.is_float32(problem)


def why_not(problem: Problem, target: Target) -> list[Reason]:
    widest = max(problem.head_dim, problem.head_dim_v)
    learned = [one.name for term in problem.scores for one in term.learned_tensors if term.transforms]
    return rules.reasons(
        (
            widest > HEAD_DIM_LIMIT,
            f"head_dim {widest}: the float32 backward, whose tiles have three parts, takes heads to {HEAD_DIM_LIMIT}",
            "call it under torch.no_grad(), or use backend='auto'",
        ),
        (
            bool(learned) and problem.softcap > 0,
            f"{', '.join(learned)} and a softcap: the warpgroup that makes gradients of operands has no slopes",
            "use backend='sm80', or detach the operand",
        ),
    )


def configs(problem: Problem, target: Target) -> list[Config]:
    """Legal configs, best first: each class of head dims has one."""
    classes = rules.class_of(problem)
    return [Config(*classes, *_SHAPES[classes], bool(problem.scores))]


@functools.cache
def row_terms_unit() -> Unit:
    return kernel_unit(
        "preprocess_float32",
        "sm90/float32_backward_rows.cuh",
        "row_terms<Extents>",
        _RowParams,
        ARCH,
        namespace="sm90::float32",
        extents=BATCHED,
        smem_bytes=_ROW_SMEM,
        threads=_ROW_THREADS,
        checks=(f"row_threads == {_ROW_THREADS}",),
    )


_RowParams = mirror("sm90/float32_backward_config.cuh", "RowParams")
_MainParams = mirror("sm90/float32_backward_config.cuh", "GradParams")

unit = Kernel(
    "sm90/float32_backward.cuh", "backward", _MainParams, "GradSmem", precise=True, namespace="sm90::float32"
).unit


def program(problem: Problem, target: Target, config: Config, wants: Wants = ALL) -> Program:
    makes_dkv = bool(wants & {"k", "v"})
    divided = divide(problem, target, makes_dkv=makes_dkv)
    split = operands(problem, BLOCK, BLOCK)
    q_tiles, kv_tiles = tiles(problem.seq_q, BLOCK), tiles(problem.seq_kv, BLOCK)
    query_tiles, key_tiles = split["q"].tiles, split["k"].tiles
    scratch = Layout.of(
        dq_tickets=4 * query_tiles if problem.deterministic and "q" in wants else 0,
        piece_tickets=16 * key_tiles if divided.cut and makes_dkv else 0,
        work_tickets=4 if problem.deterministic else 0,
        term_exponents=4 * query_tiles,
        lse=4 * BLOCK * query_tiles,
        row_terms=4 * BLOCK * query_tiles,
        **{f"{operand.name}_facts": FACT_BYTES * operand.tiles for operand in split.values()},
        **{f"{operand.name}_parts": operand.parts_bytes(PARTS) for operand in split.values()},
    )
    shared = scratch.addresses("row_terms", "term_exponents", "dq_tickets", "piece_tickets", "work_tickets")
    rows = {
        "out": Address("out"),
        "dout": Address("dout"),
        **strides("out", "dout"),
        **row_fields(problem),
        "padded_lse": scratch.address("lse"),
        **shared,
        "piece_ticket_count": 2 * key_tiles,
        "q_tiles": q_tiles,
    }
    wanted = [f"d{name}" for name in INPUTS if name in wants]
    main = {
        **{f"{operand.name}_map": operand.map(PARTS) for operand in split.values()},
        **{f"{operand.name}_facts": scratch.address(f"{operand.name}_facts") for operand in split.values()},
        "lse": scratch.address("lse"),
        **shared,
        **{name: Address(name) for name in wanted},
        **strides(*wanted),
        **division_fields(problem, divided, q_tiles, kv_tiles),
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "in_order": int(problem.deterministic),
        "score_scale": unit_of(problem),
        **term_params(problem, precise=True, backward=True),
        "scale": problem.scale,
    }
    kernel = unit(config, ARCH, problem.scores)
    launches = (
        split_launch(problem, target, list(split.values()), PARTS, "{}_facts"),
        Launch(row_terms_unit(), _RowParams, rows, query_tiles, _ROW_THREADS, overlap=True),
        Launch(kernel, params_for(problem, _MainParams), main, divided.grid, config.threads, overlap=True),
        *edge_launches(problem, ARCH, scratch.address("row_terms"), q_tiles * BLOCK, -1.0),
    )
    says = f"{config}; {divided}; before it two kernels that split and sum, {scratch.bytes / 2**20:.1f} MiB of scratch"
    return Program(launches, scratch, frozenset({"dq"} if "q" in wants else ()), (says,))


# Estimates, not measured. A step is 30 products of 64 x 64; a CTA begins with a load of K and V in
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


# What a search varies of the configs that ship.
SEARCHED = {"stages": (1, 2, 3), "rooms": (1, 2)}
