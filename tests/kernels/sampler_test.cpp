// Choosing a token: the one that a plain computation in double precision chooses.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "../../runtime/kernels/token_rule.h"
#include "../../runtime/kernels/token_sampler.h"
#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

// Tokens that the filters leave and their weights, ids ascending; `least_gap` becomes the least relative
// distance of any decision from its edge.
struct Left {
    std::vector<int> ids;
    std::vector<double> weights;
};

Left filtered(const std::vector<float>& logits, double temperature, const Filters& filters,
              double* least_gap) {
    const int n = static_cast<int>(logits.size());
    const float top = *std::max_element(logits.begin(), logits.end());
    const auto weight = [&](int i) { return std::exp((static_cast<double>(logits[i]) - top) / temperature); };
    std::vector<int> order(n);
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return logits[a] != logits[b] ? logits[a] > logits[b] : a < b; });
    if (filters.top_k > 0 && filters.top_k < n) {
        int count = filters.top_k;
        while (count < n && logits[order[count]] == logits[order[filters.top_k - 1]]) ++count;
        order.resize(count);
    }
    *least_gap = 1;
    if (filters.top_p < 1) {
        double total = 0, sum = 0;
        for (int id : order) total += weight(id);
        size_t count = 0;
        while (count < order.size() && sum < filters.top_p * total) {
            sum += weight(order[count++]);
            *least_gap = std::min(*least_gap, std::fabs(sum / total - filters.top_p));
        }
        order.resize(count);
    }
    if (filters.min_p > 0) {
        std::erase_if(order, [&](int id) { return weight(id) < filters.min_p; });
    }
    Left left;
    std::sort(order.begin(), order.end());
    for (int id : order) {
        left.ids.push_back(id);
        left.weights.push_back(weight(id));
    }
    return left;
}

// Ties, rows that fill no lane, infinities, and what is no number.
void check_best(const Kernels& kernels, Random& random) {
    for (int n : {1, 15, 16, 511, 512, 515, 2000}) {
        for (int round = 0; round < 60; ++round) {
            current_case() = "the best of " + std::to_string(n) + " logits";
            std::vector<float> logits = random.uniforms(n, 4.0f);
            if (round % 2 == 0) {
                for (float& x : logits) x = std::round(x);
            }
            if (round % 5 == 0) logits[random.below(n)] = HUGE_VALF;
            if (round % 7 == 0) std::fill(logits.begin(), logits.end(), -HUGE_VALF);
            if (round % 3 == 0) logits[random.below(n)] = NAN;
            const auto none = [](float x) { return std::isnan(x); };
            auto expected = std::find_if(logits.begin(), logits.end(), none);
            if (expected == logits.end()) expected = std::max_element(logits.begin(), logits.end());
            check(kernels.best_logit(logits.data(), n) == expected - logits.begin(),
                  "it is the first of the highest, and what is no number is higher");
        }
    }
}

void check_uniform() {
    constexpr uint64_t kMost = ~uint64_t{0};
    check(uniform(1, 0, 0) == 0x1.36da89edd58a0p-2, "as numpy.random.Philox has it");
    check(uniform(kMost, 3, 4096) == 0x1.a6d71ea950ce2p-1, "as numpy.random.Philox has it");
    check(uniform(0x0123456789abcdef, kMost, uint64_t{1} << 40) == 0x1.63cc39bfb1d48p-3,
          "as numpy.random.Philox has it");
}

}  // namespace

void test_sampler(const Kernels& kernels, Results& results) {
    Random random(6);
    check_best(kernels, random);
    check_uniform();
    TokenSampler sampler(kernels);
    constexpr Filters kFilters[] = {{0, 1, 0},   {1, 1, 0},    {7, 1, 0},    {5000, 1, 0},    {0, 0.9, 0},
                                    {0, 0.3, 0}, {0, 0.99, 0}, {0, 1, 0.05}, {40, 0.95, 0.1}, {40, 0.5, 0}};
    for (int n : {1, 16, 515, 2000}) {
        for (const double temperature : {0.05, 0.8, 2.0}) {
            for (const Filters& filters : kFilters) {
                current_case() = std::to_string(n) + " logits, temperature " + std::to_string(temperature) +
                                 ", " + std::to_string(filters.top_k) + ", " + std::to_string(filters.top_p) +
                                 ", " + std::to_string(filters.min_p);
                std::vector<float> logits = random.uniforms(n, 8.0f), drawn;
                // Ties, and tokens that are banned.
                for (float& x : logits) {
                    if (random.below(3) == 0) x = std::round(x);
                    if (random.below(20) == 0) x = -HUGE_VALF;
                }
                // At times one token weighs much and all others little.
                if (random.below(3) == 0) {
                    for (float& x : logits) x = 8.5f - static_cast<float>(temperature) * (9 - x / 16);
                }
                logits[random.below(n)] = 8.5f;
                double gap;
                const Left left = filtered(logits, temperature, filters, &gap);
                double total = 0;
                for (double w : left.weights) total += w;
                for (int draw = 0; draw < 20; ++draw) {
                    const double number = draw == 0 ? 0 : (random.next() >> 1) * 0x1p-31;
                    const int token = sampler.draw(logits.data(), n, 8.5f, temperature, filters, number);
                    drawn.push_back(static_cast<float>(token));
                    double sum = 0, distance = 1;
                    int expected = -1;
                    for (size_t i = 0; i < left.ids.size(); ++i) {
                        sum += left.weights[i] / total;
                        distance = std::min(distance, std::fabs(sum - number));
                        if (expected < 0 && sum > number) expected = left.ids[i];
                    }
                    // Where rounding may decide, any is right that is there.
                    if (gap > 1e-5 && distance > 1e-5) check(token == expected, "the token at that number");
                    check(logits[token] > -HUGE_VALF, "a token that has a weight");
                }
                results.add(drawn);
            }
        }
    }
}

}  // namespace kernel_test
