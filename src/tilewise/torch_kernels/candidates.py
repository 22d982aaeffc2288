"""PyTorch's own attention kernels as four candidates: flash, efficient, cuDNN and math.

`F.scaled_dot_product_attention` chooses among them, says little about why, and hands out no lse. Here each is called
by its aten operator, so that exactly that kernel runs, forward and backward, with the preparation PyTorch's wrapper
would have made: boolean masks become additive, head_dim is padded for flash, mask rows are aligned for efficient.
Which problems each takes is the business of `gates`, and what is known against running one of `bugs`.

What is mended on the way: a row that sees no key gives out 0, lse -inf and finite gradients, whatever the kernel does
with it; lse is (batch, heads_q, seq_q) for all; out lies in the memory order of `problem.layout`.

    candidate                  CUDA                            CPU
    FLASH       torch-flash    FlashAttention-2                PyTorch's own flash loop
    EFFICIENT   torch-efficient  CUTLASS memory-efficient      -
    CUDNN       torch-cudnn    cuDNN                           -
    MATH        torch-math     composite, materialises scores  the same
"""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..backend import ALL, NO_OPERANDS, Grads, Operands, Wants
from ..isolation import joined, pieces
from ..masks import Causal, Dense, Documents, Full, Window
from ..operands import INPUTS, recording, zero_grads
from ..problem import in_memory_order
from . import bugs, gates

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ..errors import Reason
    from ..problem import Problem
    from ..target import Target

