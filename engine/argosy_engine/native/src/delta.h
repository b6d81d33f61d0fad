// The gated delta rule (arXiv 2412.06464), token by token: a state of each head is decayed, corrected towards the value
// that a key should give, and read by the query. A whole Gated DeltaNet, between its projections: convolution, gates, rule
// and gated norm, over states in blocks.
//
// Columns of a state do not depend on each other, so a task takes a few of them for all tokens of a request: its part
// of the state stays in the first-level cache. On a CPU this costs a few percent of the products with weights, and
// needs none of the triangular systems that make chunks of tokens one product each.
#pragma once

#include <cmath>

#include "causal_conv.h"

namespace argosy {

// Columns of a state that a task computes.
inline constexpr int kDeltaVectors = 4;
inline constexpr int kDeltaColumns = kDeltaVectors * kLanes;
// Rows of a state at most: size of keys.
inline constexpr int kDeltaMaxKeys = 512;
// Added to the squared length of queries and keys, as in transformers and flash-linear-attention.
inline constexpr float kDeltaNormEps = 1e-6f;

struct DeltaShape {
  int32_t requests, tokens, key_heads, value_heads, key_dim, value_dim;
};

// Where one head finds its queries, keys and values of a row of tokens, decays and rates, and writes what it reads.
struct DeltaHead {
  const float *q, *k, *v, *decay, *rate;
  float* out;
  int64_t qk_stride, v_stride, gate_stride, out_stride;  // between tokens
};

// Computes `vectors` vectors of columns of a head's state for `tokens` tokens. The state, [key_dim][stride], is read from
// `source` (null: zeros) and written to `target`, which may be the same; in between it is in the first-level cache.
template <int vectors>
void delta_columns(const DeltaHead& of, int tokens, int key_dim, int64_t stride, const float* source, float* target) {
  alignas(64) float local[kDeltaMaxKeys * kDeltaColumns];
  const float* from = source;
  int64_t from_stride = stride;
  if (!source) {
    for (int i = 0; i < key_dim * kDeltaColumns; i += kLanes) store(local + i, vfloat{});
    from = local, from_stride = kDeltaColumns;
  }
  for (int token = 0; token < tokens; ++token) {
    const bool is_last = token + 1 == tokens;
    float* to = is_last ? target : local;
    const int64_t to_stride = is_last ? stride : kDeltaColumns;
    const float* keys = of.k + token * of.qk_stride;
    const float* queries = of.q + token * of.qk_stride;
    const float* values = of.v + token * of.v_stride;
    float* result = of.out + token * of.out_stride;
    const float decay = of.decay[token * of.gate_stride], rate = of.rate[token * of.gate_stride];
    vfloat known[2][vectors] = {};
    int i = 0;
    for (; i + 1 < key_dim; i += 2)
      for (int j = 0; j < vectors; ++j) {
        known[0][j] += load(from + i * from_stride + j * kLanes) * keys[i];
        known[1][j] += load(from + (i + 1) * from_stride + j * kLanes) * keys[i + 1];
      }
    for (; i < key_dim; ++i)
      for (int j = 0; j < vectors; ++j) known[0][j] += load(from + i * from_stride + j * kLanes) * keys[i];
    vfloat change[vectors], read[vectors] = {};
    for (int j = 0; j < vectors; ++j)
      change[j] = (load(values + j * kLanes) - (known[0][j] + known[1][j]) * decay) * rate;
    for (i = 0; i < key_dim; ++i)
      for (int j = 0; j < vectors; ++j) {
        const vfloat changed = load(from + i * from_stride + j * kLanes) * decay + change[j] * keys[i];
        store(to + i * to_stride + j * kLanes, changed);
        read[j] += changed * queries[i];
      }
    for (int j = 0; j < vectors; ++j) store(result + j * kLanes, read[j]);
    from = local, from_stride = kDeltaColumns;
  }
}

// Computes the part of a head's state that begins at column `first`; see delta_columns.
inline void delta_part(DeltaHead of, int first, int tokens, int key_dim, int value_dim, const float* source,
                       float* target) {
  of.v += first, of.out += first, target += first;
  if (source) source += first;
  switch (std::min((value_dim - first) / kLanes, kDeltaVectors)) {
    case 1: return delta_columns<1>(of, tokens, key_dim, value_dim, source, target);
    case 2: return delta_columns<2>(of, tokens, key_dim, value_dim, source, target);
    case 3: return delta_columns<3>(of, tokens, key_dim, value_dim, source, target);
    default: return delta_columns<kDeltaVectors>(of, tokens, key_dim, value_dim, source, target);
  }
}

// Arrays are contiguous: q and k [requests, tokens, key_heads, key_dim], q scaled; v and out [requests, tokens,
// value_heads, value_dim]; decay and rate (beta) [requests, tokens, value_heads]; state [requests, value_heads,
// key_dim, value_dim], which is changed. value_dim is a multiple of kLanes, key_dim at most kDeltaMaxKeys.
inline void gated_delta_rule(const DeltaShape& of, const float* q, const float* k, const float* v, const float* decay,
                             const float* rate, float* state, float* out) {
  const int parts = (of.value_dim + kDeltaColumns - 1) / kDeltaColumns;
  const int group = of.value_heads / of.key_heads;
  const int64_t qk_stride = int64_t(of.key_heads) * of.key_dim, v_stride = int64_t(of.value_heads) * of.value_dim;
  const int64_t cost = int64_t(of.tokens + 1) * of.key_dim * kDeltaColumns;  // a state is copied in any case
  parallel_rows(of.requests * of.value_heads * parts, cost, [&](int task) {
    const int part = task % parts, head = task / parts % of.value_heads, request = task / parts / of.value_heads;
    const int64_t row = int64_t(request) * of.tokens;
    const int64_t keys_at = row * qk_stride + int64_t(head / group) * of.key_dim;
    const int64_t values_at = row * v_stride + int64_t(head) * of.value_dim;
    const int64_t gates_at = row * of.value_heads + head;
    float* states = state + (int64_t(request) * of.value_heads + head) * of.key_dim * of.value_dim;
    delta_part({q + keys_at, k + keys_at, v + values_at, decay + gates_at, rate + gates_at, out + values_at, qk_stride,
                v_stride, of.value_heads, v_stride},
               part * kDeltaColumns, of.tokens, of.key_dim, of.value_dim, states, states);
  });
}

// A Gated DeltaNet layer. Channels are those of q, k and v, one after the other. key_dim and value_dim are multiples of
// kLanes, key_dim at most kDeltaMaxKeys.
struct DeltaNet {
  const float* conv;      // [kernel][channels], the newest token's factors last
  const float* rates;     // [value_heads] exp(A_log)
  const float* dt_bias;   // [value_heads]
  const float* norm;      // [value_dim]
  void* conv_states;      // [num_states][kernel - 1][channels], the newest token last
  float* states;          // [num_states][value_heads][key_dim][value_dim]
  int32_t num_states, block_size;
  int32_t key_heads, value_heads, key_dim, value_dim, kernel;
  float eps;

