// The numbers of a tensor: those that memory holds, or those that tensor cores multiply. A kernel
// whose operands are stored in other numbers than it multiplies names both: the float32 kernels of
// Hopper multiply parts of fp16 or bf16, and a bias has numbers of its own.
#pragma once

namespace tilewise {

enum class Element { fp16, bf16, float32 };

template <Element element>
constexpr bool is_16_bit = element == Element::fp16 || element == Element::bf16;

}  // namespace tilewise
