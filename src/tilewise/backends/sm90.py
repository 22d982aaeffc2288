"""Hopper (sm_90a): our own forward kernel, kernels/sm90/forward.cuh, compiled on first use.

TMA loads, wgmma products, warp-specialised; masks that are a diagonal band. What it refuses, it refuses by name in
`why_not`. Tile shapes come from the measured table tables/sm90.json, by head-dim class and kind of mask.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.resources
import json
import math
import threading
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..errors import Reason
from ..jit import (
    ArgumentsPerThread,
    Launch,
    TensorMap,
    Unit,
    cpp_literal,
    function_for,
    layout_asserts,
    params_struct,
    rows_map,
    tuned,
)
from ..jit import launch as driver
from ..masks import Causal, Full, Window
from ..problem import Strides, dtype_name
from ..target import Target
from . import empty_out, sm90_backward, sm90_float32, sm90_float32_backward
from .fused import BoundBackward, BoundForward, bound_forward, head_dim_class, matrix_bytes, remembered

if TYPE_CHECKING:
    from ..problem import Problem
    from . import Grads, Wants

ARCH = "sm_90a"
LOG2_E = math.log2(math.e)
MOST_ROWS = 1 << 28  # of a sequence: row + band limits stay within 32 bits
HEAD_DIM_LIMIT = 256
MASK_KINDS = ("full", "causal", "window")  # as enum MaskKind counts them
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_COUNTERS = 1 << 14
_COMBINE_ROWS = 4  # a CTA, a warp each
# Of the keys' tiles, before splitting them among CTAs pays for putting the parts together, and of a part.
_FEWEST_TO_SPLIT, _FEWEST_OF_A_PART = 8, 2
# What `search_space` tries: widths of a product that kernels/sm90/wgmma.cuh has, and depths of the rings.
_BLOCKS_KV = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
_STAGES = ((1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 4))


@dataclass(frozen=True, slots=True)
class Config:
    """Compile-time choices; field for field the C++ aggregate of kernels/sm90/config.cuh."""

    cpp_type: ClassVar[str] = "tilewise::sm90::Config"

    bf16: bool
    head_dim: int
    head_dim_v: int
    consumers: int
    block_kv: int
    k_stages: int
    v_stages: int
    mask: int
    softcap: bool
    pingpong: bool
    ctas_per_sm: int
    split: bool

    @property
    def block_q(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def launch_registers(self) -> int:
        """What every thread has when the kernel starts, before setmaxnreg moves some to the consumers."""
        return min(65536 // (self.threads * self.ctas_per_sm) // 8 * 8, 240)

    @property
    def consumer_registers(self) -> int:
        """What setmaxnreg leaves a consumer thread with."""
        launched = self.launch_registers
        given = 32 if launched < 168 else 40
        return min((launched * (self.consumers + 1) - given) // self.consumers // 8 * 8, 240)

    @property
    def smem_bytes(self) -> int:
        """`sizeof(Smem<config>)`; the generated source asserts it."""
        panels = -(-self.head_dim_v // 64)
        q = self.consumers * matrix_bytes(64, self.head_dim)
        out = self.consumers * (panels if self.head_dim <= 128 else (panels + 1) // 2) * matrix_bytes(64, 64)
        k = self.k_stages * matrix_bytes(self.block_kv, self.head_dim)
        v = self.v_stages * matrix_bytes(self.block_kv, self.head_dim_v)
        barriers = 8 * (4 * self.consumers + 2 * self.k_stages + 3 * self.v_stages + 2 * 2)
        plans = 2 * (9 + 2 * self.consumers + 1) * 4
        return -(-(q + k + v + out + barriers + plans) // 1024) * 1024

    @property
    def name(self) -> str:
        kind = f"{'bf16' if self.bf16 else 'fp16'}_d{self.head_dim}x{self.head_dim_v}_{MASK_KINDS[self.mask]}"
        shape = f"q{self.block_q}_kv{self.block_kv}_k{self.k_stages}v{self.v_stages}"
        extras = f"{'_softcap' if self.softcap else ''}{'_turns' if self.pingpong else ''}"
        extras += "_split" if self.split else ""
        return f"forward_{kind}_{shape}{extras}{f'_x{self.ctas_per_sm}' if self.ctas_per_sm > 1 else ''}"

    @property
    def label(self) -> str:
        """What a search varies, in a few words."""
        turns = " turns" if self.pingpong else ""
        return f"{self.block_q}x{self.block_kv} K{self.k_stages}V{self.v_stages} x{self.ctas_per_sm}{turns}"

    def __str__(self) -> str:
        tile = f"tile {self.block_q} x {self.block_kv}, {self.consumers} + 1 warpgroups"
        return f"{tile}, stages K {self.k_stages} V {self.v_stages}, {self.smem_bytes / 1024:.0f} KiB shared"


AnyConfig = Config | sm90_float32.Config


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
        target.capability != (9, 0),
        f"{target.name} is {target.arch}, not sm_90: wgmma and TMA in this form exist on Hopper only",
        "use backend='auto'",
    )
    refuse(
        problem.dtype not in _DTYPES,
        f"dtype {dtype_name(problem.dtype)} is none of bfloat16, float16, float32",
        "cast q, k and v",
    )
    refuse(
        _is_float32(problem) and problem.needs_grad and max(dims) > sm90_float32_backward.HEAD_DIM_LIMIT,
        f"head_dim {max(dims)}: the float32 backward, whose tiles have three parts, takes heads to "
        f"{sm90_float32_backward.HEAD_DIM_LIMIT}",
        "call it under torch.no_grad(), or use backend='auto'",
    )
    refuse(
        any(dim % 8 for dim in dims),
        f"head_dim {dims[0]}, v {dims[1]}: not multiples of 8 (16 bytes)",
        "pad the heads with zeros to a multiple of 8",
    )
    refuse(max(dims) > HEAD_DIM_LIMIT, f"head_dim {max(dims)} is over {HEAD_DIM_LIMIT}", "use backend='auto'")
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
        problem.strides is not Strides.ALIGNED and not (_is_float32(problem) and problem.strides is Strides.UNALIGNED),
        f"strides are {problem.strides.value}: TMA needs a contiguous last dimension, 16-byte bases and strides",
        "call .contiguous() on the input that is not",
    )
    refuse(
        max(problem.seq_q, problem.seq_kv) > MOST_ROWS,
        f"sequence of {max(problem.seq_q, problem.seq_kv)} is over {MOST_ROWS}",
        "split the sequence",
    )
    refuse(
        problem.transformed,
        "inside a functorch transform (vmap, jvp): a kernel launch cannot be transformed",
        "use backend='reference' there",
    )
    return reasons


def notices(problem: Problem, target: Target) -> list[str]:
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT:
        return []
    if _is_float32(problem):
        return sm90_float32.notices(problem)
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
    """Configs of the table that ships, best first.

    A row of the table may be for some lengths of keys only (`least_seq_kv`, `most_seq_kv`), or, with smaller tiles than
    usual, only for problems that it spreads over the multiprocessors in one wave (`one_wave`), or, dividing the keys
    too (`split`), for so few queries that a wave has room for several parts.
    """
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT:
        return []
    if _is_float32(problem):
        return list(sm90_float32.configs(problem))
    kind = _mask_kind(problem)
    classes = head_dim_class(problem.head_dim, problem.head_dim_v)
    softcap = problem.softcap > 0
    folded = _folded(problem)
    rows = _table()[classes, MASK_KINDS[kind], softcap]
    split, small, fitting = [], [], []
    for row in rows:
        config = _config(row, classes, problem.dtype is torch.bfloat16, kind, softcap)
        if config.split:
            if _splits(folded, config, target) > 1:
                split.append(config)
        elif not row.get("one_wave"):
            if row.get("least_seq_kv", 0) <= problem.seq_kv <= row.get("most_seq_kv", MOST_ROWS):
                fitting.append(config)
        elif _work(folded, config) <= target.sms:
            small.append(config)
    return [*split, *sorted(small, key=lambda config: config.block_q), *fitting]


def search_space(problem: Problem, target: Target) -> list[AnyConfig]:
    """Every config that may run: tiles that wgmma has, stages that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a consumer holds; whether the compiler keeps to it, its log tells.
    """
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT:
        return []
    if _is_float32(problem):
        return list(sm90_float32.configs(problem))
    kind, classes = _mask_kind(problem), head_dim_class(problem.head_dim, problem.head_dim_v)
    smem_per_block = target.smem_per_block or 227 * 1024
    found: list[AnyConfig] = []
    for consumers, block_kv, (k_stages, v_stages) in product((1, 2, 3, 4), _BLOCKS_KV, _STAGES):
        for pingpong, ctas in product((False, True), (1, 2)):
            row = {"consumers": consumers, "block_kv": block_kv, "k_stages": k_stages, "v_stages": v_stages}
            row |= {"pingpong": pingpong, "ctas_per_sm": ctas}
            config = _config(row, classes, problem.dtype is torch.bfloat16, kind, problem.softcap > 0)
            # 1 KiB of a multiprocessor's shared memory goes to each CTA for the driver's own use.
            fits = config.smem_bytes <= smem_per_block and ctas * (config.smem_bytes + 1024) <= smem_per_block + 1024
            held = 3 * block_kv // 4 + classes[1] // 2
            if fits and held < config.consumer_registers and (consumers > 1 or not pingpong):
                found.append(config)
    return found


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    """What a measured config depends on: the kind of kernel, and the sizes that decide how it fills the GPU."""
    dims = head_dim_class(problem.head_dim, problem.head_dim_v)
    kind = {"head_dims": list(dims), "mask": MASK_KINDS[_mask_kind(problem)], "softcap": problem.softcap > 0}
    pairs = problem.batch * problem.heads_q
    sizes = {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv, "batch x heads": pairs}
    return kind | {"dtype": dtype_name(problem.dtype)}, sizes


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    """The entry of the user's own table for this device, if its config still has the fields of ours."""
    if max(problem.head_dim, problem.head_dim_v) > HEAD_DIM_LIMIT or _is_float32(problem):
        return None
    entry = tuned.find("sm90", target.name, *tuning_key(problem))
    return entry if entry is not None and set(entry["config"]) == set(Config.__slots__) else None


