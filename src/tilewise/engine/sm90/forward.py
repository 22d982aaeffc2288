"""The 16-bit forward of Hopper (sm_90a): kernels/sm90/forward.cuh.

TMA loads, wgmma products, warp-specialised. Tile shapes come from the measured table tables/sm90.json, by head-dim
class and kind of mask. Few queries against many keys are split over the keys, and a second kernel puts the parts
together.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from ...element import Element
from ...masks import Causal, Full, Packed, Window
from .. import packed, rules
from ..extents import forward_fields
from ..params import LOG2_E, ONCE_ROOM, forward_order, matrix_bytes, mirror, query_tiles, tiles
from ..policy import Bounds, params_for, term_params, unit_of
from ..program import Address, Counter, Launch, Layout, Map, Program, lenient, strides
from ..registers import fits_plain_tiles, fits_plain_window, forward_registers, max_plain_heads
from ..rules import MAX_ROWS
from ..source import Kernel, kernel_unit
from ..tile_map import map_for
from .shared import ForwardConfig
from .staged_bias import may_stage, staged
from .staged_table import with_staged_table

if TYPE_CHECKING:
    from ...jit import Unit
    from ...problem import Problem
    from ...target import Target

ARCH = "sm_90a"
MASK_LINES = "queries"
# Heads of 72 and 80 would waste a fourth and a sixth of both products in the class of 96.
HEAD_DIM_CLASSES = ((64, 64), (80, 80), *rules.HEAD_DIM_CLASSES[1:])
MASK_KINDS = ("full", "causal", "window")  # as enum MaskKind counts them
_COMBINE_ROWS = 4  # per CTA, a warp each
# Min tiles of keys at which splitting them among CTAs outweighs combining the parts, and min tiles per part.
_MIN_TILES_TO_SPLIT, _MIN_TILES_PER_PART = 8, 2
_MAX_PLAIN_WINDOW = 192  # of q and k: the widest heads whose loops for a window leave registers to terms


@dataclass(frozen=True, slots=True)
class Config(ForwardConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::Config"

    element: Element
    head_dim: int
    head_dim_v: int
    consumers: int
    block_kv: int
    k_stages: int
    v_stages: int
    mask: int
    has_terms: bool
    pingpong: bool
    ctas_per_sm: int
    split: bool
    bias_slots: int
    stages_table: bool

    @property
    def bounds(self) -> Bounds:
        """What its masks look at."""
        return tuple(Bounds)[self.mask]

    @property
    def takes_packed(self) -> bool:
        """Whether a kernel of packed sequences builds without spills: these tiles of heads of 80 miss it by 8 bytes."""
        return self.head_dim != 80 or self.consumers < 3

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        panels = -(-self.head_dim_v // 64)
        halved = self.head_dim > 128 or (self.bias_slots > 0 and self.head_dim > 64 and self.block_kv > 96)
        q = self.consumers * matrix_bytes(64, self.head_dim)
        out = self.consumers * ((panels + 1) // 2 if halved else panels) * matrix_bytes(64, 64)
        bias = self.bias_slots * matrix_bytes(64, self.block_kv) + 1024 * (self.bias_slots > 0)  # with its barriers
        k = self.k_stages * matrix_bytes(self.block_kv, self.head_dim)
        v = self.v_stages * matrix_bytes(self.block_kv, self.head_dim_v)
        barriers = 8 * (4 * self.consumers + 2 * self.k_stages + 3 * self.v_stages + 2 * 2)
        plans = 2 * (9 + 2 * self.consumers + 1) * 4
        slices = self.k_stages * -(-(12 + 4 * (self.block_q + self.block_kv - 1)) // 16) * 16 * self.stages_table
        return bias + -(-(q + k + v + out + barriers + plans + 2 * ONCE_ROOM + slices) // 1024) * 1024

    @property
    def depth(self) -> str:
        bias = f", bias {self.bias_slots} x 64 rows" if self.bias_slots else ""
        return f"stages K {self.k_stages} V {self.v_stages}{bias}{', table' * self.stages_table}"

    @property
    def name(self) -> str:
        kind = f"{self.heads_name}_{MASK_KINDS[self.mask]}"
        shape = f"q{self.block_q}_kv{self.block_kv}_k{self.k_stages}v{self.v_stages}"
        staged = f"_b{self.bias_slots}" if self.bias_slots else "_table" * self.stages_table
        extras = f"{staged}{'_pingpong' * self.pingpong}{'_split' * self.split}"
        return f"forward_{kind}_{shape}{extras}{f'_x{self.ctas_per_sm}' if self.ctas_per_sm > 1 else ''}"


# What a search varies: widths of a product that kernels/sm90/wgmma.cuh has, and depths of the rings.
SEARCHED = {
    "consumers": (1, 2, 3, 4),
    "block_kv": (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256),
    "k_stages": (1, 2, 3, 4),
    "v_stages": (1, 2, 3, 4),
    "pingpong": (False, True),
    "ctas_per_sm": (1, 2),
    "split": (False,),  # kernels that divide the keys are as they ship
}


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that ships, best first.

    A row of the table may be for kernels that have certain terms and no others (`terms`), or for some lengths of keys
    only (`min_seq_kv`, `max_seq_kv`), or, with smaller tiles than usual, only for problems that it spreads over the
    multiprocessors in one wave (`one_wave`), or, dividing the keys too (`split`), for so few queries that a wave has
    room for several parts. Rows with a `speed`, by which tiles of the same size can be compared, are ordered by when
    their last wave ends where tiles are equal.
    """
    folded = _folded(problem)
    split: list[Config] = []
    small: list[Config] = []
    fitting: list[tuple[float, Config]] = []
    equal = isinstance(folded.mask, Full) and target.sms > 0
    for row, config in _table_configs(problem):
        work = query_tiles(folded, config.block_q)
        ends = 0.0
        if equal and "speed" in row:
            ends = -(-work // (target.sms * config.ctas_per_sm)) * config.block_q / row["speed"]
        if config.split:
            if _splits(folded, config, target) > 1:
                split.append(config)
        elif row.get("one_wave") and not ends:
            if work <= target.sms:
                small.append(config)
        elif row.get("min_seq_kv", 0) <= problem.seq_kv <= row.get("max_seq_kv", MAX_ROWS):
            fitting.append((ends, config))
    small.sort(key=lambda config: config.block_q)
    fitting.sort(key=lambda pair: pair[0])
    usual = [config for _, config in fitting]
    if not all(term.elementwise for term in problem.scores):  # for terms whose kernels spill after all
        usual += [replace(usual[-1], block_kv=keys) for keys in SEARCHED["block_kv"][::-1] if keys < usual[-1].block_kv]
    return [*split, *small, *usual]


def _narrower(row: dict[str, Any], problem: Problem) -> dict[str, Any]:
    """A row of the table with fewer keys per tile, where terms need registers: 16 keys take 12.

    The loops of a window leave fewer of them.
    """
    if "terms" in row:
        return row
    needed = forward_registers(problem)
    if _mask_kind(problem) == 2 and _roomy(problem) and not all(term.elementwise for term in problem.scores):
        needed += 16
    min_keys = min(row["block_kv"], SEARCHED["block_kv"][0])
    return row | {"block_kv": max(row["block_kv"] - needed // 16 * 16, min_keys)} if needed >= 16 else row


def for_any_length(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that ships for such heads and masks, for any lengths."""
    return [config for _, config in _table_configs(problem)]


def _table_configs(problem: Problem) -> list[tuple[rules.Row, Config]]:
    """The rows of the table for such heads and masks."""
    kind, element = _mask_kind(problem), Element.of(problem.dtype)
    rows = rules.rows("sm90", "forward", _class_of(problem), _roomy(problem))
    kinds = [term.kind for term in problem.scores]
    rows = [row for row in rows if MASK_KINDS[kind] in row["masks"] and row.get("terms", kinds) == kinds]
    own = [row for row in rows if row.get("bias_slots")] if may_stage(problem) else []
    others = [row for row in rows if not row.get("bias_slots")]
    return [
        *((row, _config(_narrower(row, staged(problem)), element, kind)) for row in own),
        *((row, _config(_narrower(row, problem), element, kind)) for row in others),
    ]


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    return rules.tuning_key(problem, HEAD_DIM_CLASSES, mask=MASK_KINDS[_mask_kind(problem)])


@functools.cache
def combine_unit(element: Element) -> Unit:
    """The kernel that puts the parts of a split forward together."""
    return kernel_unit(
        f"combine_{element.name}",
        "sm90/combine.cuh",
        f"combine<{element.cpp_name}>",
        _CombineParams,
        ARCH,
        threads=32 * _COMBINE_ROWS,
        checks=(f"combine_rows == {_COMBINE_ROWS}",),
    )


_Params = mirror("sm90/config.cuh", "Params")
_CombineParams = mirror("sm90/combine.cuh", "CombineParams")
unit = Kernel("sm90/forward.cuh", "forward", _Params, "Smem").unit


def program(problem: Problem, target: Target, config: Config) -> Program:
    """The query heads of a KV head share tiles where that makes fewer of them and the strides of q and out allow it."""
    if config.stages_table:
        problem = with_staged_table(problem)
    if isinstance(problem.mask, Packed):
        return _packed_program(problem, target, config)
    folded = _folded(problem)
    if folded is problem:
        return _program(problem, target, config)
    rows = (folded.batch, folded.heads_q, folded.seq_q)
    shared = _program(folded, target, config)
    return shared._replace(
        summary=(
            *shared.summary,
            f"the {problem.group} query heads of a KV head share tiles, if their strides let them",
        ),
        views=(("q", (*rows, folded.head_dim)), ("out", (*rows, folded.head_dim_v))),
        fallback_without_views=_program(problem, target, config),
    )


def _program(problem: Problem, target: Target, config: Config) -> Program:
    """A staged bias has a program for biases that tensor maps cannot describe, of a config that does not stage it."""
    if not config.bias_slots:
        return _launches(problem, target, config)
    unmapped = next(one for one in configs(problem, target) if not one.bias_slots)
    mapped = _launches(staged(problem), target, config)
    return mapped._replace(fallback_without_tma=("bias", lenient(_launches(problem, target, unmapped))))


def _launches(problem: Problem, target: Target, config: Config) -> Program:
    work, splits = query_tiles(problem, config.block_q), _splits(problem, config, target)
    ctas = min(work * splits, target.sms * config.ctas_per_sm)
    # Equal tiles need no dynamic order, and with one tile per CTA there is nothing to hand out.
    unequal = problem.mask != Full() or any(term.hides for term in problem.scores)
    dynamic = unequal and work * splits > ctas
    tile_map = map_for(problem, config.block_q, config.block_kv, ARCH, by_keys=False)
    rows = problem.batch * problem.heads_q * problem.seq_q
    scratch = Layout()
    if config.split:
        scratch = Layout.of(partial_out=4 * splits * rows * problem.head_dim_v, partial_lse=4 * splits * rows)
    waves = work / (target.sms * config.ctas_per_sm)
    fields: dict[str, object] = {
        "q_map": Map("q", 64),
        "k_map": Map("k", config.block_kv),
        "v_map": Map("v", config.block_kv),
        "out_map": None if config.split else Map("out", 64),
        "v": Address("v"),
        **strides("v"),
        "partial_out": scratch.address("partial_out"),
        "work_counter": Counter() if dynamic and not config.split else None,
        **forward_fields(problem, config.block_q, forward_order(problem, target, 2, waves)),
        **term_params(problem, precise=False),
        **({"bias_map": Map("bias", 64, shared=True)} if config.bias_slots else {}),
        **tile_map.fields,
        "scale_log2": unit_of(problem) * LOG2_E,
        "splits": splits,
    }
    lse = fields["lse"]
    if config.split:
        fields["lse"] = scratch.address("partial_lse")
    kernel = unit(config, ARCH, problem.scores, tile_map.extents)
    params = tile_map.extents.params(params_for(problem, _Params))
    launches = [Launch(kernel, params, fields, ctas, config.threads, overlap=True)]
    if config.split:
        combine = {
            "partial_out": scratch.address("partial_out"),
            "partial_lse": scratch.address("partial_lse"),
            "out": Address("out"),
            **strides("out", name="{1}_stride"),
            "lse": lse,
            "rows": rows,
            "heads": problem.heads_q,
            "seq_q": problem.seq_q,
            "head_dim_v": problem.head_dim_v,
            "splits": splits,
        }
        grid, threads = tiles(rows, _COMBINE_ROWS), 32 * _COMBINE_ROWS
        launches.append(Launch(combine_unit(config.element), _CombineParams, combine, grid, threads, overlap=True))
    order = "longest first" if dynamic else "in a fixed order"
    grid_text = f"{ctas} CTAs of {config.threads} threads, {config.register_limit} registers per thread"
    parts = f" times {splits} parts of their keys, put together by a second kernel" if config.split else ""
    says = f"{grid_text}; {work} query tiles{parts} {order}, {work * splits / ctas:.1f} waves"
    return Program(tuple(launches), scratch, summary=(says, *tile_map.summary), prepared=tile_map.prepared)


def _packed_program(problem: Problem, target: Target, config: Config) -> Program:
    """Work is handed out by a table. A kernel of a full mask has no scanner, which the last tile of a sequence needs:
    rows of the next one come with it."""
    config = replace(config, mask=max(1, config.mask))
    table = packed.table(problem, target, config.block_q, config.block_kv, by_keys=False, number_bytes=2)
    work = table.q_room * problem.heads_q
    ctas = min(work, target.sms * config.ctas_per_sm)
    longest_first = int(isinstance(packed.mask_of(problem).inner, Causal))
    fields: dict[str, object] = {
        "q_map": Map("q", 64),
        "k_map": Map("k", config.block_kv),
        "v_map": Map("v", config.block_kv),
        "out_map": Map("out", 64),
        "v": Address("v"),
        **strides("v"),
        "work_counter": Counter(),
        **forward_fields(packed.as_batch(problem), config.block_q, {"longest_first": longest_first}),
        **term_params(problem, precise=False),
        **table.fields,
        **packed.stored_rows("out_rows", "out"),
        "scale_log2": unit_of(problem) * LOG2_E,
        "splits": 1,
    }
    kernel = unit(config, ARCH, problem.scores, packed.PACKED)
    params = packed.PACKED.params(params_for(problem, _Params))
    launch = Launch(kernel, params, fields, ctas, config.threads, overlap=True)
    grid = f"{ctas} CTAs of {config.threads} threads, {config.register_limit} registers per thread"
    return Program((launch,), summary=(grid, packed.summary(problem, table)), prepared=(table.prepared,))


def _splits(problem: Problem, config: Config, target: Target) -> int:
    """Into how many parts a split kernel divides the keys: as many as fill one wave and are worth their fixed cost."""
    kv_tiles = tiles(problem.seq_kv, config.block_kv)
    if not config.split or kv_tiles < _MIN_TILES_TO_SPLIT:
        return 1
    room = target.sms * config.ctas_per_sm // query_tiles(problem, config.block_q)
    return max(1, min(room, kv_tiles // _MIN_TILES_PER_PART))


def _folded(problem: Problem) -> Problem:
    """The problem with the query heads of a KV head as more rows of one head, where that makes fewer tiles of 64 rows.

    It takes a mask that hides nothing, terms that do not ask where a score stands, and heads that lie behind one
    another in memory.
    """
    rows = problem.group * problem.seq_q
    if not all(term.elementwise for term in problem.scores):
        return problem
    if problem.group == 1 or problem.group * -(-problem.seq_q // 64) <= -(-rows // 64):
        return problem
    if rows > MAX_ROWS or not isinstance(problem.mask, Full | Causal | Window):
        return problem
    if problem.mask.pairs(problem.seq_q, problem.seq_kv) < problem.seq_q * problem.seq_kv:
        return problem
    return problem.with_(heads_q=problem.heads_kv, seq_q=rows, mask=Full())


def _roomy(problem: Problem) -> bool:
    """Whether to use the tiles of kernels with a softcap, which leave registers; for a window most terms do."""
    if not problem.scores or not fits_plain_tiles(problem, "sm90"):
        return bool(problem.scores)
    if max(_class_of(problem)) > max_plain_heads(problem):
        return True
    fits_window = _class_of(problem)[0] <= _MAX_PLAIN_WINDOW and fits_plain_window(problem)
    return _mask_kind(problem) == 2 and not fits_window


def _class_of(problem: Problem) -> tuple[int, int]:
    return rules.class_of(problem, HEAD_DIM_CLASSES)


def _mask_kind(problem: Problem) -> int:
    """Which tiles a kernel may hide keys in: in the last one, in some at the end, or also at the start.

    What terms hide counts as what a mask does.
    """
    if any(term.hides_first_keys for term in problem.scores):
        return 2
    if isinstance(problem.mask, Full):
        return int(any(term.hides for term in problem.scores))
    return 1 if isinstance(problem.mask, Causal) else 2


def _config(row: rules.Row, element: Element, kind: int) -> Config:
    split = row.get("split", False)
    mask = 1 if split else kind  # a causal band may as well hide nothing: one kernel for both
    return rules.from_row(Config, {**row, "split": split}, element=element, mask=mask, bias_slots=0, stages_table=False)
