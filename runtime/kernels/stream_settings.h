// What a stream of weights reads, and the memory that it has for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "layout.h"

namespace nybble {

struct FileRange {
    int64_t offset;  // a multiple of kDirectAlignment, as `bytes` is
    size_t bytes;
    std::string name;  // for messages
};

// Where an expert is read from; of no bytes where it is not streamed.
struct ExpertRange {
    int64_t offset = 0;
    size_t bytes = 0;
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
    // Of each layer so many experts, one after the other, and the slots that they are read into.
    std::vector<ExpertRange> expert_ranges;
    int experts = 0;
    int expert_slots = 0;
    size_t slot_bytes = 0;
};

}  // namespace nybble
