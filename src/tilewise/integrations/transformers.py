"""Hugging Face Transformers: `register()`, then attn_implementation="tilewise".

    from tilewise.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

Two functions are registered under one name, because either alone would be quietly wrong: attention, and the mask that
goes with it. Key/value heads are never repeated; sliding windows, softcap, sinks, padding, packed sequences, learned
biases and both kinds of caches are honoured. A mask that is a rule (causal, window, packed sequences, all keys) stays
one, and padding stays one flag per key: both reach attention as a `RuleMask`, which holds no seq x seq tensor, or under
torch.compile as flags alone. What is no rule (custom patterns) is Transformers' own boolean mask. Needs transformers >=
5.15; runs with 5.22.

Continuous batching (`generate_batch`) reads its paged cache through the same function. Before 5.22 it asks for the name
with "paged|" before it, which is registered too; 5.22 takes no names but its own there, and `register("paged|eager")`
puts tilewise in the place of one of them.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._pytree import tree_map

from ..api import attention, attention_packed, attention_turned, autocast_inputs
from ..cached import append, attention_cached
from ..errors import InvalidInput, UnsupportedProblem
from ..masks import Causal, Documents, Full, KeyLengths, Window
from ..op import autocast_is_on
from ..operands import CHECK
from ..terms import Bias

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..masks import Mask

Tensor = torch.Tensor
NAME = "tilewise"

__all__ = ["NAME", "RuleMask", "attention_forward", "attention_mask", "register"]


def register(name: str = NAME) -> str:
    """Make `attn_implementation=name` known to Transformers, for attention and masks both; returns the name.

    From then on a model that computes its attention itself refuses the name when it is made, or given the name later.
    """
    global _masking
    transformers: Any = import_module("transformers")  # heavy, and optional
    _masking = import_module("transformers.masking_utils")
    if not _names:
        _guard(transformers.PreTrainedModel)
    for each in (name, f"{_PAGED}{name.removeprefix(_PAGED)}"):
        transformers.AttentionInterface.register(each, attention_forward)
        transformers.AttentionMaskInterface.register(each, attention_mask)
        _names.add(each)
    return name


def _guard(base: Any) -> None:
    """Check every model where Transformers checks whether it can have the implementation that is asked for."""
    checked = base.get_correct_attn_implementation

    @functools.wraps(checked)
    def guarded(model: Any, requested_attention: str | None, *given: Any, **named: Any) -> Any:
        if requested_attention in _names:
            _refuse_model(type(model))
            _refuse_tables(sys.modules[type(model).__module__], requested_attention)
        return checked(model, requested_attention, *given, **named)

    base.get_correct_attn_implementation = guarded


def _refuse_model(kind: Any) -> None:
    """Raise for a class whose own attention would be given masks made for ours, as Transformers does for sdpa."""
    if kind._supports_attention_backend or (kind._supports_sdpa and kind._can_set_attn_implementation()):
        return
    why = "has attention of its own" if kind._supports_sdpa else "declares neither sdpa nor an attention backend"
    raise _own_attention(f"{kind.__name__} {why}")


def _refuse_tables(module: Any, name: str) -> None:
    """Layers that look their attention up in a table of their module, by the name, find a refusal there."""
    for table in vars(module).values():
        own = table.get("eager") if type(table) is dict else None
        if isinstance(own, type) and issubclass(own, torch.nn.Module):

            def refuse(*_: Any, kind: str = own.__name__, **__: Any) -> None:
                raise _own_attention(f"{kind} is attention of its own")

            table[name] = refuse


@functools.cache
def _refuse_config(kind: type) -> None:
    """`_refuse_model` of the models that Transformers makes of a configuration: whoever writes the name into the
    configuration of a model that is made already asks nobody."""
    transformers: Any = import_module("transformers")
    for mapping in (transformers.MODEL_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        if kind in mapping:
            found = mapping[kind]
            for model in found if isinstance(found, tuple) else (found,):
                _refuse_model(model)


def _own_attention(what: str) -> UnsupportedProblem:
    return UnsupportedProblem(
        f"transformers: {what}, and does not call the function that is registered as tilewise.",
        remedy="use attn_implementation='eager'; for a part of a larger model name its configuration, as in "
        "attn_implementation={'': 'tilewise', 'vision_config': 'eager'}",
    )


_names: set[str] = set()  # that this module is registered under
_PAGED = "paged|"  # what continuous batching put before names, until 5.22
_masking: Any = None  # transformers.masking_utils, once registered: this module needs neither it nor its types


# ---------------------------------------------------------------------------------------------------------------------
# Attention


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Transformers' attention function: query (batch, heads, seq_q, dim), key and value (batch, heads_kv, seq_kv, dim).

    Returns out (batch, seq_q, heads, dim), contiguous, and None for the weights, which are never materialised. A mask
    tensor or RuleMask says everything about who sees whom; `is_causal` and `sliding_window` count only without one. One
    of fewer than four dimensions is what `_flags` made. Every keyword is computed, or known to have no effect here, or
    refused by its name.
    """
    sliding_window = sliding_window or None  # 0 is how some configurations say that there is no window
    if (
        not torch.compiler.is_compiling()
        and (attention_mask is None or (type(attention_mask) is RuleMask and attention_mask.is_alone()))
        and position_bias is None
        and s_aux is None
        and (kwargs.keys() <= _WITHOUT_EFFECT or not _with_effect(kwargs))
        and not autocast_is_on()
    ):  # most calls, one per layer and token: as below, in less of the host's time
        mask: Mask
        if attention_mask is not None:
            mask = attention_mask.rule
        else:
            causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
            mask = _mask(causal, sliding_window, query, key)
        out = attention_turned(query, key, value, mask=mask, scale=scaling, softcap=softcap or 0.0, dropout=dropout)
        return out, None
    beside = _with_effect(kwargs)
    _refuse(module, beside)
    query, key, value = autocast_inputs(query, key, value)
    if "cache" in beside:
        if position_bias is not None or dropout:
            raise UnsupportedProblem(
                "transformers: a bias of positions or dropout with a paged cache (continuous batching).",
                remedy="generate with another cache",
            )
        window = sliding_window or getattr(module, "sliding_window", None) or None
        return _from_pages(module, query, key, value, window, scaling, softcap or 0.0, s_aux, kwargs), None
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    asked = _asked(attention_mask, causal, sliding_window, query, key)
    selected = _selected(module, beside, query, key)
    sinks = None if s_aux is None else s_aux.reshape(-1)
    if "sinks" in beside:
        sinks = _sinks_of_rows(sinks, beside["sinks"], query)
    offsets = _offsets(beside, query.device)
    if offsets is not None:
        given = attention_mask.rule if type(attention_mask) is RuleMask and attention_mask.is_alone() else None
        by_rule = attention_mask is None or given is not None
        if by_rule and position_bias is None and selected is None and (sinks is None or sinks.ndim == 1):
            offsets, inner = _in_documents(given, offsets, causal, sliding_window, query, key)
            return _packed(query, key, value, offsets, inner, dropout, scaling, softcap or 0.0, sinks, kwargs), None
        if attention_mask is None:
            asked = _Asked(_FULL, keep=_same_document(offsets, query, key, causal, sliding_window))
        else:
            asked = asked.also(_same_document(offsets, query, key))
    if selected is not None:
        asked = asked.also(selected)
    if position_bias is not None:
        bias = position_bias[..., : key.shape[2]]
        asked = asked._replace(bias=bias if asked.bias is None else bias + asked.bias)
    run = _by_terms if _takes_terms(query) else _by_tensor
    return run(query, key, value, asked, dropout, scaling, softcap or 0.0, sinks), None


