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
// Layout, the same for both element types, where a block is two panels of kPanel outputs:
//   8 bits: [block][input][output], int8
//   4 bits: [block][input / 8][output], 32 bits with eight integers from -8 to 7: those of even inputs in the lower
//           half, those of odd ones in the upper half, each in ascending order from the lowest bits
//   scales, offsets: [panel][group][output], of an even number of panels
// So a block is read from its first byte to its last, and then the next one of the same task.
#pragma once

#include <vector>

#include "linear.h"

namespace argosy {

inline constexpr int kSpan = 128;
inline constexpr int kBlock = 2 * kPanel;

// So many rows are multiplied by both panels of a block together: one would have too few sums to hide the latency of the
// products. More rows are multiplied by one panel at a time, whose units stay in the first-level cache.
inline constexpr int kPairRows = kLanes == 16 ? 6 : 2;

// Bytes from what is multiplied to what is fetched meanwhile.
inline constexpr int kAhead = 4096;

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
  static constexpr int kBlockBytes = kInputs * kBlock;  // of all vectors of a block
  static constexpr int kVectorBytes = kLanes;

  ARGOSY_INLINE explicit Packed(const char* p) : from(reinterpret_cast<const int8_t*>(p)) {}

  ARGOSY_INLINE vuint unit(int) const {
    if constexpr (kInputs == 1) {
      return (vuint)widen_bytes(from);
    } else {
      return unit_of(widen_bytes(from), widen_bytes(from + kBlock));
    }
  }

  const int8_t* from;
};

template <class T>
struct Packed<T, 4> {
  static constexpr int kInputs = 8;
  static constexpr int kBlockBytes = 4 * kBlock;
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

// The sums of a block of rows and one of outputs.
template <class T>
class QuantizedSums {
 public:
  static constexpr int kBlockRows = 96;

