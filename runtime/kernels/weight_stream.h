// Weights that do not stay in memory: parts of a file that are read again in every step, in one order and
// ahead of their use, into a ring of buffers; and single rows of a matrix. Nothing is read before the first
// step.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "layout.h"

namespace nybble {

// Why a step could not have its weights: the file, what was read of it, what happened.
struct StreamError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct FileRange {
    int64_t offset;  // a multiple of kDirectAlignment, as `bytes` is
    size_t bytes;
    std::string name;  // for messages
};

struct StreamSettings {
    std::vector<FileRange> ranges;  // in the order of use
    size_t every_step;              // so many of them, the first, are used in every step; the others in some
    // A matrix of which rows are read; of none where it has no rows. Its tiles are at this offset.
    PackedLinear matrix;
    int64_t matrix_offset;
    int buffers;
    size_t buffer_bytes;
    double timeout;  // seconds without a read that ends, after which a step fails
};

// One thread calls everything but the constructor. After a failure everything returns null until the step's
// end, which throws; the next step begins anew.
class WeightStream {
  public:
    static constexpr int kRowsAtOnce = 64;

    // Reads from the file that `descriptor` has open, as a descriptor of its own. Throws std::system_error
    // and std::bad_alloc.
    WeightStream(int descriptor, const std::string& file, StreamSettings settings);
    // Does not wait long for a read that is stuck: the buffers are then kept until it returns.
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    // `all`: whether the step uses all ranges, or only those of every step.
    void begin_step(bool all);
    void end_step();
    // Seconds that the last step's thread has slept until reads had ended.
    double seconds_waited() const;

    // Looks which reads have ended, and begins those for which there is room: between the parts of a step's
    // work, so that the disk always has some.
    void advance();

    // The next range, when it has been read; it stays until it is released. Ranges are released in order;
    // what is read into a released buffer begins with the next `advance` or wait.
    const uint8_t* acquire();
    void release();

    // The named rows of the matrix, at most kRowsAtOnce, as tiles of one row; valid until the next call.
    const uint8_t* rows(const int32_t* ids, int count);

  private:
    struct State;

    void after_fork();

    const StreamSettings settings_;
    std::unique_ptr<State> state_;
    pid_t pid_;
    bool in_step_ = false;
};

}  // namespace nybble
