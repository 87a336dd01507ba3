#include "linear_jobs.h"

#include <algorithm>

namespace nybble {
namespace {

constexpr int kFewTokens = 32;  // up to here weights are unpacked in registers, once for eight tokens

constexpr int kRunTiles = 4;

int runs_of(int tiles) { return (tiles + kRunTiles - 1) / kRunTiles; }
int panels_of(const PackedLinear& linear) { return (linear.tile_count() + kPanelTiles - 1) / kPanelTiles; }

// Runs of four tiles, one behind the other in memory.
void run_tiles(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work) {
    int total = 0;
    for (int i = 0; i < count; ++i) total += jobs[i].linear->tile_count();
    work.run(thread, runs_of(total), [&](int run) {
        int begin = run * kRunTiles, end = std::min(total, begin + kRunTiles);
        for (int i = 0; i < count && begin < end; ++i) {
            const LinearJob& job = jobs[i];
            const int tiles = job.linear->tile_count();
            if (begin < tiles) {
                kernels.linear_rows(*job.linear, job.input, job.out, job.stride, begin, std::min(end, tiles));
            }
            begin = std::max(0, begin - tiles);
            end -= tiles;
        }
    });
}

// Panels of 4 tiles by ranges of blocks of tokens.
void run_panels(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work,
                uint8_t* scratch) {
    const int threads = work.threads();
    const int blocks = jobs[0].input.blocks();
    const int ranges = (blocks + kPanelBlocks - 1) / kPanelBlocks;
    int panels = 0;
    for (int i = 0; i < count; ++i) panels += panels_of(*jobs[i].linear);
    // Panels that do not divide among the threads are split by tokens instead.
    const int whole = panels / threads * threads, pieces = (panels - whole) * threads, items = whole + pieces;
    work.run(thread, items * ranges, [&](int item) {
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
    });
}

}  // namespace

void run_linear_jobs(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work,
                     uint8_t* scratch) {
    if (jobs[0].input.tokens <= kFewTokens) {
        run_tiles(kernels, jobs, count, thread, work);
    } else {
        run_panels(kernels, jobs, count, thread, work, scratch);
    }
}

}  // namespace nybble
