"""float32 on every NVIDIA GPU from sm_80 on: kernels/sm80/float32_forward.cuh. Part of the backend `sm80`.

Products of TF32 parts on tensor cores: three make one of float32 ("exact"), or one does ("tf32"). Loads, masks and
schedule are those of the 16-bit kernels.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import json
import math
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..jit import ArgumentsPerThread, Launch, Unit, cpp_literal, function_for, layout_asserts, params_struct
from ..masks import Causal
from ..target import TARGETS, Target
from . import empty_out
from .fused import BoundForward, bound_forward, head_dim_class, head_sections
from .sm80_backward import COMPILED, Strided, is_gated

if TYPE_CHECKING:
    from ..problem import Problem

LOG2_E = math.log2(math.e)
_RESERVED_SMEM = 1024  # of a multiprocessor's shared memory, for each CTA on it
_REGISTERS = 65536
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
        """What a thread may have if `ctas_per_sm` are to share a multiprocessor."""
        return min(_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8, 255)

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
        """Whether `ctas_per_sm` of it find their shared memory on one multiprocessor of the target."""
        together = self.ctas_per_sm * (self.smem_bytes + _RESERVED_SMEM)
        return self.smem_bytes <= target.smem_per_block and together <= target.smem_per_sm


def configs(problem: Problem, target: Target) -> list[Config]:
    """Configs of the table that fit the target, best first."""
    exact, capped = problem.precision == "exact", problem.softcap > 0
    found = (_config(row, exact, capped) for row in _table()[head_dim_class(problem.head_dim, problem.head_dim_v)])
    return [config for config in found if config.fits(target)]


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Every config that may run: tiles that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a thread holds; whether the compiler keeps to it, its log tells.
    """
    classes = head_dim_class(problem.head_dim, problem.head_dim_v)
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
    head_dim, head_dim_v = head_dim_class(problem.head_dim, problem.head_dim_v)
    if (head_dim, head_dim_v) == (problem.head_dim, problem.head_dim_v):
        return said
    dims = f"{problem.head_dim}/{problem.head_dim_v}"
    return [*said, f"heads of {dims} run in the {head_dim}/{head_dim_v} kernel, zero-filled"]


def all_units() -> list[Unit]:
    """Every kernel this module may launch on the named targets, one GPU of each size of shared memory."""
    units: dict[str, Unit] = {}
    for target in (TARGETS[name] for name in COMPILED):
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
  tilewise::sm80::float32_forward<config>(params);
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


def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, config: Config | None) -> BoundForward:
    """`forward` for tensors with these shapes, strides and device: the kernel is loaded, all but addresses decided."""
    if problem.empty:
        return bound_forward(q, problem, None)
    out = empty_out(q, problem.head_dim_v, problem.layout)
    return bound_forward(q, problem, _Launch(q, k, v, out, problem, config).run)


class _Launch:
    """All that a call does not have to decide again: one per problem, strides and device. Safe to share by threads."""

    __slots__ = ("_arguments", "_device", "_launch")

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        problem: Problem,
        config: Config | None,
    ) -> None:
        target = Target.of(q.device)
        config = config or configs(problem, target)[0]
        self._device = q.device.index
        function = function_for(unit(config, target.arch), self._device)
        self._launch = Launch(function, (_work(problem, config), 1, 1), (config.threads, 1, 1), config.smem_bytes)
        views = {"q": q, "k": k, "v": v, "out": out}
        strided = {name: strides_in_halves(tensor) for name, tensor in views.items()}
        self._arguments = ArgumentsPerThread(_Params, strided | _fixed_params(problem, config, target))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        arguments = self._arguments.mine()
        params = arguments.params
        params.q.data, params.k.data, params.v.data = q.data_ptr(), k.data_ptr(), v.data_ptr()
        params.out.data = out.data_ptr()
        params.lse = None if lse is None else lse.data_ptr()
        self._launch(torch._C._cuda_getCurrentRawStream(self._device), arguments)


def strides_in_halves(tensor: torch.Tensor) -> Strided:
    """The strides of a float32 tensor for copies that count 16-bit numbers."""
    return Strided(None, *(2 * stride for stride in tensor.stride()[:3]))


def _fixed_params(problem: Problem, config: Config, target: Target) -> dict[str, Any]:
    left, right, offset = problem.mask.band(problem.seq_q, problem.seq_kv)  # type: ignore[attr-defined]
    scale = problem.softcap or problem.scale
    return {
        "batch": problem.batch,
        "heads": problem.heads_q,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "head_dim": 2 * problem.head_dim,
        "head_dim_v": 2 * problem.head_dim_v,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": head_sections(problem, target),
        "longest_first": int(isinstance(problem.mask, Causal)),
        "scale": scale,
        "scale_log2": scale * LOG2_E,
        "softcap_in": problem.scale / problem.softcap if problem.softcap else 0.0,
    }


def _work(problem: Problem, config: Config) -> int:
    """Output tiles."""
    return problem.batch * problem.heads_q * -(-problem.seq_q // config.block_q)


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
def _table() -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Head-dim class -> rows, best first."""
    text = importlib.resources.files("tilewise").joinpath("tables/sm80.json").read_text()
    table: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in json.loads(text)["float32_forward"]:
        table.setdefault(tuple(row["head_dims"]), []).append(row)
    return table
