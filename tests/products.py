"""One tensor-core product per block, of each kind that the kernels issue: one source for a GPU and for the emulator.

`on_model` and `on_gpu` give the bits of c + a b^T; `rule` is what tests/emulator/tensor_core.h states, in fractions.
tests/test_emulator.py holds the emulator to the rule, tests/gpu/test_emulator_products.py the hardware to the emulator.
"""

from __future__ import annotations

import ctypes
import math
from fractions import Fraction
from typing import NamedTuple

import torch

import emulation
from tilewise.element import Element
from tilewise.jit import Arguments, Unit, function_for, layout_asserts, params_struct
from tilewise.jit.launch import launch

Tensor = torch.Tensor
BF16, FP16, TF32 = torch.bfloat16, torch.float16, torch.float32

Params = params_struct("Params", a=ctypes.c_void_p, b=ctypes.c_void_p, d=ctypes.c_void_p)

# a: rows x depth and b: columns x depth of a block, both with depth side by side; d: rows x columns, c on entry.
_SHARED = """
#include "common/layout.cuh"
#include "{header}"
namespace tilewise::sm90 {{
using ptx::u16;
using ptx::u32;
struct Params {{
  const void* a;
  const void* b;
  float* d;
}};
constexpr int rows = {rows}, columns = {columns}, depth = {depth};

// Where number `k` of row or column `i` of a matrix lies that is stored along k, or across it, in panels of 16 rows.
__device__ __forceinline__ int along(int i, int k) {{
  return swizzled_chunk(i, k / 8) + k % 8 * 2;
}}
__device__ __forceinline__ int across(int i, int k) {{
  return i / 64 * panel_bytes(16) + swizzled_chunk(k, i % 64 / 8) + i % 8 * 2;
}}

__device__ __forceinline__ void product(const Params& params) {{
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const auto* a = static_cast<const {number}*>(params.a) + blockIdx.x * rows * depth;
  const auto* b = static_cast<const {number}*>(params.b) + blockIdx.x * columns * depth;
  float* d = params.d + blockIdx.x * rows * columns;
  {body}
}}
}}  // namespace tilewise::sm90
{asserts}
extern "C" __global__ void __launch_bounds__({threads})
{name}(const __grid_constant__ tilewise::sm90::Params params) {{
  tilewise::sm90::product(params);
}}
"""

_A_WORDS = """
  auto pair = [](const u16* x) {{ return static_cast<u32>(x[1]) << 16 | x[0]; }};
  u32 words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w)
    words[w] = pair(a + (16 * warp + lane / 4 + w % 2 * 8) * depth + w / 2 * 8 + lane % 4 * 2);
"""

_WGMMA = """
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  unsigned char* b_room = smem_bytes + panel_bytes(64);
  for (int i = threadIdx.x; i < rows * depth; i += 128)
    *reinterpret_cast<u16*>(smem_bytes + {a_place}(i / depth, i % depth)) = a[i];
  for (int i = threadIdx.x; i < columns * depth; i += 128)
    *reinterpret_cast<u16*>(b_room + {b_place}(i / depth, i % depth)) = b[i];
  ptx::fence_proxy_async();
  __syncthreads();
  auto place = [&](int i) {{
    return (16 * warp + lane / 4 + (i >> 1 & 1) * 8) * columns + i / 4 * 8 + lane % 4 * 2 + i % 2;
  }};
  float sums[columns / 2];
#pragma unroll
  for (int i = 0; i < columns / 2; ++i) sums[i] = d[place(i)];
  const auto a_operand =
      wgmma::descriptor(wgmma::descriptor_low(ptx::smem_address(smem_bytes), {a_leading}), swizzle_atom_bytes);
  const auto b_operand =
      wgmma::descriptor(wgmma::descriptor_low(ptx::smem_address(b_room), {b_leading}), swizzle_atom_bytes);
  {words}
  wgmma::hold(sums);
  wgmma::fence();
  wgmma::{product}<columns, {element}>::multiply(sums, {a_operand}, b_operand, 1);
  wgmma::commit();
  wgmma::wait<0>();
  wgmma::hold(sums);
#pragma unroll
  for (int i = 0; i < columns / 2; ++i) d[place(i)] = sums[i];
"""