  // Of all rows, [2][rows][kPanel].
  struct alignas(64) Totals {
    float of[2 * kBlockRows * kPanel];
  };

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
      for_spans([&](const Span& span) {
        float sum = 0;
        for (int k = 0; k < span.inputs; ++k) sum += to_float(from[span.first + k]);
        sums[int64_t(row) * spans_ + span.index] = sum;
      });
    });
  }

  // Whether all products are by AMX.
  bool has_tiles() const {
#if defined(ARGOSY_TILES)
    return sizeof(T) == 2 && linear_.group % (2 * amx::kUnits) == 0;
#else
    return false;
#endif
  }

  void compute(int first_row, int rows, int block, Totals& totals) const {
    if (linear_.bits == 8) {
      compute_bits<8>(first_row, rows, block, totals.of);
    } else {
      compute_bits<4>(first_row, rows, block, totals.of);
    }
  }

 private:
  // Inputs that share a scale.
  struct Span {
    int index, group, first, inputs;
  };

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
    int index = 0;
    for (int group = 0; group < groups_; ++group)
      for (int at = 0; at < linear_.group; at += kSpan)
        body(Span{index++, group, group * linear_.group + at, std::min(kSpan, linear_.group - at)});
  }

  template <int kBits>
  void compute_bits(int first_row, int rows, int block, float* totals) const {
    using Packed = argosy::Packed<T, kBits>;
    memset(totals, 0, sizeof(float) * rows * kBlock);
    const int64_t block_bytes = int64_t(inputs_) / Packed::kInputs * Packed::kBlockBytes;
    const char* packed = static_cast<const char*>(linear_.packed) + block * block_bytes;
    const auto from = [&](const Span& span) { return packed + int64_t(span.first) / Packed::kInputs * Packed::kBlockBytes; };
    if (rows <= kPairRows && !has_tiles()) {
      with_rows<kPairRows>(rows, [&](auto row_count) {
        constexpr int Rows = decltype(row_count)::value;
        for_spans([&](const Span& span) { multiply_pair<Packed, Rows>(from(span), first_row, block, span, totals); });
      });
      return;
    }
    const auto multiply = [&](int panel, const Span& span) {
      float* own = totals + int64_t(panel) * rows * kPanel;
      multiply_panel<Packed>(from(span) + panel * 2 * Packed::kVectorBytes, first_row, rows, 2 * block + panel, span, own);
    };
    if (rows <= 2 * kMaxRows) {
      for_spans([&](const Span& span) {
        for (int panel = 0; panel < 2; ++panel) multiply(panel, span);
      });
    } else {  // the totals of one panel at a time stay in the first-level cache
      for (int panel = 0; panel < 2; ++panel) for_spans([&](const Span& span) { multiply(panel, span); });
    }
  }

  const Unit* row(int index, const Span& span) const {
    return x_ + int64_t(index) * linear_.units + span.first / kPerUnit<T>;
  }

  template <class Packed, int Rows>
  __attribute__((noinline)) void multiply_pair(const char* from, int first_row, int block, const Span& span, float* totals) const {
    Tile<T, Rows, 4> tile;
    multiply_integers<Packed>(tile, row(first_row, span), from, span.inputs, true, nullptr);
    for (int panel = 0; panel < 2; ++panel)
      add<Rows>(tile, 2 * panel, first_row, 2 * block + panel, span, totals + panel * Rows * kPanel);
  }

  template <class Packed>
  __attribute__((noinline)) void multiply_panel(const char* from, int first_row, int rows, int panel, const Span& span, float* totals) const {
    alignas(64) Unit units[kSpan / kPerUnit<T> * kPanel];
    const bool fetches = panel % 2 == 0;  // for both
#if defined(ARGOSY_TILES)
    if (has_tiles()) {
      Tile<T, 0, 2> none;
      multiply_integers<Packed>(none, nullptr, from, span.inputs, fetches, units);
      alignas(64) float sums[kBlockRows * kPanel];
      amx::product<amx::ARGOSY_TILES>(row(first_row, span), linear_.units, span.inputs / kPerUnit<T>, units, rows, sums);
      for (int r = 0; r < rows; ++r) {
        Tile<T, 1, 2> tile;
        for (int v = 0; v < 2; ++v) tile.sum[0][v] = load(sums + r * kPanel + v * kLanes);
        add<1>(tile, 0, first_row + r, panel, span, totals + r * kPanel);
      }
      return;
    }
#endif
    const Unit* columns[2] = {units, units + kLanes};
    const int passes = int(ceil_div(rows, kMaxRows));
    for (int pass = 0; pass < passes; ++pass) {
      const int begin = rows * pass / passes, end = rows * (pass + 1) / passes;
      with_rows(end - begin, [&](auto row_count) {
        constexpr int Rows = decltype(row_count)::value;
        Tile<T, Rows, 2> tile;
        const Unit* a = row(first_row + begin, span);
        if (pass == 0) {
          multiply_integers<Packed>(tile, a, from, span.inputs, fetches, units);
        } else {
          tile.accumulate(a, linear_.units, columns, kPanel, span.inputs / kPerUnit<T>);
        }
        add<Rows>(tile, 0, first_row + begin, panel, span, totals + begin * kPanel);
      });
    }
  }

  // Multiplies by integers as they are widened, in the order of Tile::accumulate, and keeps the units of one panel,
  // [input / kPerUnit][kPanel], unless `kept` is null.
  template <class Packed, int Rows, int Vectors>
  ARGOSY_INLINE void multiply_integers(Tile<T, Rows, Vectors>& tile, const Unit* a, const char* from, int inputs, bool fetches,
                                       Unit* kept) const {
    const int64_t a_stride = linear_.units;
    for (int k = 0; k < inputs; k += Packed::kInputs) {
      if (fetches) {
#pragma GCC unroll 4
        for (int offset = 0; offset < Packed::kBlockBytes; offset += 64) __builtin_prefetch(from + kAhead + offset);
      }
      const Packed first(from), second(from + Packed::kVectorBytes);
      const Packed third(from + (Vectors == 4 ? 2 : 0) * Packed::kVectorBytes);
      const Packed fourth(from + (Vectors == 4 ? 3 : 0) * Packed::kVectorBytes);
#pragma GCC unroll 8
      for (int i = 0; i < Packed::kInputs / kPerUnit<T>; ++i) {
        vuint unit[Vectors];
        unit[0] = first.unit(i), unit[1] = second.unit(i);
        if constexpr (Vectors == 4) unit[2] = third.unit(i), unit[3] = fourth.unit(i);
        if (kept) {
          memcpy(kept, &unit[0], sizeof unit[0]);
          memcpy(kept + kLanes, &unit[1], sizeof unit[1]);
          kept += kPanel;
        }
#pragma GCC unroll 12
        for (int r = 0; r < Rows; ++r) {
          const vuint av = vuint{} + a[r * a_stride];
#pragma GCC unroll 4
          for (int v = 0; v < Vectors; ++v) tile.sum[r][v] = multiply_add<T>(tile.sum[r][v], av, unit[v]);
        }
        ++a;
      }
      from += Packed::kBlockBytes;
    }
  }

  // Adds a panel's sums of a span, which are a tile's vectors from the first one on, to the totals of its rows.
  template <int Rows, int Vectors>
  ARGOSY_INLINE void add(const Tile<T, Rows, Vectors>& tile, int first, int row, int panel, const Span& span, float* totals) const {
    const int64_t at = (int64_t(panel) * groups_ + span.group) * kPanel;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      const vfloat scale = load(linear_.scales + at + v * kLanes);
#pragma GCC unroll 12
      for (int r = 0; r < Rows; ++r) {
        float* total = totals + r * kPanel + v * kLanes;
        store(total, fma(scale, tile.sum[r][first + v], load(total)));
      }
    }
    if (!linear_.offsets) return;
    const float* sums = sums_ + int64_t(row) * spans_ + span.index;
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < 2; ++v) {
        float* total = totals + r * kPanel + v * kLanes;
        const vfloat offset = load(linear_.offsets + at + v * kLanes);
        store(total, fma(offset, broadcast(sums[int64_t(r) * spans_]), load(total)));
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
    const int64_t bytes = int64_t(panel / 2) * inputs * kBlock * bits / 8;
    for (int lane = 0; lane < kPanel; ++lane) {
      const int64_t row = row_of(panel, lane, out, is_gated);
      if (row >= out) continue;  // stays zero
      const int8_t* from = integers + row * inputs;
      const int place = panel % 2 * kPanel + lane;
      if (bits == 8) {
        int8_t* to = static_cast<int8_t*>(packed) + bytes + place;
        for (int k = 0; k < inputs; ++k) to[int64_t(k) * kBlock] = from[k];
      } else {
        uint32_t* to = reinterpret_cast<uint32_t*>(static_cast<char*>(packed) + bytes) + place;
        for (int k = 0; k < inputs; k += 8) {
          uint32_t word = 0;
          for (int i = 0; i < 8; ++i) word |= uint32_t(from[k + i] & 15) << (i / 2 * 4 + i % 2 * 16);
          to[int64_t(k / 8) * kBlock] = word;
        }
      }
    }
  });
}

template <class T, class Out, Result kResult>
void multiply_quantized(const Linear& linear, const T* x, Out* y, int rows) {
  if (rows <= 0) return;
  using Sums = QuantizedSums<T>;
  const Sums sums(linear, x, rows);
  const LinearResult<T, Out, kResult> result(linear, y);
  const int panels = int(ceil_div(linear.out, kPanel)), blocks = int(ceil_div(linear.out, kBlock));
  const int64_t block_bytes = int64_t(linear.units) * kPerUnit<T> * kBlock * linear.bits / 8;
  for_tasks(rows, Sums::kBlockRows, blocks, block_bytes, [&](int first_row, int count, int first_block, int last_block) {
    typename Sums::Totals totals;
    for (int block = first_block; block < last_block; ++block) {
      sums.compute(first_row, count, block, totals);
      for (int panel = 2 * block; panel < std::min(2 * block + 2, panels); ++panel)
        for (int r = 0; r < count; ++r) {
          const float* total = totals.of + (panel % 2 * count + r) * kPanel;
          result.write(first_row + r, panel, load(total), load(total + kLanes));
        }
    }
#if defined(ARGOSY_TILES)
    if (sums.has_tiles()) amx::ARGOSY_TILES::release();
#endif
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
