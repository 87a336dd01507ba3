#include "token_sampler.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>

#include "float_control.h"

namespace nybble {
namespace {

constexpr float kSmallest = std::numeric_limits<float>::min();  // smaller weights are 0

// The largest number from the smallest weight to 1 for which `enough` holds; it holds for all smaller ones as
// well, and where it holds for none the result is the smallest. Positive floats are in the order of their
// bits.
template <typename Enough>
float largest_with(uint32_t step, const Enough& enough) {
    uint32_t holds = std::bit_cast<uint32_t>(kSmallest) / step;
    uint32_t fails = std::bit_cast<uint32_t>(1.0f) / step + 1;
    while (fails - holds > 1) {
        const uint32_t middle = holds + (fails - holds) / 2;
        (enough(std::bit_cast<float>(middle * step)) ? holds : fails) = middle;
    }
    return std::bit_cast<float>(holds * step);
}

constexpr uint32_t kPowersOfTwo = 1u << 23, kEveryFloat = 1;
constexpr float kMostlyEnough = 0x1p-12f;  // of the top's weight: mostly some hundreds of tokens weigh more
constexpr int kMostToKeep = 4096;          // of more it takes longer to keep the right ones than to bisect

}  // namespace

void TokenSampler::reserve(int n) {
    const size_t padded = static_cast<size_t>(n) + 16;
    if (left_.size() >= padded) return;
    weights_.resize(padded);
    sums_.resize(padded / kSumBlock + 1);
    left_weights_.resize(padded);
    largest_.resize(padded);
    left_.resize(padded);
}

int TokenSampler::draw(const float* logits, int n, float top, double temperature, const Filters& filters,
                       double number) {
    const FloatControl control;
    reserve(n);
    // Infinity times 0 is no number: the factor stays finite, so that the top's weight is 1.
    constexpr double kLog2E = 1.4426950408889634, kMostFactor = 1e30;
    const float factor = static_cast<float>(std::min(kLog2E / temperature, kMostFactor));
    kernels_.weigh_logits(logits, n, top, factor, weights_.data(), sums_.data());
    const bool counted = filters.top_k > 0 && filters.top_k < n;
    if (!counted && filters.top_p >= 1 && filters.min_p <= 0) return draw_from_all(n, number);

    // First a few more tokens than are left: those of a weight that is mostly small enough, or by looking at
    // all of them seven times more.
    double total = 0;
    for (int block = 0; block * kSumBlock < n; ++block) total += sums_[block];
    float least = static_cast<float>(filters.min_p);
    if (counted || filters.top_p < 1) {
        const double enough = 0.5 * (1 + filters.top_p) * total;
        const auto from = [&](float w) { return kernels_.weights_from(weights_.data(), n, w); };
        const auto is_enough = [&](const WeightTotal& total) {
            return counted ? total.count >= filters.top_k : total.sum >= enough;
        };
        const WeightTotal likely = from(kMostlyEnough);
        least = is_enough(likely) && likely.count <= kMostToKeep
                    ? kMostlyEnough
                    : largest_with(kPowersOfTwo, [&](float w) { return is_enough(from(w)); });
    }
    constexpr float kMargin = 0.999f;  // the order of weights is not exactly that of logits
    count_ = kernels_.collect_from(weights_.data(), n, std::max(kSmallest, kMargin * least), left_.data());
    for (int i = 0; i < count_; ++i) left_weights_[i] = weights_[left_[i]];
    std::fill_n(left_weights_.begin() + count_, 16, 0.0f);

    if (counted) {
        keep_largest(logits, filters.top_k);
        total = left_total();
    }
    if (filters.top_p < 1) keep_share(filters.top_p * total);
    if (filters.min_p > 0) {
        keep([&](int i) { return left_weights_[i] >= static_cast<float>(filters.min_p); });
    }
    return draw_from_left(number);
}

// Keeps the i-th of those that are left where holds(i).
template <typename Holds>
void TokenSampler::keep(const Holds& holds) {
    int kept = 0;
    for (int i = 0; i < count_; ++i) {
        if (!holds(i)) continue;
        left_[kept] = left_[i];
        left_weights_[kept++] = left_weights_[i];
    }
    std::fill_n(left_weights_.begin() + kept, 16, 0.0f);
    count_ = kept;
}

// Those tied with the last stay.
void TokenSampler::keep_largest(const float* logits, int count) {
    if (count_ <= count) return;
    for (int i = 0; i < count_; ++i) largest_[i] = logits[left_[i]];
    const auto last = largest_.begin() + count - 1;
    std::nth_element(largest_.begin(), last, largest_.begin() + count_, std::greater<float>());
    keep([&](int i) { return logits[left_[i]] >= *last; });
}

// The fewest of the largest weights that sum to `enough`; of those tied at the edge the lowest ids.
void TokenSampler::keep_share(double enough) {
    const auto from = [&](float w) { return kernels_.weights_from(left_weights_.data(), count_, w); };
    const float edge = largest_with(kEveryFloat, [&](float w) { return from(w).sum >= enough; });
    const WeightTotal above = from(std::nextafter(edge, 2.0f));
    double tied = std::max(1.0, std::ceil((enough - above.sum) / edge));
    keep([&](int i) { return left_weights_[i] > edge || (left_weights_[i] == edge && tied-- > 0); });
}

double TokenSampler::left_total() const {
    double total = 0;
    for (int i = 0; i < count_; ++i) total += left_weights_[i];
    return total;
}

int TokenSampler::draw_from_left(double number) const {
    const double target = number * left_total();
    double sum = 0;
    for (int i = 0; i < count_; ++i) {
        sum += left_weights_[i];
        if (sum > target) return left_[i];
    }
    return left_[count_ - 1];  // where rounding made the target the sum of all
}

int TokenSampler::draw_from_all(int n, double number) const {
    const int blocks = (n + kSumBlock - 1) / kSumBlock;
    double total = 0, before = 0;
    for (int block = 0; block < blocks; ++block) total += sums_[block];
    const double target = number * total;
    int block = 0, last = 0;  // the last that has a weight
    for (; block < blocks; ++block) {
        if (sums_[block] > 0) last = block;
        if (before + sums_[block] > target) break;
        before += sums_[block];
    }
    if (block == blocks) before = total - sums_[block = last];
    // The sum of a block in another order is not quite the same: its share counts.
    const int begin = block * kSumBlock, end = std::min(n, begin + kSumBlock);
    double inside = 0, sum = 0;
    for (int i = begin; i < end; ++i) inside += weights_[i];
    const double past = (target - before) / sums_[block] * inside;
    int token = begin;
    for (int i = begin; i < end; ++i) {
        if (weights_[i] == 0) continue;
        token = i;
        sum += weights_[i];
        if (sum > past) break;
    }
    return token;
}

}  // namespace nybble
