// The gated delta rule (arXiv 2412.06464), token by token: a state of each head is decayed, corrected towards the value
// that a key should give, and read by the query.
//
// Columns of a state do not depend on each other, so a task takes a few of them for all tokens of a request: its part
// of the state stays in the first-level cache. On a CPU this costs a few percent of the products with weights, and
// needs none of the triangular systems that make chunks of tokens one product each.
#pragma once

#include "pool.h"

namespace argosy {

// Columns of a state that a task computes.
inline constexpr int kDeltaVectors = 4;
inline constexpr int kDeltaColumns = kDeltaVectors * kLanes;
// Rows of a state at most: size of keys.
inline constexpr int kDeltaMaxKeys = 512;

struct DeltaShape {
  int32_t requests, tokens, key_heads, value_heads, key_dim, value_dim;
};

// Arrays are contiguous: q and k [requests, tokens, key_heads, key_dim], q scaled; v and out [requests, tokens,
// value_heads, value_dim]; g (log of the decay) and beta [requests, tokens, value_heads]; state [requests, value_heads,
// key_dim, value_dim], which is changed. value_dim is a multiple of kLanes, key_dim at most kDeltaMaxKeys.
inline void gated_delta_rule(const DeltaShape& of, const float* q, const float* k, const float* v, const float* g,
                             const float* beta, float* state, float* out) {
  const int parts = (of.value_dim + kDeltaColumns - 1) / kDeltaColumns;
  const int group = of.value_heads / of.key_heads;
  const int64_t cost = int64_t(of.tokens + 1) * of.key_dim * kDeltaColumns;  // a state is copied in any case
  parallel_rows(of.requests * of.value_heads * parts, cost, [&](int task) {
    const int part = task % parts, head = task / parts % of.value_heads, request = task / parts / of.value_heads;
    const int first = part * kDeltaColumns;
    const int left = (of.value_dim - first) / kLanes;
    const int vectors = left < kDeltaVectors ? left : kDeltaVectors;
    alignas(64) float local[kDeltaMaxKeys * kDeltaColumns];
    float* states = state + (int64_t(request) * of.value_heads + head) * of.key_dim * of.value_dim + first;
    for (int i = 0; i < of.key_dim; ++i)
      for (int j = 0; j < kDeltaVectors; ++j)
        store(local + i * kDeltaColumns + j * kLanes,
              j < vectors ? load(states + int64_t(i) * of.value_dim + j * kLanes) : vfloat{});
    for (int token = 0; token < of.tokens; ++token) {
      const int64_t row = int64_t(request) * of.tokens + token;
      const float* keys = k + (row * of.key_heads + head / group) * of.key_dim;
      const float* queries = q + (row * of.key_heads + head / group) * of.key_dim;
      const float* values = v + (row * of.value_heads + head) * of.value_dim + first;
      float* result = out + (row * of.value_heads + head) * of.value_dim + first;
      const float decay = exp(broadcast(g[row * of.value_heads + head]))[0];
      const float rate = beta[row * of.value_heads + head];
      vfloat known[2][kDeltaVectors] = {};
      int i = 0;
      for (; i + 1 < of.key_dim; i += 2)
        for (int j = 0; j < kDeltaVectors; ++j) {
          known[0][j] += load(local + i * kDeltaColumns + j * kLanes) * keys[i];
          known[1][j] += load(local + (i + 1) * kDeltaColumns + j * kLanes) * keys[i + 1];
        }
      for (; i < of.key_dim; ++i)
        for (int j = 0; j < kDeltaVectors; ++j) known[0][j] += load(local + i * kDeltaColumns + j * kLanes) * keys[i];
      vfloat change[kDeltaVectors], read[kDeltaVectors] = {};
      for (int j = 0; j < kDeltaVectors; ++j) {
        const vfloat value = j < vectors ? load(values + j * kLanes) : vfloat{};
        change[j] = (value - (known[0][j] + known[1][j]) * decay) * rate;
      }
      for (i = 0; i < of.key_dim; ++i)
        for (int j = 0; j < kDeltaVectors; ++j) {
          float* at = local + i * kDeltaColumns + j * kLanes;
          const vfloat changed = load(at) * decay + change[j] * keys[i];
          store(at, changed);
          read[j] += changed * queries[i];
        }
      for (int j = 0; j < vectors; ++j) store(result + j * kLanes, read[j]);
    }
    for (int i = 0; i < of.key_dim; ++i)
      for (int j = 0; j < vectors; ++j)
        store(states + int64_t(i) * of.value_dim + j * kLanes, load(local + i * kDeltaColumns + j * kLanes));
  });
}

}  // namespace argosy
