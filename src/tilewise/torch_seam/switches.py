"""What PyTorch has switched on around a call: determinism, autocast, modes, transforms and traces."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..backend import lse_dtype
from ..errors import UnsupportedProblem

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from ..operands import Operands

Tensor = torch.Tensor
ORDINARY = frozenset((Tensor, torch.nn.Parameter))


# ---------------------------------------------------------------------------------------------------------------------
# Deterministic algorithms


class _Switch:
    """PyTorch's switch for deterministic algorithms, held on by any number of holders. All threads share one.

    Invariant: the first holder notes the position of the switch and the last one restores it, in whatever order they
    leave. Autograd's threads, one for every GPU, hold it at the same time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: list[bool] = []  # for each of them, whether it needs the switch to be strict
        self._before = False, False  # enabled, warn_only

    @contextmanager
    def held(self, *, strict: bool) -> Iterator[None]:
        with self._lock:
            if not self._holders:
                self._before = is_deterministic(), _warns_only()
            self._holders.append(strict)
            self._set()
        try:
            yield
        finally:
            with self._lock:
                self._holders.remove(strict)
                self._set()

    def _set(self) -> None:
        enabled, warn_only = self._before
        if self._holders:
            enabled, warn_only = True, not any(self._holders) and (warn_only or not enabled)
        # Below torch.use_deterministic_algorithms, which would turn the compiler's settings as well.
        torch._C._set_deterministic_algorithms(enabled, warn_only=warn_only)


determinism = _Switch()
is_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms
_warns_only: Callable[[], bool] = torch._C._get_deterministic_algorithms_warn_only


def deterministic_algorithms() -> AbstractContextManager[None]:
    """PyTorch's switch on for a while, which calls are then planned by. Other threads may see a warning, no error."""
    return determinism.held(strict=False)


# ---------------------------------------------------------------------------------------------------------------------
# Autocast. Attention casts nothing, whichever backend computes it, even one made of operations that autocast casts.
# Invariant: whatever runs a backend, forward or backward, does it inside `without_autocast`.

autocast_is_on: Callable[[], bool] = torch._C._is_any_autocast_enabled
without_autocast: Callable[[], AbstractContextManager[None]] = torch._C._DisableAutocast


def recorded(
    forward: Callable[..., tuple[Tensor, Tensor | None]], q: Tensor, k: Tensor, v: Tensor, operands: Operands
) -> tuple[Tensor, Tensor | None]:
    """`forward` of (q, k, v, operands), whose single operations autograd or a transform records and derives itself.

    Their derivatives run where we cannot turn autocast off. It leaves float64 alone, so under autocast all is float64.
    """
    if not autocast_is_on():
        return forward(q, k, v, operands)
    with without_autocast():
        wide = {name: x.double() if x.is_floating_point() else x for name, x in operands.items()}
        out, lse = forward(q.double(), k.double(), v.double(), wide)
        return out.to(q.dtype), lse if lse is None else lse.to(lse_dtype(q.dtype))


def autocast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Under torch.autocast F.scaled_dot_product_attention casts its inputs, so its namesake does.

    Each by itself, as PyTorch does: floating tensors other than float64, where autocast is on for their device.
    """
    if not torch.compiler.is_compiling() and not autocast_is_on():
        return tensors
    return tuple(_autocast(tensor) for tensor in tensors)


def _autocast(tensor: Tensor) -> Tensor:
    dtype = autocast_dtype(tensor.device)
    if dtype is None or not tensor.is_floating_point() or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(dtype)


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """What autocast casts to on this device now; None where it is off, or does not exist."""
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


# ---------------------------------------------------------------------------------------------------------------------
# Modes, transforms and traces

# The state of torch.jit.trace, which records operators; None = it is not at work.
is_jit_traced: Callable[[], Any] = torch._C._get_tracing_state
forward_ad = torch.autograd.forward_ad


def refuse_jit_trace(what: str) -> None:
    """Raise UnsupportedProblem while torch.jit.trace records, for calls that no graph of it can hold."""
    if is_jit_traced() is not None:
        raise UnsupportedProblem(f"{what} under torch.jit.trace.", remedy="use torch.compile or torch.export instead")


def is_watched() -> bool:
    """PyTorch's state asks for more than running a kernel: a dispatch mode, a transform, forward AD or a trace."""
    torch_c = torch._C
    return (
        torch_c._len_torch_dispatch_stack() > 0
        or torch_c._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or is_jit_traced() is not None
    )


def is_plain(*tensors: Tensor) -> bool:
    """Ordinary tensors that no mode observes: no subclass, fake tensors included, no dispatch mode, no trace."""
    return are_ordinary(tensors) and torch._C._len_torch_dispatch_stack() == 0 and is_jit_traced() is None


def are_ordinary(tensors: Any) -> bool:
    """None of these tensors is of a subclass."""
    for tensor in tensors:  # noqa: SIM110  (in half the time of a generator)
        if type(tensor) not in ORDINARY:
            return False
    return True


def has_tangent(*tensors: Tensor) -> bool:
    """Forward-mode AD is at work on one of these tensors."""
    return forward_ad._current_level >= 0 and any(forward_ad.unpack_dual(t).tangent is not None for t in tensors)


def is_transformed(*tensors: Tensor) -> bool:
    """A functorch transform or forward-mode AD is at work on these tensors."""
    return torch._C._are_functorch_transforms_active() or has_tangent(*tensors)


def with_memory(tensor: Tensor) -> Tensor:
    """The tensor in memory that holds its values: a kernel reads memory and nothing else.

    PyTorch's zero tensors have none, and lazily negated ones (`x.conj().imag`) have the opposite there.
    """
    return tensor.clone() if tensor._is_zerotensor() or tensor.is_neg() else tensor