def details(problem: Problem, target: Target, config: AnyConfig) -> list[str]:
    """How the launch fills the GPU, for `explain`."""
    if isinstance(config, sm90_float32.Config):
        lines = sm90_float32.details(problem, config)
        return [*lines, *sm90_float32_backward.details(problem, target)] if problem.needs_grad else lines
    folded = _folded(problem)
    tiles, splits = _work(folded, config), _splits(folded, config, target)
    work = tiles * splits
    ctas = min(work, target.sms * config.ctas_per_sm)
    order = "longest first" if _is_dynamic(folded, work, ctas) else "in a fixed order"
    grid = f"{ctas} CTAs of {config.threads} threads, {config.launch_registers} registers a thread"
    parts = f" times {splits} parts of their keys, put together by a second kernel" if config.split else ""
    said = [f"{grid}; {tiles} query tiles{parts} {order}, {work / ctas:.1f} waves"]
    if folded is not problem:
        said.append(f"the {problem.group} query heads of a KV head share tiles, if their strides let them")
    return said


def all_units() -> list[Unit]:
    """Every kernel this backend may launch."""
    units = {}
    for (classes, kind, softcap), rows in _table().items():
        for row, bf16 in product(rows, (True, False)):
            config = _config(row, classes, bf16, MASK_KINDS.index(kind), softcap)
            units[config.name] = unit(config)
    parts = [combine_unit(True), combine_unit(False)]
    float32 = [*sm90_float32.all_units(), *sm90_float32_backward.all_units()]
    return [*units.values(), *parts, *float32, *sm90_backward.all_units()]


