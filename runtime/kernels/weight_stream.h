// Weights that do not stay in memory: parts of a file that are read again in every step, in one order and
// ahead of their use, into a ring of buffers; single rows of a matrix; and experts of mixtures, which are
// read when they are chosen and stay as long as others are not chosen more. Nothing is read before the first
// step.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "expert_reads.h"
#include "row_reads.h"
#include "stream_settings.h"

namespace nybble {

// Why a step could not have its weights: the file, what was read of it, what happened.
struct StreamError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One thread calls everything but the constructor. After a failure everything returns null until the step's
// end, which throws; the next step begins anew.
class WeightStream {
  public:
    static constexpr int kRowsAtOnce = RowReads::kRowsAtOnce;

    // Reads from the file that `descriptor` has open, as a descriptor of its own. Throws std::system_error
    // and std::bad_alloc.
    WeightStream(int descriptor, const std::string& file, StreamSettings settings);
    // Does not wait long for a read that is stuck: the buffers are then kept until it returns.
    ~WeightStream();
    WeightStream(const WeightStream&) = delete;
    WeightStream& operator=(const WeightStream&) = delete;

    // `all`: whether the step uses all ranges, or only those of every step. `tokens`: what it has, after
    // which earlier choices of experts count less.
    void begin_step(bool all, int tokens = 1);
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

    // Experts of a layer. `expert_slots` is the slot of each, negative where it is not in memory. After
    // `begin_experts` each one that the layer needs is named, with how many tokens need it, those in memory
    // first. `acquire_experts` says how many more of them are there, in that order; with `wait` it waits for
    // one, and 0 is a failure. `expert(i)` is the i-th, until `release_experts`, which takes back all that
    // were acquired.
    const int32_t* expert_slots(int layer) const;
    void begin_experts(int layer);
    void need_expert(int expert, int tokens);
    int acquire_experts(bool wait);
    const uint8_t* expert(int i) const;
    void release_experts();
    const ExpertCounts& expert_counts() const;

  private:
    struct State;

    void after_fork();

    const StreamSettings settings_;
    std::unique_ptr<State> state_;
    pid_t pid_;
    bool in_step_ = false;
};

}  // namespace nybble
