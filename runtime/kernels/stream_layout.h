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
        int64_t offset;  // of its section
        size_t bytes;
        std::vector<int64_t> tiles;  // of each linear layer
    };
    std::vector<Layer> layers;  // ascending
    bool head = false;
    int64_t embedding_tiles = 0, head_tiles = 0;
};

// Bytes of a buffer that holds a tile of the head wherever in the file it lies.
size_t smallest_buffer(const PackedLinear& head);

// The settings of a stream of these weights, which are changed to what streamed ones are. The head is cut
// into pieces of whole tiles, about equal, that fit a buffer.
StreamSettings stream_weights(DecoderWeights& weights, const StreamPlaces& places, int buffers,
                              size_t buffer_bytes, double timeout);

}  // namespace nybble
