// y = x W^T + b, with W in 8 or 4 bits and scales, which stays packed in memory and is widened in registers.
//
// An integer q of W stands for scale * q + offset, where scale and offset belong to its output and its group of inputs.
// The integers are exact in bfloat16, so products are as those of linear.h, and scales multiply sums:
//
//   y[row][out] = sum over spans of (scale * sum of x[row][k] q[out][k] + offset * sum of x[row][k])
//
// in float32, where a span is the next kSpan inputs of a group, or what is left of it, and k counts inputs in the order
// in which W has them (GPTQ's act-order sorts them by group). Sums are in ascending order of k
// for any number of rows, so a row's result does not depend on the others (batch invariance).
//
// Layout, the same for both element types, where a panel is kPanel outputs:
//   8 bits: [panel][input][output], int8
//   4 bits: [panel][input / 8][output], 32 bits with eight integers from -8 to 7: those of even inputs in the lower
//           half, those of odd ones in the upper half, each in ascending order from the lowest bits
//   scales, offsets: [panel][group][output]
#pragma once

#include <vector>

#include "linear.h"

namespace argosy {

inline constexpr int kSpan = 128;

// Few rows are multiplied by two panels together: one would have too few sums to hide the latency of the products.
inline constexpr int kPairRows = kLanes == 16 ? 6 : 2;

ARGOSY_INLINE vfloat widen_bytes(const int8_t* p) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  return (vfloat)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#endif
}

ARGOSY_INLINE vfloat widen_nibble(vuint word, int shift) {
  return __builtin_convertvector((vint)(word << (28 - shift)) >> 28, vfloat);
}

// Returns a unit of two numbers that are exact in bfloat16.
ARGOSY_INLINE vuint unit_of(vfloat even, vfloat odd) { return ((vuint)even >> 16) | ((vuint)odd & 0xffff0000u); }

// What is read of one vector of outputs at a time, and how the units of its inputs are made of it.
template <class T, int kBits>
struct Packed;

template <class T>
struct Packed<T, 8> {
  static constexpr int kInputs = kPerUnit<T>;
  static constexpr int kPanelBytes = kInputs * kPanel;  // of all vectors of a panel
  static constexpr int kVectorBytes = kLanes;

  ARGOSY_INLINE explicit Packed(const char* p) : from(reinterpret_cast<const int8_t*>(p)) {}

  ARGOSY_INLINE vuint unit(int) const {
    if constexpr (kInputs == 1) {
      return (vuint)widen_bytes(from);
    } else {
      return unit_of(widen_bytes(from), widen_bytes(from + kPanel));
    }
  }

  const int8_t* from;
};

template <class T>
struct Packed<T, 4> {
  static constexpr int kInputs = 8;
  static constexpr int kPanelBytes = 4 * kPanel;
  static constexpr int kVectorBytes = 4 * kLanes;

  ARGOSY_INLINE explicit Packed(const char* p) { memcpy(&word, p, sizeof word); }

  ARGOSY_INLINE vuint unit(int i) const {
    if constexpr (kPerUnit<T> == 1) {
      return (vuint)widen_nibble(word, i / 2 * 4 + i % 2 * 16);
    } else {
#if defined(__AVX512BW__)
      // -8 to 7 in bfloat16, in the order of their lowest four bits, twice: an index has five bits, of which the
      // highest is another integer's.
      alignas(64) static constexpr uint16_t kNumbers[32] = {
          0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0,
          0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0,
          0x40c0, 0x40e0, 0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80};
      return (vuint)_mm512_permutexvar_epi16((__m512i)(word >> (4 * i)), _mm512_load_si512(kNumbers));
#else
      return unit_of(widen_nibble(word, 4 * i), widen_nibble(word, 4 * i + 16));
#endif
    }
  }

  vuint word;
};

// The sums of a block of rows and a few panels.
template <class T>
class QuantizedSums {
 public:
  static constexpr int kBlockRows = 96;

  QuantizedSums(const Linear& linear, const T* x, int rows)
      : linear_(linear),
        x_(reinterpret_cast<const Unit*>(x)),
        inputs_(linear.units * kPerUnit<T>),
        groups_(inputs_ / linear.group),
        spans_(groups_ * int(ceil_div(linear.group, kSpan))) {
    if (linear.order) x_ = reorder(x, rows);
    if (!linear.offsets) return;
    static thread_local std::vector<float> kept;
    kept.resize(int64_t(rows) * spans_);
    float* sums = kept.data();
    sums_ = sums;
    parallel_rows(rows, inputs_, [&](int row) {
      const T* from = reinterpret_cast<const T*>(x_ + int64_t(row) * linear_.units);
      for_spans([&](int span, int, int first, int inputs) {
        float sum = 0;
        for (int k = 0; k < inputs; ++k) sum += to_float(from[first + k]);
        sums[int64_t(row) * spans_ + span] = sum;
      });
    });
  }

  // Whether all products are by AMX, one panel at a time.
  bool has_tiles() const {
#if defined(ARGOSY_TILES)
    return sizeof(T) == 2 && linear_.group % (2 * amx::kUnits) == 0;
#else
    return false;
#endif
  }

