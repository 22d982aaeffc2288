"""The gates of PyTorch's scaled_dot_product_attention, as rows: which of its kernels would take a problem, and why not.

PyTorch tries its kernels in an order of its own and takes the first whose gates all pass; when none passes it says
little, and it stops at the first gate that fails. Here every gate is a row, so that all reasons can be given at once,
without a GPU, for any of the releases 2.11 to 2.15. The rows follow sdp_utils.cpp and sdp_utils_cpp.cpp of those
releases, and are compared with what PyTorch itself answers wherever it runs (`candidates.disagreements`).

    gates(name, problem, target)       why PyTorch would refuse (the rule model)
    limits(name, problem, target)      why we do: PyTorch would accept, then crash, or cannot say what is asked
    priority(target)                   the order in which PyTorch tries its kernels
    default_choice(problem, target)    the one F.scaled_dot_product_attention would run

Everything here is a pure function of values: no tensor, no device, no call into torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch

from ..errors import Reason
from ..isolation import distinct_problems
from ..masks import Cached, Causal, Dense, Documents, Full, Packed, Window
from ..problem import Strides, dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..problem import Problem
    from ..target import Target

FLASH, EFFICIENT, CUDNN, MATH = "torch-flash", "torch-efficient", "torch-cudnn", "torch-math"
NAMES = (FLASH, EFFICIENT, CUDNN, MATH)
OLDEST, NEWEST = (2, 11), (2, 15)  # the releases these rules were read from

GRID_LIMIT = 65535  # largest y and z of a CUDA grid, which these kernels spend on batch and heads
_HALF = (torch.bfloat16, torch.float16)

MaskKind = Literal["none", "causal", "bottom-right", "tensor"]


class Rule(NamedTuple):
    """One gate: when it refuses, the value and the limit in words, and what helps."""

    refuses: Callable[[Problem, Target], bool]
    what: Callable[[Problem, Target], str]
    remedy: str | Callable[[Problem, Target], str]

    def reason(self, problem: Problem, target: Target) -> Reason:
        remedy = self.remedy if isinstance(self.remedy, str) else self.remedy(problem, target)
        return Reason(self.what(problem, target), remedy)


# ---------------------------------------------------------------------------------------------------------------------
# How a mask reaches PyTorch


def mask_kind(problem: Problem) -> MaskKind:
    """What PyTorch is told of the mask: nothing, is_causal, causal_lower_right, or a tensor that holds it.

    "bottom-right" is a causal mask over unequal lengths. The flash kernel's own causal means that; the others need the
    tensor. Windows and documents have no name in scaled_dot_product_attention at all.
    """
    mask = problem.mask
    if isinstance(mask, Full) or (isinstance(mask, Window) and mask.left is None and mask.right is None):
        return "none"
    if isinstance(mask, Causal):
        offset = mask.band(problem.seq_q, problem.seq_kv).offset
        if offset == 0:
            return "causal"
        return "bottom-right" if offset == problem.seq_kv - problem.seq_q else "tensor"
    return "tensor"


def takes_tensor(name: str, problem: Problem, target: Target) -> bool:
    """Whether `name` is handed this problem's mask as a tensor."""
    kind = mask_kind(problem)
    return kind == "tensor" or (kind == "bottom-right" and (name != FLASH or target.is_cpu))


def materialised_bytes(name: str, problem: Problem, target: Target) -> int:
    """Bytes of the (seq_q, seq_kv) tensor built for a structural mask: a boolean one and its additive form."""
    if isinstance(problem.mask, Dense) or not takes_tensor(name, problem, target):
        return 0
    if isinstance(problem.mask, Documents):  # which run apart
        return max((materialised_bytes(name, part, target) for part in pieces_apart(problem)), default=0)
    return problem.seq_q * problem.seq_kv * (1 + problem.dtype.itemsize)


# ---------------------------------------------------------------------------------------------------------------------
# Rows shared by several kernels


def torch_version(target: Target) -> str:
    return f"torch {target.torch[0]}.{target.torch[1]}"


def _since(release: tuple[int, int], target: Target) -> bool:
    return target.torch >= release


def _cudnn_version(target: Target) -> str:
    """91900 -> 9.19.0"""
    number = target.cudnn
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def _arch_rule(kernel: str, low: tuple[int, int], instead: str) -> Rule:
    high = (12, 1)
    bounds = f"sm_{low[0]}{low[1]} to sm_{high[0]}{high[1]}"
    return Rule(
        lambda p, t: not low <= t.capability <= high,
        lambda p, t: f"{t.name} is {t.arch}; {kernel} runs on {bounds}",
        f"use {instead}, or a GPU in that range",
    )


