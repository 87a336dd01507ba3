// How the tokens of an answer are chosen one after another, as runtime/sampler.py does it: from each row of
// logits, changed by what the tokens before it were.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels.h"
#include "token_sampler.h"

namespace nybble {

// Of one answer, on its way: `RuleChooser` moves it on. No token is in a list twice.
struct TokenRule {
    double temperature;  // 0: the highest logit's token
    Filters filters;
    uint64_t seed, index, position;  // the random number's; `position` is the next token's
    float repetition_penalty, frequency_penalty, presence_penalty;
    std::vector<int32_t> biased, seen, counted;  // tokens that a bias, repetition, and the other two change
    std::vector<float> bias, times;              // of each that is biased, and counted

    bool changes_logits() const { return !biased.empty() || penalizes_repetition() || counts(); }
    bool penalizes_repetition() const { return repetition_penalty != 1; }
    bool counts() const { return frequency_penalty != 0 || presence_penalty != 0; }
    // Room for so many more tokens.
    void reserve(size_t tokens);
    // Takes the token as the answer's next.
    void accept(int32_t token);
};

// The random number of a token, in [0, 1): `uniform` of runtime/sampler.py.
double uniform(uint64_t seed, uint64_t index, uint64_t position);

// One caller at a time.
class RuleChooser {
  public:
    static constexpr int32_t kNoNumbers = -1;  // a row whose highest logit is not finite
    static constexpr int32_t kNoneLeft = -2;   // one of which changes left no finite logit

    explicit RuleChooser(const Kernels& kernels) : kernels_(kernels), sampler_(kernels) {}

    // Room for rows of `n` logits: to choose from such allocates nothing.
    void reserve(int n) { sampler_.reserve(n); }
    // The next token by `rule`, or one of the above, from `logits` [n], which are overwritten; `best` is
    // where they are highest.
    int32_t choose(TokenRule& rule, float* logits, int n, int32_t best);

  private:
    const Kernels& kernels_;
    TokenSampler sampler_;
};

}  // namespace nybble
