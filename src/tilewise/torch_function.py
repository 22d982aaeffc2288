"""torch.nn.functional.scaled_dot_product_attention: its signature and semantics, through the planner."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from .call.execute import attend
from .call.request import BHSD, BSD, Request, new_options, new_request, with_tensors
from .errors import InvalidInput
from .masks import Causal, Full
from .plan import AUTO, plan
from .problem import describe, shown
from .target import Target
from .torch_kernels import candidates
from .torch_seam.switches import autocast_inputs, is_jit_traced

if TYPE_CHECKING:
    from .call.request import MaskLike
    from .plan import Plan

Tensor = torch.Tensor
_log = logging.getLogger("tilewise")


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch.nn.functional.scaled_dot_product_attention: its signature and semantics, through the planner.

    What only PyTorch's own function defines (broadcast batches, more than 4 dimensions, nested tensors), and masks that
    require grad where no kernel of ours makes their gradient, are handed to it, and the logger "tilewise" says so
    outside of torch.compile. In these calls alone `torch.nn.attention.sdpa_kernel` chooses among PyTorch's kernels;
    `tilewise.sdpa` obeys it in every call.
    """
    _check_types(query, key, value, attn_mask, is_causal)
    scale, dropout_p = _number("scale", scale), _number("dropout_p", dropout_p) or 0.0
    query, key, value = autocast_inputs(query, key, value)
    if type(attn_mask) is Tensor:
        (attn_mask,) = autocast_inputs(attn_mask)
    why = only_torch_defines(query, key, value, attn_mask, scale, enable_gqa) or (
        "a dropout of 1" if dropout_p == 1.0 else ""
    )
    if not why and not is_causal and attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled():
        why = _torch_differentiates(query, key, value, attn_mask, scale, dropout_p)
    if why:
        if not torch.compiler.is_compiling():  # a trace knows no loggers
            _log.info("scaled_dot_product_attention: %s; handed to PyTorch", why)
        return candidates.TORCH_FUNCTION(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if attn_mask is not None and is_causal:
        raise InvalidInput(
            "attn_mask", "a mask together with is_causal=True", "one of the two", "fold the causal rule into the mask"
        )
    return attend(
        sdpa_request(query, key, value, torch_mask(without_repeats(attn_mask), is_causal), dropout_p, scale)
    ).out


def sdpa_request(
    query: Tensor, key: Tensor, value: Tensor, mask: MaskLike, dropout: float, scale: float | None, backend: str = AUTO
) -> Request:
    """What the function asks with these arguments. Of (batch, seq, dim) tensors the batch takes the place of the heads,
    which a mask (batch, L, S) fits."""
    rule, extras = with_tensors(mask)
    options = new_options((rule, scale, 0.0, (), dropout, False, False, backend, "exact", 0, 0, False))
    return new_request((BSD if query.ndim == 3 else BHSD, query, key, value, extras, {}, options))


def _torch_differentiates(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor, scale: float | None, dropout: float
) -> str:
    """Why PyTorch is to make the gradient of a mask; empty where one of our kernels makes it."""
    if query.ndim == 3:
        query, key, value = (tensor.unsqueeze(0) for tensor in (query, key, value))
    problem = describe(query, key, value, mask=torch_mask(attn_mask, False), scale=scale, dropout=dropout)
    return left_to_torch(plan(problem, Target.of(query.device)))


def left_to_torch(chosen: Plan) -> str:
    """Why a call that the planner gives to no kernel of ours is PyTorch's, whose function has fused kernels for it."""
    if not chosen.problem.operand_grads or chosen.is_ours:
        return ""
    return "a mask that requires grad, and no kernel of ours takes the problem"


def _check_types(query: object, key: object, value: object, attn_mask: object, is_causal: object) -> None:
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise InvalidInput(name, type(tensor).__name__, "a torch.Tensor", "convert it with torch.as_tensor")
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise InvalidInput(
            "attn_mask",
            shown(attn_mask),
            "a torch.Tensor or None",
            "pass is_causal=True for a causal mask; tilewise.attention takes masks by name",
        )
    if not isinstance(is_causal, bool):
        raise InvalidInput("is_causal", repr(is_causal), "True or False", "pass a mask as attn_mask")


def _number(name: str, value: Any) -> float | None:
    """A number as F.scaled_dot_product_attention takes it: also a tensor with one element, a NumPy scalar or a bool."""
    if value is None or type(value) is float:
        return value
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidInput(name, shown(value), "a number", f"leave {name} out for the default") from None


_CAUSAL, _FULL = Causal(), Full()


def torch_mask(attn_mask: Tensor | None, is_causal: bool) -> MaskLike:
    if attn_mask is None:
        return _CAUSAL if is_causal else _FULL
    lower_right = _causal_bias_variant(attn_mask)
    if lower_right is None:
        return attn_mask
    return Causal("bottom-right" if lower_right else "top-left")


def without_repeats(attn_mask: Tensor | None) -> Tensor | None:
    """A mask with a size of 1 along the dimensions in which it is expanded: kernels read what is there once.

    One that requires grad stays as it is: all of it has a gradient. So does a trace's, whose strides are guesses.
    """
    if attn_mask is None or type(attn_mask) is not Tensor or attn_mask.requires_grad or torch.compiler.is_compiling():
        return attn_mask
    if attn_mask.layout is torch.strided and 0 in attn_mask.stride():
        for dim, (size, step) in enumerate(zip(attn_mask.shape, attn_mask.stride(), strict=True)):
            if step == 0 and size > 1:
                attn_mask = attn_mask.narrow(dim, 0, 1)
    return attn_mask


def _causal_bias_variant(attn_mask: Tensor) -> bool | None:
    """PyTorch's CausalBias is a tensor in name only: True = lower right, False = upper left, None = another tensor."""
    if type(attn_mask) is Tensor:
        return None
    from torch.nn.attention.bias import CausalBias, CausalVariant  # noqa: PLC0415  (slow to import, rarely needed)

    return attn_mask.variant is CausalVariant.LOWER_RIGHT if isinstance(attn_mask, CausalBias) else None


def _is_traced(tensor: Tensor) -> bool:
    return torch.compiler.is_compiling() or type(tensor) not in (Tensor, torch.nn.Parameter)


def only_torch_defines(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float | None, enable_gqa: bool
) -> str:
    """What of this call belongs to F.scaled_dot_product_attention alone; empty if nothing does."""
    if is_jit_traced() is not None:
        return "torch.jit.trace, which sees sizes as tensors"
    if query.is_nested or key.is_nested or value.is_nested:
        return "nested tensors"
    if query.ndim not in (3, 4) or not query.ndim == key.ndim == value.ndim:
        return f"inputs of {query.ndim}, {key.ndim} and {value.ndim} dimensions"
    if query.shape[0] != key.shape[0] or query.shape[0] != value.shape[0]:
        return "a batch dimension that broadcasts"
    if query.ndim == 4:
        heads_q, heads_k, heads_v = query.shape[1], key.shape[1], value.shape[1]
        if not enable_gqa and not heads_q == heads_k == heads_v:
            most = max(heads_q, heads_k, heads_v)
            if heads_q in (1, most) and heads_k in (1, most) and heads_v in (1, most):
                return "a heads dimension that broadcasts"
        if enable_gqa and heads_k != heads_v:
            return "different numbers of key and value heads"
    if 0 in (query.shape[-1], value.shape[-1]):
        return "a head_dim of 0"
    if attn_mask is not None and _causal_bias_variant(attn_mask) is None:
        if _is_traced(attn_mask) and attn_mask.requires_grad and torch.is_grad_enabled():
            return "a mask that requires grad, in a trace"
        if attn_mask.dtype not in (torch.bool, query.dtype):
            return f"a {attn_mask.dtype} mask for {query.dtype} inputs"
        if attn_mask.ndim == 0 or attn_mask.ndim > query.ndim:
            return f"a mask of {attn_mask.ndim} dimensions"
    if scale is not None and (scale == 0.0 or not abs(scale) <= torch.finfo(torch.float32).max):
        return "scale 0" if scale == 0.0 else "a scale beyond float32"  # constants, as a trace needs them
    if not enable_gqa and query.ndim == 4 and not query.shape[1] == key.shape[1] == value.shape[1]:
        raise InvalidInput(
            "enable_gqa",
            f"False, with {query.shape[1]} query heads over {key.shape[1]} key heads",
            "enable_gqa=True, or as many heads in all three",
            "pass enable_gqa=True to share key/value heads",
        )
    return ""