def _dtype_rule(kernel: str, takes: Callable[[Target], tuple[torch.dtype, ...]], instead: str) -> Rule:
    def names(target: Target) -> str:
        return " and ".join(dtype_name(dtype) for dtype in takes(target))

    return Rule(
        lambda p, t: p.dtype not in takes(t),
        lambda p, t: f"dtype {dtype_name(p.dtype)} on {t.arch}; {kernel} takes {names(t)} there",
        lambda p, t: f"cast to {dtype_name(takes(t)[-1])}, or use {instead}",
    )


def _half_of(target: Target) -> tuple[torch.dtype, ...]:
    return _HALF if target.capability >= (8, 0) else (torch.float16,)


def _efficient_dtypes(target: Target) -> tuple[torch.dtype, ...]:
    return (*_half_of(target), torch.float32)


def _no_zero_length(kernel: str) -> Rule:
    return Rule(
        lambda p, t: 0 in (p.seq_q, p.seq_kv),
        lambda p, t: f"seq_q {p.seq_q} and seq_kv {p.seq_kv}: {kernel} needs at least 1 of each",
        "use torch-math, which returns the empty result",
    )


def _no_scattered(kernel: str) -> Rule:
    return Rule(
        lambda p, t: p.strides is Strides.SCATTERED,
        lambda p, t: f"the last dimension of q, k or v has a stride; {kernel} needs it contiguous (stride 1)",
        "call .contiguous() on that tensor, or use torch-math",
    )


def _same_head_dims(kernel: str, instead: str) -> Rule:
    return Rule(
        lambda p, t: p.head_dim != p.head_dim_v,
        lambda p, t: f"head_dim {p.head_dim} of q and k is not head_dim_v {p.head_dim_v}; {kernel} needs them equal",
        f"pad v to head_dim and slice the result, or use {instead}",
    )


def _tensor_mask_refused(kernel: str) -> Rule:
    return Rule(
        lambda p, t: takes_tensor(FLASH, p, t),
        lambda p, t: (
            f"mask {p.mask} needs a mask tensor; {kernel} takes none, only full and causal attention"
            if not isinstance(p.mask, Dense)
            else f"a mask tensor of shape {p.mask.shape}; {kernel} takes none, only full and causal attention"
        ),
        "use torch-efficient or torch-cudnn, which take mask tensors, or a backend that knows the mask by name",
    )


# ---------------------------------------------------------------------------------------------------------------------
# flash on CUDA (FlashAttention-2)

_SMALL_SMEM = ((8, 6), (8, 9), (12, 0), (12, 1))  # 99 KiB of shared memory per block: too little for its backward


def _flash_training_limit(problem: Problem, target: Target) -> bool:
    if not problem.needs_grad or target.capability not in (*_SMALL_SMEM, (8, 7), (8, 8)):
        return False
    return problem.head_dim > 192 and (problem.dropout > 0 or problem.head_dim <= 224)


_FLASH_CUDA = (
    _arch_rule("flash", (8, 0), "torch-efficient, which runs from sm_50 on"),
    _dtype_rule("flash", _half_of, "torch-efficient, which takes float32"),
    _tensor_mask_refused("flash"),
    _same_head_dims("flash", "torch-efficient, which takes them apart"),
    Rule(
        lambda p, t: max(p.head_dim, p.head_dim_v) > 256,
        lambda p, t: f"head_dim {max(p.head_dim, p.head_dim_v)} is over 256, the most flash takes",
        "use torch-efficient, which takes any head_dim that is a multiple of 8",
    ),
    Rule(
        _flash_training_limit,
        lambda p, t: (
            f"head_dim {p.head_dim} with gradients on {t.arch}; flash trains there up to 192, "
            "or from 225 to 256 without dropout"
        ),
        lambda p, t: f"pad head_dim to {256 if not p.dropout else 'at most 192'}, or use torch-efficient",
    ),
    Rule(
        lambda p, t: mask_kind(p) == "causal" and p.seq_q != p.seq_kv,
        lambda p, t: (
            f"top-left causal with seq_q {p.seq_q} and seq_kv {p.seq_kv}; flash takes it only where they are equal"
        ),
        'use torch-efficient, or mask="causal:bottom-right" if decoding is what is meant: flash has that one',
    ),
    _no_zero_length("flash"),
    _no_scattered("flash"),
    Rule(
        lambda p, t: _since((2, 15), t) and max(p.batch, p.heads_q) > GRID_LIMIT,
        lambda p, t: f"batch {p.batch} and heads {p.heads_q}; flash takes at most {GRID_LIMIT} of each",
        "split the batch, or use torch-math",
    ),
)

