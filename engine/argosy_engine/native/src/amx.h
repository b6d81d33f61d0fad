// Products of bfloat16 matrices by AMX: tile registers of 16 rows of 64 bytes, and TDPBF16PS, which adds the product of two
// of them to a third (Intel's Software Developer's Manual, volume 2).
//
// The packed weight of linear.h is what the instruction wants: 16 units of a panel are one tile of B at a stride of 128
// bytes. The same code runs on `Model`, which computes what the manual says the instruction computes: in tests on any
// CPU, and in every process that uses the instruction, which is tested before it is trusted.
//
// Every element is summed in ascending order of k, in tiles of 16 units, for any number of rows. Sums round otherwise than
// those of multiply_add, so one weight is always multiplied by one of both.
#pragma once

#if defined(ARGOSY_TILES)  // Hardware or Model

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>

#include "simd.h"

namespace argosy::amx {

inline constexpr int kRows = 16;        // of a tile
inline constexpr int kUnits = 16;       // of a row of a tile, each of two bfloat16 or one float
inline constexpr int kPanelUnits = 32;  // outputs of a panel: two tiles of B
inline constexpr int kBlockUnits = 128; // of B that stay in the first-level cache while rows pass: 16 KiB of a panel
inline constexpr int kBlockRows = 256;  // that are multiplied by a panel at a time

// The argument of LDTILECFG.
struct alignas(64) Shapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};  // of a row, by tile
  uint8_t rows[16] = {};
};

// Tiles 0 to 3 are C (two rows of two), 4 and 5 A, 6 and 7 B.
inline Shapes shapes(int first_rows, int second_rows) {
  Shapes found;
  const int rows[8] = {first_rows, first_rows, second_rows, second_rows, first_rows, second_rows, kUnits, kUnits};
  for (int tile = 0; tile < 8; ++tile) {
    found.rows[tile] = uint8_t(rows[tile]);
    found.bytes[tile] = rows[tile] ? kUnits * 4 : 0;
  }
  return found;
}

struct Hardware {
  // Asks for the registers, which Linux gives a process that wants them (arch_prctl, ARCH_REQ_XCOMP_PERM of XTILEDATA).
  static bool request() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }

  static ARGOSY_INLINE void configure(const Shapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
  static ARGOSY_INLINE void release() { asm volatile("tilerelease"); }
  template <int kTile>
  static ARGOSY_INLINE void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  static ARGOSY_INLINE void load(const void* from, ptrdiff_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kTile>
  static ARGOSY_INLINE void store(void* to, ptrdiff_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(kTile) : "memory");
  }
  template <int kC, int kA, int kB>
  static ARGOSY_INLINE void multiply() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kC), "i"(kA), "i"(kB));
  }
};

struct Model {
  static bool request() { return true; }

  struct State {
    Shapes shapes;
    uint32_t tiles[8][kRows][kUnits];
  };
  static State& state() {
    static thread_local State own;
    return own;
  }

  static void configure(const Shapes& shapes) {
    state().shapes = shapes;
    memset(state().tiles, 0, sizeof state().tiles);
  }
  static void release() { configure(shapes(0, 0)); }
  template <int kTile>
  static void zero() {
    memset(state().tiles[kTile], 0, sizeof state().tiles[kTile]);
  }
  template <int kTile>
  static void load(const void* from, ptrdiff_t stride) {
    zero<kTile>();
    for (int row = 0; row < state().shapes.rows[kTile]; ++row)
      memcpy(state().tiles[kTile][row], static_cast<const char*>(from) + row * stride, state().shapes.bytes[kTile]);
  }
  template <int kTile>
  static void store(void* to, ptrdiff_t stride) {
    for (int row = 0; row < state().shapes.rows[kTile]; ++row)
      memcpy(static_cast<char*>(to) + row * stride, state().tiles[kTile][row], state().shapes.bytes[kTile]);
  }

  // For each element the even products are summed apart from the odd ones, with one rounding each; then both sums are
  // added, and the result to C. Denormal inputs and results count as zero.
  template <int kC, int kA, int kB>
  static void multiply() {
    auto& [shapes, tiles] = state();
    for (int row = 0; row < shapes.rows[kC]; ++row) {
      float even[kUnits] = {}, odd[kUnits] = {};
      for (int k = 0; k < shapes.rows[kB]; ++k) {
        const uint32_t a = tiles[kA][row][k];
        for (int n = 0; n < kUnits; ++n) {
          const uint32_t b = tiles[kB][k][n];
          even[n] = flushed(std::fma(flushed(a << 16), flushed(b << 16), even[n]));
          odd[n] = flushed(std::fma(flushed(a & 0xffff0000u), flushed(b & 0xffff0000u), odd[n]));
        }
      }
      for (int n = 0; n < kUnits; ++n) {
        const float sum = flushed(flushed(tiles[kC][row][n]) + flushed(even[n] + odd[n]));
        memcpy(&tiles[kC][row][n], &sum, sizeof sum);
      }
    }
  }