# F.scaled_dot_product_attention itself, by a name that no program patches: in its place may be our own.
TORCH_FUNCTION: Callable[..., torch.Tensor] = torch._C._nn.scaled_dot_product_attention
_aten = torch.ops.aten  # for the backward operators; torch itself binds the forward ones, at less cost a call
_LSE_BLOCK = 32  # efficient keeps its lse in rows of a multiple of this, +inf beyond seq_q
_MASK_BLOCK = 16  # and wants mask rows to start at multiples of this
# PyTorch hides keys from cuDNN with the lowest float16 instead of -inf, which its kernels mistreated.
_CUDNN_HIDDEN = -65504.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of PyTorch's kernels behind the functions that every backend has."""

    name: str
    sdp_backend: str  # its name in torch.nn.attention.SDPBackend

    def why_not(self, problem: Problem, target: Target) -> list[Reason]:
        return gates.why_not(self.name, problem, target)

    def notices(self, problem: Problem, target: Target) -> list[str]:
        return bugs.notices(self.name, problem, target)

    def hazardous(self, problem: Problem, target: Target) -> str:
        """The known wrong-result bug this problem would meet, or an empty string."""
        return bugs.hazardous(self.name, problem, target)

    def configs(self, problem: Problem, target: Target) -> list[Any]:
        """PyTorch leaves nothing to choose."""
        return []

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        config: Any = None,
        operands: Operands = NO_OPERANDS,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """out (batch, heads_q, seq_q, head_dim_v), and lse (batch, heads_q, seq_q) if needed and the kernel has one.

        q (batch, heads_q, seq_q, head_dim), k (batch, heads_kv, seq_kv, head_dim), v (..., head_dim_v).
        """
        assert not problem.dropout, "dropout is dropout_forward's"
        if problem.empty:
            return _empty_result(q, problem)
        if isinstance(problem.mask, Documents):
            return self._packed_forward(q, k, v, problem)
        kernel, bias = self._kernel(q), _dense(operands)
        mask = _mask_tensor(self.name, problem, q, bias)
        out, lse = kernel.forward(q, k, v, problem, mask)
        lse = lse.contiguous() if lse is not None and (problem.needs_lse or problem.needs_grad) else None
        if lse is not None or not kernel.zeroes_unseen:
            unseen = _unseen(problem, bias, q.device)
            if unseen is not None:  # in place: both are the kernel's fresh results
                out = out if kernel.zeroes_unseen else out.masked_fill_(unseen.unsqueeze(-1), 0.0)
                lse = lse if lse is None else lse.masked_fill_(unseen, -torch.inf)
        return in_memory_order(out, problem.layout), lse

    def bind(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        problem: Problem,
        config: Any = None,
        operands: Operands = NO_OPERANDS,
    ) -> Callable[..., tuple[torch.Tensor, torch.Tensor | None]]:
        """`forward` of (q, k, v, operands) for one problem: whether there is anything to mend is asked here, once."""
        kind = gates.mask_kind(problem)
        named = kind in ("none", "causal") or (kind == "bottom-right" and self.name == gates.FLASH and q.is_cuda)
        if problem.empty or not named or _may_be_unseen(problem):
            return lambda q, k, v, operands: self.forward(q, k, v, problem, config, operands)
        kernel, keeps_lse = self._kernel(q).forward, problem.needs_lse or problem.needs_grad

        def bound(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, operands: Operands
        ) -> tuple[torch.Tensor, torch.Tensor | None]:
            out, lse = kernel(q, k, v, problem, None)
            return in_memory_order(out, problem.layout), lse.contiguous() if lse is not None and keeps_lse else None

        return bound

    def backward(
        self,
        dout: torch.Tensor,
        dlse: torch.Tensor | None,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        problem: Problem,
        config: Any = None,
        operands: Operands = NO_OPERANDS,
        wants: Wants = ALL,
    ) -> Grads:
        """Gradients of q, k and v in their shapes, as the kernel laid them out.

        `dlse` has to be None, see `why_not`. Math, which has no lse, reads neither it nor `out`.
        """
        assert dlse is None, "PyTorch's kernels cannot take a gradient through lse"
        if problem.empty:
            return zero_grads(wants, q, k, v, operands)
        if isinstance(problem.mask, Documents):
            return self._packed_backward(dout, q, k, v, out, lse, problem, wants)
        bias = _dense(operands)
        mask = _mask_tensor(self.name, problem, q, bias)
        if self.name != gates.MATH and lse is not None and _may_be_unseen(problem):
            # Such a row has out = 0 whatever its inputs, so its dout must not count. The kernels form
            # exp(score - lse) with score = -inf there: any finite lse makes that 0, -inf would make it nan.
            unseen = lse == -torch.inf
            dout = dout.masked_fill(unseen.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(unseen, 0.0)
        grads = self._kernel(q).backward(in_memory_order(dout, problem.layout), q, k, v, out, lse, problem, mask, wants)
        if wants == ALL:
            return dict(zip(INPUTS, grads, strict=False))  # type: ignore[arg-type]
        found = dict(zip((*INPUTS, "bias"), grads, strict=False))
        if "bias" in wants and bias is not None:  # of the kernel's mask, which has four dimensions
            found["bias"] = found["bias"].reshape(bias.shape)  # type: ignore[union-attr]
        return {name: grad for name, grad in found.items() if name in wants and grad is not None}

    def dropout_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, operands: Operands = NO_OPERANDS
    ) -> torch.Tensor:
        """Attention with dropout by this kernel, differentiable through PyTorch's own autograd, without lse."""
        bias = _dense(operands)
        if isinstance(problem.mask, Documents):
            parts = [
                piece.together(
                    self.dropout_forward(piece.of_rows(q), piece.of_keys(k), piece.of_keys(v), piece.problem)
                )
                for piece in pieces(problem)
            ]
            return in_memory_order(joined(parts), problem.layout)
        if problem.empty:
            return _empty_result(q, problem)[0]
        kind = gates.mask_kind(problem)
        if self.name == gates.FLASH and kind == "bottom-right" and q.is_cuda:
            # F.scaled_dot_product_attention has no word for it, the operator below does: its causal is bottom-right.
            q, k, v = (_pad_head_dim(tensor) for tensor in (q, k, v))
            out = torch._scaled_dot_product_flash_attention(q, k, v, problem.dropout, True, scale=problem.scale)[0]
            out = out[..., : problem.head_dim_v]
        else:
            mask = None
            if kind in ("tensor", "bottom-right"):
                mask = bias if isinstance(problem.mask, Dense) else _boolean_mask(problem, q.device)
            with _only(self):
                out = TORCH_FUNCTION(
                    q,
                    k,
                    v,
                    attn_mask=mask if mask is None else _four_dims(mask),
                    dropout_p=problem.dropout,
                    is_causal=kind == "causal",
                    scale=problem.scale,
                    enable_gqa=problem.group > 1,
                )
        unseen = _unseen(problem, bias, q.device)
        return in_memory_order(out if unseen is None else out.masked_fill(unseen.unsqueeze(-1), 0.0), problem.layout)

    def _packed_forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Documents one after the other: no nan leaves its own, and no mask tensor of all of them is made."""
        outs, lses = [], []
        for piece in pieces(problem):
            out, lse = self.forward(piece.of_rows(q), piece.of_keys(k), piece.of_keys(v), piece.problem)
            outs.append(piece.together(out))
            if lse is not None:
                lses.append(piece.together(lse))
        # Math has no lse, of any piece that it computes.
        return in_memory_order(joined(outs), problem.layout), joined(lses) if len(lses) == len(outs) else None

    def _packed_backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        problem: Problem,
        wants: Wants,
    ) -> Grads:
        parts: dict[str, list[torch.Tensor]] = {name: [] for name in INPUTS if name in wants}
        for piece in pieces(problem):
            rows, keys = piece.of_rows, piece.of_keys
            kept = lse if lse is None else rows(lse).contiguous()
            grads = self.backward(
                rows(dout), None, rows(q), keys(k), keys(v), rows(out), kept, piece.problem, wants=wants
            )
            for name, part in parts.items():
                part.append(piece.together(grads[name]))
        return {name: joined(part) for name, part in parts.items()}

    def _kernel(self, q: torch.Tensor) -> _Kernel:
        return _KERNELS[self.name if q.is_cuda or self.name == gates.MATH else f"{self.name} on cpu"]


FLASH = Candidate(gates.FLASH, "FLASH_ATTENTION")
EFFICIENT = Candidate(gates.EFFICIENT, "EFFICIENT_ATTENTION")
CUDNN = Candidate(gates.CUDNN, "CUDNN_ATTENTION")
MATH = Candidate(gates.MATH, "MATH")
CANDIDATES = (FLASH, EFFICIENT, CUDNN, MATH)

hazard = bugs.hazardous


# ---------------------------------------------------------------------------------------------------------------------
# The kernels. forward(q, k, v, problem, mask) -> (out, lse or None), lse (batch, heads_q, seq_q);
# backward(dout, q, k, v, out, lse, problem, mask, wants) -> grads. `mask` is additive, 4-D and broadcastable, or None.


class _Kernel(NamedTuple):
    forward: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    backward: Callable[..., tuple[torch.Tensor | None, ...]]
    zeroes_unseen: bool  # the kernel itself writes 0 for a row that sees no key


def _is_causal(problem: Problem) -> bool:
    return gates.mask_kind(problem) == "causal"


def _flash_cpu_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out, lse = torch._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, _is_causal(problem), attn_mask=mask, scale=problem.scale
    )
    return out, lse


def _flash_cpu_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    mask: torch.Tensor | None,
    wants: Wants,
) -> tuple[torch.Tensor | None, ...]:
    grads: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, _is_causal(problem), attn_mask=mask, scale=problem.scale
    )
    return grads


def _flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    causal = gates.mask_kind(problem) != "none"  # top-left over equal lengths, or bottom-right: the same to this kernel
    q, k, v = (_pad_head_dim(tensor) for tensor in (q, k, v))
    out, lse = torch._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=problem.scale)[:2]
    return out[..., : problem.head_dim_v], lse


def _flash_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    mask: torch.Tensor | None,
    wants: Wants,
) -> tuple[torch.Tensor | None, ...]:
    causal = gates.mask_kind(problem) != "none"
    dout, q, k, v, out = (_pad_head_dim(tensor) for tensor in (dout, q, k, v, out))
    unread = torch.empty(2, dtype=torch.uint64, device=q.device)  # the state of a generator that no dropout asks for
    lengths = (problem.seq_q, problem.seq_kv)
    grads = _aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, *lengths, 0.0, causal, unread, unread, scale=problem.scale
    )
    return tuple(grad[..., : problem.head_dim] for grad in grads)


def _efficient_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    needs_lse = problem.needs_lse or problem.needs_grad
    out, lse = torch._scaled_dot_product_efficient_attention(
        q, k, v, _aligned_mask(mask, problem), needs_lse, 0.0, _is_causal(problem), scale=problem.scale
    )[:2]
    return out, lse[..., : problem.seq_q] if needs_lse else None


def _efficient_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    mask: torch.Tensor | None,
    wants: Wants,
) -> tuple[torch.Tensor | None, ...]:
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    grads: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_efficient_attention_backward(
        dout,
        q,
        k,
        v,
        _aligned_mask(mask, problem),
        # The kernel takes for granted that out lies as its forward wrote it: (batch, seq, heads, dim).
        out.transpose(1, 2).contiguous().transpose(1, 2),
        F.pad(lse, (0, -problem.seq_q % _LSE_BLOCK), value=torch.inf),
        unread,
        unread,
        0.0,
        [*(name in wants for name in INPUTS), False],
        _is_causal(problem),
        scale=problem.scale,
    )[:3]
    return grads


def _cudnn_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    needs_lse = problem.needs_lse or problem.needs_grad
    out, lse = torch._scaled_dot_product_cudnn_attention(
        q, k, v, mask, needs_lse, 0.0, _is_causal(problem), False, scale=problem.scale
    )[:2]
    return out, lse.reshape(q.shape[:3]) if needs_lse else None


def _cudnn_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    problem: Problem,
    mask: torch.Tensor | None,
    wants: Wants,
) -> tuple[torch.Tensor | None, ...]:
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    lengths = (problem.seq_q, problem.seq_kv)
    grads: tuple[torch.Tensor, ...] = _aten._scaled_dot_product_cudnn_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        lse.unsqueeze(-1),
        unread,
        unread,
        mask,
        None,
        None,
        *lengths,
        0.0,
        _is_causal(problem),
        scale=problem.scale,
    )
    return grads


def _math_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, mask: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    out: torch.Tensor = torch._scaled_dot_product_attention_math(
        q, k, v, mask, 0.0, _is_causal(problem), scale=problem.scale, enable_gqa=problem.group > 1
    )[0]
    return out, None


def _math_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    problem: Problem,
    mask: torch.Tensor | None,
    wants: Wants,
) -> tuple[torch.Tensor | None, ...]:
    """Runs the forward again under autograd: nothing of it was kept."""
    with recording():
        given = {"q": q, "k": k, "v": v} | ({} if mask is None else {"bias": mask})
        leaves = [tensor.detach().requires_grad_(name in wants) for name, tensor in given.items()]
        again, _ = _math_forward(leaves[0], leaves[1], leaves[2], problem, leaves[3] if mask is not None else None)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(torch.autograd.grad(again, wanted, dout) if wanted else ())
    return tuple(next(found) if leaf.requires_grad else None for leaf in leaves)


_KERNELS = {
    "torch-flash": _Kernel(_flash_forward, _flash_backward, zeroes_unseen=False),
    "torch-efficient": _Kernel(_efficient_forward, _efficient_backward, zeroes_unseen=False),
    "torch-cudnn": _Kernel(_cudnn_forward, _cudnn_backward, zeroes_unseen=False),
    "torch-math": _Kernel(_math_forward, _math_backward, zeroes_unseen=True),
    "torch-flash on cpu": _Kernel(_flash_cpu_forward, _flash_cpu_backward, zeroes_unseen=True),
}


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def _boolean_mask(problem: Problem, device: torch.device) -> torch.Tensor:
    """A structural mask as a tensor (seq_q, seq_kv), True = visible."""
    rows, keys = range(problem.seq_q), range(problem.seq_kv)
    return problem.mask.to_bool(rows, keys, problem.seq_q, problem.seq_kv, device)


def _four_dims(mask: torch.Tensor) -> torch.Tensor:
    """(..., seq_q, seq_kv) -> 4-D with sizes of 1 in front."""
    return mask[(None,) * (4 - mask.ndim)]


def _dense(operands: Operands) -> torch.Tensor | None:
    """The tensor of a Dense mask, additive or boolean: no other operand comes here."""
    return next(iter(operands.values()), None)


def _mask_tensor(name: str, problem: Problem, q: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
    """The additive mask that kernel `name` is given: 4-D, broadcastable to the scores, in q's dtype; None for none."""
    kind = gates.mask_kind(problem)
    if kind in ("none", "causal") or (kind == "bottom-right" and name == gates.FLASH and q.is_cuda):
        return None
    if isinstance(problem.mask, Dense):
        assert bias is not None, "a Dense mask travels beside the problem"
        mask = _four_dims(bias)
    else:
        mask = _four_dims(_boolean_mask(problem, q.device))
    if mask.dtype != torch.bool:
        return mask
    hidden = _CUDNN_HIDDEN if name == gates.CUDNN else -torch.inf
    visible = torch.zeros((), dtype=q.dtype, device=q.device)  # named: the default device may be another
    return torch.where(mask, visible, hidden)


