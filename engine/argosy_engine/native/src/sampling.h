// Draws a token from each row of logits: temperature, min-p, top-k, top-p and an inverse CDF, without sorting the
// vocabulary. sample/torch_sampler.py is the reference in torch and documents each step.
//
// With top-k or top-p, tokens are ordered by descending logit, ties by id. Both keep the first tokens of this order, so
// it is enough to consider the tokens above a threshold, if all that are kept lie above it; otherwise the threshold is
// lowered. Sums are float64, and their order depends on the row alone.
#pragma once

#include <algorithm>
#include <vector>

#include "rows.h"

namespace argosy {

// Parallel arrays, one entry per row. Mirrored in library.py.
struct SamplingRows {
  const float* temperature;  // 0: greedy
  const float* top_p;        // 1: off
  const int64_t* top_k;      // 0: off
  const float* min_p;        // 0: off
  const double* uniform;     // [0, 1)
};

// A float64 sum of vectors of floats.
class Sum {
 public:
  ARGOSY_INLINE void add(vfloat v) {
    vhalf_float halves[2];
    memcpy(halves, &v, sizeof v);
    low_ += __builtin_convertvector(halves[0], vdouble);
    high_ += __builtin_convertvector(halves[1], vdouble);
  }

  double total() const {
    const vdouble both = low_ + high_;
    double sum = 0;
    for (int lane = 0; lane < kLanes / 2; ++lane) sum += both[lane];
    return sum;
  }

 private:
  typedef float vhalf_float __attribute__((vector_size(kLanes * 2)));
  typedef double vdouble __attribute__((vector_size(kLanes * 4)));
  vdouble low_{}, high_{};
};

struct Candidate {
  float logit;
  int32_t id;
  float weight;

  bool operator<(const Candidate& other) const {
    return logit > other.logit || (logit == other.logit && id < other.id);
  }
};

// Returns the first candidate, in order, at which the sum of the weights up to and including it is enough, or else the
// last one. Moves all candidates that precede it in order before it, and sets `sum` to that sum.
template <class F>
Candidate* find(Candidate* first, Candidate* last, double* sum, F&& is_enough) {
  double before = 0;
  while (last - first > 1) {
    Candidate* middle = first + (last - first) / 2;
    std::nth_element(first, middle, last);
    double upper = before;
    for (Candidate* at = first; at < middle; ++at) upper += at->weight;
    if (is_enough(upper)) {
      last = middle;
    } else {
      before = upper;
      first = middle;
    }
  }
  *sum = before + first->weight;
  return first;
}

template <class T>
class RowSampler {
 public:
  RowSampler(const T* logits, int width, float temperature, float min_p)
      : logits_(logits), width_(width), temperature_(broadcast(temperature)), min_p_(broadcast(min_p)) {
    vfloat best = broadcast(-__builtin_inff());
    each_vector(0, width, [&](int, vfloat logit) { best = max(logit, best); });
    best_ = broadcast(reduce_max(best)) / temperature_;
  }

  // Whether the best logit, over the temperature, is finite.
  bool has_choice() const { return __builtin_isfinite(best_[0]); }

  // Returns the first token, by id, at which the sum of the weights exceeds `uniform` times the total.
  int64_t draw(double uniform) const {
    static thread_local std::vector<double> sums;  // cumulative, at each block's end
    sums.clear();
    double total = 0;
    for (int start = 0; start < width_; start += kBlock) sums.push_back(total += block_sum(start));
    const double target = uniform * total;
    auto block = std::upper_bound(sums.begin(), sums.end(), target);
    if (block == sums.end()) block = std::lower_bound(sums.begin(), sums.end(), total);  // rounded up
    double sum = block == sums.begin() ? 0 : block[-1];
    const int start = int(block - sums.begin()) * kBlock;
    int64_t token = -1;
    bool is_found = false;
    each_vector(start, std::min(start + kBlock, width_), [&](int at, vfloat logit) {
      const vfloat weights = weight(distance(logit));
      for (int lane = 0; lane < kLanes && !is_found; ++lane) {
        if (!(weights[lane] > 0)) continue;
        token = at + lane;
        is_found = (sum += weights[lane]) > target;
      }
    });
    return token;
  }