  static float flushed(uint32_t bits) {
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
  }
  static float flushed(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return flushed(bits);
  }
};

// Adds the products of `steps` tiles of A by those of a panel to C. While a panel is read for the first time, what comes a
// kilobyte later is fetched: the CPU's own prefetchers do not follow the strides of tiles.
template <class Tiles, int kRowTiles>
ARGOSY_INLINE void accumulate(const Unit* a, int stride, const Unit* b, int steps, bool is_first) {
  constexpr ptrdiff_t kPanelBytes = kPanelUnits * sizeof(Unit);
  for (int step = 0; step < steps; ++step, a += kUnits, b += kUnits * kPanelUnits) {
    Tiles::template load<6>(b, kPanelBytes);
    Tiles::template load<7>(b + kUnits, kPanelBytes);
    if (is_first) {
      const char* ahead = reinterpret_cast<const char*>(b) + 1024;
      for (int offset = 0; offset < kUnits * kPanelBytes; offset += 64) __builtin_prefetch(ahead + offset);
    }
    Tiles::template load<4>(a, ptrdiff_t(stride) * sizeof(Unit));
    Tiles::template multiply<0, 4, 6>();
    Tiles::template multiply<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      Tiles::template load<5>(a + ptrdiff_t(kRows) * stride, ptrdiff_t(stride) * sizeof(Unit));
      Tiles::template multiply<2, 5, 6>();
      Tiles::template multiply<3, 5, 7>();
    }
  }
}

// The same for the sums in memory, [rows][kPanelUnits].
template <class Tiles, int kRowTiles>
ARGOSY_INLINE void add_block(const Unit* a, int stride, const Unit* b, int steps, bool is_first, bool is_new, float* sums) {
  constexpr ptrdiff_t kSumBytes = kPanelUnits * sizeof(float);
  float* lower = sums + kRows * kPanelUnits;
  if (is_new) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    if constexpr (kRowTiles == 2) {
      Tiles::template zero<2>();
      Tiles::template zero<3>();
    }
  } else {
    Tiles::template load<0>(sums, kSumBytes);
    Tiles::template load<1>(sums + kUnits, kSumBytes);
    if constexpr (kRowTiles == 2) {
      Tiles::template load<2>(lower, kSumBytes);
      Tiles::template load<3>(lower + kUnits, kSumBytes);
    }
  }
  accumulate<Tiles, kRowTiles>(a, stride, b, steps, is_first);
  Tiles::template store<0>(sums, kSumBytes);
  Tiles::template store<1>(sums + kUnits, kSumBytes);
  if constexpr (kRowTiles == 2) {
    Tiles::template store<2>(lower, kSumBytes);
    Tiles::template store<3>(lower + kUnits, kSumBytes);
  }
}

// Multiplies up to kBlockRows rows of `units` (a multiple of kUnits), a_stride units apart, by a panel; sums: [rows][kPanelUnits]. The thread's
// tiles are configured afterwards; `release` ends that, because other code of the thread may not expect it.
template <class Tiles>
inline void product(const Unit* a, int a_stride, int units, const Unit* panel, int rows, float* sums) {
  // Few rows are multiplied in one go. With more, a part of the panel is kept in the cache while all rows pass.
  const int block = rows <= 2 * kRows ? units : kBlockUnits;
  const int whole = rows / (2 * kRows) * (2 * kRows), rest = rows - whole;
  const Shapes pairs = shapes(kRows, kRows), last = shapes(std::min(rest, kRows), std::max(rest - kRows, 0));
  for (int k = 0; k < units; k += block) {
    const int steps = std::min(block, units - k) / kUnits;
    const Unit* b = panel + int64_t(k) * kPanelUnits;
    if (whole && (k == 0 || rest)) Tiles::configure(pairs);
    for (int row = 0; row < whole; row += 2 * kRows)
      add_block<Tiles, 2>(a + int64_t(row) * a_stride + k, a_stride, b, steps, row == 0, k == 0, sums + row * kPanelUnits);
    if (!rest) continue;
    if (k == 0 || whole) Tiles::configure(last);
    const Unit* rows_left = a + int64_t(whole) * a_stride + k;
    if (rest > kRows) {
      add_block<Tiles, 2>(rows_left, a_stride, b, steps, whole == 0, k == 0, sums + whole * kPanelUnits);
    } else {
      add_block<Tiles, 1>(rows_left, a_stride, b, steps, whole == 0, k == 0, sums + whole * kPanelUnits);
    }
  }
}

