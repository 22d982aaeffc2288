"""Few queries against many keys, for every NVIDIA GPU from sm_80 on: kernels/sm80/decode.cuh.

The rows of a KV head, new tokens times the query heads that share it, are one tile of 16 to 64; warps stream keys of
their own past it. The steps of all (sequence, KV head, tile) units are divided evenly over the CTAs, on the device,
from the lengths it finds there, and the last CTA that has a part of a unit puts the parts together: one launch, and one
captured graph for all lengths. Both backends use it, where no gradient is needed.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ..element import Element
from ..masks import Cached, Packed
from ..terms import Dropout, MaxLogit
from . import rules
from .config import TileConfig
from .extents import BATCHED, Extents, shape_params
from .params import LOG2_E, matrix_bytes, mirror, tiles
from .policy import params_for, term_params, unit_of
from .program import Address, Counter, Launch, Layout, Program, Stride, View, lenient
from .source import Kernel

if TYPE_CHECKING:
    from ..errors import Reason
    from ..problem import Problem
    from ..target import Target

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
CACHED = Extents(
    "tilewise::Cached",
    '#include "common/cached.cuh"',
    "_cached",
    (
        ("cache_lengths", _POINTER),
        ("cache_starts", _POINTER),
        ("cache_rows", _POINTER),
        ("page_table", _POINTER),
        ("page_table_stride", ctypes.c_longlong),
        ("cached_cu_q", _POINTER),
        ("page_size", _INT),
        ("cache_batches", _INT),
        ("cache_capacity", _INT),
        ("ends_aligned", _INT),
    ),
)

BLOCK_KEYS = 16  # of a warp
MIN_ITEM_STEPS, MAX_ITEMS = 4, 64  # of a unit, where its division is invariant: as decode.cuh has them
MAX_GROUP = 20  # parts that one CTA adds up: as decode.cuh has it
_SEGMENT_BYTES = 96  # of a description of a segment: as decode.cuh has it
MIN_RUN_KEYS = 128  # of a CTA, at least: fewer are read faster than one more part is added up
# What a run costs that ends inside a unit: its warps meet twice, and both units have one part more.
STRADDLING_STEPS = 3
# Fewer keys are one tile of a forward, which has nothing to divide. More rows than one tile of ours has read the keys
# more than once: a forward has wider tiles.
MIN_KEYS = 128
_MAX_ROWS = {64: 64, 96: 32, 128: 32, 192: 16, 256: 16}  # by the class of the wider head


@dataclass(frozen=True, slots=True)
class Config(TileConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/decode.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::DecodeConfig"

    element: Element
    head_dim: int
    head_dim_v: int
    warps: int
    row_tiles: int
    stages: int
    has_terms: bool
    ctas_per_sm: int

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def workers(self) -> str:
        return f"{self.warps} warps"

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles

    @property
    def block_q(self) -> int:
        return self.rows

    @property
    def block_kv(self) -> int:
        return BLOCK_KEYS * self.warps

    @property
    def smem_bytes(self) -> int:
        """`sizeof(DecodeSmem<config>)`; the generated source asserts it."""
        block = matrix_bytes(BLOCK_KEYS, self.head_dim) + matrix_bytes(BLOCK_KEYS, self.head_dim_v)
        sums = self.rows * (self.warps * (self.head_dim_v + 8 + 2) * 4 + MAX_GROUP * 8 + 12)
        per_segment = matrix_bytes(self.rows, self.head_dim) + self.warps * _SEGMENT_BYTES  # of two
        whole = self.warps * self.stages * block + 2 * per_segment + sums + 4
        return -(-whole // 1024) * 1024

    @property
    def name(self) -> str:
        shape = f"r{self.rows}_w{self.warps}_s{self.stages}_x{self.ctas_per_sm}"
        return f"decode_{self.heads_name}_{shape}"


# What a search varies of the configs that ship.
SEARCHED = {"warps": (2, 4, 8), "stages": (2, 3, 4, 5, 6), "ctas_per_sm": (1, 2, 3)}


def takes(problem: Problem) -> bool:
    """Whether a forward of this problem is one of this family; where the backend takes it at all."""
    if isinstance(problem.mask, Cached):
        return True
    if problem.needs_grad or problem.operand_grads or problem.dropout or problem.dtype.itemsize != 2:
        return False
    if isinstance(problem.mask, Packed) or problem.empty or rules.too_wide(problem):
        return False
    if any(isinstance(term, Dropout | MaxLogit) for term in problem.scores):
        return False
    return problem.seq_kv >= MIN_KEYS and problem.group * problem.seq_q <= _MAX_ROWS[max(rules.class_of(problem))]


def why_not(problem: Problem, target: Target) -> list[Reason]:
    """What the kernels of this family refuse beyond their backend."""
    steps = _units(problem, 16) * tiles(problem.seq_kv, BLOCK_KEYS)
    return rules.reasons(
        (
            problem.needs_grad,
            "keys in a cache have no gradient",
            "pass k and v as tensors of their own to tilewise.attention or attention_packed",
        ),
        (
            problem.dtype.itemsize != 2,
            f"dtype {problem.dtype}: kernels read caches of 16 bits",
            "use bfloat16 or float16, or backend='reference'",
        ),
        (
            isinstance(problem.mask, Cached) and any(not term.takes_cache for term in problem.scores),
            "a term reads a tensor of rows or keys, which do not count a cache's places",
            "use terms of heads alone",
        ),
        (steps >= 1 << 31, f"{steps} steps are over 2^31", "split the batch"),
    )


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first: those of the smallest tile that holds all rows.

    A row of the table may be for caches alone, or for all else: looking up places takes registers that wide tiles, and
    two CTAs per multiprocessor, do not leave.
    """
    cached = isinstance(problem.mask, Cached)
    facts = {"has_terms": bool(problem.scores), "element": Element.of(problem.dtype)}
    table = rules.rows("sm80", "decode", rules.class_of(problem), has_terms=bool(problem.scores))
    made = [rules.from_row(Config, row, **facts) for row in table if cached in row.get("cached", (False, True))]
    found = [config for config in made if config.fits(target)]
    rows = _longest_q(problem) * problem.group
    holding = [config.rows for config in found if config.rows >= rows]
    best = min(holding) if holding else max((config.rows for config in found), default=0)
    return [config for config in found if config.rows == best]