  // Computes totals [rows][2 * kPanels][kLanes].
  template <int kPanels>
  void compute(int first_row, int rows, int panel, float* totals) const {
    if (linear_.bits == 8) {
      compute_bits<8, kPanels>(first_row, rows, panel, totals);
    } else {
      compute_bits<4, kPanels>(first_row, rows, panel, totals);
    }
  }

 private:
  const Unit* reorder(const T* x, int rows) const {
    static thread_local std::vector<T> kept;
    kept.resize(int64_t(rows) * inputs_);
    T* ordered = kept.data();
    parallel_rows(rows, inputs_, [&](int row) {
      const int64_t start = int64_t(row) * inputs_;
      for (int k = 0; k < inputs_; ++k) ordered[start + k] = x[start + linear_.order[k]];
    });
    return reinterpret_cast<const Unit*>(ordered);
  }

  template <class F>
  ARGOSY_INLINE void for_spans(F&& body) const {
    int span = 0;
    for (int group = 0; group < groups_; ++group)
      for (int at = 0; at < linear_.group; at += kSpan)
        body(span++, group, group * linear_.group + at, std::min(kSpan, linear_.group - at));
  }

  template <int kBits, int kPanels>
  __attribute__((noinline)) void compute_bits(int first_row, int rows, int panel, float* totals) const {
    using Packed = argosy::Packed<T, kBits>;
    constexpr int kVectors = 2 * kPanels;
    constexpr int kRows = kPanels == 2 ? kPairRows : kMaxRows;
    alignas(64) Unit units[kPanels == 2 ? 1 : kSpan / kPerUnit<T> * kPanel];
    const Unit* columns[2] = {units, units + (kPanels == 1 ? kLanes : 0)};
    memset(totals, 0, sizeof(float) * rows * kVectors * kLanes);
    const int passes = int(ceil_div(rows, kRows));
    const int64_t panel_bytes = int64_t(inputs_) / Packed::kInputs * Packed::kPanelBytes;
    const char* packed = static_cast<const char*>(linear_.packed) + panel * panel_bytes;
    for_spans([&](int span, int group, int first, int inputs) {
      const Unit* x = x_ + int64_t(first_row) * linear_.units + first / kPerUnit<T>;
      const char* from = packed + int64_t(first) / Packed::kInputs * Packed::kPanelBytes;
      if (kPanels == 1) widen<Packed>(from, inputs, units);
#if defined(ARGOSY_TILES)
      if (has_tiles()) {
        alignas(64) float sums[kBlockRows * kPanel];
        amx::product<amx::ARGOSY_TILES>(x, linear_.units, inputs / kPerUnit<T>, units, rows, sums);
        for (int r = 0; r < rows; ++r) {
          const vfloat sum[1][2] = {{load(sums + r * kPanel), load(sums + r * kPanel + kLanes)}};
          add<1, 2>(sum, first_row + r, span, group, panel, totals + r * kPanel);
        }
        return;
      }
#endif
      for (int pass = 0; pass < passes; ++pass) {
        const int begin = rows * pass / passes, end = rows * (pass + 1) / passes;
        with_rows<kRows>(end - begin, [&](auto row_count) {
          constexpr int Rows = decltype(row_count)::value;
          Tile<T, Rows, kVectors> tile;
          const Unit* a = x + int64_t(begin) * linear_.units;
          if constexpr (kPanels == 2) {
            multiply<Packed>(tile, a, from, panel_bytes, inputs);
          } else {
            const char* ahead = pass ? nullptr : from + int64_t(inputs) / Packed::kInputs * Packed::kPanelBytes;
            tile.accumulate(a, linear_.units, columns, kPanel, inputs / kPerUnit<T>, ahead,
                            Packed::kPanelBytes * kPerUnit<T> / Packed::kInputs);
          }
          add<Rows, kVectors>(tile.sum, first_row + begin, span, group, panel, totals + begin * kVectors * kLanes);
        });
      }
    });
  }

