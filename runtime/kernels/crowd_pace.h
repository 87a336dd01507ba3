// How many threads a step of few tokens runs on while others want the processors. Every thread has to come to
// every barrier: one that has no processor for a while holds up all, who would have done its share sooner. So
// where waits for such take much of a step, some are tried on one thread less, and where some are to spare,
// now and then on one more; what is faster stays.
#pragma once

#include <algorithm>

#include "step_sizes.h"

namespace nybble {

class CrowdPace {
  public:
    explicit CrowdPace(int threads) : threads_(threads) {
        for (Steps& steps : steps_) steps.usual = threads;
    }

    // Of the next step of so many tokens.
    int threads(int tokens) const {
        if (tokens > kFewStepTokens) return threads_;
        const Steps& steps = steps_[step_size(tokens)];
        return steps.tried > 0 ? steps.tried : steps.usual;
    }

    // What that step took, and for how much of it a thread slept, waiting for others; all threads together.
    void note(int tokens, double seconds, double asleep) {
        if (threads_ == 1 || tokens > kFewStepTokens || seconds <= 0) return;
        Steps& steps = steps_[step_size(tokens)];
        if (steps.tried > 0) {
            steps.trial_seconds += seconds / kTrialSteps;
            if (++steps.trial_steps == kTrialSteps) steps.decide();
            return;
        }
        steps.seconds += (seconds - steps.seconds) * (steps.seconds == 0 ? 1.0 : kWeight);
        steps.asleep += (asleep / seconds - steps.asleep) * kWeight;
        if (steps.rest > 0) {
            --steps.rest;
        } else if (steps.usual > 1 && steps.asleep > kCrowded) {
            steps.attempt(steps.usual - 1);
        } else if (steps.usual < threads_) {
            steps.attempt(steps.usual + 1);
        }
    }

  private:
    static constexpr double kWeight = 0.125;  // of the last step among those before
    static constexpr double kCrowded = 0.25;  // of a step's time: no one step comes to that
    static constexpr double kFaster = 0.95;
    static constexpr int kTrialSteps = 3, kRest = 16, kLongestRest = 256;

    // Steps of about as many tokens.
    struct Steps {
        int usual = 1;          // threads
        double seconds = 0;     // of a usual step, smoothed
        double asleep = 0;      // share of it
        int rest = 0;           // usual steps before a trial
        int next_rest = kRest;  // after one that was no gain
        int tried = 0;          // threads of the trial that is going on
        int trial_steps = 0;
        double trial_seconds = 0;

        void attempt(int threads) {
            tried = threads;
            trial_steps = 0;
            trial_seconds = 0;
        }
        void decide() {
            if (trial_seconds < seconds * kFaster) {
                usual = tried;
                seconds = asleep = 0;
                rest = next_rest = kRest;
            } else {
                rest = next_rest;
                next_rest = std::min(2 * next_rest, kLongestRest);
            }
            tried = 0;
        }
    };

    const int threads_;
    Steps steps_[kStepSizes];
};

}  // namespace nybble
