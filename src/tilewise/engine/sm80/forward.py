"""The 16-bit forward of every NVIDIA GPU from sm_80 on: kernels/sm80/forward.cuh, FlashAttention-2's way.

mma.sync products, cp.async loads, softmax in registers. Compiled for the very GPU it runs on. Tile shapes come from
tables/sm80.json: of the rows for a head-dim class, those whose shared memory fits the GPU, best first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...element import Element
from ...masks import Causal, Full, Packed
from .. import packed, rules
from ..extents import forward_fields
from ..params import LOG2_E, forward_order, matrix_bytes, mirror, query_tiles
from ..policy import params_for, term_params, unit_of
from ..program import Launch, Program, View
from ..registers import fits_plain_tiles, forward_registers
from ..source import Kernel
from ..tile_map import map_for
from . import shared

if TYPE_CHECKING:
    from ...problem import Problem
    from ...target import Target


_OTHER_REGISTERS = 56  # of a thread beside its arrays, measured on kernels with a softcap


MASK_LINES = "queries"


@dataclass(frozen=True, slots=True)
class Config(shared.TileConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::Config"

    element: Element
    head_dim: int
    head_dim_v: int
    warps: int
    row_tiles: int
    block_kv: int
    stages: int
    has_terms: bool
    q_in_registers: bool
    ctas_per_sm: int

    @property
    def block_q(self) -> int:
        return 16 * self.row_tiles * self.warps

    @property
    def held_registers(self) -> int:
        """Of the arrays that a thread holds: S, O, and Q where it is kept."""
        kept = self.q_in_registers * self.head_dim // 4
        return self.row_tiles * (self.block_kv // 2 + self.head_dim_v // 2 + kept)

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        tile = matrix_bytes(self.block_kv, self.head_dim) + matrix_bytes(self.block_kv, self.head_dim_v)
        whole = matrix_bytes(self.block_q, self.head_dim) + self.stages * tile + self.warps * shared.PLAN_BYTES
        return -(-whole // 1024) * 1024

    @property
    def name(self) -> str:
        shape = f"q{self.block_q}_kv{self.block_kv}_w{self.warps}_s{self.stages}_x{self.ctas_per_sm}"
        return f"fa2_forward_{self.heads_name}_{shape}{'_qr' * self.q_in_registers}"


# What a search varies of the configs that ship.
SEARCHED = {
    "warps": (2, 4, 8),
    "row_tiles": (1, 2),
    "block_kv": (32, 64, 96, 128),
    "stages": (1, 2),
    "q_in_registers": (False, True),
    "ctas_per_sm": (1, 2, 3, 4),
}


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that ships and fit the target, best first.

    A row with smaller tiles than usual may be for problems only that it spreads over the multiprocessors in one wave
    (`one_wave`).
    """
    small, fitting = [], []
    element = Element.of(problem.dtype)
    for row, ships in shared.fitting(Config, "forward", problem, target, has_terms=_roomy(problem), element=element):
        needed = ships.held_registers + _OTHER_REGISTERS + forward_registers(problem)
        narrow = forward_registers(problem) and needed > ships.register_limit
        config = replace(ships, block_kv=min(ships.block_kv, 32)) if narrow else ships
        if not row.get("one_wave"):
            fitting.append(config)
        elif query_tiles(problem, config.block_q) <= target.sms * config.ctas_per_sm:
            small.append(config)
    if fitting and not all(term.elementwise for term in problem.scores):  # for terms whose kernels spill after all
        fitting += [replace(config, block_kv=32) for config in fitting if config.block_kv > 32]
    return [*small, *fitting]


def _roomy(problem: Problem) -> bool:
    """The tiles of kernels with a softcap, which leave registers."""
    return not fits_plain_tiles(problem, "sm80")


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    return rules.tuning_key(problem, masked=not isinstance(problem.mask, Full))


_Params = mirror("sm80/config.cuh", "Params")

unit = Kernel("sm80/forward.cuh", "forward", _Params, "Smem", ("threads", "block_q")).unit


def program(problem: Problem, target: Target, config: Config) -> Program:
    if isinstance(problem.mask, Packed):
        return _packed_program(problem, target, config)
    tile_map = map_for(problem, config.block_q, config.block_kv, target.arch, by_keys=False)
    fields = {
        **tensor_fields(problem, target, config.block_q, 2),
        **term_params(problem, precise=False),
        **tile_map.fields,
        "scale_log2": unit_of(problem) * LOG2_E,
        "head_dim": problem.head_dim,
    }
    kernel = unit(config, target.arch, problem.scores, tile_map.extents)
    params = tile_map.extents.params(params_for(problem, _Params))
    made = forward_program(problem, target, config, Launch(kernel, params, fields, 0, 0))
    return made._replace(summary=(*made.summary, *tile_map.summary), prepared=tile_map.prepared)


def _packed_program(problem: Problem, target: Target, config: Config) -> Program:
    """One CTA for each tile that the table has room for; those behind its end do nothing."""
    table = packed.table(problem, target, config.block_q, config.block_kv, by_keys=False)
    longest_first = int(isinstance(packed.mask_of(problem).inner, Causal))
    fields = {
        **{name: View(name) for name in ("q", "k", "v", "out")},
        **forward_fields(packed.as_batch(problem), config.block_q, {"longest_first": longest_first}),
        **term_params(problem, precise=False),
        **table.fields,
        "scale_log2": unit_of(problem) * LOG2_E,
        "head_dim": problem.head_dim,
    }
    kernel = unit(config, target.arch, problem.scores, packed.PACKED)
    params = packed.PACKED.params(params_for(problem, _Params))
    launch = Launch(kernel, params, fields, table.q_room * problem.heads_q, config.threads)
    grid = f"up to {launch.grid} CTAs of {config.threads} threads, at most {config.register_limit} registers per thread"
    return Program((launch,), summary=(grid, packed.summary(problem, table)), prepared=(table.prepared,))


def tensor_fields(problem: Problem, target: Target, block_q: int, number_bytes: int) -> dict[str, object]:
    """The fields that both forwards of this folder share."""
    tensors = {name: View(name) for name in ("q", "k", "v", "out")}
    return {**tensors, **forward_fields(problem, block_q, forward_order(problem, target, number_bytes))}


def forward_program(problem: Problem, target: Target, config: Any, launch: Launch) -> Program:
    """One CTA per tile of queries."""
    work = query_tiles(problem, config.block_q)
    together = target.sms * config.ctas_per_sm
    order = "longest first" if isinstance(problem.mask, Causal) else "in order"
    registers = f"at most {config.register_limit} registers per thread"
    occupancy = f"{config.ctas_per_sm} per multiprocessor, {config.warps * config.ctas_per_sm} warps"
    waves = f"{work / together:.1f} waves" if together else "waves unknown"
    says = f"{work} CTAs of {config.threads} threads {order}, {registers}; {occupancy}; {waves}"
    return Program((launch._replace(grid=work, threads=config.threads),), summary=(says,))
