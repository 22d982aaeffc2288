"""Keys in caches, for tests: calls of `attention_cached` as values, and what they mean in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from one_sequence import attend
from support import budget, rounding_budget

Tensor = torch.Tensor


@dataclass(frozen=True)
class Case:
    """A call: sizes, the keys of each sequence, and how the cache lies."""

    lengths: tuple[int, ...]
    tokens: int | tuple[int, ...] = 1  # new ones of each sequence; a tuple: packed
    heads: tuple[int, int] = (4, 1)
    dims: tuple[int, int] = (64, 64)
    page: int = 0
    starts: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16
    causal: bool = True
    window: int | None = None
    terms: tuple[str, ...] = ()  # softcap, alibi, alibi_batched, sink, keep
    capacity: int = 0
    poison: float = math.nan  # what lies where no key is
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"{n}" for n in (self.lengths, self.tokens, self.heads, self.dims)]
        parts += [f"page{self.page}"] * (self.page > 0) + ["starts"] * bool(self.starts) + ["rows"] * bool(self.rows)
        parts += [f"window{self.window}"] * (self.window is not None) + [*self.terms]
        return "-".join(part.replace(" ", "") for part in parts) + ("" if self.causal else "-full")

    def with_(self, **changes: object) -> Case:
        return Case(**{**self.__dict__, **changes})  # type: ignore[arg-type]


@dataclass
class Made:
    """The tensors of a case."""

    q: Tensor
    k: Tensor
    v: Tensor
    told: dict[str, object]  # keywords of attention_cached
    apart: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)  # q (heads, tokens), k, v of each sequence
    slopes: Tensor | None = None
    sink: Tensor | None = None
    keep: Tensor | None = None


SOFTCAP = 4.0


def make(case: Case, device: str = "cpu") -> Made:
    """Tensors on a device: NaN, or what the case says, wherever no key of a sequence lies."""
    torch.manual_seed(case.seed)
    batch, (heads, heads_kv) = len(case.lengths), case.heads
    packed = isinstance(case.tokens, tuple)
    tokens = list(case.tokens) if isinstance(case.tokens, tuple) else [case.tokens] * batch
    starts = case.starts or (0,) * batch
    page = case.page
    most = max(case.capacity, *case.lengths, 1)
    per_sequence = -(-most // page) if page else 0
    capacity = per_sequence * page if page else most
    shape = (batch * per_sequence + 3, page) if page else (max((*case.rows, batch - 1)) + 1, capacity)
    k, v = (torch.full((*shape, heads_kv, dim), case.poison, dtype=case.dtype) for dim in case.dims)
    table = torch.randperm(shape[0])[: batch * per_sequence].view(batch, per_sequence).int() if page else None
    made_q, apart = [], []
    for number in range(batch):
        length, start, count = case.lengths[number], starts[number], tokens[number]
        own_q = torch.randn(count, heads, case.dims[0]).to(case.dtype)
        own = [torch.randn(length - start, heads_kv, dim).to(case.dtype) for dim in case.dims]
        for cache, keys in zip((k, v), own, strict=True):
            if table is not None:
                places = torch.arange(start, length)
                cache[table[number].long()[places // page], places % page] = keys
            else:
                cache[case.rows[number] if case.rows else number, start:length] = keys
        made_q.append(own_q)
        apart.append((own_q, *own))
    q = torch.cat(made_q) if packed else torch.stack(made_q)
    told: dict[str, object] = {
        "lengths": torch.tensor(case.lengths, dtype=torch.int32),
        "page_table": None if table is None else _unused_are_wild(table, case),
        "starts": torch.tensor(case.starts, dtype=torch.int32) if case.starts else None,
        "rows": torch.tensor(case.rows, dtype=torch.int32) if case.rows else None,
        "mask": mask_of(case),
    }
    if packed:
        told["cu_seqlens_q"] = torch.tensor([0, *torch.tensor(tokens).cumsum(0).tolist()], dtype=torch.int32)
        told["max_seqlen_q"] = max(tokens)
    made = Made(q, k, v, told, apart)
    if "softcap" in case.terms:
        told["softcap"] = SOFTCAP
    if "alibi" in case.terms or "alibi_batched" in case.terms:
        made.slopes = torch.rand(*((batch,) if "alibi_batched" in case.terms else ()), heads) / 8
        told["alibi"] = made.slopes
    if "sink" in case.terms:
        told["sink"] = made.sink = torch.randn(heads)
    if "keep" in case.terms:
        assert not packed
        told["keep"] = made.keep = torch.rand(batch, 1, tokens[0], capacity) < 0.7
    made.q, made.k, made.v = made.q.to(device), made.k.to(device), made.v.to(device)
    made.apart = [tuple(tensor.to(device) for tensor in own) for own in apart]  # type: ignore[misc]
    for name in ("slopes", "sink", "keep"):
        tensor = getattr(made, name)
        setattr(made, name, None if tensor is None else tensor.to(device))
    made.told = {name: one.to(device) if isinstance(one, Tensor) else one for name, one in told.items()}
    return made


def mask_of(case: Case) -> str:
    if case.window is not None:
        return f"window:{case.window},{0 if case.causal else 'inf'}:bottom-right"
    return "causal:bottom-right" if case.causal else "full"


def _unused_are_wild(table: Tensor, case: Case) -> Tensor:
    """Entries behind the length name pages that do not exist."""
    table = table.clone()
    for number, length in enumerate(case.lengths):
        table[number, -(-length // case.page) :] = 1 << 30 if number % 2 else -7
    return table


def expected(case: Case, made: Made) -> tuple[Tensor, Tensor]:
    """out and lse in float64, shaped as `attention_cached` gives them."""
    found = []
    for number, (q, k, v) in enumerate(made.apart):
        slopes = made.slopes if made.slopes is None or made.slopes.ndim == 1 else made.slopes[number]
        keep = None if made.keep is None else made.keep[number, :, :, : len(k)]
        options = {
            "causal": case.causal,
            "window": (-1 if case.window is None else case.window, -1),
            "softcap": SOFTCAP if "softcap" in case.terms else 0.0,
        }
        found.append(attend(q, k, v, slopes=slopes, sink=made.sink, keep=keep, **options))
    outs, lses = zip(*found, strict=True)
    if isinstance(case.tokens, tuple):
        return torch.cat(outs), torch.cat(lses, 1)
    return torch.stack(outs), torch.stack(lses)


def lse_allowed(case: Case, made: Made, lse: Tensor) -> float:
    """As support.lse_budget: no partial sum of a score exceeds |q| |k|, and what terms add is seen in lse itself."""
    norms = [[one.double().norm(dim=-1).max().item() for one in (q, k) if one.numel()] for q, k, _ in made.apart]
    largest = max((math.prod(both) for both in norms if len(both) == 2), default=0.0) / math.sqrt(case.dims[0])
    size = (
        1 + largest + (SOFTCAP if "softcap" in case.terms else 0.0) + (lse.abs().max().item() if lse.numel() else 0.0)
    )
    return torch.finfo(torch.float32).eps * (case.dims[0] / 8 + 4) * size


def assert_as_expected(case: Case, made: Made, out: Tensor, lse: Tensor) -> None:
    want_out, want_lse = expected(case, made)
    out, lse = out.double(), lse.double()
    assert out.shape == want_out.shape
    assert lse.shape == want_lse.shape
    assert not out.isnan().any(), "what lies where no key is shows"
    none = want_lse == -math.inf
    assert (lse[none] == -math.inf).all()
    error = (lse - want_lse)[~none].abs().max() if (~none).any() else torch.zeros(())
    allowed = lse_allowed(case, made, want_lse[~none])
    assert error <= allowed, f"{case}: lse is off by {error:g}, allowed {allowed:g}"
    scale = want_out.norm().clamp(min=1e-6)
    error = (out - want_out).norm() / scale
    allowed = rounding_budget(case.dtype, 2) if case.dtype.itemsize == 2 else budget(case.dtype, 64)
    assert error <= allowed, f"{case}: out is off by {error:g}, allowed {allowed:g}"
