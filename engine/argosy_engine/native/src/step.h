// Structures that Python passes in: one Layer per layer and one Step per step. Mirrored field by field in library.py.
#pragma once

#include <cstdio>
#include <cstdlib>

#include "simd.h"

namespace argosy {

// Debug builds check every index that comes from outside. A failed check prints its location and aborts the process.
#if defined(ARGOSY_DEBUG)
#define ARGOSY_CHECK(condition)                                                              \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);     \
      std::abort();                                                                          \
    }                                                                                        \
  } while (0)
#else
#define ARGOSY_CHECK(condition) ((void)0)
#endif

inline constexpr int kMaxHeadDim = 256;

// A block holds, per KV head, a slab of keys and a slab of values, each in the layout of a Tile's B operand:
//   keys    [block_size / kLanes][head_dim in units][kLanes]   lanes are keys, k runs over the head's dimensions
//   values  [block_size in units][head_dim]                    lanes are dimensions, k runs over keys
struct Layer {
  void* k_cache;  // [num_blocks][num_kv_heads] slabs of block_size * head_dim elements
  void* v_cache;
  const void* q_norm;  // [head_dim], null without qk-norm
  const void* k_norm;
  const float* cosines;  // [positions][rotary_dim / 2]
  const float* sines;
  const float* sinks;  // [num_heads] a score per head that has no key, null without
  const float* alibi_slopes;  // [num_heads] what scores fall by per position between query and key, null without
  int32_t num_blocks, block_size;
  int32_t num_heads, num_kv_heads, head_dim, rotary_dim;
  int32_t window;  // 0: attend to every key; else to the last `window` keys, the query's own included
  int32_t chunk;   // 0: none; else attend to the keys of the query's chunk of so many positions
  float scale, softcap, eps;
};

struct Step {
  const int64_t* positions;     // [num_tokens]
  const int64_t* slots;         // [num_tokens] block * block_size + offset
  const int32_t* query_starts;  // [num_requests + 1]
  const int32_t* seq_lens;      // [num_requests], this step's tokens included
  const int32_t* block_tables;  // [num_requests][table_stride]
  const int32_t* key_ends;      // [num_tokens] position after the last key that each attends to; null: its own is last
  int64_t table_stride;
  int32_t num_tokens, num_requests;
};

}  // namespace argosy
