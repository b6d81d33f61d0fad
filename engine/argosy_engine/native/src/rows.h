// Row-wise operations: RMSNorm with the residual sum, addition, argmax.
#pragma once

#include "pool.h"

namespace argosy {

// out = rms_norm(x) * weight. With a residual, first adds x to it (rounding to T) and normalises the sum instead of x.
template <class T>
void rms_norm(const T* x, T* residual, const T* weight, T* out, int rows, int width, float eps) {
  parallel_rows(rows, width, [&](int row) {
    const T* from = x + int64_t(row) * width;
    T* to = out + int64_t(row) * width;
    vfloat squares = vfloat{};
    if (residual) {
      T* sum = residual + int64_t(row) * width;
      for (int i = 0; i < width; i += kLanes) {
        store(sum + i, load(from + i) + load(sum + i));
        const vfloat value = load(sum + i);
        squares += value * value;
      }
      from = sum;
    } else {
      for (int i = 0; i < width; i += kLanes) {
        const vfloat value = load(from + i);
        squares += value * value;
      }
    }
    const float scale = 1.0f / __builtin_sqrtf(reduce_sum(squares) / float(width) + eps);
    for (int i = 0; i < width; i += kLanes) store(to + i, load(from + i) * scale * load(weight + i));
  });
}

// sum += x
template <class T>
void add(const T* x, T* sum, int rows, int width) {
  parallel_rows(rows, width, [&](int row) {
    const int64_t at = int64_t(row) * width;
    for (int i = 0; i < width; i += kLanes) store(sum + at + i, load(sum + at + i) + load(x + at + i));
  });
}

// Returns the index of a row's highest value; ties go to the lowest index.
template <class T>
int64_t argmax_of(const T* from, int width) {
  vfloat best = broadcast(-__builtin_inff());
  vint best_at = vint{};
  vint at = lane_index();
  int i = 0;
  for (; i + kLanes <= width; i += kLanes, at += kLanes) {
    const vfloat value = load(from + i);
    const vint is_better = value > best;
    best = is_better ? value : best;
    best_at = is_better ? at : best_at;
  }
  float top = best[0];
  int64_t index = best_at[0];
  for (int lane = 1; lane < kLanes; ++lane)
    if (best[lane] > top || (best[lane] == top && best_at[lane] < index)) top = best[lane], index = best_at[lane];
  for (; i < width; ++i)
    if (to_float(from[i]) > top) top = to_float(from[i]), index = i;
  return index;
}

template <class T>
void argmax(const T* x, int64_t* out, int rows, int width) {
  parallel_rows(rows, width, [&](int row) { out[row] = argmax_of(x + int64_t(row) * width, width); });
}

}  // namespace argosy
