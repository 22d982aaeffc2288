"""Attention in Triton, forward and backward: the portable backend, and a second opinion on our CUDA kernels.

Written from the maths alone (see `kernels` and docs/kernels/triton.md), so that a mistake in a CUDA kernel is
not repeated here. Triton is imported when a kernel first runs. With TRITON_INTERPRET=1 in the environment by then its
interpreter runs the kernels on CPU tensors, slowly: tests do so where there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import fresh
from ..backend import ALL, NO_OPERANDS, Grads, Operands, Wants, empty_lse, empty_out, no_operand_gradients
from ..errors import CompileError, Reason
from ..jit import tuned
from ..operands import zero_grads
from ..problem import dtype_name
from ..scores import Softcap
from ..target import Target
from . import packed

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from ..problem import Problem

INTERPRETER = "TRITON_INTERPRET"
HEAD_DIM_LIMIT = 256
MAX_ROWS = 1 << 28  # of a sequence: row + band limits stay within 32 bits
_OLDEST = (8, 0)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_LOG2_E = math.log2(math.e)
_INTERPRETED_WORK = 1 << 26  # multiply-adds: the interpreter takes seconds for so many
_ROWS_OF_TERMS = 32
_FUSED = {"enable_fp_fusion": True}  # a * b + c in one rounding: Triton 3.9 warns that its default will change
_LARGE_SMEM = 128 * 1024  # a block may use more than that on sm_80 and sm_90, less on sm_86 and sm_89


@dataclass(frozen=True, slots=True)
class Config:
    """Of the forward: a program owns block_q rows and walks over block_kv keys at a time."""

    block_q: int
    block_kv: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        return f"{self.block_q}x{self.block_kv}, {self.warps} warps, {self.stages} stages"

    def __str__(self) -> str:
        return f"tile {self.block_q} x {self.block_kv}, {self.warps} warps, {self.stages} stages"


@dataclass(frozen=True, slots=True)
class BackwardConfig:
    """Of both kernels of the backward: a program owns `own` queries, or keys, and walks over `walk` of the others."""

    own: int
    walk: int
    warps: int
    stages: int


def interpreted() -> bool:
    """Whether Triton is told to interpret its kernels; it reads the variable when it is imported."""
    return os.environ.get(INTERPRETER, "0").lower() in ("1", "true", "yes", "on", "y")


def why_not(problem: Problem, target: Target) -> list[Reason]:
    widest, longest = max(problem.head_dim, problem.head_dim_v), max(problem.seq_q, problem.seq_kv)
    work = problem.flops() // 2
    rules = [
        (not target.has_triton, "triton is not installed", "pip install 'tilewise[triton]'"),
        (
            target.is_cpu and (target.name != "cpu" or not interpreted()),
            f"{target.name} is no CUDA device, and Triton's interpreter is off",
            f"set {INTERPRETER}=1 to run it on CPU tensors, slowly",
        ),
        (
            not target.is_cpu and target.capability < _OLDEST,
            f"{target.name} is {target.arch}, before sm_80, where Triton's support begins",
            "use backend='auto'",
        ),
        (
            not target.is_cpu and interpreted(),
            f"{INTERPRETER} is set: Triton would interpret the kernels on the host",
            "unset it",
        ),
        (
            target.is_cpu and work > _INTERPRETED_WORK,
            f"{work} multiply-adds: Triton's interpreter would take minutes",
            "try a smaller problem",
        ),
        (
            problem.dtype not in _DTYPES,
            f"dtype {dtype_name(problem.dtype)} is none of {', '.join(map(dtype_name, _DTYPES))}",
            "cast q, k and v, or use backend='reference'",
        ),
        (widest > HEAD_DIM_LIMIT, f"head_dim {widest} is over {HEAD_DIM_LIMIT}", "use backend='auto'"),
        (longest > MAX_ROWS, f"sequence of {longest} is over {MAX_ROWS}", "split the sequence"),
        (
            problem.mask.band(problem.seq_q, problem.seq_kv) is None and packed.mask_of(problem) is None,
            f"mask {problem.mask} is not a diagonal band",
            "use Full, Causal or Window, or backend='auto'",
        ),
        (
            packed.mask_of(problem) is not None and problem.batch > 1,
            f"packed sequences in each of {problem.batch} batches: the kernels take one batch of them",
            "use attention_packed, or backend='auto'",
        ),
        *(
            (not isinstance(term, Softcap), f"scores {term}: the kernels have no such term", "use backend='tiled'")
            for term in problem.scores
        ),
        (
            problem.dropout > 0,
            f"dropout {problem.dropout:g} is not 0, and the kernels draw no random numbers",
            "use one of PyTorch's backends, or drop the dropout",
        ),
        (
            problem.transformed,
            "inside a functorch transform (vmap, jvp): a kernel launch cannot be transformed",
            "use backend='reference' there",
        ),
    ]
    return [*(Reason(what, remedy) for refused, what, remedy in rules if refused), *no_operand_gradients(problem)]


def notices(problem: Problem, target: Target) -> list[str]:
    entry = _tuned(problem, target)
    told = [] if entry is None else [tuned.cite(entry)]
    dims = (problem.head_dim, problem.head_dim_v)
    blocks = tuple(map(_block, dims))
    if blocks != dims:
        told.append(f"heads of {dims[0]}/{dims[1]} run in tiles {blocks[0]}/{blocks[1]} wide, zero-filled")
    if problem.dtype == torch.float32 and not target.is_cpu:
        told.append("multiplies float32 in full precision, without tensor cores")
    if problem.dtype == torch.bfloat16 and target.is_cpu:
        told.append("Triton's interpreter cuts off where a GPU rounds to bfloat16: errors are twice as large")
    return told


# Tiles by the width of the widest head. They were chosen by what Triton 3.6 and 3.9 make of them for sm_80 and sm_90,
# next to no spilled registers (tests/triton_compile.py), not by their speed.
# fmt: off
_FORWARD = {
    #          Hopper                   163 KB of shared memory   99 KB                    float32
    64:  (Config(128, 128, 8, 2), Config(128, 64, 8, 2), Config(128, 64, 8, 2), Config(64, 32, 8, 1)),
    128: (Config(128, 64, 8, 3),  Config(64, 64, 4, 2),  Config(64, 64, 4, 2),  Config(32, 16, 8, 1)),
    256: (Config(64, 64, 8, 2),   Config(64, 64, 8, 2),  Config(64, 32, 8, 2),  Config(16, 16, 8, 1)),
}
_BACKWARD = {
    #          Hopper                        others                       float32
    64:  (BackwardConfig(64, 32, 8, 1), BackwardConfig(64, 32, 8, 1), BackwardConfig(32, 32, 8, 1)),
    128: (BackwardConfig(32, 32, 8, 1), BackwardConfig(64, 64, 8, 1), BackwardConfig(32, 16, 8, 1)),
    256: (BackwardConfig(32, 32, 8, 1), BackwardConfig(32, 32, 8, 1), BackwardConfig(16, 16, 8, 1)),
}
# fmt: on


_SIDES = ((64, 32), (64, 64), (64, 128), (128, 32), (128, 64), (128, 128), (256, 64))
_SPACE = [Config(q, kv, warps, stages) for q, kv in _SIDES for warps in (4, 8) for stages in (1, 2, 3, 4)]


def configs(problem: Problem, target: Target) -> list[Config]:
    """What `tilewise tune` found on this device, then what ships."""
    return tuned.first(_tuned(problem, target), Config, shipped(problem, target))


def shipped(problem: Problem, target: Target) -> list[Config]:
    """The tile of the table first; smaller ones after it, for comparison."""
    if target.is_cpu:
        return [Config(64, 64, 4, 1), Config(16, 16, 4, 1)]
    hopper, large, small, wide = _FORWARD[_width(problem)]
    if problem.dtype == torch.float32:
        chosen = wide
    else:
        chosen = hopper if _is_hopper(target) else small if 0 < target.smem_per_block < _LARGE_SMEM else large
    return list(dict.fromkeys([chosen, small, Config(16, 16, 4, 1)]))


def backward_configs(problem: Problem, target: Target) -> list[BackwardConfig]:
    if target.is_cpu:
        return [BackwardConfig(64, 64, 4, 1), BackwardConfig(16, 16, 4, 1)]
    hopper, others, wide = _BACKWARD[_width(problem)]
    return [wide if problem.dtype == torch.float32 else hopper if _is_hopper(target) else others]


def search_space(problem: Problem, target: Target) -> list[Config]:
    """Tiles, warps and stages in all combinations; what does not fit, its compiler tells."""
    return list(dict.fromkeys([*shipped(problem, target), *_SPACE]))


def tuning_key(problem: Problem) -> tuple[dict[str, Any], dict[str, int]]:
    """What the best tiles depend on: the kind of kernel, and the sizes that decide how it fills the GPU."""
    dims = [_block(problem.head_dim), _block(problem.head_dim_v)]
    mask = str(problem.mask).partition(":")[0]
    kind = {"head_dims": dims, "mask": mask, "softcap": problem.softcap > 0, "dtype": dtype_name(problem.dtype)}
    pairs = problem.batch * problem.heads_q
    return kind, {"seq_q": problem.seq_q, "seq_kv": problem.seq_kv, "batch x heads": pairs}


def _tuned(problem: Problem, target: Target) -> dict[str, Any] | None:
    def is_legal(config: Config) -> bool:
        return config in search_space(problem, target)

    return tuned.find("triton", target.name, *tuning_key(problem), Config, is_legal)


def _width(problem: Problem) -> int:
    """The class of the table: the tiles of the widest head."""
    return max(64, *map(_block, (problem.head_dim, problem.head_dim_v)))


def _is_hopper(target: Target) -> bool:
    return target.capability[0] == 9


def details(problem: Problem, target: Target, config: Config) -> list[str]:
    """How the launch is divided, for `explain`."""
    programs = _own_tiles(problem, config.block_q) * problem.batch * problem.heads_q
    return [f"{programs} programs of {32 * config.warps} threads, each {config.block_q} queries of a head"]


def forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None = None,
    operands: Operands = NO_OPERANDS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """out (batch, heads_q, seq_q, head_dim_v) in q's dtype, lse (batch, heads_q, seq_q) in float32."""
    config = config or configs(problem, Target.of(q.device))[0]
    out, lse = empty_out(q, problem.head_dim_v, problem.layout), empty_lse(q)
    if problem.empty:
        return out.zero_(), lse.fill_(-math.inf)
    with _on(q.device):
        _forward_launch(q, k, v, out, lse, problem, config, operands).run()
    return out, lse


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
    operands: Operands = NO_OPERANDS,
    wants: Wants = ALL,
) -> Grads:
    """Gradients in each input's dtype; those of the keys and of the queries by kernels of their own."""
    if problem.empty:
        return zero_grads(wants, q, k, v, NO_OPERANDS)
    grads = {name: fresh.empty_like(of) for name, of in (("q", q), ("k", k), ("v", v)) if name in wants}
    mask = packed.mask_of(problem)
    if mask is not None and (mask.used or mask.padded):  # keys that are not used have no owner
        for name in {"k", "v"} & set(grads):
            grads[name].zero_()
    chosen = config if isinstance(config, BackwardConfig) else backward_configs(problem, Target.of(q.device))[0]
    with _on(q.device):
        for launch in _backward_launches(dout, dlse, q, k, v, out, lse, grads, problem, chosen, operands):
            launch.run()
    return grads