@functools.cache
def unit(config: AnyConfig) -> Unit:
    if isinstance(config, sm90_float32.Config):
        return sm90_float32.unit(config)
    source = f"""#include "sm90/forward.cuh"
{layout_asserts(_Params, "tilewise::sm90::Params")}
constexpr tilewise::sm90::Config config = {cpp_literal(config)};
static_assert(sizeof(tilewise::sm90::Smem<config>) == {config.smem_bytes}, "Config.smem_bytes");
extern "C" __global__ void __launch_bounds__(config.threads(), config.ctas_per_sm)
{config.name}(const __grid_constant__ tilewise::sm90::Params params) {{
  tilewise::sm90::forward<config>(params);
}}
"""
    return Unit(config.name, source, ARCH, smem_bytes=config.smem_bytes)


@functools.cache
def combine_unit(bf16: bool) -> Unit:
    """The kernel that puts the parts of a split forward together."""
    name = f"combine_{'bf16' if bf16 else 'fp16'}"
    source = f"""#include "sm90/combine.cuh"
{layout_asserts(_CombineParams, "tilewise::sm90::CombineParams")}
static_assert(tilewise::sm90::combine_rows == {_COMBINE_ROWS});
extern "C" __global__ void __launch_bounds__({32 * _COMBINE_ROWS})
{name}(const __grid_constant__ tilewise::sm90::CombineParams params) {{
  tilewise::sm90::combine<{str(bf16).lower()}>(params);
}}
"""
    return Unit(name, source, ARCH)


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
        return sm90_float32.bind(q, k, v, problem, config if isinstance(config, sm90_float32.Config) else None)
    assert not isinstance(config, sm90_float32.Config)
    if problem.empty:
        return bound_forward(q, problem, None)
    out = empty_out(q, problem.head_dim_v, problem.layout)
    return bound_forward(q, problem, _launch(q, k, v, out, problem, config).run)


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, problem: Problem, config: Config | None
) -> _Launch | _SplitLaunch:
    target = Target.of(q.device)
    config = config or _first(configs(problem, target))
    folded = _folded(problem)
    if folded is not problem and _lies_folded(q) and _lies_folded(out):
        rows = (folded.batch, folded.heads_q, folded.seq_q)
        q, out, problem = q.view(*rows, folded.head_dim), out.view(*rows, folded.head_dim_v), folded
    return (_SplitLaunch if config.split else _Launch)(q, k, v, out, problem, config, target)


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
        own = config if isinstance(config, sm90_float32_backward.GradConfig) else None
        return sm90_float32_backward.bind(problem, own)
    chosen = config if isinstance(config, sm90_backward.BackwardConfig) else None
    return sm90_backward.bind(problem, chosen)


