"""Masks: which keys a query sees. A mask is a frozen, hashable value without tensors, alike for all batches and heads.

(Masks made of a tensor on a device are the exception: see `holds_tensors`. `attention` splits them into a term of the
scores and its operands, and no later layer sees one.)

Every structural mask lets query row `i` see one contiguous *span* of keys [begin, end), and the ends of the span never
move left as `i` grows. Everything else follows from those two facts: the element rule, the class of a tile (full,
partial, empty), the range of keys that a block of rows needs, and the number of visible pairs.

    Full                     every key
    Causal(align, offset)    keys up to the row's own position
    Window(left, right, ...) keys from `left` before to `right` after the row's position; None = unlimited
    Documents(cu_seqlens)    packed sequences: keys of the row's own document, under an inner mask
    PrefixLM(prefix)         the first keys, and keys up to the row's own position
    KeyLengths(lengths)      so many keys of each batch, the rest being padding; always made of a tensor
    Packed(sequences, ...)   sequences whose offsets travel beside the problem; what `attention_packed` makes
    Cached(batches, ...)     keys in a cache whose lengths travel beside the problem; what `attention_cached` makes
    Dense(shape, additive)   a tensor that travels beside the problem; nothing is known about its values here

A row's position is its number, where the first row is aligned with the first key (top-left, PyTorch's is_causal), or
its number plus seq_kv - seq_q, where the last row is aligned with the last key (bottom-right, what decoding and
flash-attn mean by causal). The `offset` of a mask is added to it, and may be negative. With it one mask describes a
part of a longer sequence: rows from `a` on and keys from `b` on of a causal sequence are Causal(offset=a - b).

Masks have a text form, used by the command line, by operator arguments and in results: `parse(str(mask)) == mask`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sized
from dataclasses import dataclass, replace
from enum import Enum
from itertools import pairwise
from numbers import Integral
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

import torch

from .errors import InvalidInput
from .operands import Operand

if TYPE_CHECKING:
    from collections.abc import Iterable

Align = Literal["top-left", "bottom-right"]

# Larger than any sequence and small enough that row + offset +- UNLIMITED fits in the kernels' 32-bit integers.
UNLIMITED = 1 << 29
# No sequence is longer. Larger offsets would hide keys from rows whose side of the band is unlimited.
MAX_OFFSET = UNLIMITED // 2


class Tile(Enum):
    """What a mask does to a rectangle of scores."""

    FULL = "full"  # every pair is visible: no mask code runs
    PARTIAL = "partial"  # some pairs may be hidden: mask element by element
    EMPTY = "empty"  # no pair is visible: skip it


class Band(NamedTuple):
    """Row `i` sees keys `i + offset - left` to `i + offset + right`, both included, as far as they exist."""

    left: int
    right: int
    offset: int


_KINDS: dict[str, type[Mask]] = {}


class Mask:
    """What all masks share. Subclasses define `span`, `spans` and a text form; spans must be monotone in the row.

    The text form is `kind`, or `kind:...`, which `from_text` reads; `parse` finds a class as soon as it is defined.
    """

    __slots__ = ()
    kind: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        if cls.kind:
            _KINDS[cls.kind] = cls

    @classmethod
    def from_text(cls, text: str) -> Mask:
        """From what stands behind `kind:` in the text form."""
        raise NotImplementedError

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The tensors that it is made of; none for a mask that is a rule."""
        return ()

    @property
    def holds_tensors(self) -> bool:
        """What it hides is known to a device alone: it is for `attention`, and no part of a Problem."""
        return False

    @property
    def hashable(self) -> bool:
        """It is a value: calls are remembered by it."""
        return not self.holds_tensors

    def of(self, q: torch.Tensor, k: torch.Tensor, operands: Any) -> Mask:
        """The mask of these (batch, heads, rows, dim) views and operands, which a trace may not have known."""
        return self

    def places(self, k: torch.Tensor, operands: Any) -> int:
        """The keys of a sequence, given the view of k."""
        return k.shape[2]

    def band(self, seq_q: int, seq_kv: int) -> Band | None:
        """The mask as a diagonal band; None where it is none, and kernels read its spans from memory."""
        return None

    def hull(self) -> Full | Causal | Window:
        """A band that shows all that this mask shows: what kernels know of its spans before they read them."""
        return Full()

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        """Keys [begin, end) that `row` sees."""
        raise NotImplementedError

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`span` for an int64 vector of rows at once."""
        raise NotImplementedError

    def pairs(self, seq_q: int, seq_kv: int) -> int:
        """Number of visible (row, key) pairs."""
        begin, end = self.spans(torch.arange(seq_q), seq_q, seq_kv)
        return int((end - begin).clamp(min=0).sum())

    def rows_that_see(self, seq_q: int, seq_kv: int) -> int:
        """Number of rows that see a key at all."""
        begin, end = self.spans(torch.arange(seq_q), seq_q, seq_kv)
        return int((end > begin).sum())

    def check(self, seq_q: int, seq_kv: int) -> None:
        """Raise InvalidInput if the mask does not fit these lengths."""

    def visible(self, row: int, key: int, seq_q: int, seq_kv: int) -> bool:
        """The element rule."""
        begin, end = self.span(row, seq_q, seq_kv)
        return begin <= key < end

    def keys(self, rows: range, seq_q: int, seq_kv: int) -> range:
        """The keys that a block of rows has to look at: from the first row's begin to the last row's end."""
        if not rows:
            return range(0)
        begin = self.span(rows[0], seq_q, seq_kv)[0]
        end = self.span(rows[-1], seq_q, seq_kv)[1]
        return range(begin, max(begin, end))

    def tile(self, rows: range, keys: range, seq_q: int, seq_kv: int) -> Tile:
        """Class of the tile rows x keys. Never FULL with a hidden pair, never EMPTY with a visible one."""
        if not rows or not keys:
            return Tile.EMPTY
        first_begin, first_end = self.span(rows[0], seq_q, seq_kv)
        last_begin, last_end = self.span(rows[-1], seq_q, seq_kv)
        if last_end <= keys.start or first_begin >= keys.stop:
            return Tile.EMPTY
        if last_begin <= keys.start and first_end >= keys.stop:
            return Tile.FULL
        return Tile.PARTIAL

    def to_bool(
        self, rows: range, keys: range, seq_q: int, seq_kv: int, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """The element rule as a boolean tensor (len(rows), len(keys)); True = visible."""
        row = torch.arange(rows.start, rows.stop, device=device)
        key = torch.arange(keys.start, keys.stop, device=device)
        begin, end = self.spans(row, seq_q, seq_kv)
        return (key >= begin[:, None]) & (key < end[:, None])


class _OfTensors(Mask):
    """A mask that may be of tensors on a device. It keeps what is made of them, so that one mask serves all layers.

    A mask made later reads its tensors anew. Changes after a mask was first used count by the versions of its tensors;
    those that PyTorch does not count (through `.data`, or by kernels of other libraries) raise under TILEWISE_CHECK=1,
    and are not noticed without it.
    """

    __slots__ = ("made",)
    made: Any  # what `problem` keeps here; no field, so that neither values nor copies depend on it


class _Banded(Mask):
    """Masks that are a diagonal band: the form the CUDA kernels take."""

    __slots__ = ()

    def band(self, seq_q: int, seq_kv: int) -> Band:
        raise NotImplementedError

    def hull(self) -> Full | Causal | Window:
        assert isinstance(self, Full | Causal | Window)
        return self

    def rows_that_see(self, seq_q: int, seq_kv: int) -> int:
        left, right, offset = self.band(seq_q, seq_kv)
        first = max(0, -offset - right)
        last = min(seq_q - 1, seq_kv - 1 - offset + left)
        return max(0, last - first + 1) if seq_kv else 0

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        left, right, offset = self.band(seq_q, seq_kv)
        position = row + offset
        return _clamp(position - left, seq_kv), _clamp(position + right + 1, seq_kv)

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        left, right, offset = self.band(seq_q, seq_kv)
        position = rows + offset
        return (position - left).clamp(0, seq_kv), (position + right + 1).clamp(0, seq_kv)

    def pairs(self, seq_q: int, seq_kv: int) -> int:
        left, right, offset = self.band(seq_q, seq_kv)
        return _clamped_sum(seq_q, offset + right + 1, seq_kv) - _clamped_sum(seq_q, offset - left, seq_kv)


@dataclass(frozen=True, slots=True)
class Full(_Banded):
    """Every query sees every key."""

    kind: ClassVar[str] = "full"

    @classmethod
    def from_text(cls, text: str) -> Full:
        if text:
            raise ValueError(text)
        return cls()

    def band(self, seq_q: int, seq_kv: int) -> Band:
        return Band(UNLIMITED, UNLIMITED, 0)

    def __str__(self) -> str:
        return "full"


@dataclass(frozen=True, slots=True)
class Causal(_Banded):
    """A query sees its own position and everything before it. Its position is moved by `offset`."""

    kind: ClassVar[str] = "causal"

    align: Align = "top-left"
    offset: int = 0

    def __post_init__(self) -> None:
        _check_align(self.align)
        _keep_offset(self, self.offset)

    @classmethod
    def from_text(cls, text: str) -> Causal:
        return cls(*_parse_place(text))

    def band(self, seq_q: int, seq_kv: int) -> Band:
        return Band(UNLIMITED, 0, _offset(self.align, seq_q, seq_kv) + self.offset)

    def __str__(self) -> str:
        return f"causal{_place_suffix(self.align, self.offset)}"


@dataclass(frozen=True, slots=True)
class Window(_Banded):
    """A query sees `left` keys before its position, its own, and `right` keys after it. None = unlimited.

    Its position is moved by `offset`.
    """

    kind: ClassVar[str] = "window"

    left: int | None
    right: int | None = 0
    align: Align = "top-left"
    offset: int = 0

    def __post_init__(self) -> None:
        _check_align(self.align)
        _keep_offset(self, self.offset)
        for name, size in (("left", self.left), ("right", self.right)):
            if size is None:
                continue
            whole = _whole(size)
            if whole is not size:
                object.__setattr__(self, name, whole)
            if whole is None or not 0 <= whole < UNLIMITED:
                raise InvalidInput(
                    f"Window.{name}",
                    repr(size),
                    f"an integer from 0 to {UNLIMITED - 1}, or None",
                    "pass the number of keys on that side; None (not -1) means no limit",
                )

    @classmethod
    def from_text(cls, text: str) -> Window:
        sizes, _, place = text.partition(":")
        left, right = (None if size == "inf" else int(size) for size in sizes.split(","))
        return cls(left, right, *_parse_place(place))

    def band(self, seq_q: int, seq_kv: int) -> Band:
        left = UNLIMITED if self.left is None else self.left
        right = UNLIMITED if self.right is None else self.right
        return Band(left, right, _offset(self.align, seq_q, seq_kv) + self.offset)

    def __str__(self) -> str:
        return f"window:{_size_text(self.left)},{_size_text(self.right)}{_place_suffix(self.align, self.offset)}"


@dataclass(frozen=True, slots=True)
class Documents(_OfTensors):
    """Packed sequences: document `n` owns rows cu_seqlens_q[n] to cu_seqlens_q[n + 1], and likewise keys.

    `inner` applies inside each document, aligned to that document's own lengths. The offsets may be given as any
    sequence of integers or a tensor. A tensor on a device stays there, and the host never waits for it: its offsets
    begin at 0 and never fall, which is not checked. Rows behind the last of them see nothing.
    """

    kind: ClassVar[str] = "documents"

    cu_seqlens_q: tuple[int, ...]
    cu_seqlens_kv: tuple[int, ...] = ()
    inner: Full | Causal | Window = None  # type: ignore[assignment]  # Full(), which torch.compile cannot take from here

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", _inner_mask("Documents.inner", self.inner))
        starts_q = _offsets("Documents.cu_seqlens_q", self.cu_seqlens_q)
        given = self.cu_seqlens_kv
        same = isinstance(given, Sized) and getattr(given, "ndim", 1) > 0 and not len(given)
        starts_kv = starts_q if same else _offsets("Documents.cu_seqlens_kv", given)
        if isinstance(starts_q, torch.Tensor) != isinstance(starts_kv, torch.Tensor):
            raise InvalidInput(
                "Documents.cu_seqlens_kv",
                "offsets of queries and of keys, of which only one is a tensor on a device",
                "both there, or both as integers",
                "move one of them",
            )
        if len(starts_q) != len(starts_kv):
            raise InvalidInput(
                "Documents.cu_seqlens_kv",
                f"{len(starts_kv)} offsets",
                f"{len(starts_q)}, as many as cu_seqlens_q has",
                "give both one offset per document and the total length at the end",
            )
        object.__setattr__(self, "cu_seqlens_q", starts_q)
        object.__setattr__(self, "cu_seqlens_kv", starts_kv)

    @property
    def holds_tensors(self) -> bool:
        return isinstance(self.cu_seqlens_q, torch.Tensor)

    def hull(self) -> Full | Causal | Window:
        """The inner mask, where a row has the number of its key: all documents are squares on the diagonal."""
        same = self.cu_seqlens_q is self.cu_seqlens_kv or (
            not self.holds_tensors and self.cu_seqlens_q == self.cu_seqlens_kv
        )
        if not same or isinstance(self.inner, Full):
            return Full()
        return first_aligned(self.inner)

    @classmethod
    def from_text(cls, text: str) -> Documents:
        starts, _, inner_text = text.partition(":")
        starts_q, _, starts_kv = starts.partition("/")
        inner = parse(inner_text) if inner_text else Full()
        return cls(_ints(starts_q), _ints(starts_kv) if starts_kv else (), inner)  # type: ignore[arg-type]

    def check(self, seq_q: int, seq_kv: int) -> None:
        _check_held(self)
        for name, starts, length in (("q", self.cu_seqlens_q, seq_q), ("kv", self.cu_seqlens_kv, seq_kv)):
            if starts[-1] != length:
                raise InvalidInput(
                    f"Documents.cu_seqlens_{name}",
                    f"a total length of {starts[-1]}",
                    f"{length}, the sequence length of the tensor",
                    "the last offset is the total; make padding a document of its own",
                )

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        n = bisect_right(self.cu_seqlens_q, row) - 1
        row_start, row_stop = self.cu_seqlens_q[n : n + 2]
        key_start, key_stop = self.cu_seqlens_kv[n : n + 2]
        begin, end = self.inner.span(row - row_start, row_stop - row_start, key_stop - key_start)
        return key_start + begin, key_start + end

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        starts_q, starts_kv = (_on(starts, rows.device) for starts in (self.cu_seqlens_q, self.cu_seqlens_kv))
        found = torch.searchsorted(starts_q, rows, right=True) - 1
        document = found.clamp(max=len(starts_q) - 2)
        begin, end = starts_kv[document], starts_kv[document + 1]
        begin = torch.where(found > document, end, begin)  # rows behind the last document, which see nothing
        left, right, offset = self.inner.band(0, 0)
        position = rows - starts_q[document] + offset
        if getattr(self.inner, "align", "top-left") == "bottom-right":
            position = position + (end - begin) - (starts_q[document + 1] - starts_q[document])
        length = end - begin
        zero = torch.zeros_like(length)
        return begin + (position - left).clamp(zero, length), begin + (position + right + 1).clamp(zero, length)

    def pairs(self, seq_q: int, seq_kv: int) -> int:
        lengths = zip(pairwise(self.cu_seqlens_q), pairwise(self.cu_seqlens_kv), strict=True)
        return sum(self.inner.pairs(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in lengths)

    def rows_that_see(self, seq_q: int, seq_kv: int) -> int:
        lengths = zip(pairwise(self.cu_seqlens_q), pairwise(self.cu_seqlens_kv), strict=True)
        return sum(self.inner.rows_that_see(q1 - q0, k1 - k0) for (q0, q1), (k0, k1) in lengths)

    def __str__(self) -> str:
        starts = ",".join(map(_size_text, self.cu_seqlens_q))
        if self.cu_seqlens_kv != self.cu_seqlens_q:
            starts += "/" + ",".join(map(_size_text, self.cu_seqlens_kv))
        if isinstance(self.inner, Full):
            return f"documents:{starts}"
        return f"documents:{starts}:" + str(self.inner)  # str, which torch.compile traces: it does not trace a format


@dataclass(frozen=True, slots=True)
class PrefixLM(_OfTensors):
    """A query sees the first `prefix` keys, its own position and everything before it.

    `prefix` is a number, or a tensor (batch,) of integers, which stays on its device.
    """

    kind: ClassVar[str] = "prefix_lm"

    prefix: int | torch.Tensor
    align: Align = "top-left"

    def __post_init__(self) -> None:
        _check_align(self.align)
        given = self.prefix
        if isinstance(given, torch.Tensor):
            _check_per_batch("PrefixLM.prefix", given)
            return
        whole = _whole(given)
        object.__setattr__(self, "prefix", whole)
        if whole is None or not 0 <= whole < UNLIMITED:
            raise InvalidInput(
                "PrefixLM.prefix",
                repr(given),
                f"an integer from 0 to {UNLIMITED - 1}, or a tensor (batch,) of integers",
                "pass the number of keys that every query sees",
            )

    @classmethod
    def from_text(cls, text: str) -> PrefixLM:
        prefix, _, align = text.partition(":")
        return cls(int(prefix), _parse_align(align))

    @property
    def holds_tensors(self) -> bool:
        return isinstance(self.prefix, torch.Tensor)

    def check(self, seq_q: int, seq_kv: int) -> None:
        _check_held(self)

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        assert isinstance(self.prefix, int), "a Problem has no mask of tensors"
        return 0, _clamp(max(self.prefix, row + _offset(self.align, seq_q, seq_kv) + 1), seq_kv)

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        prefix: Any = self.prefix
        if isinstance(prefix, torch.Tensor):
            prefix = prefix.to(rows.device)[:, None]
        end = (rows + (_offset(self.align, seq_q, seq_kv) + 1)).clamp(min=prefix).clamp(0, seq_kv)
        return torch.zeros_like(end), end

    def __str__(self) -> str:
        prefix = "tensor" if isinstance(self.prefix, torch.Tensor) else _size_text(self.prefix)
        return f"prefix_lm:{prefix}{_align_suffix(self.align)}"


@dataclass(frozen=True, slots=True, eq=False)
class KeyLengths(Mask):
    """Of each batch only `lengths` keys are there; the others, behind them (side="right") or before, are padding.

    `lengths` is a tensor (batch,) of integers, which stays on its device, or a sequence of them, which every call
    copies there. `inner` applies beside it: Full, Causal, a Window, or its text form.
    """

    lengths: torch.Tensor
    side: Literal["left", "right"] = "right"
    inner: Full | Causal | Window = None  # type: ignore[assignment]  # as in Documents

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", _inner_mask("KeyLengths.inner", self.inner))
        if self.side not in ("left", "right"):
            raise InvalidInput(
                "KeyLengths.side", repr(self.side), "'left' or 'right'", "name the side that is padded; right is usual"
            )
        given: Any = self.lengths
        lengths = given if isinstance(given, torch.Tensor) else _per_batch("KeyLengths.lengths", given)
        _check_per_batch("KeyLengths.lengths", lengths)
        object.__setattr__(self, "lengths", lengths)

    @property
    def holds_tensors(self) -> bool:
        return True

    def hull(self) -> Full | Causal | Window:
        return self.inner

    def check(self, seq_q: int, seq_kv: int) -> None:
        _check_held(self)

    def __str__(self) -> str:
        return f"key_lengths:{self.side}"


@dataclass(frozen=True, slots=True)
class Dense(Mask):
    """A mask tensor described, not held: `shape` broadcasts to (batch, heads_q, seq_q, seq_kv).

    Boolean (True = visible) or additive (added to the scaled scores). Its values are unknown to the planner, so every
    tile counts as partial and every pair as visible.
    """

    kind: ClassVar[str] = "dense"

    shape: tuple[int, ...]
    additive: bool = False
    paired: bool = False  # kernels may read two keys of a row at once: they are neighbours, and rows begin at even ones

    @classmethod
    def from_text(cls, text: str) -> Dense:
        values, _, rest = text.partition(":")
        shape, _, paired = rest.partition(":")
        sizes = tuple(int(size) for size in shape.split("x"))
        return cls(sizes, {"bool": False, "additive": True}[values], {"": False, "paired": True}[paired])

    @property
    def operands(self) -> tuple[Operand, ...]:
        """`bias`, which is added and has a gradient, or `keep`, which is True where a key is visible."""
        return (Operand("bias", differentiable=True) if self.additive else Operand("keep"),)

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        return 0, seq_kv

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(rows), torch.full_like(rows, seq_kv)

    def pairs(self, seq_q: int, seq_kv: int) -> int:
        return seq_q * seq_kv

    def tile(self, rows: range, keys: range, seq_q: int, seq_kv: int) -> Tile:
        return Tile.PARTIAL if rows and keys else Tile.EMPTY

    def check(self, seq_q: int, seq_kv: int) -> None:
        trailing = self.shape[-2:]
        fits = all(size in (1, length) for size, length in zip(reversed(trailing), (seq_kv, seq_q), strict=False))
        if not 1 <= len(self.shape) <= 4 or not fits:
            raise InvalidInput(
                "mask",
                f"a tensor of shape {self.shape}",
                f"one that broadcasts to (batch, heads, {seq_q}, {seq_kv})",
                "give each of its dimensions the full size or 1",
            )

    def __str__(self) -> str:
        kind = "additive" if self.additive else "bool"
        return f"dense:{kind}:{'x'.join(map(str, self.shape))}{':paired' * self.paired}"


@dataclass(frozen=True, slots=True)
class Packed(Mask):
    """Sequences that stand behind one another, under an inner mask each: described, not held.

    Their offsets are the operands `cu_seqlens_q` and `cu_seqlens_kv`, int32 (sequences + 1,) on the tensors' device,
    from 0 and never falling. What lies behind the last offset sees nothing, and nothing sees it. No sequence is longer
    than `max_q` and `max_kv` say, where they are not 0: by these tiles are chosen, and nothing else. `same`: the
    keys have the offsets of the queries. `used`: of the keys of each sequence only the first are there, as many as a
    third operand says, `seqused_k` (sequences,); the inner mask is aligned to these. `padded`: of the keys of each
    sequence the first are padding, as many as the last operand says, `leftpad_k` (sequences,), and count among those
    that are used.

    A trace does not know how many sequences there are: 0 stands for that until the call runs (`of`).
    """

    kind: ClassVar[str] = "packed"

    sequences: int
    max_q: int = 0
    max_kv: int = 0
    inner: Full | Causal | Window = None  # type: ignore[assignment]  # as of Documents
    same: bool = False
    used: bool = False
    padded: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", _inner_mask("Packed.inner", self.inner))

    @classmethod
    def from_text(cls, text: str) -> Packed:
        sizes, _, inner = text.partition(":")
        sequences, max_q, max_kv, flags = _ints(sizes)
        told = (bool(flags & bit) for bit in (1, 2, 4))
        return cls(sequences, max_q, max_kv, parse(inner), *told)  # type: ignore[arg-type]

    def of(self, q: torch.Tensor, k: torch.Tensor, operands: Any) -> Packed:
        offsets = operands.get("cu_seqlens_q")
        sequences = self.sequences if offsets is None else offsets.shape[0] - 1
        return self if sequences == self.sequences else replace(self, sequences=sequences)

    @property
    def operands(self) -> tuple[Operand, ...]:
        names = ["cu_seqlens_q", "cu_seqlens_kv"]
        names += ["seqused_k"] * self.used + ["leftpad_k"] * self.padded
        return tuple(Operand(name, dtype=torch.int32) for name in names)

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        return 0, seq_kv

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(rows), torch.full_like(rows, seq_kv)

    def pairs(self, seq_q: int, seq_kv: int) -> int:
        """Of sequences that are all alike: what is known without the offsets."""
        count = max(1, self.sequences)
        return count * self.inner.pairs(seq_q // count, seq_kv // count)

    def tile(self, rows: range, keys: range, seq_q: int, seq_kv: int) -> Tile:
        return Tile.PARTIAL if rows and keys else Tile.EMPTY

    def __str__(self) -> str:
        flags = "01234567"[self.same + 2 * self.used + 4 * self.padded]
        sizes = ",".join((str(self.sequences), str(self.max_q), str(self.max_kv), flags))
        return "packed:" + sizes + ":" + str(self.inner)


@dataclass(frozen=True, slots=True)
class Cached(Mask):
    """Keys in a cache, of which each sequence has some, under an inner mask: described, not held.

    k and v are (batches, heads, places, dim): one batch per sequence, or with a `page_size` one per page. Operands, in
    int32 on the tensors' device, say where the keys of sequence `n` are:

        page_table    (sequences, pages): place p is row p % page_size of page page_table[n, p // page_size]
        cache_lengths (sequences,): places [0, cache_lengths[n]) are taken; `lengths`, else all
        cache_starts  (sequences,): those before cache_starts[n] are not keys; `starts`, else there are none
        cache_rows    (sequences,): the batch of k and v; `rows`, else n
        cu_seqlens_q  (sequences + 1,): where queries of different numbers are packed into one batch; `packed`

    No sequence has more than `max_q` queries, where it is not 0: a hint by which tiles are chosen. The inner mask is
    aligned to the keys of each sequence by itself. `invariant`: the bits of a row may depend on its own sequence alone.
    """

    kind: ClassVar[str] = "cached"

    batches: int
    page_size: int = 0
    sequences: int = 0
    max_q: int = 0
    inner: Full | Causal | Window = None  # type: ignore[assignment]  # as of Documents
    packed: bool = False
    lengths: bool = False
    starts: bool = False
    rows: bool = False
    invariant: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "inner", _inner_mask("Cached.inner", self.inner))

    @classmethod
    def from_text(cls, text: str) -> Cached:
        sizes, _, inner = text.partition(":")
        *numbers, flags = _ints(sizes)
        batches, page_size, sequences, max_q = numbers
        bits = [bool(flags >> bit & 1) for bit in range(5)]
        return cls(batches, page_size, sequences, max_q, parse(inner), *bits)  # type: ignore[arg-type]

    @property
    def operands(self) -> tuple[Operand, ...]:
        there = {
            "cu_seqlens_q": self.packed,
            "cache_lengths": self.lengths,
            "cache_starts": self.starts,
            "cache_rows": self.rows,
            "page_table": self.page_size > 0,
        }
        return tuple(Operand(name, dtype=torch.int32) for name, given in there.items() if given)

    def of(self, q: torch.Tensor, k: torch.Tensor, operands: Any) -> Cached:
        sequences = operands["cu_seqlens_q"].shape[0] - 1 if self.packed else q.shape[0]
        page_size = k.shape[2] if self.page_size else 0
        return replace(self, batches=k.shape[0], page_size=page_size, sequences=sequences)

    def places(self, k: torch.Tensor, operands: Any) -> int:
        if not k.shape[0]:
            return 0
        return k.shape[2] * (operands["page_table"].shape[1] if self.page_size else 1)

    def span(self, row: int, seq_q: int, seq_kv: int) -> tuple[int, int]:
        return 0, seq_kv

    def spans(self, rows: torch.Tensor, seq_q: int, seq_kv: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(rows), torch.full_like(rows, seq_kv)

    def pairs(self, seq_q: int, seq_kv: int) -> int:
        """Of sequences that fill their places and share the queries evenly: what is known without the operands."""
        return seq_q * seq_kv if self.packed else self.inner.pairs(seq_q, seq_kv)

    def tile(self, rows: range, keys: range, seq_q: int, seq_kv: int) -> Tile:
        return Tile.PARTIAL if rows and keys else Tile.EMPTY

    def __str__(self) -> str:
        flags = self.packed + 2 * self.lengths + 4 * self.starts + 8 * self.rows + 16 * self.invariant
        sizes = ",".join((str(self.batches), str(self.page_size), str(self.sequences), str(self.max_q), str(flags)))
        return "cached:" + sizes + ":" + str(self.inner)


def parse(text: str) -> Mask:
    """The mask a text stands for: full, causal[:bottom-right][:offset=N], window:LEFT,RIGHT[:bottom-right][:offset=N],
    documents:0,a,b[/0,c,d][:INNER], prefix_lm:N[:bottom-right], dense:bool|additive:AxBxCxD."""
    kind, _, rest = text.strip().lower().partition(":")
    try:
        return _KINDS[kind].from_text(rest)
    except (ValueError, KeyError) as error:
        if isinstance(error, InvalidInput):
            raise
    others = sorted(_KINDS.keys() - {"full", "causal", "window", "documents", "prefix_lm", "dense"})
    known = (
        "full, causal, causal:bottom-right, causal:offset=N, window:LEFT,RIGHT, documents:0,a,b, prefix_lm:N or "
        "dense:bool:SHAPE"
    )
    raise InvalidInput(
        "mask",
        repr(text),
        ", ".join([*others, known]),
        "write e.g. window:1024,0 or window:inf,0:bottom-right",
    )


def _parse_align(text: str) -> Align:
    return _check_align(text or "top-left")


def _check_align(align: str) -> Align:
    if align == "top-left":
        return "top-left"
    if align == "bottom-right":
        return "bottom-right"
    raise InvalidInput(
        "mask alignment",
        repr(align),
        "'top-left' or 'bottom-right'",
        "top-left is PyTorch's is_causal; bottom-right is flash-attn's causal and right for decoding",
    )


def _size_text(size: int | None) -> str:
    """Inside torch.compile a size that varies is a symbol, and a range binds it to its value; it has no text."""
    return "inf" if size is None else str(len(range(size)))


def size_in_bytes(mask: Mask) -> int:
    """What a mask holds, roughly; 0 for those of a fixed size."""
    if not isinstance(mask, Documents):
        return 0
    offsets = len(mask.cu_seqlens_q) + (len(mask.cu_seqlens_kv) if mask.cu_seqlens_kv is not mask.cu_seqlens_q else 0)
    return 40 * offsets


def _align_suffix(align: Align) -> str:
    return "" if align == "top-left" else f":{align}"


def _parse_place(text: str) -> tuple[Align, int]:
    """The alignment and the offset of a band: [bottom-right][:offset=N]."""
    *before, last = text.split(":")
    name, sign, number = last.partition("=")
    if not sign:
        return _parse_align(text), 0
    if name != "offset":
        raise ValueError(text)
    return _parse_align(":".join(before)), int(number)


def _place_suffix(align: Align, offset: int) -> str:
    sign = "-" if offset < 0 else ""
    return _align_suffix(align) + (f":offset={sign}{_size_text(abs(offset))}" if offset else "")


def _keep_offset(mask: Causal | Window, given: Any) -> None:
    whole = _whole(given)
    if whole is None or not -MAX_OFFSET <= whole <= MAX_OFFSET:
        raise InvalidInput(
            f"{type(mask).__name__}.offset",
            repr(given),
            f"an integer from {-MAX_OFFSET} to {MAX_OFFSET}",
            "pass by how many keys the diagonal is moved to the right; 0 leaves it where `align` puts it",
        )
    if whole is not given:
        object.__setattr__(mask, "offset", whole)


def _offset(align: Align, seq_q: int, seq_kv: int) -> int:
    return seq_kv - seq_q if align == "bottom-right" else 0


def _clamp(value: int, high: int) -> int:
    return min(max(value, 0), high)


def _clamped_sum(n: int, start: int, high: int) -> int:
    """Sum of clamp(start + i, 0, high) for i in range(n), without a loop."""
    below = _clamp(-start, n)  # terms clamped to 0
    above = _clamp(start + n - high, n)  # terms clamped to high
    middle = n - below - above
    if middle <= 0:
        return high * min(above, n)
    first = start + below
    return middle * first + middle * (middle - 1) // 2 + high * above


def first_aligned(inner: Full | Causal | Window) -> Full | Causal | Window:
    """The same band where every row is aligned with the key of its number, whatever the lengths."""
    if isinstance(inner, Causal):
        return Causal(offset=inner.offset)
    return Window(inner.left, inner.right, offset=inner.offset) if isinstance(inner, Window) else inner


def _ints(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _inner_mask(name: str, given: Any) -> Full | Causal | Window:
    """The band that applies inside another mask; None stands for Full."""
    mask = Full() if given is None else parse(given) if isinstance(given, str) else given
    if isinstance(mask, Full | Causal | Window):
        return mask
    raise InvalidInput(name, repr(given), "Full, Causal or Window", "nest only these inside other masks")


def _check_held(mask: Mask) -> None:
    """A Problem is a value."""
    if mask.holds_tensors:
        raise InvalidInput(
            "mask",
            f"{type(mask).__name__} of a tensor",
            "a mask of numbers, in whatever describes a call without its tensors",
            "give numbers that the host knows, or pass the mask to tilewise.attention",
        )


def _whole(value: object) -> int | None:
    """An integer of Python or of numpy as one of Python; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | Integral):
        return None
    return value if isinstance(value, int) else int(value)


