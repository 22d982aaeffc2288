"""Tensor maps: how the bulk copy engine is told the shape of a tensor in global memory. Encoded once, then remembered.

The shape part (`TiledMap`) is separate from the address, since in a running program shapes repeat for ever and
addresses mostly do: a hit costs one dictionary lookup.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

from ..errors import DeviceError
from .launch import adopt_context, check, driver
from .memo import keep
from .mirror import TENSOR_MAP_ALIGNMENT, TensorMap

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

_MAX_ADDRESSES = 256
_MAX_SHAPES = 1024
_ELEMENT = {
    "bfloat16": ("BFLOAT16", 2),
    "float16": ("FLOAT16", 2),
    "float32": ("FLOAT32", 4),
    "uint8": ("UINT8", 1),
    "float8_e4m3fn": ("UINT8", 1),
    "float8_e5m2": ("UINT8", 1),
    "int32": ("INT32", 4),
}
_SWIZZLE = {0: "NONE", 32: "32B", 64: "64B", 128: "128B"}
_PROMOTION = {0: "NONE", 64: "L2_64B", 128: "L2_128B", 256: "L2_256B"}


class TiledMap:
    """A tensor's shape and how it is cut into boxes; `at(address)` is the map for a tensor of that shape.

    Innermost dimension first, as the hardware counts: `dims` in elements, `strides` in bytes for all dimensions but the
    innermost (which is contiguous), `box` in elements. `swizzle` is the span in bytes of the shared-memory swizzle.
    """

    __slots__ = (
        "_arrays", "_dtype", "_known", "_modes", "_pointers", "at", "box", "dims", "dtype", "strides", "swizzle",
    )  # fmt: skip

    def __init__(
        self,
        dtype: torch.dtype,
        dims: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int,
        l2_promotion: int,
    ) -> None:
        cu = driver()
        self.dtype, self.dims, self.strides, self.box, self.swizzle = dtype, dims, strides, box, swizzle
        rank = len(dims)
        self._arrays = (
            (ctypes.c_uint64 * rank)(*dims),
            (ctypes.c_uint64 * max(1, rank - 1))(*strides),
            (ctypes.c_uint32 * rank)(*box),
            (ctypes.c_uint32 * rank)(*[1] * rank),
        )
        self._pointers = tuple(ctypes.addressof(array) for array in self._arrays)
        self._dtype = int(getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_element(dtype)[0]}"))
        self._modes = (
            int(getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{_SWIZZLE[swizzle]}")),
            int(getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{_PROMOTION[l2_promotion]}")),
        )
        self._known = _Encoded(self._encode)
        # The map of a tensor at an address. It is shared: assign it to a field (which copies), never change it.
        self.at: Callable[[int], TensorMap] = self._known.__getitem__

    @property
    def described(self) -> tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...], int, int]:
        """All that `cuTensorMapEncodeTiled` is told but an address: dtype, dims, strides, box, swizzle, promotion."""
        return self._dtype, self.dims, self.strides, self.box, *self._modes

    def _encode(self, address: int) -> TensorMap:
        encoded = _aligned_map()
        call = (ctypes.addressof(encoded), self._dtype, len(self.dims), address, *self._pointers, 0, *self._modes, 0)
        status = _encode_tiled()(*call)
        if status and adopt_context():
            status = _encode_tiled()(*call)
        if status:
            broken = broken_rules(self.dtype, address, self.dims, self.strides, self.box, self.swizzle)
            raise DeviceError(
                f"the driver refuses a tensor map (error {status}): {'; '.join(broken) or 'no known rule is broken'}.\n"
                f"  Asked for {self.dtype}, dims {self.dims}, strides {self.strides} bytes, box {self.box}, "
                f"swizzle {self.swizzle}.\n  What to do: call .contiguous() on the input, or choose another backend."
            )
        return keep(self._known, address, encoded, _MAX_ADDRESSES)


class _Encoded(dict[int, TensorMap]):
    """Maps by address. Why a dictionary that makes what it lacks: one that it has is found without a call in Python."""

    def __init__(self, encode: Callable[[int], TensorMap]) -> None:
        self._encode = encode

    def __missing__(self, address: int) -> TensorMap:
        return self._encode(address)


@functools.lru_cache(maxsize=_MAX_SHAPES)
def tiled_map(
    dtype: torch.dtype,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle: int = 128,
    l2_promotion: int = 256,
) -> TiledMap:
    """The `TiledMap` for these arguments, made once."""
    return TiledMap(dtype, dims, strides, box, swizzle, l2_promotion)


def rows_map(tensor: torch.Tensor, rows: int) -> TiledMap:
    """Boxes of `rows` x 64 columns of a 16-bit (batch, heads, seq, dim) tensor, its last dimension contiguous.

    A dimension of size 1 may have any stride in PyTorch, and gets a legal one here.
    """
    batch, heads, seq, dim = tensor.shape
    strides = [
        stride * 2 if size > 1 else 16 * -(-dim // 8)
        for size, stride in ((seq, tensor.stride(2)), (heads, tensor.stride(1)), (batch, tensor.stride(0)))
    ]
    return tiled_map(tensor.dtype, (dim, seq, heads, batch), tuple(strides), (64, rows, 1, 1))


def broken_rules(
    dtype: torch.dtype,
    address: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int,
) -> list[str]:
    """Which of the hardware's rules for tiled tensor maps these values break, each with its value and limit."""
    inner_bytes = box[0] * _element(dtype)[1]
    rules = [
        (1 <= len(dims) <= 5, f"rank {len(dims)} is not in 1..5"),
        (len(strides) == len(dims) - 1, f"{len(strides)} strides for rank {len(dims)}: one fewer is wanted"),
        (len(box) == len(dims), f"box of rank {len(box)} for rank {len(dims)}"),
        (address % 16 == 0, f"address {address:#x} is not a multiple of 16"),
        (all(1 <= dim <= 2**32 for dim in dims), f"dims {dims} are not all in 1..2^32"),
        (all(stride % 16 == 0 for stride in strides), f"strides {strides} are not all multiples of 16 bytes"),
        (all(0 <= stride < 2**40 for stride in strides), f"strides {strides} are not all in 0..2^40 bytes"),
        (all(1 <= side <= 256 for side in box), f"box {box} has a side outside 1..256"),
        (inner_bytes % 16 == 0, f"the box's inner side is {inner_bytes} bytes, not a multiple of 16"),
        (not swizzle or inner_bytes <= swizzle, f"the box's inner side is {inner_bytes} bytes, over the swizzle span"),
    ]
    return [message for holds, message in rules if not holds]


def _aligned_map() -> TensorMap:
    """Room for a map at a multiple of 64 bytes, as the driver demands; the bindings place a CUtensorMap anywhere."""
    room = (ctypes.c_char * (ctypes.sizeof(TensorMap) + TENSOR_MAP_ALIGNMENT))()
    return TensorMap.from_buffer(room, -ctypes.addressof(room) % TENSOR_MAP_ALIGNMENT)


def _element(dtype: torch.dtype) -> tuple[str, int]:
    return _ELEMENT[str(dtype).removeprefix("torch.")]


@functools.cache
def _encode_tiled() -> Any:
    """`cuTensorMapEncodeTiled` by address: the bindings' own wrapper does not align the map it fills."""
    cu = driver()
    what = "finding cuTensorMapEncodeTiled in the driver"
    flags = cu.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    status, address, *_ = cu.cuGetProcAddress(b"cuTensorMapEncodeTiled", 12000, flags)
    check((status, address), what)
    pointer, word = ctypes.c_void_p, ctypes.c_int
    kinds = [pointer, word, ctypes.c_uint32, *[pointer] * 5, *[word] * 4]
    return ctypes.CFUNCTYPE(word, *kinds)(address)