_Params = mirror("sm80/decode.cuh", "DecodeParams")

unit = Kernel("sm80/decode.cuh", "decode", _Params, "DecodeSmem", ("threads", "rows")).unit


def _longest_q(problem: Problem) -> int:
    mask = problem.mask
    return min(mask.max_q or problem.seq_q, problem.seq_q) if isinstance(mask, Cached) else problem.seq_q


def _packed_queries(problem: Problem) -> bool:
    return isinstance(problem.mask, Cached) and problem.mask.packed


def _tiles(problem: Problem, rows: int) -> int:
    """Tiles of rows of a KV head, of all sequences; where queries are packed, as many as there may be."""
    if isinstance(problem.mask, Cached) and problem.mask.packed:
        return problem.seq_q * problem.group // rows + problem.mask.sequences + 2
    return problem.batch * tiles(problem.seq_q * problem.group, rows)


def _units(problem: Problem, rows: int) -> int:
    return problem.heads_kv * _tiles(problem, rows)


class _Runs(NamedTuple):
    """How CTAs share units that are alike: each is cut into `splits` parts, or a run is `units` of them whole. Without
    `splits` the kernel divides units by itself. CTAs work on the heads of `sets` sets side by side."""

    splits: int = 0
    units: int = 1
    sets: int = 1


# Of the CTAs, so many that may be left idle so that those side by side read the heads of the same keys.
_MAX_IDLE = 0.04


