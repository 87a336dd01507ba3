// Everything that a step writes besides the cache and the logits.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "decoder_weights.h"
#include "step_plan.h"

namespace nybble {

class StepBuffers {
  public:
    // `scratch_bytes` is what one thread needs.
    StepBuffers(const DecoderConfig& config, const StepPlan& plan, int threads, size_t scratch_bytes);

    // Room for steps of up to `tokens` tokens of `sequences` sequences and `rows` rows of logits; grows only.
    void reserve(int tokens, int sequences, int rows);

    int tokens() const { return tokens_; }
    // What all of them take, if all of it is used. devices/cpu_memory.py predicts it.
    size_t bytes() const;
    uint8_t* scratch(int thread) const { return scratch_.data() + scratch_bytes_ * thread; }
    // A thread's own: a token's row on its way into linear layers, and the same in the order of a
    // permutation.
    float* row(int thread) const {
        return rows_of_threads_.floats() + static_cast<size_t>(2 * thread) * widest_;
    }
    float* permuted(int thread) const { return row(thread) + widest_; }
    // A thread's copies of the row of a step of one token: its residual [hidden], and quantized inputs, one a
    // permutation.
    float* copied_residual(int thread) const {
        return reinterpret_cast<float*>(copies_.data() + copy_bytes_ * thread);
    }
    uint8_t* copied_inputs(int thread, int slot) const {
        return copies_.data() + copy_bytes_ * thread + hidden * sizeof(float) + copied_input_bytes_ * slot;
    }
    // Elements from one token to the next in `projected` where each has the most.
    int projected_width() const { return projected_; }
    // The first part of a sequence and KV head; its parts are [segments][heads of the group].
    size_t first_part(int sequence, int head) const {
        return (static_cast<size_t>(sequence) * num_kv_heads_ + head) * parts_of_head_;
    }

    // A token's cosines and sines of a RoPE, [rotary_dim / 2].
    float* cos_of(int t, int rope) const { return cos.floats() + rotary_place(t, rope); }
    float* sin_of(int t, int rope) const { return sin.floats() + rotary_place(t, rope); }

    // Elements of a row, padded to whole slices.
    const int hidden, inner, q, kv, qkv, gate_up;
    AlignedBuffer residual;   // [tokens][hidden]
    AlignedBuffer projected;  // [tokens][qkv, hidden or gate_up]: what linear layers gave
    AlignedBuffer attended;   // [tokens][q]
    AlignedBuffer picked;     // [rows][hidden]: the residual of some tokens
    // Quantized inputs: one a permutation, the last also those of `down`; the head's.
    AlignedBuffer activations[3], head_activations;
    AlignedBuffer cos, sin;  // [tokens][rotary_dim / 2 of each RoPE]
    // For the longest context there can be; what is used of them is all that becomes resident.
    AlignedBuffer parts;        // SoftmaxPart
    AlignedBuffer part_values;  // [parts][head_dim rounded up to 16]

  private:
    size_t rotary_place(int t, int rope) const {
        return static_cast<size_t>(t) * rotary_begin_.back() + rotary_begin_[rope];
    }

    const int num_kv_heads_, widest_, projected_, part_width_;
    const std::vector<int> rotary_begin_;  // of each RoPE in a token's row, and the row's end
    const size_t parts_of_head_, scratch_bytes_, copied_input_bytes_, copy_bytes_;
    int tokens_ = 0, sequences_ = 0, rows_ = 0;
    AlignedBuffer scratch_, rows_of_threads_, copies_;
};

}  // namespace nybble
