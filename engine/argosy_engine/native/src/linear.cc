// C interface of linear.h and quantized_linear.h. Mirrored in library.py.
#include "quantized_linear.h"

using namespace argosy;

#pragma GCC visibility push(default)
extern "C" {

void argosy_pack_linear(const Unit* weight, Unit* packed, int out, int units, int is_gated) {
  pack_linear(weight, packed, out, units, is_gated);
}

void argosy_pack_quantized(const int8_t* integers, void* packed, int out, int inputs, int bits, int is_gated) {
  pack_quantized(integers, packed, out, inputs, bits, is_gated);
}

void argosy_linear(int dtype, int out_dtype, const Linear* linear, const void* x, void* y, int rows) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const T* in = static_cast<const T*>(x);
    if (out_dtype == 0) {
      multiply(*linear, in, static_cast<float*>(y), rows);
    } else if constexpr (sizeof(T) == 2) {
      multiply(*linear, in, static_cast<bf16*>(y), rows);
    }
  });
}

void argosy_gated_linear(int dtype, const Linear* linear, const void* x, void* y, int rows) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    multiply<T, T, Result::kGated>(*linear, static_cast<const T*>(x), static_cast<T*>(y), rows);
  });
}

void argosy_squared_relu_linear(int dtype, const Linear* linear, const void* x, void* y, int rows) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    multiply<T, T, Result::kSquaredRelu>(*linear, static_cast<const T*>(x), static_cast<T*>(y), rows);
  });
}

// Returns the `amx::Finding`s of this CPU's tiles; -1 if this library does not use them. To be called before all else.
int argosy_test_tiles() {
#if defined(ARGOSY_TILES)
  return amx::test<amx::ARGOSY_TILES>();
#else
  return -1;
#endif
}

}  // extern "C"
#pragma GCC visibility pop
