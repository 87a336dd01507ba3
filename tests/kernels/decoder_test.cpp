// A whole small decoder: the same bits however its tokens are run, and no allocation in a step.
#include <algorithm>
#include <cmath>
#include <thread>

#include "../../runtime/kernels/decode_run.h"
#include "check.h"
#include "decoder_model.h"

namespace kernel_test {
namespace {

// Every sequence in random chunks beside the others, each against its logits when it ran alone at once.
void check_batches(Session& session, Random& random, const std::vector<std::vector<float>>& whole) {
    int done[kSequences] = {};
    for (bool left = true; left;) {
        std::vector<Chunk> chunks;
        left = false;
        for (int s = 0; s < kSequences; ++s) {
            const int length = static_cast<int>(whole[s].size() / session.stride());
            const int most = random.below(3) == 0 ? 1 : random.below(2) == 0 ? 9 : 70;
            const int count = std::min(length - done[s], 1 + random.below(most));
            left = left || done[s] < length;
            if (count > 0 && random.below(4) > 0) chunks.push_back({s, done[s], count});
        }
        std::reverse(chunks.begin(), chunks.end());
        const std::vector<float> logits = session.run(chunks);
        const float* at = logits.data();
        for (const Chunk& chunk : chunks) {
            const size_t n = chunk.count * session.stride();
            check(same_bits(at, whole[chunk.sequence].data() + chunk.begin * session.stride(), n),
                  "chunks in a batch give the bits of the whole alone");
            at += n;
            done[chunk.sequence] += chunk.count;
        }
    }
}

// Sequences that share a segment read it together when they decode.
void check_shared(Session& session, Random& random) {
    constexpr int kCount = 12;
    session.run({{0, 0, kSegmentTokens + 7}});
    int begin[kSequences];
    std::vector<std::vector<float>> alone;
    for (int s = 0; s < kSequences; ++s) {
        session.share(0, s, kSegmentTokens / kPageTokens);
        begin[s] = s == 0 ? kSegmentTokens + 7 : kSegmentTokens;
        alone.push_back(session.run({{s, begin[s], kCount}}));
    }
    int done[kSequences] = {};
    for (int step = 0; step < 2 * kCount; ++step) {
        std::vector<Chunk> chunks;
        for (int s = 0; s < kSequences; ++s) {
            if (done[s] < kCount && random.below(4) > 0) chunks.push_back({s, begin[s] + done[s], 1});
        }
        if (chunks.empty()) continue;
        const std::vector<float> logits = session.run(chunks);
        const float* at = logits.data();
        for (const Chunk& chunk : chunks) {
            check(same_bits(at, alone[chunk.sequence].data() + done[chunk.sequence]++ * session.stride(),
                            session.stride()),
                  "pages read for several sequences at once give the bits of one alone");
            at += session.stride();
        }
    }
}

// Two decoders of one process in threads of their own.
void check_together(const Model& model, const Kernels& kernels,
                    const std::vector<std::vector<float>>& whole) {
    const auto steps = [&](int sequence) {
        Session session(model, kernels, 3, KvType::kInt16, 20 + sequence);
        const int length = static_cast<int>(whole[sequence].size() / session.stride());
        for (int t = 0; t < length; ++t) {
            check(same_bits(session.run({{sequence, t, 1}}).data(),
                            whole[sequence].data() + t * session.stride(), session.stride()),
                  "a decoder beside another gives the bits of one alone");
        }
    };
    std::thread other(steps, 1);
    steps(3);
    other.join();
}

// The highest logit alone is where all logits have it, with the same bits.
void check_best(const Model& model, const Kernels& kernels, KvType type, const std::vector<float>& whole) {
    Session session(model, kernels, 2, type, 11);
    const size_t stride = session.stride();
    session.run({{0, 0, 30}});
    session.ask_for_best(true);
    for (int t = 30; t < 60; ++t) {
        const std::vector<float> logits = session.run({{0, t, 1}});
        const float* expected = whole.data() + t * stride;
        const int best = kernels.best_logit(expected, model.config.vocab_size);
        check(session.decoder().best_tokens() == std::vector<int32_t>{best}, "the best token is that of all");
        check(same_bits(&logits[best], expected + best, 1), "the highest logit has the bits of any step");
    }
}

void check_allocations(Session& session) {
    session.decoder().reserve(64, kSequences, 64);
    std::vector<Chunk> prompts = {{0, 0, 24}, {1, 0, 30}, {2, 0, 9}, {3, 0, 1}};
    session.prepare(prompts);
    {
        const AllocationCount allocations;
        session.step();
        check(allocations.count() == 0, "a prefill of reserved size allocates nothing");
    }
    for (Chunk& chunk : prompts) chunk = {chunk.sequence, chunk.count, 1};
    session.prepare(prompts);
    {
        const AllocationCount allocations;
        session.step();
        check(allocations.count() == 0, "a decode allocates nothing");
    }
    session.ask_for_best(true);
    session.prepare({{0, 25, 1}});
    {
        const AllocationCount allocations;
        session.step();
        check(allocations.count() == 0, "a decode that asks for the best token allocates nothing");
    }
    session.ask_for_best(false);
    session.prepare({{0, 26, 200}});
    const AllocationCount allocations;
    session.step();
    check(allocations.count() > 0, "a step over what was reserved allocates, and that is counted");
}

// Of every kind: the highest, drawn, and both after changes that depend on the tokens before.
std::vector<TokenRule> make_rules() {
    const TokenRule plain{0, {0, 1, 0}, 7, 0, 3, 1, 0, 0, {}, {}, {}, {}, {}};
    std::vector<TokenRule> rules(kSequences, plain);
    for (int s = 1; s < kSequences; ++s) rules[s].temperature = s;
    rules[2].filters = {9, 0.8, 0.01};
    rules[0].repetition_penalty = rules[2].repetition_penalty = 1.3f;
    rules[2].seen = {1, 5};
    rules[3].frequency_penalty = 0.5f;
    rules[3].biased = {4};
    rules[3].bias = {2.0f};
    return rules;
}

// Decodes that follow one another in a call choose what as many calls do, and allocate nothing.
void check_run(Session& session, const std::vector<TokenRule>& rules) {
    constexpr int kSteps = 5;
    std::vector<Chunk> chunks = {{0, 0, 13}, {1, 0, 30}, {2, 0, 9}, {3, 0, 47}};
    session.run(chunks);
    session.ask_for_best(rules.empty());
    const auto prepare = [&] {
        for (Chunk& chunk : chunks) chunk = {chunk.sequence, chunk.begin + chunk.count, 1};
        session.prepare(chunks);
    };
    prepare();
    Decoder& decoder = session.decoder();
    DecodeRun run(decoder);
    const DecodeRun::Limits limits{kSteps, {}, HUGE_VAL};
    std::vector<int32_t> tokens(kSteps * kSequences);
    run.begin(session.input(), kSteps, rules);
    {
        const AllocationCount allocations;
        check(run.run(limits, session.logits(), tokens.data()) == kSteps, "as many steps as were asked for");
        check(allocations.count() == 0, "a run of decodes allocates nothing");
    }
    RuleChooser chooser(decoder.kernels());
    std::vector<TokenRule> moving = rules;
    const int32_t* chosen = tokens.data();
    for (int i = 0; i < kSteps; ++i, chosen += kSequences) {
        if (i > 0) prepare();
        StepInput input = session.input();
        if (i > 0) input.token_ids = chosen - kSequences;
        check(std::equal(input.slot_mapping, input.slot_mapping + kGroups * kSequences, run.slots(i)),
              "a run writes the slots that its pages have");
        decoder.step(input, session.logits());
        for (int s = 0; s < kSequences; ++s) {
            const int32_t best = decoder.best_tokens()[s];
            float* logits = session.logits() + s * session.stride();
            const int32_t token =
                rules.empty() ? best : chooser.choose(moving[s], logits, decoder.config().vocab_size, best);
            check(chosen[s] == token, "a run chooses what calls of a step choose");
        }
    }
    session.ask_for_best(false);
}

}  // namespace

void test_decoder(const Kernels& kernels, Results& results) {
    constexpr int kLengths[kSequences] = {280, 40, 17, 70};
    for (bool capped : {false, true}) {
        Random random(capped ? 5 : 4);
        const Model model = make_model(random, capped);
        for (KvType type : {KvType::kF32, KvType::kF16, KvType::kInt8, KvType::kInt16}) {
            if (capped && type == KvType::kF32) continue;
            current_case() = std::string("decoder") + (capped ? " with every switch" : "") + ", cache type " +
                             std::to_string(static_cast<int>(type));
            std::vector<std::vector<float>> whole;
            Session first(model, kernels, 1, type, 1);
            for (int s = 0; s < kSequences; ++s) whole.push_back(first.run({{s, 0, kLengths[s]}}));
            for (float x : whole[0]) check(std::isfinite(x), "logits are finite");
            // Every number of threads for one of the cache types, one number for the others.
            const bool all = type == KvType::kInt16 && !capped;
            for (int threads = 1; threads <= 4; ++threads) {
                if (!all && threads != 2 + capped) continue;
                Session session(model, kernels, threads, type, 1 + threads);
                check_batches(session, random, whole);
            }
            // One by one: from token 256 on, a row's segments are computed apart.
            Session single(model, kernels, 4, type, 9);
            single.run({{0, 0, 250}});
            for (int t = 250; t < kLengths[0]; ++t) {
                check(same_bits(single.run({{0, t, 1}}).data(), whole[0].data() + t * single.stride(),
                                single.stride()),
                      "a token alone gives the bits of the whole");
            }
            check_best(model, kernels, type, whole[0]);
            Session shared(model, kernels, 3, type, 7);
            check_shared(shared, random);
            if (all) check_together(model, kernels, whole);
            for (const std::vector<float>& logits : whole) results.add(logits);
        }
        current_case() = "allocations";
        for (int threads : {1, 3}) {
            Session session(model, kernels, threads, KvType::kInt16, 1);
            check_allocations(session);
            Session runs(model, kernels, threads, KvType::kInt8, 2);
            check_run(runs, {});
            check_run(runs, make_rules());
        }
    }
}

}  // namespace kernel_test
