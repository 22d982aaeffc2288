"""What is known of PyTorch's attention kernels before they run: their bugs, and what they cost.

    notices(name, problem, target)     costs and known bugs of running it
    hazardous(name, problem, target)   the known wrong-result bug that this problem would meet, or ""

Everything here is a pure function of values: no tensor, no device, no call into torch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ..isolation import pieces
from ..masks import Dense, Documents
from .gates import (
    CUDNN,
    EFFICIENT,
    FLASH,
    MATH,
    NEWEST,
    OLDEST,
    cudnn_decode,
    cudnn_key_tail,
    materialised_bytes,
    pieces_apart,
    takes_tensor,
    torch_version,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..problem import Problem
    from ..target import Target

_MIB = 1024 * 1024


class Hazard(NamedTuple):
    """A known bug: when it applies, whether results are wrong (else only slower or less accurate), and the text."""

    backend: str
    applies: Callable[[Problem, Target], bool]
    wrong: bool
    text: str


_HAZARDS = (
    Hazard(
        CUDNN,
        cudnn_key_tail,
        True,
        "cuDNN before 9.26 returns NaN in dq on sm_90 without is_causal when seq_kv % 128 == 64 and a row's lse is "
        "below -88.7 (pytorch#196678)",
    ),
    Hazard(
        CUDNN,
        cudnn_decode,
        True,
        "cuDNN 9.19 to 9.25.0 silently returns wrong values for seq_q 1 on sm_10x and sm_11x, seen with fewer than 8 "
        "key/value heads (pytorch#193893)",
    ),
    Hazard(
        CUDNN,
        lambda p, t: t.capability == (9, 0) and t.cudnn >= 92501 and p.needs_grad and p.seq_q == 1,
        True,
        "cuDNN from 9.25.1 on returns NaN in dk and dv for seq_q 1 when the lse is strongly negative "
        "(cudnn-frontend#1072)",
    ),
    Hazard(
        CUDNN,
        lambda p, t: t.capability[0] == 10 and p.needs_grad,
        False,
        "cuDNN's backward on sm_10x loses several percent of dq and dk on rows with scores far below 0 "
        "(cudnn-frontend#744)",
    ),
    Hazard(
        EFFICIENT,
        lambda p, t: p.seq_q * p.seq_kv > 2**32 and takes_tensor(EFFICIENT, p, t),
        True,
        "efficient reads the wrong mask rows once seq_q * seq_kv is over 2**32 (pytorch#187227, pytorch#162588)",
    ),
)


def hazardous(name: str, problem: Problem, target: Target) -> str:
    """The known bug that would make `name` return wrong results for this problem; empty if none is known."""
    parts = pieces_apart(problem) or [problem]
    bugs = [bug for bug in _HAZARDS if bug.backend == name and bug.wrong]
    return "; ".join(bug.text for bug in bugs if any(bug.applies(part, target) for part in parts))


def notices(name: str, problem: Problem, target: Target) -> list[str]:
    """What the caller should know if `name` runs: known bugs first, then the memory and copies it costs."""
    parts = pieces_apart(problem) or [problem]
    known = (bug for bug in _HAZARDS if bug.backend == name)
    bugs = [bug.text for bug in known if any(bug.applies(part, target) for part in parts)]
    return bugs + [text for cost in _COSTS if (text := cost(name, problem, target))]


def mib(size: float) -> str:
    return f"{size / _MIB:.1f} MiB"


def _unread_release(name: str, problem: Problem, target: Target) -> str:
    if OLDEST <= target.torch <= NEWEST:
        return ""
    read = f"{OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    return f"the rules for PyTorch's kernels were read from torch {read}; {torch_version(target)} may differ"


def _score_matrix(name: str, problem: Problem, target: Target) -> str:
    if name != MATH:
        return ""
    scores = problem.batch * problem.heads_q * problem.seq_q * problem.seq_kv
    return f"materialises the score matrix: {mib(scores * max(4, problem.dtype.itemsize))}, more than once"


def _structural_mask(name: str, problem: Problem, target: Target) -> str:
    size = materialised_bytes(name, problem, target)
    if not size:
        return ""
    if isinstance(problem.mask, Documents):
        kind, lengths = str(problem.mask.inner), "a document's (rows, keys)"
    else:
        kind, lengths = str(problem.mask), "(seq_q, seq_kv)"
    return f"has no name for {kind}: materialises a {mib(size)} mask of {lengths}, and skips no hidden tile"


def _runs_apart(name: str, problem: Problem, target: Target) -> str:
    if not isinstance(problem.mask, Documents):
        return ""
    return f"runs {len(pieces(problem))} times: once for each run of documents of the same length"


def _mask_copy(name: str, problem: Problem, target: Target) -> str:
    mask = problem.mask
    if not isinstance(mask, Dense) or mask.additive:
        return ""
    return f"turns the boolean mask into an additive one: {mib(math.prod(mask.shape) * problem.dtype.itemsize)}"


def _expanded_heads(name: str, problem: Problem, target: Target) -> str:
    if name != MATH or problem.group == 1:
        return ""
    per_head = problem.batch * problem.seq_kv * (problem.head_dim + problem.head_dim_v) * problem.dtype.itemsize
    return f"expands K and V from {problem.heads_kv} to {problem.heads_q} heads: {mib(per_head * problem.heads_q)}"


def _padded_head_dim(name: str, problem: Problem, target: Target) -> str:
    if name != FLASH or target.is_cpu or problem.head_dim % 8 == 0:
        return ""
    return f"copies q, k and v to pad head_dim {problem.head_dim} to {-(-problem.head_dim // 8) * 8}"


def _reordered_out(name: str, problem: Problem, target: Target) -> str:
    if name != EFFICIENT or problem.layout != "bhsd":
        return ""
    size = problem.batch * problem.heads_q * problem.seq_q * problem.head_dim_v * problem.dtype.itemsize
    return f"copies out ({mib(size)}) into bhsd order: efficient writes bshd"


_COSTS: tuple[Callable[[str, Any, Any], str], ...] = (
    _unread_release,
    _score_matrix,
    _structural_mask,
    _runs_apart,
    _mask_copy,
    _expanded_heads,
    _padded_head_dim,
    _reordered_out,
)