  // The same in the order of the logits, over the first `top_k` tokens and the first `top_p` of their weight.
  int64_t draw_cut(int64_t top_k, float top_p, double uniform) const {
    static thread_local std::vector<Candidate> candidates;
    const bool has_top_k = top_k > 0 && top_k < width_;
    double mass = 0;
    if (!has_top_k)
      for (int start = 0; start < width_; start += kBlock) mass += block_sum(start);
    double collected = 0;
    for (float reach : {4.0f, 6.0f, 9.0f, 13.0f, 100.0f}) {  // weights of e^-87 and less are 0
      collected = collect(reach, &candidates);
      if (has_top_k ? int64_t(candidates.size()) >= top_k : collected >= top_p * mass) break;
    }
    Candidate* const first = candidates.data();
    Candidate* last = first + candidates.size();
    if (has_top_k) {
      if (last - first > top_k) {
        std::nth_element(first, first + top_k, last);
        last = first + top_k;
      }
      mass = 0;
      for (Candidate* at = first; at < last; ++at) mass += at->weight;
    }
    double kept = mass;
    if (top_p < 1.0f) {
      last = find(first, last, &kept, [&](double sum) { return sum >= top_p * mass * kEnough; }) + 1;
    }
    const double target = uniform * kept;
    double drawn;
    return find(first, last, &drawn, [&](double sum) { return sum > target; })->id;
  }

 private:
  static constexpr int kBlock = 1024;
  static constexpr double kEnough = 1 - 1e-6;  // of top-p: a sum that falls short by rounding is enough

  // Calls body(index of the first lane, logits); lanes at or beyond `end` are minus infinity.
  template <class F>
  ARGOSY_INLINE void each_vector(int begin, int end, F&& body) const {
    int i = begin;
    for (; i + kLanes <= end; i += kLanes) body(i, load(logits_ + i));
    if (i == end) return;
    float rest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) rest[lane] = i + lane < end ? to_float(logits_[i + lane]) : -__builtin_inff();
    body(i, load(rest));
  }

  // Difference to the best logit, 0 or below, in units of the temperature.
  ARGOSY_INLINE vfloat distance(vfloat logit) const { return logit / temperature_ - best_; }

  // Weight proportional to the probability: 1 for the best token, 0 for NaN and for tokens that min-p drops.
  ARGOSY_INLINE vfloat weight(vfloat distance) const {
    const vfloat value = exp(distance);
    return value >= min_p_ ? value : vfloat{};
  }

  double block_sum(int start) const {
    Sum sum;
    each_vector(start, std::min(start + kBlock, width_), [&](int, vfloat logit) { sum.add(weight(distance(logit))); });
    return sum.total();
  }

  // Collects all tokens with a positive weight within `reach` of the best, and returns the sum of their weights.
  double collect(float reach, std::vector<Candidate>* candidates) const {
    candidates->clear();
    double sum = 0;
    const vfloat lowest = broadcast(-reach);
    each_vector(0, width_, [&](int at, vfloat logit) {
      const vfloat distances = distance(logit);
      unsigned hits = bits(distances >= lowest);
      if (!hits) return;
      const vfloat weights = weight(distances);
      for (; hits; hits &= hits - 1) {
        const int lane = __builtin_ctz(hits);
        if (!(weights[lane] > 0)) continue;
        candidates->push_back({logit[lane], at + lane, weights[lane]});
        sum += weights[lane];
      }
    });
    return sum;
  }

  const T* logits_;
  int width_;
  vfloat temperature_, min_p_;
  vfloat best_;
};

// Draws one token per row. Greedy rows, and rows whose best logit is not finite, take the token with the highest logit.
template <class T>
void sample(const T* logits, const SamplingRows& of, int64_t* out, int rows, int width) {
  parallel_rows(rows, width, [&](int row) {
    const T* from = logits + int64_t(row) * width;
    if (of.temperature[row] > 0) {
      const RowSampler<T> sampler(from, width, of.temperature[row], of.min_p[row]);
      if (sampler.has_choice()) {
        const bool is_cut = of.top_p[row] < 1.0f || of.top_k[row] > 0;
        out[row] = is_cut ? sampler.draw_cut(of.top_k[row], of.top_p[row], of.uniform[row])
                          : sampler.draw(of.uniform[row]);
        return;
      }
    }
    out[row] = argmax_of(from, width);
  });
}

}  // namespace argosy
