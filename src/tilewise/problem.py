"""Problem: what is asked of an attention backend, as a value.

Frozen, hashable, without tensors, buildable on a machine that has no GPU. Sizes and dtypes are checked here once; what
comes after may rely on them. `describe` makes the Problem of real tensors, and checks those.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from . import masks
from .errors import InvalidInput
from .masks import Band, Cached, Dense, Documents, Full, KeyLengths, Mask, Packed, as_int32
from .operands import INPUTS, Operand, Operands, address, check_unchanged, copies_to_check
from .scores import Softcap, Term, softcapped
from .scores import parse as parse_term
from .terms import Alibi, Dropout, Keep, MaxLogit, Sink, Spans, spans
from .terms import KeyLengths as KeyLengthsTerm
from .terms.shared import is_paired

if TYPE_CHECKING:
    from collections.abc import Callable

Layout = Literal["bhsd", "bshd"]
Precision = Literal["exact", "tf32"]
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}


_FULL = Full()

_MAX_FLOAT32, _MAX_FLOAT64 = torch.finfo(torch.float32).max, torch.finfo(torch.float64).max


class Strides(Enum):
    """What a kernel can count on when it reads q, k and v; the worst of the three."""

    ALIGNED = "aligned"  # last dimension contiguous; base and every other stride a multiple of 16 bytes
    UNALIGNED = "unaligned"  # last dimension contiguous
    SCATTERED = "scattered"  # the last dimension itself has a stride


@dataclass(frozen=True, slots=True)
class Problem:
    """out = softmax(mask(scores(scale * q k^T))) v for q (batch, heads_q, seq_q, head_dim),
    k (batch, heads_kv, seq_kv, head_dim), v (batch, heads_kv, seq_kv, head_dim_v)."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    mask: Mask = _FULL
    scale: float = 0.0  # 0 stands for 1 / sqrt(head_dim), filled in on construction
    scores: tuple[Term, ...] = ()  # what is done to the scores before the mask, in this order
    dropout: float = 0.0  # PyTorch's kernels draw it themselves; all others as a term (`dropout_in_terms`)
    layout: Layout = "bhsd"  # the memory order of the inputs, and so of out
    strides: Strides = Strides.ALIGNED
    needs_grad: bool = False
    operand_grads: tuple[str, ...] = ()  # the operands whose gradients are needed too, in the order of `operands`
    needs_lse: bool = False
    deterministic: bool = False
    precision: Precision = "exact"  # "tf32": float32 products may round their operands to 11 bits
    transformed: bool = False  # under vmap, jvp or another functorch transform: only composite code is right there

    def __post_init__(self) -> None:
        for name in ("batch", "heads_q", "heads_kv", "seq_q", "seq_kv", "head_dim", "head_dim_v"):
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 0:
                raise InvalidInput(name, repr(size), "an integer of at least 0", "check the shape")
        if self.head_dim == 0 or self.head_dim_v == 0:
            raise InvalidInput(
                "head_dim", f"{self.head_dim} (v: {self.head_dim_v})", "at least 1", "drop the call for empty heads"
            )
        if self.dtype not in DTYPES.values():
            raise InvalidInput(
                "dtype", self.dtype, f"one of {', '.join(DTYPES)}", "cast q, k and v to one of these first"
            )
        _check_heads(self.heads_q, self.heads_kv)
        check_layout(self.layout)
        _check_precision(self.precision, self.dtype)
        if self.scale == 0.0:
            object.__setattr__(self, "scale", 1.0 / math.sqrt(self.head_dim))
        wide = self.dtype is torch.float64
        largest = _MAX_FLOAT64 if wide else _MAX_FLOAT32
        fits = abs(self.scale) <= largest
        _check_number("scale", self.scale, fits, f"a number other than 0, of at most {largest:.2g}")
        for term in self.scores:
            term.check(self)
        _check_number("dropout", self.dropout, 0.0 <= self.dropout < 1.0, "a probability from 0 to below 1")
        self.mask.check(self.seq_q, self.seq_kv)
        if isinstance(self.mask, Dense):
            _check_leading(self.mask.shape, self.batch, self.heads_q)
        if self.scores or self.operand_grads:
            self._check_operands()

    def _check_operands(self) -> None:
        names = [operand.name for operand in self.operands]
        if len(set(names)) < len(names) or set(names) & set(INPUTS):
            raise InvalidInput(
                "operands",
                ", ".join(names),
                "names that differ, none of them q, k or v",
                "use one mask or term of each",
            )
        possible = tuple(operand.name for operand in self.operands if operand.differentiable)
        wanted = tuple(name for name in possible if name in self.operand_grads)
        if wanted != self.operand_grads:
            raise InvalidInput(
                "operand_grads",
                ", ".join(self.operand_grads),
                f"{', '.join(possible) or 'none'}, in this order: any other is a constant, it has no gradient",
                "detach it",
            )

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors of a call in addition to q, k and v, in the order of the operators' `operands`."""
        return (*self.mask.operands, *(operand for term in self.scores for operand in term.tensors))

    @property
    def softcap(self) -> float:
        """The cap of the scores; 0 where there is none."""
        return next((term.cap for term in self.scores if isinstance(term, Softcap)), 0.0)

    @property
    def band(self) -> Band:
        """The mask as a diagonal band, for backends that refuse all others."""
        band = self.mask.band(self.seq_q, self.seq_kv)
        assert band is not None, f"mask {self.mask} is not a diagonal band"
        return band

    @property
    def sequences(self) -> int:
        """Of queries and keys that see each other: the batches, or those that are packed into one."""
        packed = isinstance(self.mask, Packed) or (isinstance(self.mask, Cached) and self.mask.packed)
        return self.mask.sequences if packed else self.batch  # type: ignore[attr-defined]

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def empty(self) -> bool:
        """No output element depends on any input: there is nothing to compute."""
        return 0 in (self.batch, self.heads_q, self.seq_q, self.seq_kv)

    def pairs(self) -> int:
        """Visible (query, key) pairs over all batches and heads."""
        return self.batch * self.heads_q * self.mask.pairs(self.seq_q, self.seq_kv)

    def flops(self, *, backward: bool = False) -> int:
        """Multiply-adds x 2 of the visible pairs: QK and PV forward; S, dP, dV, dQ and dK backward."""
        dims = 3 * self.head_dim + 2 * self.head_dim_v if backward else self.head_dim + self.head_dim_v
        return 2 * self.pairs() * dims

    def min_bytes(self) -> int:
        """Fewest bytes a forward must move: what is visible of the inputs read once, out (and lse) written once."""
        rows = self.mask.rows_that_see(self.seq_q, self.seq_kv)
        keys = len(self.mask.keys(range(self.seq_q), self.seq_q, self.seq_kv))
        read = self.batch * (
            self.heads_q * rows * self.head_dim + self.heads_kv * keys * (self.head_dim + self.head_dim_v)
        )
        written = self.batch * self.heads_q * self.seq_q * self.head_dim_v
        total = (read + written) * self.dtype.itemsize
        if self.needs_lse or self.needs_grad:
            total += self.batch * self.heads_q * self.seq_q * 4
        if isinstance(self.mask, Dense):
            total += math.prod(self.mask.shape) * (self.dtype.itemsize if self.mask.additive else 1)
        return total

    def with_(self, **changes: Any) -> Problem:
        """The same problem with some fields changed; `softcap` replaces the cap among the scores, or takes it out."""
        if "softcap" in changes:
            others = tuple(term for term in self.scores if not isinstance(term, Softcap))
            changes["scores"] = softcapped(changes.pop("softcap")) + changes.get("scores", others)
        return replace(self, **changes)

    def dropout_in_terms(self) -> Problem:
        """The same problem with its dropout as a term, which reads a seed among the operands of a call."""
        if not self.dropout:
            return self
        return self.with_(scores=in_front_of_outputs(self.scores, Dropout(self.dropout)), dropout=0.0)

    def to_dict(self) -> dict[str, object]:
        """Plain values for JSON; `from_dict` reads them back."""
        values = {name: getattr(self, name) for name in self.__slots__}
        values |= {"dtype": dtype_name(self.dtype), "mask": str(self.mask), "strides": self.strides.value}
        if self.operand_grads:
            values["operand_grads"] = list(self.operand_grads)
        else:
            del values["operand_grads"]
        return values | {"scores": [str(term) for term in self.scores]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Problem:
        """Also of values written when a softcap was the only thing done to scores."""
        values = dict(values)
        terms = softcapped(values.pop("softcap", 0.0)) + tuple(map(parse_term, values.get("scores", ())))
        converted = {
            "scores": terms,
            "operand_grads": tuple(values.get("operand_grads", ())),
            "dtype": parse_dtype(values["dtype"]),
            "mask": masks.parse(values["mask"]),
            "strides": Strides(values["strides"]),
        }
        return cls(**(values | converted))

    def __str__(self) -> str:
        """`bf16 q(1,32,4096,128) kv(1,8,4096,128) causal`: one line, defaults left out."""
        text = f"{dtype_name(self.dtype)} q({self.batch},{self.heads_q},{self.seq_q},{self.head_dim})"
        if (self.heads_kv, self.seq_kv, self.head_dim_v) != (self.heads_q, self.seq_q, self.head_dim):
            text += f" k({self.batch},{self.heads_kv},{self.seq_kv},{self.head_dim})"
        if self.head_dim_v != self.head_dim:
            text += f" v({self.batch},{self.heads_kv},{self.seq_kv},{self.head_dim_v})"
        text += f" {self.mask}"
        if not math.isclose(self.scale, 1.0 / math.sqrt(self.head_dim)):
            text += f" scale={self.scale:g}"
        text += "".join(f" {_term_text(term)}" for term in self.scores)
        if self.dropout:
            text += f" dropout={self.dropout:g}"
        if self.layout != "bhsd":
            text += f" {self.layout}"
        if self.precision != "exact":
            text += f" {self.precision}"
        if self.strides is not Strides.ALIGNED:
            text += f" {self.strides.value}"
        for name, label in (("needs_grad", "grad"), ("needs_lse", "lse"), ("deterministic",) * 2, ("transformed",) * 2):
            if getattr(self, name):
                text += f" +{label}"
                if name == "needs_grad" and self.operand_grads:
                    text += f"({','.join(self.operand_grads)})"
        return text


def describe(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask | str | torch.Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    scores: tuple[Term, ...] = (),
    operands: Operands | None = None,
    dropout: float = 0.0,
    layout: Layout = "bhsd",
    needs_lse: bool = False,
    precision: Precision = "exact",
) -> Problem:
    """The Problem that these tensors pose. Raises InvalidInput for tensors that pose none.

    `operands` are the tensors that `scores` read; that of a mask is the mask.
    """
    check_tensors(q, k, v)
    check_layout(layout)
    q, k, v = heads_first(q, k, v, layout)
    given = {**mask_operands(mask), **(operands or {})}
    rule = _as_mask(mask, q, k.shape[2]).of(q, k, given)
    if isinstance(rule, Cached):
        check_places(rule, given, q.device)
    else:
        check_shapes(q, k, v, layout)
    problem = Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_kv=rule.places(k, given),
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        mask=rule,
        scale=given_scale(scale),
        scores=(*softcapped(as_number("softcap", softcap)), *check_terms(scores)),
        dropout=as_number("dropout", dropout),
        layout=memory_order(q, layout),
        strides=strides_class(q, k, v),
        needs_grad=torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad),
        needs_lse=needs_lse,
        deterministic=torch.are_deterministic_algorithms_enabled(),
        precision=precision,
    )
    if not given and not problem.operands:
        return problem
    wanted = _checked_operands(problem, given, q)
    return problem.with_(operand_grads=wanted, needs_grad=True) if wanted else problem


