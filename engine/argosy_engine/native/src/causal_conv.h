// The short causal convolution of layers with states, one factor per channel and token, and where a step's requests keep
// the last inputs: in blocks of a pool, [kernel - 1][channels] each, the newest token last.
#pragma once

#include <algorithm>

#include "pool.h"
#include "step.h"

namespace argosy {

// The states of one request of a step.
struct StateRequest {
  int first, tokens;
  int64_t source, target;  // blocks of the states before the step (-1: it begins) and after it
};

inline StateRequest state_request([[maybe_unused]] int num_states, int block_size, const Step& step, int request) {
  const int first = step.query_starts[request], tokens = step.query_starts[request + 1] - first;
  const int after = step.seq_lens[request], before = after - tokens;
  const int32_t* table = step.block_tables + request * step.table_stride;
  const int64_t source = before > 0 ? table[(before - 1) / block_size] : -1;
  const int64_t target = table[(after - 1) / block_size];
  ARGOSY_CHECK(tokens > 0 && before >= 0 && source < num_states && target > 0 && target < num_states);
  return {first, tokens, source, target};
}

// Returns the request that a token of the step is of.
inline int request_of(const Step& step, int token) {
  return int(std::upper_bound(step.query_starts, step.query_starts + step.num_requests + 1, token) -
             step.query_starts) -
         1;
}

template <class T>
struct CausalConv {
  const float* factors;  // [kernel][channels], the newest token's last
  T* states;             // [num_states][kernel - 1][channels]
  const T* inputs;       // of the step's tokens, `stride` apart
  int64_t stride;
  int kernel, channels;

  // Returns the sums of the channels from `channel` on of a token, which is the request's `index`-th in this step.
  ARGOSY_INLINE vfloat at(const StateRequest& request, int index, int channel, vfloat sum) const {
    const int earlier = kernel - 1;
    for (int tap = 0; tap < kernel; ++tap) {
      const int place = index + tap - earlier;  // in this step's tokens of the request
      if (place < 0 && request.source < 0) continue;
      const T* input = place < 0 ? states + (request.source * earlier + earlier + place) * channels
                                 : inputs + (request.first + place) * stride;
      sum += load(input + channel) * load(factors + int64_t(tap) * channels + channel);
    }
    return sum;
  }

  // Keeps the last inputs of a request. Runs after all reads of what was kept before.
  void keep(const StateRequest& request) const {
    const int earlier = kernel - 1;
    T* target = states + request.target * earlier * channels;
    for (int i = 0; i < earlier; ++i) {  // in this order, because source and target may be one
      const int place = request.tokens - earlier + i;
      T* row = target + int64_t(i) * channels;
      if (place >= 0) {
        memcpy(row, inputs + (request.first + place) * stride, channels * sizeof(T));
      } else if (request.source >= 0) {
        const T* kept = states + (request.source * earlier + earlier + place) * channels;
        if (kept != row) memcpy(row, kept, channels * sizeof(T));
      } else {
        memset(row, 0, channels * sizeof(T));
      }
    }
  }
};

}  // namespace argosy