# ---------------------------------------------------------------------------------------------------------------------
# memory-efficient on CUDA (CUTLASS)


def efficient_alignment(problem: Problem, target: Target) -> int:
    """Elements that head_dim must be a multiple of: 16 bytes where tensor cores are used."""
    half = problem.dtype in _HALF
    if target.capability >= (8, 0):
        return 8 if half else 4
    return 8 if half and target.capability >= (7, 0) else 1


_EFFICIENT_CUDA = (
    _arch_rule("efficient", (5, 0), "torch-math"),
    _dtype_rule("efficient", _efficient_dtypes, "torch-math"),
    Rule(
        lambda p, t: bool(p.head_dim % efficient_alignment(p, t) or p.head_dim_v % efficient_alignment(p, t)),
        lambda p, t: (
            f"head_dim {p.head_dim} (v: {p.head_dim_v}) is no multiple of {efficient_alignment(p, t)}, "
            f"which efficient needs for {dtype_name(p.dtype)} on {t.arch}"
        ),
        lambda p, t: (
            f"pad head_dim to a multiple of {efficient_alignment(p, t)} and pass the old scale, or use torch-math"
        ),
    ),
    Rule(
        lambda p, t: p.group > 1 and not _since((2, 14), t),
        lambda p, t: (
            f"{p.heads_q} query heads over {p.heads_kv} key/value heads in {torch_version(t)}; "
            "efficient takes grouped queries from torch 2.14 on"
        ),
        "upgrade to torch 2.14, or repeat K and V with repeat_interleave(group, dim=1)",
    ),
    _no_zero_length("efficient"),
    _no_scattered("efficient"),
)

# ---------------------------------------------------------------------------------------------------------------------
# cuDNN on CUDA


def cudnn_head_dim_limit(problem: Problem, target: Target) -> int:
    """Largest head_dim the gate lets through.

    Up to 2.13: 256 on sm_90 with cuDNN 9.10, 192 with head_dim_v 128 on sm_10x with 9.11. From 2.14: 256 on both from
    cuDNN 9.22.1 on (sm_107: after 9.25.0), else 192 with head_dim_v 128 from 9.11 on.
    """
    hopper, blackwell = target.capability == (9, 0), target.capability[0] == 10
    latent = (problem.head_dim, problem.head_dim_v) == (192, 128) and target.cudnn >= 91100
    if _since((2, 14), target):
        if _cudnn_d256(target):
            return 256
        return 192 if (hopper or blackwell) and latent else 128
    if hopper and target.cudnn >= 91000:
        return 256
    return 192 if blackwell and latent else 128


def _cudnn_d256(target: Target) -> bool:
    """Whether a build of 2.14 or later takes head_dim up to 256."""
    supported = target.capability == (9, 0) or target.capability[0] == 10
    late = target.capability == (10, 7) and target.cudnn <= 92500
    return supported and not late and target.cudnn > 92200


def _cudnn_backward_dims(problem: Problem, target: Target) -> bool:
    """From 2.14 on: whether cuDNN's backward refuses these head dims although its forward takes them."""
    if not problem.needs_grad or not _since((2, 14), target) or not _cudnn_d256(target):
        return False
    dims = (problem.head_dim, problem.head_dim_v)
    return max(dims) > 128 and dims not in ((192, 128), (256, 256))


def cudnn_decode(problem: Problem, target: Target) -> bool:
    """A single query on the GPUs and cuDNN releases that get it wrong."""
    broken = 91900 <= target.cudnn <= 92500 and target.cudnn != 92401
    return problem.seq_q == 1 and target.capability[0] in (10, 11) and broken


def cudnn_key_tail(problem: Problem, target: Target) -> bool:
    """Half a key tile at the end, which cuDNN's sm_90 backward forgot to mask before 9.26."""
    tail = problem.seq_kv % 128 == 64 and mask_kind(problem) != "causal"
    return tail and problem.needs_grad and target.capability == (9, 0) and target.cudnn < 92600