# ---------------------------------------------------------------------------------------------------------------------
# Keywords


# Hints, and what Transformers passes through attention for others to read: who sees whom is said elsewhere.
_WITHOUT_EFFECT = frozenset(
    (
        "max_length_q", "max_length_k", "max_seqlen_q", "max_seqlen_k", "num_items_in_batch", "output_hidden_states",
        "output_router_logits", "position_ids", "seq_idx", "use_cache", "cache_position", "return_dict",
        "logits_indices", "logits_processor_args", "logits_to_keep", "input_ids", "token_type_ids", "mm_token_type_ids",
    )
)  # fmt: skip
_SWITCHES = frozenset(("output_attentions", "deterministic"))  # which ask for nothing where they are False
_COMPUTED = frozenset(("cu_seq_lens_q", "cu_seq_lens_k", "indices", "block_indices", "sinks"))
_COMPUTED_OF_PAGES = frozenset(("cache", "cu_seq_lens_q", "cu_seq_lens_k", "read_index", "write_index", "block_table"))


def _with_effect(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The keywords that ask for something. None asks for nothing."""
    return {
        name: value
        for name, value in kwargs.items()
        if value is not None and name not in _WITHOUT_EFFECT and not (value is False and name in _SWITCHES)
    }


def _refuse(module: torch.nn.Module, beside: dict[str, Any]) -> None:
    if "output_attentions" in beside:
        raise UnsupportedProblem(
            "transformers: output_attentions=True, and tilewise never holds the weights.",
            remedy="use attn_implementation='eager' to look at them",
        )
    if torch.onnx.is_in_onnx_export():
        raise UnsupportedProblem(
            "transformers: export to ONNX, which has no operator for tilewise's attention.",
            remedy="call model.set_attn_implementation('sdpa') before the export",
        )
    deterministic = beside.get("deterministic")
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise UnsupportedProblem(
            "transformers: deterministic=True, which tilewise takes from PyTorch's switch alone.",
            remedy="call torch.use_deterministic_algorithms(True), or leave deterministic out",
        )
    for name in beside:
        if name not in (_COMPUTED_OF_PAGES if "cache" in beside else _COMPUTED) and name not in _SWITCHES:
            raise UnsupportedProblem(
                f"transformers: {type(module).__name__} calls attention with {name}=, which tilewise does not compute"
                f"{' from a paged cache' if 'cache' in beside else ''}.",
                remedy="drop it if the call of the model brought it, or use attn_implementation='sdpa' or 'eager'",
            )


def _selected(module: torch.nn.Module, beside: dict[str, Any], query: Tensor, key: Tensor) -> Tensor | None:
    """(batch, heads or 1, seq_q, seq_kv): the keys that an indexer has chosen for each query, in any order.

    `indices` (batch, seq_q, chosen) are keys, `block_indices` (batch, groups of heads, seq_q, chosen) blocks of the
    size that the layer's indexer has; negative ones choose nothing. Transformers folds them into the masks of its own
    sdpa and eager.
    """
    seq_kv, selected = key.shape[2], None
    if (keys := beside.get("indices")) is not None:
        selected = _chosen(keys, seq_kv)[:, None]
    if (blocks := beside.get("block_indices")) is not None:
        size = getattr(getattr(module, "indexer", None), "block_size", None)
        if size is None:
            raise UnsupportedProblem(
                f"transformers: block_indices= from {type(module).__name__}, whose indexer has no block_size.",
                remedy="use attn_implementation='sdpa' or 'eager'",
            )
        chosen = _chosen(blocks, -(-seq_kv // size)).repeat_interleave(size, -1)[..., :seq_kv]
        chosen = chosen.repeat_interleave(query.shape[1] // blocks.shape[1], 1)
        selected = chosen if selected is None else selected & chosen
    return selected


def _chosen(indices: Tensor, count: int) -> Tensor:
    """(..., count) from (..., chosen): True where an index says so."""
    indices = indices.long()
    flags = torch.zeros((*indices.shape[:-1], count + 1), dtype=torch.bool, device=indices.device)
    return flags.scatter(-1, indices.masked_fill(indices < 0, count), True)[..., :count]


def _sinks_of_rows(of_heads: Tensor | None, of_rows: Tensor, query: Tensor) -> Tensor:
    """(batch, heads, seq_q) from `sinks`, one more logit for each row, (batch, heads, seq_q, 1)."""
    batch, heads, seq_q, _ = query.shape
    if of_rows.shape[-1] != 1:
        raise InvalidInput("sinks", f"shape {tuple(of_rows.shape)}", f"{(batch, heads, seq_q, 1)}", "pass one per row")
    of_rows = of_rows[..., 0].expand(batch, heads, seq_q)
    return of_rows if of_heads is None else torch.logaddexp(of_rows, of_heads[:, None])


# ---------------------------------------------------------------------------------------------------------------------
# Documents in one row


class _Offsets(NamedTuple):
    """Where the documents of a row begin and end, int32 on its device, as flash-attn wants them: they stay there."""

    queries: Tensor
    keys: Tensor

    def are_one(self) -> bool:
        return self.queries is self.keys


def _offsets(kwargs: dict[str, Any], device: torch.device) -> _Offsets | None:
    queries, keys = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    if queries is None and keys is None:
        return None
    if queries is None or keys is None:
        there, missing = ("k", "q") if queries is None else ("q", "k")
        raise InvalidInput(f"cu_seq_lens_{missing}", "None", f"offsets, as cu_seq_lens_{there} has them", "pass both")
    starts = queries.to(device, torch.int32)
    return _Offsets(starts, starts if keys is queries else keys.to(device, torch.int32))


def _in_documents(
    rule: Mask | None,
    offsets: _Offsets,
    is_causal: bool,
    sliding_window: int | None,
    query: Tensor,
    key: Tensor,
) -> tuple[_Offsets, Mask]:
    """The documents within which the rule of a row holds, and what it says inside each; None is no mask.

    A band means the same keys in a row of documents and inside each of them, where queries and keys have the same
    offsets. Elsewhere it is aligned at the end of each document.
    """
    same = offsets.are_one()
    if rule is None:
        return offsets, _band(same, sliding_window) if is_causal else _FULL
    if isinstance(rule, Documents):  # which Transformers found by positions: the row is cut at both kinds of offsets
        if (not query.is_cuda or CHECK in os.environ) and not torch.equal(*offsets):
            raise InvalidInput(
                "cu_seq_lens_k",
                "other offsets than cu_seq_lens_q beside position_ids that begin anew",
                "one tensor of offsets for both",
                "leave out position_ids, or cu_seq_lens_q and cu_seq_lens_k",
            )
        last = offsets.queries[-1]
        cuts = torch.tensor(rule.cu_seqlens_q, dtype=torch.int32, device=query.device).clamp(max=last)
        both = torch.cat((offsets.queries, cuts)).sort().values
        return _Offsets(both, both), rule.inner
    if same and query.shape[2] != key.shape[2] and getattr(rule, "align", None) == "bottom-right":
        raise InvalidInput(
            "cu_seq_lens_k",
            "the offsets of the queries, beside keys from before in a cache",
            "offsets that count the keys in the cache",
            "pass offsets of the keys of their own, or use an empty cache",
        )
    if isinstance(rule, Window):
        make = Window if torch.compiler.is_compiling() else _one_window
        return offsets, make(rule.left, rule.right, "top-left" if same else "bottom-right")
    return offsets, _band(same, None) if isinstance(rule, Causal) else _FULL


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    offsets: _Offsets,
    mask: Mask,
    dropout: float,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """Documents that stand behind one another; the rows of a batch do so too, as flash-attn is given them."""
    q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value))
    longest_q, longest_k = (int(kwargs.get(f"max_length_{which}") or 0) for which in "qk")
    out: Any = attention_packed(
        q,
        k,
        v,
        *offsets,
        longest_q,
        longest_k,
        mask=mask,
        scale=scaling,
        softcap=softcap,
        sink=sinks,
        dropout=dropout,
    )
    return out.unflatten(0, (query.shape[0], query.shape[2]))  # type: ignore[no-any-return]


def _same_document(
    offsets: _Offsets, query: Tensor, key: Tensor, is_causal: bool = False, sliding_window: int | None = None
) -> Tensor:
    """(batch, 1, seq_q, seq_kv): which pairs lie in one document, and which of these a band aligned at the end of each
    document shows: a query sees the keys that are as far from that end as it is itself, or farther, up to a window."""
    documents, from_end = [], []
    for starts, tensor in zip(offsets, (query, key), strict=True):
        places = torch.arange(tensor.shape[0] * tensor.shape[2], device=tensor.device, dtype=torch.int32)
        number = torch.searchsorted(starts, places, right=True)
        end = starts[number.clamp(max=starts.shape[0] - 1)]
        documents.append(torch.where(places < end, number, -1).view(tensor.shape[0], 1, -1))
        from_end.append((end - places).view(tensor.shape[0], 1, -1))
    (q, k), (left_q, left_k) = documents, from_end
    seen = (q[..., None] == k[..., None, :]) & (q >= 0)[..., None]
    if is_causal:
        distance = left_k[..., None, :] - left_q[..., None]
        seen = seen & (distance >= 0)
        if sliding_window is not None:
            seen = seen & (distance < sliding_window)
    return seen


def _from_pages(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
    kwargs: dict[str, Any],
) -> Tensor:
    """New tokens of several sequences, in one row, against a paged cache, which takes them up first.

    All sequences are causal, so that their offsets say everything; a mask tensor that Transformers may have made of
    them is not looked at.
    """
    cache, layer = kwargs.pop("cache"), module.layer_idx
    named: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": sinks, "mask": _band(False, window)}
    if "kwargs" in inspect.signature(cache.update).parameters:  # which puts in what is of the layer
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
        if kwargs.get("block_table") is not None:
            return _by_block_table(query, key, value, kwargs, named)
    else:
        indices = {name: kwargs[name] for name in ("read_index", "write_index")}
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, **indices)
        key, value = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (key, value))
    offsets = kwargs["cu_seq_lens_k"]
    if isinstance(offsets, dict):  # by kind of layer
        offsets = offsets["full_attention" if window is None else "sliding_attention"]
    starts_q, starts_k = (tensor.to(torch.int32) for tensor in (kwargs["cu_seq_lens_q"], offsets))
    longest = kwargs.get("max_length_q") or kwargs.get("max_seqlen_q") or 0
    q, k, v = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    out: Any = attention_packed(q, k, v, starts_q, starts_k, int(longest), 0, **named)
    return out.unsqueeze(0)  # type: ignore[no-any-return]


def _by_block_table(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any], named: dict[str, Any]) -> Tensor:
    """One new token per sequence, whose pages a table names: nothing is gathered."""
    q, k, v = (tensor[0].transpose(0, 1).unsqueeze(1) for tensor in (query, key, value))
    table = kwargs["block_table"].to(torch.int32)
    lengths = (kwargs["cu_seq_lens_k"].diff()[: q.shape[0]] - 1).to(torch.int32)
    pages = kwargs["k_cache"], kwargs["v_cache"]
    _, lengths = append(*pages, k, v, lengths, page_table=table, q=q)
    out: Any = attention_cached(q, *pages, lengths, page_table=table, **named)
    return out.transpose(0, 1)  # type: ignore[no-any-return]


class _Asked(NamedTuple):
    """Who sees whom: by a rule, by a boolean tensor beside it, by what is added to the scores, and by how many keys
    there are, on the device."""

    rule: Mask
    keep: Tensor | None = None
    bias: Tensor | None = None
    lengths: Tensor | None = None

    def without_lengths(self, keys: int) -> _Asked:
        """The same with one tensor for all that hides keys."""
        if self.lengths is None:
            return self
        return self._replace(lengths=None).also(_there(self.lengths, keys))

    def also(self, seen: Tensor) -> _Asked:
        """The same where only these pairs are seen."""
        return self._replace(keep=seen if self.keep is None else seen & self.keep)


def _there(lengths: Tensor, keys: int) -> Tensor:
    """(batch, 1, 1, keys): which of the keys are among the first of each batch."""
    return torch.arange(keys, device=lengths.device) < lengths[:, None, None, None]


def _takes_terms(tensor: Tensor) -> bool:
    """Whether padding, biases and sinks run as terms of our kernels, where this tensor is. PyTorch's, which a CPU has,
    take one tensor for them all."""
    return tensor.is_cuda


def _by_terms(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: _Asked,
    dropout: float,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    named: dict[str, Any] = {"scale": scaling, "softcap": softcap, "dropout": dropout}
    if asked.keep is not None:
        named["keep"] = asked.keep
    if asked.bias is not None:
        bias = asked.bias if asked.bias.dtype in (query.dtype, torch.float32) else asked.bias.to(query.dtype)
        bias = _with_adjacent_keys(bias)
        sizes = _Sizes(query.shape[0], query.shape[1], query.shape[2], key.shape[2], query.dtype)
        named |= {"scores": (Bias.of(bias, sizes),), "operands": {"bias": bias}}
    named["mask"] = asked.rule if asked.lengths is None else KeyLengths(asked.lengths)
    if sinks is not None and sinks.ndim > 1:
        return _with_sinks(query, key, value, named, sinks)
    if sinks is not None:
        named["sink"] = sinks
    return attention_turned(query, key, value, **named)


def _with_adjacent_keys(bias: Tensor) -> Tensor:
    """The bias with its keys side by side in memory; dimensions that it is broadcast over stay so.

    T5 looks its bias up as (queries, keys, heads). Kernels would read such a one number by number, which takes far
    longer than a copy.
    """
    if bias.stride(-1) in (0, 1):
        return bias
    told_apart = bias[tuple(slice(0, 1) if step == 0 else slice(None) for step in bias.stride())]
    return told_apart.contiguous().expand_as(bias)


class _Sizes(NamedTuple):
    batch: int
    heads_q: int
    seq_q: int
    seq_kv: int
    dtype: torch.dtype


def _by_tensor(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    asked: _Asked,
    dropout: float,
    scaling: float | None,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor:
    """With one mask: a rule, or a tensor that holds all there is."""
    asked = asked.without_lengths(key.shape[2])
    mask: Mask | Tensor = asked.rule
    if asked.bias is not None:
        mask = _added(asked, query, key)
    elif asked.keep is not None:
        mask = asked.keep if asked.rule == Full() else _visible(asked, query, key)
    named: dict[str, Any] = {"mask": mask, "scale": scaling, "softcap": softcap, "dropout": dropout}
    if sinks is None:
        return attention_turned(query, key, value, **named)
    return _with_sinks(query, key, value, named, sinks if sinks.ndim > 1 else sinks[:, None])


def _visible(asked: _Asked, query: Tensor, key: Tensor) -> Tensor:
    seq_q, seq_kv = query.shape[2], key.shape[2]
    seen = asked.rule.to_bool(range(seq_q), range(seq_kv), seq_q, seq_kv, query.device)
    return seen if asked.keep is None else seen & asked.keep


def _added(asked: _Asked, query: Tensor, key: Tensor) -> Tensor:
    """The bias, with -inf where a pair is hidden."""
    assert asked.bias is not None
    bias = asked.bias.to(query.dtype)
    if asked.rule == Full() and asked.keep is None:
        return bias
    return bias.masked_fill(~_visible(asked, query, key), -torch.inf)


def _with_sinks(query: Tensor, key: Tensor, value: Tensor, named: dict[str, Any], sinks: Tensor) -> Tensor:
    """out (batch, seq, heads, dim) with one more logit per row in the softmax's denominator, a key that has no value.

    Z keys' share of Z + exp(sink) is sigmoid(lse - sink); all of it is differentiable, lse included.
    """
    out, lse = attention(query, key, value, return_lse=True, **named)
    share = torch.sigmoid(lse - sinks.to(lse.dtype))  # (batch, heads, seq)
    shared: Tensor = (out * share.unsqueeze(-1)).to(out.dtype)
    return shared.transpose(1, 2).contiguous()


def _asked(
    given: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    query: Tensor,
    key: Tensor,
) -> _Asked:
    if isinstance(given, RuleMask):
        return _Asked(given.rule, given.keep, lengths=given.lengths)
    if given is not None and given.ndim < 4:
        window = given.shape[1] if given.ndim == 3 else None
        flags = given[:, None] if window is None else given[:, :1]
        return _Asked(_band(True, window), keep=flags[:, None])
    if given is not None:
        return _Asked(_FULL, keep=given) if given.dtype == torch.bool else _Asked(_FULL, bias=given.to(query.dtype))
    return _Asked(_mask(is_causal, sliding_window, query, key))


def _mask(is_causal: bool, sliding_window: int | None, query: Tensor, key: Tensor) -> Mask:
    """What Transformers means where it gives no mask."""
    if not is_causal:
        return _FULL
    seq_q = query.shape[2]
    if seq_q == 1:  # the one query is the newest: it sees every key its window reaches
        return _FULL if sliding_window is None or sliding_window >= key.shape[2] else _band(False, sliding_window)
    # Without a mask Transformers means: keys beyond the queries are slots of a static cache that are still empty.
    return _band(True, sliding_window if sliding_window is not None and sliding_window < seq_q else None)


def _band(first_aligned: bool, sliding_window: int | None) -> Causal | Window:
    """Causal, or the last `sliding_window` keys including one's own, aligned at the first or at the last position."""
    if sliding_window is None:
        return _FIRST_ALIGNED if first_aligned else _LAST_ALIGNED
    make = Window if torch.compiler.is_compiling() else _one_window
    return make(sliding_window - 1, 0, "top-left" if first_aligned else "bottom-right")


# Equal masks are one object here: native code, which looks for calls like this one, then compares them without Python.
_FULL, _FIRST_ALIGNED, _LAST_ALIGNED = Full(), Causal("top-left"), Causal("bottom-right")
_one_window = functools.lru_cache(maxsize=64, typed=True)(Window)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


class RuleMask(torch.Tensor):
    """A boolean mask (batch, 1, seq_q, seq_kv), True = visible, known by its rule, and by the keys that padding leaves:
    `keep`, (batch, 1, 1, seq_kv), None where all are there. `lengths` (batch,): only so many of the first keys are
    there, as in a cache that is not full yet; None where all are.

    It has a shape, a dtype and a device. Any operation on it works on the tensor it stands for, which is made then and
    there, so code that slices or combines masks stays right; only changing it in place is refused.
    """

    rule: Mask
    keep: Tensor | None
    lengths: Tensor | None

    @staticmethod
    def __new__(
        cls,
        rule: Mask,
        shape: tuple[int, int, int, int],
        device: torch.device | str,
        keep: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> RuleMask:
        where = torch.device(device)
        made: RuleMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=where)
        made.rule, made.keep, made.lengths = rule, keep, lengths
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        padded = "" if self.keep is None else ", padded"
        return f"RuleMask({self.rule}{padded}, shape={tuple(self.shape)})"

    def is_alone(self) -> bool:
        """Whether nothing but the rule hides keys."""
        return self.keep is None and self.lengths is None

    def dense(self) -> Tensor:
        _, _, seq_q, seq_kv = self.shape
        visible = self.rule.to_bool(range(seq_q), range(seq_kv), seq_q, seq_kv, self.device)
        if self.lengths is not None:
            visible = visible & _there(self.lengths, seq_kv)
        return (visible if self.keep is None else visible & self.keep).expand(self.shape)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            raise UnsupportedProblem(
                f"{func} would change a RuleMask in place, and it is a rule.", remedy="work on mask.clone()"
            )
        args, kwargs = tree_map(lambda x: x.dense() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function: None, a RuleMask, or the boolean tensor (batch, 1, q_length, kv_length).

    Query i stands at position q_offset + i, key j at kv_offset + j; attention_mask (batch, positions) is False where
    there is padding. None says the same as to Transformers' sdpa.
    """
    mask_function = mask_function or _masking.causal_mask_function
    if not torch.compiler.is_compiling() and (config := kwargs.get("config")) is not None:
        _refuse_config(config.__class__)
    if getattr(kwargs.get("config"), "model_type", "") in _ADD_TO_MASKS:
        return _masking.eager_mask(  # type: ignore[no-any-return]
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, attention_mask, device=device, **kwargs
        )
    traced = torch.compiler.is_compiling() or (
        attention_mask is not None and isinstance(attention_mask, _traced_types())
    )
    if (
        mask_function is _masking.causal_mask_function
        and attention_mask is None
        and allow_is_causal_skip
        and type(q_offset) is int
        and not traced
    ):  # a new token behind all others, or all tokens at once: as below, in less of the host's time
        shift = q_offset - kv_offset
        if shift == kv_length - q_length and (q_length == 1 or shift == 0):
            return None
    shape = (batch_size, 1, q_length, kv_length)
    parts = None if traced else _parts(mask_function)
    if mask_function is _masking.bidirectional_mask_function and allow_is_bidirectional_skip:
        # What is visible depends on the key alone.
        keep = _keep(attention_mask, kv_length, kv_offset)
        if keep is None or (not traced and _all_there(keep, (*(parts or ()), q_length == kv_length))):
            if getattr(kwargs.get("config"), "model_type", "") not in _SAY_CAUSAL:
                return None
            return torch.ones((), dtype=torch.bool, device=device).expand(shape)
        return keep.expand(shape) if traced else RuleMask(_FULL, shape, device, keep)
    if traced and allow_is_causal_skip and attention_mask is not None and type(q_offset) is int:
        # Nothing is joined to the causal rule, or to a window, where the skip is allowed. Where attention takes one
        # tensor, Transformers' own is made once for all layers.
        window, config = kwargs.get("local_size"), kwargs.get("config")
        windowed = window and getattr(config, "attention_chunk_size", None) is None
        causal = mask_function is _masking.causal_mask_function
        square = q_offset == kv_offset == 0 and q_length == kv_length
        by_terms = _takes_terms(attention_mask)
        if by_terms and square and (causal or windowed) and getattr(config, "model_type", "") not in _LOOK_INTO_MASKS:
            return _flags(attention_mask, kv_length, None if causal else window)
    if parts is not None and "causal" in parts and parts.get("window") == 0:  # of layers that the model does not have
        nothing = torch.zeros((), dtype=torch.bool, device=device).expand(batch_size, 1, 1, kv_length)
        return RuleMask(_FULL, shape, device, nothing)
    if parts == {"causal": True} and q_length == 1:
        decoding = _decoding(shape, q_offset, kv_offset, attention_mask, device)
        if decoding is not None:
            return decoding
    rule = None
    if parts is not None:
        plain = allow_is_causal_skip or ("bidirectional" in parts and allow_is_bidirectional_skip)
        alone = batch_size == 1 and attention_mask is None
        rule = _rule(parts, plain, alone, q_length, kv_length, int(q_offset) - kv_offset)
    if rule is None:
        return _masking.sdpa_mask(  # type: ignore[no-any-return]
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            allow_is_causal_skip=False,
            device=device,
            **kwargs,
        )
    keep = None
    if attention_mask is not None:
        # What lies beyond the last query is hidden by the causal rule anyway.
        assert parts is not None
        reach = min(kv_length, int(q_offset) - kv_offset + q_length) if "causal" in parts else kv_length
        seen = attention_mask[:, kv_offset : kv_offset + reach]
        if seen.shape[1] < reach or not _all_there(seen, (*parts, q_length == kv_length)):
            keep = _keep(attention_mask, kv_length, kv_offset)
    if keep is None and (rule is _FULL or (rule is _FIRST_ALIGNED and q_length == kv_length)):
        return None
    return RuleMask(rule, shape, device, keep)


def _decoding(
    shape: tuple[int, int, int, int],
    q_offset: int | Tensor,
    kv_offset: int,
    padding: Tensor | None,
    device: torch.device | str,
) -> RuleMask | None:
    """One new token in a cache whose places behind it are empty, as a static one's: the keys up to its own. None where
    there are no such places. A position on the device is not waited for."""
    batch, _, _, kv_length = shape
    lengths: Tensor
    if isinstance(q_offset, torch.Tensor) and q_offset.is_cuda:
        lengths = (q_offset - kv_offset + 1).to(torch.int32).reshape(-1).expand(batch).contiguous()
    else:
        position = int(q_offset) - kv_offset
        if not 0 <= position < kv_length - 1:
            return None
        lengths = torch.full((batch,), position + 1, dtype=torch.int32, device=device)
    return RuleMask(_FULL, shape, device, _keep(padding, kv_length, kv_offset), lengths)


def _keep(padding: Tensor | None, kv_length: int, kv_offset: int) -> Tensor | None:
    """(batch, 1, 1, kv_length): the keys that padding leaves; keys that it says nothing of are not there."""
    if padding is None:
        return None
    keep = padding[:, kv_offset : kv_offset + kv_length].to(torch.bool)
    if keep.shape[-1] < kv_length:
        keep = torch.nn.functional.pad(keep, (0, kv_length - keep.shape[-1]))
    return keep[:, None, None, :]


# Encoders whose attention says that it is causal: without a mask it would be, as it is by Transformers' own sdpa.
_SAY_CAUSAL = frozenset(("phi4_multimodal_vision",))

# Models whose own code puts numbers to be added beside a mask, whatever the mask holds: they get one of numbers.
_ADD_TO_MASKS = frozenset(("deepseek_v4",))

# Models whose own code cuts or compares masks of four dimensions on their way to attention.
_LOOK_INTO_MASKS = frozenset(("doge", "informer", "pix2struct"))


def _flags(padding: Tensor, kv_length: int, window: int | None) -> Tensor:
    """Padding under the causal rule, where a graph can hold no RuleMask: (batch, keys), or (batch, window, keys) with
    the same flags for each place in the window, which then says how long it is."""
    keep = _keep(padding, kv_length, 0)
    assert keep is not None
    return keep[:, 0, 0] if window is None else keep[:, 0].expand(-1, window, -1)


def _all_there(seen: Tensor, kind: tuple[str | bool, ...]) -> bool:
    """Whether padding leaves all of these keys, as far as it is worth waiting for. Where this says False it may do so
    all the same: a tensor that hides nothing is as right, and a little slower.

    The device can tell when it has done all that it was given before, and then has nothing to do until the host has
    gone on: behind an encoder that is most of a model. So the host waits only if the last padding for a mask of this
    kind hid nothing. If it hid some keys, this one is taken to do so too, and its answer is for the next.

    What a mask becomes depends on the padding before it, then, and not on when an answer arrives. Under deterministic
    algorithms it depends on its own padding alone.
    """
    if not seen.is_cuda:
        return bool(seen.all())
    if torch.cuda.is_current_stream_capturing():
        return False
    before = _answers.get((seen.device, kind))
    answer = _answers[seen.device, kind] = _Answer(seen)
    waits = before is None or torch.are_deterministic_algorithms_enabled() or before.wait()
    return waits and answer.wait()


class _Answer:
    """Whether all elements of a tensor are true, on its way from the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._found = tensor.all().to("cpu", non_blocking=True)
        self._arrived = torch.cuda.current_stream(tensor.device).record_event()

    def wait(self) -> bool:
        self._arrived.synchronize()
        return bool(self._found)


# By device and kind of mask. A model with windows makes two masks at once, one of each kind: the second would wait for
# the first if they were of one.
_answers: dict[tuple[torch.device, tuple[str | bool, ...]], _Answer] = {}


def _rule(parts: dict[str, Any], plain: bool, alone: bool, q_length: int, kv_length: int, shift: int) -> Mask | None:
    """The Mask that says the same for every batch, or None. Row i stands at key i + shift.

    `plain` allows no tensor; `alone`: there is one batch, without padding.
    """
    window = parts.get("window")
    if "bidirectional" in parts:
        square = shift == 0 and q_length == kv_length
        return Window(window, window) if plain and square and window is not None else None
    if window is not None and window >= q_length + shift:
        window = None  # it reaches back to the first key from everywhere
    if "packed" in parts:
        whole = alone and shift == 0 and q_length == kv_length
        return _documents(parts["packed"], window) if whole else None
    if not plain or shift not in (0, kv_length - q_length):
        return None
    if q_length == 1 and shift == kv_length - 1 and window is None:
        return _FULL
    return _band(shift == 0, window)


def _documents(sequence_ids: Tensor, window: int | None) -> Documents:
    """Documents from (1, seq) integers that are equal exactly within a sequence."""
    counts = torch.unique_consecutive(sequence_ids[0], return_counts=True)[1]
    return Documents((0, *counts.cumsum(0).tolist()), inner=_band(True, window))


def _parts(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """What a mask function of Transformers is made of: "causal" or "bidirectional", a "window", sequences that are
    "packed"; None if it is anything else.

    Its functions are closures joined by and_masks, so their names and variables are all there is to know them by. What
    is not recognised is not guessed at.
    """
    if mask_function is _masking.causal_mask_function:
        return {"causal": True}
    whole = {_masking.causal_mask_function: "causal", _masking.bidirectional_mask_function: "bidirectional"}
    found: dict[str, Any] = {}
    waiting: list[Any] = [mask_function]
    while waiting:
        part = waiting.pop()
        maker = getattr(part, "__qualname__", "").split(".")[0]
        if part in whole:
            found[whole[part]] = True
        elif maker in _MAKERS and getattr(part, "__module__", "") == "transformers.masking_utils":
            name, variable = _MAKERS[maker]
            held = part.__closure__[part.__code__.co_freevars.index(variable)].cell_contents
            if maker == "and_masks":
                waiting += held
            elif maker == _BY_POSITIONS:
                waiting.append(held)
                found[maker] = True
            elif name in found:
                return None
            else:
                found |= {name: held, maker: True}
        else:
            return None
    causal, bidirectional = "causal" in found, "bidirectional" in found
    sided = "sliding_window_overlay" in found
    if _BY_POSITIONS in found and "packed" not in found:
        return None  # within a sequence a band by positions is one by places
    known = {name: held for name, held in found.items() if name not in _MAKERS}
    return (
        known if causal != bidirectional and (causal or not sided) and not (causal and _BOTH_SIDES in found) else None
    )


_BOTH_SIDES = "sliding_window_bidirectional_overlay"
_BY_POSITIONS = "remap_positions_for_packed_sequence"  # of Transformers 5.23
_MAKERS = {  # of functions: what they add, and the variable that says it
    "and_masks": ("", "mask_functions"),
    _BY_POSITIONS: ("", "mask_function"),
    "sliding_window_overlay": ("window", "sliding_window"),
    _BOTH_SIDES: ("window", "sliding_window"),
    "packed_sequence_mask_function": ("packed", "packed_sequence_mask"),
}


@functools.cache
def _traced_types() -> tuple[type, ...]:
    from torch._subclasses import FakeTensor  # noqa: PLC0415
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415

    return FakeTensor, FunctionalTensor
