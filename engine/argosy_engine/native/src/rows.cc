// C interface of delta.h, mamba.h, pool.h, rows.h, sampling.h and short_conv.h. Mirrored in library.py.
#include "rows.h"

#include "delta.h"
#include "mamba.h"
#include "sampling.h"
#include "short_conv.h"

using namespace argosy;

#pragma GCC visibility push(default)
extern "C" {

int argosy_lanes() { return kLanes; }

void argosy_set_threads(int threads) { Pool::instance().resize(threads); }

void argosy_rms_norm(int dtype, const void* x, void* residual, const void* weight, void* out, int rows, int width,
                     float eps) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    rms_norm(static_cast<const T*>(x), static_cast<T*>(residual), static_cast<const T*>(weight), static_cast<T*>(out),
             rows, width, eps);
  });
}

void argosy_argmax(int dtype, const void* x, int64_t* out, int rows, int width) {
  with_type(dtype, [&](auto element) {
    argmax(static_cast<const decltype(element)*>(x), out, rows, width);
  });
}

void argosy_sample(int dtype, const void* logits, const SamplingRows* of, int64_t* out, int rows, int width) {
  with_type(dtype, [&](auto element) {
    sample(static_cast<const decltype(element)*>(logits), *of, out, rows, width);
  });
}

void argosy_gated_delta_rule(const DeltaShape* of, const float* q, const float* k, const float* v, const float* decay,
                             const float* rate, float* state, float* out) {
  gated_delta_rule(*of, q, k, v, decay, rate, state, out);
}

int64_t argosy_delta_scratch(const DeltaNet* of) { return delta_scratch(*of); }

void argosy_gated_delta_net(int dtype, const DeltaNet* of, const Step* step, const void* qkvz, const void* ba, void* out,
                            float* scratch) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    gated_delta_net(*of, *step, static_cast<const T*>(qkvz), static_cast<const T*>(ba), static_cast<T*>(out), scratch);
  });
}

int64_t argosy_mamba_scratch(const Mamba* of) { return mamba_scratch(*of); }

void argosy_mamba(int dtype, const Mamba* of, const Step* step, const void* zxbcdt, void* out, float* scratch) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    mamba(*of, *step, static_cast<const T*>(zxbcdt), static_cast<T*>(out), scratch);
  });
}

void argosy_mamba_before_norm(int dtype, const Mamba* of, const Step* step, const void* zxbcdt, float* y, float* squares,
                              float* scratch) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    const T* inputs = static_cast<const T*>(zxbcdt);
    mamba_read(*of, *step, inputs, y, scratch);
    mamba_squares(*of, step->num_tokens, y, inputs, squares);
  });
}

void argosy_mamba_norm(int dtype, const Mamba* of, int tokens, const void* zxbcdt, const float* y, const float* means,
                       void* out) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    mamba_gated_norm(*of, tokens, y, static_cast<const T*>(zxbcdt), means, static_cast<T*>(out));
  });
}

void argosy_short_conv(int dtype, const ShortConv* of, const Step* step, const void* bcx, void* out, void* scratch) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    short_conv(*of, *step, static_cast<const T*>(bcx), static_cast<T*>(out), static_cast<T*>(scratch));
  });
}

}  // extern "C"
#pragma GCC visibility pop
