"""flash-attn's functions, through the planner: the names, arguments, shapes and meanings of flash-attn 2.8.

    from tilewise.integrations.flash_attn import flash_attn_func      # instead of: from flash_attn import ...

What they share, as flash-attn documents it:

    q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim); heads_k may divide heads
    causal, window_size      aligned at the bottom right: query i stands at key i + seqlen_k - seqlen_q
    window_size (l, r)       keys from l before to r after that position; negative = unlimited; causal makes r 0
    softcap                  0 = off; applied before ALiBi and the mask
    alibi_slopes             float32 (heads,) or (batch, heads): adds -slope * |i + seqlen_k - seqlen_q - j|
    deterministic            of the backward: the same bits every time
    return_attn_probs        returns (out, softmax_lse, S_dmask); the lse is differentiable here. S_dmask is None
                             without dropout, else all weights (batch, heads, seqlen_q, seqlen_k), below 0 where
                             dropped; of packed sequences (batch, heads, max_seqlen_q, max_seqlen_k), 0 where none is

Beyond flash-attn: CPUs, float32 and float64, any head_dim, pages of any size. Short of it, with an error that says so:
with pages (block_table) dropout, and gradients, which are refused when the backward runs. A row that sees no key has
lse -inf (flash-attn writes +inf). Under causal ALiBi lse belongs to the biases as documented; flash-attn's kernel
shifts them row by row.
"""

from __future__ import annotations

from functools import wraps
from itertools import pairwise
from operator import index
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from ..api import attention, attention_packed, drawn_seed
from ..cached import attention_appended, attention_cached
from ..errors import InvalidInput, UnsupportedProblem
from ..masks import UNLIMITED, Causal, Full, Window, as_int32
from ..op import deterministic_algorithms, without_autocast
from ..plain import reference
from ..problem import describe, heads_first, shown, with_named_terms
from ..terms import Dropout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ..masks import Align, Mask

