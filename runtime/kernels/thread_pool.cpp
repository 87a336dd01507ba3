#include "thread_pool.h"

#include <unistd.h>

#include <chrono>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace nybble {
namespace {

// How long a thread looks before it sleeps: longer than a phase of a step, and longer than the Python side
// between two steps, which takes most for many sequences; to be woken costs each step a twentieth. Measured
// by the clock: a pause takes 10 times longer on some CPUs than on others.
constexpr auto kSpinInStep = std::chrono::microseconds(200);
constexpr auto kSpinBetweenSteps = std::chrono::microseconds(1500);
// After which it lets others have the processor between two looks: the thread that it waits for may be
// waiting for this one, as threads do that were woken on one processor.
constexpr auto kSpinAlone = std::chrono::microseconds(5);
constexpr int kPausesPerLook = 64;  // between two looks at the clock
// Where so many waits in a row found the thread that they wait for without a processor, this one's may be
// what it lacks: the next ones soon sleep, and then another one looks for long again.
constexpr int kWaitsInVain = 4, kBriefWaits = 32;
constexpr auto kSpinBriefly = std::chrono::microseconds(5);

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// Whether it saw the value change before it slept.
bool wait_while(const std::atomic<uint32_t>& value, uint32_t old, std::chrono::microseconds spin,
                bool yields = false) {
    const auto begin = std::chrono::steady_clock::now();
    for (auto passed = begin - begin; passed < spin; passed = std::chrono::steady_clock::now() - begin) {
        if (yields && passed > kSpinAlone) std::this_thread::yield();
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (value.load(std::memory_order_acquire) != old) return true;
            pause();
        }
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    return false;
}

}  // namespace

ThreadPool::ThreadPool(int threads, bool yields) : threads_(threads), running_(threads), yields_(yields) {
    start();
}

ThreadPool::~ThreadPool() {
    if (pid_ == static_cast<int>(getpid())) {
        stop();
    } else {  // a forked child that never ran
        abandon();
    }
}

void ThreadPool::start() {
    abandon();
    stop_ = false;
    arrived_.store(0, std::memory_order_relaxed);
    const uint32_t seen = generation_.load(std::memory_order_relaxed);
    try {
        for (int thread = 1; thread < threads_; ++thread) {
            workers_.emplace_back([this, thread, seen] { loop(thread, seen); });
        }
    } catch (...) {  // the system has no more threads: those that run end before the others are reported
        stop();
        throw;
    }
    pid_ = static_cast<int>(getpid());
}

void ThreadPool::stop() {
    stop_ = true;
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
}

// After fork the handles are of the parent's threads, and a thread of this process may have got the same one:
// they are left as they are, neither joined nor detached.
void ThreadPool::abandon() {
    if (!workers_.empty()) new std::vector<std::thread>(std::move(workers_));
    workers_.clear();
}

void ThreadPool::loop(int thread, uint32_t seen) {
    for (;;) {
        wait_while(generation_, seen, crowded() ? kSpinBriefly : kSpinBetweenSteps);
        seen = generation_.load(std::memory_order_acquire);
        if (stop_) return;
        work_(context_, thread);
        barrier();
    }
}

void ThreadPool::run(Work work, void* context, bool alone) {
    running_ = alone ? 1 : threads_;
    if (running_ == 1) return work(context, 0);
    if (pid_ != static_cast<int>(getpid())) start();
    work_ = work;
    context_ = context;
    generation_.fetch_add(1);
    generation_.notify_all();
    work(context, 0);
    barrier();
}

void ThreadPool::barrier() {
    if (running_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == static_cast<uint32_t>(threads_)) {
        arrived_.store(0, std::memory_order_relaxed);
        // Sequentially consistent: were it only a release, the look for waiters in notify_all could come
        // before it, and a thread that goes to sleep in between would not be woken.
        phase_.store(phase + 1);
        phase_.notify_all();
    } else {
        wait_for_others(phase);
    }
}

// The counts are rough: several threads may wait.
void ThreadPool::wait_for_others(uint32_t phase) {
    const int brief = brief_waits_.load(std::memory_order_relaxed);
    if (brief > 0) {
        brief_waits_.store(brief - 1, std::memory_order_relaxed);
        wait_while(phase_, phase, kSpinBriefly);
        return;
    }
    const bool in_vain = !wait_while(phase_, phase, kSpinInStep, yields_);
    if (yields_) return;  // these wait for a disk
    const int before = waits_in_vain_.load(std::memory_order_relaxed);
    if (!in_vain) {
        if (before > 0) waits_in_vain_.store(0, std::memory_order_relaxed);
    } else if (before + 1 < kWaitsInVain) {
        waits_in_vain_.store(before + 1, std::memory_order_relaxed);
    } else {
        brief_waits_.store(kBriefWaits, std::memory_order_relaxed);
    }
}

}  // namespace nybble
