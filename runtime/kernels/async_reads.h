// Reads that Linux has under way without a thread that waits for each: asynchronous I/O (man 2 io_submit),
// which containers allow where they do not allow io_uring. Only direct reads are asynchronous there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "direct_file.h"
#include "read_threads.h"

namespace nybble {

class AsyncReads {
  public:
    // Null where the system has none, or the file is not read directly. What the system cannot read without
    // waiting, or does not read to its end, is left to `others`.
    static std::unique_ptr<AsyncReads> open(const DirectFile& file, ReadThreads& others);
    ~AsyncReads();
    AsyncReads(const AsyncReads&) = delete;
    AsyncReads& operator=(const AsyncReads&) = delete;

    void start(const ReadRequest* requests, size_t count);
    // Writes the ends of reads and returns how many; waits up to so many seconds for the first `least`.
    size_t take(double seconds, size_t least, ReadEnd* ends);
    size_t under_way() const { return under_way_; }

  private:
    AsyncReads(const DirectFile& file, ReadThreads& others, uint64_t context)
        : file_(file), others_(others), context_(context) {}

    const DirectFile& file_;
    ReadThreads& others_;
    const uint64_t context_;
    ReadRequest requests_[kMostReads];  // by tag
    size_t under_way_ = 0;
    bool possible_ = true;
};

}  // namespace nybble