_Params = params_struct(
    "Params",
    q_map=TensorMap,
    k_map=TensorMap,
    v_map=TensorMap,
    out_map=TensorMap,
    v=ctypes.c_void_p,
    v_batch_stride=ctypes.c_longlong,
    v_head_stride=ctypes.c_longlong,
    v_seq_stride=ctypes.c_longlong,
    lse=ctypes.c_void_p,
    partial_out=ctypes.c_void_p,
    work_counter=ctypes.c_void_p,
    batch=ctypes.c_int,
    heads=ctypes.c_int,
    heads_per_kv=ctypes.c_int,
    seq_q=ctypes.c_int,
    seq_k=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    band_first_shift=ctypes.c_int,
    band_end_shift=ctypes.c_int,
    q_tiles=ctypes.c_int,
    sections=ctypes.c_int,
    longest_first=ctypes.c_int,
    splits=ctypes.c_int,
    scale_log2=ctypes.c_float,
    softcap_in=ctypes.c_float,
)

_CombineParams = params_struct(
    "CombineParams",
    partial_out=ctypes.c_void_p,
    partial_lse=ctypes.c_void_p,
    out=ctypes.c_void_p,
    batch_stride=ctypes.c_longlong,
    head_stride=ctypes.c_longlong,
    seq_stride=ctypes.c_longlong,
    lse=ctypes.c_void_p,
    rows=ctypes.c_int,
    heads=ctypes.c_int,
    seq_q=ctypes.c_int,
    head_dim_v=ctypes.c_int,
    splits=ctypes.c_int,
)


