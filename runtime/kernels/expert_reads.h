// Experts of mixtures that are read when a layer's tokens have chosen them, into slots that they keep as long
// as others are not chosen more.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "expert_slots.h"
#include "read_part.h"
#include "stream_settings.h"

namespace nybble {

// Since the stream began: experts that a layer of a step needed, those of them that were read, and their
// bytes.
struct ExpertCounts {
    uint64_t needed = 0, read = 0, bytes = 0;
};

class ExpertReads final : public ReadPart {
  public:
    ExpertReads(const StreamSettings& settings, StreamTrouble& trouble);

    void rewind();
    // After so many tokens earlier choices count less.
    void age(int tokens) { slots_.age(tokens); }

    // The slot of each of a layer's experts, negative where it is not in memory.
    const int32_t* of_layer(int layer) const { return slots_.of_layer(layer); }
    // A layer begins, and its experts are named, with how many tokens need each, those in memory first.
    void begin(int layer);
    void need(int expert, int tokens);

    bool may_read() override;
    ReadRequest take(uint32_t tag) override;
    void finish(uint32_t tag, bool current, const std::string& reason) override;

    // Whether all that were named are in use, or have been.
    bool all_acquired() const { return acquired_ == needed_.size(); }
    // Of the next of them: whether it is there, reads that have to end before, its name.
    bool is_ready() const { return needed_[acquired_].missing == 0; }
    size_t missing_reads() const;
    std::string name() const { return name_of(needed_[acquired_]); }

    // Takes those that are there, in the order in which they were named; how many.
    int acquire();
    const uint8_t* expert(int i) const { return data_of(needed_[i].slot); }
    // None that was acquired is in use any more.
    void release();
    const ExpertCounts& counts() const { return counts_; }

  private:
    struct Needed {
        int expert;
        int slot;
        size_t missing;  // bytes that have not been read
    };
    struct Read {
        size_t needed;  // which of them
        int slot;
        size_t bytes;
    };

    void clear();
    const ExpertRange& range_of(const Needed& expert) const {
        return settings_.expert_ranges[static_cast<size_t>(layer_) * settings_.experts + expert.expert];
    }
    uint8_t* data_of(int slot) const { return memory_.data() + settings_.slot_bytes * slot; }
    std::string name_of(const Needed& expert) const;

    const StreamSettings& settings_;
    StreamTrouble& trouble_;
    ReadMemory memory_;
    ExpertSlots slots_;
    std::vector<int> slot_reads_;  // into each slot, that have begun and not ended
    int layer_ = 0;                // whose experts are needed
    std::vector<Needed> needed_;
    size_t taken_ = 0, bytes_taken_ = 0;  // the one that is being read, and its bytes so far
    size_t acquired_ = 0, released_ = 0;
    ExpertCounts counts_;
    Read reads_[ReadQueue::kMost];  // by tag
};

}  // namespace nybble
