"""attention_cached: queries against keys in a cache, in one piece per sequence or in pages.

The lengths of the sequences, their pages and their places in the cache are tensors on the device, and stay there: no
call waits for them, and a captured CUDA graph runs with whatever they hold then. One function serves decoding (one new
token per sequence, or a few), speculative decoding, and prefill in chunks; packed queries mix all of these in one call.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from . import fresh, op
from .api import inner_rule, rounded_length
from .engine import append as appending
from .engine.run import load
from .errors import CompileError, InvalidInput, UnsupportedProblem
from .masks import Cached
from .memo import Memo
from .op import Options
from .operands import address, are_checked
from .plan import AUTO, Plan, check_backend, plan
from .problem import Problem, as_number, check_tensors, given_scale, shown, strides_class, with_named_terms
from .scores import softcapped
from .target import Target

if TYPE_CHECKING:
    from .api import MaskLike
    from .operands import Operands

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")
PAGE_SIZES = range(1, (1 << 16) + 1)


def attention_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    *,
    page_table: Tensor | None = None,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    mask: MaskLike = "causal:bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    keep: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = AUTO,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of new queries to the keys and values of a cache. Nothing here has a gradient.

    q          (batch, seq_q, heads_q, head_dim); or with `cu_seqlens_q` (total_q, heads_q, head_dim).
    k, v       a cache (cache_batch, places, heads_kv, dim), where sequence n is row `rows[n]`, or row n; or with a
               `page_table` pages (pages, page_size, heads_kv, dim). The strides of both are free, so that they may be
               parts of one tensor.
    lengths    int32 (batch,): sequence n has the places [0, lengths[n]) of its cache; without it, all.
    page_table int32 (batch, pages of a sequence): place p of sequence n is row p % page_size of page
               page_table[n, p // page_size]. Pages may be shared and in any order; entries behind the length are not
               looked at.
    starts     int32 (batch,): places before starts[n] are padding on the left, and no keys.
    rows       int32 (batch,): the row of the cache that is a sequence's.
    cu_seqlens_q  int32 (batch + 1,): queries of different numbers, behind one another, as in `attention_packed`; none
               has more than max_seqlen_q (0 = unknown), by which tiles are chosen.
    mask       None, "causal:bottom-right", or a Causal or Window, aligned in each sequence by itself: bottom-right puts
               the last query at the last key, which is what new tokens want that are in the cache already.
    alibi, keep, sink, softcap, scale   as of `attention`; keep broadcasts to (batch, heads_q, seq_q, places), and is
               not for packed queries nor beside starts.
    batch_invariant  the bits of a row depend on its own sequence alone, not on the batch it runs in, nor on how the GPU
               is filled: keys are divided by the sequence's own length, and parts are added up in a fixed order.

    Returns out shaped like q with v's head_dim; with return_lse=True also lse (batch, heads_q, seq_q), or
    (heads_q, total_q), in float32. A sequence of length 0 gives out = 0 and lse = -inf.

    Tensors on a CPU are checked in every call. On a GPU nobody reads them, unless TILEWISE_CHECK is set in the
    environment: then a call waits for the device, and raises for a length beyond the cache, or a page that does not
    exist. Without it they count as the nearest that do, and nothing outside the tensors is read.
    """
    given = _Given(lengths, page_table, starts, rows, cu_seqlens_q)
    asked = (max_seqlen_q, mask, scale, softcap, return_lse, batch_invariant, backend)
    if torch.compiler.is_compiling():
        return _traced(q, k, v, given, asked, alibi, keep, sink)
    call = _prepared(q, k, v, given, asked, alibi, keep, sink)
    if _are_read(q):
        _check_values(call.problem, call.operands)
    return call.results()


def explain_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None = None,
    *,
    target: Target | None = None,
    page_table: Tensor | None = None,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int = 0,
    mask: MaskLike = "causal:bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    keep: Tensor | None = None,
    sink: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    backend: str = AUTO,
) -> Plan:
    """The plan of `attention_cached` with these arguments: which kernel, how it divides the keys, and why."""
    given = _Given(lengths, page_table, starts, rows, cu_seqlens_q)
    asked = (max_seqlen_q, mask, scale, softcap, return_lse, batch_invariant, backend)
    problem, *_ = _posed(q, k, v, given, asked, alibi, keep, sink)
    return plan(problem, target or Target.of(q.device), backend)


