// A phase's work, dealt to threads. Each begins with a contiguous share of its own, so that it reads memory
// in order, and then takes what the others have left.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

namespace nybble {

class SharedWork {
  public:
    explicit SharedWork(int threads) : taken_(threads) {}

    // Before a step, while no thread works.
    void reset() {
        for (Counter& counter : taken_) counter.value.store(0, std::memory_order_relaxed);
    }

    int threads() const { return static_cast<int>(taken_.size()); }

    // Called by every thread, calls function(item) once for each of `items`.
    template <typename Function>
    void run(int thread, int items, Function function) {
        run(thread, items, 1, [&](int item, int) { function(item); });
    }

    // Calls function(begin, end) for up to `grain` items at a time, which are of one share.
    template <typename Function>
    void run(int thread, int items, int grain, Function function) {
        for (int i = 0; i < threads(); ++i) {
            const int share = (thread + i) % threads(), first = share_begin(items, share);
            const int size = share_begin(items, share + 1) - first;
            for (int item; (item = take(share, grain)) < size;) {
                function(first + item, first + std::min(item + grain, size));
            }
        }
    }

    // The same where items begin in ascending order, the largest first.
    template <typename Function>
    void run_in_order(int items, Function function) {
        for (int item; (item = take(0, 1)) < items;) function(item);
    }

  private:
    int share_begin(int64_t items, int thread) const { return static_cast<int>(items * thread / threads()); }

    struct alignas(64) Counter {  // a cache line each
        std::atomic<int> value{0};
    };

    int take(int share, int items) { return taken_[share].value.fetch_add(items, std::memory_order_relaxed); }

    std::vector<Counter> taken_;
};

}  // namespace nybble
