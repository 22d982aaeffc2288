// The products of kernels/sm90/wgmma.cuh on the model of runtime.h: a product happens some time
// after all 128 threads of a warpgroup have issued it, and until a wait the accumulators belong to
// it. Ref: PTX ISA, "Asynchronous warpgroup level matrix instructions": descriptors, fragments,
// 128-byte swizzle.
#pragma once

#include "ptx.cuh"

namespace tilewise::wgmma {

using ptx::u16;
using ptx::u32;
using ptx::u64;

struct Issued {  // by one thread
  float* d;
  u64 a, b;
  bool accumulate;
  const u32* registers;  // if not null, A is in these four registers
};
struct Thread {
  std::deque<Issued> issued;
  long products = 0;      // issued so far
  std::deque<long> ends;  // how many products each committed batch ends with
  bool fenced = false;    // since the last wait
};
struct Warpgroup {
  std::array<Thread, 128> threads;
  std::vector<int> issuers;  // per product: how many threads have issued it
  long done = 0;
};
inline std::map<int, Warpgroup> warpgroups;
inline const bool wgmma_forgets = (model::forgetters.push_back([] { warpgroups.clear(); }), true);
inline Warpgroup& mine() { return warpgroups[model::self().index / 128]; }
inline Thread& my_thread() { return mine().threads[model::self().index % 128]; }

// Between a wait and the next product, threads read and write the registers of both.
inline void fence() { my_thread().fenced = true; }
inline void commit() {
  Thread& thread = my_thread();
  thread.ends.push_back(thread.products);
}
template <int pending>
inline void wait() {
  Warpgroup& here = mine();
  Thread& thread = my_thread();
  while (static_cast<int>(thread.ends.size()) > pending) {
    const long end = thread.ends.front();
    model::wait_until([&here, end] { return here.done >= end; });
    thread.ends.pop_front();
  }
  thread.fenced = false;
}
inline void wait_before_slow_path() { wait<0>(); }
template <typename T, int count>
inline void hold(T (&)[count]) {}

inline u32 descriptor_low(u32 address, u32 leading_bytes) {
  return ((leading_bytes >> 4) << 16) | ((address & 0x3ffff) >> 4);
}
inline u64 descriptor(u32 low, u32 stride_bytes) {
  return static_cast<u64>((1u << 30) | (stride_bytes >> 4)) << 32 | low;
}

struct Operand {
  u32 start, leading, stride;
  explicit Operand(u64 descriptor)
      : start(static_cast<u32>(descriptor & 0x3fff) << 4),
        leading(static_cast<u32>(descriptor >> 16 & 0x3fff) << 4),
        stride(static_cast<u32>(descriptor >> 32 & 0x3fff) << 4) {
    if (descriptor >> 62 != 1) model::fail("a descriptor without the 128-byte swizzle");
  }
  float at(u32 address, Element element) const {
    if (address >= model::shared_bytes)
      model::fail("a product reads past the end of shared memory");
    u16 x;
    std::memcpy(&x, model::async_shared + ptx::swizzled(address), 2);
    return ptx::widened(x, element);
  }
  float k_major(int row, int k, Element element) const {
    return at(start + row / 8 * stride + row % 8 * 128 + k * 2, element);
  }
  float mn_major(int k, int n, Element element) const {
    return at(start + n / 64 * leading + k / 8 * stride + k % 8 * 128 + n % 64 * 2, element);
  }
};

// An element of A from the registers of a thread: word 2 (k / 8) + (row % 16) / 8 of lane
// 4 (row % 8) + (k % 8) / 2.
inline float from_registers(const std::vector<Issued>& issued, int row, int k, Element element) {
  const Issued& thread = issued[row / 16 * 32 + row % 8 * 4 + k % 8 / 2];
  const u32 word = thread.registers[k / 8 * 2 + row % 16 / 8];
  return ptx::widened(static_cast<u16>(k % 2 ? word >> 16 : word), element);
}

inline void multiply_now(const std::vector<Issued>& issued, int n, Element element, bool transposed,
                         bool a_transposed) {
  const bool in_registers = issued[0].registers != nullptr;
  const Operand a(in_registers ? issued[0].b : issued[0].a), b(issued[0].b);
  for (const Issued& one : issued)
    if (one.a != issued[0].a || one.b != issued[0].b)
      model::fail("threads of a warpgroup disagree on a product");
  float rows[64][16], columns[256][16], sums[64 * 256];
  for (int k = 0; k < 16; ++k) {
    for (int row = 0; row < 64; ++row)
      rows[row][k] = in_registers   ? from_registers(issued, row, k, element)
                     : a_transposed ? a.mn_major(k, row, element)
                                    : a.k_major(row, k, element);
    for (int column = 0; column < n; ++column)
      columns[column][k] =
          transposed ? b.mn_major(k, column, element) : b.k_major(column, k, element);
  }
  auto over_sums = [&](auto visit) {
    for (int thread = 0; thread < 128; ++thread)
      for (int i = 0; i < n / 2; ++i) {
        const int row = thread / 32 * 16 + thread % 32 / 4 + (i >> 1 & 1) * 8;
        visit(issued[thread], i, sums[row * n + i / 4 * 8 + thread % 4 * 2 + i % 2]);
      }
  };
  over_sums([](const Issued& one, int i, float& sum) { sum = one.accumulate ? one.d[i] : 0.0f; });
  tensor_core::multiply(
      {64, n, 16, ptx::min_exponent(element), model::products_of.fraction_bits, /*steps=*/1},
      rows[0], columns[0], sums);
  over_sums([](const Issued& one, int i, float sum) { one.d[i] = sum; });
}

inline void issue(float* d, u64 a, u64 b, bool accumulate, int n, Element element, bool transposed,
                  bool a_transposed = false, const u32* registers = nullptr) {
  const int group = model::self().index / 128;
  Warpgroup& here = mine();
  Thread& thread = my_thread();
  if (!thread.fenced) model::fail("a product without wgmma.fence before it");
  thread.issued.push_back({d, a, b, accumulate, registers});
  const long number = thread.products++;
  if (number == static_cast<long>(here.issuers.size())) here.issuers.push_back(0);
  ++here.issuers[number];
  if (model::self().index % 128) return;  // the first thread of the warpgroup enqueues for all
  model::enqueue(
      model::products + group,
      [=, &here] {
        std::vector<Issued> all;
        for (Thread& each : here.threads) {
          all.push_back(each.issued.front());
          each.issued.pop_front();
        }
        multiply_now(all, n, element, transposed, a_transposed);
        ++here.done;
      },
      [=, &here] { return here.issuers[number] == 128; });
}

template <int n, Element element>
struct Product {
  static void multiply(float (&d)[n / 2], u64 a, u64 b, int accumulate) {
    issue(d, a, b, accumulate, n, element, false);
  }
  static void multiply(float (&d)[n / 2], const u32 (&a)[4], u64 b, int accumulate) {
    issue(d, 0, b, accumulate, n, element, true, false, a);
  }
};

template <int n, Element element>
struct TransposedProduct {
  static void multiply(float (&d)[n / 2], u64 a, u64 b, int accumulate) {
    issue(d, a, b, accumulate, n, element, true, true);
  }
};

}  // namespace tilewise::wgmma

// A K-major, B MN-major; adds.
#define TW_LADDER_SS(n, type, a, b, c) \
  tilewise::wgmma::issue(              \
      d, a_desc, b_desc, true, n,      \
      std::string(type) == "bf16" ? tilewise::Element::bf16 : tilewise::Element::fp16, true)
