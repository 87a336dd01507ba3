// Timed passes over all threads of a pool, for benchmarks: what the machine can do at most, and the products
// alone. Nothing here is part of a step.
#pragma once

#include <atomic>

#include "aligned_buffer.h"
#include "kernels.h"
#include "shared_work.h"
#include "thread_pool.h"

namespace nybble {

// Reads a buffer, of which each thread takes a part.
class MemoryRead {
  public:
    // `bytes` are rounded up so that every thread reads as much. Each thread writes its part first, so that
    // it is memory of its own, and near it.
    MemoryRead(int threads, size_t bytes);

    size_t bytes() const { return part_ * pool_.size(); }
    // Reads it all once; seconds.
    double run();

  private:
    ThreadPool pool_;
    const size_t part_;
    AlignedBuffer buffer_;
    std::atomic<uint32_t> sum_{0};
};

// One linear layer's product, dealt to threads as the decoder does it.
class LinearProduct {
  public:
    // `x` [tokens][columns] is quantized here. `y` [tokens][rows padded to tiles] takes the result.
    LinearProduct(const Kernels& kernels, int threads, const PackedLinear& linear, const float* x, int tokens,
                  float* y);

    // Seconds of so many products, one after the other, with a barrier between them.
    double run(int repeats);

  private:
    const Kernels& kernels_;
    ThreadPool pool_;
    const PackedLinear linear_;
    const int tokens_;
    float* const y_;
    AlignedBuffer activations_, scratch_;
    size_t scratch_bytes_;  // of a thread
    SharedWork work_[2];    // one is in use while the other is made ready for the next product
    int repeats_ = 0;
};

// The dot product instruction on registers alone.
class DotLoop {
  public:
    DotLoop(const Kernels& kernels, int threads) : kernels_(kernels), pool_(threads) {}

    // Operations of a round by all threads; a multiplication and an addition are two.
    int64_t operations() const { return kernels_.dot_operations * pool_.size(); }
    // Seconds of so many rounds.
    double run(int64_t rounds);

  private:
    const Kernels& kernels_;
    ThreadPool pool_;
    int64_t rounds_ = 0;
    std::atomic<int32_t> sum_{0};
};

}  // namespace nybble
