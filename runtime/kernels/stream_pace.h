// How many threads a step with streamed weights runs on. Where it waits for the disk, one computes what is
// read as fast as it comes, and more would only be woken for every layer to wait for each other.
#pragma once

#include "step_sizes.h"

namespace nybble {

class StreamPace {
  public:
    explicit StreamPace(int threads) : threads_(threads) {}

    // Whether a step of so many tokens is to run on one thread: as long as such steps wait for the disk.
    bool alone(int tokens) {
        if (threads_ == 1 || tokens > kFewStepTokens) return false;
        const Steps& steps = of(tokens);
        return steps.alone || steps.spare >= kStepsBetweenTrials;
    }

    // What such a step took: its seconds, and those of them in which it waited for the disk.
    void note(int tokens, bool alone, double seconds, double waited) {
        if (threads_ == 1 || tokens > kFewStepTokens || seconds <= 0) return;
        Steps& steps = of(tokens);
        const double share = waited / seconds, weight = alone == steps.ran_alone ? kWeight : 1.0;
        steps.waited += (share - steps.waited) * weight;
        steps.ran_alone = alone;
        if (alone) {
            steps.alone = steps.waited >= kEnoughWaiting;
            steps.spare = 0;
        } else {
            const bool may_do = (1 - steps.waited) * threads_ < kMayDo;
            steps.spare = may_do ? steps.spare + 1 : 0;
        }
    }

  private:
    static constexpr double kWeight = 0.25;  // of the last step among those before
    static constexpr double kEnoughWaiting = 0.1;
    // One thread may take this much of a step's time for what several did: woken late, they take longer.
    static constexpr double kMayDo = 1.5;
    static constexpr int kStepsBetweenTrials = 16;

    // Steps of about as many tokens.
    struct Steps {
        bool alone = true, ran_alone = false;
        double waited = 1;  // share of their time, smoothed
        int spare = 0;      // on all threads, one after the other, that one thread might do
    };

    Steps& of(int tokens) { return steps_[step_size(tokens)]; }

    const int threads_;
    Steps steps_[kStepSizes];
};

}  // namespace nybble
