// C interface of decoder.h. Mirrored in library.py.
#include "decoder.h"

using namespace argosy;

#pragma GCC visibility push(default)
extern "C" {

int64_t argosy_decoder_scratch(const DecoderLayer* layer, int rows, int hidden) {
  return DecoderJob<float>::scratch_elements(*layer, rows, hidden);
}

void argosy_decoder(int dtype, const DecoderLayer* layers, int num_layers, const Step* const* steps, void* x,
                    void* scratch, int hidden, float eps) {
  with_type(dtype, [&](auto element) {
    using T = decltype(element);
    DecoderJob<T>(layers, num_layers, steps, static_cast<T*>(x), static_cast<T*>(scratch), hidden, eps).run();
  });
}

}  // extern "C"
#pragma GCC visibility pop
