#include "read_threads.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

namespace nybble {

// While one waits for a processor, the read of the other keeps the disk busy.
constexpr size_t kThreads = 2;

ReadThreads::~ReadThreads() {
    {
        const std::lock_guard lock(mutex_);
        stop_ = true;
        work_.notify_all();
    }
    for (std::thread& thread : threads_) thread.join();
}

void ReadThreads::start(const ReadRequest& request) {
    std::string problem = start_threads();
    ++under_way_;
    const std::lock_guard lock(mutex_);
    if (!problem.empty()) {
        ended_[ended_count_++] = {request.tag, std::move(problem)};
        return;
    }
    waiting_[(first_ + waiting_count_++) % kMostReads] = request;
    work_.notify_one();
}

std::string ReadThreads::start_threads() {
    try {
        while (threads_.size() < kThreads) threads_.emplace_back([this] { read(); });
    } catch (const std::system_error& error) {
        if (threads_.empty()) return std::string("no thread to read with: ") + error.what();
    }
    return {};
}

size_t ReadThreads::take(double seconds, size_t least, ReadEnd* ends) {
    std::unique_lock lock(mutex_);
    const auto enough = [&] { return ended_count_ >= std::min(least, under_way_); };
    if (seconds > 0) done_.wait_for(lock, std::chrono::duration<double>(seconds), enough);
    const size_t count = std::exchange(ended_count_, 0);
    for (size_t i = 0; i < count; ++i) ends[i] = std::exchange(ended_[i], {});
    under_way_ -= count;
    return count;
}

void ReadThreads::read() {
    std::unique_lock lock(mutex_);
    for (;;) {
        work_.wait(lock, [this] { return stop_ || waiting_count_ > 0; });
        if (stop_) return;
        const ReadRequest request = waiting_[first_];
        first_ = (first_ + 1) % kMostReads;
        --waiting_count_;
        lock.unlock();
        std::string problem = file_.read(request.offset, request.bytes, request.into);
        lock.lock();
        ended_[ended_count_++] = {request.tag, std::move(problem)};
        done_.notify_one();
    }
}

}  // namespace nybble
