// How long threads that wait for each other look before they sleep. Where some waits in a row found the
// thread that they wait for without a processor, theirs may be what it lacks: the next ones soon sleep, and
// then one looks for long again. Of all a pool's threads together, so that the counts are rough.
#pragma once

#include <atomic>

namespace nybble {

class Patience {
  public:
    static constexpr int kWaitsInVain = 4, kBriefWaits = 32;

    // Whether waits are brief.
    bool brief() const { return brief_.load(std::memory_order_relaxed) > 0; }

    // The same of the wait that begins, which is one less of those.
    bool begin() {
        const int left = brief_.load(std::memory_order_relaxed);
        if (left > 0) brief_.store(left - 1, std::memory_order_relaxed);
        return left > 0;
    }

    // That a wait which wasn't brief ended asleep, or not.
    void note(bool asleep) {
        const int before = in_vain_.load(std::memory_order_relaxed);
        if (!asleep) {
            if (before > 0) in_vain_.store(0, std::memory_order_relaxed);
        } else if (before + 1 < kWaitsInVain) {
            in_vain_.store(before + 1, std::memory_order_relaxed);
        } else {
            brief_.store(kBriefWaits, std::memory_order_relaxed);
        }
    }

  private:
    std::atomic<int> in_vain_{0};  // the last waits in a row
    std::atomic<int> brief_{0};    // waits that are to come
};

}  // namespace nybble