class _Launch:
    """All that a call does not have to decide again: one per problem, strides and device. Safe to share by threads.

    Tensors are only asked for their addresses: q and out may have been folded when this was made.
    """

    __slots__ = ("_arguments", "_device", "_dynamic", "_k", "_launch", "_out", "_q", "_v")

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        problem: Problem,
        config: Config,
        target: Target,
    ) -> None:
        self._q, self._k, self._v = rows_map(q, 64), rows_map(k, config.block_kv), rows_map(v, config.block_kv)
        self._out = rows_map(out, 64)
        work = _work(problem, config) * _splits(problem, config, target)
        ctas = min(work, target.sms * config.ctas_per_sm)
        self._device = q.device.index
        self._launch = Launch(
            function_for(unit(config), self._device),
            (ctas, 1, 1),
            (config.threads, 1, 1),
            config.smem_bytes,
            overlap_previous=True,
        )
        self._dynamic = _is_dynamic(problem, work, ctas)
        self._arguments = ArgumentsPerThread(_Params, _fixed_params(problem, config, target, v))

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        arguments = self._arguments.mine()
        params = arguments.params
        self._fill(params, q, k, v)
        params.out_map = self._out.at(out.data_ptr())
        params.lse = None if lse is None else lse.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._dynamic:
            params.work_counter = _work_counter(self._device, stream)
        self._launch(stream, arguments)

    def _fill(self, params: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        value = v.data_ptr()
        params.q_map = self._q.at(q.data_ptr())
        params.k_map = self._k.at(k.data_ptr())
        params.v_map = self._v.at(value)
        params.v = value


class _SplitLaunch(_Launch):
    """Two kernels: parts of the keys into float32 scratch, then the whole of them."""

    __slots__ = ("_combine", "_combine_arguments", "_floats")

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        problem: Problem,
        config: Config,
        target: Target,
    ) -> None:
        super().__init__(q, k, v, out, problem, config, target)
        rows = problem.batch * problem.heads_q * problem.seq_q
        splits = _splits(problem, config, target)
        self._floats = (splits * rows * problem.head_dim_v, splits * rows)
        self._combine = Launch(
            function_for(combine_unit(config.bf16), self._device),
            (-(-rows // _COMBINE_ROWS), 1, 1),
            (32 * _COMBINE_ROWS, 1, 1),
            0,
            overlap_previous=True,
        )
        fixed = {
            "batch_stride": out.stride(0),
            "head_stride": out.stride(1),
            "seq_stride": out.stride(2),
            "rows": rows,
            "heads": problem.heads_q,
            "seq_q": problem.seq_q,
            "head_dim_v": problem.head_dim_v,
            "splits": splits,
        }
        self._combine_arguments = ArgumentsPerThread(_CombineParams, fixed)

    def run(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        arguments = self._arguments.mine()
        outs, lses = self._floats
        scratch = q.new_empty(outs + lses, dtype=torch.float32)
        partial_out = scratch.data_ptr()
        partial_lse = partial_out + 4 * outs
        params = arguments.params
        self._fill(params, q, k, v)
        params.partial_out, params.lse = partial_out, partial_lse
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._launch(stream, arguments)
        arguments = self._combine_arguments.mine()
        params = arguments.params
        params.partial_out, params.partial_lse = partial_out, partial_lse
        params.out, params.lse = out.data_ptr(), None if lse is None else lse.data_ptr()
        self._combine(stream, arguments)


class _WorkCounters:
    """Zeroed integers on a device that hand out work; a kernel leaves its own at zero again.

    Launches on one stream follow each other, so a stream has one counter. Inside a graph capture each launch gets its
    own, never reused: the graph may run beside anything.
    """

    def __init__(self, device: int) -> None:
        with driver.capture_relaxed(driver.driver()):
            self._room = torch.zeros(_COUNTERS, dtype=torch.int32, device=f"cuda:{device}")
            torch.cuda.synchronize(device)
        self._free = iter(range(_COUNTERS))
        self._of_stream: dict[int, int] = {}
        self._lock = threading.Lock()

    def take(self, stream: int, capturing: bool) -> int:
        """The address of a counter for the next launch on `stream`; 0 when none is left."""
        if capturing:
            return self._fresh()
        found = self._of_stream.get(stream)
        if found is None:
            found = self._of_stream[stream] = self._fresh()
        return found

    def _fresh(self) -> int:
        with self._lock:
            index = next(self._free, None)
        return 0 if index is None else self._room.data_ptr() + 4 * index


_counters: dict[int, _WorkCounters] = {}


def _work_counter(device: int, stream: int) -> int:
    """A counter for one launch, or 0: the kernel then takes its tiles in a fixed order.

    Why 0 for a first launch under capture: the room would be allocated in the graph's own pool, and die with it.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    counters = _counters.get(device)
    if counters is None:
        if capturing:
            return 0
        counters = _counters[device] = _WorkCounters(device)
    return counters.take(stream, capturing)


def _fixed_params(problem: Problem, config: Config, target: Target, v: torch.Tensor) -> dict[str, Any]:
    left, right, offset = problem.mask.band(problem.seq_q, problem.seq_kv)  # type: ignore[attr-defined]
    capped = problem.softcap > 0
    return {
        "v_batch_stride": v.stride(0),
        "v_head_stride": v.stride(1),
        "v_seq_stride": v.stride(2),
        "batch": problem.batch,
        "heads": problem.heads_q,
        "heads_per_kv": problem.group,
        "seq_q": problem.seq_q,
        "seq_k": problem.seq_kv,
        "head_dim_v": problem.head_dim_v,
        "band_first_shift": offset - left,
        "band_end_shift": offset + right + 1,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": _sections(problem, target),
        "longest_first": int(isinstance(problem.mask, Causal)),
        "splits": _splits(problem, config, target),
        "scale_log2": (problem.softcap if capped else problem.scale) * LOG2_E,
        "softcap_in": 2 * LOG2_E * problem.scale / problem.softcap if capped else 0.0,
    }


def _sections(problem: Problem, target: Target) -> int:
    """How many groups of (batch, head) pairs are worked on one after the other.

    Equal tiles: pairs that share their keys make a section, so that neighbours read the same keys from DRAM once.
    Causal tiles: about as many pairs as the L2 cache holds, since the longest of a section come first and the shortest
    fill the gaps. Rounded down: long tiles of a small last section would have little beside them.
    """
    pairs = problem.batch * problem.heads_q
    if not isinstance(problem.mask, Causal):
        return pairs // problem.group
    kv_bytes = problem.seq_kv * (problem.head_dim + problem.head_dim_v) * 2
    held = max(1, target.l2_bytes // 2 // kv_bytes) * problem.group
    return max(1, pairs // held)


def _work(problem: Problem, config: Config) -> int:
    """Output tiles."""
    return problem.batch * problem.heads_q * -(-problem.seq_q // config.block_q)


def _splits(problem: Problem, config: Config, target: Target) -> int:
    """Into how many parts a split kernel divides the keys: as many as fill one wave and are worth their fixed cost."""
    tiles = -(-problem.seq_kv // config.block_kv)
    if not config.split or tiles < _FEWEST_TO_SPLIT:
        return 1
    return max(1, min(target.sms * config.ctas_per_sm // _work(problem, config), tiles // _FEWEST_OF_A_PART))


def _folded(problem: Problem) -> Problem:
    """The problem with the query heads of a KV head as more rows of one head, where that makes fewer tiles of 64 rows.

    It takes a mask that hides nothing, and heads that lie behind one another in memory (`_lies_folded`).
    """
    rows = problem.group * problem.seq_q
    if problem.group == 1 or problem.group * -(-problem.seq_q // 64) <= -(-rows // 64):
        return problem
    if rows > MOST_ROWS or not isinstance(problem.mask, Full | Causal | Window):
        return problem
    if problem.mask.pairs(problem.seq_q, problem.seq_kv) < problem.seq_q * problem.seq_kv:
        return problem
    return problem.with_(heads_q=problem.heads_kv, seq_q=rows, mask=Full())


def _lies_folded(tensor: torch.Tensor) -> bool:
    return tensor.shape[2] == 1 or tensor.stride(1) == tensor.shape[2] * tensor.stride(2)


def _is_dynamic(problem: Problem, work: int, ctas: int) -> bool:
    """Equal tiles need no dynamic order, and with one tile a CTA there is nothing to hand out."""
    return problem.mask != Full() and work > ctas


def _is_float32(problem: Problem) -> bool:
    return problem.dtype is torch.float32


def _first(found: list[AnyConfig]) -> Config:
    """The config of a 16-bit problem."""
    config = found[0]
    assert isinstance(config, Config)
    return config


def _mask_kind(problem: Problem) -> int:
    if isinstance(problem.mask, Full):
        return 0
    return 1 if isinstance(problem.mask, Causal) else 2


def _config(row: dict[str, Any], classes: tuple[int, int], bf16: bool, kind: int, softcap: bool) -> Config:
    split = row.get("split", False)
    return Config(
        bf16=bf16,
        head_dim=classes[0],
        head_dim_v=classes[1],
        consumers=row["consumers"],
        block_kv=row["block_kv"],
        k_stages=row["k_stages"],
        v_stages=row["v_stages"],
        mask=1 if split else kind,  # a causal band may as well hide nothing: one kernel for both
        softcap=softcap,
        pingpong=row["pingpong"],
        ctas_per_sm=row["ctas_per_sm"],
        split=split,
    )


_Key = tuple[tuple[int, int], str, bool]


@functools.cache
def _table() -> dict[_Key, list[dict[str, Any]]]:
    """(head-dim class, kind of mask, softcap) -> rows, best first."""
    text = importlib.resources.files("tilewise").joinpath("tables/sm90.json").read_text()
    table: dict[_Key, list[dict[str, Any]]] = {}
    for row in json.loads(text)["forward"]:
        for kind, softcap in product(row["masks"], row["softcap"]):
            table.setdefault((tuple(row["head_dims"]), kind, softcap), []).append(row)
    return table
