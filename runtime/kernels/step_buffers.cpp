#include "step_buffers.h"

#include <algorithm>

namespace nybble {
namespace {

std::vector<int> begins(const std::vector<Rope>& ropes) {
    std::vector<int> result{0};
    for (const Rope& rope : ropes) result.push_back(result.back() + static_cast<int>(rope.inv_freq.size()));
    return result;
}

}  // namespace

StepBuffers::StepBuffers(const DecoderConfig& config, const StepPlan& plan, int threads, size_t scratch_bytes)
    : hidden(round_up(config.hidden_size, kSlice)),
      inner(round_up(config.intermediate_size, kSlice)),
      q(round_up(config.num_heads * config.head_dim, kSlice)),
      kv(round_up(config.num_kv_heads * config.head_dim, kSlice)),
      qkv(q + 2 * kv),
      gate_up(2 * inner),
      num_kv_heads_(config.num_kv_heads),
      widest_(std::max({hidden, q, inner, round_up(config.mixture.size, kSlice),
                        round_up(config.mixture.shared_size, kSlice)})),
      projected_(std::max({hidden, qkv, gate_up})),
      part_width_(round_up(config.head_dim, 16)),
      rotary_begin_(begins(config.ropes)),
      parts_of_head_(static_cast<size_t>(plan.max_segments()) * (config.num_heads / config.num_kv_heads)),
      scratch_bytes_((scratch_bytes + 4095) / 4096 * 4096),
      copied_input_bytes_(round_up(slices_of(std::max(hidden, q)) * kActivationBytes, 64)),
      copy_bytes_(hidden * sizeof(float) + 3 * copied_input_bytes_) {
    scratch_.allocate(scratch_bytes_ * threads);
    rows_of_threads_.allocate(sizeof(float) * 2 * widest_ * threads);
    copies_.allocate(copy_bytes_ * threads);
}

// A size counts only once all its buffers are there: after a failure the next step makes them again.
void StepBuffers::reserve(int tokens, int sequences, int rows) {
    constexpr size_t kActivation = kActivationBytes / kBlockTokens;  // of a token and slice
    if (tokens > tokens_) {
        const size_t t = round_up(tokens, kBlockTokens);
        tokens_ = 0;
        residual.allocate(t * hidden * sizeof(float));
        projected.allocate(t * projected_ * sizeof(float));
        attended.allocate(t * q * sizeof(float));
        for (AlignedBuffer& a : activations) a.allocate(t * slices_of(widest_) * kActivation);
        cos.allocate(t * rotary_begin_.back() * sizeof(float));
        sin.allocate(t * rotary_begin_.back() * sizeof(float));
        tokens_ = static_cast<int>(t);
    }
    if (sequences > sequences_) {
        const size_t count = first_part(sequences, 0);
        sequences_ = 0;
        parts.allocate(count * sizeof(SoftmaxPart));
        part_values.allocate(count * part_width_ * sizeof(float));
        sequences_ = sequences;
    }
    if (rows > rows_) {
        const size_t r = round_up(rows, kBlockTokens);
        rows_ = 0;
        picked.allocate(r * hidden * sizeof(float));
        head_activations.allocate(r * slices_of(hidden) * kActivation);
        rows_ = static_cast<int>(r);
    }
}

size_t StepBuffers::bytes() const {
    size_t total = scratch_.bytes() + rows_of_threads_.bytes() + copies_.bytes();
    for (const AlignedBuffer* buffer :
         {&residual, &projected, &attended, &picked, &head_activations, &cos, &sin, &parts, &part_values}) {
        total += buffer->bytes();
    }
    for (const AlignedBuffer& buffer : activations) total += buffer.bytes();
    return total;
}

}  // namespace nybble
