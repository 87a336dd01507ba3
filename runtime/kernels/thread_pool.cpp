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
// Where others want the processors (patience.h).
constexpr auto kSpinBriefly = std::chrono::microseconds(5);
constexpr uint32_t kOneRun = 1 << 16;  // of `generation_`

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

// How long it waited where it did not see the value change before it slept; else nothing.
std::chrono::nanoseconds wait_while(const std::atomic<uint32_t>& value, uint32_t old,
                                    std::chrono::microseconds spin, bool yields = false) {
    const auto begin = std::chrono::steady_clock::now();
    for (auto passed = begin - begin; passed < spin; passed = std::chrono::steady_clock::now() - begin) {
        if (yields && passed > kSpinAlone) std::this_thread::yield();
        for (int i = 0; i < kPausesPerLook; ++i) {
            if (value.load(std::memory_order_acquire) != old) return {};
            pause();
        }
    }
    while (value.load(std::memory_order_acquire) == old) value.wait(old, std::memory_order_acquire);
    return std::chrono::steady_clock::now() - begin;
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
    next_generation(0);
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
    bool ran = true;
    for (;;) {
        wait_while(generation_, seen, patience_.brief() || !ran ? kSpinBriefly : kSpinBetweenSteps);
        seen = generation_.load(std::memory_order_acquire);
        const int running = static_cast<int>(seen % kOneRun);
        if (running == 0) return;
        ran = thread < running;
        if (!ran) continue;
        work_(context_, thread);
        barrier();
    }
}

void ThreadPool::run(Work work, void* context, int running) {
    running_ = running;
    asleep_.store(0, std::memory_order_relaxed);
    if (running_ == 1) return work(context, 0);
    if (pid_ != static_cast<int>(getpid())) start();
    work_ = work;
    context_ = context;
    next_generation(running_);
    work(context, 0);
    barrier();
}

void ThreadPool::next_generation(int running) {
    const uint32_t runs = generation_.load(std::memory_order_relaxed) / kOneRun;
    generation_.store((runs + 1) * kOneRun + static_cast<uint32_t>(running));
    generation_.notify_all();
}

void ThreadPool::barrier() {
    const auto running = static_cast<uint32_t>(running_);  // not to be looked at after this one's arrival
    if (running == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == running) {
        arrived_.store(0, std::memory_order_relaxed);
        // Sequentially consistent: were it only a release, the look for waiters in notify_all could come
        // before it, and a thread that goes to sleep in between would not be woken.
        phase_.store(phase + 1);
        phase_.notify_all();
    } else {
        wait_for_others(phase);
    }
}

void ThreadPool::wait_for_others(uint32_t phase) {
    const bool brief = !yields_ && patience_.begin();
    const auto asleep = wait_while(phase_, phase, brief ? kSpinBriefly : kSpinInStep, yields_);
    if (asleep.count() > 0) asleep_.fetch_add(asleep.count(), std::memory_order_relaxed);
    // Threads that yield wait for a disk as well, which is no sign of others.
    if (!yields_ && !brief) patience_.note(asleep.count() > 0);
}

}  // namespace nybble
