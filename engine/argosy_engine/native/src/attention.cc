// C interface of attention.h and rotary.h. Mirrored in library.py.
#include "attention.h"
#include "rotary.h"

using namespace argosy;

#pragma GCC visibility push(default)
extern "C" {

void argosy_rotate_and_write(int dtype, const Layer* layer, const Step* step, void* qkv) {
  with_type(dtype, [&](auto element) { rotate_and_write(*layer, *step, static_cast<decltype(element)*>(qkv)); });
}

void argosy_attention(int dtype, const Layer* layer, const Step* step, const void* q, int64_t q_stride, void* out) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    AttentionJob<T>(*layer, *step, static_cast<const T*>(q), q_stride, static_cast<T*>(out)).run();
  });
}

}  // extern "C"
#pragma GCC visibility pop
