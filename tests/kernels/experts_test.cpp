// A mixture of experts: near the same in double precision, the same bits beside any other tokens, and every
// token's rows where its experts' are.
#include "../../runtime/kernels/experts.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "../../runtime/kernels/expert_slots.h"
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

// A round has its groups' rows and pieces, in order, and all rounds have all of them.
void test_rounds(Random& random, ExpertRows& rows) {
    const int count = static_cast<int>(rows.groups().size());
    const auto check_pieces = [&](int pieces, auto piece_of, const char* fact) {
        int next = 0;
        for (int g = rows.round_begin(); g < rows.round_end(); ++g) {
            for (int i = 0; next < pieces && piece_of(next).group == &rows.groups()[g]; ++i, ++next) {
                check(piece_of(next).index == i, fact);
            }
        }
        check(next == pieces, fact);
        return pieces;
    };
    int down = rows.down_pieces(), gate_up = rows.gate_up_pieces(), blocks = rows.blocks();
    rows.begin_rounds();
    while (!rows.is_last_round()) {
        rows.next_round(rows.round_end() + 1 + random.below(count - rows.round_end()));
        int own_blocks = 0;
        for (int g = rows.round_begin(); g < rows.round_end(); ++g) {
            own_blocks += (rows.groups()[g].rows + kBlockTokens - 1) / kBlockTokens;
        }
        check(rows.blocks() == own_blocks, "a round has the blocks of its groups");
        down -= check_pieces(
            rows.down_pieces(), [&](int i) { return rows.down_piece(i); },
            "pieces of down follow each other");
        gate_up -= check_pieces(
            rows.gate_up_pieces(), [&](int i) { return rows.gate_up_piece(i); },
            "pieces of gate and up follow each other");
        blocks -=
            check_pieces(rows.blocks(), [&](int i) { return rows.block(i); }, "blocks follow each other");
    }
    check(down == 0 && gate_up == 0 && blocks == 0, "all are in some round");
}

// Which experts are in memory: any order of choices, with some slots held.
void test_slots(Random& random) {
    current_case() = "slots of experts";
    constexpr int kLayers = 3, kExperts = 7, kSlots = 5;
    ExpertSlots slots(kLayers, kExperts, kSlots);
    std::vector<int> in_slot(kSlots, -1);  // layer * kExperts + expert
    const auto check_table = [&] {
        for (int key = 0; key < kLayers * kExperts; ++key) {
            const auto found = std::find(in_slot.begin(), in_slot.end(), key);
            const int expected =
                found == in_slot.end() ? ExpertSlots::kNone : static_cast<int>(found - in_slot.begin());
            check(slots.of_layer(key / kExperts)[key % kExperts] == expected,
                  "an expert is where it was read to");
        }
    };
    for (int step = 0; step < 3000; ++step) {
        const int layer = random.below(kLayers);
        slots.age(1 + random.below(40));
        std::set<int> held;
        for (int i = 0; i < kExperts; ++i) {
            const int expert = random.below(kExperts), there = slots.of_layer(layer)[expert];
            slots.use(layer, expert, 1);
            if (there != ExpertSlots::kNone) {
                slots.hold(there);
                held.insert(there);
                continue;
            }
            const int slot = slots.take();
            check((slot == ExpertSlots::kNone) == (held.size() == kSlots),
                  "a slot is taken while one is free");
            if (slot == ExpertSlots::kNone) break;
            check(held.insert(slot).second, "what is held is not taken");
            in_slot[slot] = -1;
            check_table();
            if (random.below(4) == 0) continue;  // what could not be read
            slots.fill(slot, layer, expert);
            in_slot[slot] = layer * kExperts + expert;
            check_table();
        }
        for (int slot : held) slots.release(slot);
    }

    current_case() = "experts that are chosen most";
    ExpertSlots few(1, 10, 3);
    int reads = 0, hot_reads = 0;
    for (int step = 0; step < 500; ++step) {
        few.age(1);
        for (int expert : {0, 1, 2 + step % 8}) {
            few.use(0, expert, 1);
            if (const int there = few.of_layer(0)[expert]; there != ExpertSlots::kNone) {
                few.hold(there);
                few.release(there);
                continue;
            }
            const int slot = few.take();
            few.fill(slot, 0, expert);
            few.release(slot);
            ++reads;
            hot_reads += expert < 2;
        }
    }
    check(hot_reads == 2 && reads == 502, "what every token chooses is read once");
    for (int step = 0; step < 200; ++step) {
        few.age(1);
        for (int expert : {8, 9}) few.use(0, expert, 1);
    }
    for (int expert : {8, 9}) {
        if (few.of_layer(0)[expert] != ExpertSlots::kNone) continue;
        const int slot = few.take();
        few.fill(slot, 0, expert);
        few.release(slot);
    }
    check(few.of_layer(0)[0] == ExpertSlots::kNone || few.of_layer(0)[1] == ExpertSlots::kNone,
          "what is chosen no more makes room");
}

// Tokens with few different logits, so that many are equal.
void test_rows(const Kernels& kernels, Random& random) {
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
        std::vector<int32_t> slots;
        for (int e = 0; e < experts; ++e) slots.push_back(random.below(3) - 1);
        const bool in_order = random.below(2) == 0;
        rows.group(kernels, tokens, in_order ? nullptr : slots.data());
        std::set<const float*> outputs;
        std::vector<int> order;
        for (const ExpertGroup& group : rows.groups()) {
            const bool late = !in_order && group.expert < experts && slots[group.expert] < 0;
            order.push_back(group.expert == experts ? -1 : group.expert + late * experts);
            check(group.first_row % kBlockTokens == 0, "groups begin a block");
            for (int row = group.first_row; row < group.first_row + group.rows; ++row) {
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
        check(std::is_sorted(order.begin(), order.end()),
              "the shared expert comes first, then those with a slot, each ascending");
        check(rows.round_begin() == 0 && rows.is_last_round(), "without more all groups are one round");
        test_rounds(random, rows);
    }
}

}  // namespace

void test_experts(const Kernels& kernels, Results& results) {
    Random random(11);
    test_router(kernels, random, results);
    test_shares(kernels, random, results);
    test_sums(kernels, random, results);
    for (int i = 0; i < 10; ++i) test_rows(kernels, random);
    test_slots(random);
}

}  // namespace kernel_test
