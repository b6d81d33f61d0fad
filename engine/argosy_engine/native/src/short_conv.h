// LFM2's short convolution between its projections, over states in blocks.
#pragma once

#include "causal_conv.h"

namespace argosy {

// channels is a multiple of kLanes.
struct ShortConv {
  const float* conv;  // [kernel][channels], the newest token's factors last
  const float* bias;  // [channels]
  void* states;       // [num_states][kernel - 1][channels], the newest token last
  int32_t num_states, block_size;
  int32_t channels, kernel;
};

// Computes c * (convolution of b * x), and the states after the step. bcx [tokens][3 * channels], out [tokens][channels];
// scratch has as many elements.
template <class T>
void short_conv(const ShortConv& of, const Step& step, const T* bcx, T* out, T* scratch) {
  const int channels = of.channels;
  parallel_rows(step.num_tokens, channels, [&](int token) {
    const T* row = bcx + int64_t(token) * 3 * channels;
    for (int i = 0; i < channels; i += kLanes)
      store(scratch + int64_t(token) * channels + i, load(row + i) * load(row + 2 * channels + i));
  });
  const CausalConv<T> conv{of.conv, static_cast<T*>(of.states), scratch, channels, of.kernel, channels};
  parallel_rows(step.num_tokens, int64_t(of.kernel) * channels, [&](int token) {
    const StateRequest request = state_request(of.num_states, of.block_size, step, request_of(step, token));
    const T* gate = bcx + (int64_t(token) * 3 + 1) * channels;
    for (int i = 0; i < channels; i += kLanes)
      store(out + int64_t(token) * channels + i,
            conv.at(request, token - request.first, i, load(of.bias + i)) * load(gate + i));
  });
  parallel_rows(step.num_requests, int64_t(of.kernel) * channels, [&](int request) {
    conv.keep(state_request(of.num_states, of.block_size, step, request));
  });
}

}  // namespace argosy
