"""The 16-bit backward of Hopper (sm_90a): kernels/sm90/backward.cuh.

`preprocess` makes the row terms of the main kernel, which makes dK and dV and adds up dQ in float32 over the tiles of
keys: `Order` says how. Few of them, and those whose gradients shall be deterministic, take turns, and the last one
writes dQ; else its sums are zeroed before, and `postprocess` rounds them. Tiles of keys that are few or long are cut
into pieces (division.py), which add up dK and dV in float32. Extra memory is O(N): these sums and two floats per query
row. A few short sequences need the main kernel alone (`Config.makes_row_terms`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ...element import Element
from ...masks import UNLIMITED, Causal, Packed
from ...operands import ALL
from ...terms import Sink
from ...terms.keep import PackedKeep
from ...terms.spans import KnownSpans
from .. import division, packed, rules
from ..edges import edge_launches
from ..extents import BATCHED, Extents, division_fields, row_fields
from ..params import LOG2_E, ONCE_ROOM, kv_head_sections, matrix_bytes, mirror, tiles
from ..policy import Policy, params_for, term_params, unit_of
from ..program import Address, Launch, Layout, Map, Program, lenient, strides
from ..registers import backward_registers
from ..source import Kernel, kernel_unit
from ..tile_map import map_for, packed_term
from . import bias_gradient
from .shared import WarpgroupConfig
from .staged_bias import StagedBias, may_stage, staged

if TYPE_CHECKING:
    from ...jit import Unit
    from ...operands import Wants
    from ...problem import Problem
    from ...scores import Term
    from ...target import Target

ARCH = "sm_90a"
MASK_LINES = "keys"
MAKES_OPERANDS_ALONE = True
# Mean of 2^-8 / m over mantissas m, as weights are spread in the logarithm: half a unit in the last place of bf16.
TRUNCATION_BIAS = 2.0**-8 / (2 * math.log(2))
EDGE_ROWS, EDGE_THREADS = 64, 256
TICKET_STAGES = 4
# Registers that the usual tiles leave to terms, by head-dim class.
_SPARE_REGISTERS = {(64, 64): 8, (96, 96): 8}
_USUALLY_SPARE = 24
_LANES = {64: 8, 96: 16, 128: 16, 192: 32, 256: 32}  # of preprocess, 8 columns each


class Order(IntEnum):
    """How the tiles of keys add up dQ: kernels/sm90/backward_config.cuh."""

    KEY_ORDER = 0
    CLAIM_ORDER = 1
    ANY_ORDER = 2


class Walk(IntEnum):
    """In which order a grid goes through tiles of keys, and a CTA through its steps: likewise."""

    AROUND = 0
    DOWN = 1
    STAIRS = 2


@dataclass(frozen=True, slots=True)
class Config(WarpgroupConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/backward_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::BackwardConfig"
    threads: ClassVar[int] = 512
    ctas_per_sm: ClassVar[int] = 1

    element: Element
    head_dim: int
    head_dim_v: int
    block_q: int
    warpgroups_own_keys: bool
    stages: int
    ds_stages: int
    has_terms: bool
    writes_dq: bool
    makes_dq: bool
    makes_dkv: bool
    dq_columns: int
    query_registers: int
    product_registers: int
    bias_stages: int
    makes_row_terms: bool

    @property
    def block_kv(self) -> int:
        return 128 if self.warpgroups_own_keys else 64

    @property
    def weight_factor(self) -> float:
        """What all weights are raised by, so that truncating them to bf16 is right on average."""
        return 1.0 + TRUNCATION_BIAS if self.element is Element.bf16 and self.warpgroups_own_keys else 1.0

    @property
    def smem_bytes(self) -> int:
        """`sizeof(BackwardSmem<config>)`; the generated source asserts it."""
        kv = matrix_bytes(self.block_kv, self.head_dim) + matrix_bytes(self.block_kv, self.head_dim_v)
        rings = self.stages * (matrix_bytes(self.block_q, self.head_dim) + matrix_bytes(self.block_q, self.head_dim_v))
        ds = self.ds_stages * matrix_bytes(self.block_kv, self.block_q)
        weights = 16 if self.warpgroups_own_keys else self.block_q * 64 * 4
        vectors = 2 * self.stages * self.block_q * 4 + self.stages * 2 * 4
        barriers = 8 * (2 + 4 * self.stages + 2 * self.ds_stages + 2 + 2 * TICKET_STAGES)
        bias = self.bias_stages * matrix_bytes(self.block_q, self.block_kv)
        bias += 1024 * (self.bias_stages > 0)  # with its barriers
        before_tickets = -(-(kv + rings + ds + weights + vectors + barriers + 2 * 4) // 16) * 16
        after_plan = self.stages * (4 + ONCE_ROOM) + 2 * 8
        return bias + -(-(before_tickets + TICKET_STAGES * 8 + 16 * 4 + after_plan) // 1024) * 1024

    @property
    def depth(self) -> str:
        bias = f", bias {self.bias_stages}" if self.bias_stages else ""
        return f"{self.stages} stage{'s' * (self.stages > 1)}{bias}"

    @property
    def name(self) -> str:
        made = "dq" if self.makes_dq else "dkv" if self.makes_dkv else "operands"
        extras = "" if self.makes_dq and self.makes_dkv else f"_{made}_only"
        staged = f"_b{self.bias_stages}" if self.bias_stages else ""
        shape = f"q{self.block_q}_kv{self.block_kv}{staged}"
        one_tile = "_one_tile" * self.writes_dq + "_one_launch" * self.makes_row_terms
        return f"backward_{self.heads_name}_{shape}{one_tile}{extras}"


def configs(problem: Problem, target: Target) -> list[Config]:
    """Legal configs, best first, from the measured table.

    Rows that are for `terms` leave these more registers: they come first where many are needed, and else stand behind
    the others, for kernels that spill after all.
    """
    classes = rules.class_of(problem)
    rows = rules.rows("sm90_backward", "backward", classes, bool(problem.scores))
    own = [row for row in rows if row.get("bias_stages")] if may_stage(problem) else []
    others = [row for row in rows if not row.get("bias_stages")]
    rows = [*_ordered(own, staged(problem)), *_ordered(others, problem)]
    facts = {
        "element": Element.of(problem.dtype),
        "makes_dq": True,
        "makes_dkv": True,
        "bias_stages": 0,
        "makes_row_terms": False,
    }
    return [rules.from_row(Config, row, **facts) for row in rows if not row["writes_dq"] or _has_one_tile(problem, row)]


def _ordered(rows: list[rules.Row], problem: Problem) -> list[rules.Row]:
    """By the registers that they leave to terms."""
    if all(term.elementwise for term in problem.scores):
        return [row for row in rows if not row.get("terms")]
    if backward_registers(problem) <= _SPARE_REGISTERS.get(rules.class_of(problem), _USUALLY_SPARE):
        return rows
    return sorted(rows, key=lambda row: not row.get("terms"))


@functools.cache
def preprocess_unit(
    element: Element,
    lanes: int,
    rows: int,
    extents: Extents = BATCHED,
    line: Term | None = None,
    skips_blind: bool = False,
) -> Unit:
    """The kernel that makes the row terms of a tile of so many rows per block, with what the `line` of a term adds.

    `skips_blind`: it reads and zeroes nothing for queries that see no key.
    """
    policy = None if line is None else Policy((line,))
    of_line = "" if policy is None else policy.suffix
    more = f", {'tilewise::Scores<>' if policy is None else 'Policy'}{', true' * skips_blind}"
    return kernel_unit(
        f"preprocess_{element.name}_{lanes}_q{rows}{of_line}{'_skipping' * skips_blind}{extents.suffix}",
        "sm90/backward_edges.cuh",
        f"preprocess<{element.cpp_name}, {lanes}, {rows}, Extents{more if skips_blind or policy is not None else ''}>",
        _PreprocessParams,
        ARCH,
        policy=policy,
        extents=extents,
        threads=EDGE_THREADS,
        checks=(f"edge_threads == {EDGE_THREADS}",),
    )


@functools.cache
def postprocess_unit(element: Element, extents: Extents = BATCHED, skips_blind: bool = False) -> Unit:
    return kernel_unit(
        f"postprocess_{element.name}{'_skipping' * skips_blind}{extents.suffix}",
        "sm90/backward_edges.cuh",
        f"postprocess<{element.cpp_name}, Extents{', true' * skips_blind}>",
        _PostprocessParams,
        ARCH,
        extents=extents,
        threads=EDGE_THREADS,
        checks=(f"edge_threads == {EDGE_THREADS} && edge_rows == {EDGE_ROWS}",),
    )


_MainParams = mirror("sm90/backward_config.cuh", "BackwardParams")
_PreprocessParams = mirror("sm90/backward_edges.cuh", "PreprocessParams")
_PostprocessParams = mirror("sm90/backward_edges.cuh", "PostprocessParams")
_DERIVED = ("threads", "block_kv", "weight_factor")
unit = Kernel("sm90/backward.cuh", "backward", _MainParams, "BackwardSmem", _DERIVED).unit


def program(problem: Problem, target: Target, config: Config, wants: Wants = ALL) -> Program:
    """A staged bias has a program for biases that tensor maps cannot describe, of a config that does not stage it."""
    if not config.bias_stages:
        return _program(problem, target, config, wants)
    unmapped = next(one for one in configs(problem, target) if not one.bias_stages)
    mapped = _staged_program(staged(problem), target, config, wants)
    return mapped._replace(fallback_without_tma=("bias", lenient(_program(problem, target, unmapped, wants))))


def _staged_program(problem: Problem, target: Target, config: Config, wants: Wants) -> Program:
    """The gradient of a bias that pairs share has a kernel of its own, behind the others."""
    if "bias" not in wants or not bias_gradient.makes_it(problem):
        return _program(problem, target, config, wants)
    others = _program(rules.learning(problem, wants - {"bias"}), target, config, wants - {"bias"})
    rows = tiles(problem.seq_q, config.block_q) * config.block_q
    row_terms = others.scratch.addresses("start_s", "start_dp")
    factors = {
        "scale_log2": unit_of(problem) * LOG2_E,
        "sums_factor": 1.0 / config.weight_factor,
        "start_dp_factor": _kept_weight(problem),
    }
    launch = bias_gradient.launch(problem, target, row_terms, rows, factors)
    sums = (("bias", bias_gradient.sums_of(problem)),)
    says = (*others.summary, "a kernel of its own makes the gradient of the bias")
    return others._replace(launches=(*others.launches, launch), summary=says, sums=sums)


def _program(problem: Problem, target: Target, config: Config, wants: Wants) -> Program:
    config = _only(config, wants)
    table = None
    if isinstance(problem.mask, Packed):
        assert not config.writes_dq
        table = packed.table(problem, target, config.block_q, config.block_kv, by_keys=True, slots=target.sms)
        divided = packed.undivided(problem, table, target.sms)
    else:
        config = replace(config, makes_row_terms=_makes_row_terms(problem, config, target))
        divided = divide(problem, config, target)
    batch = packed.as_batch(problem)
    sums_dq = config.makes_dq and not config.writes_dq
    order = _order(batch, config, divided) if table is None else _packed_order(batch, divided)
    takes_tickets = sums_dq and order is not Order.ANY_ORDER
    tile_map = map_for(
        problem, config.block_q, config.block_kv, ARCH, by_keys=True, in_turns=takes_tickets, may_be_banded=True
    )
    # Sums that are added up in any order are zeroed before, and rounded behind: all, or of long packed sequences.
    ticket_keys = _ticket_keys(batch, config, order) if table is not None else 0
    unordered = sums_dq and (order is Order.ANY_ORDER if table is None else ticket_keys < UNLIMITED)
    cut = divided.cut and config.makes_dkv
    pairs, kv_pairs = problem.batch * problem.heads_q, problem.batch * problem.heads_kv
    q_tiles, kv_tiles = tiles(problem.seq_q, config.block_q), tiles(problem.seq_kv, config.block_kv)
    if table is not None:  # its tiles are those of all batches
        pairs, kv_pairs = problem.heads_q, problem.heads_kv
        q_tiles, kv_tiles = table.q_room, table.kv_room
    rows = q_tiles * config.block_q
    row_terms = 0 if config.makes_row_terms else 4 * pairs * rows
    scratch = Layout.of(
        start_s=row_terms,
        start_dp=row_terms,
        dq_tickets=8 * pairs * q_tiles if takes_tickets else 0,
        piece_tickets=16 * kv_pairs * kv_tiles if cut else 0,
        work_tickets=4 if problem.deterministic and not config.makes_row_terms else 0,
        dq_sums=4 * pairs * rows * config.head_dim if sums_dq else 0,
        dkv_sums=4 * kv_pairs * kv_tiles * config.block_kv * (config.head_dim + config.head_dim_v) if cut else 0,
    )
    terms = scratch.addresses("start_s", "start_dp", "dq_tickets", "piece_tickets", "work_tickets")
    # S starts from -lse in its own units: before the scale, or where a term transforms it, after all of them. A line
    # is added to what it starts from.
    transforming = [term for term in problem.scores if term.transforms]
    line = transforming[0].learning(frozenset()) if len(transforming) == 1 and transforming[0].adds_line else None
    transformed = bool(transforming) and line is None
    score_unit = 1.0 if transformed else problem.scale * LOG2_E
    kept_weight = _kept_weight(problem)
    dqk_scale = problem.scale * kept_weight / config.weight_factor
    row_term_fields = {
        "out": Address("out"),
        "dout": Address("dout"),
        **strides("out", "dout"),
        **row_fields(problem),
        "lse_factor": -LOG2_E / score_unit,
        "start_bias": math.log2(config.weight_factor) / score_unit,
        "dp_factor": -1.0 / kept_weight,
    }
    preprocess = {
        **row_term_fields,
        **terms,
        "dq_sums": scratch.address("dq_sums") if unordered else None,
        "piece_ticket_count": 2 * kv_pairs * kv_tiles,
        "rows": rows,
        "row_floats": config.head_dim,
        "block_q": config.block_q,
    }
    if line is not None:
        of_terms = term_params(problem, precise=False)
        preprocess |= {name: value for name, value in of_terms.items() if name in line.operands}
    scale_log2 = unit_of(problem) * LOG2_E
    main = {
        "q_map": Map("q", config.block_q),
        "k_map": Map("k", config.block_kv),
        "v_map": Map("v", config.block_kv),
        "dout_map": Map("dout", config.block_q),
        "dk_map": Map("dk", 16) if "k" in wants else None,
        "dv_map": Map("dv", 16) if "v" in wants else None,
        **terms,
        **scratch.addresses("dq_sums", "dkv_sums"),
        **({"dq": Address("dq"), **strides("dq")} if config.makes_dq else {}),
        **division_fields(batch, divided, q_tiles, kv_tiles),
        **term_params(problem, precise=False, backward=True),
        **({"bias_map": Map("bias", config.block_q, shared=True)} if config.bias_stages else {}),
        **tile_map.fields,
        "scale_log2": scale_log2,
        "head_dim": problem.head_dim,
        "order": int(order),
        "walk": int(_walk(batch, divided.cut)),
        "batches_inside": int(_batches_inside(problem)),
        "store_dk": int("k" in wants),
        "store_dv": int("v" in wants),
        "inverse_scale_log2": 1.0 / scale_log2,
        "dqk_scale": dqk_scale,
    }
    if config.makes_row_terms:
        main |= {name: value for name, value in row_term_fields.items() if name != "heads"}
    postprocess = {
        "dq_sums": scratch.address("dq_sums"),
        "dq": Address("dq"),
        **strides("dq", name="{1}_stride"),
        "heads": problem.heads_q,
        "seq_q": problem.seq_q,
        "rows": rows,
        "head_dim": problem.head_dim,
        "row_floats": config.head_dim,
        "scale": dqk_scale,
        "start_s": scratch.address("start_s") if tile_map.is_used else None,
    }
    extents = BATCHED if table is None else packed.PACKED
    main_extents = extents if table is not None else tile_map.extents
    lanes, kernel = _LANES[config.head_dim_v], unit(config, ARCH, problem.scores, main_extents)
    params = tile_map.extents.params(params_for(problem, _MainParams))
    pre_params = _PreprocessParams if line is None else Policy((line,)).params(_PreprocessParams)
    prepare = preprocess_unit(config.element, lanes, config.block_q, extents, line, tile_map.is_used)
    launches = []
    if not config.makes_row_terms:
        launches.append(Launch(prepare, pre_params, preprocess, pairs * q_tiles, EDGE_THREADS))
    if wants & ALL or any(term.learned_tensors and not isinstance(term, Sink) for term in problem.scores):
        launches.append(Launch(kernel, params, main, divided.grid, config.threads, overlap=bool(launches)))
    if unordered:
        post = postprocess_unit(config.element, extents, tile_map.is_used)
        blocks = pairs * rows // EDGE_ROWS
        launches.append(Launch(post, _PostprocessParams, postprocess, blocks, EDGE_THREADS, overlap=True))
    launches += edge_launches(problem, ARCH, scratch.address("start_dp"), rows, 1.0 / kept_weight)
    if table is not None:
        zeroed = packed.unwritten(problem)
        if takes_tickets and any(term.joins_rows for term in problem.scores):
            zeroed |= {"dq"}  # preprocess zeroes rows without weights, and such a logit has a weight in every row
        told = {
            "dq_columns": problem.head_dim,
            "dv_columns": problem.head_dim_v,
            "ticket_keys": ticket_keys,
            **_stored_rows("dq", takes_tickets),
            **_stored_rows("dk", "k" in wants),
            **_stored_rows("dv", "v" in wants),
        }
        launches = [table.told(launch, **told) for launch in launches]
        said = (f"{config}; {divided}, {scratch.bytes / 2**20:.1f} MiB of scratch", packed.summary(problem, table))
        return Program(tuple(launches), scratch, zeroed, said, prepared=(table.prepared,))
    blind = takes_tickets and not _every_tile_sees_keys(problem, config.block_q)
    says = (f"{config}; {divided}, {scratch.bytes / 2**20:.1f} MiB of scratch", *tile_map.summary)
    zeroed = frozenset({"dq"} if blind else ())
    return Program(tuple(launches), scratch, zeroed, says, prepared=tile_map.prepared)


def _kept_weight(problem: Problem) -> float:
    """The factor of the weights that no term drops."""
    return math.prod(term.kept_weight for term in problem.scores)


def _stored_rows(name: str, wanted: bool) -> dict[str, object]:
    """A gradient whose rows are stored one by one at the end of a sequence."""
    return packed.stored_rows(f"{name}_rows", name) if wanted else {}


def _makes_row_terms(problem: Problem, config: Config, target: Target) -> bool:
    """One tile holds all keys, a CTA has room for all of its queries, and all CTAs run at once: these make row terms.

    In a grid of several waves every CTA would wait for its queries anew: 768 pairs of 300 queries and 77 keys take 112
    us that way, and 97 us with a kernel of its own before; 8 pairs of 128, heads of 128, take 11.4 and 12.8 us.
    """
    if not config.writes_dq or problem.batch * problem.heads_kv > target.sms:
        return False
    return max(division.tile_steps(problem, config.block_q, config.block_kv)) <= config.stages


def _has_one_tile(problem: Problem, row: dict[str, Any]) -> bool:
    """One tile holds all keys, and every tile of queries sees some of them."""
    if problem.scores or problem.seq_kv > (128 if row["warpgroups_own_keys"] else 64):
        return False
    return _every_tile_sees_keys(problem, row["block_q"])


def _every_tile_sees_keys(problem: Problem, block_q: int) -> bool:
    if any(term.narrows for term in problem.scores):
        return all(isinstance(term, KnownSpans) and term.every_row_sees for term in problem.scores if term.narrows)
    left, right, offset = problem.band
    first_row, end_row = -(offset + right), problem.seq_kv + left - offset
    last_tile = (problem.seq_q - 1) // block_q * block_q
    return bool(first_row < block_q and end_row > last_tile)


# Tiles of keys up to which waiting for the first and the last at a dQ costs less than zeroing and rounding its sums.
MAX_CLAIMANTS = 16
# Of a packed sequence: others run beside it. 24 sequences of 64 to 2600 tokens: 1393 us, by 16 claimants 1410; 8 of
# 4096: 2891, 2933; 16384 and 100 of 100: 5205, 5156, and 5433 where all claim.
MAX_PACKED_CLAIMANTS = 32
# With more queries than keys the first tile of keys is the last at most of them, which it must load again: all others
# wait for it in the end, unless the L2 cache holds all sums.
MAX_CLAIMED_BYTES = 40 * 2**20
# CTAs per multiprocessor from which tiles that stay together still get out of each other's way. In a grid of one or two
# waves those of a pair are side by side from beginning to end, and take turns at every dQ: 2 x 71/1 heads, 2048 tokens,
# head_dim 64, 1.0 waves: 653 us, freely 466; 4 x 28/4, d128, 1.9 waves: 792, 689; 4 x 32/8, d128, 3.9 waves: 716, 746.
MIN_WAVES_TO_CLAIM = 2.25
# Steps of a CTA from which that costs more than zeroing and rounding the sums.
MIN_STEPS_IN_ANY_ORDER = 32


def _order(problem: Problem, config: Config, divided: division.Division) -> Order:
    if problem.deterministic:
        return Order.KEY_ORDER
    if any(term.narrows and not isinstance(term, KnownSpans | PackedKeep) for term in problem.scores):
        return Order.ANY_ORDER  # how many tiles claim a dQ is not known
    longest = min([problem.seq_kv, *(term.longest for term in problem.scores if isinstance(term, KnownSpans))])
    sums = problem.batch * problem.heads_q * problem.seq_q * config.head_dim * 4
    stay_together = _walk(problem, divided.cut) is Walk.DOWN and divided.waves < MIN_WAVES_TO_CLAIM
    if (
        (stay_together and divided.piece_steps >= MIN_STEPS_IN_ANY_ORDER)
        or longest > MAX_CLAIMANTS * config.block_kv
        or (problem.seq_q > problem.seq_kv and sums > MAX_CLAIMED_BYTES)
    ):
        return Order.ANY_ORDER
    return Order.CLAIM_ORDER


def _packed_order(batch: Problem, divided: division.Division) -> Order:
    """Of packed sequences that take tickets; those of more keys than `_ticket_keys` are added up in any order."""
    if batch.deterministic:
        return Order.KEY_ORDER
    if any(term.narrows for term in batch.scores):
        return Order.ANY_ORDER
    stay_together = _walk(batch, False) is Walk.DOWN and divided.waves < MIN_WAVES_TO_CLAIM
    return Order.ANY_ORDER if stay_together else Order.CLAIM_ORDER


def _ticket_keys(batch: Problem, config: Config, order: Order) -> int:
    """How many keys a packed sequence may have whose tiles take tickets; where none has more, any number."""
    if order is Order.KEY_ORDER:
        return UNLIMITED
    limit = MAX_PACKED_CLAIMANTS * config.block_kv
    return -1 if order is Order.ANY_ORDER else UNLIMITED if batch.seq_kv <= limit else limit


def _walk(problem: Problem, cut: bool) -> Walk:
    """Down where tiles stay together that way, and pieces of them can take turns: kernels/sm90/backward_config.cuh."""
    in_key_order = problem.deterministic
    if isinstance(problem.mask, Causal) and (problem.group > 1 or (in_key_order and cut)):
        return Walk.DOWN
    return Walk.STAIRS if in_key_order else Walk.AROUND


# Fitted to measurements of uncut and cut tiles on an NVIDIA H200.
COSTS = division.Costs(start=2.0, merge=0.5)


def divide(problem: Problem, config: Config, target: Target) -> division.Division:
    """Which pieces the tiles of keys are cut into, and how many runs the (batch, KV head) pairs make."""
    steps = division.tile_steps(problem, config.block_q, config.block_kv)
    costs = COSTS if config.makes_dkv else COSTS._replace(merge=0.0)
    if problem.deterministic and config.makes_dkv:
        costs = costs._replace(turn=1.0)
    if config.makes_row_terms:
        costs = costs._replace(merge=math.inf)  # tiles stay whole
    pairs = problem.batch * problem.heads_kv
    whole = division.divide(steps, pairs, target.sms, costs, _sections(problem, config, target, False))
    if not whole.cut:
        return whole
    return division.divide(steps, pairs, target.sms, costs, _sections(problem, config, target, True))


def _sections(problem: Problem, config: Config, target: Target, cut: bool) -> int | None:
    """Into how many runs the KV heads are divided that are worked on one after another; None: as division.py says.

    Equal tiles: one head per run, since its tiles read the same queries and add to the same dQ. On stairs: several
    heads, since tiles of one head that start together wait for one another; the more tiles, the more heads. Where
    queries see different keys by a tensor, tiles are unequal: most such tensors are causal.
    """
    walk = _walk(problem, cut)
    if walk is Walk.STAIRS:
        kv_tiles = tiles(problem.seq_kv, config.block_kv)
        share = 1 / 6 if kv_tiles < 8 else 1 / 3 if kv_tiles < 16 else 2 / 3  # of the L2 cache; measured
        return kv_head_sections(problem, target, 2, share)
    keep = packed_term(problem)
    unequal = isinstance(problem.mask, Causal) or (keep is not None and not keep.rows_alike)
    return None if unequal else problem.batch * problem.heads_kv


def _batches_inside(problem: Problem) -> bool:
    """Whether the batches of a KV head are side by side: they share a staged bias, or may hide different keys."""
    return any(term.narrows or (isinstance(term, StagedBias) and "batch" in term.over) for term in problem.scores)


def _only(config: Config, wants: Wants) -> Config:
    """The config of a kernel that makes no gradient but these; dK and dV share their products."""
    wants_dq, wants_dkv = "q" in wants, bool(wants & {"k", "v"})
    return replace(config, writes_dq=config.writes_dq and wants_dq, makes_dq=wants_dq, makes_dkv=wants_dkv)


# What a search varies of the configs that ship.
SEARCHED = {"block_q": (64, 128), "stages": (1, 2, 3, 4), "ds_stages": (1, 2)}
