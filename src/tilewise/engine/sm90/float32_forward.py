"""The float32 forward of Hopper: operands split into 16-bit parts, kernels/sm90/float32_forward.cuh.

Four launches: a split of q, k and v into parts of fp16, attention with them, and behind each what serves the rows that
the device refused for their range: a split into three parts of bf16, and attention with those. The latter two end at
once when nothing was refused, and only the device knows.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from .. import rules
from ..extents import forward_fields
from ..params import LOG2_E, forward_order, matrix_bytes, mirror, query_tiles, tiles
from ..policy import params_for, term_params, unit_of
from ..program import SCRATCH, Address, Launch, Layout, Map, Program, Stride, strides
from ..source import Kernel, kernel_unit
from .shared import ForwardConfig

if TYPE_CHECKING:
    from ...jit import Unit
    from ...problem import Problem
    from ...target import Target

ARCH = "sm_90a"
# Largest log2 of max |q| * max |k| * scale * sqrt(head_dim) that parts of fp16 serve: their error in a logit is about
# 2^-42 of it.
_MAX_LOGIT_BOUND = 20
MAX_OPERANDS = 4  # of a split: the backward's has dout too
SPLIT_THREADS = 256
SPLIT_SMEM = 4 * (2 + 128 + 256)
SPLITS_PER_SM = 8
FACT_BYTES = 8
_PLAN_BYTES = 80


@dataclass(frozen=True, slots=True)
class Config(ForwardConfig):
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/float32_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::float32::Config"
    ctas_per_sm: ClassVar[int] = 1

    parts: int
    head_dim: int
    head_dim_v: int
    consumers: int
    block_kv: int
    k_stages: int
    v_stages: int
    value_columns: int
    has_terms: bool
    pingpong: bool

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        q = self.consumers * matrix_bytes(64, self.head_dim)
        k = self.k_stages * matrix_bytes(self.block_kv, self.head_dim)
        v = self.v_stages * matrix_bytes(self.block_kv, self.head_dim_v)
        barriers = 8 * (self.consumers + 2 * self.k_stages + 2 * self.v_stages)
        return -(-(self.parts * (q + k + v) + barriers + _PLAN_BYTES) // 1024) * 1024

    @property
    def name(self) -> str:
        shape = f"{self.heads_name}_q{self.block_q}_kv{self.block_kv}_k{self.k_stages}v{self.v_stages}"
        return f"float32_{PART_NAMES[self.parts]}_{shape}"

    def __str__(self) -> str:
        terms = self.parts * (self.parts + 1) // 2
        operands = f"{terms} product{'s' * (terms > 1)} of {'fp16' if self.parts < 3 else 'bf16'} parts"
        return f"{operands}, {ForwardConfig.__str__(self)}"


PART_NAMES = {1: "fp16x1", 2: "fp16x3", 3: "bf16x6"}


def takes(problem: Problem) -> bool:
    return rules.is_float32(problem)


def configs(problem: Problem, target: Target) -> list[Config]:
    """The config of the kernel for ordinary ranges; `wide_range` is the one behind it.

    Where gradients will be wanted there is only the latter, whose scores are those of the backward, bit by bit.
    """
    parts = 3 if problem.needs_grad else 2 if problem.precision == "exact" else 1
    return [_config(parts, rules.class_of(problem), bool(problem.scores))]


def wide_range(config: Config) -> Config:
    """The config of the kernel for the rows that `config`'s kernel refuses."""
    return _config(3, (config.head_dim, config.head_dim_v), config.has_terms)


def notices(problem: Problem) -> list[str]:
    if problem.needs_grad:
        found = ["float32 by 6 products of bf16 parts, forward and backward: error as of plain float32 arithmetic"]
        if problem.precision != "exact":
            found.append(f"precision {problem.precision} serves calls without gradients alone: with them all is exact")
        return found
    said = {
        "exact": "float32 by 3 products of fp16 parts: relative error about 4e-7, as of plain float32 arithmetic",
        "tf32": "float32 by 1 product of fp16 parts: inputs and weights keep 11 bits, relative error about 4e-4",
    }[problem.precision]
    range_note = "rows whose range fp16 cannot hold run by 6 products of bf16 parts, as the device finds them"
    return [said, range_note]


@functools.cache
def split_unit(parts: int) -> Unit:
    """The kernel that splits operands."""
    return kernel_unit(
        f"split_float32_{parts}",
        "sm90/float32_split.cuh",
        f"split<{parts}>",
        _SplitParams,
        ARCH,
        namespace="sm90::float32",
        smem="SplitSmem",
        smem_bytes=SPLIT_SMEM,
        threads=SPLIT_THREADS,
        checks=(f"split_threads == {SPLIT_THREADS}", f"sizeof(TileFact) == {FACT_BYTES}"),
    )


_SplitParams = mirror("sm90/float32_config.cuh", "SplitParams")
_Params = mirror("sm90/float32_config.cuh", "Params")

