#include "head_search.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>

namespace nybble {
namespace {

constexpr int kSearchTiles = 64;  // as many as `reaching_tiles` looks at together
// What is taken for a lower half, which is 0 to 15, and how far that is off at most. A sixteenth of it, times
// the sum of activations, is rounded: that is off by a half of 16.
constexpr float kMiddle = 7.5f, kRounding = 8.0f;
// Of the lower halves' slices: above the first, searching takes longer than computing all; above the second a
// search computes what is left to be looked at.
constexpr float kWorthwhile = 0.5f, kMostRead = 0.6f;
constexpr int kPausedSteps = 64;
constexpr float kLargestScale = 65504;  // an f16

}  // namespace

HeadSearch::HeadSearch(const Kernels& kernels, const PackedLinear& head, int threads)
    : kernels_(kernels), head_(head), upper_(head.upper_halves()), own_(threads) {
    const size_t slices = head.slices(), groups = head.groups();
    coarse_.allocate(threads * slices * kActivationBytes);
    bounds_.allocate(threads * groups * sizeof(float));
    slices_.allocate(threads * slices * sizeof(HeadSlice));
}

bool HeadSearch::begin() {
    if (paused_ > 0) return --paused_, false;
    if (searched_) {
        const float all = static_cast<float>(head_.tile_count()) * static_cast<float>(head_.slices());
        share_ += (static_cast<float>(slices_read()) / all - share_) / 8;
        searched_ = false;
        if (share_ > kWorthwhile) {
            share_ = 0;
            paused_ = kPausedSteps - 1;
            return false;
        }
    }
    searched_ = true;
    std::fill(own_.begin(), own_.end(), Own{{-kInfinity, -1}, {}, 0});
    least_.store(-kInfinity, std::memory_order_relaxed);
    return true;
}

// A weight is its scale times 16 u + l - 128, u and l its halves. With kMiddle for l that is 16 times
// u - 8 + kMiddle / 16: a weight of 4 bits, where sums start elsewhere and activations have 16 times the
// scale.
bool HeadSearch::prepare(int thread, Activations input) {
    const int slices = head_.slices(), per_group = head_.slices_per_group;
    const uint8_t* from = input.data;
    uint8_t* to = coarse(thread).data;
    float* bounds = this->bounds(thread);
    HeadSlice* out = this->slices(thread);
    std::fill_n(bounds, head_.groups(), 0.0f);
    // For each slice, sums in float32 are off by less than 2^-17 of the bounds.
    const float slack = 1.0f + std::ldexp(static_cast<float>(slices), -17);
    float total = 0;
    for (int s = 0; s < slices; ++s, from += kActivationBytes, to += kActivationBytes) {
        const auto get = [&](int field, auto* value) { std::memcpy(value, from + field, sizeof *value); };
        const auto put = [&](int field, auto value) { std::memcpy(to + field, &value, sizeof value); };
        const int8_t* q = reinterpret_cast<const int8_t*>(from);
        float scale, offset;
        int32_t minus_sum, start, magnitude = 0;
        get(kActivationScales, &scale);
        get(kActivationOffsets, &offset);
        get(kActivationMinusSums, &minus_sum);
        get(kActivationStarts8, &start);
        for (int k = 0; k < kSlice; ++k) magnitude += std::abs(q[k]);
        const float of_middle = -kMiddle / 16 * static_cast<float>(minus_sum);
        const auto middle = static_cast<int32_t>(std::nearbyint(of_middle));
        std::memcpy(to, from, kSlice);
        put(kActivationScales, 16 * scale);
        put(kActivationOffsets, 16 * offset);
        put(kActivationStarts8, start + middle);
        const float bound = scale * (kMiddle * static_cast<float>(magnitude) + kRounding);
        bounds[s / per_group] += bound * slack;
        total += 16 * std::abs(offset) + bound;
        out[s] = {s, -16 * middle, scale, bound};
    }
    std::sort(out, out + slices, [](const HeadSlice& a, const HeadSlice& b) { return a.bound > b.bound; });
    return std::isfinite(total * kLargestScale);
}

void HeadSearch::bound(int thread, float* logits, SharedWork& work) {
    const int tiles = upper_.tile_count();
    work.run(thread, upper_.block_count(), [&](int block) {
        const int begin = block * kBlockTiles, end = std::min(begin + kBlockTiles, tiles);
        kernels_.linear_rows(upper_, coarse(thread), logits, 0, begin, end);
        kernels_.bound_logits(upper_, bounds(thread), logits, begin, end, &own_[thread].floor);
    });
}

// Computes the tile with the highest floor, where the highest logit mostly is.
void HeadSearch::settle(int thread, Activations input, float* logits) {
    if (thread > 0) return;
    HeadFloor highest = own_[0].floor;
    for (const Own& own : own_) {
        if (own.floor.value > highest.value) highest = own.floor;
    }
    if (highest.tile < 0) return;
    float* of_tile = logits + highest.tile * kTileRows;
    kernels_.linear_rows(head_, input, logits, 0, highest.tile, highest.tile + 1);
    raise(*std::max_element(of_tile, of_tile + kTileRows));
    std::fill_n(of_tile, kTileRows, kInfinity);  // these are no bounds: the search computes them again
}

void HeadSearch::search(int thread, int running, Activations input, float* logits, SharedWork& work) {
    const int tiles = head_.tile_count(), slices = head_.slices();
    const auto most = static_cast<int64_t>(kMostRead * static_cast<float>(tiles) *
                                           static_cast<float>(slices) / static_cast<float>(running));
    Own& own = own_[thread];
    work.run(thread, (tiles + kSearchTiles - 1) / kSearchTiles, [&](int run) {
        const int begin = run * kSearchTiles, end = std::min(begin + kSearchTiles, tiles);
        const float least = least_.load(std::memory_order_relaxed);
        const int looked_at = own.read < most ? slices : 0;
        const uint64_t reaching = kernels_.reaching_tiles(head_, input, this->slices(thread), looked_at,
                                                          begin, end, logits, least, &own.read);
        for (int tile = begin; tile < end; ++tile) {
            float* of_tile = logits + tile * kTileRows;
            if ((reaching >> (tile - begin) & 1) == 0) {
                std::fill_n(of_tile, kTileRows, -kInfinity);
                continue;
            }
            kernels_.linear_rows(head_, input, logits, 0, tile, tile + 1);
            if (looked_at == 0) own.read += slices;
            const int i = kernels_.best_logit(of_tile, std::min(kTileRows, head_.rows - tile * kTileRows));
            const Best found{of_tile[i], tile * kTileRows + i};
            if (found.precedes(own.best)) own.best = found;
            raise(found.value);
        }
    });
}

int64_t HeadSearch::slices_read() const {
    int64_t read = 0;
    for (const Own& own : own_) read += own.read;
    return read;
}

size_t HeadSearch::skipped_bytes() const {
    const size_t all = head_.lower_bytes() * head_.tile_count();
    return all - std::min(all, static_cast<size_t>(slices_read()) * head_.slice_bytes());
}

void HeadSearch::raise(float value) {
    float found = least_.load(std::memory_order_relaxed);
    while (value > found && !least_.compare_exchange_weak(found, value, std::memory_order_relaxed)) {
    }
}

int HeadSearch::best() const {
    Best best;
    for (const Own& own : own_) {
        if (own.best.precedes(best)) best = own.best;
    }
    return best.token;
}

}  // namespace nybble
