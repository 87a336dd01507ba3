#include "linear_jobs.h"

#include <algorithm>

namespace nybble {
namespace {

constexpr int kFewTokens = 32;  // up to here weights are unpacked in registers, once for eight tokens

int panels_of(const PackedLinear& linear) { return (linear.tile_count() + kPanelTiles - 1) / kPanelTiles; }

// Runs of four tiles, which the processor reads as four streams.
void run_tiles(const Kernels& kernels, const LinearJob* jobs, int count, int threads,
               std::atomic<int>& next) {
    int total = 0;
    for (int i = 0; i < count; ++i) total += jobs[i].linear->tile_count();
    // Long runs first, single tiles last, so that threads end together whatever their speeds.
    const int tail = std::min(total, 4 * threads), runs = (total - tail) / 4;
    const int items = runs + total - 4 * runs;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
        int begin = item < runs ? item * 4 : runs * 4 + item - runs;
        int end = item < runs ? begin + 4 : begin + 1;
        for (int i = 0; i < count && begin < end; ++i) {
            const LinearJob& job = jobs[i];
            const int tiles = job.linear->tile_count();
            if (begin < tiles) {
                kernels.linear_rows(*job.linear, job.input, job.out, job.stride, begin, std::min(end, tiles));
            }
            begin = std::max(0, begin - tiles);
            end -= tiles;
        }
    }
}

// Panels of 4 tiles by ranges of blocks of tokens.
void run_panels(const Kernels& kernels, const LinearJob* jobs, int count, int threads, std::atomic<int>& next,
                uint8_t* scratch) {
    const int blocks = jobs[0].input.blocks();
    const int ranges = (blocks + kPanelBlocks - 1) / kPanelBlocks;
    int panels = 0;
    for (int i = 0; i < count; ++i) panels += panels_of(*jobs[i].linear);
    // Panels that do not divide among the threads are split by tokens instead.
    const int whole = panels / threads * threads, pieces = (panels - whole) * threads, items = whole + pieces;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items * ranges;) {
        const int range = item / items, index = item % items;
        int block_begin = static_cast<int>(static_cast<int64_t>(blocks) * range / ranges);
        int block_end = static_cast<int>(static_cast<int64_t>(blocks) * (range + 1) / ranges);
        int panel = index;
        if (index >= whole) {
            panel = whole + (index - whole) / threads;
            const int piece = (index - whole) % threads, size = block_end - block_begin;
            block_end = block_begin + size * (piece + 1) / threads;
            block_begin += size * piece / threads;
        }
        for (int i = 0; i < count; ++i) {
            const LinearJob& job = jobs[i];
            const int own = panels_of(*job.linear);
            if (panel < own) {
                const int tile = panel * kPanelTiles;
                kernels.linear_panel(*job.linear, job.input, job.out, job.stride, tile,
                                     std::min(tile + kPanelTiles, job.linear->tile_count()), block_begin,
                                     block_end, scratch);
                break;
            }
            panel -= own;
        }
    }
}

}  // namespace

void run_linear_jobs(const Kernels& kernels, const LinearJob* jobs, int count, int threads,
                     std::atomic<int>& next, uint8_t* scratch) {
    if (jobs[0].input.tokens <= kFewTokens) {
        run_tiles(kernels, jobs, count, threads, next);
    } else {
        run_panels(kernels, jobs, count, threads, next, scratch);
    }
}

}  // namespace nybble
