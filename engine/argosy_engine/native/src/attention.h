// Paged causal attention with grouped heads: prompts, prompt chunks and decodes in one pass.
//
// The query heads of a group are rows of one tile, so that keys and values are read once for all of them. Keys are
// processed in tiles of kTileKeys counted from position 0 (online softmax, arXiv 2205.14135): a query sees the same
// tiles in the same order in any batch and however its prompt is split into chunks.
#pragma once

#include <vector>

#include "linear.h"
#include "step.h"

namespace argosy {

inline constexpr int kTileKeys = 128;
inline constexpr int kTileRows = 48;
static_assert(kTileRows % kMaxRows == 0 && kTileKeys % (2 * kLanes) == 0);
#if defined(ARGOSY_TILES)
static_assert(kTileRows <= amx::kColumnRows && kTileKeys % (2 * amx::kUnits) == 0);
#endif

template <class T>
class AttentionJob {
 public:
  // q: [num_tokens] rows of q_stride elements that begin with the q heads; out: [num_tokens][num_heads][head_dim].
  AttentionJob(const Layer& layer, const Step& step, const T* q, int64_t q_stride, T* out)
      : layer_(layer),
        step_(step),
        q_(q),
        q_stride_(q_stride),
        out_(out),
        group_(layer.num_heads / layer.num_kv_heads),
        tile_tokens_(std::max(kTileRows / group_, 1)) {}

  void run() {
    static thread_local std::vector<QueryTile> tiles;
    tiles.clear();
    for (int request = 0; request < step_.num_requests; ++request) {
      const int tokens = step_.query_starts[request + 1] - step_.query_starts[request];
      for (int first = 0; first < tokens; first += tile_tokens_)
        tiles.push_back({request, first, std::min(tile_tokens_, tokens - first)});
    }
    const int heads = layer_.num_kv_heads;
    const QueryTile* begin = tiles.data();
    // The pool starts with the last task, so that the long tasks of prompts come first and the short ones of decodes
    // balance the threads at the end.
    Pool::instance().run(int(tiles.size()) * heads,
                         [&](int task) { Attend(*this, begin[task / heads], task % heads).run(); });
  }

 private:
  struct QueryTile {
    int request, first_token, tokens;
  };

  // Attention of one tile of queries (tokens x heads of a group) over its keys.
  struct Attend {
    const AttentionJob& job;
    const Layer& layer;
    const int kv_head, group, dim, rows;
    const int first_row;       // the tile's first token in the step's flattened batch
    const int first_position;  // the tile's first token in its sequence
    const int32_t* table;
    alignas(64) T query[kTileRows * kMaxHeadDim];
    alignas(64) float score[kTileRows * kTileKeys];
    alignas(64) T prob[kTileRows * kTileKeys];
    alignas(64) float result[kTileRows * kMaxHeadDim];
    float best[kTileRows], mass[kTileRows];
    // The values of a tile of keys, one run per block: their address, and their units in a row of prob.
    struct ValueRun {
      const Unit* values;
      int first, units;
    } runs[kTileKeys / kLanes + 1];
    int num_runs = 0;

    Attend(const AttentionJob& job, QueryTile tile, int kv_head)
        : job(job),
          layer(job.layer_),
          kv_head(kv_head),
          group(job.group_),
          dim(layer.head_dim),
          rows(tile.tokens * group),
          first_row(job.step_.query_starts[tile.request] + tile.first_token),
          first_position(job.step_.seq_lens[tile.request] - job.step_.query_starts[tile.request + 1] + first_row),
          table(job.step_.block_tables + tile.request * job.step_.table_stride) {
      ARGOSY_CHECK(first_position >= 0 && rows <= kTileRows && dim <= kMaxHeadDim);
      ARGOSY_CHECK(ceil_div(last_end(), layer.block_size) <= job.step_.table_stride);
    }