Tensor = torch.Tensor
Result = Tensor | tuple[Tensor, Tensor, Tensor | None]
_Arguments = ParamSpec("_Arguments")
_Returned = TypeVar("_Returned")

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q (batch, seqlen_q, heads, head_dim), k and v (batch, seqlen_k, heads_k, head_dim) -> out shaped like q.

    With return_attn_probs also softmax_lse (batch, heads, seqlen_q) and None.
    """
    _check_dims(4, q=q, k=k, v=v)
    mask: Mask = _band(causal, window_size, q.shape[1] == k.shape[1])
    return _run(q, k, v, mask, dropout_p, softmax_scale, softcap, alibi_slopes, deterministic, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` for keys and values in one tensor, kv (batch, seqlen_k, 2, heads_k, head_dim)."""
    k, v = _unpack("kv", kv, 5, 2)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_func` for all three in one tensor, qkv (batch, seqlen, 3, heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 5, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
) -> Result:
    """Packed sequences: q (total_q, heads, head_dim), k and v (total_k, heads_k, head_dim), offsets (batch + 1,).

    With a block_table (batch, pages) k and v are pages (pages, page_size, heads_k, head_dim) instead, of which a
    sequence has the keys that cu_seqlens_k counts. With return_attn_probs also softmax_lse (heads, total_q) and None,
    with dropout S_dmask, for which the host reads the offsets. Otherwise offsets on a GPU stay there, and no call waits
    for it (`tilewise.attention_packed`). leftpad_k and seqused_k, int32 (batch,), are those of flash-attn's
    `_flash_attn_varlen_forward`: where the keys of a sequence begin and where they end, counted from its offset.
    """
    if block_table is not None:
        if leftpad_k is not None or seqused_k is not None:
            raise UnsupportedProblem(
                "flash_attn_varlen_func: leftpad_k or seqused_k together with block_table: cu_seqlens_k alone says "
                "which keys of its pages a sequence has.",
                remedy="call flash_attn_with_kvcache, which takes cache_seqlens and cache_leftpad",
            )
        return _varlen_pages(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
            window_size, softcap, alibi_slopes, return_attn_probs, block_table,
        )  # fmt: skip
    _check_dims(3, q=q, k=k, v=v)
    if deterministic and _may_vary(q, k, v) and not _has_switch():
        with deterministic_algorithms():  # for the plan; the backward of a call planned so keeps to it
            return flash_attn_varlen_func(
                q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
                window_size, softcap, alibi_slopes, False, return_attn_probs, leftpad_k=leftpad_k, seqused_k=seqused_k,
            )  # fmt: skip
    same = cu_seqlens_q is cu_seqlens_k
    whole = leftpad_k is None and seqused_k is None
    starts_q = _offsets("q", cu_seqlens_q, max_seqlen_q, q.device)
    starts_k = (
        starts_q if same and max_seqlen_q == max_seqlen_k else _offsets("k", cu_seqlens_k, max_seqlen_k, q.device)
    )
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q.shape[1], starts_q.shape[0] - 1)
    mask = _band(causal, window_size, same and whole)
    if dropout_p and return_attn_probs:
        asked: dict[str, Any] = {"mask": mask, "scale": softmax_scale, "softcap": softcap}
        asked |= {"scores": (Dropout(dropout_p),), "operands": {"seed": drawn_seed(q.device)}}
        places = starts_q, starts_k, seqused_k, leftpad_k
        return _varlen_with_weights(q, k, v, places, (max_seqlen_q, max_seqlen_k), alibi_slopes, asked)
    result = attention_packed(
        q, k, v, starts_q, starts_k, max_seqlen_q, max_seqlen_k, mask=mask, scale=softmax_scale, softcap=softcap,
        alibi=alibi_slopes, dropout=dropout_p, return_lse=return_attn_probs, leftpad_k=leftpad_k, seqused_k=seqused_k,
    )  # fmt: skip
    return (*result, None) if isinstance(result, tuple) else result  # type: ignore[return-value]


_Places = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""The offsets of queries and of keys, how many keys are used, and how many of them are padding."""


def _varlen_with_weights(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    places: _Places,
    longest: tuple[int, int],
    slopes: Tensor | None,
    asked: dict[str, Any],
) -> Result:
    """`flash_attn_varlen_func` with dropout and S_dmask, (batch, heads, max_seqlen_q, max_seqlen_k)."""
    starts_q, starts_k, used, padding = places
    max_q, max_k = longest
    out, lse = attention_packed(
        q, k, v, starts_q, starts_k, max_q, max_k, alibi=slopes, return_lse=True, seqused_k=used, leftpad_k=padding,
        **asked,
    )  # fmt: skip
    weights = q.new_zeros(starts_q.shape[0] - 1, q.shape[1], max_q, max_k)
    for number, (rows, keys, first) in enumerate(_parts(places)):
        alibi = slopes[number] if slopes is not None and slopes.ndim == 2 else slopes
        of_sequence = q[None, rows], k[None, keys], v[None, keys], lse[None, :, rows]
        own = _dropped_weights(*of_sequence, number, layout="bshd", alibi=alibi, **asked)
        weights[number, :, : own.shape[2], first : first + own.shape[3]] = own[0]
    return out, lse, weights


def _parts(places: _Places) -> Iterator[tuple[slice, slice, int]]:
    """The rows and the keys of each sequence, as the host reads them, and how many keys stand before these."""
    starts_q, starts_k, used, padding = places
    rows, keys = (list(pairwise(starts.tolist())) for starts in (starts_q, starts_k))
    lengths = [end - begin for begin, end in keys] if used is None else used.tolist()
    before = [0] * len(keys) if padding is None else padding.tolist()
    for (row, end_row), (key, end_key), length, pad in zip(rows, keys, lengths, before, strict=True):
        end = min(end_key, key + max(0, length))
        begin = min(end, key + max(0, pad))
        yield slice(row, end_row), slice(begin, end), begin - key


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` for keys and values in one tensor, kv (total_k, 2, heads_k, head_dim)."""
    k, v = _unpack("kv", kv, 4, 2)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """`flash_attn_varlen_func` for all three in one tensor, qkv (total, 3, heads, head_dim)."""
    q, k, v = _unpack("qkv", qkv, 4, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


class InvalidCache(InvalidInput, RuntimeError):
    """A wrong argument of a call that reads a cache, as flash-attn names it; a RuntimeError, as flash-attn's own is."""


_THEIR_NAMES = {
    "lengths": "cache_seqlens",
    "page_table": "block_table",
    "rows": "cache_batch_idx",
    "starts": "cache_leftpad",
    "alibi": "alibi_slopes",
    "scale": "softmax_scale",
}