  // Adds the sums of a span to the totals of its rows.
  template <int Rows, int Vectors>
  ARGOSY_INLINE void add(const vfloat (&sum)[Rows][Vectors], int row, int span, int group, int panel, float* totals) const {
    const int64_t at = (int64_t(panel) * groups_ + group) * kPanel, next_panel = int64_t(groups_) * kPanel;
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      const vfloat scale = load(linear_.scales + at + v / 2 * next_panel + v % 2 * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        float* total = totals + (r * Vectors + v) * kLanes;
        store(total, fma(scale, sum[r][v], load(total)));
      }
    }
    if (!linear_.offsets) return;
    const float* sums = sums_ + int64_t(row) * spans_ + span;
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) {
        float* total = totals + (r * Vectors + v) * kLanes;
        const vfloat offset = load(linear_.offsets + at + v / 2 * next_panel + v % 2 * kLanes);
        store(total, fma(offset, broadcast(sums[int64_t(r) * spans_]), load(total)));
      }
  }

  // Multiplies by integers as they are widened, in the order of Tile::accumulate.
  template <class Packed, int Rows, int Vectors>
  ARGOSY_INLINE void multiply(Tile<T, Rows, Vectors>& tile, const Unit* a, const char* from, int64_t panel_bytes,
                              int inputs) const {
    const int64_t a_stride = linear_.units;
    for (int k = 0; k < inputs; k += Packed::kInputs) {
      const Packed first(from), second(from + Packed::kVectorBytes);
      const Packed third(from + (Vectors == 4 ? panel_bytes : 0));
      const Packed fourth(from + (Vectors == 4 ? panel_bytes : 0) + Packed::kVectorBytes);
#pragma GCC unroll 8
      for (int i = 0; i < Packed::kInputs / kPerUnit<T>; ++i) {
        vuint unit[Vectors];
        unit[0] = first.unit(i), unit[1] = second.unit(i);
        if constexpr (Vectors == 4) unit[2] = third.unit(i), unit[3] = fourth.unit(i);
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
          const vuint av = vuint{} + a[r * a_stride];
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; ++v) tile.sum[r][v] = multiply_add<T>(tile.sum[r][v], av, unit[v]);
        }
        ++a;
      }
      from += Packed::kPanelBytes;
    }
  }

  // Writes the units of one panel's next inputs, [input / kPerUnit][kPanel].
  template <class Packed>
  static ARGOSY_INLINE void widen(const char* from, int inputs, Unit* to) {
    for (int k = 0; k < inputs; k += Packed::kInputs) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        const Packed packed(from + v * Packed::kVectorBytes);
#pragma GCC unroll 8
        for (int i = 0; i < Packed::kInputs / kPerUnit<T>; ++i) {
          const vuint unit = packed.unit(i);
          memcpy(to + i * kPanel + v * kLanes, &unit, sizeof unit);
        }
      }
      from += Packed::kPanelBytes;
      to += Packed::kInputs / kPerUnit<T> * kPanel;
    }
  }

  const Linear& linear_;
  const Unit* x_;
  const float* sums_ = nullptr;  // of x, [rows][spans]
  int inputs_, groups_, spans_;
};

// Packs integers, row-major [out][inputs]; inputs are a multiple of 8 if there are 4 bits. is_gated: see pack_linear.
inline void pack_quantized(const int8_t* integers, void* packed, int out, int inputs, int bits, bool is_gated) {
  Pool::instance().run(int(ceil_div(out, kPanel)), [&](int panel) {
    const int64_t bytes = int64_t(panel) * inputs * kPanel * bits / 8;
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t row = row_of(panel, lane, out, is_gated);
      if (row >= out) continue;  // stays zero
      const int8_t* from = integers + row * inputs;
      if (bits == 8) {
        int8_t* to = static_cast<int8_t*>(packed) + bytes + lane;
        for (int k = 0; k < inputs; ++k) to[int64_t(k) * kPanel] = from[k];
      } else {
        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<char*>(packed) + bytes) + lane;
        for (int k = 0; k < inputs; k += 8) {
          uint32_t word = 0;
          for (int i = 0; i < 8; ++i) word |= uint32_t(from[k + i] & 15) << (i / 2 * 4 + i % 2 * 16);
          to[int64_t(k / 8) * kPanel] = word;
        }
      }
    }
  });
}

template <class T, class Out, Result kResult>
void multiply_quantized(const Linear& linear, const T* x, Out* y, int rows) {
  if (rows <= 0) return;
  constexpr int kBlockRows = QuantizedSums<T>::kBlockRows;
  const QuantizedSums<T> sums(linear, x, rows);
  const LinearResult<T, Out, kResult> result(linear, y);
  const int panels = int(ceil_div(linear.out, kPanel)), step = rows <= kPairRows && !sums.has_tiles() ? 2 : 1;
  const int blocks = int(ceil_div(rows, kBlockRows)), groups = int(ceil_div(panels, step));
  Pool::instance().run(blocks * groups, [&](int task) {
    const int first = task / groups * kBlockRows, panel = task % groups * step;
    const int block = std::min(kBlockRows, rows - first), count = std::min(step, panels - panel);
    alignas(64) float totals[kBlockRows * 2 * kLanes];
    if (count == 2) {
      sums.template compute<2>(first, block, panel, totals);
    } else {
      sums.template compute<1>(first, block, panel, totals);
    }
#if defined(ARGOSY_TILES)
    if (sums.has_tiles()) amx::ARGOSY_TILES::release();
#endif
    for (int r = 0; r < block; ++r)
      for (int i = 0; i < count; ++i) {
        const float* total = totals + (r * count + i) * 2 * kLanes;
        result.write(first + r, panel + i, load(total), load(total + kLanes));
      }
  });
}

// Computes y = x W^T + b by the kernel of the weight. x: [rows][inputs]; y: see LinearResult.
template <class T, class Out, Result kResult = Result::kPlain>
void multiply(const Linear& linear, const T* x, Out* y, int rows) {
  if (linear.bits) {
    multiply_quantized<T, Out, kResult>(linear, x, y, rows);
  } else {
    LinearJob<T, Out, kResult>(linear, x, y, rows).run();
  }
}

}  // namespace argosy