def _aligned_mask(mask: torch.Tensor | None, problem: Problem) -> torch.Tensor | None:
    """The mask expanded to (batch, heads_q, seq_q, seq_kv) over rows that start on boundaries efficient can load from.

    Only what the caller gave is copied: sizes of 1 are expanded afterwards, by a stride of 0.
    """
    if mask is None:
        return None
    rows = mask.expand(*mask.shape[:3], problem.seq_kv).contiguous()
    if problem.seq_kv % _MASK_BLOCK:
        rows = F.pad(rows, (0, -problem.seq_kv % _MASK_BLOCK))[..., : problem.seq_kv]
    elif rows.storage_offset() % _MASK_BLOCK:
        rows = rows.clone()
    return rows.expand(problem.batch, problem.heads_q, problem.seq_q, problem.seq_kv)


def _may_be_unseen(problem: Problem) -> bool:
    """Whether some row may see no key. A band leaves such rows only at its two ends."""
    if isinstance(problem.mask, Full | Causal | Window):
        spans = (problem.mask.span(row, problem.seq_q, problem.seq_kv) for row in (0, problem.seq_q - 1))
        return any(begin >= end for begin, end in spans)
    return True


def _unseen(problem: Problem, bias: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Rows that see no key: boolean, broadcastable to (batch, heads_q, seq_q); None where there can be none."""
    if not _may_be_unseen(problem):
        return None
    if isinstance(problem.mask, Dense):
        assert bias is not None
        hidden = ~bias if bias.dtype == torch.bool else bias == -torch.inf
        return _four_dims(hidden).all(-1)
    rows = torch.arange(problem.seq_q, device=device)
    begin, end = problem.mask.spans(rows, problem.seq_q, problem.seq_kv)
    return (begin >= end)[None, None]


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def _pad_head_dim(tensor: torch.Tensor) -> torch.Tensor:
    """Zeros behind the last dimension up to a multiple of 8: they change neither a score nor a visible output."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else tensor


def _empty_result(q: torch.Tensor, problem: Problem) -> tuple[torch.Tensor, torch.Tensor | None]:
    """No row sees a key, or there is no row."""
    out = in_memory_order(
        q.new_zeros(problem.batch, problem.heads_q, problem.seq_q, problem.head_dim_v), problem.layout
    )
    if not (problem.needs_lse or problem.needs_grad):
        return out, None
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return out, q.new_full(q.shape[:3], -torch.inf, dtype=dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Asking PyTorch itself


class Answer(NamedTuple):
    """What PyTorch says of one kernel, with the warnings that give its reasons (it stops at the first per group)."""

    usable: bool
    warnings: list[str]


def ask_torch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, bias: torch.Tensor | None = None
) -> dict[str, Answer]:
    """PyTorch's own verdict on each kernel of q's device. Runs no kernel."""
    here = CANDIDATES if q.is_cuda else (FLASH, MATH)
    return {candidate.name: _ask(candidate, q, k, v, problem, bias) for candidate in here}


def torch_choice(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, bias: torch.Tensor | None = None
) -> str:
    """The kernel that F.scaled_dot_product_attention would run, by PyTorch's own answer."""
    kind = gates.mask_kind(problem)
    mask = bias if kind in ("none", "causal") or bias is not None else _boolean_mask(problem, q.device)
    chosen = SDPBackend(_choice(q, k, v, problem, mask)).name
    return next((candidate.name for candidate in CANDIDATES if candidate.sdp_backend == chosen), chosen)


def disagreements(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    target: Target,
    bias: torch.Tensor | None = None,
) -> list[str]:
    """Where the rule model and PyTorch differ for these tensors, one sentence each. Empty: they agree."""
    found = []
    for name, answer in ask_torch(q, k, v, problem, bias).items():
        refusals = gates.gates(name, problem, target)
        if answer.usable and refusals:
            found.append(f"{problem}: PyTorch takes {name}, the rules refuse: {'; '.join(map(str, refusals))}")
        if not answer.usable and not refusals:
            found.append(f"{problem}: PyTorch refuses {name} ({'; '.join(answer.warnings)}), the rules take it")
    expected, chosen = gates.default_choice(problem, target), torch_choice(q, k, v, problem, bias)
    if expected != chosen:
        found.append(f"{problem}: PyTorch would run {chosen}, the rules say {expected}")
    return found


def _ask(
    candidate: Candidate,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    problem: Problem,
    bias: torch.Tensor | None,
) -> Answer:
    # The mask as this kernel is handed it: in 4 dimensions, and none where the kernel has a name for it.
    mask = _mask_tensor(candidate.name, problem, q, bias)
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # some gates warn once per process otherwise
    try:
        with warnings.catch_warnings(record=True) as caught, _only(candidate):
            warnings.simplefilter("always")
            usable = True
            try:
                _choice(q, k, v, problem, mask)
            except RuntimeError:  # "No available kernel": the only one allowed was refused
                usable = False
    finally:
        torch.set_warn_always(always)
    reasons = (str(warning.message).split(" (Triggered internally")[0] for warning in caught)
    return Answer(usable, [reason for reason in reasons if "not used because" not in reason])


def _choice(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, problem: Problem, mask: torch.Tensor | None) -> int:
    """torch._fused_sdp_choice for this problem, with the deterministic flag as the problem has it."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(problem.deterministic)
    try:
        choice: int = torch._fused_sdp_choice(
            q,
            k,
            v,
            mask,
            problem.dropout,
            _is_causal(problem),
            scale=problem.scale,
            enable_gqa=problem.group > 1,
        )
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
    return choice


@contextmanager
def _only(candidate: Candidate) -> Iterator[None]:
    """PyTorch may run this kernel and no other."""
    with sdpa_kernel(getattr(SDPBackend, candidate.sdp_backend)):
        yield