_CUDNN_CUDA = (
    _arch_rule("cudnn", (8, 0), "torch-efficient, which runs from sm_50 on"),
    Rule(
        lambda p, t: t.cudnn < 90000,
        lambda p, t: f"cuDNN {_cudnn_version(t)}; PyTorch's cuDNN attention needs 9.0" if t.cudnn else "no cuDNN",
        "install the nvidia-cudnn wheel that this PyTorch asks for, or use torch-flash",
    ),
    _dtype_rule("cudnn", _half_of, "torch-efficient, which takes float32"),
    Rule(
        lambda p, t: p.deterministic,
        lambda p, t: "deterministic algorithms are on; PyTorch refuses cuDNN attention then",
        "use torch-flash, which has a deterministic backward, or torch.use_deterministic_algorithms(False)",
    ),
    Rule(
        lambda p, t: max(p.head_dim, p.head_dim_v) > cudnn_head_dim_limit(p, t),
        lambda p, t: (
            f"head_dim {p.head_dim} (v: {p.head_dim_v}) is over {cudnn_head_dim_limit(p, t)}, the most cudnn takes on "
            f"{t.arch} with cuDNN {_cudnn_version(t)} in {torch_version(t)}"
        ),
        lambda p, t: "use torch-flash, which takes 256" if p.head_dim <= 256 else "use torch-efficient",
    ),
    Rule(
        lambda p, t: bool(p.head_dim % 8 or p.head_dim_v % 8),
        lambda p, t: f"head_dim {p.head_dim} (v: {p.head_dim_v}) is no multiple of 8, which cudnn needs",
        "use torch-flash, which pads, or pad head_dim yourself and pass the old scale",
    ),
    Rule(
        _cudnn_backward_dims,
        lambda p, t: (
            f"gradients for head_dim {p.head_dim} (v: {p.head_dim_v}); "
            "cudnn's backward takes up to 128, 192 with v 128, and 256 with v 256"
        ),
        "use torch-flash, or call without gradients",
    ),
    Rule(
        lambda p, t: p.seq_kv == 1,
        lambda p, t: "seq_kv 1; cudnn takes no single key",
        "use torch-flash or torch-efficient",
    ),
    Rule(
        lambda p, t: p.dropout > 0 and p.seq_q == 1,
        lambda p, t: "seq_q 1 with dropout; cudnn takes dropout from seq_q 2 on",
        "use torch-flash, or leave dropout out",
    ),
    Rule(
        lambda p, t: p.dropout > 0 and 91100 < t.cudnn < 91400,
        lambda p, t: f"dropout {p.dropout:g} with cuDNN {_cudnn_version(t)}; PyTorch refuses it from 9.11.1 to 9.13",
        "upgrade cuDNN to 9.14, or use torch-flash",
    ),
    Rule(
        lambda p, t: _since((2, 12), t) and (p.dropout * 16) % 1 != 0,
        lambda p, t: f"dropout {p.dropout:g} is no multiple of 1/16, the resolution of cudnn",
        "use a multiple of 0.0625, or torch-flash",
    ),
    Rule(
        lambda p, t: _since((2, 14), t) and cudnn_decode(p, t),
        lambda p, t: f"seq_q 1 on {t.arch} with cuDNN {_cudnn_version(t)}; PyTorch refuses it from 9.19 to 9.25.0",
        "upgrade cuDNN to 9.26, or use torch-flash",
    ),
    Rule(
        lambda p, t: _since((2, 15), t) and cudnn_key_tail(p, t),
        lambda p, t: (
            f"gradients for seq_kv {p.seq_kv} without is_causal and cuDNN {_cudnn_version(t)} on {t.arch}; "
            "PyTorch refuses seq_kv % 128 == 64 there before 9.26"
        ),
        "upgrade cuDNN to 9.26, or use torch-flash or torch-efficient",
    ),
    Rule(
        lambda p, t: _since((2, 13), t) and max(p.batch, p.heads_q) > GRID_LIMIT,
        lambda p, t: f"batch {p.batch} and heads {p.heads_q}; cudnn takes at most {GRID_LIMIT} of each",
        "split the batch, or use torch-efficient",
    ),
    _no_zero_length("cudnn"),
    _no_scattered("cudnn"),
)

# ---------------------------------------------------------------------------------------------------------------------
# CPU

_FLASH_CPU = (
    Rule(
        lambda p, t: p.dropout > 0,
        lambda p, t: f"dropout {p.dropout:g}; flash on CPU has none",
        "use torch-math",
    ),
    _same_head_dims("flash on CPU", "torch-math"),
    _no_zero_length("flash on CPU"),
    _no_scattered("flash on CPU"),
)


