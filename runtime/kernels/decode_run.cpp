#include "decode_run.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

namespace nybble {

DecodeRun::DecodeRun(Decoder& decoder)
    : decoder_(decoder), choosers_(decoder.threads(), RuleChooser(decoder.kernels())) {}

void DecodeRun::begin(const StepInput& first, int steps, std::vector<TokenRule> rules) {
    rules_ = std::move(rules);
    // As many threads choose as there are rows.
    for (size_t i = 0; i < std::min(rules_.size(), choosers_.size()); ++i) {
        choosers_[i].reserve(decoder_.config().vocab_size);
    }
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
        chosen_ = tokens;
        decoder_.step(input_, logits, rules_.empty() ? nullptr : this);
        if (rules_.empty()) take_best(logits);
        skipped_bytes_ += decoder_.skipped_bytes();
        const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
        if (ends(limits) || i + 1 == limits.steps || passed.count() >= limits.seconds ||
            hurry_.load(std::memory_order_relaxed)) {
            return i + 1;
        }
    }
}

void DecodeRun::run_row(int thread, int row, float* logits, int32_t best) {
    chosen_[row] = choosers_[thread].choose(rules_[row], logits, decoder_.config().vocab_size, best);
}

void DecodeRun::take_best(const float* logits) {
    for (int s = 0; s < input_.sequences; ++s, logits += decoder_.logit_stride()) {
        const int32_t best = decoder_.best_tokens()[s];
        chosen_[s] = std::isfinite(logits[best]) ? best : RuleChooser::kNoNumbers;
    }
}

// Whether the run goes no further than the step that was taken.
bool DecodeRun::ends(const Limits& limits) const {
    return std::any_of(chosen_, chosen_ + input_.sequences, [&](int32_t token) {
        return token < 0 || std::find(limits.ends.begin(), limits.ends.end(), token) != limits.ends.end();
    });
}

}  // namespace nybble
