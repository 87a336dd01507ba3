// What of a decoder's weights is streamed, and in which ranges of the file it is read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "decoder_weights.h"
#include "weight_stream.h"

namespace nybble {

// Where streamed weights lie in the file, in bytes from its beginning.
struct StreamPlaces {
    struct Layer {
        int layer;
        int64_t offset;              // of its section
        size_t bytes;                // and so many of it, from its beginning
        std::vector<int64_t> tiles;  // of each linear layer but those of experts that are read when chosen
    };
    std::vector<Layer> layers;  // ascending
    struct Experts {
        int layer;
        std::vector<int64_t> tiles;  // of each expert's linear layers, which follow each other
    };
    std::vector<Experts> experts;  // of layers whose `experts_by_use` says how many
    bool head = false;
    int64_t embedding_tiles = 0, head_tiles = 0;
};

// The memory that streamed weights are read into.
struct StreamMemory {
    int buffers;
    size_t buffer_bytes;
    int expert_slots = 0;
    size_t slot_bytes = 0;
};

// Where an expert is read from whose linear layers' tiles are at these places in the file.
ExpertRange range_of_expert(const ExpertWeights& expert, const int64_t* tiles);

// Bytes of a buffer that holds a tile of the head wherever in the file it lies.
size_t smallest_buffer(const PackedLinear& head);

// The settings of a stream of these weights, which are changed to what streamed ones are. The head is cut
// into pieces of whole tiles, about equal, that fit a buffer.
StreamSettings stream_weights(DecoderWeights& weights, const StreamPlaces& places, const StreamMemory& memory,
                              double timeout);

}  // namespace nybble
