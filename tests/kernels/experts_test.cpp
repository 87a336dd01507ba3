// A mixture of experts: near the same in double precision, the same bits beside any other tokens, and every
// token's rows where its experts' are.
#include "../../runtime/kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

void test_router(const Kernels& kernels, Random& random, Results& results) {
    constexpr int kTokens = 7, kColumns = 80, kExperts = 11, kStride = 16;
    current_case() = "router";
    const std::vector<float> x = random.uniforms(kTokens * kColumns),
                             router = random.uniforms(kExperts * kColumns);
    std::vector<float> logits(kTokens * kStride, 0.0f);
    kernels.router_logits(x.data(), kColumns, kTokens, router.data(), kColumns, kExperts, kColumns,
                          logits.data(), kStride);
    for (int t = 0; t < kTokens; ++t) {
        for (int e = 0; e < kExperts; ++e) {
            double expected = 0;
            for (int i = 0; i < kColumns; ++i) {
                expected += static_cast<double>(x[t * kColumns + i]) * router[e * kColumns + i];
            }
            check(std::fabs(logits[t * kStride + e] - expected) < 2e-6, "logits are products");
            float alone;
            kernels.router_logits(&x[t * kColumns], 0, 1, &router[e * kColumns], 0, 1, kColumns, &alone, 0);
            check(same_bits(&alone, &logits[t * kStride + e], 1),
                  "one alone has the bits of one beside others");
        }
    }
    results.add(logits);
}

void test_shares(const Kernels& kernels, Random& random, Results& results) {
    for (int experts : {1, 5, 16, 33}) {
        for (bool normalized : {false, true}) {
            current_case() = "shares of " + std::to_string(experts) + (normalized ? " that sum to 1" : "");
            const std::vector<float> logits = random.uniforms(experts, 9.0f);
            std::vector<float> given = logits, shares((experts + 1) / 2, NAN);
            given.resize(round_up(experts, 16), NAN);
            std::vector<int32_t> chosen;
            for (int e = 0; e < experts; e += 2) chosen.push_back(e);
            const int count = static_cast<int>(chosen.size());
            kernels.expert_shares(given.data(), experts, chosen.data(), count, normalized, shares.data());
            double all = 0, of_chosen = 0;
            for (int e = 0; e < experts; ++e) {
                all += std::exp(static_cast<double>(logits[e]));
                if (e % 2 == 0) of_chosen += std::exp(static_cast<double>(logits[e]));
            }
            for (int i = 0; i < count; ++i) {
                const double expected =
                    std::exp(static_cast<double>(logits[chosen[i]])) / (normalized ? of_chosen : all);
                check(std::fabs(shares[i] - expected) < 3e-6 * expected + 1e-30, "shares are a softmax's");
            }
            results.add(shares);
        }
    }
    current_case() = "shares of what is no number";
    std::vector<float> logits(16, 1.0f);
    logits[3] = NAN;
    const int32_t chosen[] = {0, 1};
    float shares[2];
    for (bool normalized : {false, true}) {
        kernels.expert_shares(logits.data(), 5, chosen, 2, normalized, shares);
        check(std::isnan(shares[0]) && std::isnan(shares[1]),
              "one logit that is no number spoils all shares");
    }
}

void test_sums(const Kernels& kernels, Random& random, Results& results) {
    current_case() = "sigmoid and weighted sum";
    std::vector<float> values;
    for (float x : {-100.0f, -5.0f, -0.3f, 0.0f, 0.3f, 5.0f, 100.0f}) {
        values.push_back(kernels.sigmoid(x));
        check(std::fabs(values.back() - 1 / (1 + std::exp(-static_cast<double>(x)))) < 3e-7, "a sigmoid");
    }
    check(std::isnan(kernels.sigmoid(NAN)), "what is no number stays so");
    results.add(values);
    constexpr int kLength = 48, kCount = 3;
    std::vector<std::vector<float>> rows;
    std::vector<const float*> pointers;
    for (int i = 0; i < kCount; ++i) rows.push_back(random.uniforms(kLength));
    for (const std::vector<float>& row : rows) pointers.push_back(row.data());
    const std::vector<float> shares = random.uniforms(kCount);
    std::vector<float> out(kLength, NAN);
    kernels.weighted_sum(pointers.data(), shares.data(), kCount, kLength, out.data());
    for (int i = 0; i < kLength; ++i) {
        float expected = rows[0][i] * shares[0];
        for (int r = 1; r < kCount; ++r) expected = std::fma(rows[r][i], shares[r], expected);
        check(same_bits(&expected, &out[i], 1), "rows are added in their order");
    }
    results.add(out);
}

