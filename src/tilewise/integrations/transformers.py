"""Hugging Face Transformers: `register()`, then attn_implementation="tilewise".

    from tilewise.integrations.transformers import register
    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tilewise")

Two functions are registered under one name, because either alone would be quietly wrong: attention, and the mask that
goes with it. Key/value heads are never repeated; sliding windows, softcap, sinks, padding, packed sequences and both
kinds of caches are honoured. A mask that is a rule (causal, window, packed sequences) stays one: it reaches attention
as a `RuleMask`, which holds no seq x seq tensor. What is no rule (padding, custom patterns) is Transformers' own
boolean mask. Needs transformers >= 5.15; runs with 5.22.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map

from ..api import attention, autocast_inputs, scaled_dot_product_attention
from ..errors import UnsupportedProblem
from ..masks import Causal, Documents, Full, Window

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..masks import Mask

Tensor = torch.Tensor
NAME = "tilewise"

__all__ = ["NAME", "RuleMask", "attention_forward", "attention_mask", "register"]


def register(name: str = NAME) -> str:
    """Make `attn_implementation=name` known to Transformers, for attention and masks both; returns the name."""
    global _masking
    transformers: Any = import_module("transformers")  # heavy, and optional
    _masking = import_module("transformers.masking_utils")
    transformers.AttentionInterface.register(name, attention_forward)
    transformers.AttentionMaskInterface.register(name, attention_mask)
    return name


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
    tensor or RuleMask says everything about who sees whom; `is_causal` and `sliding_window` count only without one.
    """
    _refuse(kwargs)
    query, key, value = autocast_inputs(query, key, value)
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask = _mask(attention_mask, bool(is_causal), sliding_window, query, key, kwargs)
    if position_bias is not None:
        return _with_position_bias(query, key, value, mask, position_bias, dropout, scaling, softcap, s_aux), None
    # Views in (batch, seq, heads, dim): out comes back in the order that Transformers wants, without a copy.
    tensors = (query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    cap = softcap or 0.0
    if s_aux is None:
        return attention(*tensors, mask=mask, scale=scaling, softcap=cap, dropout=dropout, layout="bshd"), None
    out, lse = attention(
        *tensors, mask=mask, scale=scaling, softcap=cap, dropout=dropout, layout="bshd", return_lse=True
    )
    return _with_sinks(out, lse, s_aux), None


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """out (batch, seq, heads, dim) with one more logit per head in the softmax's denominator, a key that has no value.

    Z keys' share of Z + exp(sink) is sigmoid(lse - sink); all of it is differentiable, lse included.
    """
    share = torch.sigmoid(lse - sinks.to(lse.dtype)[:, None])  # (batch, heads, seq)
    return (out * share.transpose(1, 2).unsqueeze(-1)).to(out.dtype)


def _with_position_bias(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor,
    position_bias: Tensor,
    dropout: float,
    scaling: float | None,
    softcap: float | None,
    s_aux: Tensor | None,
) -> Tensor:
    """A learned bias on the scores. PyTorch has fused kernels that differentiate one: our namesake hands it over."""
    if softcap or s_aux is not None:
        raise UnsupportedProblem(
            "transformers: position_bias together with softcap or sinks.", remedy="use attn_implementation='eager'"
        )
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if not isinstance(mask, Tensor):
        mask = mask.to_bool(range(seq_q), range(seq_kv), seq_q, seq_kv, query.device)
    bias = position_bias[..., :seq_kv].to(query.dtype)
    bias = bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
    grouped = query.shape[1] != key.shape[1]
    out = scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2).contiguous()


def _refuse(kwargs: dict[str, Any]) -> None:
    if kwargs.get("output_attentions"):
        raise UnsupportedProblem(
            "transformers: output_attentions=True, and tilewise never holds the weights.",
            remedy="use attn_implementation='eager' to look at them",
        )
    if kwargs.get("cache") is not None:
        raise UnsupportedProblem(
            "transformers: a paged cache (continuous batching) is not supported.",
            remedy="use attn_implementation='sdpa'",
        )


def _mask(
    given: Tensor | None,
    is_causal: bool,
    sliding_window: int | None,
    query: Tensor,
    key: Tensor,
    kwargs: dict[str, Any],
) -> Mask | Tensor:
    seq_q, seq_kv = query.shape[2], key.shape[2]
    if isinstance(given, RuleMask):
        return given.rule
    if given is not None:
        return given if given.dtype == torch.bool else given.to(query.dtype)
    if kwargs.get("cu_seq_lens_q") is not None:
        starts_q, starts_kv = (tuple(kwargs[f"cu_seq_lens_{x}"].tolist()) for x in "qk")
        return Documents(starts_q, starts_kv, _band(starts_q == starts_kv, sliding_window) if is_causal else Full())
    if not is_causal:
        return Full()
    if seq_q == 1:  # the one query is the newest: it sees every key its window reaches
        return Full() if sliding_window is None or sliding_window >= seq_kv else Window(sliding_window - 1, 0, _LAST)
    # Without a mask Transformers means: keys beyond the queries are slots of a static cache that are still empty.
    return _band(True, sliding_window if sliding_window is not None and sliding_window < seq_q else None)