def _in_their_names(function: Callable[_Arguments, _Returned]) -> Callable[_Arguments, _Returned]:
    """Raise what `attention_cached` finds wrong with the names that its arguments have in flash-attn."""

    @wraps(function)
    def call(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Returned:
        try:
            return function(*arguments, **options)
        except InvalidInput as error:
            texts = [
                str(text).replace("page_table", "block_table") for text in (error.got, error.expected, error.remedy)
            ]
            raise InvalidCache(_THEIR_NAMES.get(error.argument, error.argument), *texts) from None

    return call


@_in_their_names
def _varlen_pages(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout: float,
    scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
    with_lse: bool,
    block_table: Tensor,
) -> Result:
    """Packed queries against pages of keys."""
    _check_dims(3, q=q)
    _check_dims(4, k=k, v=v)
    needs_grad = _needs_grad(q, k, v)
    if dropout or (needs_grad and torch.compiler.is_compiling()):
        raise UnsupportedProblem(
            f"flash_attn_varlen_func: {'dropout' if dropout else 'a gradient'} with keys in pages (block_table).",
            remedy="gather the pages into packed k and v, or call it under torch.no_grad() without dropout",
        )
    starts_q = _offsets("q", cu_seqlens_q, max_seqlen_q, q.device)
    starts_k = _offsets("k", cu_seqlens_k, max_seqlen_k, q.device)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q.shape[1], starts_q.shape[0] - 1)
    result = attention_cached(
        q, k, v, starts_k.diff(), page_table=_int32("block_table", block_table), cu_seqlens_q=starts_q,
        max_seqlen_q=max_seqlen_q, mask=_band(causal, window_size, False), scale=scale, softcap=softcap,
        alibi=alibi_slopes, return_lse=with_lse,
    )  # fmt: skip
    if needs_grad:
        results = result if isinstance(result, tuple) else (result,)
        out, *lse = (_WithoutBackward.apply(one, q, k, v) for one in results)  # type: ignore[no-untyped-call]
        result = (out, *lse) if lse else out
    return (*result, None) if isinstance(result, tuple) else result


class _WithoutBackward(torch.autograd.Function):
    """A result of inputs that require grad, whose backward refuses."""

    @staticmethod
    def forward(ctx: Any, result: Tensor, *inputs: Tensor) -> Tensor:
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise UnsupportedProblem(
            "flash_attn_varlen_func: a gradient with keys in pages (block_table).",
            remedy="gather the pages into packed k and v",
        )


@_in_their_names
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    *,
    batch_invariant: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """q (batch, seqlen_q, heads, head_dim) against a cache, which takes up new keys and values first.

    k_cache, v_cache   (batch_cache, seqlen_cache, heads_k, head_dim), or with a block_table (batch, pages) pages
                       (pages, page_size, heads_k, head_dim). Sequence n is row cache_batch_idx[n], or row n.
    cache_seqlens      how many places are taken, one number or (batch,) int32; all where it is None.
    k, v               (batch, seqlen_new, heads_k, head_dim): written into the caches, in place, behind what is there,
                       and attended to. What the cache has no room for is not written.
    rotary_cos, rotary_sin   (seqlen_ro, rotary_dim / 2): k is rotated for the places that it takes, and q for the
                       places from cache_seqlens on, one after another where a mask tells queries apart (causal, or a
                       window), all for the first of them otherwise. Both tables are given or neither, beside new keys,
                       with a row for each place of the cache at least. rotary_interleaved: neighbours are a pair
                       (GPT-J), else the two halves of rotary_dim are (GPT-NeoX).
    cache_leftpad      (batch,) int32: places before it are padding.
    num_splits         a hint of flash-attn's: our kernels divide the keys by what the device finds.
    batch_invariant    beyond flash-attn: the bits of a row depend on its own sequence alone.

    Returns out, and with return_softmax_lse also softmax_lse (batch, heads, seqlen_q). There are no gradients. No call
    waits for the device, and a captured CUDA graph serves all lengths.
    """
    _check_dims(4, q=q, k_cache=k_cache, v_cache=v_cache)
    lengths = _lengths(cache_seqlens, q.shape[0], q.device)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q.shape[2], q.shape[0])
    mask = _band(causal, window_size, False)
    asked: dict[str, Any] = {
        "page_table": _int32("block_table", block_table),
        "rows": _int32("cache_batch_idx", cache_batch_idx),
        "starts": _int32("cache_leftpad", cache_leftpad),
        "mask": mask,
        "scale": softmax_scale,
        "softcap": softcap,
        "alibi": alibi_slopes,
        "return_lse": return_softmax_lse,
        "batch_invariant": batch_invariant,
    }
    if k is None and v is None:
        if rotary_cos is not None or rotary_sin is not None:
            raise InvalidInput("k", "None, beside rotary tables", "new keys and values, which rotate", "pass k and v")
        return attention_cached(q, k_cache, v_cache, lengths, **asked)
    if k is None or v is None:
        raise InvalidInput("v" if v is None else "k", "None", "new keys and new values, or neither", "pass both")
    if lengths is None:
        raise InvalidInput(
            "cache_seqlens", "None", "how many places are taken, where new keys are written behind them", "pass it"
        )
    _check_new(q, k, v, k_cache, v_cache)
    return attention_appended(
        q, k_cache, v_cache, k, v, lengths, cos=rotary_cos, sin=rotary_sin, interleaved=rotary_interleaved,
        apart=mask != Full(), **asked,
    )  # fmt: skip


