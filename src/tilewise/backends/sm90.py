"""Hopper (sm_90a): our own forward kernel, kernels/sm90/forward.cuh, compiled on first use.

TMA loads, wgmma products, warp-specialised; masks that are a diagonal band. What it refuses, it refuses by name in
`why_not`. Tile shapes come from the measured table tables/sm90.json, by head-dim class and kind of mask.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..jit import TensorMap, Unit, cpp_literal, layout_asserts, params_struct, rows_map, tuned
from ..jit import launch as driver
from ..masks import Causal, Full, Window
from ..problem import Strides
from ..target import Target
from . import fused_rules as rules
from . import sm90_backward, sm90_float32, sm90_float32_backward
from .fused import (
    BoundBackward,
    BoundForward,
    Stage,
    bound_forward,
    head_sections,
    matrix_bytes,
    query_tiles,
    remembered,
    score_params,
    shape_params,
    stride_params,
)
from .fused_rules import MOST_ROWS, class_of, is_float32
from .score_policy import Bounds, scores_type

if TYPE_CHECKING:
    from ..errors import Reason
    from ..problem import Problem
    from . import Grads, Wants
    from .fused import ForwardRun, Tensor

ARCH = "sm_90a"
MASK_KINDS = ("full", "causal", "window")  # as enum MaskKind counts them
_COUNTERS = 1 << 14
_COMBINE_ROWS = 4  # a CTA, a warp each
# Of the keys' tiles, before splitting them among CTAs pays for putting the parts together, and of a part.
_FEWEST_TO_SPLIT, _FEWEST_OF_A_PART = 8, 2
# What `search_space` tries: widths of a product that kernels/sm90/wgmma.cuh has, and depths of the rings.
_BLOCKS_KV = (48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 224, 256)
_SMEM_PER_BLOCK = 227 * 1024
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
    widest, narrow = max(problem.head_dim, problem.head_dim_v), sm90_float32_backward.HEAD_DIM_LIMIT
    # The float32 forward copies its operands into parts of its own: their strides need no alignment.
    readable = (Strides.ALIGNED, Strides.UNALIGNED) if is_float32(problem) else (Strides.ALIGNED,)
    return rules.reasons(
        rules.no_jit(target),
        (
            target.capability != (9, 0),
            f"{target.name} is {target.arch}, not sm_90: wgmma and TMA in this form exist on Hopper only",
            "use backend='auto'",
        ),
        rules.other_dtype(problem),
        (
            is_float32(problem) and problem.needs_grad and widest > narrow,
            f"head_dim {widest}: the float32 backward, whose tiles have three parts, takes heads to {narrow}",
            "call it under torch.no_grad(), or use backend='auto'",
        ),
        rules.broken_chunks(problem, 8),
        rules.wide_heads(problem),
        *rules.other_scores(problem),
        (
            problem.strides not in readable,
            f"strides are {problem.strides.value}: TMA needs a contiguous last dimension, 16-byte bases and strides",
            "call .contiguous() on the input that is not",
        ),
        rules.long_sequence(problem),
        rules.transformed(problem),
    )


def notices(problem: Problem, target: Target) -> list[str]:
    if rules.too_wide(problem):
        return []
    if is_float32(problem):
        return sm90_float32.notices(problem)
    entry = _tuned(problem, target)
    cited = [] if entry is None else [tuned.cite(entry)]
    return [*cited, *rules.zero_filled(problem), *_backward_notices(problem, target)]


def _backward_notices(problem: Problem, target: Target) -> list[str]:
    if not problem.needs_grad or problem.empty:
        return []
    config = sm90_backward.configs(problem, target)[0]
    return [f"backward: {config}; {sm90_backward.divide(problem, config, target)}"]


def configs(problem: Problem, target: Target) -> list[AnyConfig]:
    """Legal configs, best first: what `tilewise tune` found on this device, then the shipped table's."""
    return tuned.first(_tuned(problem, target), Config, shipped(problem, target))


