// Decodes that follow one another without a return to the caller: each sequence's token is what was chosen
// from the logits of the step before. Every step is one of `Decoder::step`.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "decoder.h"
#include "step_input.h"
#include "token_rule.h"

namespace nybble {

class DecodeRun : RowWork {
  public:
    // How far a run goes at most.
    struct Limits {
        int steps;
        std::vector<int32_t> ends;  // it goes no further when a step has chosen one of these tokens
        double seconds;             // nor begins a step after so long
    };

    explicit DecodeRun(Decoder& decoder);

    // Takes the place of earlier input: `first` has one token and one row a sequence. Slots of the tokens
    // after the first are those that its block table has, which holds all `steps`. `rules` says how each
    // sequence's tokens are chosen; without any they are where the highest logits are, and `first` may ask
    // for these only.
    void begin(const StepInput& first, int steps, std::vector<TokenRule> rules = {});
    // The slots that step `i` of the run, and those after it, write: [steps][groups][sequences].
    const int32_t* slots(int i) const { return slots_.data() + width_ * i; }

    // Takes at least one step, and writes what each chose to `tokens`, [steps][sequences]: less than 0, as
    // `RuleChooser` has it, where a row leaves no token to choose, after which the run goes no further.
    // Returns how many steps there were. Throws what a step throws; the slots of all then hold anything.
    // Overwrites `logits`. Allocates nothing.
    int run(const Limits& limits, float* logits, int32_t* tokens);

    // Whether a run comes back after the step it is in. Of any thread.
    void hurry(bool wanted) { hurry_.store(wanted, std::memory_order_relaxed); }
    // Bytes of the head that the last run's steps did without, together.
    size_t skipped_bytes() const { return skipped_bytes_; }

  private:
    // Of a step with rules: each thread has rows of its own.
    void run_row(int thread, int row, float* logits, int32_t best) override;
    void take_best(const float* logits);
    bool ends(const Limits& limits) const;

    Decoder& decoder_;
    std::vector<RuleChooser> choosers_;  // [threads]
    std::vector<TokenRule> rules_;       // [sequences], or none
    int32_t* chosen_ = nullptr;          // of the step that runs, [sequences]
    StepInput input_{};
    size_t width_ = 0;  // groups times sequences
    std::vector<int32_t> past_lens_, slots_;
    std::atomic<bool> hurry_{false};
    size_t skipped_bytes_ = 0;
};

}  // namespace nybble