def _lengths(given: int | Tensor | None, batch: int, device: torch.device) -> Tensor | None:
    if given is None:
        return None
    if isinstance(given, Tensor):  # one beyond all caches leaves room for the new keys that are added to it
        lengths = _int32("cache_seqlens", given)
        return lengths if lengths is None or given.dtype == torch.int32 else lengths.clamp(max=UNLIMITED)
    try:
        length = given if type(given) is int else index(given)
    except TypeError:
        length = -1
    if length < 0:
        expected = "one integer of at least 0, or a tensor (batch,) of int32"
        raise InvalidInput("cache_seqlens", shown(given), expected, "pass how many places are taken")
    return torch.full((batch,), min(length, UNLIMITED), dtype=torch.int32, device=device)


def _int32(name: str, given: Tensor | None) -> Tensor | None:
    """Integers as kernels read them; a copy where they are not in int32."""
    if given is None:
        return None
    _check_tensor(name, given)
    if given.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(name, f"a tensor of {given.dtype}", "a tensor of int32 or int64", "cast it")
    return as_int32(given).contiguous()


def _check_new(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
        _check_dims(4, **{name: new})
        expected = (q.shape[0], k.shape[1], *cache.shape[2:])
        if tuple(new.shape) != expected or new.dtype != cache.dtype:
            raise InvalidInput(
                name,
                f"shape {tuple(new.shape)} in {new.dtype}",
                f"{expected} in {cache.dtype}, as the cache has its heads",
                "reshape or cast it",
            )
        if new.device != cache.device or new.layout is not torch.strided:
            got = f"a {new.layout} tensor on {new.device}"
            raise InvalidInput(name, got, f"a strided tensor on {cache.device}, as the cache is", "move or convert it")


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Mask,
    dropout: float,
    scale: float | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    with_lse: bool,
) -> Result:
    """Attention of (batch, seq, heads, head_dim) tensors."""
    if deterministic and _may_vary(q, k, v) and not _has_switch():
        with deterministic_algorithms():  # for the plan; the backward of a call planned so keeps to it
            return _run(q, k, v, mask, dropout, scale, softcap, alibi_slopes, True, with_lse)
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q.shape[2], q.shape[0])
    asked: dict[str, Any] = {"mask": mask, "scale": scale, "softcap": softcap, "alibi": alibi_slopes, "layout": "bshd"}
    if dropout and (with_lse or deterministic):  # as a term: dropout by PyTorch's kernels has a backward of their own
        asked |= {"scores": (Dropout(dropout),), "operands": {"seed": drawn_seed(q.device)}}
    elif dropout:
        asked["dropout"] = dropout
    if not with_lse:
        out = attention(q, k, v, **asked)
        assert isinstance(out, Tensor)
        return out
    out, lse = attention(q, k, v, return_lse=True, **asked)
    return out, lse, _dropped_weights(q, k, v, lse, **asked) if dropout else None


def _dropped_weights(q: Tensor, k: Tensor, v: Tensor, lse: Tensor, sequence: int = 0, **asked: Any) -> Tensor:
    """flash-attn's S_dmask: the weights of all pairs (batch, heads, seqlen_q, seqlen_k), below 0 where dropped.

    Of the sequence of that number alone, where it is one of several.
    """
    q, k, v, lse = (tensor.detach() for tensor in (*heads_first(q, k, v, asked.pop("layout")), lse))
    given = asked.pop("scores"), asked.pop("operands")
    scores, operands = with_named_terms(q, k, *given, alibi=asked.pop("alibi"))
    operands = {name: tensor.detach() for name, tensor in operands.items()}
    problem = describe(q, k, v, scores=scores, operands=operands, **asked)
    if sequence:  # its heads come behind those of the sequences before it
        operands["seed"] = torch.cat((operands["seed"], operands["seed"].new_tensor([sequence * problem.heads_q])))
    with without_autocast():
        return reference.signed_weights(q, k, lse, problem, operands)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


