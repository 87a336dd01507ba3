#include "read_queue.h"

#include <algorithm>

#include "async_reads.h"

namespace nybble {

// A wait where both the system and threads have reads: each is looked at in turn.
constexpr double kOneLook = 1e-3;  // seconds

ReadQueue::ReadQueue(const DirectFile& file) : threads_(file), async_(AsyncReads::open(file, threads_)) {}

ReadQueue::~ReadQueue() {
    ReadEnd ends[kMost];
    while (under_way_ > 0) take(1.0, 1, ends);
}

void ReadQueue::start(const ReadRequest* requests, size_t count) {
    under_way_ += count;
    if (async_ != nullptr) return async_->start(requests, count);
    for (size_t i = 0; i < count; ++i) threads_.start(requests[i]);
}

size_t ReadQueue::take(double seconds, size_t least, ReadEnd* ends) {
    size_t count = 0;
    for (double left = seconds; count == 0 && under_way_ > 0;) {
        const bool both = async_ != nullptr && async_->under_way() > 0 && threads_.under_way() > 0;
        const double slice = both ? std::min(left, kOneLook) : left;
        count = take_now(slice, least, ends);
        left -= slice;
        if (left <= 0) break;
    }
    under_way_ -= count;
    return count;
}

size_t ReadQueue::take_now(double seconds, size_t least, ReadEnd* ends) {
    size_t count = 0;
    if (async_ != nullptr && async_->under_way() > 0) {
        const bool both = threads_.under_way() > 0;
        count = async_->take(both ? 0.0 : seconds, least, ends);
        if (!both) seconds = 0;
    }
    if (threads_.under_way() > 0) count += threads_.take(count > 0 ? 0.0 : seconds, least, ends + count);
    return count;
}

}  // namespace nybble