_LAST: Any = "bottom-right"


def _band(first_aligned: bool, sliding_window: int | None) -> Causal | Window:
    """Causal, or the last `sliding_window` keys including one's own, aligned at the first or at the last position."""
    align: Any = "top-left" if first_aligned else _LAST
    return Causal(align) if sliding_window is None else Window(sliding_window - 1, 0, align)


# ---------------------------------------------------------------------------------------------------------------------
# Masks


class RuleMask(torch.Tensor):
    """A boolean mask (batch, 1, seq_q, seq_kv), True = visible, known by its rule and by nothing else.

    It has a shape, a dtype and a device. Any operation on it works on the tensor it stands for, which is made then and
    there, so code that slices or combines masks stays right; only changing it in place is refused.
    """

    rule: Mask

    @staticmethod
    def __new__(cls, rule: Mask, shape: tuple[int, int, int, int], device: torch.device | str) -> RuleMask:
        where = torch.device(device)
        made: RuleMask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=where)
        made.rule = rule
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"RuleMask({self.rule}, shape={tuple(self.shape)})"

    def dense(self) -> Tensor:
        _, _, seq_q, seq_kv = self.shape
        visible = self.rule.to_bool(range(seq_q), range(seq_kv), seq_q, seq_kv, self.device)
        return visible.expand(self.shape)

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
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """Transformers' mask function: None, a RuleMask, or the boolean tensor (batch, 1, q_length, kv_length).

    Query i stands at position q_offset + i, key j at kv_offset + j; attention_mask (batch, positions) is False where
    there is padding. None says the same as to Transformers' sdpa.
    """
    mask_function = mask_function or _masking.causal_mask_function
    rule = None
    if not torch.compiler.is_compiling() and not isinstance(attention_mask, _traced_types()):
        shift = int(q_offset) - kv_offset
        rule = _rule(
            mask_function, attention_mask, allow_is_causal_skip, batch_size, q_length, kv_length, shift, kv_offset
        )
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
    if rule == Full() or (rule == Causal() and q_length == kv_length):
        return None
    return RuleMask(rule, (batch_size, 1, q_length, kv_length), device)


def _rule(
    mask_function: Callable[..., Any],
    padding: Tensor | None,
    plain: bool,
    batch_size: int,
    q_length: int,
    kv_length: int,
    shift: int,
    kv_offset: int,
) -> Mask | None:
    """The Mask that says the same for every batch, or None. Row i stands at key i + shift; `plain` allows no tensor."""
    parts = _parts(mask_function)
    if parts is None:
        return None
    if padding is not None:
        end = kv_offset + shift + q_length  # what lies beyond the last query is hidden by the causal rule anyway
        if padding.shape[-1] < end or not bool(padding[:, kv_offset:end].all()):
            return None
    window = parts.get("sliding_window")
    if window is not None and window >= q_length + shift:
        window = None  # it reaches back to the first key from everywhere
    if "packed_sequence_mask" in parts:
        alone = batch_size == 1 and padding is None and shift == 0 and q_length == kv_length
        return _documents(parts["packed_sequence_mask"], window) if alone else None
    if not plain or shift not in (0, kv_length - q_length):
        return None
    if q_length == 1 and shift == kv_length - 1 and window is None:
        return Full()
    return _band(shift == 0, window)


def _documents(sequence_ids: Tensor, window: int | None) -> Documents:
    """Documents from (1, seq) integers that are equal exactly within a sequence."""
    counts = torch.unique_consecutive(sequence_ids[0], return_counts=True)[1]
    return Documents((0, *counts.cumsum(0).tolist()), inner=_band(True, window))


def _parts(mask_function: Callable[..., Any]) -> dict[str, Any] | None:
    """What a causal mask function of Transformers is made of, by parameter; None if it is anything else.

    Its functions are closures joined by and_masks, so their names and variables are all there is to know them by. What
    is not recognised is not guessed at.
    """
    causal_mask_function = _masking.causal_mask_function
    found: dict[str, Any] = {}
    waiting: list[Any] = [mask_function]
    while waiting:
        part = waiting.pop()
        maker = getattr(part, "__qualname__", "").split(".")[0]
        if part is causal_mask_function:
            found["causal"] = True
        elif maker in _MAKERS and getattr(part, "__module__", "") == "transformers.masking_utils":
            variable = _MAKERS[maker]
            held = inspect.getclosurevars(part).nonlocals[variable]
            if maker == "and_masks":
                waiting += held
            elif variable in found:
                return None
            else:
                found[variable] = held
        else:
            return None
    return found if "causal" in found else None


_MAKERS = {
    "and_masks": "mask_functions",
    "sliding_window_overlay": "sliding_window",
    "packed_sequence_mask_function": "packed_sequence_mask",
}


def _traced_types() -> tuple[type, ...]:
    from torch._subclasses import FakeTensor  # noqa: PLC0415
    from torch._subclasses.functional_tensor import FunctionalTensor  # noqa: PLC0415

    return FakeTensor, FunctionalTensor
