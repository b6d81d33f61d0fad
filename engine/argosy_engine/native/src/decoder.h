// All layers of a Llama-style decoder in one call: what models/llama.py does layer by layer.
//
// Between the attention of one layer and that of the next, rows are independent. kChunkRows of them pass through the
// projections, norms and MLP together, so that intermediate results stay in the CPU cache.
#pragma once

#include "attention.h"
#include "quantized_linear.h"
#include "rotary.h"
#include "rows.h"

namespace argosy {

inline constexpr int kChunkRows = 1024;

// Mirrored in library.py, as are the structures that it contains.
struct DecoderLayer {
  const void* input_norm;  // [hidden]
  const void* post_norm;
  const Layer* attention;
  Linear qkv, output, gate_up, down;
};

template <class T>
class DecoderJob {
 public:
  // x: [rows][hidden], the embeddings; run() replaces them by the sum of the residual stream.
  // steps: one per layer. scratch: scratch_elements() elements.
  DecoderJob(const DecoderLayer* layers, int num_layers, const Step* const* steps, T* x, T* scratch, int hidden, float eps)
      : layers_(layers),
        num_layers_(num_layers),
        steps_(steps),
        x_(x),
        rows_(steps[0]->num_tokens),
        hidden_(hidden),
        eps_(eps),
        qkv_(scratch),
        attended_(qkv_ + int64_t(rows_) * layers->qkv.out),
        normed_(attended_ + int64_t(rows_) * q_width(*layers)),
        branch_(normed_ + int64_t(chunk_rows(rows_)) * hidden),
        activated_(branch_ + int64_t(chunk_rows(rows_)) * hidden) {}

  // Number of elements of scratch space. Any layer will do, because all have the same widths.
  static int64_t scratch_elements(const DecoderLayer& layer, int rows, int hidden) {
    return int64_t(rows) * (layer.qkv.out + q_width(layer)) +
           int64_t(chunk_rows(rows)) * (2 * hidden + layer.gate_up.out / 2);
  }

  void run() const {
    for_chunks([&](int first, int rows) {
      rms_norm<T>(x_ + offset(first), nullptr, norm(layers_[0].input_norm), normed_, rows, hidden_, eps_);
      project(layers_[0], first, rows);
    });
    for (int index = 0; index < num_layers_; ++index) {
      const DecoderLayer& layer = layers_[index];
      rotate_and_write(*layer.attention, *steps_[index], qkv_);
      AttentionJob<T>(*layer.attention, *steps_[index], qkv_, layer.qkv.out, attended_).run();
      for_chunks([&](int first, int rows) {
        finish(layer, first, rows);
        T* residual = x_ + offset(first);
        if (index + 1 == num_layers_) return add(branch_, residual, rows, hidden_);
        rms_norm<T>(branch_, residual, norm(layers_[index + 1].input_norm), normed_, rows, hidden_, eps_);
        project(layers_[index + 1], first, rows);
      });
    }
  }

 private:
  static int q_width(const DecoderLayer& layer) { return layer.attention->num_heads * layer.attention->head_dim; }
  static int chunk_rows(int rows) { return std::min(rows, kChunkRows); }
  static const T* norm(const void* weight) { return static_cast<const T*>(weight); }
  int64_t offset(int row) const { return int64_t(row) * hidden_; }

  template <class F>
  void for_chunks(F&& body) const {
    for (int first = 0; first < rows_; first += kChunkRows) body(first, std::min(kChunkRows, rows_ - first));
  }

  // Computes these rows of qkv_ from normed_.
  void project(const DecoderLayer& layer, int first, int rows) const {
    multiply(layer.qkv, normed_, qkv_ + int64_t(first) * layer.qkv.out, rows);
  }

  // Computes the MLP's output in branch_ from these rows of attended_, and adds the attention's output to the residual.
  void finish(const DecoderLayer& layer, int first, int rows) const {
    multiply(layer.output, attended_ + int64_t(first) * q_width(layer), branch_, rows);
    rms_norm<T>(branch_, x_ + offset(first), norm(layer.post_norm), normed_, rows, hidden_, eps_);
    multiply<T, T, Result::kGated>(layer.gate_up, normed_, activated_, rows);
    multiply(layer.down, activated_, branch_, rows);
  }

  const DecoderLayer* layers_;
  int num_layers_;
  const Step* const* steps_;
  T* x_;
  int rows_, hidden_;
  float eps_;
  T *qkv_, *attended_;                 // for all rows
  T *normed_, *branch_, *activated_;  // for one chunk
};

}  // namespace argosy
