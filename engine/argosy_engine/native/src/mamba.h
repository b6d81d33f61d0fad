// A Mamba-2 layer (arXiv 2405.21060) between its projections, over states in blocks: convolution, step sizes, selective
// state space token by token, skip, gate and norm.
//
// Columns of a head's state, one for each of the head's elements, do not depend on each other. A task takes some of them
// for all tokens of a request. It reads a row of the state once for a few tokens, which stay in registers. Every
// element takes the same operations in the same order however tokens are grouped, so results do not depend on how steps
// are cut.
#pragma once

#include "causal_conv.h"

namespace argosy {

// Columns of a state that a task computes, and those and the tokens that are in registers at a time.
inline constexpr int kMambaVectors = 4;
inline constexpr int kMambaBlockVectors = 2;
inline constexpr int kMambaBlockTokens = kLanes == 16 ? 4 : 2;
// Channels that a task convolves.
inline constexpr int kMambaChannels = 1024;

// Channels are those of x, B and C, one after the other. head_dim and state_size are multiples of kLanes.
struct Mamba {
  const float* conv;       // [kernel][channels], the newest token's factors last
  const float* conv_bias;  // [channels]
  const float* rates;      // [heads] exp(A_log)
  const float* dt_bias;    // [heads]
  const float* skip;       // [heads] D
  const float* norm;       // [heads * head_dim]
  void* conv_states;       // [num_states][kernel - 1][channels], the newest token last
  float* states;           // [num_states][heads][state_size][head_dim]
  int32_t num_states, block_size;
  int32_t heads, head_dim, groups, state_size, kernel;
  int32_t norm_order;  // 0: there is no norm; 1: after the gate; 2: before it
  int32_t norm_ranks;  // that share each group
  float eps;

