// Reads of one file that are under way at once: by the system where it has asynchronous ones, else by
// threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "direct_file.h"
#include "read_threads.h"

namespace nybble {

class AsyncReads;

// One thread at a time calls it. It is left with no read under way, else its end waits for them.
class ReadQueue {
  public:
    static constexpr size_t kMost = kMostReads;

    explicit ReadQueue(const DirectFile& file);
    ~ReadQueue();
    ReadQueue(const ReadQueue&) = delete;
    ReadQueue& operator=(const ReadQueue&) = delete;

    // Begins so many reads, with which at most kMost are under way, and does not wait for the disk.
    void start(const ReadRequest* requests, size_t count);
    // Writes the ends of at most kMost reads and returns how many; waits up to so many seconds for the first
    // `least` of them, and may return with fewer.
    size_t take(double seconds, size_t least, ReadEnd* ends);
    size_t under_way() const { return under_way_; }

  private:
    size_t take_now(double seconds, size_t least, ReadEnd* ends);

    ReadThreads threads_;
    std::unique_ptr<AsyncReads> async_;  // null where there are none
    size_t under_way_ = 0;
};

}  // namespace nybble
