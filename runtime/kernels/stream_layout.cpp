#include "stream_layout.h"

#include <algorithm>
#include <string>

#include "direct_file.h"

namespace nybble {
namespace {

int64_t aligned_down(int64_t offset) { return offset - offset % static_cast<int64_t>(kDirectAlignment); }

size_t aligned_up(size_t bytes) {
    return (bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

}  // namespace

size_t smallest_buffer(const PackedLinear& head) { return aligned_up(head.block_bytes() + kDirectAlignment); }

ExpertRange range_of_expert(const ExpertWeights& expert, const int64_t* tiles) {
    const int64_t begin = aligned_down(tiles[0]);
    const int64_t end = tiles[kExpertDown] + static_cast<int64_t>(expert.linears[kExpertDown].bytes());
    return {begin, aligned_up(static_cast<size_t>(end - begin))};
}

StreamSettings stream_weights(DecoderWeights& weights, const StreamPlaces& places, const StreamMemory& memory,
                              double timeout) {
    StreamSettings settings{};
    settings.buffers = memory.buffers;
    settings.buffer_bytes = memory.buffer_bytes;
    settings.timeout = timeout;
    for (const StreamPlaces::Experts& place : places.experts) {
        LayerWeights& layer = weights.layers[place.layer];
        settings.experts = layer.experts_by_use;
        settings.expert_slots = memory.expert_slots;
        settings.slot_bytes = memory.slot_bytes;
        settings.expert_ranges.resize(weights.layers.size() * settings.experts);
        for (int e = 0; e < layer.experts_by_use; ++e) {
            ExpertWeights& expert = layer.experts[e];
            const int64_t* tiles = place.tiles.data() + static_cast<size_t>(e) * kExpertLinears;
            const ExpertRange range = range_of_expert(expert, tiles);
            settings.expert_ranges[static_cast<size_t>(place.layer) * settings.experts + e] = range;
            for (int i = 0; i < kExpertLinears; ++i) {
                expert.linears[i].tiles = nullptr;
                expert.places[i] = static_cast<size_t>(tiles[i] - range.offset);
            }
        }
    }
    for (const StreamPlaces::Layer& place : places.layers) {
        LayerWeights& layer = weights.layers[place.layer];
        layer.streamed = true;
        const int64_t* tiles = place.tiles.data();
        for (int i = 0; i < layer.linear_count(); ++i) {
            if (layer.by_use(i)) continue;
            layer.linear(i).tiles = nullptr;
            layer.place(i) = static_cast<size_t>(*tiles++ - place.offset);
        }
        settings.ranges.push_back({place.offset, place.bytes, "layer " + std::to_string(place.layer)});
    }
    settings.every_step = settings.ranges.size();
    if (!places.head) return settings;

    weights.streamed_head = true;
    weights.embedding.tiles = weights.head.tiles = nullptr;
    settings.matrix = weights.embedding;
    settings.matrix_offset = places.embedding_tiles;
    const size_t tile_bytes = weights.head.tile_bytes();
    const int tiles = weights.head.tile_count(), blocks = weights.head.block_count();
    // Before a piece's first tile there may be nearly a whole unit of alignment.
    const int most = static_cast<int>((memory.buffer_bytes - kDirectAlignment) / weights.head.block_bytes());
    const int pieces = (blocks + most - 1) / most;
    for (int i = 0; i < pieces; ++i) {
        const auto begin_of = [&](int64_t piece) {
            return std::min(tiles, static_cast<int>(blocks * piece / pieces) * kBlockTiles);
        };
        const int first = begin_of(i), end = begin_of(i + 1);
        const int64_t begins = places.head_tiles + static_cast<int64_t>(tile_bytes) * first;
        const size_t place = static_cast<size_t>(begins - aligned_down(begins));
        HeadPiece piece{weights.head, first * kTileRows, place};
        piece.linear.rows = std::min(weights.head.rows, end * kTileRows) - piece.first_row;
        weights.head_pieces.push_back(piece);
        settings.ranges.push_back(
            {aligned_down(begins), aligned_up(place + tile_bytes * (end - first)), "the head"});
    }
    return settings;
}

}  // namespace nybble
