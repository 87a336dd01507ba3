// What the new tokens of a step write: no slot twice, and no page by two sequences.
#pragma once

#include <cstdint>
#include <vector>

#include "layout.h"

namespace nybble {

class WrittenPages {
  public:
    enum class Conflict { kNone, kSlotTwice, kPageOfAnother };

    // Slots from now on are of `num_blocks` pages.
    void allocate(int num_blocks) { pages_.assign(num_blocks, Page{}); }

    // Begins another step or window group, which has written nothing.
    void begin() { ++current_; }

    // Notes that a sequence writes a slot, which is one of these pages.
    Conflict write(int32_t slot, int32_t sequence) {
        Page& page = pages_[slot / kPageTokens];
        if (page.written_in != current_) page = {current_, sequence, 0};
        const uint32_t bit = 1u << slot % kPageTokens;
        if (page.slots & bit) return Conflict::kSlotTwice;
        if (page.sequence != sequence) return Conflict::kPageOfAnother;
        page.slots |= bit;
        return Conflict::kNone;
    }

    // The sequence that wrote the page of a slot.
    int32_t writer(int32_t slot) const { return pages_[slot / kPageTokens].sequence; }

  private:
    struct Page {
        uint64_t written_in = 0;
        int32_t sequence = 0;
        uint32_t slots = 0;  // one bit each
    };

    std::vector<Page> pages_;
    uint64_t current_ = 0;
};

}  // namespace nybble