def _head_sets(heads_kv: int, slots: int) -> int:
    """How many sets KV heads are divided into, which are worked on side by side: as many as leave few CTAs idle."""
    divisors = (sets for sets in range(heads_kv, 0, -1) if heads_kv % sets == 0)
    return next(sets for sets in divisors if slots // sets * sets >= (1 - _MAX_IDLE) * slots)


def _dealt(problem: Problem, slots: int, units: int, steps: int, config: Config) -> _Runs:
    """Runs that begin and end where units do, if units are alike and the CTAs that this leaves idle cost less than runs
    that straddle units; else none."""
    sets = _head_sets(problem.heads_kv, slots)
    alike = not isinstance(problem.mask, Cached) and not any(term.narrows for term in problem.scores)
    if not alike or _tiles(problem, config.rows) != problem.batch or steps >= 1 << 20:
        return _Runs(sets=sets)
    if units >= slots:
        runs = _Runs(1, tiles(units // sets, slots // sets), sets)
    else:
        runs = _Runs(min(slots // units, max(1, steps // _min_run(config))))
    busy = tiles(units // runs.sets, runs.units) * runs.sets * runs.splits
    idle_steps = units * steps / busy * (1 - busy / slots)
    return runs if idle_steps <= STRADDLING_STEPS else _Runs(sets=sets)


def _min_run(config: Config) -> int:
    """Steps of a CTA, at least."""
    return max(1, MIN_RUN_KEYS // config.block_kv)


def program(problem: Problem, target: Target, config: Config) -> Program:
    mask = problem.mask
    cached = mask if isinstance(mask, Cached) else None
    invariant = cached is not None and cached.invariant
    units, max_steps = _units(problem, config.rows), max(1, tiles(problem.seq_kv, config.block_kv))
    slots = min(MAX_GROUP**2, max(1, target.sms) * config.ctas_per_sm)
    items = units * max_steps
    rows = min(config.rows, _longest_q(problem) * problem.group) if not _packed_queries(problem) else config.rows
    if invariant:
        each = min(MAX_ITEMS, tiles(max_steps, MIN_ITEM_STEPS))
        items = units * each
        grid, tickets, parts = min(items, slots), 2 * units, items
    else:
        grid = min(slots, items)
    runs = _dealt(problem, slots, units, max_steps, config)
    grid = max(1, grid // runs.sets) * runs.sets
    if not invariant:
        tickets, parts = grid, 2 * grid
    scratch = Layout.of(partial_out=4 * parts * rows * config.head_dim_v, partial_sums=8 * parts * rows)
    fields: dict[str, Any] = {
        **{name: View(name) for name in ("q", "k", "v", "out")},
        "lse": Address("lse") if problem.needs_lse else None,
        **scratch.addresses("partial_out", "partial_sums"),
        "tickets": Counter(tickets),
        **_shape(problem),
        **term_params(problem, precise=False),
        "heads": problem.heads_q,
        "heads_kv": problem.heads_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "part_rows": rows,
        "unit_tiles": 0 if _packed_queries(problem) else tiles(problem.seq_q * problem.group, config.rows),
        "invariant": int(invariant),
        "splits": runs.splits,
        "units_per_run": runs.units,
        "min_run": _min_run(config),
        "head_sets": runs.sets,
        "heads_of_set": problem.heads_kv // runs.sets,
        "scale_log2": unit_of(problem) * LOG2_E,
    }
    extents = BATCHED
    if cached is not None:
        extents = CACHED
        fields |= _cache_fields(cached, problem)
    kernel = unit(config, target.arch, problem.scores, extents)
    params = extents.params(params_for(problem, _Params))
    launch = Launch(kernel, params, fields, grid, config.threads, overlap=target.capability >= (9, 0))
    # Nothing else divides the keys, or knows caches: a kernel that spills a register or two is better than none.
    says = _summary(problem, target, config, grid, units, items, runs, invariant)
    return lenient(Program((launch,), scratch, summary=says))


def _shape(problem: Problem) -> dict[str, int]:
    if not isinstance(problem.mask, Cached):
        return shape_params(problem)
    left, right, offset = problem.mask.inner.band(1, 1)
    return {
        "batch": problem.mask.sequences + 1 if problem.mask.packed else problem.batch,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
    }


def _cache_fields(mask: Cached, problem: Problem) -> dict[str, Any]:
    named = {operand.name for operand in mask.operands}

    def given(name: str) -> Address | None:
        return Address(name) if name in named else None

    aligned = getattr(mask.inner, "align", "top-left") == "bottom-right"
    return {
        "cache_lengths": given("cache_lengths"),
        "cache_starts": given("cache_starts"),
        "cache_rows": given("cache_rows"),
        "page_table": given("page_table"),
        "page_table_stride": Stride("page_table", 0) if mask.page_size else 0,
        "cached_cu_q": given("cu_seqlens_q"),
        "page_size": mask.page_size,
        "cache_batches": mask.batches,
        "cache_capacity": problem.seq_kv,
        "ends_aligned": int(aligned),
    }


def _summary(
    problem: Problem, target: Target, config: Config, grid: int, units: int, items: int, runs: _Runs, invariant: bool
) -> tuple[str, ...]:
    """For `explain`: how the keys are divided, and what memory allows."""
    ragged = isinstance(problem.mask, Cached) or any(term.narrows for term in problem.scores)
    most = "up to " if ragged else ""
    working = max(1, min(grid, items if invariant else items // _min_run(config)))
    if runs.splits:
        working = tiles(units // runs.sets, runs.units) * runs.sets * runs.splits
    kind = "items" if invariant else f"steps of {config.block_kv} keys"
    division = (
        f"{most}{working} CTAs of {config.threads} threads, {config.ctas_per_sm} per multiprocessor; {most}{items} "
        f"{kind} of {units} units ({problem.group} query heads x {_longest_q(problem)} tokens each), "
        f"{items / working:.1f} per CTA in one wave, {max(1.0, working / units):.1f} splits of a unit, put together by "
        "the last to finish"
    )
    said = [division]
    if invariant:
        said.append(
            f"batch invariant: a unit is divided by its own length, into at most {MAX_ITEMS} items of {MIN_ITEM_STEPS} "
            "or more steps"
        )
    if target.dram_bytes_per_s:
        seconds = problem.min_bytes() / target.dram_bytes_per_s
        said.append(
            f"bound by memory: {problem.min_bytes() / 1e6:.3g} MB{' at most' * ragged} take {seconds * 1e6:.1f} us at "
            f"{target.dram_bytes_per_s / 1e12:.3g} TB/s"
        )
    return tuple(said)
