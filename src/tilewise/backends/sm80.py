"""Every NVIDIA GPU from sm_80 on: our FlashAttention-2 kernel, kernels/sm80/forward.cuh, compiled on first use.

mma.sync products, cp.async loads, softmax in registers; masks that are a diagonal band. Compiled for the very GPU it
runs on. Tile shapes come from tables/sm80.json: of the rows for a head-dim class, those whose shared memory fits the
GPU, best first.
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

from ..errors import Reason
from ..jit import (
    ArgumentsPerThread,
    Launch,
    Unit,
    cpp_literal,
    function_for,
    layout_asserts,
    params_struct,
    tuned,
)
from ..masks import Causal, Full, Window
from ..problem import Strides, dtype_name
from ..target import TARGETS, Target
from . import empty_out, sm80_backward, sm80_float32, sm80_float32_backward
from .fused import BoundBackward, BoundForward, bound_forward, head_dim_class, head_sections, remembered

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants

LOG2_E = math.log2(math.e)
LEAST_CAPABILITY = (8, 0)
MOST_ROWS = 1 << 28  # of a sequence: row + band limits stay within 32 bits
LEAST_TILE, MOST_TILES = 32, (1 << 31) - 1  # rows of any kernel's tile; CTAs of a grid
HEAD_DIM_LIMIT = 256
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_RESERVED_SMEM = 1024  # of a multiprocessor's shared memory, for each CTA on it
_REGISTERS = 65536
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
        """What a thread may have if `ctas_per_sm` are to share a multiprocessor."""
        return min(_REGISTERS // (self.threads * self.ctas_per_sm) // 8 * 8, 255)

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        tile = _matrix_bytes(self.block_kv, self.head_dim) + _matrix_bytes(self.block_kv, self.head_dim_v)
        whole = _matrix_bytes(self.block_q, self.head_dim) + self.stages * tile + self.warps * _PLAN_BYTES
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
        """Whether `ctas_per_sm` of it find their shared memory on one multiprocessor of the target."""
        together = self.ctas_per_sm * (self.smem_bytes + _RESERVED_SMEM)
        return self.smem_bytes <= target.smem_per_block and together <= target.smem_per_sm


AnyConfig = Config | sm80_float32.Config


def why_not(problem: Problem, target: Target) -> list[Reason]:
    reasons = []

    def refuse(when: bool, what: str, remedy: str) -> None:
        if when:
            reasons.append(Reason(what, remedy))

    dims = (problem.head_dim, problem.head_dim_v)
    refuse(
        not target.has_jit,
        "cuda.bindings, which builds and launches our kernels, is not installed",
        "pip install 'tilewise[cuda]'",
    )
    refuse(
        target.capability < LEAST_CAPABILITY,
        f"{target.name} is {target.arch}: cp.async and bfloat16 products begin with sm_80",
        "use backend='auto'",
    )
    refuse(
        problem.dtype not in _DTYPES,
        f"dtype {dtype_name(problem.dtype)} is none of bfloat16, float16, float32",
        "cast q, k and v",
    )
    chunk = 4 if _is_float32(problem) else 8
    refuse(
        any(dim % chunk for dim in dims),
        f"head_dim {dims[0]}, v {dims[1]}: not multiples of {chunk} (16 bytes)",
        f"pad the heads with zeros to a multiple of {chunk}",
    )
    refuse(max(dims) > HEAD_DIM_LIMIT, f"head_dim {max(dims)} is over {HEAD_DIM_LIMIT}", "use backend='auto'")
    refuse(
        _is_float32(problem) and problem.needs_grad and max(dims) > sm80_float32_backward.HEAD_DIM_LIMIT,
        f"head_dim {max(dims)} is over {sm80_float32_backward.HEAD_DIM_LIMIT}, the most of the float32 backward, which "
        "keeps dk and dv in registers",
        "call it under torch.no_grad(), or use backend='auto'",
    )
    refuse(
        not isinstance(problem.mask, Full | Causal | Window),
        f"mask {problem.mask} is not a diagonal band",
        "use Full, Causal or Window, or backend='auto'",
    )
    refuse(
        problem.dropout > 0,
        f"dropout {problem.dropout:g} is not 0, and the kernel draws no random numbers",
        "use one of PyTorch's backends, or drop the dropout",
    )
    refuse(
        problem.scale < 0 and not problem.softcap,
        f"scale {problem.scale:g} is negative: the running maximum needs it positive",
        "negate q and the scale",
    )
    refuse(
        problem.strides is not Strides.ALIGNED,
        f"strides are {problem.strides.value}: copies of 16 bytes need a contiguous last dimension, 16-byte bases and "
        "strides",
        "call .contiguous() on the input that is not",
    )
    refuse(
        max(problem.seq_q, problem.seq_kv) > MOST_ROWS,
        f"sequence of {max(problem.seq_q, problem.seq_kv)} is over {MOST_ROWS}",
        "split the sequence",
    )
    tiles = problem.batch * max(
        problem.heads_q * -(-problem.seq_q // LEAST_TILE), problem.heads_kv * -(-problem.seq_kv // LEAST_TILE)
    )
    refuse(
        tiles > MOST_TILES,
        f"{tiles} tiles of {LEAST_TILE} rows are over {MOST_TILES}, the most of a grid",
        "split the batch",
    )
    refuse(
        problem.transformed,
        "inside a functorch transform (vmap, jvp): a kernel launch cannot be transformed",
        "use backend='reference' there",
    )
    if not reasons and not configs(problem, target):
        room = f"{target.smem_per_block} bytes of shared memory a block on {target.name}"
        reasons.append(Reason(f"no tile of heads of {dims[0]}/{dims[1]} fits the {room}", "use backend='auto'"))
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT:
        return []
    if _is_float32(problem):
        return sm80_float32.notices(problem)
    entry = _tuned(problem, target)
    said = [] if entry is None else [tuned.cite(entry)]
    head_dim, head_dim_v = head_dim_class(problem.head_dim, problem.head_dim_v)
    if (head_dim, head_dim_v) == (problem.head_dim, problem.head_dim_v):
        return said
    dims = f"{problem.head_dim}/{problem.head_dim_v}"
    return [*said, f"heads of {dims} run in the {head_dim}/{head_dim_v} kernel, zero-filled"]


def configs(problem: Problem, target: Target) -> list[AnyConfig]:
    """Legal configs, best first: what `tilewise tune` found on this device, then the shipped table's."""
    if _is_float32(problem):
        return shipped(problem, target)
    entry = _tuned(problem, target)
    found = shipped(problem, target)
    return found if entry is None else list(dict.fromkeys([Config(**entry["config"]), *found]))


