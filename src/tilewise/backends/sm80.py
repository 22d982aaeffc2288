"""Every NVIDIA GPU from sm_80 on: our FlashAttention-2 kernel, kernels/sm80/forward.cuh, compiled on first use.

mma.sync products, cp.async loads, softmax in registers; masks that are a diagonal band. Compiled for the very GPU it
runs on. Tile shapes come from tables/sm80.json: of the rows for a head-dim class, those whose shared memory fits the
GPU, best first.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import Reason
from ..jit import Unit, cpp_literal, layout_asserts, params_struct, tuned
from ..masks import Causal, Full
from ..problem import Strides
from ..target import Target
from . import fused_rules as rules
from . import sm80_backward, sm80_float32, sm80_float32_backward, sm80_shared
from .fused import (
    BoundBackward,
    BoundForward,
    bound_forward,
    head_sections,
    matrix_bytes,
    query_tiles,
    remembered,
    score_params,
    shape_params,
)
from .fused_rules import class_of, is_float32
from .score_policy import scores_type
from .sm80_shared import COMPILED, ForwardLaunch, Strided, is_gated

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants
    from .fused import ForwardRun, Tensor

LEAST_CAPABILITY = (8, 0)
LEAST_TILE, MOST_TILES = 32, (1 << 31) - 1  # rows of any kernel's tile; CTAs of a grid
_PLAN_BYTES = 36  # a warp


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
        return sm80_shared.register_limit(self.threads, self.ctas_per_sm)

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        tile = matrix_bytes(self.block_kv, self.head_dim) + matrix_bytes(self.block_kv, self.head_dim_v)
        whole = matrix_bytes(self.block_q, self.head_dim) + self.stages * tile + self.warps * _PLAN_BYTES
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
        return sm80_shared.fits(self.smem_bytes, self.ctas_per_sm, target)


AnyConfig = Config | sm80_float32.Config


def why_not(problem: Problem, target: Target) -> list[Reason]:
    dims = (problem.head_dim, problem.head_dim_v)
    narrow = sm80_float32_backward.HEAD_DIM_LIMIT
    tiles = problem.batch * max(
        problem.heads_q * -(-problem.seq_q // LEAST_TILE), problem.heads_kv * -(-problem.seq_kv // LEAST_TILE)
    )
    reasons = rules.reasons(
        rules.no_jit(target),
        (
            target.capability < LEAST_CAPABILITY,
            f"{target.name} is {target.arch}: cp.async and bfloat16 products begin with sm_80",
            "use backend='auto'",
        ),
        rules.other_dtype(problem),
        rules.broken_chunks(problem, 4 if is_float32(problem) else 8),
        rules.wide_heads(problem),
        (
            is_float32(problem) and problem.needs_grad and max(dims) > narrow,
            f"head_dim {max(dims)} is over {narrow}, the most of the float32 backward, which keeps dk and dv in "
            "registers",
            "call it under torch.no_grad(), or use backend='auto'",
        ),
        *rules.other_scores(problem),
        (
            problem.strides is not Strides.ALIGNED,
            f"strides are {problem.strides.value}: copies of 16 bytes need a contiguous last dimension, 16-byte bases "
            "and strides",
            "call .contiguous() on the input that is not",
        ),
        rules.long_sequence(problem),
        (
            tiles > MOST_TILES,
            f"{tiles} tiles of {LEAST_TILE} rows are over {MOST_TILES}, the most of a grid",
            "split the batch",
        ),
        rules.transformed(problem),
    )
    if not reasons and not configs(problem, target):
        room = f"{target.smem_per_block} bytes of shared memory a block on {target.name}"
        reasons.append(Reason(f"no tile of heads of {dims[0]}/{dims[1]} fits the {room}", "use backend='auto'"))
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    if rules.too_wide(problem):
        return []
    if is_float32(problem):
        return sm80_float32.notices(problem)
    entry = _tuned(problem, target)
    return [*([] if entry is None else [tuned.cite(entry)]), *rules.zero_filled(problem)]


def configs(problem: Problem, target: Target) -> list[AnyConfig]:
    """Legal configs, best first: what `tilewise tune` found on this device, then the shipped table's."""
    return tuned.first(_tuned(problem, target), Config, shipped(problem, target))


