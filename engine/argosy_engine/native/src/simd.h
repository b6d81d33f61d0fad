// Vectors of kLanes floats, bfloat16 conversion and the few elementary functions that the kernels need.
//
// Written with GCC's vector extensions, so that one source serves every instruction set. Intrinsics are used only where
// the compiler has no expression for the instruction.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#define ARGOSY_INLINE inline __attribute__((always_inline))

namespace argosy {

#if defined(__AVX512F__)
inline constexpr int kLanes = 16;
#elif defined(__AVX2__) && defined(__FMA__)
inline constexpr int kLanes = 8;
#else
#error "needs AVX2 with FMA, or AVX-512"
#endif

typedef float vfloat __attribute__((vector_size(kLanes * 4)));
typedef int32_t vint __attribute__((vector_size(kLanes * 4)));
typedef uint32_t vuint __attribute__((vector_size(kLanes * 4)));
typedef uint16_t vhalf __attribute__((vector_size(kLanes * 2)));

struct bf16 {
  uint16_t bits;
};

// A unit is the 32 bits per lane of one multiply-add: one float, or two adjacent bfloat16.
using Unit = uint32_t;
template <class T>
inline constexpr int kPerUnit = sizeof(Unit) / sizeof(T);

// Calls f with a value of the element type: 0 is float, 1 is bfloat16.
template <class F>
inline void with_type(int dtype, F&& f) {
  if (dtype == 0) {
    f(float{});
  } else {
    f(bf16{});
  }
}

ARGOSY_INLINE vfloat broadcast(float value) { return vfloat{} + value; }

ARGOSY_INLINE vuint load_units(const Unit* p) {
  vuint v;
  memcpy(&v, p, sizeof v);
  return v;
}

ARGOSY_INLINE vfloat load(const float* p) {
  vfloat v;
  memcpy(&v, p, sizeof v);
  return v;
}

ARGOSY_INLINE vfloat load(const bf16* p) {
  vhalf half;
  memcpy(&half, p, sizeof half);
  return (vfloat)(__builtin_convertvector(half, vuint) << 16);
}

ARGOSY_INLINE void store(float* p, vfloat v) { memcpy(p, &v, sizeof v); }

// Rounds to nearest even and preserves NaN.
ARGOSY_INLINE void store(bf16* p, vfloat v) {
#if defined(__AVX512BF16__)
  __m256bh half = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &half, sizeof half);
#else
  vuint bits = (vuint)v;
  vuint rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  rounded = (v != v) ? ((bits >> 16) | 0x40) : rounded;
  vhalf half = __builtin_convertvector(rounded, vhalf);
  memcpy(p, &half, sizeof half);
#endif
}

// Loads the first `count` < kLanes elements; the other lanes are zero.
template <class T>
ARGOSY_INLINE vfloat load_first(const T* p, int count) {
  T buffer[kLanes] = {};
  memcpy(buffer, p, count * sizeof(T));
  return load(buffer);
}

template <class T>
ARGOSY_INLINE void store_first(T* p, vfloat v, int count) {
  T buffer[kLanes];
  store(buffer, v);
  memcpy(p, buffer, count * sizeof(T));
}

ARGOSY_INLINE float to_float(float x) { return x; }
ARGOSY_INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// Returns one bit per lane of a comparison's result.
ARGOSY_INLINE unsigned bits(vint condition) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)condition);
#else
  return unsigned(_mm256_movemask_ps((__m256)condition));
#endif
}

// Returns a * b + c, rounded once.
ARGOSY_INLINE vfloat fma(vfloat a, vfloat b, vfloat c) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (vfloat)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

ARGOSY_INLINE vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }

// Reduces the lanes by combining halves: in a fixed order, which makes results reproducible, and in few steps.
template <class F>
ARGOSY_INLINE float fold(vfloat v, F&& combine) {
  float lanes[kLanes];
  store(lanes, v);
#pragma GCC unroll 4
  for (int half = kLanes / 2; half; half /= 2)
#pragma GCC unroll 8
    for (int lane = 0; lane < half; ++lane) lanes[lane] = combine(lanes[lane], lanes[lane + half]);
  return lanes[0];
}

ARGOSY_INLINE float reduce_max(vfloat v) {
  return fold(v, [](float a, float b) { return a > b ? a : b; });
}

ARGOSY_INLINE float reduce_sum(vfloat v) {
  return fold(v, [](float a, float b) { return a + b; });
}

ARGOSY_INLINE vint lane_index() {
  vint lanes;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = lane;
  return lanes;
}

// e^x to about 1 ulp (Cephes' expf); exactly 0 below -87, so that masked scores have no weight.
ARGOSY_INLINE vfloat exp(vfloat x) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const vfloat low = broadcast(-87.0f), high = broadcast(88.0f);
  const vint is_zero = x < low;
  x = is_zero ? low : x;
  x = x > high ? high : x;
  const vfloat shifted = x * 1.44269504f + magic;
  const vfloat n = shifted - magic;
  vfloat r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vfloat p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + (r + 1.0f);
  const vint exponent = ((vint)shifted - (vint)broadcast(magic)) << 23;
  const vfloat result = (vfloat)((vint)p + exponent);
  return is_zero ? vfloat{} : result;
}

ARGOSY_INLINE vfloat tanh(vfloat x) { return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f); }

ARGOSY_INLINE vfloat silu(vfloat x) { return x / (1.0f + exp(vfloat{} - x)); }

// log(1 + e^x) to a few ulp: the larger of x and 0, and log(1 + y) of y = e^-|x|, which is at most 1 (Cephes' logf, and
// y / ((1 + y) - 1) for what 1 + y has lost).
ARGOSY_INLINE vfloat softplus(vfloat x) {
  const vfloat zero = vfloat{}, y = exp(x > 0.0f ? zero - x : x), u = y + 1.0f;
  const vint is_large = u > 1.41421356f;
  const vfloat r = (is_large ? u * 0.5f : u) - 1.0f, exponent = is_large ? broadcast(1.0f) : zero;
  vfloat p = r * 7.0376836292e-2f - 1.1514610310e-1f;
  p = p * r + 1.1676998740e-1f;
  p = p * r - 1.2420140846e-1f;
  p = p * r + 1.4249322787e-1f;
  p = p * r - 1.6668057665e-1f;
  p = p * r + 2.0000714765e-1f;
  p = p * r - 2.4999993993e-1f;
  p = p * r + 3.3333331174e-1f;
  p = p * r * (r * r) - exponent * 2.12194440e-4f - r * r * 0.5f;
  const vfloat logarithm = r + p + exponent * 0.693359375f, lost = u - 1.0f;
  return max(x, zero) + (lost == zero ? y : logarithm * (y / lost));
}

// Returns sum + a * b for units of T. Products of bfloat16 are exact; sums are float.
template <class T>
ARGOSY_INLINE vfloat multiply_add(vfloat sum, vuint a, vuint b) {
  if constexpr (sizeof(T) == 4) {
    return sum + (vfloat)a * (vfloat)b;
  } else {
#if defined(__AVX512BF16__)
    return (vfloat)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else
    sum = sum + (vfloat)(a << 16) * (vfloat)(b << 16);
    return sum + (vfloat)(a & 0xffff0000u) * (vfloat)(b & 0xffff0000u);
#endif
  }
}

}  // namespace argosy
