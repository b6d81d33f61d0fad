// C interface of linear.h. Mirrored in library.py.
#include "linear.h"

using namespace argosy;

#pragma GCC visibility push(default)
extern "C" {

void argosy_pack_linear(const Unit* weight, Unit* packed, int out, int units) {
  pack_linear(weight, packed, out, units);
}

void argosy_linear(int dtype, int out_dtype, const void* x, const Unit* packed, const void* bias, void* y, int rows,
                   int out, int units) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const T* b = static_cast<const T*>(bias);
    const Unit* in = static_cast<const Unit*>(x);
    if (out_dtype == 0) {
      LinearJob<T, float>{in, packed, b, static_cast<float*>(y), rows, out, units}.run();
    } else if constexpr (sizeof(T) == 2) {
      LinearJob<T, bf16>{in, packed, b, static_cast<bf16*>(y), rows, out, units}.run();
    }
  });
}

}  // extern "C"
#pragma GCC visibility pop
