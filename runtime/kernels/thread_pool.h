// A small persistent pool: one parallel region a step, with barriers inside. Waiting spins for a bounded
// time, then sleeps, so that an idle pool costs nothing and a busy neighbour on a core costs little.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "patience.h"

namespace nybble {

class ThreadPool {
  public:
    // `threads` counts the caller: 1 starts none. `yields`: a thread that waits in a step soon lets others
    // have its processor, at the price of its share of it. Where steps wait for a disk their threads are
    // often woken on one processor, and then wait for each other.
    explicit ThreadPool(int threads, bool yields = false);
    ~ThreadPool();
    ThreadPool(const ThreadPool&) = delete;
    ThreadPool& operator=(const ThreadPool&) = delete;

    int size() const { return threads_; }

    // Calls work(context, thread) for every thread, the caller as 0, and returns when all have. One caller at
    // a time. `running`: only for so many; the others sleep on.
    using Work = void (*)(void* context, int thread);
    void run(Work work, void* context, int running);
    void run(Work work, void* context) { run(work, context, threads_); }

    // Inside `run`: how many threads it was called for.
    int running() const { return running_; }

    // Inside `run`: returns when every thread has arrived.
    void barrier();

    // Of the last `run`: the seconds of all waits that did not end while a thread looked, added up.
    double seconds_asleep() const {
        return static_cast<double>(asleep_.load(std::memory_order_relaxed)) * 1e-9;
    }

  private:
    void start();
    void stop();
    void abandon();
    void loop(int thread, uint32_t seen);
    // One that does not run in a generation looks at nothing but its number: all else may be changing.
    void next_generation(int running);
    void wait_for_others(uint32_t phase);

    const int threads_;
    int running_;
    const bool yields_;
    int pid_ = 0;  // after fork the child has none of the threads and starts its own
    std::vector<std::thread> workers_;
    Work work_ = nullptr;
    void* context_ = nullptr;
    // Of runs; the lower half is how many threads run, 0 the end.
    alignas(64) std::atomic<uint32_t> generation_{0};
    alignas(64) std::atomic<uint32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) Patience patience_;
    std::atomic<int64_t> asleep_{0};  // nanoseconds
};

}  // namespace nybble
