// Parts of a file that are read again in every step, in one order and ahead of their use, into a ring of
// buffers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "read_part.h"
#include "stream_settings.h"

namespace nybble {

class RangeRing final : public ReadPart {
  public:
    RangeRing(const StreamSettings& settings, StreamTrouble& trouble);

    // Reading begins anew where a step does.
    void rewind();
    // A step begins, which uses all ranges, or only those of every step.
    void begin_step(bool all);

    bool may_read() override;
    ReadRequest take(uint32_t tag) override;
    void finish(uint32_t tag, bool current, const std::string& reason) override;

    // Of the next range that the step comes to: whether it is there, reads that have to end before, its name,
    // and why it cannot be read.
    bool is_ready() const { return acquired_ < issued_ && at_acquired().missing == 0; }
    size_t missing_reads() const;
    const std::string& name() const;
    const std::string& problem() const { return at_acquired().problem; }

    // It is in use; it is there.
    const uint8_t* acquire();
    // The one that has been in use for longest, until it is released.
    struct Memory {
        const uint8_t* data;
        size_t bytes;
    };
    Memory in_use() const;
    void release() { ++released_; }

  private:
    struct Slot {
        uint8_t* data = nullptr;
        size_t range = 0;
        size_t missing = 0;   // bytes of its range that have not been read
        int reads = 0;        // that have begun and not ended, those of before a failure included
        std::string problem;  // why its range cannot be read
    };
    struct Read {
        Slot* slot;
        size_t range;
        size_t bytes;
    };

    // The ranges that may be read of the step they are in: of one that has not begun, those that every step
    // uses.
    size_t end_of_step() const { return ahead_ ? settings_.every_step : step_end_; }
    void turn();
    const Slot& at_acquired() const { return slots_[acquired_ % slots_.size()]; }

    const StreamSettings& settings_;
    StreamTrouble& trouble_;
    ReadMemory memory_;
    std::vector<Slot> slots_;
    uint64_t issued_ = 0, acquired_ = 0, released_ = 0;  // ranges: read to the end or nearly so, in use, used
    size_t next_ = 0, taken_ = 0;                        // the range that is being read, and its bytes so far
    bool ahead_ = true;                                  // that range is of the step after this one
    size_t step_end_ = 0;                                // ranges that this step uses
    Read reads_[ReadQueue::kMost];                       // by tag
};

}  // namespace nybble
