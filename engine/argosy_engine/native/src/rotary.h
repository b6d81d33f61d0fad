// The operations between the q, k, v projection and attention: norm of the heads, rotary embedding, KV cache write.
#pragma once

#include "pool.h"
#include "step.h"

namespace argosy {

template <class T>
ARGOSY_INLINE void normalise(const T* x, const T* weight, int dim, float eps, float* wide) {
  vfloat squares = vfloat{};
  for (int d = 0; d < dim; d += kLanes) {
    const vfloat value = load(x + d);
    store(wide + d, value);
    squares += value * value;
  }
  if (!weight) return;
  const float scale = 1.0f / __builtin_sqrtf(reduce_sum(squares) / float(dim) + eps);
  for (int d = 0; d < dim; d += kLanes) store(wide + d, load(wide + d) * scale * load(weight + d));
}

// Rotates the pairs (i, i + half), the layout of Llama checkpoints.
ARGOSY_INLINE void rotate(float* x, const float* cosine, const float* sine, int half) {
  int d = 0;
  for (; d + kLanes <= half; d += kLanes) {
    const vfloat first = load(x + d), second = load(x + half + d), c = load(cosine + d), s = load(sine + d);
    store(x + d, first * c - second * s);
    store(x + half + d, second * c + first * s);
  }
  for (; d < half; ++d) {
    const float first = x[d], second = x[half + d];
    x[d] = first * cosine[d] - second * sine[d];
    x[half + d] = second * cosine[d] + first * sine[d];
  }
}

// Normalises and rotates the q and k heads of the fused projection in place, and writes k and v to their slots.
template <class T>
void rotate_and_write(const Layer& layer, const Step& step, T* qkv) {
  const int dim = layer.head_dim, half = layer.rotary_dim / 2, heads = layer.num_heads, kv_heads = layer.num_kv_heads;
  const int64_t width = int64_t(heads + 2 * kv_heads) * dim;
  parallel_rows(step.num_tokens, width, [&](int token) {
    T* row = qkv + token * width;
    const int64_t slot = step.slots[token];
    const int64_t block = slot / layer.block_size;
    const int inside = int(slot % layer.block_size);
    ARGOSY_CHECK(block >= 0 && block < layer.num_blocks);
    const float* cosine = layer.cosines + step.positions[token] * half;
    const float* sine = layer.sines + step.positions[token] * half;
    alignas(64) float wide[kMaxHeadDim];
    for (int head = 0; head < heads + kv_heads; ++head) {
      const bool is_query = head < heads;
      T* x = row + head * dim;
      normalise(x, static_cast<const T*>(is_query ? layer.q_norm : layer.k_norm), dim, layer.eps, wide);
      rotate(wide, cosine, sine, half);
      for (int d = 0; d < dim; d += kLanes) store(x + d, load(wide + d));
      if (is_query) continue;
      const int64_t index = block * kv_heads + (head - heads);
      const int units = dim / kPerUnit<T>;
      Unit* keys = static_cast<Unit*>(layer.k_cache) + index * layer.block_size * units +
                   inside / kLanes * kLanes * units + inside % kLanes;
      Unit unit;
      for (int k = 0; k < units; ++k) {
        memcpy(&unit, x + k * kPerUnit<T>, sizeof unit);
        keys[k * kLanes] = unit;
      }
    }
    // In bfloat16, a value shares its unit with the value of the next key. A stale value there is multiplied by a
    // probability of zero, and zero times infinity is NaN: clear it, unless this step writes it too.
    constexpr int per = kPerUnit<T>;
    const bool clears_next = per == 2 && inside % 2 == 0 &&
                             (token + 1 == step.num_tokens || step.slots[token + 1] != slot + 1);
    for (int head = 0; head < kv_heads; ++head) {
      const T* v = row + (heads + kv_heads + head) * dim;
      T* values = static_cast<T*>(layer.v_cache) + (block * kv_heads + head) * layer.block_size * dim +
                  inside / per * per * dim + inside % per;
      for (int d = 0; d < dim; ++d) {
        values[d * per] = v[d];
        if (clears_next) values[d * per + per - 1] = T{};
      }
    }
  });
}

}  // namespace argosy