def shipped(problem: Problem, target: Target) -> list[AnyConfig]:
    """Configs of the table that ships and fit the target, best first.

    A row with smaller tiles than usual may be for problems only that it spreads over the multiprocessors in one wave
    (`one_wave`).
    """
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT:
        return []
    if _is_float32(problem):
        return list(sm80_float32.configs(problem, target))
    classes = head_dim_class(problem.head_dim, problem.head_dim_v)
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
        elif _work(problem, config) <= target.sms * config.ctas_per_sm:
            small.append(config)
    return [*small, *fitting]


def search_space(problem: Problem, target: Target) -> list[AnyConfig]:
    """Every config that may run: tiles that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a thread holds; whether the compiler keeps to it, its log tells.
    """
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT:
        return []
    if _is_float32(problem):
        return list(sm80_float32.search_space(problem, target))
    head_dim, head_dim_v = classes = head_dim_class(problem.head_dim, problem.head_dim_v)
    found: list[AnyConfig] = []
    for warps, row_tiles, block_kv in product((2, 4, 8), (1, 2), (32, 64, 96, 128)):
        for stages, q_in_registers, ctas in product((1, 2), (False, True), (1, 2, 3, 4)):
            row = {"head_dims": classes, "warps": warps, "row_tiles": row_tiles, "block_kv": block_kv}
            row |= {"stages": stages, "q_in_registers": q_in_registers, "ctas_per_sm": ctas}
            config = _config(row, problem.dtype is torch.bfloat16, problem.softcap > 0)
            held = row_tiles * (block_kv // 2 + head_dim_v // 2 + q_in_registers * head_dim // 4)
            if config.fits(target) and held + 24 <= config.register_limit and block_kv % (4 * warps) == 0:
                found.append(config)
    return found


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    """What a measured config depends on: the kind of kernel, and the sizes that decide how it fills the GPU."""
    dims = head_dim_class(problem.head_dim, problem.head_dim_v)
    kind = {"head_dims": list(dims), "masked": not isinstance(problem.mask, Full), "softcap": problem.softcap > 0}
    pairs = problem.batch * problem.heads_q
    sizes = {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv, "batch x heads": pairs}
    return kind | {"dtype": dtype_name(problem.dtype)}, sizes


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    """The entry of the user's own table for this device, if its config still has the fields of ours."""
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT or _is_float32(problem):
        return None
    entry = tuned.find("sm80", target.name, *tuning_key(problem))
    return entry if entry is not None and set(entry["config"]) == set(Config.__slots__) else None


def details(problem: Problem, target: Target, config: AnyConfig) -> list[str]:
    """How the launch fills the GPU, for `explain`."""
    work = _work(problem, config)
    together = target.sms * config.ctas_per_sm
    order = "longest first" if isinstance(problem.mask, Causal) else "in order"
    registers = f"at most {config.register_limit} registers a thread"
    occupancy = f"{config.ctas_per_sm} a multiprocessor, {config.warps * config.ctas_per_sm} warps"
    return [f"{work} CTAs of {config.threads} threads {order}, {registers}; {occupancy}; {work / together:.1f} waves"]


def all_units() -> list[Unit]:
    """Every kernel this backend may launch on the named targets, one GPU of each size of shared memory."""
    units: dict[str, Unit] = {}
    for target in compiled_targets():
        for row in (row for rows in _table().values() for row in rows):
            for bf16, softcap in product((True, False), row["softcap"]):
                config = _config(row, bf16, softcap)
                if config.fits(target):
                    kernel = unit(config, target.arch)
                    units[kernel.label] = kernel
    float32 = [*sm80_float32.all_units(), *sm80_float32_backward.all_units()]
    return [*units.values(), *sm80_backward.all_units(), *float32]


def compiled_targets() -> list[Target]:
    """Named targets that stand for the others: one of each size of shared memory."""
    return [TARGETS[name] for name in sm80_backward.COMPILED]


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
  tilewise::sm80::forward<config>(params);
}}
"""
    return Unit(config.name, source, arch, strict=sm80_backward.is_gated(arch), smem_bytes=config.smem_bytes)


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: AnyConfig | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    key = (problem, config, q.stride(), k.stride(), v.stride(), q.device)
    return remembered(_bound, key, lambda: bind(q, k, v, problem, config))(q, k, v, bias)


_bound: dict[tuple[Any, ...], BoundForward] = {}


def bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, config: AnyConfig | None) -> BoundForward:
    """`forward` for tensors with these shapes, strides and device: the kernel is loaded, all but addresses decided."""
    if _is_float32(problem):
        return sm80_float32.bind(q, k, v, problem, config if isinstance(config, sm80_float32.Config) else None)
    assert not isinstance(config, sm80_float32.Config)
    if problem.empty:
        return bound_forward(q, problem, None)
    out = empty_out(q, problem.head_dim_v, problem.layout)
    return bound_forward(q, problem, _Launch(q, k, v, out, problem, config).run)


def backward(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    config: Any = None,
    bias: torch.Tensor | None = None,
    wants: Wants = (True, True, True),
) -> Grads:
    """dq, dk and dv of bhsd views, with the strides of `empty_like` of their inputs; None where not wanted."""
    key = (problem, config, q.device, q.stride(), k.stride(), v.stride())
    bound = remembered(_bound_backward, key, lambda: bind_backward(problem, config))
    return bound(dout, dlse, q, k, v, out, lse, wants)


_bound_backward: dict[tuple[Any, ...], BoundBackward] = {}


def bind_backward(problem: Problem, config: Any = None) -> BoundBackward:
    """A config that is the forward's leaves the choice to the backward."""
    if _is_float32(problem):
        own = config if isinstance(config, sm80_float32_backward.BackwardConfig) else None
        return sm80_float32_backward.bind(problem, own)
    chosen = config if isinstance(config, sm80_backward.BackwardConfig) else None
    return sm80_backward.bind(problem, chosen)


