// y = x W^T + b, with W packed into panels of kPanel outputs: [panel][k][output], where k counts units.
#pragma once

#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "pool.h"
#include "tile.h"

namespace argosy {

inline constexpr int kPanel = 2 * kLanes;

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Calls f with the number of rows as a compile-time constant, so that every number up to kMaxRows has its own kernel.
template <int Rows = kMaxRows, class F>
ARGOSY_INLINE void with_rows(int rows, F&& f) {
  if constexpr (Rows > 1) {
    if (rows < Rows) return with_rows<Rows - 1>(rows, f);
  }
  f(std::integral_constant<int, Rows>{});
}

// Returns the output of a panel's lane; there is none from `out` on. If gated, the first half of the outputs are gates
// and the second half ups, and a panel is a vector of gates and the vector of their ups.
inline int64_t row_of(int panel, int lane, int out, bool is_gated) {
  if (!is_gated) return int64_t(panel) * kPanel + lane;
  return int64_t(panel) * kLanes + lane % kLanes + lane / kLanes * (out / 2);
}

// Packs a weight, row-major [out, units], into ceil(out / kPanel) panels, the last of them padded with zeros.
inline void pack_linear(const Unit* weight, Unit* packed, int out, int units, bool is_gated) {
  Pool::instance().run(int(ceil_div(out, kPanel)), [&](int panel) {
    Unit* to = packed + int64_t(panel) * units * kPanel;
    for (int k0 = 0; k0 < units; k0 += 16) {
      const int k1 = std::min(k0 + 16, units);
      for (int lane = 0; lane < kPanel; ++lane) {
        const int64_t row = row_of(panel, lane, out, is_gated);
        for (int k = k0; k < k1; ++k) to[int64_t(k) * kPanel + lane] = row < out ? weight[row * units + k] : 0;
      }
    }
  });
}

// A packed weight that Python passes in. Mirrored in library.py. Only a quantised one, of quantized_linear.h, has bits.
struct Linear {
  const void* packed;    // Unit [panels][units][kPanel]
  const void* bias;      // [out], may be null
  const float* scales;   // of a quantised weight
  const float* offsets;  // of a quantised weight, may be null
  const int32_t* order;  // of a quantised weight, [inputs]: which input of x is its k-th one; null: the same
  int32_t out, units;    // units of a row of x
  int32_t bits, group;   // 0, 8 or 4; inputs that share a scale
};

// How a panel's sums are written: as they are, as silu(gate) * up, or as relu(sum)^2.
enum class Result { kPlain, kGated, kSquaredRelu };

template <class T, class Out, Result kResult>
struct LinearResult {
  const T* bias;  // may be null
  Out* y;         // [rows][out], gated: [rows][out / 2]
  int out;

  LinearResult(const Linear& linear, Out* y) : bias(static_cast<const T*>(linear.bias)), y(y), out(linear.out) {}

  // Writes the sums of the two vectors of a panel.
  ARGOSY_INLINE void write(int row, int panel, vfloat first, vfloat second) const {
    if constexpr (kResult == Result::kGated) {
      write_gated(row, panel, first, second);
    } else {
      write_vector(row, panel * kPanel, first);
      write_vector(row, panel * kPanel + kLanes, second);
    }
  }

 private:
  ARGOSY_INLINE void write_vector(int row, int column, vfloat sum) const {
    const int lanes = out - column;
    Out* to = y + int64_t(row) * out + column;
    if (lanes >= kLanes) {
      store(to, result(bias ? sum + load(bias + column) : sum));
    } else if (lanes > 0) {
      store_first(to, result(bias ? sum + load_first(bias + column, lanes) : sum), lanes);
    }
  }

  static ARGOSY_INLINE vfloat result(vfloat sum) {
    if constexpr (kResult != Result::kSquaredRelu) return sum;
    const vfloat kept = sum < vfloat{} ? vfloat{} : sum;  // NaN is kept
    return kept * kept;
  }