    // Keys [begin, end) that a row attends to: those before its own and, where the step says so, some after it.
    int own_end(int row) const { return first_position + row / group + 1; }
    int end_of(int row) const {
      return job.step_.key_ends ? job.step_.key_ends[first_row + row / group] : own_end(row);
    }
    int last_end() const {
      int end = end_of(rows - 1);
      if (job.step_.key_ends)
        for (int row = 0; row < rows; row += group) end = std::max(end, end_of(row));
      return end;
    }
    int begin_of(int row) const {
      const int end = own_end(row), in_window = layer.window ? std::max(end - layer.window, 0) : 0;
      return layer.chunk ? std::max(in_window, (end - 1) / layer.chunk * layer.chunk) : in_window;
    }

    const T* query_at(int row) const {
      return job.q_ + (first_row + row / group) * job.q_stride_ + (kv_head * group + row % group) * int64_t(dim);
    }

    const Unit* slab(const void* cache, int key) const {
      const int64_t block = table[key / layer.block_size];
      ARGOSY_CHECK(block >= 0 && block < layer.num_blocks);
      const int64_t index = block * layer.num_kv_heads + kv_head;
      return static_cast<const Unit*>(cache) + index * (layer.block_size * dim / kPerUnit<T>);
    }

    void run() {
#if defined(ARGOSY_TILES)
      // Whether heads fit decides it, not the number of rows, so that a row's sums are always rounded alike.
      if constexpr (sizeof(T) == 2) {
        if (dim / kPerUnit<T> % amx::kUnits == 0) {
          amx::ARGOSY_TILES::configure(amx::column_shapes(rows));
          attend(true);
          return amx::ARGOSY_TILES::release();
        }
      }
#endif
      attend(false);
    }

    ARGOSY_INLINE void attend([[maybe_unused]] bool has_tiles) {
      for (int r = 0; r < rows; ++r) {
        memcpy(query + r * dim, query_at(r), dim * sizeof(T));
        best[r] = layer.sinks ? layer.sinks[kv_head * group + r % group] : -1e30f;
        mass[r] = layer.sinks ? 1.0f : 0.0f;
      }
      memset(result, 0, sizeof(float) * rows * dim);
      const int end = last_end();
      for (int first = begin_of(0) / kTileKeys * kTileKeys; first < end; first += kTileKeys) {
        const int keys = std::min(kTileKeys, end - first);
        const int vectors = int(ceil_div(keys, kLanes));
#if defined(ARGOSY_TILES)
        if constexpr (sizeof(T) == 2) {
          if (has_tiles) {
            multiply_keys_by_tiles(first, vectors);
            for (int r = 0; r < rows; ++r) soften(r, first, vectors);
            find_values(first, keys);
            add_values_by_tiles(vectors);
            continue;
          }
        }
#endif
        multiply_keys(first, vectors);
        for (int r = 0; r < rows; ++r) soften(r, first, vectors);
        find_values(first, keys);
        int d = 0;
        if (rows <= 2)
          for (; d + 4 * kLanes <= dim; d += 4 * kLanes) add_values<4>(d);
        for (; d + 2 * kLanes <= dim; d += 2 * kLanes) add_values<2>(d);
        if (d < dim) add_values<1>(d);
      }
      for (int r = 0; r < rows; ++r) {
        const float norm = 1.0f / mass[r];
        T* to = job.out_ + (first_row + r / group) * int64_t(layer.num_heads) * dim +
                (kv_head * group + r % group) * int64_t(dim);
        for (int d = 0; d < dim; d += kLanes) store(to + d, load(result + r * dim + d) * norm);
      }
    }

    void multiply_keys(int first, int vectors) {
      int v = 0;
      if (rows <= 2)
        for (; v + 3 < vectors; v += 4) multiply_key_vectors<4>(first + v * kLanes, v);
      for (; v + 1 < vectors; v += 2) multiply_key_vectors<2>(first + v * kLanes, v);
      if (v < vectors) multiply_key_vectors<1>(first + v * kLanes, v);
    }