def _per_batch(name: str, values: Any) -> torch.Tensor:
    try:  # no dtype is named, because that would truncate fractions
        return torch.tensor(values) if len(values) else torch.empty(0, dtype=torch.int32)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(name, repr(values)[:60], "a tensor (batch,) of integers", "pass one per batch") from None


def as_int32(numbers: torch.Tensor) -> torch.Tensor:
    """Integers in int32. Those beyond its range become its nearest number, and keep the side that they are on."""
    if numbers.dtype == torch.int32:
        return numbers
    limits = torch.iinfo(torch.int32)
    return numbers.clamp(limits.min, limits.max).to(torch.int32)


def _check_per_batch(name: str, values: torch.Tensor) -> None:
    if values.ndim == 1 and values.dtype in (torch.int32, torch.int64):
        return
    raise InvalidInput(
        name,
        f"a tensor of shape {tuple(values.shape)} in {values.dtype}",
        "a tensor (batch,) of int32 or int64",
        "pass one number per batch",
    )


def _on(starts: Any, device: torch.device) -> torch.Tensor:
    """Offsets as a tensor on this device."""
    return starts if isinstance(starts, torch.Tensor) else torch.tensor(starts, device=device)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _offsets(name: str, values: Iterable[int]) -> Any:
    """Validated document offsets: from 0, never falling, at least two; or those of a device, as they are."""
    if isinstance(values, torch.Tensor) and not _is_on_host(values):
        if values.ndim == 1 and values.shape[0] > 1 and values.dtype in (torch.int32, torch.int64):
            return values
        raise InvalidInput(
            name,
            f"a tensor of shape {tuple(values.shape)} in {values.dtype}",
            "offsets (documents + 1,) in int32 or int64",
            "pass cumulative lengths such as (0, 5, 12) for documents of 5 and 7",
        )
    listed: Any = values.tolist() if isinstance(values, torch.Tensor) else values
    try:
        given = tuple(listed)
    except TypeError:  # one number, or what is none
        given = (listed,)
    starts: Any = tuple([_whole(start) for start in given])
    if None in starts or len(starts) < 2 or starts[0] != 0 or any(b < a for a, b in pairwise(starts)):
        shown = f"{given[:8]}{'...' if len(given) > 8 else ''}"
        raise InvalidInput(
            name,
            shown,
            "integer offsets that start at 0, never fall, and end at the total length",
            "pass cumulative lengths such as (0, 5, 12) for documents of 5 and 7",
        )
    return starts