class _Given(NamedTuple):
    """Where the keys of each sequence are."""

    lengths: Tensor | None
    page_table: Tensor | None
    starts: Tensor | None
    rows: Tensor | None
    cu_seqlens_q: Tensor | None

    @property
    def by_name(self) -> dict[str, Tensor]:
        """As the mask `Cached` names its operands, in that order."""
        named = {
            "cu_seqlens_q": self.cu_seqlens_q,
            "cache_lengths": self.lengths,
            "cache_starts": self.starts,
            "cache_rows": self.rows,
            "page_table": self.page_table,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}


_Asked = tuple[int, Any, "float | None", float, bool, bool, str]


class _Call(NamedTuple):
    """A bound forward, the problem that it computes, and its tensors as (batch, heads, rows, dim)."""

    forward: Any
    problem: Problem
    views: tuple[Tensor, Tensor, Tensor]
    operands: Operands
    lacks_memory: bool  # one of them is for `op.with_memory`, when what is appended to a cache is there

    def results(self) -> Tensor | tuple[Tensor, Tensor]:
        """Out, and lse where the problem needs it, in the shapes of `attention_cached`."""
        if op.autocast_is_on():
            with op.without_autocast():
                return self.results()
        if self.lacks_memory:
            q, k, v = map(op.with_memory, self.views)
            operands = {name: op.with_memory(tensor) for name, tensor in self.operands.items()}
            return self._replace(views=(q, k, v), operands=operands, lacks_memory=False).results()
        with torch.no_grad():
            out, lse = self.forward(*self.views, self.operands)
        mask = self.problem.mask
        assert isinstance(mask, Cached)
        return _as_asked(out, lse, mask.packed, self.problem.needs_lse)


def _as_asked(out: Tensor, lse: Tensor | None, packed: bool, return_lse: bool) -> Tensor | tuple[Tensor, Tensor]:
    out = out.transpose(1, 2)
    out = out.squeeze(0) if packed else out
    if not return_lse:
        return out
    assert lse is not None, "a backend without lse took a problem that needs one"
    return out, lse.squeeze(0) if packed else lse


# ---------------------------------------------------------------------------------------------------------------------
# From arguments to a bound call


_calls: Memo[Any] = Memo()