def bind(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config | None,
    operands: Operands = NO_OPERANDS,
) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """`forward` for tensors like these, its kernels built: what does not build here is found out before it runs."""
    config = config or configs(problem, Target.of(q.device))[0]
    if not problem.empty and not interpreted():
        with _on(q.device):
            for launch in _launches(q, k, v, problem, config, operands):
                launch.build()
    return lambda q, k, v, operands: forward(q, k, v, problem, config, operands)


class _Launch(NamedTuple):
    """A kernel of `kernels` by name, how many programs it takes, and what they are given."""

    kernel: str
    programs: int
    arguments: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        _kernel(self.kernel)[(self.programs,)](*self.arguments, **self.options, **_FUSED)

    def compile(self) -> Any:
        """The compiled kernel, of Triton's own type, not loaded yet."""
        return _kernel(self.kernel).warmup(*self.arguments, grid=(self.programs,), **self.options, **_FUSED)

    def build(self) -> Any:
        """Compile and load it, and launch nothing. What stops Triton, a missing C compiler too, is a CompileError."""
        try:
            built = self.compile()
            built.run  # noqa: B018  (loads it, or says what it needs too much of)
        except Exception as error:
            said = (str(error).strip() or repr(error)).splitlines()[0]
            raise CompileError(f"Triton does not build its kernel {self.kernel}: {said}") from error
        return built


