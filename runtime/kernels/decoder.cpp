#include "decoder.h"

#include <algorithm>
#include <cstring>

#include "float_control.h"
#include "half.h"
#include "linear_jobs.h"
#include "rotary.h"

namespace nybble {
namespace {

constexpr int kPhasesPerLayer = 5;  // phases that deal work from a counter: qkv, attention, o, gate/up, down

size_t scratch_of_thread(const DecoderConfig& config, const Kernels& kernels) {
    const int group = config.num_heads / config.num_kv_heads;
    return std::max(kernels.attention_scratch(group, config.head_dim), kernels.panel_scratch());
}

std::vector<SharedWork> work_of_phases(int phases, int threads) {
    std::vector<SharedWork> work;
    for (int i = 0; i < phases; ++i) work.emplace_back(threads);
    return work;
}

// Once for all steps: comparing permutations takes longer than a phase.
DecoderWeights with_input_slots(DecoderWeights weights) {
    constexpr LinearIndex kFirstOfPhase[] = {kQ, kQ, kQ, kO, kGate, kGate, kDown};
    for (LayerWeights& layer : weights.layers) {
        for (int i = 0; i < kLinearCount; ++i) {
            int j = kFirstOfPhase[i];
            while (layer.permutations[j] != layer.permutations[i]) ++j;
            layer.input_slots[i] = j - kFirstOfPhase[i];
        }
    }
    return weights;
}

// A row of a packed linear layer in float32: what the integers stand for.
void dequantize_row(const PackedLinear& w, int row, float* out) {
    const int lane = row % kTileRows;
    const uint8_t* tile = w.tiles + static_cast<size_t>(row / kTileRows) * w.tile_bytes();
    for (int s = 0; s < w.slices(); ++s) {
        const int group = s / w.slices_per_group, inside = s - group * w.slices_per_group;
        const uint8_t* header =
            tile + static_cast<size_t>(group) *
                       (w.header_bytes() + static_cast<size_t>(w.slices_per_group) * w.slice_bytes());
        uint16_t half;
        std::memcpy(&half, header + 2 * lane, 2);
        const float scale = half_to_float(half);
        const uint8_t* bytes =
            header + w.header_bytes() + static_cast<size_t>(inside) * w.slice_bytes() + 4 * lane;
        for (int k = 0; k < kSlice; ++k) {
            out[s * kSlice + k] = static_cast<float>(bytes[k / 4 * 64 + k % 4] - 128) * scale;
        }
    }
}

}  // namespace

Decoder::Decoder(DecoderConfig config, DecoderWeights weights, int threads, const Kernels& kernels)
    : config_(std::move(config)),
      weights_(with_input_slots(std::move(weights))),
      kernels_(kernels),
      pool_(threads),
      plan_(config_, threads),
      buffers_(config_, plan_, threads, scratch_of_thread(config_, kernels)),
      work_(work_of_phases(config_.num_layers * kPhasesPerLayer + 1, threads)) {
    reserve(1, 1, 1);
}

void Decoder::allocate_kv(int num_blocks, KvType type) {
    kv_shape_ = KvShape{config_.num_kv_heads, config_.head_dim, type};
    num_blocks_ = 0;  // what stays where memory runs out
    kv_.allocate(kv_shape_.page_bytes() * num_blocks * config_.num_layers);
    num_blocks_ = num_blocks;
}

uint8_t* Decoder::pages(int layer) const {
    return kv_.data() + kv_shape_.page_bytes() * num_blocks_ * static_cast<size_t>(layer);
}

void Decoder::reserve(int tokens, int sequences, int rows) {
    buffers_.reserve(tokens, sequences, rows);
    plan_.reserve(buffers_.tokens(), sequences);
    best_tokens_.reserve(rows);
}

void Decoder::step(const StepInput& input, float* logits) {
    input_ = &input;
    logits_ = logits;
    reserve(input.tokens, input.sequences, input.rows);
    for (SharedWork& work : work_) work.reset();
    best_tokens_.resize(input.rows);
    plan_.make(input);
    pool_.run([](void* self, int thread) { static_cast<Decoder*>(self)->run(thread); }, this);
}

void Decoder::run(int thread) {
    const FloatControl control;
    StepBuffers& b = buffers_;
    if (input_->tokens == 0) return;
    each_token(thread, input_->tokens, [&](int t) { embed(t); });
    for (int layer = 0; layer < config_.num_layers; ++layer) {
        const LayerWeights& w = weights_.layers[layer];
        SharedWork* work = work_.data() + static_cast<size_t>(layer) * kPhasesPerLayer;
        each_token(thread, input_->tokens, [&](int t) {
            if (layer > 0) add_residual(t, weights_.layers[layer - 1].biases[kDown]);
            quantize_input(thread, t, w, kQ, 3, normalized(thread, t, w.input_norm));
        });
        pool_.barrier();
        linears(thread, w, kQ, 3, b.projected.floats(), b.qkv, work[0]);
        pool_.barrier();
        rotate_and_store(thread, layer);
        pool_.barrier();
        attend(thread, layer, work[1]);
        pool_.barrier();
        each_token(thread, input_->tokens, [&](int t) {
            merge_attention(t, config_.group_of_layer[layer]);
            quantize_input(thread, t, w, kO, 1, b.attended.floats() + static_cast<size_t>(t) * b.q);
        });
        pool_.barrier();
        linears(thread, w, kO, 1, b.projected.floats(), b.hidden, work[2]);
        pool_.barrier();
        each_token(thread, input_->tokens, [&](int t) {
            add_residual(t, w.biases[kO]);
            quantize_input(thread, t, w, kGate, 2, normalized(thread, t, w.post_norm));
        });
        pool_.barrier();
        linears(thread, w, kGate, 2, b.projected.floats(), b.gate_up, work[3]);
        pool_.barrier();
        each_token(thread, input_->tokens,
                   [&](int t) { quantize_input(thread, t, w, kDown, 1, gated(thread, t, w)); });
        pool_.barrier();
        linears(thread, w, kDown, 1, b.projected.floats(), b.hidden, work[4]);
        pool_.barrier();
    }
    each_token(thread, input_->tokens, [&](int t) { add_residual(t, weights_.layers.back().biases[kDown]); });
    if (input_->rows == 0) return;
    pool_.barrier();
    head(thread, work_.back());
}

void Decoder::embed(int t) {
    StepBuffers& b = buffers_;
    const size_t half = config_.inv_freq.size();
    float* row = b.residual.floats() + static_cast<size_t>(t) * b.hidden;
    dequantize_row(weights_.embedding, input_->token_ids[t], row);
    // What pads the last slice stands for no weight, and norms read whole lanes.
    std::fill(row + config_.hidden_size, row + b.hidden, 0.0f);
    if (config_.embedding_scale != 1.0f) kernels_.scale(row, config_.embedding_scale, b.hidden);
    const float position = static_cast<float>(plan_.position_of(t));
    float* cos = b.cos.floats() + t * half;
    float* sin = b.sin.floats() + t * half;
    for (size_t i = 0; i < half; ++i) {
        const float angle = position * config_.inv_freq[i];
        const SinCos value = sin_cos(angle);
        cos[i] = static_cast<float>(value.cos) * config_.rope_attention_factor;
        sin[i] = static_cast<float>(value.sin) * config_.rope_attention_factor;
    }
}

// RMSNorm of a token's residual, padded with zeros; valid until the thread's next row.
const float* Decoder::normalized(int thread, int t, const std::vector<float>& weight) {
    StepBuffers& b = buffers_;
    float* out = b.row(thread);
    kernels_.rms_norm(b.residual.floats() + static_cast<size_t>(t) * b.hidden, weight.data(),
                      config_.norm_eps, config_.hidden_size, out);
    std::fill(out + round_up(config_.hidden_size, 16), out + b.hidden, 0.0f);
    return out;
}

// Quantizes a token's row as the input of `count` linear layers from `first`; those with the same permutation
// share it. The row may be the thread's own.
void Decoder::quantize_input(int thread, int t, const LayerWeights& layer, LinearIndex first, int count,
                             const float* row) {
    StepBuffers& b = buffers_;
    const int columns = layer.linears[first].columns;
    for (int i = 0; i < count; ++i) {
        const std::vector<int32_t>& permutation = layer.permutations[first + i];
        if (layer.input_slots[first + i] != i) continue;
        const Activations out{b.activations[i].data(), input_->tokens, slices_of(columns)};
        if (permutation.empty()) {
            kernels_.quantize(row, t, out);
        } else {
            float* permuted = b.permuted(thread);
            for (int k = 0; k < columns; ++k) permuted[k] = row[permutation[k]];
            std::fill(permuted + columns, permuted + round_up(columns, kSlice), 0.0f);
            kernels_.quantize(permuted, t, out);
        }
    }
}

void Decoder::linears(int thread, const LayerWeights& layer, LinearIndex first, int count, float* out,
                      int stride, SharedWork& work) {
    StepBuffers& b = buffers_;
    LinearJob jobs[3];
    for (int i = 0; i < count; ++i) {
        const PackedLinear& w = layer.linears[first + i];
        const Activations input{b.activations[layer.input_slots[first + i]].data(), input_->tokens,
                                w.slices()};
        jobs[i] = {&w, input, out, static_cast<size_t>(stride)};
        out += round_up(w.rows, kSlice);
    }
    run_linear_jobs(kernels_, jobs, count, thread, work, b.scratch(thread));
}

// A token's activation(gate) * up, padded with zeros; valid until the thread's next row.
const float* Decoder::gated(int thread, int t, const LayerWeights& layer) {
    StepBuffers& b = buffers_;
    const int inner = round_up(config_.intermediate_size, 16);
    float* gate = b.projected.floats() + static_cast<size_t>(t) * b.gate_up;
    float* up = gate + b.inner;
    if (!layer.biases[kGate].empty()) kernels_.add(gate, layer.biases[kGate].data(), inner);
    if (!layer.biases[kUp].empty()) kernels_.add(up, layer.biases[kUp].data(), inner);
    float* out = b.row(thread);
    kernels_.gated(gate, up, config_.activation, inner, out);
    std::fill(out + inner, out + b.inner, 0.0f);
    return out;
}

// A token's residual += projection (+ bias)
void Decoder::add_residual(int t, const std::vector<float>& bias) {
    StepBuffers& b = buffers_;
    float* y = b.projected.floats() + static_cast<size_t>(t) * b.hidden;
    const int n = round_up(config_.hidden_size, 16);
    if (!bias.empty()) kernels_.add(y, bias.data(), n);
    kernels_.add(b.residual.floats() + static_cast<size_t>(t) * b.hidden, y, n);
}

void Decoder::head(int thread, SharedWork& work) {
    StepBuffers& b = buffers_;
    const Activations input{b.head_activations.data(), input_->rows, slices_of(config_.hidden_size)};
    each_token(thread, input_->rows, [&](int r) {
        float* row = b.picked.floats() + static_cast<size_t>(r) * b.hidden;
        kernels_.rms_norm(b.residual.floats() + static_cast<size_t>(input_->logit_rows[r]) * b.hidden,
                          weights_.final_norm.data(), config_.norm_eps, config_.hidden_size, row);
        kernels_.quantize(row, r, input);
    });
    pool_.barrier();
    const LinearJob job{&weights_.head, input, logits_, static_cast<size_t>(logit_stride())};
    run_linear_jobs(kernels_, &job, 1, thread, work, b.scratch(thread));
    pool_.barrier();
    for (int r = thread; r < input_->rows; r += pool_.size()) {
        float* logits = logits_ + static_cast<size_t>(r) * logit_stride();
        if (config_.logit_softcap > 0) kernels_.softcap(logits, config_.logit_softcap, logit_stride());
        best_tokens_[r] = kernels_.best_logit(logits, config_.vocab_size);
    }
}

}  // namespace nybble
