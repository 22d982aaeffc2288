"""The 16-bit forward of every NVIDIA GPU from sm_80 on: kernels/sm80/forward.cuh, FlashAttention-2's way.

mma.sync products, cp.async loads, softmax in registers. Compiled for the very GPU it runs on. Tile shapes come from
tables/sm80.json: of the rows for a head-dim class, those whose shared memory fits the GPU, best first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ...jit import tuned
from ...masks import Causal, Full
from .. import rules
from ..params import (
    FLOAT,
    INT,
    LOG2_E,
    POINTER,
    Strided,
    forward_order,
    matrix_bytes,
    query_tiles,
    shape_params,
    struct,
    tiles,
)
from ..policy import Policy, params_for, term_params, unit_of
from ..program import Address, Launch, Program, View
from ..rules import class_of
from ..source import kernel_unit
from . import shared

if TYPE_CHECKING:
    from ...errors import Reason
    from ...jit import Unit
    from ...problem import Problem
    from ...scores import Term
    from ...target import Target


_OTHER_REGISTERS = 56  # of a thread beside its arrays, measured on kernels with a softcap


@dataclass(frozen=True, slots=True)
class Config:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::Config"

    bf16: bool
    head_dim: int
    head_dim_v: int
    warps: int
    row_tiles: int
    block_kv: int
    stages: int
    softcap: bool
    q_in_registers: bool
    ctas_per_sm: int

    @property
    def block_q(self) -> int:
        return 16 * self.row_tiles * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def register_limit(self) -> int:
        return shared.register_limit(self.threads, self.ctas_per_sm)

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
        kind = f"{'bf16' if self.bf16 else 'fp16'}_d{self.head_dim}x{self.head_dim_v}"
        shape = f"q{self.block_q}_kv{self.block_kv}_w{self.warps}_s{self.stages}_x{self.ctas_per_sm}"
        return f"fa2_forward_{kind}_{shape}{'_qr' * self.q_in_registers}{'_softcap' * self.softcap}"

    @property
    def label(self) -> str:
        """What a search varies, in a few words."""
        kept = " Q kept" if self.q_in_registers else ""
        return f"{self.block_q}x{self.block_kv} {self.warps} warps S{self.stages} x{self.ctas_per_sm}{kept}"

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.warps} warps"
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        return f"{tile}, {stages}, {self.smem_bytes / 1024:.0f} KiB shared"

    def fits(self, target: Target) -> bool:
        return shared.fits(self.smem_bytes, self.ctas_per_sm, target)


def why_not(problem: Problem, target: Target) -> list[Reason]:
    return []


def notices(problem: Problem, target: Target) -> list[str]:
    entry = _tuned(problem, target)
    return [*([] if entry is None else [tuned.cite(entry)]), *rules.zero_filled(problem)]


def configs(problem: Problem, target: Target) -> list[Config]:
    """Legal configs, best first: what `tilewise tune` found on this device, then the shipped table's."""
    return tuned.first(_tuned(problem, target), Config, shipped(problem, target))