class _Sizes(NamedTuple):
    """What terms need to know before there is a Problem."""

    batch: int
    heads_q: int
    seq_q: int
    seq_kv: int
    dtype: torch.dtype


def with_named_terms(
    q: torch.Tensor,
    k: torch.Tensor,
    scores: tuple[Term, ...],
    operands: Operands | None,
    *,
    alibi: torch.Tensor | None = None,
    keep: torch.Tensor | None = None,
    sink: torch.Tensor | None = None,
    seq_kv: int | None = None,
) -> tuple[tuple[Term, ...], Operands]:
    """The terms and operands of a call that has names for some of them; q and k with their heads first.

    `seq_kv`: how many keys a row of `keep` has, where those are not the rows of k.
    """
    for name, tensor in (("alibi", alibi), ("keep", keep), ("sink", sink)):
        if tensor is not None and not isinstance(tensor, torch.Tensor):
            raise InvalidInput(name, shown(tensor), "a torch.Tensor", "convert it with torch.as_tensor")
        if tensor is not None:
            _check_strided(name, tensor)
    check_tensors(q, k, k)
    terms, named = list(check_terms(scores)), dict(operands or {})
    if alibi is not None:
        batched = True if alibi.ndim == 2 and alibi.shape[0] > 1 else False  # noqa: SIM210  (sizes may be symbols)
        terms.append(Alibi(batched=batched))
        named["slopes"] = _in_float32("alibi", alibi)
    if keep is not None:
        if keep.dtype != torch.bool:
            remedy = "compare it first, as in keep=padding != 0; a tensor that is added to scores is a mask="
            raise InvalidInput("keep", f"a tensor of {keep.dtype}", "a boolean tensor, True = visible", remedy)
        keys = k.shape[2] if seq_kv is None else seq_kv
        terms.append(Keep.of(keep, _Sizes(q.shape[0], q.shape[1], q.shape[2], keys, q.dtype)))
        named["keep"] = keep
    if sink is not None:
        terms.append(Sink())
        named["sink"] = _in_float32("sink", sink)
    return tuple(terms), named