def _cuda_only(kernel: str) -> tuple[Rule, ...]:
    return (
        Rule(
            lambda p, t: True,
            lambda p, t: f"{t.name} is no CUDA device, and {kernel} is a CUDA kernel",
            "use torch-flash or torch-math, which run here",
        ),
    )


_GATES: dict[tuple[str, bool], tuple[Rule, ...]] = {  # (name, on CPU)
    (FLASH, False): _FLASH_CUDA,
    (EFFICIENT, False): _EFFICIENT_CUDA,
    (CUDNN, False): _CUDNN_CUDA,
    (MATH, False): (),
    (FLASH, True): _FLASH_CPU,
    (EFFICIENT, True): _cuda_only("efficient"),
    (CUDNN, True): _cuda_only("cudnn"),
    (MATH, True): (),
}

# ---------------------------------------------------------------------------------------------------------------------
# Our own limits


def _over_grid(kernel: str, size: Callable[[Problem], int], before: tuple[int, int], instead: str) -> Rule:
    return Rule(
        lambda p, t: not _since(before, t) and size(p) > GRID_LIMIT,
        lambda p, t: (
            f"batch {p.batch} and heads {p.heads_q}: over {GRID_LIMIT}, {kernel} in {torch_version(t)} fails to launch "
            "although PyTorch's gates let it through"
        ),
        instead,
    )


def _needs_aligned(kernel: str, matters: Callable[[Problem, Target], bool]) -> Rule:
    return Rule(
        lambda p, t: p.strides is Strides.UNALIGNED and matters(p, t),
        lambda p, t: f"q, k or v does not lie on 16-byte boundaries, which the loads of {kernel} need",
        "call .contiguous() on the tensor that was sliced, or use torch-math",
    )


_NEVER = (99, 0)
_COMMON = (
    Rule(
        lambda p, t: isinstance(p.mask, Packed),
        lambda p, t: f"mask {p.mask}: sequences whose offsets are on the device; PyTorch's function takes none",
        "use a tilewise backend (reference, tiled, sm80, sm90)",
    ),
    Rule(
        lambda p, t: isinstance(p.mask, Cached),
        lambda p, t: f"mask {p.mask}: keys in a cache whose lengths are on the device; PyTorch's function takes none",
        "use a tilewise backend (reference, sm80, sm90)",
    ),
    Rule(
        lambda p, t: bool(p.scores),
        lambda p, t: f"scores {', '.join(map(str, p.scores))}; PyTorch's attention does nothing to scores",
        "use a tilewise backend (reference, tiled, triton, sm80, sm90), or leave them as they are",
    ),
    Rule(
        lambda p, t: p.needs_lse and p.needs_grad,
        lambda p, t: "lse together with gradients; PyTorch's kernels cannot differentiate the lse they return",
        "use a tilewise backend, ask for the lse under torch.no_grad(), or leave return_lse out",
    ),
)
_FUSED = (
    Rule(
        lambda p, t: bool(p.operand_grads),
        lambda p, t: f"{', '.join(p.operand_grads)} requires grad; this kernel makes the gradients of q, k and v alone",
        "detach it, or use backend='torch-math', 'tiled' or 'reference'",
    ),
    Rule(
        # They hide a key with -inf and scale afterwards: -inf times a negative scale is +inf, and the row is nan.
        lambda p, t: p.scale < 0,
        lambda p, t: f"scale {p.scale:g}; PyTorch's fused kernels are right only for a scale above 0",
        "negate q and the scale, or use torch-math",
    ),
    Rule(
        lambda p, t: p.needs_lse and p.dropout > 0,
        lambda p, t: f"lse together with dropout {p.dropout:g}; PyTorch returns no lse there",
        "leave return_lse or dropout out",
    ),
    Rule(
        lambda p, t: p.transformed,
        lambda p, t: "a functorch transform (vmap, jvp, ...) is active; a fused kernel sees no tangents",
        "use torch-math or reference, whose operations can be transformed",
    ),
    Rule(
        lambda p, t: 0 in (p.batch, p.heads_q),
        lambda p, t: f"batch {p.batch} and heads {p.heads_q}: PyTorch's fused kernels need at least 1 of each",
        "use torch-math, which returns the empty result",
    ),
)
_MATH_LIMITS = (
    Rule(
        lambda p, t: p.needs_lse,
        lambda p, t: "lse; PyTorch's math path returns none",
        "use reference, which computes it the same way, or torch-flash",
    ),
)
_CPU_LIMITS: dict[str, tuple[Rule, ...]] = {FLASH: _FUSED, EFFICIENT: (), CUDNN: (), MATH: _MATH_LIMITS}
_CUDA_LIMITS: dict[str, tuple[Rule, ...]] = {
    FLASH: (
        *_FUSED,
        # A head_dim that is no multiple of 8 is padded, and the padded copies are aligned.
        _needs_aligned("flash", lambda p, t: p.head_dim % 8 == 0),
        _over_grid("flash", lambda p: max(p.batch, p.heads_q), (2, 15), "split the batch, or use torch-math"),
    ),
    EFFICIENT: (
        *_FUSED,
        _needs_aligned("efficient", lambda p, t: efficient_alignment(p, t) > 1),
        _over_grid("efficient", lambda p: p.heads_q, _NEVER, "split the heads, or use torch-math"),
    ),
    CUDNN: (
        *_FUSED,
        _needs_aligned("cudnn", lambda p, t: True),
        Rule(
            lambda p, t: (
                t.capability == (9, 0)
                and t.cudnn >= 92600
                and p.needs_grad
                and (p.batch, p.heads_q, p.seq_q) == (1, 1, 1)
            ),
            lambda p, t: (
                f"gradients for batch 1, heads 1 and seq_q 1 with cuDNN {_cudnn_version(t)}, which crashes the process "
                "from 9.26 on (cudnn-frontend#1071)"
            ),
            "use torch-flash",
        ),
        _over_grid("cudnn", lambda p: max(p.batch, p.heads_q), (2, 13), "split the batch, or use torch-efficient"),
    ),
    MATH: _MATH_LIMITS,
}

