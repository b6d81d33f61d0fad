// The inner loop shared by all matrix products: linears, query x key and probability x value.
//
// C[row][lane] += sum over k of A[row][k] * B[k][lane], where k counts units. A is row-major. B consists of `Vectors`
// columns of kLanes lanes, each with its own base address. Weights and the KV cache are stored in B's layout, so that
// reading them needs no rearranging. Every element is summed in ascending order of k for any number of rows, so a row's
// result does not depend on the other rows (batch invariance).
#pragma once

#include "simd.h"

namespace argosy {

// Accumulators and operands together fill the register file: 12 x 2 of 32 registers, or 6 x 2 of 16.
inline constexpr int kMaxRows = kLanes == 16 ? 12 : 6;

template <class T, int Rows, int Vectors>
struct Tile {
  vfloat sum[Rows][Vectors];

  ARGOSY_INLINE Tile() {
#pragma GCC unroll 12
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sum[r][v] = vfloat{};
  }

  // Strides are in units. If `ahead` is not null, `ahead_step` bytes of it are prefetched per k.
  ARGOSY_INLINE void accumulate(const Unit* a, ptrdiff_t a_stride, const Unit* const* b, ptrdiff_t b_stride, int depth,
                                const char* ahead = nullptr, int ahead_step = 0) {
    const Unit* column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = b[v];
    for (int k = 0; k < depth; ++k) {
      vuint bv[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        bv[v] = load_units(column[v]);
        column[v] += b_stride;
      }
      if (ahead) {
        for (int offset = 0; offset < ahead_step; offset += 64) __builtin_prefetch(ahead + offset, 0, 2);
        ahead += ahead_step;
      }
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        const vuint av = vuint{} + a[r * a_stride];
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sum[r][v] = multiply_add<T>(sum[r][v], av, bv[v]);
      }
      ++a;
    }
  }
};

}  // namespace argosy
