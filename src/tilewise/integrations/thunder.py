"""lightning-thunder: an executor that takes scaled_dot_product_attention where the planner has something better.

    import thunder
    from tilewise.integrations.thunder import executor
    fast = thunder.jit(model, executors=[executor(), *thunder.get_default_executors()])

Written to lightning-thunder 0.2.6, which imports with torch 2.11 and 2.12; torch 2.13 dropped names it mentions (named
tensors). The checker is the planner itself: it looks at proxies, runs nothing, and says no to what it does not know.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from ..call.request import Lowered
from ..errors import InvalidInput, UnsupportedProblem
from ..masks import Causal, Dense, Full
from ..plan import AUTO, BACKENDS, plan
from ..problem import Problem
from ..target import Target
from ..torch_kernels import gates

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..masks import Mask

Tensor = torch.Tensor

__all__ = ["executor"]


def executor(*, when: Callable[[Problem], object] | None = None, backend: str = AUTO) -> Any:
    """An OperatorExecutor for thunder.jit. `when` and `backend` mean what they mean to `tilewise.sdpa`."""
    if when is not None and not callable(when):
        raise InvalidInput("when", repr(when), "a function of a Problem, or None", "pass lambda problem: ...")
    if backend != AUTO and backend not in BACKENDS:
        raise InvalidInput("backend", repr(backend), f"'auto' or one of {', '.join(BACKENDS)}", "choose one")
    thunder = _thunder()
    extend, transforms = import_module("thunder.extend"), import_module("thunder.core.transforms")
    made = extend.OperatorExecutor("tilewise", version="0.1")
    infer = made.register_operator("tilewise_attention", meta=_meta_of_infer, fn=_infer)
    train = made.register_operator("tilewise_attention_with_lse", meta=_meta_of_train, fn=_train)
    differentiate = made.register_operator("tilewise_attention_backward", meta=_meta_of_backward, fn=_backward)

    def checker(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> bool:
        if dropout_p or scale == 0 or (attn_mask is not None and (is_causal or attn_mask.requires_grad)):
            return False
        try:
            problem = _describe(query, key, value, attn_mask, is_causal, scale)
            return (when is None or bool(when(problem))) and _is_ours(problem, _torch_device(query), backend)
        except (InvalidInput, UnsupportedProblem):
            return False

    def execute(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        return infer(query, key, value, attn_mask, is_causal, scale, backend)

    def gradient(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        out, lse = train(query, key, value, attn_mask, is_causal, scale, backend)
        dout = transforms.get_grad(out)
        grads = differentiate(dout, query, key, value, attn_mask, out, lse, is_causal, scale, backend)
        transforms.put_grads((query, key, value), grads)
        return out

    made.register_implementation(
        thunder.torch.scaled_dot_product_attention,
        checker=checker,
        execution_transform=execute,
        grad_transform=gradient,
    )
    return made


def _thunder() -> Any:
    try:
        return import_module("thunder")
    except AttributeError as error:
        raise ImportError(
            f"lightning-thunder does not import with torch {torch.__version__}: {error}. Use torch 2.11 or 2.12."
        ) from error


# ---------------------------------------------------------------------------------------------------------------------
# The operators: each as thunder's proxies see it, and as it runs. q, k, v are (batch, heads, seq, head_dim).


def _options(mask: object, is_causal: bool, scale: float | None, backend: str) -> dict[str, Any]:
    """By name, as the operators' schemas have them."""
    text = "" if mask is not None else "causal" if is_causal else "full"
    return Lowered(mask=text, scale=scale, backend=backend)._asdict()


def _listed(mask: Tensor | None) -> list[Tensor]:
    """The mask as the list of operands that the operators take."""
    return [] if mask is None else [mask]


def _infer(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: Any, backend: str) -> Tensor:
    out: Tensor = torch.ops.tilewise.attention(q, k, v, _listed(mask), **_options(mask, is_causal, scale, backend))[0]
    return out


def _meta_of_infer(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, backend: str) -> Any:
    return _thunder().TensorProxy(like=q, shape=(*q.shape[:-1], v.shape[-1]))


def _train(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: Any, backend: str
) -> tuple[Tensor, Tensor]:
    options = _options(mask, is_causal, scale, backend)
    operands = _listed(mask)
    wants = [True] * 3 + [False] * len(operands)
    out, lse = torch.ops.tilewise.attention_with_lse(q, k, v, operands, wants=wants, **options)
    return out, lse


def _meta_of_train(q: Any, k: Any, v: Any, mask: Any, is_causal: bool, scale: Any, backend: str) -> Any:
    thunder = _thunder()
    wide = q.dtype == thunder.dtypes.float64
    lse = thunder.TensorProxy(
        like=q, shape=tuple(q.shape[:3]), dtype=thunder.dtypes.float64 if wide else thunder.dtypes.float32
    )
    return _meta_of_infer(q, k, v, mask, is_causal, scale, backend), lse


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: Any,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = _options(mask, is_causal, scale, backend)
    operands = _listed(mask)
    wants = [True] * 3 + [False] * len(operands)
    grads = torch.ops.tilewise.attention_backward(dout, None, q, k, v, operands, out, lse, wants=wants, **options)
    dq, dk, dv = grads[:3]
    return dq, dk, dv


def _meta_of_backward(
    dout: Any, q: Any, k: Any, v: Any, mask: Any, out: Any, lse: Any, is_causal: bool, scale: Any, backend: str
) -> Any:
    proxy = _thunder().TensorProxy
    return proxy(like=q), proxy(like=k), proxy(like=v)


# ---------------------------------------------------------------------------------------------------------------------
# The checker


def _describe(query: Any, key: Any, value: Any, attn_mask: Any, is_causal: bool, scale: float | None) -> Problem:
    """The Problem that proxies pose. InvalidInput where they pose none, broadcast batches and heads among them."""
    shapes = [tuple(int(size) for size in proxy.shape) for proxy in (query, key, value)]
    if any(len(shape) != 4 for shape in shapes) or any(shape[:2] != shapes[0][:2] for shape in shapes[1:]):
        raise InvalidInput("shapes", shapes, "(batch, heads, seq, dim) with one batch and heads", "leave it to PyTorch")
    to_torch = import_module("thunder.core.dtypes").to_torch_dtype
    batch, heads, seq_q, head_dim = shapes[0]
    mask: Mask = Causal() if is_causal else Full()
    if attn_mask is not None:
        mask_dtype = to_torch(attn_mask.dtype)
        if mask_dtype not in (torch.bool, to_torch(query.dtype)):
            raise InvalidInput("attn_mask.dtype", mask_dtype, "torch.bool or that of query", "cast the mask")
        mask = Dense(tuple(int(size) for size in attn_mask.shape), mask_dtype != torch.bool)
    return Problem(
        batch=batch,
        heads_q=heads,
        heads_kv=heads,
        seq_q=seq_q,
        seq_kv=shapes[1][2],
        head_dim=head_dim,
        head_dim_v=shapes[2][3],
        dtype=to_torch(query.dtype),
        mask=mask,
        scale=scale or 0.0,
        needs_grad=any(proxy.requires_grad for proxy in (query, key, value)),
    )


def _torch_device(proxy: Any) -> torch.device:
    found: torch.device = import_module("thunder.core.devices").to_torch_device(proxy.device)
    return found


def _is_ours(problem: Problem, device: torch.device, backend: str) -> bool:
    """A named backend takes all it can; "auto" takes what PyTorch would run differently."""
    target = Target.of(device)
    chosen = plan(problem, target, backend).backend
    return backend != AUTO or chosen != gates.default_choice(problem, target)