def _band(causal: bool, window_size: tuple[int, int], same_lengths: bool) -> Full | Causal | Window:
    """The mask that causal and window_size name, top-left where that is the same: more kernels know it by that name."""
    try:
        left, right = (None if size < 0 else size for size in map(index, window_size))
    except (TypeError, ValueError):
        raise InvalidInput(
            "window_size", repr(window_size), "a pair of integers (left, right)", "pass (-1, -1) for no window"
        ) from None
    right = 0 if causal else right
    align: Align = "top-left" if same_lengths else "bottom-right"
    if left is None:
        return Full() if right is None else Causal(align) if right == 0 else Window(None, right, align)
    return Window(left, right, align)


def _check_slopes(slopes: Tensor, heads: int, sequences: int) -> None:
    _check_tensor("alibi_slopes", slopes)
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise InvalidInput(
            "alibi_slopes",
            f"shape {tuple(slopes.shape)}",
            f"({heads},) or ({sequences}, {heads})",
            "give one slope for each query head, or for each sequence and head",
        )


# ---------------------------------------------------------------------------------------------------------------------
# Arguments


def _check_dims(dims: int, **tensors: Tensor) -> None:
    shape = "(batch, seqlen, heads, head_dim)" if dims == 4 else "(total, heads, head_dim)"
    for name, tensor in tensors.items():
        _check_tensor(name, tensor)
        if tensor.ndim != dims:
            raise InvalidInput(name, f"shape {tuple(tensor.shape)}", f"{dims} dimensions {shape}", "reshape it")


def _check_tensor(name: str, given: object) -> None:
    if not isinstance(given, Tensor):
        raise InvalidInput(name, type(given).__name__, "a torch.Tensor", "convert it with torch.as_tensor")


def _unpack(name: str, packed: Tensor, dims: int, count: int) -> tuple[Tensor, ...]:
    """The `count` tensors that lie side by side in the third dimension from the end."""
    _check_tensor(name, packed)
    if packed.ndim != dims or packed.shape[-3] != count:
        shape = "(batch, seqlen, " if dims == 5 else "(total, "
        raise InvalidInput(
            name, f"shape {tuple(packed.shape)}", f"{shape}{count}, heads, head_dim)", "stack before the heads"
        )
    return packed.unbind(-3)


def _offsets(name: str, cu_seqlens: Tensor | Sequence[int], longest: int, device: torch.device) -> Tensor:
    """Offsets in int32 on the device; those that the host has are checked, as far as flash-attn's callers go wrong."""
    try:
        starts = cu_seqlens if isinstance(cu_seqlens, Tensor) else torch.tensor(list(cu_seqlens))
    except (TypeError, ValueError, RuntimeError):
        starts = torch.empty(0)
    if starts.ndim != 1 or starts.shape[0] < 2 or starts.dtype not in (torch.int32, torch.int64):
        raise InvalidInput(
            f"cu_seqlens_{name}",
            shown(cu_seqlens),
            "batch + 1 offsets, from 0 to the total",
            "pass the cumulative lengths",
        )
    if type(starts) is Tensor and starts.device.type == "cpu" and not torch.compiler.is_compiling():
        found = int(starts.diff().max())
        if longest < found:
            remedy = "pass its length or more"
            raise InvalidInput(f"max_seqlen_{name}", longest, f"at least {found}, the longest sequence", remedy)
    return starts.to(device, torch.int32, non_blocking=True)


def _may_vary(*tensors: Tensor) -> bool:
    """Backward kernels on CUDA may add in any order, unless PyTorch's switch tells them not to."""
    return _needs_grad(*tensors) and any(tensor.is_cuda for tensor in tensors)


def _needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def _has_switch() -> bool:
    """Whether PyTorch's switch is on. A compiled graph, which plans when it runs, is refused without it."""
    enabled = torch.are_deterministic_algorithms_enabled()
    if torch.compiler.is_compiling() and not enabled:
        raise UnsupportedProblem(
            "flash_attn: deterministic=True in a compiled graph: there the backward obeys PyTorch's switch for the "
            "process alone.",
            remedy="call torch.use_deterministic_algorithms(True)",
        )
    return enabled