def _facts(tensor: Tensor | None) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    at = address(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, at & 15 if at else -1, tensor.is_neg()


def _prepared(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: _Given,
    asked: _Asked,
    alibi: Tensor | None,
    keep: Tensor | None,
    sink: Tensor | None,
) -> _Call:
    """The bound forward of these tensors, found again by their shapes, strides and alignment, and what it takes."""
    op.refuse_jit_trace("attention_cached")
    if torch._C._are_functorch_transforms_active() or op.has_tangent(q, k, v):
        raise UnsupportedProblem(
            "attention_cached in a transform of torch.func or under forward-mode AD: it has no derivatives, and takes "
            "its batch as one.",
            remedy="call it outside of the transform, or tilewise.attention",
        )
    key: Any = None
    found = None
    if type(q) is type(k) is type(v) is Tensor:
        key = (_facts(q), _facts(k), _facts(v), *map(_facts, given), _facts(alibi), _facts(keep), _facts(sink), asked)
        try:
            found = _calls.get(key)
        except TypeError:  # an argument that cannot be hashed, which `_posed` refuses
            key = None
    views: Any
    if found is None:
        problem, *views, operands = _posed(q, k, v, given, asked, alibi, keep, sink)
        options = Options(str(problem.mask), problem.scale, "", "bshd", asked[-1], problem.needs_lse, "exact")
        call, generation = op.bound_call(problem, views[0], views[1], views[2], operands, options)
        found = call.forward, problem, any(map(_lacks_memory, (q, k, v, *operands.values())))
        if key is not None:
            _calls.put(key, found, generation)
    else:
        views = _views(q, k, v, given.cu_seqlens_q is not None)
        operands = given.by_name
        if alibi is not None or keep is not None or sink is not None:
            operands = operands | _named(alibi, keep, sink)
    forward, problem, lacks_memory = found
    return _Call(forward, problem, views, operands, lacks_memory)


def _lacks_memory(tensor: Tensor) -> bool:
    """Whether the memory does not hold the values: see `op.with_memory`."""
    return tensor._is_zerotensor() or tensor.is_neg()


def _named(alibi: Tensor | None, keep: Tensor | None, sink: Tensor | None) -> dict[str, Tensor]:
    """The tensors of the named terms, as `with_named_terms` gives them."""
    found = {}
    if alibi is not None:
        found["slopes"] = alibi.float()
    if keep is not None:
        found["keep"] = keep
    if sink is not None:
        found["sink"] = sink.float()
    return found


def _views(q: Tensor, k: Tensor, v: Tensor, packed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """As (batch, heads, rows, dim)."""
    q = q.transpose(0, 1).unsqueeze(0) if packed else q.transpose(1, 2)
    return q, k.transpose(1, 2), v.transpose(1, 2)


def _posed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: _Given,
    asked: _Asked,
    alibi: Tensor | None,
    keep: Tensor | None,
    sink: Tensor | None,
) -> tuple[Problem, Tensor, Tensor, Tensor, Operands]:
    """The problem of a call, checked as far as it can be without reading the device."""
    max_q, mask, scale, softcap, return_lse, invariant, backend = asked
    check_backend(backend)
    packed = given.cu_seqlens_q is not None
    _check_shapes(q, k, v, given)
    q, k, v = _views(q, k, v, packed)
    check_tensors(q, k, v)
    sequences = _sequences(q, given)
    for name, tensor, shape in (
        ("lengths", given.lengths, (sequences,)),
        ("starts", given.starts, (sequences,)),
        ("rows", given.rows, (sequences,)),
        ("cu_seqlens_q", given.cu_seqlens_q, (sequences + 1,)),
        ("page_table", given.page_table, (sequences, None)),
    ):
        _check_numbers(name, tensor, shape, q.device)
    page_size, capacity = 0, k.shape[2]
    if given.page_table is not None:
        page_size, capacity = k.shape[2], k.shape[2] * given.page_table.shape[1]
        if page_size not in PAGE_SIZES:
            raise InvalidInput("k", f"pages of {page_size} places", f"1 to {PAGE_SIZES.stop - 1}", "use smaller pages")
        if given.rows is not None:
            raise InvalidInput("rows", "beside a page_table", "one of the two", "reorder the rows of the page_table")
    elif given.rows is None and k.shape[0] != sequences:
        raise InvalidInput(
            "k",
            f"a cache of {k.shape[0]} rows for {sequences} sequences",
            "as many rows as sequences, or rows that names them",
            "pass rows, or a slice of the cache",
        )
    if keep is not None and (packed or given.starts is not None):
        beside = "packed queries" if packed else "starts"
        raise InvalidInput("keep", f"beside {beside}", "a tensor (batch, heads, seq_q, places) alone", "use a mask")
    scores, operands = with_named_terms(q, k, (), None, alibi=alibi, keep=keep, sink=sink, seq_kv=capacity)
    rule = Cached(
        batches=k.shape[0],
        page_size=page_size,
        sequences=sequences,
        max_q=rounded_length(max_q),
        inner=inner_rule(mask),
        packed=packed,
        lengths=given.lengths is not None,
        starts=given.starts is not None,
        rows=given.rows is not None,
        invariant=bool(invariant),
    )
    problem = Problem(
        batch=q.shape[0],
        heads_q=q.shape[1],
        heads_kv=k.shape[1],
        seq_q=q.shape[2],
        seq_kv=capacity if k.shape[0] else 0,
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        dtype=q.dtype,
        mask=rule,
        scale=given_scale(scale),
        scores=(*softcapped(as_number("softcap", softcap)), *scores),
        layout="bshd",
        strides=strides_class(q, k, v),
        needs_lse=bool(return_lse),
    )
    for term in problem.scores:
        for operand in term.tensors:
            term.check_tensor(operand.name, operands[operand.name], problem)
    return problem, q, k, v, {**given.by_name, **operands}


def _sequences(q: Tensor, given: _Given) -> int:
    return q.shape[0] if given.cu_seqlens_q is None else given.cu_seqlens_q.shape[0] - 1


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, given: _Given) -> None:
    packed = given.cu_seqlens_q is not None
    rows = "(total_q, heads, head_dim)" if packed else "(batch, seq_q, heads, head_dim)"
    cache = "(pages, page_size, heads, head_dim)" if given.page_table is not None else "(rows, places, heads, head_dim)"
    for name, tensor, shape in (("q", q, rows), ("k", k, cache), ("v", v, cache)):
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
        if tensor.ndim != shape.count(",") + 1:
            raise InvalidInput(name, f"shape {tuple(tensor.shape)}", shape, "reshape it")
    if k.shape[:3] != v.shape[:3] or k.shape[3] != q.shape[-1]:
        raise InvalidInput(
            "v" if k.shape[:3] != v.shape[:3] else "k",
            f"shape {tuple(v.shape if k.shape[:3] != v.shape[:3] else k.shape)}",
            f"{tuple(k.shape[:3])} and a head_dim of its own, as k has; and k the head_dim of q, {q.shape[-1]}",
            "pass the two halves of one cache",
        )