DecoderConfig config_of(int experts, int per_token, int shared_size) {
    DecoderConfig config;
    config.hidden_size = 72;
    config.mixture = {experts, per_token, 40, shared_size, true};
    return config;
}

// Tokens with few different logits, so that many are equal.
void test_rows(Random& random) {
    for (int experts : {1, 3, 8, 20}) {
        const int per_token = 1 + random.below(experts), shared_size = random.below(2) == 0 ? 0 : 104;
        const int tokens = 1 + random.below(40);
        current_case() = std::to_string(tokens) + " tokens and " + std::to_string(experts) + " experts, " +
                         std::to_string(per_token) + " for each";
        ExpertRows rows(config_of(experts, per_token, shared_size), false);
        rows.reserve(tokens);
        for (int t = 0; t < tokens; ++t) {
            std::vector<float> logits;
            for (int e = 0; e < experts; ++e) logits.push_back(static_cast<float>(random.below(3)));
            std::copy(logits.begin(), logits.end(), rows.logits(t));
            rows.choose(t);
            std::vector<int32_t> order;
            for (int e = 0; e < experts; ++e) order.push_back(e);
            std::stable_sort(order.begin(), order.end(), [&](int a, int b) { return logits[a] > logits[b]; });
            order.resize(per_token);
            std::sort(order.begin(), order.end());
            if (shared_size > 0) order.push_back(experts);
            check(std::equal(order.begin(), order.end(), rows.experts(t)),
                  "the highest logits are chosen, of equal ones the first");
        }
        rows.group(tokens);
        std::set<const float*> outputs;
        int end = 0, last = -1;
        for (const ExpertGroup& group : rows.groups()) {
            check(group.expert > last && group.first_row >= end && group.first_row % kBlockTokens == 0,
                  "groups ascend and begin a block");
            last = group.expert;
            end = group.first_row + group.rows;
            for (int row = group.first_row; row < end; ++row) {
                check(&rows.group_of_block(row / kBlockTokens) == &group, "a block is one group's");
                const int t = rows.token_of_row(row);
                const int32_t* chosen = rows.experts(t);
                const int place =
                    static_cast<int>(std::find(chosen, chosen + rows.count(), group.expert) - chosen);
                check(place < rows.count(), "a row is of a token that chose the expert");
                std::vector<const float*> of_token(rows.count());
                rows.outputs_of(t, of_token.data());
                const float* output =
                    rows.output(group) + static_cast<size_t>(row - group.first_row) * rows.stride_of(group);
                check(of_token[place] == output, "a token's outputs are where its experts' rows are");
                check(outputs.insert(output).second, "rows lie apart");
            }
        }
        check(static_cast<int>(outputs.size()) == tokens * rows.count(), "every token has all its rows");
        int pieces = 0;
        for (const ExpertGroup& group : rows.groups()) {
            for (int i = 0; pieces < rows.down_pieces() && rows.down_piece(pieces).group == &group;
                 ++i, ++pieces) {
                check(rows.down_piece(pieces).index == i, "pieces of a group follow each other");
            }
        }
        check(pieces == rows.down_pieces(), "all pieces are found");
    }
}

}  // namespace

void test_experts(const Kernels& kernels, Results& results) {
    Random random(11);
    test_router(kernels, random, results);
    test_shares(kernels, random, results);
    test_sums(kernels, random, results);
    for (int i = 0; i < 10; ++i) test_rows(random);
}

}  // namespace kernel_test