_Params = params_struct(
    "Params",
    q=sm80_backward.Strided,
    k=sm80_backward.Strided,
    v=sm80_backward.Strided,
    out=sm80_backward.Strided,
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
        config = config or _first(configs(problem, target))
        self._device = q.device.index
        function = function_for(unit(config, target.arch), self._device)
        self._launch = Launch(function, (_work(problem, config), 1, 1), (config.threads, 1, 1), config.smem_bytes)
        views = {"q": q, "k": k, "v": v, "out": out}
        strided = {name: sm80_backward.Strided.of(tensor) for name, tensor in views.items()}
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


def _fixed_params(problem: Problem, config: Config, target: Target) -> dict[str, Any]:
    left, right, offset = problem.mask.band(problem.seq_q, problem.seq_kv)  # type: ignore[attr-defined]
    capped = problem.softcap > 0
    return {
        "batch": problem.batch,
        "heads": problem.heads_q,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": head_sections(problem, target),
        "longest_first": int(isinstance(problem.mask, Causal)),
        "scale_log2": (problem.softcap if capped else problem.scale) * LOG2_E,
        "softcap_in": 2 * LOG2_E * problem.scale / problem.softcap if capped else 0.0,
    }


def _work(problem: Problem, config: AnyConfig) -> int:
    """Output tiles."""
    return problem.batch * problem.heads_q * -(-problem.seq_q // config.block_q)


def _is_float32(problem: Problem) -> bool:
    return problem.dtype is torch.float32


def _first(found: list[AnyConfig]) -> Config:
    """The config of a 16-bit problem."""
    config = found[0]
    assert isinstance(config, Config)
    return config


def _matrix_bytes(rows: int, columns: int) -> int:
    """Panels of 64 columns, 128 bytes a row."""
    return -(-columns // 64) * rows * 128


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
def _table() -> dict[tuple[int, int], list[dict[str, Any]]]:
    """Head-dim class -> rows, best first."""
    text = importlib.resources.files("tilewise").joinpath("tables/sm80.json").read_text()
    table: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for row in json.loads(text)["forward"]:
        table.setdefault(tuple(row["head_dims"]), []).append(row)
    return table
