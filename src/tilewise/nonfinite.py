"""What a mask hides stays hidden where it is nan or infinite: as 0 * nan it would come back in a product.

Code of ours that multiplies under any mask uses `isolated`, where `all_finite` cannot rule out that there is something
to isolate. Packed sequences and documents are computed apart instead: sequences.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

Tensor = torch.Tensor


def all_finite(*tensors: Tensor) -> bool:
    """Whether no element is nan or infinite. False as well where values cannot be read: under vmap, in a CUDA graph."""
    if torch._C._are_functorch_transforms_active():
        return False
    if any(type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta for tensor in tensors):
        return False
    if any(tensor.is_cuda for tensor in tensors) and torch.cuda.is_current_stream_capturing():
        return False
    with torch.no_grad():  # a sum that overflows only costs the time to isolate nothing
        wide = (torch.float64 if tensor.dtype == torch.float64 else torch.float32 for tensor in tensors)
        sums = [tensor.sum(dtype=dtype) for tensor, dtype in zip(tensors, wide, strict=True)]
        return bool(torch.stack([total.to(sums[0].dtype) for total in sums]).isfinite().all())


def isolated(
    multiply: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor, seen: Tensor, *, signed: bool = False
) -> Tensor:
    """multiply(left, right), where `left` is 0 for whatever `seen`, a boolean mask of it, hides.

    Non-finite values of `right` are left out of the product and given back only to those that see them: with their
    sign if `left` has none, as nan if it is `signed`.
    """
    finite = torch.isfinite(right)
    product = multiply(left, torch.where(finite, right, 0.0))
    seen = seen.to(left.dtype).expand(left.shape)
    kinds = [(torch.nan, ~finite)] if signed else [
        (torch.nan, right.isnan()), (torch.inf, right == torch.inf), (-torch.inf, right == -torch.inf)
    ]  # fmt: skip
    for value, bad in kinds:
        reached = multiply(seen, bad.to(left.dtype)) > 0
        product = product + torch.zeros_like(product).masked_fill(reached, value)
    return product