    template <int Vectors>
    void multiply_key_vectors(int key, int vector) {
      const Unit* keys[Vectors];
      const int units = dim / kPerUnit<T>;
      for (int v = 0; v < Vectors; ++v) {
        const int at = key + v * kLanes;
        keys[v] = slab(layer.k_cache, at) + (at % layer.block_size) * units;
      }
      each_row_group<Vectors>([&](auto row_count, int r0) {
        constexpr int Rows = decltype(row_count)::value;
        Tile<T, Rows, Vectors> tile;
        tile.accumulate(reinterpret_cast<const Unit*>(query + r0 * dim), units, keys, kLanes, units);
        for (int r = 0; r < Rows; ++r)
          for (int v = 0; v < Vectors; ++v)
            store(score + (r0 + r) * kTileKeys + (vector + v) * kLanes, tile.sum[r][v] * layer.scale);
      });
    }

#if defined(ARGOSY_TILES)
    // See amx::column_product.
    ARGOSY_INLINE void by_tiles(const void* a, int a_stride, const Unit* b, int b_stride, int steps, float* c, int c_stride) {
      const Unit* units = static_cast<const Unit*>(a);
      using Tiles = amx::ARGOSY_TILES;
      if (rows > 2 * amx::kRows) return amx::column_product<Tiles, 3>(units, a_stride, b, b_stride, steps, c, c_stride);
      if (rows > amx::kRows) return amx::column_product<Tiles, 2>(units, a_stride, b, b_stride, steps, c, c_stride);
      amx::column_product<Tiles, 1>(units, a_stride, b, b_stride, steps, c, c_stride);
    }

    void multiply_keys_by_tiles(int first, int vectors) {
      const int units = dim / kPerUnit<T>;
      for (int v = 0; v < vectors; ++v) {
        const int at = first + v * kLanes;
        const Unit* keys = slab(layer.k_cache, at) + (at % layer.block_size) * units;
        by_tiles(query, units, keys, kLanes, units / amx::kUnits, score + v * kLanes, kTileKeys);
        for (int r = 0; r < rows; ++r) {
          float* to = score + r * kTileKeys + v * kLanes;
          store(to, load(to) * layer.scale);
        }
      }
    }

    // Copies the values, of blocks that may be smaller than a tile, with zeros where there are none.
    void add_values_by_tiles(int vectors) {
      constexpr int kUnits = kTileKeys / kPerUnit<T>;
      alignas(64) Unit values[kUnits * kMaxHeadDim];
      alignas(64) float sums[kTileRows * kLanes];
      const int steps = int(ceil_div(vectors * kLanes, kPerUnit<T> * amx::kUnits));
      int filled = 0;
      const auto clear_to = [&](int unit) {
        if (unit > filled) memset(values + filled * dim, 0, sizeof(Unit) * (unit - filled) * dim);
      };
      for (const ValueRun *run = runs, *end = runs + num_runs; run < end; ++run) {
        clear_to(run->first);
        memcpy(values + run->first * dim, run->values, sizeof(Unit) * run->units * dim);
        filled = run->first + run->units;
      }
      clear_to(steps * amx::kUnits);
      for (int r = 0; r < rows; ++r)
        for (int key = vectors * kLanes; key < steps * amx::kUnits * kPerUnit<T>; key += kLanes)
          store(prob + r * kTileKeys + key, vfloat{});
      for (int d = 0; d < dim; d += kLanes) {
        by_tiles(prob, kUnits, values + d, dim, steps, sums, kLanes);
        for (int r = 0; r < rows; ++r) store(result + r * dim + d, load(result + r * dim + d) + load(sums + r * kLanes));
      }
    }
#endif