def shipped(problem: Problem, target: Target) -> list[AnyConfig]:
    """Configs of the table that ships and fit the target, best first.

    A row with smaller tiles than usual may be for problems only that it spreads over the multiprocessors in one wave
    (`one_wave`).
    """
    if rules.too_wide(problem):
        return []
    if is_float32(problem):
        return list(sm80_float32.configs(problem, target))
    classes = class_of(problem)
    capped = problem.softcap > 0
    small, fitting = [], []
    for row in _table()[classes]:
        if capped not in row["softcap"]:
            continue
        config = _config(row, problem.dtype is torch.bfloat16, capped)
        if not config.fits(target):
            continue
        if not row.get("one_wave"):
            fitting.append(config)
        elif query_tiles(problem, config.block_q) <= target.sms * config.ctas_per_sm:
            small.append(config)
    return [*small, *fitting]


def search_space(problem: Problem, target: Target) -> list[AnyConfig]:
    """Every config that may run: tiles that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a thread holds; whether the compiler keeps to it, its log tells.
    """
    if rules.too_wide(problem):
        return []
    if is_float32(problem):
        return list(sm80_float32.search_space(problem, target))
    return list(_runnable(class_of(problem), problem.dtype is torch.bfloat16, problem.softcap > 0, target))


@functools.lru_cache(maxsize=16)
def _runnable(classes: tuple[int, int], bf16: bool, softcap: bool, target: Target) -> dict[Config, None]:
    head_dim, head_dim_v = classes
    found: dict[Config, None] = {}
    for warps, row_tiles, block_kv in product((2, 4, 8), (1, 2), (32, 64, 96, 128)):
        for stages, q_in_registers, ctas in product((1, 2), (False, True), (1, 2, 3, 4)):
            row = {"head_dims": classes, "warps": warps, "row_tiles": row_tiles, "block_kv": block_kv}
            row |= {"stages": stages, "q_in_registers": q_in_registers, "ctas_per_sm": ctas}
            config = _config(row, bf16, softcap)
            held = row_tiles * (block_kv // 2 + head_dim_v // 2 + q_in_registers * head_dim // 4)
            if config.fits(target) and held + 24 <= config.register_limit and block_kv % (4 * warps) == 0:
                found[config] = None
    return found


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    return rules.tuning_key(problem, masked=not isinstance(problem.mask, Full))


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    """The entry of the user's own table for this device."""
    if rules.too_wide(problem) or is_float32(problem):
        return None
    classes, facts = class_of(problem), (problem.dtype is torch.bfloat16, problem.softcap > 0)

    def is_legal(config: Config) -> bool:
        """One that a sweep would try, or any that ships for such heads and fits, whatever lengths it is for."""
        ships = any(config == _config(row, *facts) for row in _table()[classes] if facts[1] in row["softcap"])
        return config in _runnable(classes, *facts, target) or (ships and config.fits(target))

    return tuned.find("sm80", target.name, *tuning_key(problem), Config, is_legal)


def details(problem: Problem, target: Target, config: AnyConfig) -> list[str]:
    """How the launch fills the GPU, for `explain`."""
    work = query_tiles(problem, config.block_q)
    together = target.sms * config.ctas_per_sm
    order = "longest first" if isinstance(problem.mask, Causal) else "in order"
    registers = f"at most {config.register_limit} registers a thread"
    occupancy = f"{config.ctas_per_sm} a multiprocessor, {config.warps * config.ctas_per_sm} warps"
    return [f"{work} CTAs of {config.threads} threads {order}, {registers}; {occupancy}; {work / together:.1f} waves"]


def all_units() -> list[Unit]:
    """Every kernel this backend may launch on the named targets, one GPU of each size of shared memory."""
    units: dict[str, Unit] = {}
    for target in COMPILED:
        for row in (row for rows in _table().values() for row in rows):
            for bf16, softcap in product((True, False), row["softcap"]):
                config = _config(row, bf16, softcap)
                if config.fits(target):
                    kernel = unit(config, target.arch)
                    units[kernel.label] = kernel
    float32 = [*sm80_float32.all_units(), *sm80_float32_backward.all_units()]
    return [*units.values(), *sm80_backward.all_units(), *float32]


@functools.cache
def unit(config: AnyConfig, arch: str = "") -> Unit:
    """The kernel for an architecture, by default that of the current GPU."""
    arch = arch or Target.of("cuda").arch
    if isinstance(config, sm80_float32.Config):
        return sm80_float32.unit(config, arch)
    source = f"""#include "sm80/forward.cuh"
{layout_asserts(_Params, "tilewise::sm80::Params")}
constexpr tilewise::sm80::Config config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm80::Smem<config>) == {config.smem_bytes}, "Config.smem_bytes");
static_assert(config.threads() == {config.threads} && config.block_q() == {config.block_q});
extern "C" __global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
{config.name}(const __grid_constant__ tilewise::sm80::Params params) {{
  tilewise::sm80::forward<config, {scores_type(softcap=config.softcap)}>(params);
}}
"""
    return Unit(config.name, source, arch, strict=is_gated(arch), smem_bytes=config.smem_bytes)


def forward(
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: AnyConfig | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    key = (problem, config, q.stride(), k.stride(), v.stride(), q.device)
    return remembered(_bound, key, lambda: bind(q, k, v, problem, config))(q, k, v, bias)


_bound: dict[tuple[Any, ...], BoundForward] = {}


def bind(q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: AnyConfig | None) -> BoundForward:
    """`forward` for tensors with these shapes, strides and device: the kernel is loaded, all but addresses decided."""
    if is_float32(problem):
        return sm80_float32.bind(q, k, v, problem, config if isinstance(config, sm80_float32.Config) else None)
    assert not isinstance(config, sm80_float32.Config)

    def launch(out: Tensor) -> ForwardRun:
        target = Target.of(q.device)
        chosen = config or _first(configs(problem, target))
        views = {"q": q, "k": k, "v": v, "out": out}
        fixed = {name: Strided.of(view) for name, view in views.items()} | _fixed_params(problem, chosen, target)
        grid = query_tiles(problem, chosen.block_q)
        return ForwardLaunch(unit(chosen, target.arch), _Params, fixed, grid, chosen.threads, q.device.index).run

    return bound_forward(q, problem, launch)


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    problem: Problem,
    config: Any = None,
    bias: Tensor | None = None,
    wants: Wants = (True, True, True),
) -> Grads:
    """dq, dk and dv of bhsd views, with the strides of `empty_like` of their inputs; None where not wanted."""
    key = (problem, config, q.device, q.stride(), k.stride(), v.stride())
    bound = remembered(_bound_backward, key, lambda: bind_backward(problem, config))
    return bound(dout, dlse, q, k, v, out, lse, wants)


_bound_backward: dict[tuple[Any, ...], BoundBackward] = {}


def bind_backward(problem: Problem, config: Any = None) -> BoundBackward:
    """A config that is the forward's leaves the choice to the backward."""
    if is_float32(problem):
        own = config if isinstance(config, sm80_float32_backward.BackwardConfig) else None
        return sm80_float32_backward.bind(problem, own)
    chosen = config if isinstance(config, sm80_backward.BackwardConfig) else None
    return sm80_backward.bind(problem, chosen)


_Params = params_struct(
    "Params",
    q=Strided,
    k=Strided,
    v=Strided,
    out=Strided,
    lse=ctypes.c_void_p,
    batch=ctypes.c_int,
    heads=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    head_dim=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    q_tiles=ctypes.c_int,
    sections=ctypes.c_int,
    longest_first=ctypes.c_int,
    scale_log2=ctypes.c_float,
    softcap_in=ctypes.c_float,
)


def _fixed_params(problem: Problem, config: Config, target: Target) -> dict[str, Any]:
    return {
        **shape_params(problem),
        **score_params(problem),
        "heads": problem.heads_q,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": head_sections(problem, target, 2),
        "longest_first": int(isinstance(problem.mask, Causal)),
    }


def _first(found: list[AnyConfig]) -> Config:
    """The config of a 16-bit problem."""
    config = found[0]
    assert isinstance(config, Config)
    return config


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
