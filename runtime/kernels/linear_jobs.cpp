#include "linear_jobs.h"

#include <algorithm>

namespace nybble {
namespace {

constexpr int kRunTiles = 4;

int runs_of(int tiles) { return (tiles + kRunTiles - 1) / kRunTiles; }
int panels_of(int tiles) { return (tiles + kPanelTiles - 1) / kPanelTiles; }
int ranges_of(int blocks) { return (blocks + kPanelBlocks - 1) / kPanelBlocks; }

// Blocks of tokens.
struct Range {
    int begin, end;

    Range part(int index, int count) const {
        const int64_t size = end - begin;
        return {begin + static_cast<int>(size * index / count),
                begin + static_cast<int>(size * (index + 1) / count)};
    }
};

// Tiles [begin, end) of all jobs', one behind the other in memory.
void run_of_tiles(const Kernels& kernels, const LinearJob* jobs, int count, int begin, int end) {
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

void run_panel(const Kernels& kernels, const LinearJob* jobs, int count, int panel, Range blocks,
               uint8_t* scratch) {
    for (int i = 0; i < count; ++i) {
        const LinearJob& job = jobs[i];
        const int tiles = job.linear->tile_count(), own = panels_of(tiles);
        if (panel < own) {
            const int tile = panel * kPanelTiles;
            kernels.linear_panel(*job.linear, job.input, job.out, job.stride, tile,
                                 std::min(tile + kPanelTiles, tiles), blocks.begin, blocks.end, scratch);
            return;
        }
        panel -= own;
    }
}

void run_tiles(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work) {
    int total = 0;
    for (int i = 0; i < count; ++i) total += jobs[i].linear->tile_count();
    work.run(thread, total, kRunTiles,
             [&](int begin, int end) { run_of_tiles(kernels, jobs, count, begin, end); });
}

// Panels of 4 tiles by ranges of blocks of tokens.
void run_panels(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work,
                uint8_t* scratch) {
    const int threads = work.threads();
    const Range all{0, jobs[0].input.blocks()};
    const int ranges = ranges_of(all.end);
    int panels = 0;
    for (int i = 0; i < count; ++i) panels += panels_of(jobs[i].linear->tile_count());
    // Panels that do not divide among the threads are split by tokens instead.
    const int whole = panels / threads * threads, pieces = (panels - whole) * threads, items = whole + pieces;
    work.run(thread, items * ranges, [&](int item) {
        const int index = item % items;
        const Range blocks = all.part(item / items, ranges);
        if (index < whole) {
            run_panel(kernels, jobs, count, index, blocks, scratch);
        } else {
            const int piece = index - whole;
            run_panel(kernels, jobs, count, whole + piece / threads, blocks.part(piece % threads, threads),
                      scratch);
        }
    });
}

}  // namespace

void run_linear_jobs(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work,
                     uint8_t* scratch) {
    if (jobs[0].input.tokens <= kernels.row_tokens) {
        run_tiles(kernels, jobs, count, thread, work);
    } else {
        run_panels(kernels, jobs, count, thread, work, scratch);
    }
}

int linear_pieces(const Kernels& kernels, int count, int tiles, int tokens) {
    if (tokens <= kernels.row_tokens) return runs_of(count * tiles);
    return count * panels_of(tiles) * ranges_of((tokens + kBlockTokens - 1) / kBlockTokens);
}

void run_linear_piece(const Kernels& kernels, const LinearJob* jobs, int count, int piece, uint8_t* scratch) {
    if (jobs[0].input.tokens <= kernels.row_tokens) {
        return run_of_tiles(kernels, jobs, count, piece * kRunTiles, (piece + 1) * kRunTiles);
    }
    const Range all{0, jobs[0].input.blocks()};
    const int ranges = ranges_of(all.end);
    run_panel(kernels, jobs, count, piece / ranges, all.part(piece % ranges, ranges), scratch);
}

}  // namespace nybble
