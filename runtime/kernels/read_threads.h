// Reads of one file by threads, which start with the first of them and sleep when there is none.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "direct_file.h"

namespace nybble {

constexpr size_t kMostReads = 16;  // under way at once

struct ReadRequest {
    uint32_t tag;  // under kMostReads, of no other read that is under way
    int64_t offset;
    size_t bytes;
    uint8_t* into;  // offset, bytes and address are multiples of kDirectAlignment
};

struct ReadEnd {
    uint32_t tag = 0;
    std::string problem;  // nothing where all was read
};

// One thread calls it.
class ReadThreads {
  public:
    explicit ReadThreads(const DirectFile& file) : file_(file) {}
    // Waits for the reads that have begun.
    ~ReadThreads();
    ReadThreads(const ReadThreads&) = delete;
    ReadThreads& operator=(const ReadThreads&) = delete;

    // Where the system gives no thread the read ends with that problem.
    void start(const ReadRequest& request);
    // Writes the ends of reads and returns how many; waits up to so many seconds for the first `least`.
    size_t take(double seconds, size_t least, ReadEnd* ends);
    size_t under_way() const { return under_way_; }

  private:
    void read();
    // Those that are not there yet; one is enough. What is wrong where there is none.
    std::string start_threads();

    const DirectFile& file_;
    std::vector<std::thread> threads_;
    size_t under_way_ = 0;

    std::mutex mutex_;  // guards what follows
    std::condition_variable work_, done_;
    ReadRequest waiting_[kMostReads];
    size_t first_ = 0, waiting_count_ = 0;
    ReadEnd ended_[kMostReads];
    size_t ended_count_ = 0;
    bool stop_ = false;
};

}  // namespace nybble