# Gates on how the call is written. We always hand over a 4-D mask, a user of F.scaled_dot_product_attention may not.
_MASK_DIMENSIONS = Rule(
    lambda p, t: isinstance(p.mask, Dense) and len(p.mask.shape) not in (2, 4),
    lambda p, t: f"mask {p.mask}; PyTorch passes only 2-D and 4-D masks to this kernel",
    "expand the mask to 4 dimensions",
)

# ---------------------------------------------------------------------------------------------------------------------
# Answers


def gates(name: str, problem: Problem, target: Target) -> list[Reason]:
    """Every reason for which PyTorch would refuse to run `name`. Empty: it would run."""
    return _reasons(_GATES[name, target.is_cpu], problem, target)


def limits(name: str, problem: Problem, target: Target) -> list[Reason]:
    """Every reason for which we refuse to run `name` although PyTorch's gates might let it through."""
    own = _CPU_LIMITS if target.is_cpu else _CUDA_LIMITS
    return _reasons((*_COMMON, *own[name]), problem, target)


def why_not(name: str, problem: Problem, target: Target) -> list[Reason]:
    """Gates and limits together, each reason once. Packed documents run apart, so a kernel has to take every one."""
    parts = (problem, *pieces_apart(problem))
    return list(dict.fromkeys(why for part in parts for why in gates(name, part, target) + limits(name, part, target)))


def pieces_apart(problem: Problem) -> list[Problem]:
    return distinct_problems(problem) if isinstance(problem.mask, Documents) else []


def priority(target: Target) -> tuple[str, ...]:
    """The order in which PyTorch tries its kernels on this target."""
    if target.is_cpu:
        return (FLASH, MATH)
    major, minor = target.capability
    if target.cudnn > 91500 and major in (9, 10) and (minor in (0, 3) or _since((2, 15), target)):
        return (CUDNN, FLASH, EFFICIENT, MATH)
    return (FLASH, EFFICIENT, MATH, CUDNN)


def default_choice(problem: Problem, target: Target) -> str:
    """The kernel that F.scaled_dot_product_attention would run for this problem, as far as it can say it.

    A structural mask that has no name there stands for the boolean tensor a user would pass; softcap is ignored.
    """
    for name in priority(target):
        if name == MATH:
            return MATH
        written = (name == CUDNN or target.is_cpu) and bool(_reasons((_MASK_DIMENSIONS,), problem, target))
        # F.scaled_dot_product_attention has no bottom-right causal, so there it is a mask tensor for flash too.
        tensor = name == FLASH and mask_kind(problem) == "bottom-right" and not target.is_cpu
        if not written and not tensor and not gates(name, problem, target):
            return name
    return MATH


def _reasons(rules: tuple[Rule, ...], problem: Problem, target: Target) -> list[Reason]:
    return [rule.reason(problem, target) for rule in rules if rule.refuses(problem, target)]
