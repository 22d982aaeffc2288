"""The suite `variants`: what programs ask of scores beside a band, forward and as a training step.

Every problem is (4, 16, 4096, 128) in bfloat16, or has 32 query heads over 8 of keys, or heads of 64. All of a row's
problem's gradients are wanted, the forward being timed as a training step has it, so that both rows of a problem are
verified once. A row is held against the fastest right candidate that is not ours, and against a plain problem of ours
(`tilewise:plain`) in the same rounds: the same shape under the band that the mask is made of, whose time counts for as
many pairs as are visible here.

Documents are held against two plain problems. One long sequence per batch, whose tiles are nearly all full, shows what
short sequences cost any kernel; no limit is set for it. The limit is for rows named "beside a batch": the plain problem
is then a batch of equal sequences with about as many tokens and as many visible pairs, so that both have short ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise import masks
from tilewise.errors import InvalidInput
from tilewise.lab.candidates.names import FA4, FLEX, OURS, PLAIN
from tilewise.lab.candidates.patterns import NORMAL, Pattern
from tilewise.lab.measure.compare import Goal, Plain, Row
from tilewise.lab.studies.suites import Suite
from tilewise.masks import Causal, Dense, Documents, Full, Window
from tilewise.problem import Problem
from tilewise.scores import Softcap
from tilewise.terms import Alibi, Keep, KeyLengths, RelativeBias, Sink

if TYPE_CHECKING:
    from tilewise.masks import Mask
    from tilewise.scores import Term

BATCH, SEQ = 4, 4096
_LENGTHS = (4096, 3000, 2000, 1000)  # of the keys of each batch
_PREFIX, _WINDOW = 1000, 1024
_FOUR_DOCUMENTS = (0, 2000, 3000, 3700, 4096)
_SEVEN_DOCUMENTS = (0, 1200, 2100, 2800, 3300, 3700, 3946, 4096)
_PEERS = ("torch-cudnn", "torch-efficient", FLEX)
_DROPPING_PEERS = ("torch-cudnn", "torch-efficient", "torch-flash")  # FlexAttention has no dropout


class Heads(NamedTuple):
    """Query heads, heads of keys, and their size."""

    queries: int
    keys: int
    dim: int

    def shape(self, seq: int) -> str:
        grouped = f" kv{self.keys}" if self.keys != self.queries else ""
        return f"{BATCH}x{self.queries}x{seq}x{self.dim}{grouped}"


WIDE, NARROW, GROUPED = Heads(16, 16, 128), Heads(16, 16, 64), Heads(32, 8, 128)


class Bounds(NamedTuple):
    """What is asked of a variant: ratios against the fastest of others, of the forward and of the step, which an aim
    exceeds by a quarter; and the time per pair of the plain problem that must not be exceeded."""

    forward: float = 0.0
    step: float = 0.0
    plain: float = 0.0
    plain_aim: float = 0.0
    aims: tuple[float, float] | None = None

    def goal(self, what: str, heads: Heads, *, capped: bool) -> Goal:
        floor = self.forward if what == "forward" else self.step
        aim = 1.25 * floor if self.aims is None else self.aims[what != "forward"]
        rates = (480.0, 530.0) if heads.dim == 128 else (300.0, 340.0)
        return Goal(floor, aim, self.plain, self.plain_aim, *(rates if capped and what == "forward" else ()))


_CLOSE = Bounds(1.5, 1.4, 1.10, 1.05)
_PACKED = Bounds(1.5, 1.4)
_BESIDE_PLAIN = Bounds(plain=1.10, plain_aim=1.05)
_BIAS = Bounds(1.25, 1.2, 1.45, 1.45, aims=(1.4, 1.4))
_LEARNED_BIAS = _BIAS._replace(plain=0.0, plain_aim=0.0)  # a plain problem has nothing like its gradient
_TABLE = Bounds(2.0, 1.8)
_DROPOUT = Bounds(1.4, 1.3, 1.35, 1.35)
_RANDOM = Bounds(1.2, 1.1)
_SOFTCAP = Bounds()


class Variant(NamedTuple):
    """What is asked of scores; `plain` is the band that it is held against, None where there is nothing alike.

    `beside_batch`: the plain problem is a batch of shorter sequences, and nothing else is timed.
    """

    name: str
    bounds: Bounds
    mask: Mask = Full()
    plain: Mask | None = None
    scores: tuple[Term, ...] = ()
    learned: tuple[str, ...] = ()
    contents: str = ""
    dropout: float = 0.0
    beside_batch: bool = False

    def problem(self, heads: Heads, seq: int) -> Problem:
        mask = self.mask
        if isinstance(mask, Dense) and mask.additive:
            mask = Dense((1, heads.queries, seq, seq), additive=True)
        return Problem(
            batch=BATCH,
            heads_q=heads.queries,
            heads_kv=heads.keys,
            seq_q=seq,
            seq_kv=seq,
            head_dim=heads.dim,
            head_dim_v=heads.dim,
            dtype=torch.bfloat16,
            mask=mask,
            scores=self.scores,
            dropout=self.dropout,
            needs_grad=True,
            operand_grads=self.learned,
        )

    def rows(self, heads: Heads, seq: int, device: str) -> tuple[Row, Row]:
        """Of the forward and of the step."""
        problem = self.problem(heads, seq)
        peers = () if self.beside_batch else _DROPPING_PEERS if self.dropout else _PEERS
        compared = None if self.plain is None else self._plain(problem, self.plain)
        candidates = (OURS, *((PLAIN,) if compared else ()), *peers)
        capped = any(isinstance(term, Softcap) for term in self.scores)

        def row(what: str) -> Row:
            options: dict[str, Any] = {"device": device, "contents": self.contents, "plain": compared}
            goal = self.bounds.goal(what, heads, capped=capped)
            name = f"bfloat16 {heads.shape(seq)} {self.name} {what}"
            return Row(name, problem, candidates, times=(what,), goal=goal, **options)

        return row("forward"), row("step")

    def _plain(self, problem: Problem, mask: Mask) -> Plain:
        plain = problem.with_(mask=mask, scores=(), operand_grads=(), dropout=0.0)
        if self.beside_batch:
            plain = _in_sequences(plain, problem.pairs())
        shows = self.contents not in ("", NORMAL)
        visible = Pattern.parse(self.contents) if shows else None
        if visible is None:
            pairs = problem.pairs()
        else:
            pairs = visible._replace(causal=visible.causal or mask == Causal()).pairs(problem)
        return Plain(plain, pairs / plain.pairs())


def _in_sequences(problem: Problem, pairs: int) -> Problem:
    """The batch of equal causal sequences that has about as many tokens as a problem, and as many visible pairs.

    A causal sequence has half as many pairs per token as it has tokens.
    """
    tokens = problem.batch * problem.seq_q
    length = max(1, round(2 * pairs / (problem.heads_q * tokens)))
    return problem.with_(batch=max(1, round(tokens / length)), seq_q=length, seq_kv=length)


def asked(seq: int = SEQ) -> list[tuple[Heads, Variant]]:
    """All of the suite, for sequences of 4096 or in proportion."""

    def cut(*lengths: int) -> tuple[int, ...]:
        return tuple(length * seq // SEQ for length in lengths)

    (prefix, window), full, causal = cut(_PREFIX, _WINDOW), Full(), Causal()
    padding = f"padding:{','.join(map(str, cut(*_LENGTHS)))}"
    per_key, per_pair, shared = Dense((BATCH, 1, 1, seq)), Dense((BATCH, 1, seq, seq)), Dense((1, 1, seq, seq))
    band, bias = Window(window - 1, 0), Dense((1, 1, seq, seq), additive=True)
    keep, table = Keep(over=("head", "row")), RelativeBias(2 * seq, seq)
    four, seven = (Documents(cut(*starts), (), causal) for starts in (_FOUR_DOCUMENTS, _SEVEN_DOCUMENTS))
    padded = Variant("padding", _CLOSE, per_key, full, contents=padding)
    causal_padded = Variant("causal padding", _CLOSE, per_pair, causal, contents=f"causal+{padding}")
    causal_keep = Variant("causal keep", _CLOSE, causal, causal, (keep,), contents=padding)
    biased = Variant("bias", _BIAS, bias, full, contents=NORMAL)
    bias_learned = Variant("bias grad", _LEARNED_BIAS, bias, full, learned=("bias",), contents=NORMAL)
    alibi = Variant("alibi causal", _CLOSE, causal, causal, (Alibi(),))
    documents, more_documents = (
        (
            Variant(f"{name} causal", _PACKED, mask, causal),
            Variant(f"{name} causal beside a batch", _BESIDE_PLAIN, mask, causal, beside_batch=True),
        )
        for name, mask in (("4 documents", four), ("7 documents", seven))
    )
    capped = Variant("softcap 30", _SOFTCAP, full, full, (Softcap(30.0),))
    dropped = Variant("dropout 0.1 causal", _DROPOUT, causal, causal, dropout=0.1)
    sink = Variant("sinks causal", _BESIDE_PLAIN, causal, causal, (Sink(),), ("sink",))
    sink_window = Variant("sinks window 1024", _BESIDE_PLAIN, band, band, (Sink(),), ("sink",))
    wide = (
        padded,
        Variant("key lengths", _CLOSE, full, full, (KeyLengths(),), contents=padding),
        causal_padded,
        causal_keep,
        biased,
        bias_learned,
        Variant("bias table grad", _TABLE, full, full, (table,), ("table",)),
        alibi,
        *documents,
        *more_documents,
        Variant("prefix 1000 tensor", _CLOSE, shared, causal, contents=f"prefix:{prefix}"),
        *_prefixes(prefix),
        capped,
        dropped,
        sink,
        sink_window,
        Variant("random mask", _RANDOM, shared, full),
    )
    narrow = (padded, causal_padded, biased, bias_learned, alibi, capped, dropped, sink_window)
    grouped = (padded, causal_keep, *documents, sink)
    by_heads = ((WIDE, wide), (NARROW, narrow), (GROUPED, grouped))
    return [(heads, variant) for heads, variants in by_heads for variant in variants]


def _prefixes(prefix: int) -> list[Variant]:
    """A prefix by name, where this package has a name for it."""
    try:
        return [Variant("prefix 1000", _CLOSE, masks.parse(f"prefix_lm:{prefix}"), Causal())]
    except InvalidInput:
        return []


def rows(seq: int = SEQ, device: str = "cuda") -> tuple[Row, ...]:
    """A forward and a step of each; those of one problem stand together."""
    return tuple(row for heads, variant in asked(seq) for row in variant.rows(heads, seq, device))


SUITE = Suite(rows(), {"round_seconds": 0.012, "overhead": False, "more_seconds": 0.5}, (FA4,))
