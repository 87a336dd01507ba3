// From a row of logits to a token, as runtime/sampler.py does it in numpy: looking at the whole vocabulary is
// most of the work of choosing one, and numpy looks a dozen times.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"

namespace nybble {

// What is left of the vocabulary; `top_k` 0, `top_p` 1 and `min_p` 0 leave all of it.
struct Filters {
    int top_k;
    double top_p;
    double min_p;
};

// Chooses the same token in every instruction set. One caller at a time.
class TokenSampler {
  public:
    explicit TokenSampler(const Kernels& kernels) : kernels_(kernels) {}

    // Room for rows of `n` logits: to draw from such allocates nothing.
    void reserve(int n);

    // The token at `number`, in [0, 1), of the distribution over `logits` [n], in ascending order of ids.
    // `top` is the largest logit.
    int draw(const float* logits, int n, float top, double temperature, const Filters& filters,
             double number);

  private:
    template <typename Holds>
    void keep(const Holds& holds);
    void keep_largest(const float* logits, int count);
    void keep_share(double enough);
    double left_total() const;
    int draw_from_left(double number) const;
    int draw_from_all(int n, double number) const;

    const Kernels& kernels_;
    std::vector<float> weights_;  // of all tokens, and their sums by blocks
    std::vector<double> sums_;
    // Tokens that are left, ascending, and their weights, filled with zeros to a multiple of 16.
    std::vector<int32_t> left_;
    std::vector<float> left_weights_, largest_;
    int count_ = 0;
};

}  // namespace nybble
