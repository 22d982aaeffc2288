"""The 16-bit backward of every NVIDIA GPU from sm_80 on: kernels/sm80/backward.cuh.

Three launches: `preprocess` makes the row terms and zeroes the sums of dQ, the main kernel makes dK and dV and adds up
dQ in float32, `postprocess` rounds dQ. Tiles of keys that are few or long are cut into pieces (division.py), which add
up dK and dV in float32. Extra memory is O(N): these sums and two floats per query row.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...masks import Causal
from .. import division, rules
from ..edges import edge_launches
from ..params import FLOAT, INT, LOG2_E, POINTER, Strided, matrix_bytes, shape_params, struct, tiles
from ..policy import Policy, params_for, term_params, unit_of
from ..program import Address, Launch, Layout, Program, View
from ..source import kernel_unit
from . import shared

if TYPE_CHECKING:
    from ...backends import Wants
    from ...errors import Reason
    from ...jit import Unit
    from ...problem import Problem
    from ...scores import Term
    from ...target import Target

EDGE_ROWS, EDGE_THREADS = 32, 256
_LANES = {64: 8, 96: 16, 128: 16, 192: 32, 256: 32}  # of preprocess, 8 columns each


@dataclass(frozen=True, slots=True)
class Config:
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
        return shared.fits(self.smem_bytes, self.ctas_per_sm, target)


def why_not(problem: Problem, target: Target) -> list[Reason]:
    return []


def configs(problem: Problem, target: Target) -> list[Config]:
    """Legal configs that fit the target, best first."""
    bf16, capped = problem.dtype is torch.bfloat16, not rules.fits_plain_tiles(problem, "sm80")
    found = (_config(row, bf16, capped, target) for row in _table()[rules.class_of(problem), capped])
    return [config for config in found if config.fits(target)]


def units() -> list[Unit]:
    """Every kernel of this family for the named targets, one GPU of each size of shared memory."""
    found: list[Unit] = []
    for target in shared.COMPILED:
        for bf16 in (True, False):
            found += [preprocess_unit(bf16, lanes, target.arch) for lanes in sorted({*_LANES.values()})]
            for (_, softcap), rows in _table().items():
                fitting = [config for row in rows if (config := _config(row, bf16, softcap, target)).fits(target)]
                found += [unit(config, target.arch) for config in fitting]
                found += [postprocess_unit(config, target.arch) for config in fitting if not softcap]
                if bf16 and not softcap:
                    found += [unit(dq_only(config), target.arch) for config in fitting[:1]]
    return list({one.label: one for one in found}.values())


@functools.cache
def unit(config: Config, arch: str, terms: tuple[Term, ...] | None = None) -> Unit:
    """The kernel for these terms of the scores, by default those that the config is made for."""
    policy = Policy.of(terms, config, False)
    return kernel_unit(
        config.name + policy.suffix,
        "sm80/backward.cuh",
        "backward<config, Policy>",
        _MainParams,
        "tilewise::sm80::BackwardParams",
        arch,
        config=config,
        policy=policy,
        smem="BackwardSmem<config>",
        smem_bytes=config.smem_bytes,
        bounds="config.threads(), config.ctas_per_sm",
        checks=(f"config.threads() == {config.threads}",),
        strict=shared.is_gated(arch),
    )


@functools.cache
def preprocess_unit(bf16: bool, lanes: int, arch: str) -> Unit:
    return kernel_unit(
        f"preprocess_{'bf16' if bf16 else 'fp16'}_{lanes}_of_32",
        "sm80/backward_edges.cuh",
        f"preprocess<{str(bf16).lower()}, {lanes}>",
        _PreprocessParams,
        "tilewise::sm80::PreprocessParams",
        arch,
        bounds=str(EDGE_THREADS),
        checks=(f"edge_threads == {EDGE_THREADS} && edge_rows == {EDGE_ROWS}",),
    )


def postprocess_unit(config: Config, arch: str) -> Unit:
    """Depends on how dQ is divided over the warps, and on nothing else of the config."""
    plain = replace(config, softcap=False, makes_dkv=True, ctas_per_sm=1)
    return kernel_unit(
        plain.name.replace("fa2_backward", "postprocess"),
        "sm80/backward_edges.cuh",
        "postprocess<config>",
        _PostprocessParams,
        "tilewise::sm80::PostprocessParams",
        arch,
        config=plain,
        bounds=str(EDGE_THREADS),
    )


_MainParams = struct(
    "BackwardParams",
    (Strided, "q k v dout dk dv"),
    (POINTER, "lse_log2 row_terms dq_sums turns dkv_sums piece_turns"),
    (INT, "batch heads_kv heads_per_kv seq_q seq_k head_dim head_dim_v band_first_shift band_end_shift"),
    (INT, "q_tiles kv_tiles pieces piece_steps sections rows_descend in_order"),
    (FLOAT, "scale scale_log2 inverse_scale_log2 softcap_in"),
)

_PreprocessParams = struct(
    "PreprocessParams",
    (Strided, "out dout"),
    (POINTER, "lse dlse lse_log2 row_terms dq_sums turns piece_turns"),
    (INT, "piece_turn_count heads seq_q rows head_dim_v row_floats block_q"),
)

_PostprocessParams = struct(
    "PostprocessParams",
    (POINTER, "dq_sums"),
    (Strided, "dq"),
    (INT, "heads seq_q q_tiles head_dim"),
    (FLOAT, "scale"),
)


def program(problem: Problem, target: Target, config: Config, wants: Wants = (True, True, True)) -> Program:
    wants_dq, wants_dk, wants_dv = wants
    config = config if wants_dk or wants_dv else dq_only(config)
    divided = divide(problem, config, target)
    cut = divided.cut and config.makes_dkv
    pairs, kv_pairs = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    q_tiles, kv_tiles = tiles(problem.seq_q, config.block_q), tiles(problem.seq_kv, config.block_kv)
    rows = q_tiles * config.block_q
    scratch = Layout.of(
        lse_log2=4 * pairs * rows,
        row_terms=4 * pairs * rows,
        turns=4 * pairs * q_tiles if wants_dq and problem.deterministic else 0,
        piece_turns=8 * kv_pairs * kv_tiles if cut else 0,
        dq_sums=4 * pairs * rows * config.head_dim if wants_dq else 0,
        dkv_sums=4 * kv_pairs * kv_tiles * config.block_kv * (config.head_dim + config.head_dim_v) if cut else 0,
    )
    shared_terms = ("lse_log2", "row_terms", "dq_sums", "turns", "piece_turns")
    terms = {name: scratch.address(name) for name in shared_terms}
    preprocess = {
        "out": View("out"),
        "dout": View("dout"),
        "lse": Address("lse"),
        "dlse": Address("dlse", optional=True),
        **terms,
        "piece_turn_count": kv_pairs * kv_tiles,
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": rows,
        "head_dim_v": problem.head_dim_v,
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
        **backward_fields(problem, divided, q_tiles, kv_tiles),
        **term_params(problem, precise=False, backward=True),
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
    arch = target.arch
    pre = preprocess_unit(config.bf16, _LANES[config.head_dim_v], arch)
    launches = [
        Launch(pre, _PreprocessParams, preprocess, pairs * rows // EDGE_ROWS, EDGE_THREADS),
        Launch(
            unit(config, arch, problem.scores), params_for(problem, _MainParams), main, divided.grid, config.threads
        ),
    ]
    if wants_dq:
        post = postprocess_unit(config, arch)
        launches.append(Launch(post, _PostprocessParams, postprocess, pairs * q_tiles, EDGE_THREADS))
    launches += edge_launches(problem, arch, scratch.address("row_terms"), rows, -1.0)
    says = f"{config}; {divided}, {scratch.bytes / 2**20:.1f} MiB of scratch"
    return Program(tuple(launches), scratch, says=(says,))


def backward_fields(problem: Problem, divided: division.Division, q_tiles: int, kv_tiles: int) -> dict[str, object]:
    """What both backwards of this folder are told alike."""
    return {
        **shape_params(problem),
        "heads_kv": problem.heads_kv,
        "q_tiles": q_tiles,
        "kv_tiles": kv_tiles,
        "pieces": divided.pieces,
        "piece_steps": divided.piece_steps,
        "sections": divided.sections,
        "rows_descend": int(problem.deterministic and isinstance(problem.mask, Causal)),
        "in_order": int(problem.deterministic),
    }


# Estimates, until somebody measures them. A step is five products of block_q x block_kv; a CTA begins with a load of K
# and V and ends with a store of dK and dV, and a piece passes on both in float32.
COSTS = division.Costs(start=1.5, merge=1.5)


def divide(problem: Problem, config: Config, target: Target) -> division.Division:
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


def dq_only(config: Config) -> Config:
    return replace(config, makes_dkv=False)


def _config(row: dict[str, Any], bf16: bool, softcap: bool, target: Target) -> Config:
    return Config(
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
        vector_sums=target.capability >= shared.VECTOR_SUMS_FROM,
        makes_dkv=True,
        ctas_per_sm=row["ctas_per_sm"],
    )


def keys_of_row(row: rules.Row) -> list[tuple[tuple[int, int], bool]]:
    return [(tuple(row["head_dims"]), softcap) for softcap in row.get("softcap", (False, True))]


@functools.cache
def _table() -> dict[tuple[tuple[int, int], bool], list[rules.Row]]:
    """(head-dim class, softcap) -> rows, best first; a row is for both unless it says for which."""
    return rules.rows_by("sm80", "backward", keys_of_row)
