"""The 16-bit backward of every NVIDIA GPU from sm_80 on: kernels/sm80/backward.cuh.

Three launches: `preprocess` makes the row terms and zeroes the sums of dQ, the main kernel makes dK and dV and adds up
dQ in float32, `postprocess` rounds dQ. Tiles of keys that are few or long are cut into pieces (division.py), which add
up dK and dV in float32. Extra memory is O(N): these sums and two floats per query row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...element import Element
from ...masks import Causal, Packed
from ...operands import ALL, INPUTS
from .. import division, packed
from ..edges import edge_launches
from ..extents import BATCHED, Extents, division_fields, row_fields
from ..params import LOG2_E, matrix_bytes, mirror, tiles
from ..policy import params_for, term_params, unit_of
from ..program import Launch, Layout, Program, View
from ..registers import fits_plain_tiles
from ..source import Kernel, kernel_unit
from ..tile_map import map_for
from . import shared

if TYPE_CHECKING:
    from ...jit import Unit
    from ...operands import Wants
    from ...problem import Problem
    from ...target import Target

EDGE_ROWS, EDGE_THREADS = 32, 256
_LANES = {64: 8, 96: 16, 128: 16, 192: 32, 256: 32}  # of preprocess, 8 columns each


MASK_LINES = "queries"


@dataclass(frozen=True, slots=True)
class Config(shared.TileConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::BackwardConfig"

    element: Element
    head_dim: int
    head_dim_v: int
    block_q: int
    block_kv: int
    warps: int
    score_rows: int
    key_rows: int
    query_rows: int
    stages: int
    has_terms: bool
    vector_sums: bool
    makes_dkv: bool
    ctas_per_sm: int

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
        shape = f"q{self.block_q}_kv{self.block_kv}"
        grids = f"w{self.warps}_{self.score_rows}{self.key_rows}{self.query_rows}"
        extras = f"{'_v4' * self.vector_sums}{'' if self.makes_dkv else '_dq_only'}"
        return f"fa2_backward_{self.heads_name}_{shape}_{grids}_s{self.stages}_x{self.ctas_per_sm}{extras}"


# What a search varies of the configs that ship.
SEARCHED = {
    "block_q": (32, 64, 128),
    "block_kv": (64, 128),
    "warps": (4, 8),
    **dict.fromkeys(("score_rows", "key_rows", "query_rows"), (1, 2, 4, 8)),
    "stages": (1, 2),
    "ctas_per_sm": (1, 2, 3),
}


def configs(problem: Problem, target: Target) -> list[Config]:
    """Legal configs that fit the target, best first."""
    has_terms = not fits_plain_tiles(problem, "sm80")
    return fitting(Config, "backward", problem, target, has_terms=has_terms, element=Element.of(problem.dtype))


def fitting(made: Any, section: str, problem: Problem, target: Target, **facts: Any) -> list[Any]:
    """`configs` for any backward of this folder."""
    facts |= {"vector_sums": target.capability >= shared.VECTOR_SUMS_FROM, "makes_dkv": True}
    return [config for _, config in shared.fitting(made, section, problem, target, **facts)]


@functools.cache
def preprocess_unit(element: Element, lanes: int, arch: str, extents: Extents = BATCHED) -> Unit:
    return kernel_unit(
        f"preprocess_{element.name}_{lanes}_of_32{extents.suffix}",
        "sm80/backward_edges.cuh",
        f"preprocess<{element.cpp_name}, {lanes}, Extents>",
        _PreprocessParams,
        arch,
        extents=extents,
        threads=EDGE_THREADS,
        checks=(f"edge_threads == {EDGE_THREADS} && edge_rows == {EDGE_ROWS}",),
    )


@functools.cache
def postprocess_unit(config: Config, arch: str, extents: Extents = BATCHED) -> Unit:
    """Depends on how dQ is divided over the warps, and on nothing else of the config."""
    plain = replace(config, has_terms=False, makes_dkv=True, ctas_per_sm=1)
    return kernel_unit(
        plain.name.replace("fa2_backward", "postprocess") + extents.suffix,
        "sm80/backward_edges.cuh",
        "postprocess<config, Extents>",
        _PostprocessParams,
        arch,
        config=plain,
        extents=extents,
        threads=EDGE_THREADS,
    )


_MainParams = mirror("sm80/backward_config.cuh", "BackwardParams")
_PreprocessParams = mirror("sm80/backward_edges.cuh", "PreprocessParams")
_PostprocessParams = mirror("sm80/backward_edges.cuh", "PostprocessParams")
unit = Kernel("sm80/backward.cuh", "backward", _MainParams, "BackwardSmem").unit


def program(problem: Problem, target: Target, config: Config, wants: Wants = ALL) -> Program:
    wants_dq, wants_dk, wants_dv = (name in wants for name in INPUTS)
    config = config if wants_dk or wants_dv else dq_only(config)
    table = None
    if isinstance(problem.mask, Packed):
        slots = target.sms * config.ctas_per_sm
        table = packed.table(problem, target, config.block_q, config.block_kv, by_keys=True, slots=slots)
        divided = packed.undivided(problem, table, slots)
    else:
        divided = divide(problem, config, target)
    in_turns = wants_dq and problem.deterministic
    tile_map = map_for(problem, config.block_q, config.block_kv, target.arch, by_keys=True, in_turns=in_turns)
    cut = divided.cut and config.makes_dkv
    pairs, kv_pairs = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    q_tiles, kv_tiles = tiles(problem.seq_q, config.block_q), tiles(problem.seq_kv, config.block_kv)
    if table is not None:  # its tiles are those of all batches
        pairs, kv_pairs = problem.heads_q, problem.heads_kv
        q_tiles, kv_tiles = table.q_room, table.kv_room
    rows = q_tiles * config.block_q
    scratch = Layout.of(
        lse_log2=4 * pairs * rows,
        row_terms=4 * pairs * rows,
        dq_tickets=4 * pairs * q_tiles if in_turns else 0,
        piece_tickets=8 * kv_pairs * kv_tiles if cut else 0,
        work_tickets=4 if problem.deterministic else 0,
        dq_sums=4 * pairs * rows * config.head_dim if wants_dq else 0,
        dkv_sums=4 * kv_pairs * kv_tiles * config.block_kv * (config.head_dim + config.head_dim_v) if cut else 0,
    )
    terms = scratch.addresses("lse_log2", "row_terms", "dq_sums", "dq_tickets", "piece_tickets", "work_tickets")
    preprocess = {
        "out": View("out"),
        "dout": View("dout"),
        **row_fields(problem),
        **terms,
        "piece_ticket_count": kv_pairs * kv_tiles,
        "rows": rows,
        "row_floats": config.head_dim,
        "block_q": config.block_q,
    }
    scale_log2 = unit_of(problem) * LOG2_E
    main = {
        **{name: View(name) for name in ("q", "k", "v", "dout")},
        "dk": View("dk") if wants_dk else None,
        "dv": View("dv") if wants_dv else None,
        **terms,
        "dkv_sums": scratch.address("dkv_sums"),
        **backward_fields(packed.as_batch(problem), divided, q_tiles, kv_tiles),
        **term_params(problem, precise=False, backward=True),
        **tile_map.fields,
        "scale_log2": scale_log2,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "scale": problem.scale,
        "inverse_scale_log2": 1.0 / scale_log2,
    }
    postprocess = {
        "dq_sums": scratch.address("dq_sums"),
        "dq": View("dq"),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "q_tiles": q_tiles,
        "head_dim": problem.head_dim,
        "scale": problem.scale,
    }
    extents = BATCHED if table is None else packed.PACKED
    arch, main_extents = target.arch, extents if table is not None else tile_map.extents
    kernel = unit(config, arch, problem.scores, main_extents)
    params = tile_map.extents.params(params_for(problem, _MainParams))
    pre = preprocess_unit(config.element, _LANES[config.head_dim_v], arch, extents)
    launches = [
        Launch(pre, _PreprocessParams, preprocess, pairs * rows // EDGE_ROWS, EDGE_THREADS),
        Launch(kernel, params, main, divided.grid, config.threads),
    ]
    if wants_dq:
        post = postprocess_unit(config, arch, extents)
        launches.append(Launch(post, _PostprocessParams, postprocess, pairs * q_tiles, EDGE_THREADS))
    launches += edge_launches(problem, arch, scratch.address("row_terms"), rows, -1.0)
    says = f"{config}; {divided}, {scratch.bytes / 2**20:.1f} MiB of scratch"
    if table is not None:
        launches = [table.told(launch) for launch in launches]
        said = (says, packed.summary(problem, table))
        return Program(tuple(launches), scratch, packed.unwritten(problem), said, prepared=(table.prepared,))
    return Program(tuple(launches), scratch, summary=(says, *tile_map.summary), prepared=tile_map.prepared)


def backward_fields(problem: Problem, divided: division.Division, q_tiles: int, kv_tiles: int) -> dict[str, object]:
    """The fields that both backwards of this folder share."""
    return {
        **division_fields(problem, divided, q_tiles, kv_tiles),
        "rows_descend": int(problem.deterministic and isinstance(problem.mask, Causal)),
        "in_order": int(problem.deterministic),
    }


# Estimates, not measured. A step is five products of block_q x block_kv; a CTA begins with a load of K
# and V and ends with a store of dK and dV, and a piece passes on both in float32.
COSTS = division.Costs(start=1.5, merge=1.5)


def divide(problem: Problem, config: Config, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    return divided_by(problem, config, target, COSTS)


def divided_by(problem: Problem, config: Any, target: Target, costs: division.Costs) -> division.Division:
    """The division of the work, for any backward of this folder, by its costs."""
    costs = costs if config.makes_dkv else costs._replace(merge=0.0)
    steps = division.tile_steps(problem, config.block_q, config.block_kv)
    slots = target.sms * config.ctas_per_sm
    return division.divide(steps, problem.batch * problem.heads_kv, slots, costs, key_sections(problem))


def key_sections(problem: Problem) -> int | None:
    """Into how many runs the KV heads are divided that are worked on one after another; None: as division.py says.

    Equal tiles: one head per run, since its tiles read the same queries and add to the same dQ.
    """
    return None if isinstance(problem.mask, Causal) else problem.batch * problem.heads_kv


def dq_only(config: Any) -> Any:
    return replace(config, makes_dkv=False)
