"""New keys and values: appended to a cache in place, with a rotation of queries and keys on the way."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from . import fresh
from .api import cached_request
from .call.execute import attend, call_of, execute
from .call.request import operands_of
from .element import Element
from .engine import append as appending
from .engine.run import load
from .errors import CompileError, InvalidInput
from .memo import Memo
from .operands import address, are_checked
from .problem import shown
from .sequences import are_read, check_values, places_of_a_sequence
from .target import Target

if TYPE_CHECKING:
    from .call.request import MaskLike

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")


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
    """Writes k and v (batch, new, heads_kv, dim) into a cache in place, after the `lengths` places that are taken.

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
    check_append(given, apart)
    return appended(given, interleaved, apart)


def _capacity(cache: Tensor, page_table: Tensor | None) -> int:
    """The places of a sequence."""
    return cache.shape[1] * (1 if page_table is None else page_table.shape[1])


_ToAppend = tuple[Any, ...]
"""q, k, v, k_cache, v_cache, cos, sin, lengths, rows and page_table."""


def check_append(given: _ToAppend, apart: bool) -> None:
    """Raise InvalidInput for what `append` does not take. The shapes of the cache and its numbers are right."""
    q, k, _, cache, _, cos, sin, lengths, rows, page_table = given
    capacity = _capacity(cache, page_table)
    _check_rotation(cos, sin, q, capacity)
    if not torch.compiler.is_compiling() and are_read(q):
        _check_places(cache, k.shape[1], lengths, capacity, rows, page_table)
        if cos is not None:
            _check_angles(lengths, max(k.shape[1], q.shape[1] if apart else 1), cos)


def appended(given: _ToAppend, interleaved: bool, apart: bool) -> tuple[Tensor, Tensor]:
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
) -> Tensor | tuple[Tensor, ...]:
    """`append`, and `attention_cached` of what it returns. Nothing is written before the arguments of both are checked,
    in a compiled graph those of `append`."""
    request = cached_request(
        q, k_cache, v_cache, lengths, page_table=page_table, starts=starts, rows=rows, mask=mask, scale=scale,
        softcap=softcap, alibi=alibi, return_lse=return_lse, batch_invariant=batch_invariant,
    )  # fmt: skip
    to_append = (q, k, v, k_cache, v_cache, cos, sin, lengths, rows, page_table)
    with torch.no_grad():
        call = None if torch.compiler.is_compiling() else call_of(request)
        check_append(to_append, apart)
        if call is not None and are_read(q):
            after = _after(lengths, k.shape[1], call.problem.seq_kv)
            check_values(call.problem, {**operands_of(request), "cache_lengths": after})
        rotated, after = appended(to_append, interleaved, apart)
        again = request._replace(q=rotated, extras={**request.extras, "lengths": after})
        alike = call is not None and facts(rotated) == facts(q) and facts(after) == facts(lengths)
        results = execute(call, again) if call is not None and alike else attend(again)
    return results.asked(request.options)


def _check_rotation(cos: Tensor | None, sin: Tensor | None, q: Tensor, capacity: int) -> None:
    """Raises InvalidInput for tables that rotate no sequence of this capacity."""
    if cos is None and sin is None:
        return
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        if not isinstance(table, Tensor):
            raise InvalidInput(name, "None" if table is None else shown(table), "both tables, or neither", "pass both")
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
    key = (*map(facts, given), interleaved, apart)
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
    fits = fits and not any(tensor._is_zerotensor() or tensor.is_neg() for tensor in matrices)
    fits = fits and all(tensor.is_contiguous() for tensor in tables) and 0 not in (*k.shape, *k_cache.shape)
    if not fits or not target.has_jit or target.capability < appending.MIN_CAPABILITY:
        return None
    sizes = appending.Sizes(
        element=Element.of(q.dtype),
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
                f"{capacity} at most, the {places_of_a_sequence(page_table is not None)}",
                "make the cache longer, or end the sequence",
            )
        if bool((~exists & (places >= 0)).any()):
            sequence, number = (~exists & (places >= 0)).nonzero()[0].tolist()
            raise InvalidInput(
                "rows" if page_table is None else "page_table",
                f"no place for new key {number} of sequence {sequence}",
                f"0 to {cache.shape[0] - 1} where new keys are written",
                "correct the numbers in this tensor",
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


def facts(tensor: Tensor | None) -> Any:
    if not isinstance(tensor, Tensor):
        return tensor
    at = address(tensor)
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, at & 15 if at else -1, tensor.is_neg()