def shipped(problem: Problem, target: Target) -> list[AnyConfig]:
    """Configs of the table that ships, best first.

    A row of the table may be for some lengths of keys only (`least_seq_kv`, `most_seq_kv`), or, with smaller tiles than
    usual, only for problems that it spreads over the multiprocessors in one wave (`one_wave`), or, dividing the keys
    too (`split`), for so few queries that a wave has room for several parts. Rows with a `speed`, by which tiles of the
    same size can be compared, are ordered by when their last wave ends where tiles are equal.
    """
    if rules.too_wide(problem):
        return []
    if is_float32(problem):
        return list(sm90_float32.configs(problem, target))
    kind = _mask_kind(problem)
    classes = class_of(problem)
    softcap = problem.softcap > 0
    folded = _folded(problem)
    rows = _table()[classes, MASK_KINDS[kind], softcap]
    split: list[AnyConfig] = []
    small: list[Config] = []
    fitting: list[tuple[float, Config]] = []
    equal = isinstance(folded.mask, Full) and target.sms > 0
    for row in rows:
        config = _config(row, classes, problem.dtype is torch.bfloat16, kind, softcap)
        tiles = query_tiles(folded, config.block_q)
        ends = 0.0
        if equal and "speed" in row:
            ends = -(-tiles // (target.sms * config.ctas_per_sm)) * config.block_q / row["speed"]
        if config.split:
            if _splits(folded, config, target) > 1:
                split.append(config)
        elif row.get("one_wave") and not ends:
            if tiles <= target.sms:
                small.append(config)
        elif row.get("least_seq_kv", 0) <= problem.seq_kv <= row.get("most_seq_kv", MOST_ROWS):
            fitting.append((ends, config))
    small.sort(key=lambda config: config.block_q)
    fitting.sort(key=lambda pair: pair[0])
    return [*split, *small, *(config for _, config in fitting)]


def search_space(problem: Problem, target: Target) -> list[AnyConfig]:
    """Every config that may run: tiles that wgmma has, stages that fit shared memory, sums that fit the registers.

    The bound on registers is that of the arrays a consumer holds; whether the compiler keeps to it, its log tells.
    """
    if rules.too_wide(problem):
        return []
    if is_float32(problem):
        return list(sm90_float32.configs(problem, target))
    facts = (problem.dtype is torch.bfloat16, _mask_kind(problem), problem.softcap > 0)
    return list(_runnable(class_of(problem), *facts, target.smem_per_block or _SMEM_PER_BLOCK))


@functools.lru_cache(maxsize=16)
def _runnable(
    classes: tuple[int, int], bf16: bool, kind: int, softcap: bool, smem_per_block: int
) -> dict[Config, None]:
    found: dict[Config, None] = {}
    for consumers, block_kv, (k_stages, v_stages) in product((1, 2, 3, 4), _BLOCKS_KV, _STAGES):
        for pingpong, ctas in product((False, True), (1, 2)):
            row = {"consumers": consumers, "block_kv": block_kv, "k_stages": k_stages, "v_stages": v_stages}
            row |= {"pingpong": pingpong, "ctas_per_sm": ctas}
            config = _config(row, classes, bf16, kind, softcap)
            # 1 KiB of a multiprocessor's shared memory goes to each CTA for the driver's own use.
            fits = config.smem_bytes <= smem_per_block and ctas * (config.smem_bytes + 1024) <= smem_per_block + 1024
            held = 3 * block_kv // 4 + classes[1] // 2
            if fits and held < config.consumer_registers and (consumers > 1 or not pingpong):
                found[config] = None
    return found


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    return rules.tuning_key(problem, mask=MASK_KINDS[_mask_kind(problem)])


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    """The entry of the user's own table for this device."""
    if rules.too_wide(problem) or is_float32(problem):
        return None
    kind, classes = _mask_kind(problem), class_of(problem)
    facts = (problem.dtype is torch.bfloat16, kind, problem.softcap > 0)

    def is_legal(config: Config) -> bool:
        """One that a sweep would try, or any that ships for such heads and masks, whatever lengths it is for."""
        rows = _table()[classes, MASK_KINDS[kind], problem.softcap > 0]
        runnable = _runnable(classes, *facts, target.smem_per_block or _SMEM_PER_BLOCK)
        return config in runnable or any(config == _config(row, classes, *facts) for row in rows)

    return tuned.find("sm90", target.name, *tuning_key(problem), Config, is_legal)


def details(problem: Problem, target: Target, config: AnyConfig) -> list[str]:
    """How the launch fills the GPU, for `explain`."""
    if isinstance(config, sm90_float32.Config):
        lines = sm90_float32.details(problem, config)
        return [*lines, *sm90_float32_backward.details(problem, target)] if problem.needs_grad else lines
    folded = _folded(problem)
    tiles, splits = query_tiles(folded, config.block_q), _splits(folded, config, target)
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
  tilewise::sm90::forward<config, {_scores_type(config)}>(params);
}}
"""
    return Unit(config.name, source, ARCH, smem_bytes=config.smem_bytes)


def _scores_type(config: Config) -> str:
    return scores_type(softcap=config.softcap, bounds=tuple(Bounds)[config.mask])


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
    q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: AnyConfig | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    key = (problem, config, q.stride(), k.stride(), v.stride(), q.device)
    return remembered(_bound, key, lambda: bind(q, k, v, problem, config))(q, k, v, bias)


_bound: dict[tuple[Any, ...], BoundForward] = {}


def bind(q: Tensor, k: Tensor, v: Tensor, problem: Problem, config: AnyConfig | None) -> BoundForward:
    """`forward` for tensors with these shapes, strides and device: the kernel is loaded, all but addresses decided."""
    if is_float32(problem):
        return sm90_float32.bind(q, k, v, problem, config if isinstance(config, sm90_float32.Config) else None)
    assert not isinstance(config, sm90_float32.Config)

    def launch(out: Tensor) -> ForwardRun:
        target = Target.of(q.device)
        chosen = config or _first(configs(problem, target))
        made = _SplitLaunch if chosen.split else _Launch
        folded = _folded(problem)
        if folded is problem or not (_lies_folded(q) and _lies_folded(out)):
            return made(q, k, v, out, problem, chosen, target).run
        rows = (folded.batch, folded.heads_q, folded.seq_q)
        q_rows, out_rows = q.view(*rows, folded.head_dim), out.view(*rows, folded.head_dim_v)
        return made(q_rows, k, v, out_rows, folded, chosen, target).run

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
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, problem: Problem, config: Config, target: Target
    ) -> None:
        self._q, self._k, self._v = rows_map(q, 64), rows_map(k, config.block_kv), rows_map(v, config.block_kv)
        self._out = rows_map(out, 64)
        work = query_tiles(problem, config.block_q) * _splits(problem, config, target)
        ctas = min(work, target.sms * config.ctas_per_sm)
        self._device = q.device.index
        self._dynamic = _is_dynamic(problem, work, ctas)
        fixed = _fixed_params(problem, config, target, v)
        stage = Stage(unit(config), _Params, fixed, ctas, config.threads, self._device, overlap_previous=True)
        self._launch, self._arguments = stage.launch, stage.arguments

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        arguments = self._arguments()
        params = arguments.params
        self._fill(params, q, k, v)
        params.out_map = self._out.at(out.data_ptr())
        params.lse = None if lse is None else lse.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._dynamic:
            params.work_counter = _work_counter(self._device, stream)
        self._launch(stream, arguments)

    def _fill(self, params: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
        value = v.data_ptr()
        params.q_map = self._q.at(q.data_ptr())
        params.k_map = self._k.at(k.data_ptr())
        params.v_map = self._v.at(value)
        params.v = value


class _SplitLaunch(_Launch):
    """Two kernels: parts of the keys into float32 scratch, then the whole of them."""

    __slots__ = ("_combine", "_combine_arguments", "_floats")

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, problem: Problem, config: Config, target: Target
    ) -> None:
        super().__init__(q, k, v, out, problem, config, target)
        rows = problem.batch * problem.heads_q * problem.seq_q
        splits = _splits(problem, config, target)
        self._floats = (splits * rows * problem.head_dim_v, splits * rows)
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
        grid, threads = -(-rows // _COMBINE_ROWS), 32 * _COMBINE_ROWS
        stage = Stage(
            combine_unit(config.bf16), _CombineParams, fixed, grid, threads, self._device, overlap_previous=True
        )
        self._combine, self._combine_arguments = stage.launch, stage.arguments

    def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor | None) -> None:
        arguments = self._arguments()
        outs, lses = self._floats
        scratch = q.new_empty(outs + lses, dtype=torch.float32)
        partial_out = scratch.data_ptr()
        partial_lse = partial_out + 4 * outs
        params = arguments.params
        self._fill(params, q, k, v)
        params.partial_out, params.lse = partial_out, partial_lse
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        self._launch(stream, arguments)
        arguments = self._combine_arguments()
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
        self._lock = threading.RLock()

    def take(self, stream: int, capturing: bool) -> int:
        """The address of a counter for the next launch on `stream`; 0 when none is left."""
        if capturing:
            return self._fresh()
        return self._of_stream.get(stream) or self._for_stream(stream)

    def _for_stream(self, stream: int) -> int:
        """One for all threads that use the stream."""
        with self._lock:
            found = self._of_stream.get(stream) or self._fresh()
            if found:
                self._of_stream[stream] = found
            return found

    def _fresh(self) -> int:
        with self._lock:
            index = next(self._free, None)
        return 0 if index is None else self._room.data_ptr() + 4 * index


_counters: dict[int, _WorkCounters] = {}
_making_counters = threading.Lock()


def _work_counter(device: int, stream: int) -> int:
    """A counter for one launch, or 0: the kernel then takes its tiles in a fixed order.

    Why 0 for a first launch under capture: the room would be allocated in the graph's own pool, and die with it.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    counters = _counters.get(device)
    if counters is None:
        if capturing:
            return 0
        with _making_counters:  # one that is not kept would be freed while a kernel counts with it
            counters = _counters.get(device) or _counters.setdefault(device, _WorkCounters(device))
    return counters.take(stream, capturing)