// Rows of the tiles that `column_product` uses: C is 0 to 2, A 3 to 5, B 6.
inline constexpr int kColumnRows = 3 * kRows;
inline Shapes column_shapes(int rows) {
  Shapes found;
  for (int tile = 0; tile < 7; ++tile) {
    found.rows[tile] = uint8_t(tile == 6 ? kUnits : std::clamp(rows - tile % 3 * kRows, 0, kRows));
    found.bytes[tile] = found.rows[tile] ? kUnits * 4 : 0;
  }
  return found;
}

// Multiplies up to kColumnRows rows of A by `steps` tiles of B, and stores the 16 sums of each row. Strides are in units and
// floats. The thread's tiles have the `column_shapes` of the rows.
template <class Tiles, int kRowTiles>
ARGOSY_INLINE void column_product(const Unit* a, int a_stride, const Unit* b, int b_stride, int steps, float* c, int c_stride) {
  const ptrdiff_t a_bytes = ptrdiff_t(a_stride) * sizeof(Unit), b_bytes = ptrdiff_t(b_stride) * sizeof(Unit);
  const ptrdiff_t c_bytes = ptrdiff_t(c_stride) * sizeof(float);
  Tiles::template zero<0>();
  if constexpr (kRowTiles > 1) Tiles::template zero<1>();
  if constexpr (kRowTiles > 2) Tiles::template zero<2>();
  for (int step = 0; step < steps; ++step, a += kUnits, b += ptrdiff_t(kUnits) * b_stride) {
    Tiles::template load<6>(b, b_bytes);
    Tiles::template load<3>(a, a_bytes);
    Tiles::template multiply<0, 3, 6>();
    if constexpr (kRowTiles > 1) {
      Tiles::template load<4>(a + ptrdiff_t(kRows) * a_stride, a_bytes);
      Tiles::template multiply<1, 4, 6>();
    }
    if constexpr (kRowTiles > 2) {
      Tiles::template load<5>(a + ptrdiff_t(2 * kRows) * a_stride, a_bytes);
      Tiles::template multiply<2, 5, 6>();
    }
  }
  Tiles::template store<0>(c, c_bytes);
  if constexpr (kRowTiles > 1) Tiles::template store<1>(c + ptrdiff_t(kRows) * c_stride, c_bytes);
  if constexpr (kRowTiles > 2) Tiles::template store<2>(c + ptrdiff_t(2 * kRows) * c_stride, c_bytes);
}

// What a test of the tiles has found; kRounding alone is no fault.
enum Finding { kWrong = 1, kDependsOnRows = 2, kRounding = 4, kRefused = 8 };

// Asks for the tiles, and multiplies random numbers by them and by the model: every shape of tiles, several blocks of k. A
// thread that has tested may use the tiles, and so may all others of the process.
template <class Tiles>
inline int test() {
  if (!Tiles::request()) return kRefused;
  constexpr int kTestRows = 2 * 2 * kRows + kRows + 3, kTestUnits = kBlockUnits + 3 * kUnits;
  constexpr int kSums = kTestRows * kPanelUnits;
  static bf16 a[kTestRows][kTestUnits * 2], panel[kTestUnits][kPanelUnits][2];
  static float sums[kSums], model[kSums], part[kSums];
  uint32_t random = 1;
  const auto fill = [&random](bf16* numbers, size_t count) {
    for (size_t i = 0; i < count; ++i) {
      random = random * 1664525u + 1013904223u;
      numbers[i].bits = uint16_t((random >> 16 & 0x8000u) | (119 + (random >> 11) % 8) << 7 | (random >> 20 & 0x7fu));
    }
  };
  fill(&a[0][0], sizeof a / sizeof(bf16));
  fill(&panel[0][0][0], sizeof panel / sizeof(bf16));
  const auto multiply = [](auto tiles, int rows, float* to) {
    product<decltype(tiles)>(reinterpret_cast<const Unit*>(a), kTestUnits, kTestUnits, reinterpret_cast<const Unit*>(panel), rows, to);
    tiles.release();
  };
  multiply(Tiles{}, kTestRows, sums);
  multiply(Model{}, kTestRows, model);
  int found = memcmp(sums, model, sizeof sums) ? kRounding : 0;
  for (int rows : {1, kRows, kRows + 1, 2 * kRows, 2 * kRows + 1}) {
    multiply(Tiles{}, rows, part);
    if (memcmp(sums, part, rows * kPanelUnits * sizeof(float))) found |= kDependsOnRows;
  }
  for (int row = 0; row < kTestRows; ++row) {
    for (int n = 0; n < kPanelUnits; ++n) {
      double exact = 0, size = 0;
      for (int k = 0; k < kTestUnits * 2; ++k) {
        const double term = double(to_float(a[row][k])) * to_float(panel[k / 2][n][k % 2]);
        exact += term;
        size += std::fabs(term);
      }
      if (!(std::fabs(sums[row * kPanelUnits + n] - exact) <= 1e-5 * size)) found |= kWrong;
    }
  }
  return found;
}

}  // namespace argosy::amx

#endif  // ARGOSY_TILES
