"""New keys and values into a cache, rotated on the way, in one launch: kernels/sm80/append.cuh.

What comes before attention to a cache. Numbers of 16 bits on a GPU from sm_80 on; `cached.append` has the same in
PyTorch's operations for everything else.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

from .params import mirror, tiles
from .program import Address, Launch, Program, Stride, View
from .source import kernel_unit

if TYPE_CHECKING:
    from ..element import Element
    from ..jit import Unit
    from ..target import Target

MIN_CAPABILITY = (8, 0)
_WARPS = 8
_Params = mirror("sm80/append.cuh", "AppendParams")
OPERANDS = (
    "q",
    "rotated",
    "k",
    "v",
    "k_cache",
    "v_cache",
    "cos",
    "sin",
    "lengths",
    "lengths_after",
    "rows",
    "page_table",
)


class Sizes(NamedTuple):
    """The sizes of a call; 0 for tensors that it does not have."""

    element: Element
    batch: int
    heads: int
    heads_kv: int
    queries: int
    new_keys: int
    head_dim: int
    head_dim_v: int
    rotary_dim: int
    angles: int
    interleaved: bool
    apart: bool
    page_size: int
    cache_batches: int
    capacity: int
    has_rows: bool


@functools.cache
def unit(element: Element, arch: str) -> Unit:
    name = f"append_{element.name}"
    call = f"append<{element.cpp_name}>"
    check = f"append_warps == {_WARPS}"
    return kernel_unit(name, "sm80/append.cuh", call, _Params, arch, threads=32 * _WARPS, checks=(check,))


def program(sizes: Sizes, target: Target) -> Program:
    rotates = sizes.rotary_dim > 0
    fields: dict[str, Any] = {
        **{name: View(name) for name in ("k", "v", "k_cache", "v_cache")},
        "q": View("q") if rotates else None,
        "rotated": View("rotated") if rotates else None,
        "cos": Address("cos") if rotates else None,
        "sin": Address("sin") if rotates else None,
        "lengths": Address("lengths"),
        "lengths_after": Address("lengths_after"),
        "rows": Address("rows") if sizes.has_rows else None,
        "page_table": Address("page_table") if sizes.page_size else None,
        "page_table_stride": Stride("page_table", 0) if sizes.page_size else 0,
        **{name: int(getattr(sizes, name)) for name in Sizes._fields if name not in ("element", "has_rows")},
    }
    rows = 2 * sizes.batch * sizes.new_keys * sizes.heads_kv + rotates * sizes.batch * sizes.queries * sizes.heads
    launch = Launch(unit(sizes.element, target.arch), _Params, fields, max(1, tiles(rows, _WARPS)), 32 * _WARPS)
    return Program((launch,))
