#include "token_rule.h"

#include <algorithm>
#include <cmath>

namespace nybble {
namespace {

struct Product {
    uint64_t high, low;
};

Product multiply(uint64_t a, uint64_t b) {
    __extension__ using Wide = unsigned __int128;
    const Wide product = static_cast<Wide>(a) * b;
    return {static_cast<uint64_t>(product >> 64), static_cast<uint64_t>(product)};
}

// In the order that `_changed` of runtime/sampler.py has.
void change(const TokenRule& rule, float* logits) {
    for (size_t i = 0; i < rule.biased.size(); ++i) logits[rule.biased[i]] += rule.bias[i];
    if (rule.penalizes_repetition()) {
        const float penalty = rule.repetition_penalty;
        for (int32_t token : rule.seen) {
            float& logit = logits[token];
            logit = logit < 0 ? logit * penalty : logit / penalty;
        }
    }
    if (rule.counts()) {
        for (size_t i = 0; i < rule.counted.size(); ++i) {
            float& logit = logits[rule.counted[i]];
            logit -= rule.frequency_penalty * rule.times[i];
            logit -= rule.presence_penalty;
        }
    }
}

}  // namespace

void TokenRule::reserve(size_t tokens) {
    seen.reserve(seen.size() + tokens);
    counted.reserve(counted.size() + tokens);
    times.reserve(times.size() + tokens);
}

void TokenRule::accept(int32_t token) {
    ++position;
    if (penalizes_repetition() && std::find(seen.begin(), seen.end(), token) == seen.end()) {
        seen.push_back(token);
    }
    if (!counts()) return;
    const auto place = std::find(counted.begin(), counted.end(), token);
    if (place != counted.end()) {
        ++times[place - counted.begin()];
    } else {
        counted.push_back(token);
        times.push_back(1);
    }
}

// Philox-4x64-10.
double uniform(uint64_t seed, uint64_t index, uint64_t position) {
    uint64_t a = 1, b = 0, c = index, d = position, key = seed, other = 0;
    for (int round = 0; round < 10; ++round) {
        const Product left = multiply(0xD2E7470EE14C6C93, a), right = multiply(0xCA5A826395121157, c);
        a = right.high ^ b ^ key;
        b = right.low;
        c = left.high ^ d ^ other;
        d = left.low;
        key += 0x9E3779B97F4A7C15;
        other += 0xBB67AE8584CAA73B;
    }
    return std::ldexp(static_cast<double>(a >> 11), -53);
}

int32_t RuleChooser::choose(TokenRule& rule, float* logits, int n, int32_t best) {
    if (!std::isfinite(logits[best])) return kNoNumbers;
    if (rule.changes_logits()) {
        change(rule, logits);
        best = kernels_.best_logit(logits, n);
        if (!std::isfinite(logits[best])) return kNoneLeft;
    }
    if (rule.temperature > 0) {
        const double number = uniform(rule.seed, rule.index, rule.position);
        best = sampler_.draw(logits, n, logits[best], rule.temperature, rule.filters, number);
    }
    rule.accept(best);
    return best;
}

}  // namespace nybble