def _launches(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    config: Config,
    operands: Operands = NO_OPERANDS,
) -> list[_Launch]:
    """All that a call with these inputs may launch, on memory that is only described."""
    out, lse = empty_out(q, problem.head_dim_v, problem.layout), empty_lse(q)
    found = [_forward_launch(q, k, v, out, lse, problem, config, operands)]
    if problem.needs_grad:
        chosen = backward_configs(problem, Target.of(q.device))[0]
        found += _backward_launches(out, None, q, k, v, out, lse, {"q": q, "k": k, "v": v}, problem, chosen, operands)
    return found


def _forward_launch(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    config: Config,
    operands: Operands,
) -> _Launch:
    tiles = _own_tiles(problem, config.block_q)
    arguments = (
        q, k, v, out, lse, q.stride(), k.stride(), v.stride(), out.stride(),
        problem.heads_q, problem.group, problem.seq_q, problem.seq_kv, *_band(problem), *_scales(problem),
        _table(problem, operands, config.block_q), tiles,
    )  # fmt: skip
    shape = {"own": config.block_q, "walk": config.block_kv, "num_warps": config.warps, "num_stages": config.stages}
    return _Launch("forward", tiles * problem.batch * problem.heads_q, arguments, shape | _kind(problem))


def _backward_launches(
    dout: torch.Tensor,
    dlse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    grads: Grads,
    problem: Problem,
    config: BackwardConfig,
    operands: Operands,
) -> list[_Launch]:
    """The row terms, then whichever of the two kernels somebody wants the result of."""
    dq, dk, dv = (grads.get(name) for name in ("q", "k", "v"))
    rows, lse = problem.batch * problem.heads_q, lse.contiguous()
    terms = fresh.empty_like(lse), fresh.empty_like(lse)
    sizes = (problem.group, problem.seq_q, problem.seq_kv)
    first, end = _band(problem)
    inputs, strides = (q, k, v, dout), (q.stride(), k.stride(), v.stride(), dout.stride())
    shape = {"own": config.own, "walk": config.walk, "num_warps": config.warps, "num_stages": config.stages}
    given = lse if dlse is None else dlse
    found = [
        _Launch(
            "row_terms", rows * _tiles(problem.seq_q, _ROWS_OF_TERMS),
            (dout, out, lse, given, *terms, dout.stride(), out.stride(), given.stride(), problem.heads_q,
             problem.seq_q),
            {"head_dim_v": problem.head_dim_v, "block_dv": _block(problem.head_dim_v), "own": _ROWS_OF_TERMS,
             "has_dlse": dlse is not None},
        )
    ]  # fmt: skip
    if dq is not None:
        tiles = _own_tiles(problem, config.own)
        found.append(_Launch(
            "grad_queries", rows * tiles,
            (*inputs, *terms, dq, *strides, dq.stride(), problem.heads_q, *sizes, first, end, *_scales(problem),
             problem.scale, _table(problem, operands, config.own), tiles),
            shape | _kind(problem),
        ))  # fmt: skip
    if dk is not None or dv is not None:
        dk_room, dv_room = k if dk is None else dk, v if dv is None else dv  # an unwanted one is never written
        tiles = _own_tiles(problem, config.own, of_keys=True)
        found.append(_Launch(
            "grad_keys", problem.batch * problem.heads_kv * tiles,
            (*inputs, *terms, dk_room, dv_room, *strides, dk_room.stride(), dv_room.stride(), problem.heads_kv, *sizes,
             1 - end, 1 - first, *_scales(problem), problem.scale,
             _table(problem, operands, config.own, of_keys=True), tiles),
            shape | _kind(problem) | {"wants_dk": dk is not None, "wants_dv": dv is not None},
        ))  # fmt: skip
    return found


