"""Scores: what is done to a score between the two products. A term is a value: frozen, hashable, without tensors.

A problem has a tuple of terms. They are applied in order to s = scale * q k^T, before the mask hides:

    Softcap(cap)    s -> cap * tanh(s / cap)

A term is a class, here or in terms/, with what it means in torch operations (the specification), and a struct in
kernels/common/, which the kernels compose at compile time; `cpp_type` names it and `params` fills what it reads. A term
without a struct runs in the backends that are made of torch operations, and all others refuse it by name. The numbers
of a term (`numbers`) are parameters of its kernels and no part of them: a new number is not a new kernel.

A term has one meaning of four: it changes scores (`apply`), hides keys (`visible`), drops weights (`kept`) or joins the
sum of a row (`row_logits`). The tensors that it reads are its `tensors`: names, dimensions and dtypes; a call gives the
tensors themselves beside the problem, by those names.

Terms have a text form, used by operator arguments and in results: `parse(str(term)) == term`, and `;` between several
(`parse_all`, `text_of`). A class is found by its `kind` as soon as it is defined.

A term that reads tensors names them (`tensors`): the operands of a call, which `apply` finds in `where.operands`. Those
that are differentiable have gradients without further code in the backends made of torch operations.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import torch

from .errors import InvalidInput
from .operands import NO_OPERANDS, Grads, Operand, Operands, Sums, Wants, recording

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

Tensor = torch.Tensor
LOG2_E = math.log2(math.e)
_KINDS: dict[str, type[Term]] = {}


class Asked(Protocol):
    """The facts about a Problem that its terms need."""

    @property
    def batch(self) -> int: ...
    @property
    def heads_q(self) -> int: ...
    @property
    def heads_kv(self) -> int: ...
    @property
    def seq_q(self) -> int: ...
    @property
    def seq_kv(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def scale(self) -> float: ...
    @property
    def scores(self) -> tuple[Term, ...]: ...
    @property
    def deterministic(self) -> bool: ...


class Where(NamedTuple):
    """Which scores a term is given: a rectangle of rows and keys of all heads, as (batch, heads, rows, keys).

    `stacked`: the query heads of a KV head lie behind one another, (batch, heads_kv, group * rows, keys).
    """

    problem: Asked
    rows: range
    keys: range
    stacked: bool = False
    operands: Operands = NO_OPERANDS

    def part(self, tensor: Tensor) -> Tensor:
        """What belongs to these scores of a tensor that broadcasts to (batch, heads_q, seq_q, seq_kv)."""
        tensor = tensor[(None,) * (4 - tensor.ndim)]
        if tensor.shape[2] > 1:
            tensor = tensor[:, :, self.rows.start : self.rows.stop]
        if tensor.shape[3] > 1:
            tensor = tensor[..., self.keys.start : self.keys.stop]
        heads, heads_kv = tensor.shape[1], self.problem.heads_kv
        if not self.stacked or self.problem.group == 1 or (heads == 1 and tensor.shape[2] == 1):
            return tensor
        spread = tensor.expand(-1, self.problem.heads_q, len(self.rows), -1)
        return spread.reshape(tensor.shape[0], heads_kv, -1, tensor.shape[3])

    def row_numbers(self, device: torch.device) -> Tensor:
        """The row of every score, as a column that broadcasts to them."""
        numbers = torch.arange(self.rows.start, self.rows.stop, device=device)
        return (numbers.repeat(self.problem.group) if self.stacked else numbers)[:, None]

    def key_numbers(self, device: torch.device) -> Tensor:
        """The key of every score, as a row that broadcasts to them."""
        return torch.arange(self.keys.start, self.keys.stop, device=device)

    def head_numbers(self, device: torch.device) -> Tensor:
        """The query head of every score."""
        heads = torch.arange(self.problem.heads_q, device=device)
        if not self.stacked:
            return heads[:, None, None]
        grouped = heads.view(self.problem.heads_kv, self.problem.group, 1)
        return grouped.expand(-1, -1, len(self.rows)).reshape(self.problem.heads_kv, -1, 1)


class Rows(NamedTuple):
    """What is known of the rows of a call in a backward; `logits` are those that join them."""

    out: Tensor
    dout: Tensor
    lse: Tensor
    dlse: Tensor | None
    logits: tuple[Tensor, ...] = ()

    def error_of_delta(self, all_ds: Tensor) -> Tensor:
        """What the rounding of `out` has added to delta = rowsum(dout * out) - dlse, (batch, heads, rows, 1).

        `all_ds`: the sums of dS = P (dP - delta) over the keys, of such a delta. With the delta that P and dP lead to
        they would be dlse, and where logits have a share of the row, that share of delta more.
        """
        error = -all_ds
        lse = self.lse.unsqueeze(-1)
        dlse = None if self.dlse is None else self.dlse.to(error.dtype).unsqueeze(-1)
        if dlse is not None:
            error = error + dlse
        if self.logits:
            delta = (self.out.to(error.dtype) * self.dout.to(error.dtype)).sum(-1, keepdim=True)
            delta = delta if dlse is None else delta - dlse
            for logit in self.logits:
                error = error + torch.exp(logit - lse) * delta
        return error.masked_fill(lse == -torch.inf, 0.0)


class Term:
    """What all terms share. A subclass is a frozen dataclass of numbers with a `kind`, and defines what it means."""

    __slots__ = ()
    kind: ClassVar[str] = ""
    transforms: ClassVar[bool] = True  # it changes scores; not so a term that hides, drops weights or finishes rows
    hides: ClassVar[bool] = False  # keys from queries, by what a tensor says
    narrows: ClassVar[bool] = False  # it hides by spans: kernels leave out tiles outside them
    hides_band: ClassVar[bool] = False  # its struct hides what the band hides as well
    joins_rows: ClassVar[bool] = False  # a logit joins their sums
    adds_line: ClassVar[bool] = False  # it adds what is linear along a row, but for a bend: its struct says so
    magnifies_delta: ClassVar[Wants] = frozenset()  # the operands whose gradients have its error many times over
    takes_packed: ClassVar[bool] = False  # its struct goes by the lengths of a packed sequence
    takes_cache: ClassVar[bool] = False  # its struct goes by the places of a cache
    elementwise: ClassVar[bool] = False  # it looks at the score alone, and not at where it stands

    def __init_subclass__(cls) -> None:
        if cls.kind:
            _KINDS[cls.kind] = cls

    def apply(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        """The scores after this term, and its derivative with respect to the scores before it (None: 1)."""
        return scores, None

    @property
    def hides_first_keys(self) -> bool:
        """It hides the first keys from queries that see all of some later tile."""
        return False

    def visible(self, where: Where) -> Tensor | None:
        """Which keys the term leaves to which queries, broadcastable to the scores; None: all."""
        return None

    def kept(self, where: Where) -> tuple[Tensor, float] | None:
        """Which weights stay, and `kept_weight`; None: all, by 1."""
        return None

    @property
    def kept_weight(self) -> float:
        """What weights that stay are multiplied with."""
        return 1.0

    def row_logits(self, where: Where) -> Tensor | None:
        """Logits that join the sum of their rows beside the keys, broadcastable to (batch, heads, rows, 1)."""
        return None

    @property
    def tensors(self) -> tuple[Operand, ...]:
        """What it reads of a call."""
        return ()

    @property
    def outputs(self) -> tuple[Operand, ...]:
        """What a forward writes for it beside out and lse, zeroed before."""
        return ()

    def observed(self, scores: Tensor, where: Where, results: dict[str, Tensor]) -> None:
        """Take what it reports of these scores, -inf where hidden, into the results so far. There may be none."""

    def decoded(self, written: Tensor) -> Tensor:
        """What a kernel wrote as one of its outputs, as a caller wants it."""
        return written

    def sums(self, operand: Operand, problem: Asked) -> Sums:
        """The buffer that the backward sums the gradient of a learned operand into."""
        raise NotImplementedError

    def settled(self, sums: Tensor, rows: Rows) -> Tensor:
        """These sums as the backward left them, with what the rows say about them."""
        return sums

    def gradients(self, dscores: Tensor, scores: Tensor, where: Where, wants: Wants) -> Grads:
        """Of its operands among `wants`, in their shapes, from the gradient of what `apply` made of these scores.

        By autograd. A term that can say it at less cost may.
        """
        leaves = self._leaves(where, wants, scores.dtype)
        if not leaves:
            return {}
        with recording():
            bent, _ = self.apply(scores.detach(), where._replace(operands={**where.operands, **leaves}))
            if not bent.requires_grad:  # they do something else than to change scores
                return {}
            found = torch.autograd.grad(bent, list(leaves.values()), dscores.expand(bent.shape).to(bent.dtype))
        return dict(zip(leaves, found, strict=True))

    def _leaves(self, where: Where, wants: Wants, dtype: torch.dtype) -> dict[str, Tensor]:
        """Those of its operands that are wanted, for autograd to derive by; in this dtype, so that sums are in it."""
        names = [operand.name for operand in self.tensors if operand.name in wants]
        return {name: where.operands[name].detach().to(dtype).requires_grad_() for name in names}

    def check(self, problem: Asked) -> None:
        """Raise InvalidInput if the term does not fit the problem."""

    def check_tensor(self, name: str, tensor: Tensor, problem: Asked) -> None:
        """Raise InvalidInput if a tensor cannot be its operand of this name. Its device is that of q."""
        for operand in self.tensors:
            if operand.name == name and operand.dims:
                operand.check(tensor, problem)

    @property
    def cpp_gradients(self) -> Wants:
        """The names of the operands whose gradients its C++ struct makes."""
        return frozenset()

    @property
    def learned_tensors(self) -> tuple[Operand, ...]:
        """The operands whose gradients its C++ struct is to make."""
        return ()

    def learning(self, wants: Wants) -> Term:
        """The term whose struct makes the gradients of these of its operands, and no others."""
        return self

    def ordered(self) -> Term:
        """The term of a backward whose sums must not depend on the order in which warps come."""
        return self

    def one_sided(self) -> Term:
        """The term for kernels whose queries see no key behind the last position that they stand at."""
        return self

    def why_not(self, problem: Asked) -> str:
        """Why its struct does not serve the problem; empty where it does."""
        return ""

    def cpp_type(self, *, precise: bool) -> str:
        """Its struct in kernels/common/, by its full name; empty where there is none.

        `precise`: in float32 arithmetic, where kernels of 16-bit numbers may use approximate instructions.
        """
        return ""

    @property
    def cpp_source(self) -> str:
        """The struct itself, or its header, where it is not in common/scores.cuh."""
        return ""

    @property
    def suffix(self) -> str:
        """Of the name of a kernel with this term: different for different structs."""
        return self.kind

    @property
    def numbers(self) -> dict[str, float]:
        """Its fields that are floats, under the names of the parameters by which kernels read them: `kind_field`."""
        floats = [field.name for field in fields(self) if field.type in ("float", float)]  # type: ignore[arg-type]
        return {f"{self.kind}_{name}": getattr(self, name) for name in floats}

    @property
    def operands(self) -> dict[str, type[Any]]:
        """The members of its C++ `Operands`, by name, as ctypes; what all kernels have is not among them.

        By default its numbers.
        """
        return dict.fromkeys(self.numbers, ctypes.c_float)

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        """What the struct reads of a kernel's parameters. A score before this term is `unit` times a kernel's value.

        By default its numbers, as they are.
        """
        return self.numbers

    def problem_params(self, problem: Asked) -> dict[str, float]:
        """Parameters of the struct that depend on the problem."""
        return {}

    def unit_after(self, unit: float) -> float:
        """The unit of a kernel's values after this term."""
        return unit

    @classmethod
    def from_text(cls, text: str) -> Term:
        """From what stands behind `kind:` in the text form."""
        if not text:
            return cls()
        values = text.split(",")
        kinds = [str(getattr(field.type, "__name__", field.type)) for field in fields(cls)]  # type: ignore[arg-type]
        return cls(*[_READERS.get(kind, float)(value) for kind, value in zip(kinds, values, strict=True)])

    def __str__(self) -> str:
        values = [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]
        numbers = ",".join([_text_of(value) for value in values])
        return f"{self.kind}:{numbers}" if numbers else self.kind