def _in_float32(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype.is_complex:
        raise InvalidInput(name, f"a tensor of {tensor.dtype}", "a tensor of real numbers", "pass its real part")
    return tensor.float()


def in_front_of_outputs(scores: tuple[Term, ...], term: Term) -> tuple[Term, ...]:
    """The terms with one more behind all that change, hide or drop; those that report come last."""
    before = tuple(one for one in scores if not one.outputs)
    return (*before, term, *scores[len(before) :])


def with_mask_terms(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, scores: tuple[Term, ...], operands: Operands | None
) -> tuple[Mask, tuple[Term, ...], Operands]:
    """A mask that holds tensors, as a band, a term and what this reads; q and k with their heads first."""
    check_tensors(q, k, k)
    term: Term
    for name in ("lengths", "prefix"):
        numbers = getattr(mask, name, None)
        count, batch = q.shape[0] if numbers is None else numbers.shape[0], q.shape[0]
        if type(batch) is int and not torch.compiler.is_compiling() and count not in (1, batch):
            expected = f"{batch}, one for each batch of q, or 1 for all"
            raise InvalidInput(f"{type(mask).__name__}.{name}", f"{count} numbers", expected, "pass one per batch")
    if isinstance(mask, KeyLengths):
        term = KeyLengthsTerm(mask.side == "left")
        tensors = {"key_lengths": as_int32(mask.lengths.to(q.device, non_blocking=True))}
    else:
        term = Spans()
        tensors = _spans_of(mask, q, k.shape[2])
    return mask.hull(), (*check_terms(scores), term), {**(operands or {}), **tensors}


def _spans_of(mask: Mask, q: torch.Tensor, seq_kv: int) -> dict[str, torch.Tensor]:
    """The operands of Spans for a mask that holds tensors."""
    seq_q, device = q.shape[2], q.device
    return _kept(mask, q, (seq_q, seq_kv, device), lambda: _made_spans(mask, seq_q, seq_kv, device))


def with_packed_documents(q: torch.Tensor, mask: Documents, operands: Operands | None) -> tuple[Packed, Operands]:
    """Documents that hold tensors, as packed sequences and their offsets; the longest of them is not known."""
    of_queries: Any = mask.cu_seqlens_q
    of_keys: Any = mask.cu_seqlens_kv
    same = of_queries is of_keys

    def made() -> dict[str, torch.Tensor]:
        first = _as_offsets(of_queries, q.device)
        return {"cu_seqlens_q": first, "cu_seqlens_kv": first if same else _as_offsets(of_keys, q.device)}

    sequences = 0 if torch.compiler.is_compiling() else of_queries.shape[0] - 1  # 0: as in attention_packed
    return Packed(sequences, 0, 0, mask.inner, same), {
        **(operands or {}),
        **_kept(mask, q, ("offsets", q.device), made),
    }


def _as_offsets(offsets: torch.Tensor, device: torch.device) -> torch.Tensor:
    return as_int32(offsets.to(device, non_blocking=True)).contiguous()


def _kept(
    mask: Mask, q: torch.Tensor, facts: tuple[Any, ...], make: Callable[[], dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """What is made of a mask that holds tensors, which the mask keeps while their versions stay the same.

    Not what is captured, since a graph makes it anew each time, nor where it cannot be known (torch.compile, fake and
    inference tensors). Nor on a CPU, whose memory others may write to (numpy), where this is little compared with the
    attention. On another stream it might not be finished.
    """
    is_fake = isinstance(q, torch.Tensor) and type(q) not in (torch.Tensor, torch.nn.Parameter)
    if torch.compiler.is_compiling() or is_fake or not q.is_cuda or torch.cuda.is_current_stream_capturing():
        return make()
    values = [getattr(mask, field.name) for field in fields(mask)]  # type: ignore[arg-type]
    held = [value for value in values if isinstance(value, torch.Tensor)]
    if any(tensor.is_inference() for tensor in held):
        return make()
    stream = torch._C._cuda_getCurrentRawStream(q.device.index)
    key = (*(tensor._version for tensor in held), stream, *facts)
    kept: _Kept | None = getattr(mask, "made", None)
    if kept is None or kept.key != key:
        kept = _Kept(key, make(), copies_to_check(held))
        object.__setattr__(mask, "made", kept)
    check_unchanged(type(mask).__name__, held, kept.copies)
    return kept.operands


class _Kept(NamedTuple):
    """What was made of a mask, the state that it was made for, and what its tensors held, where that is checked."""

    key: tuple[Any, ...]
    operands: dict[str, torch.Tensor]
    copies: tuple[torch.Tensor, ...]


def _made_spans(mask: Mask, seq_q: int, seq_kv: int, device: torch.device) -> dict[str, torch.Tensor]:
    first, end = mask.spans(torch.arange(seq_q, device=device), seq_q, seq_kv)
    return spans.operands_of(torch.atleast_2d(first), torch.atleast_2d(end), seq_kv)


def mask_operands(mask: Mask | str | torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The operand that a mask is, where it is a tensor."""
    return {"keep" if mask.dtype == torch.bool else "bias": mask} if isinstance(mask, torch.Tensor) else {}


def check_terms(scores: object) -> tuple[Term, ...]:
    if isinstance(scores, tuple) and all(isinstance(term, Term) for term in scores):
        return scores
    raise InvalidInput(
        "scores", shown(scores), "a tuple of score terms", "write scores=(tilewise.scores.Softcap(30.0),)"
    )


def with_max_logit(scores: tuple[Term, ...], asked: bool) -> tuple[Term, ...]:
    """The terms of a call, with the one that reports the largest scores where that is asked for, and not else."""
    for term in check_terms(scores):
        if term.outputs:
            names = ", ".join(operand.name for operand in term.outputs)
            remedy = f"pass return_{names}=True instead"
            raise InvalidInput("scores", f"{term}, which reports {names}", "terms that report nothing", remedy)
    return (*scores, MaxLogit()) if asked else scores


def _checked_operands(problem: Problem, given: Operands, q: torch.Tensor) -> tuple[str, ...]:
    """The operands whose gradients are needed; raises InvalidInput if they are not those that the problem has."""
    expected = [operand.name for operand in problem.operands]
    if set(given) != set(expected):
        raise InvalidInput(
            "operands",
            ", ".join(given) or "none",
            ", ".join(expected) or "none: neither the mask nor a term reads any",
            "pass a tensor for every operand of the terms, by its name, and no other",
        )
    for name, tensor in given.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(
                f"operands[{name!r}]", shown(tensor), "a torch.Tensor", "convert it with torch.as_tensor"
            )
        if tensor.device != q.device:
            raise InvalidInput(f"operands[{name!r}]", f"on {tensor.device}", f"{q.device}, the device of q", "move it")
        _check_strided(f"operands[{name!r}]", tensor)
    check_operands(problem, given)
    wanted = operands_with_grad(given)
    for operand in problem.operands:
        if operand.name in wanted and not operand.differentiable:
            raise InvalidInput(
                f"operands[{operand.name!r}]",
                "a tensor that requires grad",
                "a constant: it has no gradient",
                "detach it",
            )
    return tuple(name for name in expected if name in wanted)


def check_operands(problem: Problem, given: Operands) -> None:
    """Raise InvalidInput for operands in other shapes or dtypes than the problem's mask and terms read."""
    if isinstance(problem.mask, Packed):
        _check_offsets(problem.mask, given)
    for term in problem.scores:
        for operand in term.tensors:
            term.check_tensor(operand.name, given[operand.name], problem)


def _check_offsets(mask: Packed, given: Operands) -> None:
    """What is known of the offsets of packed sequences without reading them."""
    for operand in mask.operands:
        offsets = given[operand.name]
        count = max(1, mask.sequences) + (operand.name not in ("seqused_k", "leftpad_k"))
        fits = offsets.shape == (count,)
        if not fits or offsets.dtype != operand.dtype or not offsets.is_contiguous():
            raise InvalidInput(
                operand.name,
                f"a tensor of shape {tuple(offsets.shape)} in {offsets.dtype}",
                f"a contiguous int32 tensor ({count},): one offset more than there are sequences, as many for keys as "
                "for queries, and one number of used keys, or of padding before them, for each",
                "pass the cumulative lengths of the sequences, from 0 to the total",
            )


def check_places(mask: Cached, given: Operands, device: torch.device) -> None:
    """Raise InvalidInput for tensors that are not what kernels read to find the keys of each sequence."""
    shapes: dict[str, tuple[int | None, ...]] = {
        "cu_seqlens_q": (mask.sequences + 1,),
        "page_table": (mask.sequences, None),
    }
    for operand in mask.operands:
        tensor, shape = given[operand.name], shapes.get(operand.name, (mask.sequences,))
        name = operand.name.removeprefix("cache_")
        fits = tensor.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, tensor.shape, strict=True))
        if not fits or tensor.dtype != torch.int32 or (tensor.shape[-1] > 1 and tensor.stride(-1) != 1):
            text = ", ".join("pages of a sequence" if n is None else str(n) for n in shape)
            raise InvalidInput(
                name,
                f"a tensor of shape {tuple(tensor.shape)} in {tensor.dtype}, strides {tensor.stride()}",
                f"int32 ({text}) with neighbours side by side",
                "cast it with .to(torch.int32), or call .contiguous()",
            )
        if tensor.device != device:
            raise InvalidInput(name, f"on {tensor.device}", f"{device}, the device of q", "move it")


def operands_with_grad(operands: Operands) -> list[str]:
    """Those that autograd asks a gradient of."""
    if not torch.is_grad_enabled():
        return []
    return [name for name, tensor in operands.items() if tensor.requires_grad]


def heads_first(q: Any, k: Any, v: Any, layout: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(batch, heads, seq, dim) views of tensors in a layout: whatever comes after `attention` sees these."""
    if layout != "bshd":
        return q, k, v
    try:
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):  # no tensors, or of too few dimensions
        check_tensors(q, k, v)
        raise


def memory_order(q: torch.Tensor, layout: Layout) -> Layout:
    """The memory order of out, given q as `heads_first` returns it: that of the layout, and that of q where q is a
    (batch, heads, seq, dim) view of memory in the other order, as it is in most models."""
    if layout != "bhsd" or not isinstance(q, torch.Tensor) or q.ndim != 4 or q.layout is not torch.strided:
        return layout  # checks that follow refuse what is no such tensor
    before: bool | torch.SymBool = q.stride(1) < q.stride(2)
    if isinstance(before, bool):
        return "bshd" if before else "bhsd"
    from torch.fx.experimental.symbolic_shapes import guard_or_false  # noqa: PLC0415  (slow, only for traces)

    return "bshd" if guard_or_false(before) else "bhsd"


def in_memory_order(out: torch.Tensor, layout: str) -> torch.Tensor:
    """A (batch, heads, seq, dim) tensor in the memory order of a layout; differentiable, and no copy if it is there."""
    if layout == "bshd":
        return out.transpose(1, 2).contiguous().transpose(1, 2)
    return out.contiguous()


def as_laid_out(out: torch.Tensor, layout: str) -> torch.Tensor:
    """The inverse of `heads_first`, for the output."""
    return out.transpose(1, 2) if layout == "bshd" else out


def _term_text(term: Term) -> str:
    """For reading, not to be parsed: `softcap=30`."""
    kind, _, numbers = str(term).partition(":")
    return f"{kind}={','.join(map(_short_number, numbers.split(',')))}" if numbers else kind


def _short_number(text: str) -> str:
    try:
        return f"{float(text):g}"
    except ValueError:
        return text


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parse_dtype(text: str) -> torch.dtype:
    name = _SHORT.get(text.lower(), text.lower())
    if name not in DTYPES:
        raise InvalidInput(
            "dtype", repr(text), f"one of {', '.join(DTYPES)} (or bf16, fp16, fp32)", "choose one of these"
        )
    return DTYPES[name]


def _check_heads(heads_q: int, heads_kv: int) -> None:
    if heads_q == heads_kv or (heads_kv > 0 and heads_q % heads_kv == 0):
        return
    raise InvalidInput(
        "heads",
        f"{heads_q} query heads over {heads_kv} key/value heads",
        "a whole number of query heads for each key/value head",
        "use as many, or a divisor: grouped queries need heads_q % heads_kv == 0",
    )


def check_layout(layout: str) -> None:
    if layout not in ("bhsd", "bshd"):
        raise InvalidInput(
            "layout",
            repr(layout),
            "'bhsd' (batch, heads, seq, dim) or 'bshd' (batch, seq, heads, dim)",
            "name the order of your tensors' dimensions",
        )


def _check_precision(precision: str, dtype: torch.dtype) -> None:
    if precision == "exact" or (precision == "tf32" and dtype is torch.float32):
        return
    raise InvalidInput(
        "precision",
        f"{precision!r} for {dtype_name(dtype)}",
        "'exact', or for float32 also 'tf32'",
        "leave precision out: every other dtype has its own",
    )


def _check_number(name: str, value: float, fine: bool, expected: str) -> None:
    if not fine:
        raise InvalidInput(name, value, expected, f"leave {name} out for the default")


def as_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(name, repr(value), "a Python number", f"pass a float, or leave {name} out for the default")
    return float(value)


def given_scale(scale: float | None) -> float:
    """Problem reads scale 0 as "the default", so an explicit 0 must be refused here."""
    if scale is None:
        return 0.0
    given = as_number("scale", scale)
    _check_number("scale", given, given != 0.0, "a finite number other than 0")
    return given


def _check_strided(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_nested:
        raise InvalidInput(name, "a nested tensor", "a strided tensor", "pad it")
    if tensor.layout is not torch.strided:
        raise InvalidInput(name, f"a {tensor.layout} tensor", "a strided tensor", "call .to_dense() on it")


def check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """q, k and v are 4-D floating tensors of one dtype on one device, or InvalidInput says which is not."""
    tensors = {"q": q, "k": k, "v": v}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
        if tensor.is_nested:
            raise InvalidInput(
                name,
                "a nested tensor",
                "a strided 4-D tensor",
                "pack the sequences and pass mask=Documents(cu_seqlens)",
            )
        _check_strided(name, tensor)
        if tensor.ndim != 4:
            raise InvalidInput(
                name, f"shape {tuple(tensor.shape)}", "4 dimensions", "reshape to (batch, heads, seq, head_dim)"
            )
        if tensor.dtype not in DTYPES.values():
            raise InvalidInput(
                f"{name}.dtype", tensor.dtype, f"one of {', '.join(DTYPES)}", "cast to a floating dtype of this list"
            )
    for kind in ("dtype", "device"):
        seen = {name: getattr(tensor, kind) for name, tensor in tensors.items()}
        if len(set(seen.values())) > 1:
            got = ", ".join(f"{name} {value}" for name, value in seen.items())
            raise InvalidInput(
                kind, got, f"one {kind} for q, k and v", "move or cast them; tilewise never does it silently"
            )


def check_shapes(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout = "bhsd") -> None:
    """The sizes of bhsd views go together, or InvalidInput says which do not. Symbols count as what they may be.

    `layout` is what the caller said of the tensors.
    """
    if _differ(k.shape[0], q.shape[0]) or _differ(v.shape[0], q.shape[0]):
        raise InvalidInput(
            "batch", f"q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}", "one batch size", "expand or slice the tensors"
        )
    if _differ(k.shape[3], q.shape[3]):
        raise InvalidInput(
            "k", f"head_dim {k.shape[3]}", f"{q.shape[3]}, the head_dim of q", f"check the layout, given as {layout!r}"
        )
    if _differ(v.shape[1], k.shape[1]) or _differ(v.shape[2], k.shape[2]):
        raise InvalidInput(
            "v",
            f"shape {tuple(v.shape)}",
            f"the heads and sequence of k, {tuple(k.shape)}",
            "pair every key with a value",
        )
    if type(q.shape[1]) is int and type(k.shape[1]) is int:
        _check_heads(q.shape[1], k.shape[1])


def _differ(one: int, other: int) -> bool:
    """Whether two sizes are known to differ. Asking a symbol must not bind it to what it stands for just now."""
    if type(one) is int and type(other) is int:
        return one != other
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # noqa: PLC0415  (slow, only for traces)

    return bool(statically_known_true(one != other))


def _check_leading(shape: tuple[int, ...], batch: int, heads_q: int) -> None:
    for size, full in zip(reversed(shape[:-2]), (heads_q, batch), strict=False):
        if size not in (1, full):
            raise InvalidInput(
                "mask",
                f"a tensor of shape {shape}",
                f"batch {batch} or 1 and heads {heads_q} or 1 in front of (seq_q, seq_kv)",
                "give each of its dimensions the full size or 1",
            )


def _as_mask(mask: Mask | str | torch.Tensor | None, q: torch.Tensor, seq_kv: int) -> Mask:
    if mask is None:
        return Full()
    if isinstance(mask, str):
        mask = masks.parse(mask)
    if isinstance(mask, torch.Tensor):
        return _describe_dense(mask, q, seq_kv)
    if isinstance(mask, Dense):
        raise InvalidInput("mask", f"{mask}", "the mask tensor itself", "pass the tensor; Dense only describes one")
    check_mask_type(mask)
    return mask


def check_mask_type(mask: object) -> None:
    if mask is None or isinstance(mask, Mask | str | torch.Tensor):
        return
    raise InvalidInput(
        "mask",
        shown(mask),
        "None, 'causal', a tilewise mask or a tensor",
        "use tilewise.Causal(), tilewise.Window(left, right), tilewise.Documents(...) or a boolean tensor",
    )


def shown(value: object) -> str:
    """A value of a wrong type, for a message: its type and how it begins, on one line."""
    text = " ".join(repr(value).split())
    return f"{type(value).__name__} {text if len(text) <= 60 else text[:60] + '...'}"


def _describe_dense(mask: torch.Tensor, q: torch.Tensor, seq_kv: int) -> Dense:
    additive = mask.dtype != torch.bool
    if additive and mask.dtype != q.dtype:
        raise InvalidInput(
            "mask.dtype", mask.dtype, f"torch.bool, or {q.dtype} to be added to the scores", "cast the mask"
        )
    if mask.device != q.device:
        raise InvalidInput("mask.device", mask.device, f"{q.device}, the device of q", "move the mask")
    _check_strided("mask", mask)
    sizes = _Sizes(q.shape[0], q.shape[1], q.shape[2], seq_kv, q.dtype)
    return Dense(tuple(mask.shape), additive, is_paired(mask, sizes))


def strides_class(*tensors: torch.Tensor) -> Strides:
    """Dimensions of size 1 are never stepped along, so their strides do not count."""
    worst = Strides.ALIGNED
    for tensor in tensors:
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            return Strides.SCATTERED
        size = tensor.element_size()
        steps = [stride * size for stride, n in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True) if n > 1]
        if _address(tensor) % 16 or any(step % 16 for step in steps):
            worst = Strides.UNALIGNED
    return worst


def _address(tensor: torch.Tensor) -> int:
    """Where it begins. Memory that PyTorch did not allocate may begin anywhere; without memory the offset must do."""
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        with suppress(RuntimeError):
            return address(tensor)
    return tensor.storage_offset() * tensor.element_size()  # type: ignore[return-value]
