#include "decode_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace nybble {

void DecodeRun::begin(const StepInput& first, int steps, std::vector<TokenRule> rules) {
    rules_ = std::move(rules);
    for (TokenRule& rule : rules_) rule.reserve(steps);
    const int groups = decoder_.config().num_groups, sequences = first.sequences;
    input_ = first;
    width_ = static_cast<size_t>(groups) * sequences;
    past_lens_.assign(first.past_lens, first.past_lens + sequences);
    slots_.resize(width_ * steps);
    std::copy_n(first.slot_mapping, width_, slots_.begin());
    int32_t* slot = slots_.data() + width_;
    for (int i = 1; i < steps; ++i) {
        const int32_t* table = first.block_table;
        for (int group = 0; group < groups; ++group) {
            for (int s = 0; s < sequences; ++s, table += first.max_blocks) {
                const int position = first.past_lens[s] + i;
                *slot++ = table[position / kPageTokens] * kPageTokens + position % kPageTokens;
            }
        }
    }
}

int DecodeRun::run(const Limits& limits, float* logits, int32_t* tokens) {
    const auto begin = std::chrono::steady_clock::now();
    const int sequences = input_.sequences;
    skipped_bytes_ = 0;
    for (int i = 0;; ++i, tokens += sequences) {
        if (i > 0) {
            input_.token_ids = tokens - sequences;
            input_.past_lens = past_lens_.data();
            input_.slot_mapping = slots(i);
            for (int32_t& past : past_lens_) ++past;
        }
        decoder_.step(input_, logits);
        skipped_bytes_ += decoder_.skipped_bytes();
        const bool ended = choose(logits, limits, tokens);
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        if (ended || i + 1 == limits.steps || passed.count() >= limits.seconds ||
            hurry_.load(std::memory_order_relaxed)) {
            return i + 1;
        }
    }
}

// Whether the run ends with these tokens.
bool DecodeRun::choose(float* logits, const Limits& limits, int32_t* tokens) {
    const int vocab_size = decoder_.config().vocab_size;
    bool ended = false;
    for (int s = 0; s < input_.sequences; ++s, logits += decoder_.logit_stride()) {
        const int32_t best = decoder_.best_tokens()[s];
        if (!rules_.empty()) {
            tokens[s] = chooser_.choose(rules_[s], logits, vocab_size, best);
        } else {
            tokens[s] = std::isfinite(logits[best]) ? best : RuleChooser::kNoNumbers;
        }
        ended = ended || tokens[s] < 0 ||
                std::find(limits.ends.begin(), limits.ends.end(), tokens[s]) != limits.ends.end();
    }
    return ended;
}

}  // namespace nybble