def _check_numbers(name: str, tensor: Tensor | None, shape: tuple[int | None, ...], device: torch.device) -> None:
    """A tensor of int32, as kernels read it."""
    if tensor is None:
        return
    if not isinstance(tensor, Tensor):
        raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
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


def _are_read(tensor: Tensor) -> bool:
    """Whether numbers beside this tensor are read and checked: on a CPU always, on a device where the environment asks
    for it and something can be read."""
    if tensor.device.type == "cpu":
        return True
    return are_checked() and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _check_values(problem: Problem, operands: Operands) -> None:
    """What only the device knows: it waits for it. Raises InvalidInput for numbers that name nothing."""
    mask = problem.mask
    assert isinstance(mask, Cached)
    capacity = problem.seq_kv
    if mask.lengths:
        _check_range("lengths", operands["cache_lengths"], 0, capacity, _places_of_a_sequence(bool(mask.page_size)))
    if mask.starts:
        _check_range("starts", operands["cache_starts"], 0, capacity, "places of the cache")
    if mask.rows:
        _check_range("rows", operands["cache_rows"], 0, mask.batches - 1, "rows of the cache")
    if mask.packed:
        offsets = operands["cu_seqlens_q"]
        if offsets.numel() and (int(offsets[0]) != 0 or bool((offsets.diff() < 0).any())):
            remedy = "pass the cumulative numbers of queries"
            raise InvalidInput("cu_seqlens_q", offsets.tolist()[:8], "offsets from 0 that never fall", remedy)
        _check_range("cu_seqlens_q", offsets, 0, problem.seq_q, "rows of q")
    if mask.page_size:
        table = operands["page_table"]
        places = torch.arange(table.shape[1], device=table.device) * mask.page_size
        used = table
        if mask.lengths:
            used = table[places < operands["cache_lengths"].clamp(0, capacity)[:, None]]
        _check_range("page_table", used, 0, mask.batches - 1, "pages")


def _places_of_a_sequence(paged: bool) -> str:
    return "places that page_table gives a sequence" if paged else "places of the cache"


def _check_range(name: str, numbers: Tensor, least: int, most: int, what: str) -> None:
    if numbers.numel() == 0:
        return
    low, high = int(numbers.min()), int(numbers.max())
    if low < least or high > most:
        shown = low if low < least else high
        raise InvalidInput(name, f"{shown} among its numbers", f"{least} to {most}, the {what}", "check who wrote it")


# ---------------------------------------------------------------------------------------------------------------------
# New keys and values