_MMA = """
  auto place = [&](int i) {{ return (lane / 4 + i / 2 * 8) * columns + lane % 4 * 2 + i % 2; }};
  float sums[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = d[place(i)];
  {words}
  {product}
#pragma unroll
  for (int i = 0; i < 4; ++i) d[place(i)] = sums[i];
"""

_MMA_16 = """
  const u16* column = b + lane / 4 * depth + lane % 4 * 2;
  ptx::mma_m16n8k16<{element}>(sums, words, pair(column), pair(column + 8));
"""

_MMA_TF32 = """
  u32 words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w)
    words[w] = __float_as_uint(a[(lane / 4 + w % 2 * 8) * depth + lane % 4 + w / 2 * 4]);
  const float* column = b + lane / 4 * depth + lane % 4;
  ptx::mma_m16n8k8(sums, words, __float_as_uint(column[0]), __float_as_uint(column[4]));
"""


class Instruction(NamedTuple):
    """A product: rows x columns += rows x depth * depth x columns."""

    name: str
    rows: int
    columns: int
    depth: int
    dtypes: tuple[torch.dtype, ...] = (BF16, FP16)

    @property
    def threads(self) -> int:
        return 128 if self.is_wgmma else 32

    @property
    def is_wgmma(self) -> bool:
        return self.name.startswith("wgmma")

    @property
    def smem_bytes(self) -> int:
        return 64 * 128 + 128 * 128 if self.is_wgmma else 0

    def unit(self, dtype: torch.dtype, arch: str) -> Unit:
        element = {} if dtype is TF32 else {"element": Element.of(dtype).cpp_name}
        if self.is_wgmma:
            header, body = "sm90/wgmma.cuh", _WGMMA.format(**_WGMMA_KINDS[self.name], **element)
        elif dtype is TF32:
            header, body = "sm80/float32_ptx.cuh", _MMA.format(words="", product=_MMA_TF32.format())
        else:
            header, body = "common/ptx.cuh", _MMA.format(words=_A_WORDS.format(), product=_MMA_16.format(**element))
        name = f"{self.name}_{str(dtype).removeprefix('torch.')}"
        source = _SHARED.format(
            header=header,
            rows=self.rows,
            columns=self.columns,
            depth=self.depth,
            number="float" if dtype is TF32 else "u16",
            body=body,
            asserts=layout_asserts(Params, "tilewise::sm90::Params"),
            threads=self.threads,
            name=name,
        )
        return Unit(name, source, arch, smem_bytes=self.smem_bytes)


_ALONG = {"a_place": "along", "a_leading": "16", "words": "", "a_operand": "a_operand"}
_WGMMA_KINDS = {
    "wgmma": _ALONG | {"b_place": "along", "b_leading": "16", "product": "Product"},
    "wgmma_from_registers": _ALONG
    | {"b_place": "across", "b_leading": "panel_bytes(16)", "product": "Product"}
    | {"words": _A_WORDS.format(), "a_operand": "words"},
    "wgmma_transposed": _ALONG
    | {"b_place": "across", "b_leading": "panel_bytes(16)", "product": "TransposedProduct"}
    | {"a_place": "across", "a_leading": "panel_bytes(16)"},
}
INSTRUCTIONS = (
    *(Instruction(name, 64, 128, 16) for name in _WGMMA_KINDS),
    Instruction("mma_m16n8k16", 16, 8, 16),
    Instruction("mma_m16n8k8", 16, 8, 8, (TF32,)),
)
CASES = [(instruction, dtype) for instruction in INSTRUCTIONS for dtype in instruction.dtypes]


# ---------------------------------------------------------------------------------------------------------------------
# Operands

KINDS = ("plain", "spread", "cancelling", "zeros", "subnormal", "large", "nonfinite")


