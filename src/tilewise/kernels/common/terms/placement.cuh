// Where the elements of a fragment lie in a tensor with the four dimensions of scores.
#pragma once

#include "../scores.cuh"

namespace tilewise {

// Where the elements of a fragment lie in an operand that has all four dimensions of scores.
struct Placement {
  long long start, row_stride, key_stride;  // for element 0
  int rows_left, keys_left;                 // from element 0 on
  RowsAre rows_are;

  template <typename At>
  __device__ __forceinline__ Placement(const At& at, long long batch_stride, long long head_stride,
                                       long long row_stride, long long key_stride, int seq_q,
                                       int seq_k)
      : row_stride(row_stride), key_stride(key_stride), rows_are(At::rows_are) {
    const int row = at.row(), column = at.column();
    const int query = rows_are == RowsAre::queries ? row : column;
    const int key = rows_are == RowsAre::queries ? column : row;
    start =
        at.batch() * batch_stride + at.head() * head_stride + query * row_stride + key * key_stride;
    rows_left = seq_q - query;
    keys_left = seq_k - key;
  }
  __device__ __forceinline__ int query(int i) const {
    return rows_are == RowsAre::queries ? 8 * row_of(i) : column_of(i);
  }
  __device__ __forceinline__ int key(int i) const {
    return rows_are == RowsAre::queries ? column_of(i) : 8 * row_of(i);
  }
  __device__ __forceinline__ bool exists(int i) const {
    return query(i) < rows_left && key(i) < keys_left;
  }
  // Whether all elements of a fragment exist. This holds for nearly all fragments, and then no
  // element needs its own check.
  __device__ __forceinline__ bool holds(int count) const {
    return query(count - 1) < rows_left && key(count - 1) < keys_left;
  }
  // `adjacent`: keys are contiguous.
  template <bool adjacent>
  __device__ __forceinline__ long long offset(int i) const {
    return start + query(i) * row_stride + (adjacent ? key(i) : key(i) * key_stride);
  }
};

}  // namespace tilewise