    // Turns a row's scores into unnormalised probabilities, and rescales the row's result and mass to the new maximum.
    void soften(int r, int first, int vectors) {
      float* scores = score + r * kTileKeys;
      if (layer.softcap > 0.0f) {
        for (int v = 0; v < vectors; ++v)
          store(scores + v * kLanes, tanh(load(scores + v * kLanes) * (1.0f / layer.softcap)) * layer.softcap);
      }
      const int begin = begin_of(r), end = end_of(r);
      if (layer.alibi_slopes) {
        const vfloat slope = broadcast(layer.alibi_slopes[kv_head * group + r % group]);
        for (int v = 0; v < vectors; ++v) {
          const vint distance = lane_index() + (first + v * kLanes - (own_end(r) - 1));
          store(scores + v * kLanes, load(scores + v * kLanes) + slope * __builtin_convertvector(distance, vfloat));
        }
      }
      if (begin > first || end < first + vectors * kLanes) {
        for (int v = 0; v < vectors; ++v) {
          const vint key = lane_index() + (first + v * kLanes);
          const vint is_seen = (key >= begin) & (key < end);
          store(scores + v * kLanes, is_seen ? load(scores + v * kLanes) : broadcast(-__builtin_inff()));
        }
      }
      vfloat highest = load(scores);
      for (int v = 1; v < vectors; ++v) highest = max(highest, load(scores + v * kLanes));
      const float new_best = std::max(best[r], reduce_max(highest));
      vfloat total = vfloat{};
      for (int v = 0; v < vectors; ++v) {
        const vfloat p = exp(load(scores + v * kLanes) - new_best);
        total += p;
        store(prob + r * kTileKeys + v * kLanes, p);
      }
      if (new_best != best[r]) {
        const float shrink = exp(broadcast(best[r] - new_best))[0];
        mass[r] *= shrink;
        for (int d = 0; d < dim; d += kLanes) store(result + r * dim + d, load(result + r * dim + d) * shrink);
        best[r] = new_best;
      }
      mass[r] += reduce_sum(total);
    }

    // Collects the runs of values, from the first key that any row attends to. Earlier keys are outside of all rows'
    // windows, in blocks that may belong to other requests by now, and a probability of zero times NaN is NaN.
    void find_values(int first, int keys) {
      num_runs = 0;
      const int end = first + keys, begin = begin_of(0) / kPerUnit<T> * kPerUnit<T>;
      for (int key = std::max(first, begin); key < end;) {
        const int inside = key % layer.block_size;
        const int count = std::min(layer.block_size - inside, end - key);
        runs[num_runs++] = {slab(layer.v_cache, key) + inside / kPerUnit<T> * dim, (key - first) / kPerUnit<T>,
                            int(ceil_div(count, kPerUnit<T>))};
        key += count;
      }
    }

    template <int Vectors>
    void add_values(int d) {
      each_row_group<Vectors>([&](auto row_count, int r0) {
        constexpr int Rows = decltype(row_count)::value;
        Tile<T, Rows, Vectors> tile;
        const Unit* probs = reinterpret_cast<const Unit*>(prob + r0 * kTileKeys);
        for (const ValueRun *run = runs, *end = runs + num_runs; run < end; ++run) {
          const Unit* columns[Vectors];
          for (int v = 0; v < Vectors; ++v) columns[v] = run->values + d + v * kLanes;
          tile.accumulate(probs + run->first, kTileKeys / kPerUnit<T>, columns, dim, run->units);
        }
        for (int r = 0; r < Rows; ++r)
          for (int v = 0; v < Vectors; ++v) {
            float* to = result + (r0 + r) * dim + d + v * kLanes;
            store(to, load(to) + tile.sum[r][v]);
          }
      });
    }

    // Uses fewer kernels than there are row counts: a group may include rows beyond the last one, whose results are not
    // read. Four vectors at a time are for one or two rows, which otherwise have too few independent sums in flight.
    template <int Vectors, class F>
    ARGOSY_INLINE void each_row_group(F&& f) {
      int r0 = 0;
      if constexpr (Vectors < 4) {
        for (; r0 + kMaxRows / 2 < rows; r0 += kMaxRows) f(std::integral_constant<int, kMaxRows>{}, r0);
        if (r0 >= rows) return;
        if (rows - r0 > 2) return f(std::integral_constant<int, kMaxRows / 2>{}, r0);
      }
      if (rows - r0 == 2) {
        f(std::integral_constant<int, 2>{}, r0);
      } else {
        f(std::integral_constant<int, 1>{}, r0);
      }
    }
  };

  const Layer& layer_;
  const Step& step_;
  const T* q_;
  int64_t q_stride_;
  T* out_;
  int group_, tile_tokens_;
};

}  // namespace argosy