def shipped(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that ships and fit the target, best first.

    A row with smaller tiles than usual may be for problems only that it spreads over the multiprocessors in one wave
    (`one_wave`).
    """
    classes = class_of(problem)
    capped = _roomy(problem)
    small, fitting = [], []
    for row in _table()[classes]:
        if capped not in row["softcap"]:
            continue
        config = _config(row, problem.dtype is torch.bfloat16, capped)
        if not config.fits(target):
            continue
        needed = config.held_registers + _OTHER_REGISTERS + rules.forward_registers(problem)
        if rules.forward_registers(problem) and needed > config.register_limit:
            config = replace(config, block_kv=min(config.block_kv, 32))
        if not row.get("one_wave"):
            fitting.append(config)
        elif query_tiles(problem, config.block_q) <= target.sms * config.ctas_per_sm:
            small.append(config)
    if fitting and not all(term.elementwise for term in problem.scores):  # for terms whose kernels spill after all
        fitting += [replace(config, block_kv=32) for config in fitting if config.block_kv > 32]
    return [*small, *fitting]


def _roomy(problem: Problem) -> bool:
    """The tiles of kernels with a softcap, which leave registers."""
    return not rules.fits_plain_tiles(problem, "sm80")


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Every config that may run: tiles that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a thread holds; whether the compiler keeps to it, its log tells.
    """
    return list(_runnable(class_of(problem), problem.dtype is torch.bfloat16, _roomy(problem), target))


@functools.lru_cache(maxsize=16)
def _runnable(classes: tuple[int, int], bf16: bool, softcap: bool, target: Target) -> dict[Config, None]:
    found: dict[Config, None] = {}
    for warps, row_tiles, block_kv in product((2, 4, 8), (1, 2), (32, 64, 96, 128)):
        for stages, q_in_registers, ctas in product((1, 2), (False, True), (1, 2, 3, 4)):
            row = {"head_dims": classes, "warps": warps, "row_tiles": row_tiles, "block_kv": block_kv}
            row |= {"stages": stages, "q_in_registers": q_in_registers, "ctas_per_sm": ctas}
            config = _config(row, bf16, softcap)
            room = config.register_limit - config.held_registers
            if config.fits(target) and room >= 24 and block_kv % (4 * warps) == 0:
                found[config] = None
    return found


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    return rules.tuning_key(problem, masked=not isinstance(problem.mask, Full))


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    """The entry of the user's own table for this device."""
    classes, facts = class_of(problem), (problem.dtype is torch.bfloat16, _roomy(problem))

    def is_legal(config: Config) -> bool:
        """One that a sweep would try, or any that ships for such heads and fits, whatever lengths it is for."""
        ships = any(config == _config(row, *facts) for row in _table()[classes] if facts[1] in row["softcap"])
        return config in _runnable(classes, *facts, target) or (ships and config.fits(target))

    return tuned.find("sm80", target.name, *tuning_key(problem), Config, is_legal)


def units() -> list[Unit]:
    """Every kernel of this family for the named targets, one GPU of each size of shared memory."""
    found: dict[str, Unit] = {}
    for target in shared.COMPILED:
        for row in (row for rows in _table().values() for row in rows):
            for bf16, softcap in product((True, False), row["softcap"]):
                config = _config(row, bf16, softcap)
                if config.fits(target):
                    kernel = unit(config, target.arch)
                    found[kernel.label] = kernel
    return list(found.values())


@functools.cache
def unit(config: Config, arch: str, terms: tuple[Term, ...] | None = None) -> Unit:
    """The kernel for these terms of the scores, by default those that the config is made for."""
    policy = Policy.of(terms, config, False)
    return kernel_unit(
        config.name + policy.suffix,
        "sm80/forward.cuh",
        "forward<config, Policy>",
        _Params,
        "tilewise::sm80::Params",
        arch,
        config=config,
        policy=policy,
        smem="Smem<config>",
        smem_bytes=config.smem_bytes,
        bounds="config.threads(), config.ctas_per_sm",
        checks=(f"config.threads() == {config.threads} && config.block_q() == {config.block_q}",),
        strict=shared.is_gated(arch),
    )


_Params = struct(
    "Params",
    (Strided, "q k v out"),
    (POINTER, "lse"),
    (INT, "batch heads heads_per_kv seq_q seq_k head_dim head_dim_v band_first_shift band_end_shift"),
    (INT, "q_tiles sections longest_first"),
    (FLOAT, "scale_log2 softcap_in"),
)


def program(problem: Problem, target: Target, config: Config) -> Program:
    fields = {
        **forward_fields(problem, target, config.block_q, 2),
        **term_params(problem, precise=False),
        "scale_log2": unit_of(problem) * LOG2_E,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
    }
    kernel = unit(config, target.arch, problem.scores)
    return forward_program(problem, target, config, Launch(kernel, params_for(problem, _Params), fields, 0, 0))


def forward_fields(problem: Problem, target: Target, block_q: int, number_bytes: int) -> dict[str, object]:
    """What both forwards of this folder are told alike."""
    return {
        **{name: View(name) for name in ("q", "k", "v", "out")},
        "lse": Address("lse") if problem.needs_lse or problem.needs_grad else None,
        **shape_params(problem),
        "heads": problem.heads_q,
        "q_tiles": tiles(problem.seq_q, block_q),
        **forward_order(problem, target, number_bytes),
    }


def forward_program(problem: Problem, target: Target, config: Any, launch: Launch) -> Program:
    """One CTA per tile of queries."""
    work = query_tiles(problem, config.block_q)
    together = target.sms * config.ctas_per_sm
    order = "longest first" if isinstance(problem.mask, Causal) else "in order"
    registers = f"at most {config.register_limit} registers per thread"
    occupancy = f"{config.ctas_per_sm} per multiprocessor, {config.warps * config.ctas_per_sm} warps"
    waves = f"{work / together:.1f} waves" if together else "waves unknown"
    says = f"{work} CTAs of {config.threads} threads {order}, {registers}; {occupancy}; {waves}"
    return Program((launch._replace(grid=work, threads=config.threads),), says=(says,))


def _config(row: dict[str, Any], bf16: bool, softcap: bool) -> Config:
    return Config(
        bf16=bf16,
        head_dim=row["head_dims"][0],
        head_dim_v=row["head_dims"][1],
        warps=row["warps"],
        row_tiles=row["row_tiles"],
        block_kv=row["block_kv"],
        stages=row["stages"],
        softcap=softcap,
        q_in_registers=row["q_in_registers"],
        ctas_per_sm=row["ctas_per_sm"],
    )


@functools.cache
def _table() -> dict[tuple[int, int], list[rules.Row]]:
    """Head-dim class -> rows, best first."""
    return rules.rows_by("sm80", "forward", lambda row: [tuple(row["head_dims"])])