def operands(
    kind: str, instruction: Instruction, dtype: torch.dtype, blocks: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """a (blocks, rows, depth), b (blocks, columns, depth) and c (blocks, rows, columns)."""
    draw = torch.Generator().manual_seed(seed)
    a, b, c = (
        torch.randn(blocks, *shape, generator=draw)
        for shape in (
            (instruction.rows, instruction.depth),
            (instruction.columns, instruction.depth),
            (instruction.rows, instruction.columns),
        )
    )

    def some(x: Tensor, value: float) -> Tensor:
        return torch.where(torch.rand(x.shape, generator=draw) < 0.125, value, x)

    least = -14 if dtype is FP16 else -126  # the exponent of the smallest normal number
    if kind == "spread":
        a, b, c = (x * 2.0 ** torch.randint(-6, 7, x.shape, generator=draw) for x in (a, b, c))
    elif kind == "cancelling":
        c = -(a.to(dtype).double() @ b.to(dtype).double().mT).float()
    elif kind == "zeros":
        a, b, c = (some(some(some(x, 0.0), -0.0), 0.0) for x in (a, b, c))
    elif kind == "subnormal":
        a, c = a * 2.0 ** (least - 1), c * 2.0 ** (least - 4)
        b = b * 2.0 ** torch.randint(-3, 4, b.shape, generator=draw)
    elif kind == "large":
        top = 14 if dtype is FP16 else 62
        a, b, c = a * 2.0**top, b * 2.0**top, c * 2.0 ** (2 * top)
    elif kind == "nonfinite":
        a, b, c = some(some(a, math.inf), math.nan), some(b, -math.inf), some(c, math.inf)
    return a.to(dtype).clamp(-60000, 60000) if dtype is FP16 and kind == "large" else a.to(dtype), b.to(dtype), c


# ---------------------------------------------------------------------------------------------------------------------
# Results


def _arguments(a: Tensor, b: Tensor, d: Tensor) -> Arguments:
    arguments = Arguments(Params)
    arguments.params.a, arguments.params.b, arguments.params.d = a.data_ptr(), b.data_ptr(), d.data_ptr()
    return arguments


def on_model(instruction: Instruction, arch: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    d = c.clone()
    emulation.launch(instruction.unit(a.dtype, arch), len(a), instruction.threads, _arguments(a, b, d))
    return d


def on_gpu(instruction: Instruction, arch: str, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a, b, d = a.cuda(), b.cuda(), c.cuda()
    function = function_for(instruction.unit(a.dtype, arch), a.device.index)
    stream = torch.cuda.current_stream().cuda_stream
    grid, block = (len(a), 1, 1), (instruction.threads, 1, 1)
    launch(function, grid, block, instruction.smem_bytes, stream, _arguments(a, b, d))
    return d.cpu()


def rule(a: Tensor, b: Tensor, c: float, fraction_bits: int, steps: int) -> float:
    """c + sum a b of two vectors: tests/emulator/tensor_core.h in fractions. All operands are finite."""
    least = -14 if a.dtype is FP16 else -126

    def exponent(x: float, least: int) -> int:
        return max(math.frexp(x)[1] - 1, least)

    if a.dtype is TF32:
        a, b = ((x.view(torch.int32) & ~0x1FFF).view(TF32) for x in (a, b))
    for pairs in zip(*(x.double().view(steps, -1).tolist() for x in (a, b)), strict=True):
        products = [(x, y) for x, y in zip(*pairs, strict=True) if x and y]
        addends = [(Fraction(x) * Fraction(y), exponent(x, least) + exponent(y, least)) for x, y in products]
        addends.append((Fraction(c), exponent(c, -126) if c else -126))
        unit = Fraction(2) ** (max(-126, *(e for _, e in addends)) - fraction_bits)
        total = sum(math.trunc(value / unit) for value, _ in addends) * unit
        if abs(total) >= 2**128:
            return math.copysign(math.inf, total)
        place = Fraction(2) ** (max(math.frexp(float(total))[1] - 1, -126) - 23)
        c = float(math.trunc(total / place) * place)
    return c


def differing(got: Tensor, want: Tensor) -> Tensor:
    """Where bits differ. Zeros have no sign here, and a NaN is a NaN."""
    return (got != want) & ~(got.isnan() & want.isnan())