def _constant(number: float) -> float:
    """The number itself. In a trace it may be a symbol, which a text has no room for: this makes the graph for it."""
    return float.fromhex(float(number).hex()) if torch.compiler.is_compiling() else number


@dataclass(frozen=True, slots=True)
class Softcap(Term):
    """s -> cap * tanh(s / cap): no score beyond the cap."""

    kind: ClassVar[str] = "softcap"
    takes_packed: ClassVar[bool] = True
    takes_cache: ClassVar[bool] = True
    elementwise: ClassVar[bool] = True

    cap: float

    def apply(self, scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
        bent = torch.tanh(scores / self.cap)
        return self.cap * bent, 1.0 - bent * bent

    def check(self, problem: Asked) -> None:
        limit = _MAX_CAP_FLOAT64 if problem.dtype is torch.float64 else _MAX_CAP_FLOAT32
        if not (1 / limit <= self.cap <= limit and abs(problem.scale) <= limit * self.cap):
            expected = f"a number from {1 / limit:.2g} to {limit:.2g}, or 0 for none"
            raise InvalidInput("softcap", self.cap, expected, "leave softcap out for the default")

    def cpp_type(self, *, precise: bool) -> str:
        return f"tilewise::Softcap<tilewise::Precision::{'precise' if precise else 'fast'}>"

    @property
    def operands(self) -> dict[str, type[Any]]:
        """None: the parameters of every kernel have the place of a cap."""
        return {}

    def params(self, unit: float, *, precise: bool) -> dict[str, float]:
        """From a score to its part of the cap; for approximate instructions, in units of their exponential."""
        return {"softcap_in": unit / self.cap if precise else 2 * LOG2_E * unit / self.cap}

    def unit_after(self, unit: float) -> float:
        return self.cap


# Scores are divided by the cap: with a cap beyond these, or below their inverse, ordinary scores would leave the range
# of numbers with full precision.
_MAX_CAP_FLOAT32, _MAX_CAP_FLOAT64 = 2.0**100, 2.0**1000


def _text_of(value: Any) -> str:
    """The text of a field: a number, a word, or words."""
    if isinstance(value, str):
        return value
    return "+".join(value) if isinstance(value, tuple) else f"{_constant(value):.17g}"


_READERS: dict[str, Callable[[str], Any]] = {
    "int": int,
    "bool": lambda text: bool(int(text)),
    "str": str,
    "tuple[str, ...]": lambda text: tuple(text.split("+")) if text else (),
}
"""Of the fields of a term by their kind, beside floats."""


def parse(text: str) -> Term:
    """The term that a text stands for: softcap:30."""
    kind, _, rest = text.strip().lower().partition(":")
    try:
        return _KINDS[kind].from_text(rest)
    except (KeyError, ValueError, TypeError):
        raise InvalidInput("scores", repr(text), f"one of {', '.join(_KINDS)}", "write e.g. softcap:30") from None


@lru_cache(maxsize=256)
def parse_all(text: str) -> tuple[Term, ...]:
    """The terms that `text_of` gives this text for."""
    return tuple(parse(part) for part in text.split(_BETWEEN) if part)


def text_of(terms: Iterable[Term]) -> str:
    return _BETWEEN.join([str(term) for term in terms])


_BETWEEN = ";"


def bend_all(scores: Tensor, where: Where) -> tuple[Tensor, Tensor | None]:
    """The scores after all terms of the problem, and the product of their slopes."""
    slope: Tensor | None = None
    for term in where.problem.scores:
        scores, own = term.apply(scores, where)
        if own is not None:
            slope = own if slope is None else slope * own
    return scores, slope


def unbend_all(dscores: Tensor, scores: Tensor, where: Where, wants: Wants) -> Grads:
    """The gradients of the terms' operands, from that of the scores after all terms; `scores` are those before them."""
    steps: list[tuple[Term, Tensor, Tensor | None]] = []
    for term in where.problem.scores:
        bent, slope = term.apply(scores, where)
        steps.append((term, scores, slope))
        scores = bent
    grads: Grads = {}
    for term, before, slope in reversed(steps):
        grads |= term.gradients(dscores, before, where, wants)
        dscores = dscores if slope is None else dscores * slope
    return grads


def visible_all(where: Where) -> Tensor | None:
    """What all terms of the problem leave visible; None: everything."""
    seen: Tensor | None = None
    for term in where.problem.scores:
        own = term.visible(where)
        if own is not None:
            seen = own if seen is None else seen & own
    return seen


def keep_all(where: Where, dtype: torch.dtype) -> Tensor | None:
    """What every weight is multiplied with after its row's sum has taken it; None: 1."""
    factor: Tensor | None = None
    for term in where.problem.scores:
        found = term.kept(where)
        if found is not None:
            own = found[0].to(dtype) * found[1]
            factor = own if factor is None else factor * own
    return factor


def observe_all(scores: Tensor, where: Where, results: dict[str, Tensor] | None) -> None:
    """What the terms of the problem report of these scores, where somebody wants it."""
    if results is not None:
        for term in where.problem.scores:
            term.observed(scores.detach(), where, results)


def join_all(where: Where, dtype: torch.dtype) -> list[Tensor]:
    """The logits that join the sums of the rows, each broadcastable to (batch, heads, rows, 1)."""
    found = [term.row_logits(where) for term in where.problem.scores]
    return [logit.to(dtype) for logit in found if logit is not None]


def unjoin_all(lse: Tensor, delta: Tensor, where: Where, wants: Wants) -> Grads:
    """The gradients of the operands that join rows: these have a weight of e^(logit - lse), and no value."""
    grads: Grads = {}
    for term in where.problem.scores:
        leaves = term._leaves(where, wants, lse.dtype)
        if not leaves:
            continue
        with recording():
            logits = term.row_logits(where._replace(operands={**where.operands, **leaves}))
            if logits is not None:
                drows = -torch.exp(logits.detach() - lse) * delta
                found = torch.autograd.grad(logits.expand(drows.shape), list(leaves.values()), drows)
                grads |= dict(zip(leaves, found, strict=True))
    return grads


def softcapped(cap: float) -> tuple[Term, ...]:
    """The terms of a softcap given as a number, where 0 stands for none."""
    return (Softcap(cap),) if cap != 0 else ()