def _band(problem: Problem) -> tuple[int, int]:
    """(first, end): row r sees the keys from r + first to r + end - 1, as far as they exist."""
    if (mask := packed.mask_of(problem)) is not None:
        return packed.band(mask)
    left, right, offset = problem.band
    return offset - left, offset + right + 1


def _scales(problem: Problem) -> tuple[float, float]:
    """What a score is multiplied by before it is bent, and after that, in base 2."""
    if problem.softcap:
        return problem.scale / problem.softcap, problem.softcap * _LOG2_E
    return 1.0, problem.scale * _LOG2_E


def _kind(problem: Problem) -> dict[str, Any]:
    """The compile-time facts of a problem: never a length, a batch or a number of heads."""
    return {
        "head_dim": problem.head_dim,
        "head_dim_v": problem.head_dim_v,
        "block_d": _block(problem.head_dim),
        "block_dv": _block(problem.head_dim_v),
        "capped": problem.softcap > 0,
        "operand": _operand(problem.dtype),
        "packed": packed.mask_of(problem) is not None,
    }


def _operand(dtype: torch.dtype) -> Any:
    """What tiles are multiplied in. The interpreter's NumPy knows no bfloat16: there it is widened after rounding."""
    language = importlib.import_module("triton.language")
    return getattr(language, "float32" if interpreted() and dtype == torch.bfloat16 else dtype_name(dtype))


def _block(dim: int) -> int:
    """Triton's tiles have sides that are powers of two, 16 at least for a product."""
    return max(16, 1 << (dim - 1).bit_length())


def _tiles(length: int, block: int) -> int:
    return -(-length // block)


def _own_tiles(problem: Problem, block: int, *, of_keys: bool = False) -> int:
    """Of a head, and so many programs: of packed sequences what there may be at most."""
    if packed.mask_of(problem) is not None:
        return packed.room(problem, block, of_keys=of_keys)
    return _tiles(problem.seq_kv if of_keys else problem.seq_q, block)


def _table(problem: Problem, operands: Operands, block: int, *, of_keys: bool = False) -> torch.Tensor | None:
    """Which tile of which packed sequence a program owns; None without them."""
    if packed.mask_of(problem) is None:
        return None
    return packed.table(problem, operands, block, of_keys=of_keys)


def _on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the current device, which need not be that of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _kernel(name: str) -> Any:
    kernels = importlib.import_module(f"{__package__}.kernels")
    return getattr(kernels, name)