  ARGOSY_INLINE void write_gated(int row, int panel, vfloat gate, vfloat up) const {
    if (bias) {
      gate += load(bias + panel * kPanel);
      up += load(bias + panel * kPanel + kLanes);
    }
    store(y + int64_t(row) * (out / 2) + panel * kLanes, silu(gate) * up);
  }
};

// Calls body(first row, rows, first panel, last panel) for all parts of a result, each of them a task of its own.
template <class F>
inline void for_tasks(int rows, int block_rows, int panels, int64_t panel_bytes, F&& body) {
  const int blocks = int(ceil_div(rows, block_rows));
  const int64_t wanted = ceil_div(int64_t(panels) * blocks, Pool::instance().threads() * 8);
  const int per_task = int(std::clamp<int64_t>(wanted, 1, std::max<int64_t>((512 << 10) / panel_bytes, 1)));
  const int groups = int(ceil_div(panels, per_task));
  Pool::instance().run(blocks * groups, [&](int task) {
    const int first_row = task / groups * block_rows;
    const int first_panel = task % groups * per_task;
    body(first_row, std::min(block_rows, rows - first_row), first_panel, std::min(first_panel + per_task, panels));
  });
}

template <class T, class Out, Result kResult>
struct LinearJob {
  const Unit* x;
  const Unit* packed;
  LinearResult<T, Out, kResult> result;
  int rows, out, units;

  LinearJob(const Linear& linear, const T* x, Out* y, int rows)
      : x(reinterpret_cast<const Unit*>(x)),
        packed(static_cast<const Unit*>(linear.packed)),
        result(linear, y),
        rows(rows),
        out(linear.out),
        units(linear.units) {}

  void run() const {
    if (rows <= 0) return;
#if defined(ARGOSY_TILES)
    if constexpr (sizeof(T) == 2) {
      if (units % amx::kUnits == 0) return run_tiles();
    }
#endif
    // The rows of a block stay in the second-level cache while the panels are read.
    constexpr int64_t kBlockBytes = 256 << 10;
    const int64_t fit = std::max<int64_t>(kBlockBytes / (int64_t(units) * 4) / kMaxRows, 4) * kMaxRows;
    const int block_rows = int(std::min<int64_t>(fit, rows));
    for_tasks(rows, block_rows, panels(), panel_bytes(), [this](int first_row, int block, int first_panel, int last_panel) {
      for (int panel = first_panel; panel < last_panel; ++panel)
        multiply(first_row, block, panel, panel + 1 < last_panel);
    });
  }

#if defined(ARGOSY_TILES)
  void run_tiles() const {
    const int blocks = int(ceil_div(rows, amx::kBlockRows));
    const int block_rows = int(ceil_div(ceil_div(rows, blocks), 2 * amx::kRows)) * 2 * amx::kRows;
    for_tasks(rows, block_rows, panels(), panel_bytes(), [this](int first_row, int block, int first_panel, int last_panel) {
      for (int panel = first_panel; panel < last_panel; ++panel) multiply_tiles(first_row, block, panel);
      amx::ARGOSY_TILES::release();
    });
  }

  __attribute__((noinline)) void multiply_tiles(int first_row, int block, int panel) const {
    static_assert(kPanel == amx::kPanelUnits);
    alignas(64) float sums[amx::kBlockRows * kPanel];
    amx::product<amx::ARGOSY_TILES>(x + int64_t(first_row) * units, units, units,
                                    packed + int64_t(panel) * units * kPanel, block, sums);
    for (int r = 0; r < block; ++r) {
      const vfloat low = load(sums + r * kPanel), high = load(sums + r * kPanel + kLanes);
      result.write(first_row + r, panel, low, high);
    }
  }
#endif

  int panels() const { return int(ceil_div(out, kPanel)); }
  int64_t panel_bytes() const { return int64_t(units) * kPanel * 4; }

  // Multiplies one block of rows by one panel, and prefetches the next panel meanwhile: otherwise memory is idle during
  // every pass but the first. Never inlined, because in a larger function the accumulators are not kept in registers.
  __attribute__((noinline)) void multiply(int first_row, int block, int panel, bool has_next) const {
    const Unit* weights = packed + int64_t(panel) * units * kPanel;
    const Unit* columns[2] = {weights, weights + kLanes};
    const char* next = has_next ? reinterpret_cast<const char*>(weights + int64_t(units) * kPanel) : nullptr;
    const int passes = int(ceil_div(block, kMaxRows));
    for (int pass = 0; pass < passes; ++pass) {
      const int begin = first_row + block * pass / passes;
      const int end = first_row + block * (pass + 1) / passes;
      const int ahead_step = passes == 1 ? 2 * kLanes * 4 : kLanes * 4;
      const char* ahead = next && pass < 2 ? next + int64_t(pass) * units * ahead_step : nullptr;
      with_rows(end - begin, [&](auto row_count) {
        constexpr int Rows = decltype(row_count)::value;
        Tile<T, Rows, 2> tile;
        tile.accumulate(x + int64_t(begin) * units, units, columns, kPanel, units, ahead, ahead_step);
        for (int r = 0; r < Rows; ++r) result.write(begin + r, panel, tile.sum[r][0], tile.sum[r][1]);
      });
    }
  }
};

}  // namespace argosy
