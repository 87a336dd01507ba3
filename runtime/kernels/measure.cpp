#include "measure.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "float_control.h"
#include "linear_jobs.h"

namespace nybble {
namespace {

double seconds_of(ThreadPool& pool, ThreadPool::Work work, void* context) {
    const auto start = std::chrono::steady_clock::now();
    pool.run(work, context);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

constexpr size_t kStreams = 4;  // what a thread reads side by side: more than one keeps the memory busier
constexpr size_t kUnit = kStreams * 4096;

// A thread's part, in whole units.
size_t part_of(size_t bytes, int threads) { return (bytes / threads / kUnit + 1) * kUnit; }

// The sum of all words, so that the compiler leaves no load out. 16 bytes at a time exist on every machine,
// and are enough to wait for memory.
uint32_t read_part(const uint8_t* data, size_t bytes) {
    using Words = uint32_t __attribute__((vector_size(16)));
    const size_t stride = bytes / kStreams / sizeof(Words);
    const Words* words = reinterpret_cast<const Words*>(data);
    Words sums[kStreams] = {};
    for (size_t at = 0; at < stride; at += 4) {
#pragma GCC unroll 4
        for (size_t n = 0; n < kStreams; ++n) {
            const Words* line = words + n * stride + at;
            sums[n] += line[0] + line[1] + line[2] + line[3];
        }
    }
    const Words sum = sums[0] + sums[1] + sums[2] + sums[3];
    return sum[0] + sum[1] + sum[2] + sum[3];
}

}  // namespace

MemoryRead::MemoryRead(int threads, size_t bytes) : pool_(threads), part_(part_of(bytes, threads)) {
    buffer_.allocate(this->bytes());
    pool_.run(
        [](void* self, int thread) {
            const MemoryRead& read = *static_cast<MemoryRead*>(self);
            std::memset(read.buffer_.data() + read.part_ * thread, 0, read.part_);
        },
        this);
}

double MemoryRead::run() {
    const auto read = [](void* self, int thread) {
        MemoryRead& r = *static_cast<MemoryRead*>(self);
        r.sum_.fetch_add(read_part(r.buffer_.data() + r.part_ * thread, r.part_));
    };
    return seconds_of(pool_, read, this);
}

LinearProduct::LinearProduct(const Kernels& kernels, int threads, const PackedLinear& linear, const float* x,
                             int tokens, float* y)
    : kernels_(kernels),
      pool_(threads),
      linear_(linear),
      tokens_(tokens),
      y_(y),
      scratch_bytes_(static_cast<size_t>(round_up(static_cast<int>(kernels.panel_scratch()), 4096))),
      work_{SharedWork(threads), SharedWork(threads)} {
    const FloatControl control;
    AlignedBuffer row;
    row.allocate(static_cast<size_t>(round_up(linear.columns, kSlice)) * sizeof(float));
    activations_.allocate(static_cast<size_t>(round_up(tokens, kBlockTokens)) * linear.slices() *
                          (kActivationBytes / kBlockTokens));
    scratch_.allocate(scratch_bytes_ * threads);
    const Activations input{activations_.data(), tokens, linear.slices()};
    for (int t = 0; t < tokens; ++t) {
        std::copy_n(x + static_cast<size_t>(t) * linear.columns, linear.columns, row.floats());
        kernels.quantize(row.floats(), t, input);
    }
}

double LinearProduct::run(int repeats) {
    repeats_ = repeats;
    for (SharedWork& work : work_) work.reset();
    const auto products = [](void* self, int thread) {
        LinearProduct& p = *static_cast<LinearProduct*>(self);
        const FloatControl control;
        const Activations input{p.activations_.data(), p.tokens_, p.linear_.slices()};
        const LinearJob job{&p.linear_, input, p.y_, static_cast<size_t>(p.linear_.tile_count()) * kTileRows};
        uint8_t* scratch = p.scratch_.data() + p.scratch_bytes_ * thread;
        for (int i = 0; i < p.repeats_; ++i) {
            run_linear_jobs(p.kernels_, &job, 1, thread, p.work_[i % 2], scratch);
            p.pool_.barrier();
            if (thread == 0) p.work_[i % 2].reset();
        }
    };
    return seconds_of(pool_, products, this);
}

double DotLoop::run(int64_t rounds) {
    rounds_ = rounds;
    const auto loop = [](void* self, int) {
        DotLoop& d = *static_cast<DotLoop*>(self);
        uint8_t weights[64];
        int8_t activations[64];
        for (int i = 0; i < 64; ++i) {
            weights[i] = static_cast<uint8_t>(i % 16);
            activations[i] =
                i % 4 == 1 || i % 4 == 2 ? -1 : 1;  // each four products sum to 0: nothing overflows
        }
        d.sum_.fetch_add(d.kernels_.dot_loop(d.rounds_, weights, activations));
    };
    return seconds_of(pool_, loop, this);
}

}  // namespace nybble