def _fixed_params(problem: Problem, config: Config, target: Target, v: Tensor) -> dict[str, Any]:
    waves = query_tiles(problem, config.block_q) / (target.sms * config.ctas_per_sm)
    return {
        **stride_params(v=v),
        **shape_params(problem),
        **score_params(problem),
        "heads": problem.heads_q,
        "head_dim_v": problem.head_dim_v,
        "q_tiles": -(-problem.seq_q // config.block_q),
        "sections": head_sections(problem, target, 2, waves),
        "longest_first": int(isinstance(problem.mask, Causal)),
        "splits": _splits(problem, config, target),
    }


def _splits(problem: Problem, config: Config, target: Target) -> int:
    """Into how many parts a split kernel divides the keys: as many as fill one wave and are worth their fixed cost."""
    tiles = -(-problem.seq_kv // config.block_kv)
    if not config.split or tiles < _FEWEST_TO_SPLIT:
        return 1
    return max(
        1, min(target.sms * config.ctas_per_sm // query_tiles(problem, config.block_q), tiles // _FEWEST_OF_A_PART)
    )


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


def _lies_folded(tensor: Tensor) -> bool:
    return tensor.shape[2] == 1 or tensor.stride(1) == tensor.shape[2] * tensor.stride(2)


def _is_dynamic(problem: Problem, work: int, ctas: int) -> bool:
    """Equal tiles need no dynamic order, and with one tile a CTA there is nothing to hand out."""
    return problem.mask != Full() and work > ctas


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
def _table() -> dict[_Key, list[rules.Row]]:
    """(head-dim class, kind of mask, softcap) -> rows, best first."""
    return rules.rows_by(
        "sm90", "forward", lambda row: product([tuple(row["head_dims"])], row["masks"], row["softcap"])
    )