def append(
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    rows: Tensor | None = None,
    page_table: Tensor | None = None,
    q: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = True,
    apart: bool = True,
) -> tuple[Tensor, Tensor]:
    """Writes k and v (batch, new, heads_kv, dim) into a cache in place, behind the `lengths` places that are taken.

    With cos and sin (places, rotary_dim / 2), which have a row for every place of a sequence at least, k is rotated for
    the places that it takes, and q (batch, queries, heads, dim) for the places from `lengths` on; all of its rows for
    the first of them unless they stand `apart`. What the cache has no room for, or whose page does not exist, is not
    written. Returns q and the lengths after, and waits for nothing. Caches, pages and rows are those of
    `attention_cached`. Nothing is written before all arguments are checked.

    No two new keys may have one place, as they would where sequences share a row, or the page that both write to: which
    of them stays is not known. Tensors on a CPU are checked for that in every call, those on a GPU under
    TILEWISE_CHECK, where a call also raises for new keys without room or without a page.
    """
    given = (q, k, v, k_cache, v_cache, cos, sin, lengths, rows, page_table)
    _check_append(given, apart)
    return _appended(given, interleaved, apart)


def _capacity(cache: Tensor, page_table: Tensor | None) -> int:
    """The places of a sequence."""
    return cache.shape[1] * (1 if page_table is None else page_table.shape[1])


_ToAppend = tuple[Any, ...]
"""q, k, v, k_cache, v_cache, cos, sin, lengths, rows and page_table."""


def _check_append(given: _ToAppend, apart: bool) -> None:
    """Raise InvalidInput for what `append` does not take. The shapes of the cache and its numbers are right."""
    q, k, _, cache, _, cos, sin, lengths, rows, page_table = given
    capacity = _capacity(cache, page_table)
    _check_rotation(cos, sin, q, capacity)
    if not torch.compiler.is_compiling() and _are_read(q):
        _check_places(cache, k.shape[1], lengths, capacity, rows, page_table)
        if cos is not None:
            _check_angles(lengths, max(k.shape[1], q.shape[1] if apart else 1), cos)


def _appended(given: _ToAppend, interleaved: bool, apart: bool) -> tuple[Tensor, Tensor]:
    """`append` of arguments that are checked."""
    q, k, v, k_cache, v_cache, cos, sin, lengths, rows, page_table = given
    capacity = _capacity(k_cache, page_table)
    with torch.no_grad():
        launch = None if torch.compiler.is_compiling() else _launched(given, capacity, interleaved, apart)
        if launch is not None:
            return launch(*given)  # type: ignore[no-any-return]
        places = lengths.long()[:, None] + torch.arange(k.shape[1], device=q.device)
        if cos is not None and sin is not None:
            k = _rotated(k, cos, sin, places, interleaved)
            steps = torch.arange(q.shape[1], device=q.device) * apart
            q = _rotated(q, cos, sin, lengths.long()[:, None] + steps, interleaved)
        _write(k_cache, k, places, capacity, rows, page_table)
        _write(v_cache, v, places, capacity, rows, page_table)
        return q, _after(lengths, k.shape[1], capacity)


def _after(lengths: Tensor, new: int, capacity: int) -> Tensor:
    """The places taken with `new` more, as far as there are so many; the sum of the largest int32 would be negative."""
    return (lengths.clamp(max=capacity) + new).clamp(max=capacity)