unit = Kernel("sm90/float32_forward.cuh", "forward", _Params, "Smem", precise=True, namespace="sm90::float32").unit


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that is split: its shape, and the rows that share a TileFact."""

    name: str
    shape: tuple[int, int, int, int]
    rows: int

    @property
    def tiles(self) -> int:
        return self.shape[0] * self.shape[1] * tiles(self.shape[2], self.rows)

    def parts_bytes(self, parts: int) -> int:
        return 2 * parts * math.prod(self.shape)

    def map(self, parts: int) -> Map:
        """Boxes of `rows` x 64 columns of a contiguous (parts * batch, heads, seq, dim)."""
        dtype = torch.bfloat16 if parts == 3 else torch.float16
        return Map(f"{SCRATCH}{self.name}_parts", self.rows, (parts * self.shape[0], *self.shape[1:]), dtype)


def operands(problem: Problem, rows_q: int, rows_kv: int) -> dict[str, Operand]:
    """q, k, v and dout."""
    q, kv = (problem.batch, problem.heads_q, problem.seq_q), (problem.batch, problem.heads_kv, problem.seq_kv)
    dims = problem.head_dim, problem.head_dim_v
    return {
        "q": Operand("q", (*q, dims[0]), rows_q),
        "k": Operand("k", (*kv, dims[0]), rows_kv),
        "v": Operand("v", (*kv, dims[1]), rows_kv),
        "dout": Operand("dout", (*q, dims[1]), rows_q),
    }


def split_launch(
    problem: Problem, target: Target, split: list[Operand], parts: int, facts: str, **gates: Address | None
) -> Launch:
    """Splits operands into `parts` in the regions NAME_parts, with their facts in `facts`.format(NAME)."""
    first = [sum(operand.tiles for operand in split[:i]) for i in range(len(split) + 1)]
    last = [first[-1]] * (MAX_OPERANDS - len(split))
    total = first[-1]
    fields = {
        "x": tuple(Address(operand.name) for operand in split),
        "batch_stride": tuple(Stride(operand.name, 0) for operand in split),
        "head_stride": tuple(Stride(operand.name, 1) for operand in split),
        "seq_stride": tuple(Stride(operand.name, 2) for operand in split),
        "parts": tuple(Address(f"{SCRATCH}{operand.name}_parts") for operand in split),
        "facts": tuple(Address(SCRATCH + facts.format(operand.name)) for operand in split),
        **gates,
        "heads": tuple(operand.shape[1] for operand in split),
        "seq": tuple(operand.shape[2] for operand in split),
        "dim": tuple(operand.shape[3] for operand in split),
        "rows": tuple(operand.rows for operand in split),
        "first_tile": (*first[:-1], *last),
        "tiles": total,
        "batch": problem.batch,
        "aligned": int(problem.strides.value == "aligned"),
    }
    grid = min(total, SPLITS_PER_SM * target.sms)
    return Launch(split_unit(parts), _SplitParams, fields, grid, SPLIT_THREADS, overlap=True)


def program(problem: Problem, target: Target, config: Config) -> Program:
    chain = (config,) if config.parts == 3 else (config, wide_range(config))
    split = {one.parts: list(operands(problem, 64, one.block_kv).values())[:3] for one in chain}
    # The parts of bf16 take the place of those of fp16, which are no longer read by then; the facts stay.
    sizes = {"any_refused": 4, "refused": 4 * split[config.parts][0].tiles}
    for one in chain:
        sizes |= {f"{operand.name}_facts{one.parts}": FACT_BYTES * operand.tiles for operand in split[one.parts]}
    sizes |= {f"{operand.name}_parts": operand.parts_bytes(3) for operand in split[config.parts]}
    scratch = Layout.of(**sizes)
    refusals = scratch.address("any_refused") if len(chain) > 1 else None
    launches: list[Launch] = []
    for one in chain:
        # The parts of bf16 are for what those of fp16 were refused for.
        gates = {"wanted": refusals} if one.parts == 3 else {"refusals": refusals}
        facts = f"{{}}_facts{one.parts}"
        launches.append(split_launch(problem, target, split[one.parts], one.parts, facts, **gates))
        fields = {
            **{f"{operand.name}_map": operand.map(one.parts) for operand in split[one.parts]},
            **{f"{operand.name}_facts": scratch.address(facts.format(operand.name)) for operand in split[one.parts]},
            "any_refused": refusals,
            "refused": scratch.address("refused"),
            "v": Address("v"),
            "out": Address("out"),
            **strides("v", "out"),
            **forward_fields(problem, one.block_q, forward_order(problem, target, 2 * one.parts)),
            "max_exponents": max_exponents(problem),
            **term_params(problem, precise=True),
            "scale_log2": unit_of(problem) * LOG2_E,
            "lse_scale": unit_of(problem),
        }
        grid = query_tiles(problem, one.block_q)
        kernel = unit(one, ARCH, problem.scores)
        launches.append(Launch(kernel, params_for(problem, _Params), fields, grid, one.threads, overlap=True))
    grid_text = f"{query_tiles(problem, config.block_q)} CTAs of {config.threads} threads"
    held = f"before it a kernel that splits q, k and v, {scratch.bytes / 2**20:.1f} MiB of scratch"
    says = f"{grid_text}, {config.register_limit} registers per thread; {held}"
    return Program(tuple(launches), scratch, summary=(says,))


def max_exponents(problem: Problem) -> int:
    """What the exponents of the largest |q| and |k|, rounded down, may add up to: both may be nearly twice as large."""
    spread = math.log2(abs(problem.scale) * math.sqrt(problem.head_dim))
    return _MAX_LOGIT_BOUND - 2 - math.ceil(spread - 1e-9)


def _config(parts: int, classes: tuple[int, int], has_terms: bool) -> Config:
    rows = rules.rows("sm90_float32", "forward", classes, has_terms)
    (row,) = [row for row in rows if row["parts"] == parts]  # docs/kernels/float32.md has the registers of each
    return rules.from_row(Config, row, pingpong=row["consumers"] == 2)


# What a search varies of the config that ships.
SEARCHED = {"block_kv": (32, 64, 128), "k_stages": (1, 2, 3, 4), "v_stages": (1, 2, 3, 4)}
