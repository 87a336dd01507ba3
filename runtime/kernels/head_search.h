// The highest logit of a row without all of the head's bytes: what greedy decoding of one sequence asks for.
// The upper halves of all weights say what each logit is at least and at most. Of those that may be the
// highest the lower halves are read, slice after slice, those first that say most, until the logit is out of
// reach; the few that are left are computed as in any step. Token and logit have the bits that computing all
// gives.
#pragma once

#include <atomic>
#include <cstdint>
#include <limits>
#include <vector>

#include "aligned_buffer.h"
#include "kernels.h"
#include "shared_work.h"

namespace nybble {

class HeadSearch {
  public:
    // `head` is kHalves, and its tiles stay where they are.
    HeadSearch(const Kernels& kernels, const PackedLinear& head, int threads);

    size_t bytes() const { return coarse_.bytes() + bounds_.bytes() + slices_.bytes(); }

    // Before a step, while no thread works: whether to search in it. Where searches read so much of late that
    // computing all takes no longer, some steps go without.
    bool begin();

    // Every thread looks at the quantized row, `input`, for itself. False where not all its numbers are
    // finite: nothing can be said then. Otherwise the phases follow, with a barrier before each but the
    // first; `running` threads share the work. `logits` is the row; those that were not computed become
    // -infinity.
    bool prepare(int thread, Activations input);
    void bound(int thread, float* logits, SharedWork& work);
    void settle(int thread, Activations input, float* logits);
    void search(int thread, int running, Activations input, float* logits, SharedWork& work);
    // After a last barrier: the first of the highest, or of those that are no number.
    int best() const;
    // Bytes of the head that were not read.
    size_t skipped_bytes() const;

  private:
    static constexpr float kInfinity = std::numeric_limits<float>::infinity();

    struct Best {
        float value = -kInfinity;
        int token = -1;  // none

        bool precedes(const Best& other) const {
            if (token < 0 || other.token < 0) return token >= 0;
            const bool number = value == value, others_number = other.value == other.value;
            if (number != others_number) return !number;
            return number && value != other.value ? value > other.value : token < other.token;
        }
    };
    // What a thread alone writes.
    struct alignas(64) Own {
        HeadFloor floor;
        Best best;
        int64_t read;  // slices of lower halves
    };

    Activations coarse(int thread) const {
        return {coarse_.data() + static_cast<size_t>(thread) * head_.slices() * kActivationBytes, 1,
                head_.slices()};
    }
    float* bounds(int thread) const {
        return bounds_.floats() + static_cast<size_t>(thread) * head_.groups();
    }
    HeadSlice* slices(int thread) const {
        return reinterpret_cast<HeadSlice*>(slices_.data()) + static_cast<size_t>(thread) * head_.slices();
    }
    int64_t slices_read() const;
    void raise(float value);

    const Kernels& kernels_;
    const PackedLinear head_, upper_;
    AlignedBuffer coarse_;  // [threads] the quantized row, with what the upper halves need of it
    AlignedBuffer bounds_;  // [threads][groups] how far off they are at most, times the weights' scales
    AlignedBuffer slices_;  // [threads][slices] HeadSlice, those that say most first
    std::vector<Own> own_;
    std::atomic<float> least_{-kInfinity};  // what the highest logit is at least
    bool searched_ = false;                 // in the last step
    float share_ = 0;                       // of the lower halves that searches read, of late
    int paused_ = 0;                        // steps to go without
};

}  // namespace nybble