def attention_appended(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = True,
    apart: bool = True,
    page_table: Tensor | None = None,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    mask: MaskLike = "causal:bottom-right",
    scale: float | None = None,
    softcap: float = 0.0,
    alibi: Tensor | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`append`, and `attention_cached` of what it returns. Nothing is written before the arguments of both are checked,
    in a compiled graph those of `append`."""
    asked = (0, mask, scale, softcap, return_lse, batch_invariant, AUTO)
    given = _Given(lengths, page_table, starts, rows, None)
    to_append = (q, k, v, k_cache, v_cache, cos, sin, lengths, rows, page_table)
    if torch.compiler.is_compiling():
        _check_append(to_append, apart)
        rotated, after = _appended(to_append, interleaved, apart)
        return _traced(rotated, k_cache, v_cache, given._replace(lengths=after), asked, alibi, None, None)
    call = _prepared(q, k_cache, v_cache, given, asked, alibi, None, None)
    _check_append(to_append, apart)
    if _are_read(q):
        after = _after(lengths, k.shape[1], call.problem.seq_kv)
        _check_values(call.problem, {**call.operands, "cache_lengths": after})
    rotated, after = _appended(to_append, interleaved, apart)
    if _facts(rotated) == _facts(q) and _facts(after) == _facts(lengths):  # what was bound for these serves those
        views = (rotated.transpose(1, 2), *call.views[1:])
        return call._replace(views=views, operands={**call.operands, "cache_lengths": after}).results()
    return _prepared(rotated, k_cache, v_cache, given._replace(lengths=after), asked, alibi, None, None).results()


def _check_rotation(cos: Tensor | None, sin: Tensor | None, q: Tensor, capacity: int) -> None:
    """Raises InvalidInput for tables that rotate no sequence of this capacity."""
    if cos is None and sin is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor):
            raise InvalidInput(name, "None" if table is None else shown(table), "a table beside the other", "pass both")
        if not table.is_floating_point() or table.device != q.device or table.layout is not torch.strided:
            got = f"a {table.layout} tensor of {table.dtype} on {table.device}"
            expected = f"a strided tensor of floating numbers on {q.device}, the device of q"
            raise InvalidInput(name, got, expected, "cast it")
    assert cos is not None
    assert sin is not None
    if cos.shape != sin.shape or cos.ndim != 2 or 2 * cos.shape[1] > q.shape[-1] or cos.shape[0] < max(1, capacity):
        raise InvalidInput(
            "rotary_cos",
            f"shape {tuple(cos.shape)}, and sin {tuple(sin.shape)}",
            f"two of (places, rotary_dim / 2), with {capacity} places at least, as the cache has for a sequence, and a "
            f"rotary_dim of {q.shape[-1]} at most",
            "pass the tables of one rotation",
        )


def _check_angles(lengths: Tensor, rows: int, table: Tensor) -> None:
    """Raises InvalidInput where one of this many rows from `lengths` on has no angles."""
    last = int(lengths.max()) + rows - 1 if lengths.numel() and rows else 0
    if last >= table.shape[0]:
        raise InvalidInput(
            "rotary_cos",
            f"{table.shape[0]} rows, and a query or a key at place {last}",
            f"a row for each place, {last + 1} at least",
            "make the tables longer",
        )


_appends: Memo[Any] = Memo()


def _launched(given: tuple[Tensor | None, ...], capacity: int, interleaved: bool, apart: bool) -> Any:
    """One launch that does it all, a function of what is given; None where no kernel does."""
    q, k_cache = given[0], given[3]
    assert q is not None
    assert k_cache is not None
    if not q.is_cuda or q.dtype not in (torch.bfloat16, torch.float16):
        return None
    key = (*map(_facts, given), interleaved, apart)
    found = _appends.get(key)
    if found is None:
        generation = _appends.generation
        found = (bound_append(given, Target.of(q.device), capacity, interleaved, apart),)
        _appends.put(key, found, generation)
    return found[0]


def bound_append(
    given: tuple[Tensor | None, ...], target: Target, capacity: int, interleaved: bool, apart: bool
) -> Any:
    """`_launched` for tensors of these shapes and strides; None where the kernel does not take or build them."""
    q, k, v, k_cache, v_cache, cos, _, _, rows, page_table = given
    assert q is not None
    assert k is not None
    assert v is not None
    assert k_cache is not None
    assert v_cache is not None
    tables = [tensor for tensor in given[5:7] if tensor is not None]
    matrices = [q, k, v, k_cache, v_cache, *tables]
    fits = all(tensor.dtype == q.dtype and tensor.stride(-1) == 1 for tensor in matrices)
    fits = fits and not any(map(_lacks_memory, matrices))
    fits = fits and all(tensor.is_contiguous() for tensor in tables) and 0 not in (*k.shape, *k_cache.shape)
    if not fits or not target.has_jit or target.capability < appending.MIN_CAPABILITY:
        return None
    sizes = appending.Sizes(
        bf16=q.dtype == torch.bfloat16,
        batch=q.shape[0],
        heads=q.shape[2],
        heads_kv=k.shape[2],
        queries=q.shape[1],
        new_keys=k.shape[1],
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        rotary_dim=0 if cos is None else 2 * cos.shape[1],
        angles=0 if cos is None else cos.shape[0],
        interleaved=interleaved,
        apart=apart,
        page_size=0 if page_table is None else k_cache.shape[1],
        cache_batches=k_cache.shape[0],
        capacity=capacity,
        has_rows=rows is not None,
    )
    rotates = sizes.rotary_dim > 0

    def named(
        q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *others: Tensor | None
    ) -> tuple[dict[str, Tensor | None], Tensor, Tensor]:
        cos, sin, lengths, rows, page_table = others
        assert lengths is not None
        rotated, after = fresh.empty_like(q) if rotates else q, fresh.empty_like(lengths)
        heads_first = [tensor.transpose(1, 2) for tensor in (q, rotated, k, v, k_cache, v_cache)]
        values = (*heads_first, cos, sin, lengths, after, rows, page_table)
        return dict(zip(appending.OPERANDS, values, strict=True)), rotated, after

    try:
        run = load(appending.program(sizes, target), named(*given)[0], q.device.index or 0)  # type: ignore[arg-type]
    except CompileError as error:
        _log.warning("new keys are appended by PyTorch's operations, the kernel does not build here: %s", error)
        return None

    def bound(*given: Tensor) -> tuple[Tensor, Tensor]:
        operands, rotated, after = named(*given)
        run(*operands.values())
        return rotated, after

    return bound


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, interleaved: bool) -> Tensor:
    """x (batch, rows, heads, head_dim), its first columns rotated by the angles of its rows' places (batch, rows)."""
    width = 2 * cos.shape[1]
    places = places.clamp(0, cos.shape[0] - 1)
    dtype = torch.promote_types(x.dtype, torch.float32)
    cos, sin = cos[places].to(dtype).unsqueeze(2), sin[places].to(dtype).unsqueeze(2)
    turned, rest = x[..., :width].to(dtype), x[..., width:]
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned[..., : width // 2], turned[..., width // 2 :]
    pair = first * cos - second * sin, first * sin + second * cos
    made = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat((made.to(x.dtype), rest), -1)


def _targets(
    cache: Tensor, places: Tensor, capacity: int, rows: Tensor | None, page_table: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Of places (batch, new) of sequences: the row or page of the cache, the place in it, and whether there is one."""
    exists = (places >= 0) & (places < capacity)
    places = places.clamp(0, max(0, capacity - 1))
    if page_table is None:
        batches = torch.arange(places.shape[0], device=places.device) if rows is None else rows.long()
        batches = batches[:, None].expand_as(places)
    else:
        batches = page_table.long().gather(1, places // cache.shape[1])
        places = places % cache.shape[1]
    exists &= (batches >= 0) & (batches < cache.shape[0])
    return batches.clamp(0, max(0, cache.shape[0] - 1)), places, exists


def _check_places(
    cache: Tensor, new: int, lengths: Tensor, capacity: int, rows: Tensor | None, page_table: Tensor | None
) -> None:
    """Raises InvalidInput where two new keys have one place; under TILEWISE_CHECK also where one has none.

    A sequence of a negative length stands for none, as in a batch that is padded.
    """
    if not lengths.numel() or not new or not cache.numel() or not capacity:
        return
    places = lengths.long()[:, None] + torch.arange(new, device=lengths.device)
    batches, within, exists = _targets(cache, places, capacity, rows, page_table)
    if are_checked():
        longest = int(lengths.max())
        if longest + new > capacity:
            raise InvalidInput(
                "lengths",
                f"{longest} places taken and {new} new keys",
                f"{capacity} at most, the {_places_of_a_sequence(page_table is not None)}",
                "make the cache longer, or end the sequence",
            )
        if bool((~exists & (places >= 0)).any()):
            sequence, number = (~exists & (places >= 0)).nonzero()[0].tolist()
            raise InvalidInput(
                "rows" if page_table is None else "page_table",
                f"no place for new key {number} of sequence {sequence}",
                f"0 to {cache.shape[0] - 1} where new keys are written",
                "check who wrote it",
            )
    taken = (batches * cache.shape[1] + within)[exists]
    once, counts = taken.unique(return_counts=True)
    if once.numel() < taken.numel():
        first = int(once[counts > 1][0])
        where = f"place {first % cache.shape[1]} of {'row' if page_table is None else 'page'} {first // cache.shape[1]}"
        raise InvalidInput(
            "rows" if page_table is None else "page_table",
            f"{where} for more than one new key",
            "a place of its own for every new key",
            "give each sequence a row, or a copy of the page that it writes to",
        )


def _write(
    cache: Tensor, new: Tensor, places: Tensor, capacity: int, rows: Tensor | None, block_table: Tensor | None
) -> None:
    """Writes rows of `new` (batch, rows, heads, dim) into the places (batch, rows) of a cache, in place.

    Without a look at the device: a row that has no place, or whose page does not exist, stands for the first of its
    sequence that has one, which is written again; and where none has, what is there is written back.
    """
    if capacity == 0 or new.shape[1] == 0:
        return
    batches, places, exists = _targets(cache, places, capacity, rows, block_table)
    numbers = torch.arange(new.shape[1], device=new.device)
    chosen = torch.where(exists, numbers, exists.int().argmax(1, keepdim=True))
    batches, places = batches.gather(1, chosen), places.gather(1, chosen)
    new = new[torch.arange(new.shape[0], device=new.device)[:, None], chosen]
    some = exists.any(1)[:, None, None, None]
    cache[batches, places] = torch.where(some, new, cache[batches, places])


# ---------------------------------------------------------------------------------------------------------------------
# Inside torch.compile


@torch.library.custom_op("tilewise::attention_cached", mutates_args=())
def _operator(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    page_table: Tensor | None,
    starts: Tensor | None,
    rows: Tensor | None,
    cu_seqlens_q: Tensor | None,
    alibi: Tensor | None,
    keep: Tensor | None,
    sink: Tensor | None,
    max_seqlen_q: int,
    mask: str,
    scale: float | None,
    softcap: float,
    return_lse: bool,
    batch_invariant: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    given = _Given(lengths, page_table, starts, rows, cu_seqlens_q)
    asked = (max_seqlen_q, mask, scale, softcap, return_lse, batch_invariant, backend)
    call = _prepared(q, k, v, given, asked, alibi, keep, sink)
    if _are_read(q):
        _check_values(call.problem, call.operands)
    found = call.results()
    return found if isinstance(found, tuple) else (found, q.new_empty(0, dtype=torch.float32))


@_operator.register_fake
def _(  # type: ignore[no-untyped-def]
    q, k, v, lengths, page_table, starts, rows, cu_seqlens_q, alibi, keep, sink, max_seqlen_q, mask, scale, softcap,
    return_lse, batch_invariant, backend,
):  # fmt: skip
    out = q.new_empty(*q.shape[:-1], v.shape[-1])
    if not return_lse:
        return out, q.new_empty(0, dtype=torch.float32)
    shape = (q.shape[1], q.shape[0]) if cu_seqlens_q is not None else (q.shape[0], q.shape[2], q.shape[1])
    return out, q.new_empty(shape, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def _traced(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: _Given,
    asked: _Asked,
    alibi: Tensor | None,
    keep: Tensor | None,
    sink: Tensor | None,
) -> Tensor | tuple[Tensor, Tensor]:
    """One operator of the graph, which plans when it runs."""
    max_q, mask, scale, softcap, return_lse, invariant, backend = asked
    given_scale(scale)
    text = str(inner_rule(mask))
    out, lse = _operator(
        q, k, v, *given, alibi, keep, sink, max_q, text, scale, float(softcap), return_lse, invariant, backend
    )
    return (out, lse) if return_lse else out