  int values() const { return heads * head_dim; }
  int channels() const { return values() + 2 * groups * state_size; }
  int64_t inputs() const { return int64_t(values()) + channels() + heads; }
};

// Where one head finds x, B, C, step sizes and decays of a row of tokens, and writes its output.
struct MambaHead {
  const float *x, *b, *c, *size, *decay;
  float* out;
  int64_t stride, gate_stride, out_stride;  // between tokens
  float skip;
};

// Computes `vectors` vectors of columns of a head's state for `tokens` tokens. The state, [rows][row_size], is read from
// `source` (null: zeros) and written to `target`, which may be the same.
template <int vectors, int tokens>
ARGOSY_INLINE void mamba_block(const MambaHead& of, int rows, int64_t row_size, const float* source, float* target) {
  vfloat added[tokens][vectors], read[tokens][vectors] = {}, decay[tokens];
  for (int t = 0; t < tokens; ++t) {
    decay[t] = broadcast(of.decay[t * of.gate_stride]);
    for (int j = 0; j < vectors; ++j)
      added[t][j] = load(of.x + t * of.stride + j * kLanes) * of.size[t * of.gate_stride];
  }
  for (int row = 0; row < rows; ++row) {
    vfloat state[vectors];
    for (int j = 0; j < vectors; ++j) state[j] = source ? load(source + row * row_size + j * kLanes) : vfloat{};
    for (int t = 0; t < tokens; ++t) {
      const vfloat b = broadcast(of.b[t * of.stride + row]), c = broadcast(of.c[t * of.stride + row]);
      for (int j = 0; j < vectors; ++j) {
        state[j] = fma(state[j], decay[t], added[t][j] * b);
        read[t][j] = fma(state[j], c, read[t][j]);
      }
    }
    for (int j = 0; j < vectors; ++j) store(target + row * row_size + j * kLanes, state[j]);
  }
  const vfloat skip = broadcast(of.skip);
  for (int t = 0; t < tokens; ++t)
    for (int j = 0; j < vectors; ++j)
      store(of.out + t * of.out_stride + j * kLanes, fma(load(of.x + t * of.stride + j * kLanes), skip, read[t][j]));
}

// Computes `vectors` vectors of columns for any number of tokens, a few at a time.
template <int vectors>
void mamba_columns(MambaHead of, int tokens, int rows, int64_t row_size, const float* source, float* target) {
  const auto advance = [&](int count) {
    of.x += count * of.stride, of.b += count * of.stride, of.c += count * of.stride;
    of.size += count * of.gate_stride, of.decay += count * of.gate_stride, of.out += count * of.out_stride;
    source = target;
  };
  int token = 0;
  for (; token + kMambaBlockTokens <= tokens; token += kMambaBlockTokens) {
    mamba_block<vectors, kMambaBlockTokens>(of, rows, row_size, source, target);
    advance(kMambaBlockTokens);
  }
  for (; token < tokens; ++token) {
    mamba_block<vectors, 1>(of, rows, row_size, source, target);
    advance(1);
  }
}

// Computes `vectors` vectors of columns from `column` on, for all tokens of a request.
template <int vectors>
void mamba_columns_from(MambaHead of, int column, int tokens, int rows, int64_t row_size, const float* source,
                        float* target) {
  of.x += column, of.out += column, target += column;
  if (source) source += column;
  if (tokens == 1)
    mamba_block<vectors, 1>(of, rows, row_size, source, target);
  else
    mamba_columns<vectors>(of, tokens, rows, row_size, source, target);
}

// Computes the part of a head's state that begins at column `first`.
inline void mamba_part(const MambaHead& of, int first, int tokens, int rows, int64_t row_size, const float* source,
                       float* target) {
  int left = int(std::min<int64_t>((row_size - first) / kLanes, kMambaVectors)), column = first;
  if (tokens == 1 && left == kMambaVectors)
    return mamba_columns_from<kMambaVectors>(of, column, tokens, rows, row_size, source, target);
  for (; left >= kMambaBlockVectors; left -= kMambaBlockVectors, column += kMambaBlockVectors * kLanes)
    mamba_columns_from<kMambaBlockVectors>(of, column, tokens, rows, row_size, source, target);
  if (left) mamba_columns_from<1>(of, column, tokens, rows, row_size, source, target);
}

// Writes x, B and C of all tokens, [tokens][channels], convolved over the tokens before them and through silu, and the step
// size and decay of each head.
template <class T>
void mamba_inputs(const Mamba& of, const Step& step, const CausalConv<T>& conv, const T* zxbcdt, float* xbc, float* size,
                  float* decay) {
  const int channels = of.channels(), heads = of.heads;
  const int parts = (channels + kMambaChannels - 1) / kMambaChannels;
  parallel_rows(step.num_tokens * parts, int64_t(of.kernel + 4) * std::min(channels, kMambaChannels), [&](int task) {
    const int token = task / parts, part = task % parts;
    const StateRequest request = state_request(of.num_states, of.block_size, step, request_of(step, token));
    const int index = token - request.first;
    float* row = xbc + int64_t(token) * channels;
    const int end = std::min(channels, (part + 1) * kMambaChannels);
    for (int i = part * kMambaChannels; i < end; i += kLanes)
      store(row + i, silu(conv.at(request, index, i, load(of.conv_bias + i))));
    if (part) return;
    const T* steps = zxbcdt + token * of.inputs() + of.values() + channels;
    for (int head = 0; head < heads; head += kLanes) {
      const int count = std::min(heads - head, kLanes);
      const vfloat sizes = softplus(load_first(steps + head, count) + load_first(of.dt_bias + head, count));
      store_first(size + int64_t(token) * heads + head, sizes, count);
      store_first(decay + int64_t(token) * heads + head,
                  exp(vfloat{} - sizes * load_first(of.rates + head, count)), count);
    }
  });
}

// Sum of squares of `width` elements of which the norm is.
template <class T>
ARGOSY_INLINE float mamba_norm_squares(const Mamba& of, int width, const float* y, const T* gate) {
  vfloat squares = vfloat{};
  for (int i = 0; i < width; i += kLanes) {
    const vfloat value = of.norm_order == 1 ? load(y + i) * silu(load(gate + i)) : load(y + i);
    squares += value * value;
  }
  return reduce_sum(squares);
}

// What this rank adds to each token's mean square of the one group that it shares with others.
template <class T>
void mamba_squares(const Mamba& of, int tokens, const float* y, const T* zxbcdt, float* squares) {
  const int values = of.values();
  parallel_rows(tokens, 4 * values, [&](int token) {
    const float sum = mamba_norm_squares(of, values, y + int64_t(token) * values, zxbcdt + token * of.inputs());
    squares[token] = sum / (float(values) * float(of.norm_ranks));
  });
}

// out = y through gate and norm, for each token and group. Null `means`: no other rank has a part of a group.
template <class T>
void mamba_gated_norm(const Mamba& of, int tokens, const float* y, const T* zxbcdt, const float* means, T* out) {
  const int values = of.values(), width = values / of.groups;
  parallel_rows(tokens * of.groups, 6 * width, [&](int task) {
    const int token = task / of.groups, first = task % of.groups * width;
    const float* from = y + int64_t(token) * values + first;
    const T* gate = zxbcdt + token * of.inputs() + first;
    T* to = out + int64_t(token) * values + first;
    float scale = 1.0f;
    if (of.norm_order) {
      const float mean = means ? means[token] : mamba_norm_squares(of, width, from, gate) / float(width);
      scale = 1.0f / __builtin_sqrtf(mean + of.eps);
    }
    for (int i = 0; i < width; i += kLanes) {
      vfloat value = load(from + i) * silu(load(gate + i));
      if (of.norm_order) value *= load(of.norm + first + i) * scale;
      store(to + i, value);
    }
  });
}

// Elements of scratch memory that mamba needs for a token.
inline int64_t mamba_scratch(const Mamba& of) { return of.channels() + int64_t(of.values()) + 2 * of.heads; }

// Computes what heads read from their states, y [tokens][values], and the states after the step. zxbcdt [tokens][inputs].
template <class T>
void mamba_read(const Mamba& of, const Step& step, const T* zxbcdt, float* y, float* scratch) {
  const int channels = of.channels(), heads = of.heads, tokens = step.num_tokens;
  float* xbc = scratch;
  float* size = xbc + int64_t(tokens) * channels;
  float* decay = size + int64_t(tokens) * heads;
  const CausalConv<T> conv{of.conv, static_cast<T*>(of.conv_states), zxbcdt + of.values(), of.inputs(), of.kernel,
                           channels};
  mamba_inputs(of, step, conv, zxbcdt, xbc, size, decay);
  parallel_rows(step.num_requests, int64_t(of.kernel) * channels, [&](int request) {
    conv.keep(state_request(of.num_states, of.block_size, step, request));
  });
  const int columns = kMambaVectors * kLanes, parts = (of.head_dim + columns - 1) / columns;
  const int64_t state_size = int64_t(of.state_size) * of.head_dim;
  const int64_t cost = (1 + tokens / std::max(step.num_requests, 1)) * int64_t(of.state_size) * columns;
  parallel_rows(step.num_requests * heads * parts, cost, [&](int task) {
    const int part = task % parts, head = task / parts % heads;
    const StateRequest request = state_request(of.num_states, of.block_size, step, task / parts / heads);
    const float* row = xbc + int64_t(request.first) * channels;
    const float* b = row + of.values() + head / (heads / of.groups) * of.state_size;
    const int64_t gates_at = int64_t(request.first) * heads + head;
    const float* source = request.source < 0 ? nullptr : of.states + (request.source * heads + head) * state_size;
    mamba_part({row + head * of.head_dim, b, b + of.groups * of.state_size, size + gates_at, decay + gates_at,
                y + int64_t(request.first) * of.values() + head * of.head_dim, channels, heads, of.values(),
                of.skip[head]},
               part * columns, request.tokens, of.state_size, of.head_dim, source,
               of.states + (request.target * heads + head) * state_size);
  });
}

// Computes a layer between its projections, out [tokens][values], and its states after the step.
template <class T>
void mamba(const Mamba& of, const Step& step, const T* zxbcdt, T* out, float* scratch) {
  float* y = scratch + step.num_tokens * (mamba_scratch(of) - of.values());
  mamba_read(of, step, zxbcdt, y, scratch);
  mamba_gated_norm(of, step.num_tokens, y, zxbcdt, nullptr, out);
}

}  // namespace argosy