  int channels() const { return 2 * key_heads * key_dim + value_heads * value_dim; }
};

inline void delta_normalise(float* head, int size, float factor) {
  vfloat squares = vfloat{};
  for (int i = 0; i < size; i += kLanes) squares += load(head + i) * load(head + i);
  const float scale = factor / __builtin_sqrtf(reduce_sum(squares) + kDeltaNormEps);
  for (int i = 0; i < size; i += kLanes) store(head + i, load(head + i) * scale);
}

// Writes q, k and v of all tokens, [tokens][channels]: convolved over the tokens before them, silu, q and k of length 1, q
// scaled; and the decay and rate of each head.
template <class T>
void delta_inputs(const DeltaNet& of, const Step& step, const CausalConv<T>& conv, const T* ba, float* qkv, float* decay,
                  float* rate) {
  const int channels = of.channels(), heads = of.value_heads;
  const float factor = 1.0f / __builtin_sqrtf(float(of.key_dim));
  parallel_rows(step.num_tokens, int64_t(of.kernel + 4) * channels, [&](int token) {
    const StateRequest request = state_request(of.num_states, of.block_size, step, request_of(step, token));
    const int index = token - request.first;
    float* row = qkv + int64_t(token) * channels;
    for (int i = 0; i < channels; i += kLanes) store(row + i, silu(conv.at(request, index, i, vfloat{})));
    for (int head = 0; head < of.key_heads; ++head) {
      delta_normalise(row + head * of.key_dim, of.key_dim, factor);
      delta_normalise(row + (of.key_heads + head) * of.key_dim, of.key_dim, 1.0f);
    }
    const T* gates = ba + int64_t(token) * 2 * heads;
    for (int head = 0; head < heads; ++head) {
      const float step_size = to_float(gates[heads + head]) + of.dt_bias[head];
      const float softplus = step_size > 20.0f ? step_size : std::log1p(std::exp(step_size));
      decay[int64_t(token) * heads + head] = std::exp(-of.rates[head] * softplus);
      rate[int64_t(token) * heads + head] = 1.0f / (1.0f + std::exp(-to_float(gates[head])));
    }
  });
}

// out = rms_norm(read) * norm * silu(z), for each token and head.
template <class T>
void delta_gated_norm(const DeltaNet& of, int tokens, const float* read, const T* qkvz, T* out) {
  const int width = of.value_heads * of.value_dim;
  const int64_t stride = of.channels() + width;
  parallel_rows(tokens, 4 * width, [&](int token) {
    for (int head = 0; head < of.value_heads; ++head) {
      const float* from = read + int64_t(token) * width + head * of.value_dim;
      const T* gate = qkvz + token * stride + of.channels() + head * of.value_dim;
      T* to = out + int64_t(token) * width + head * of.value_dim;
      vfloat squares = vfloat{};
      for (int i = 0; i < of.value_dim; i += kLanes) squares += load(from + i) * load(from + i);
      const float scale = 1.0f / __builtin_sqrtf(reduce_sum(squares) / float(of.value_dim) + of.eps);
      for (int i = 0; i < of.value_dim; i += kLanes)
        store(to + i, load(from + i) * scale * load(of.norm + i) * silu(load(gate + i)));
    }
  });
}

// Elements of scratch memory that gated_delta_net needs for a token.
inline int64_t delta_scratch(const DeltaNet& of) {
  return of.channels() + int64_t(of.value_heads) * (of.value_dim + 2);
}

// Computes a layer between its projections, and its states after the step. qkvz [tokens][channels + value_heads *
// value_dim], ba [tokens][2 * value_heads], out [tokens][value_heads * value_dim].
template <class T>
void gated_delta_net(const DeltaNet& of, const Step& step, const T* qkvz, const T* ba, T* out, float* scratch) {
  const int channels = of.channels(), heads = of.value_heads, tokens = step.num_tokens;
  const int64_t width = int64_t(heads) * of.value_dim;
  float* qkv = scratch;
  float* decay = qkv + int64_t(tokens) * channels;
  float* rate = decay + int64_t(tokens) * heads;
  float* read = rate + int64_t(tokens) * heads;
  const CausalConv<T> conv{of.conv, static_cast<T*>(of.conv_states), qkvz, channels + width, of.kernel, channels};
  delta_inputs(of, step, conv, ba, qkv, decay, rate);
  parallel_rows(step.num_requests, int64_t(of.kernel) * channels, [&](int request) {
    conv.keep(state_request(of.num_states, of.block_size, step, request));
  });
  const int parts = (of.value_dim + kDeltaColumns - 1) / kDeltaColumns;
  const int group = heads / of.key_heads;
  const int64_t state_size = int64_t(of.key_dim) * of.value_dim;
  const int64_t cost = (1 + tokens / std::max(step.num_requests, 1)) * int64_t(of.key_dim) * kDeltaColumns;
  parallel_rows(step.num_requests * heads * parts, cost, [&](int task) {
    const int part = task % parts, head = task / parts % heads;
    const StateRequest request = state_request(of.num_states, of.block_size, step, task / parts / heads);
    const float* row = qkv + int64_t(request.first) * channels;
    const int key_at = head / group * of.key_dim, value_at = head * of.value_dim;
    const int64_t gates_at = int64_t(request.first) * heads + head;
    const float* source =
        request.source < 0 ? nullptr : of.states + (request.source * heads + head) * state_size;
    delta_part({row + key_at, row + of.key_heads * of.key_dim + key_at, row + 2 * of.key_heads * of.key_dim + value_at,
                decay + gates_at, rate + gates_at, read + request.first * width + value_at, channels, channels, heads,
                width},
               part * kDeltaColumns, request.tokens, of.key_dim, of.value_dim, source,
               of.states + (request.target * heads + head) * state_size);
  });
  delta_gated_norm(of, tokens, read, qkvz, out);
}

}  // namespace argosy
