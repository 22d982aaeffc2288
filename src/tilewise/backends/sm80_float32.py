"""float32 on every NVIDIA GPU from sm_80 on: kernels/sm80/float32_forward.cuh. Part of the backend `sm80`.

Products of TF32 parts on tensor cores: three make one of float32 ("exact"), or one does ("tf32"). Loads, masks and
schedule are those of the 16-bit kernels.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

from ..jit import Unit, cpp_literal, layout_asserts, params_struct
from ..masks import Causal
from ..target import Target
from . import fused_rules as rules
from . import sm80_shared
from .fused import LOG2_E, BoundForward, bound_forward, head_sections, query_tiles, shape_params
from .fused_rules import class_of
from .score_policy import scores_type
from .sm80_shared import COMPILED, ForwardLaunch, Strided, is_gated

if TYPE_CHECKING:
    from ..problem import Problem
    from .fused import ForwardRun, Tensor

_PLAN_BYTES = 36  # a warp
_PRECISIONS = ("exact", "tf32")


@dataclass(frozen=True, slots=True)
class Config:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm80/float32_config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm80::Float32Config"

    exact: bool
    head_dim: int
    head_dim_v: int
    warps: int
    row_tiles: int
    block_kv: int
    stages: int
    softcap: bool
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
        """`sizeof(Float32Smem<config>)`; the generated source asserts it."""
        tile = 4 * self.block_kv * (self.head_dim + self.head_dim_v)
        whole = 4 * self.block_q * self.head_dim + self.stages * tile + self.warps * _PLAN_BYTES + 3 * 32 + 20
        return -(-whole // 1024) * 1024

    @property
    def name(self) -> str:
        kind = f"{kind_name(self.exact)}_d{self.head_dim}x{self.head_dim_v}"
        shape = f"q{self.block_q}_kv{self.block_kv}_w{self.warps}_s{self.stages}_x{self.ctas_per_sm}"
        return f"fa2_forward_{kind}_{shape}{'_softcap' * self.softcap}"

    @property
    def label(self) -> str:
        """What a search varies, in a few words."""
        return f"{self.block_q}x{self.block_kv} {self.warps} warps S{self.stages} x{self.ctas_per_sm}"

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.warps} warps"
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        return f"{products_text(self.exact)}, {tile}, {stages}, {self.smem_bytes / 1024:.0f} KiB shared"

    def fits(self, target: Target) -> bool:
        return sm80_shared.fits(self.smem_bytes, self.ctas_per_sm, target)


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first."""
    exact, capped = problem.precision == "exact", problem.softcap > 0
    found = (_config(row, exact, capped) for row in _table()[class_of(problem)])
    return [config for config in found if config.fits(target)]


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Every config that may run: tiles that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a thread holds; whether the compiler keeps to it, its log tells.
    """
    classes = class_of(problem)
    exact, capped = problem.precision == "exact", problem.softcap > 0
    found = []
    for warps, row_tiles, block_kv, stages, ctas in product((4, 8), (1, 2), (16, 32, 48, 64), (1, 2), (1, 2, 3)):
        row = {"head_dims": classes, "warps": warps, "row_tiles": row_tiles, "block_kv": block_kv}
        config = _config(row | {"stages": stages, "ctas_per_sm": ctas}, exact, capped)
        scores = block_kv * (1 + exact) // 2
        held = row_tiles * (max(scores, block_kv // 2 + 16 * (1 + exact)) + classes[1] // 2)
        whole = block_kv % (4 * warps) == 0
        if whole and config.fits(target) and held + 32 <= config.register_limit:
            found.append(config)
    return found


def notices(problem: Problem) -> list[str]:
    exact = problem.precision == "exact"
    error = "as of plain float32 arithmetic" if exact else "inputs and weights keep 11 bits"
    said = [f"float32 by {products_text(exact)}: relative error about {'6e-7' if exact else '4e-4'}, {error}"]
    return [*said, *rules.zero_filled(problem)]


def all_units() -> list[Unit]:
    """Every kernel this module may launch on the named targets, one GPU of each size of shared memory."""
    units: dict[str, Unit] = {}
    for target in COMPILED:
        for row in (row for rows in _table().values() for row in rows):
            for exact, softcap in product((True, False), repeat=2):
                config = _config(row, exact, softcap)
                if config.fits(target):
                    kernel = unit(config, target.arch)
                    units[kernel.label] = kernel
    return list(units.values())


@functools.cache
def unit(config: Config, arch: str) -> Unit:
    source = f"""#include "sm80/float32_forward.cuh"
{layout_asserts(_Params, "tilewise::sm80::Float32Params")}
constexpr tilewise::sm80::Float32Config config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm80::Float32Smem<config>) == {config.smem_bytes}, "Config.smem_bytes");
static_assert(config.threads() == {config.threads} && config.block_q() == {config.block_q});
extern "C" __global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
{config.name}(const __grid_constant__ tilewise::sm80::Float32Params params) {{
  tilewise::sm80::float32_forward<config, {scores_type(softcap=config.softcap, precise=True)}>(params);
}}
"""
    return Unit(config.name, source, arch, strict=is_gated(arch), smem_bytes=config.smem_bytes)


_Params = params_struct(
    "Float32Params",
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
    scale=ctypes.c_float,
    scale_log2=ctypes.c_float,
    softcap_in=ctypes.c_float,
)


def bind(q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: Config | None) -> BoundForward:
    """`forward` for tensors with these shapes, strides and device: the kernel is loaded, all but addresses decided."""

    def launch(out: Tensor) -> ForwardRun:
        target = Target.of(q.device)
        chosen = config or configs(problem, target)[0]
        views = {"q": q, "k": k, "v": v, "out": out}
        fixed = {name: Strided.of(view) for name, view in views.items()} | _fixed_params(problem, chosen, target)
        grid = query_tiles(problem, chosen.block_q)
        return ForwardLaunch(unit(chosen, target.arch), _Params, fixed, grid, chosen.threads, q.device.index).run

    return bound_forward(q, problem, launch)


def _fixed_params(problem: Problem, config: Config, target: Target) -> dict[str, Any]:
    scale = problem.softcap or problem.scale
    return {
        **shape_params(problem),
        "heads": problem.heads_q,
        "head_dim": 2 * problem.head_dim,
        "head_dim_v": 2 * problem.head_dim_v,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": head_sections(problem, target, 4),
        "longest_first": int(isinstance(problem.mask, Causal)),
        "scale": scale,
        "scale_log2": scale * LOG2_E,
        "softcap_in": problem.scale / problem.softcap if problem.softcap else 0.0,
    }


def kind_name(exact: bool) -> str:
    return "tf32x3" if exact else "tf32x1"


def products_text(exact: bool) -> str:
    return "3 products of TF32 parts" if exact else "1 product of TF32 parts"


def _config(row: dict[str, Any], exact: bool, softcap: bool) -> Config:
    return Config(
        exact=exact,
        head_dim=row["head_dims"][0],
        head_dim_v=row["head_dims"][1],
        warps=row["warps"],
        row_tiles=row["row_tiles"],
        block_kv=row["block_kv"],
        stages=row["stages"],
        softcap=softcap,
        ctas_per_sm=row["ctas_per_sm"],
    )


@functools.cache
def _table() -> dict[tuple[int, int], list[rules.Row]]:
    """Head-dim class -> rows, best first."""
    return rules.rows_by("sm80", "float32_forward", lambda row: [tuple(row["head_dims"])])
