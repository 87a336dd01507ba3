// The phases of a layer between its projections: rotary embedding, the cache, attention.
#include <algorithm>
#include <cstring>

#include "decoder.h"

namespace nybble {
namespace {

constexpr float kLog2E = 1.44269504f;

}  // namespace

// Bias, q/k norm and rotary embedding; keys and values go to the cache, queries are scaled for the softmax.
void Decoder::rotate_and_store(int thread, int layer) {
    StepBuffers& b = buffers_;
    const LayerWeights& w = weights_.layers[layer];
    const int head_dim = config_.head_dim, rope = config_.rope_of_layer[layer];
    const int half = rope < 0 ? 0 : static_cast<int>(config_.ropes[rope].inv_freq.size());
    const bool per_head = config_.qk_norm_per_head;
    const int padded = round_up(head_dim, 16), group = config_.group_of_layer[layer];
    const int32_t* slots = input_->slot_mapping + static_cast<size_t>(group) * input_->tokens;
    const float scale = config_.softmax_scale * (config_.attention_softcap > 0 ? 1.0f : kLog2E);
    uint8_t* layer_pages = pages(layer);
    float* row = reinterpret_cast<float*>(b.scratch(thread));
    std::fill_n(row, padded, 0.0f);
    const auto prepare = [&](float* head, const std::vector<float>& norm, int t) {
        if (!norm.empty() && per_head) {
            std::memcpy(row, head, head_dim * sizeof(float));
            kernels_.rms_norm(row, norm.data(), config_.norm_eps, head_dim, row);
            std::memcpy(head, row, head_dim * sizeof(float));
        }
        if (rope >= 0) kernels_.rope(head, b.cos_of(t, rope), b.sin_of(t, rope), half);
    };
    each_token(thread, input_->tokens, [&](int t) {
        float* q = b.projected.floats() + static_cast<size_t>(t) * b.qkv;
        float* k = q + b.q;
        float* v = k + b.kv;
        if (!w.biases[kQ].empty()) kernels_.add(q, w.biases[kQ].data(), b.q);
        if (!w.biases[kK].empty()) kernels_.add(k, w.biases[kK].data(), b.kv);
        if (!w.biases[kV].empty()) kernels_.add(v, w.biases[kV].data(), b.kv);
        if (!per_head) normalize_heads(w, q, k);
        for (int h = 0; h < config_.num_heads; ++h) prepare(q + h * head_dim, w.q_norm, t);
        kernels_.scale(q, scale, b.q);
        const int32_t slot = slots[t];
        for (int h = 0; h < config_.num_kv_heads; ++h) {
            prepare(k + h * head_dim, w.k_norm, t);
            if (slot < 0) continue;
            uint8_t* page = layer_pages + static_cast<size_t>(slot / kPageTokens) * kv_shape_.page_bytes() +
                            static_cast<size_t>(h) * kv_shape_.head_bytes();
            kernels_.store_kv(kv_shape_, page, slot % kPageTokens, k + h * head_dim, v + h * head_dim);
        }
    });
}

// A token's queries and keys, all heads of each together; their padding is zero.
void Decoder::normalize_heads(const LayerWeights& w, float* q, float* k) {
    const int head_dim = config_.head_dim;
    kernels_.rms_norm(q, w.q_norm.data(), config_.norm_eps, config_.num_heads * head_dim, q);
    kernels_.rms_norm(k, w.k_norm.data(), config_.norm_eps, config_.num_kv_heads * head_dim, k);
}

void Decoder::attend(int thread, int layer, SharedWork& work) {
    StepBuffers& b = buffers_;
    const int group = config_.group_of_layer[layer], head_dim = config_.head_dim;
    const int heads_per_group = config_.num_heads / config_.num_kv_heads, padded = round_up(head_dim, 16);
    const std::vector<AttentionItem>& items = plan_.items(group);
    auto* parts = reinterpret_cast<SoftmaxPart*>(b.parts.data());
    uint8_t* scratch = b.scratch(thread);
    work.run_in_order(static_cast<int>(items.size()), [&](int index) {
        const AttentionItem& item = items[index];
        const int token = input_->cu_seqlens[item.sequence] + item.query_begin;
        AttentionTask task{};
        task.shape = kv_shape_;
        task.pages = pages(layer);
        task.block_table =
            input_->block_table +
            (static_cast<size_t>(group) * input_->sequences + item.sequence) * input_->max_blocks;
        task.head = item.head;
        task.group = heads_per_group;
        const int offset = item.head * heads_per_group * head_dim;
        task.queries = b.projected.floats() + offset;
        task.query_stride = b.qkv;
        task.query_count = item.query_count;
        task.sequence = item.sequence;
        task.first_token = token;
        task.first_position = plan_.position_of(token);
        if (item.member_count > 0) {
            task.members = plan_.members(item);
            task.cu_seqlens = input_->cu_seqlens;
            task.first_position = item.segment_end * kSegmentTokens;
        }
        task.window = config_.window_of_layer[layer];
        task.softcap = config_.attention_softcap;
        task.segment_begin = item.segment_begin;
        task.segment_end = item.segment_end;
        task.output = b.attended.floats() + offset;
        task.output_stride = b.q;
        if (item.in_parts) {
            const size_t part = b.first_part(0, item.head);
            task.parts = parts + part;
            task.part_values = b.part_values.floats() + part * padded;
            task.parts_of_sequence = b.first_part(1, 0);
        }
        kernels_.attend(task, scratch);
    });
}

// Merges a token's row where its sequence's attention was split over segments.
void Decoder::merge_attention(int t, int group) {
    StepBuffers& b = buffers_;
    const int sequence = plan_.sequence_of(t);
    const SegmentRange segments = plan_.parts_of(group, sequence);
    if (segments.begin == segments.end) return;
    const int head_dim = config_.head_dim, padded = round_up(head_dim, 16);
    const int heads_per_group = config_.num_heads / config_.num_kv_heads;
    const auto* parts = reinterpret_cast<const SoftmaxPart*>(b.parts.data());
    for (int h = 0; h < config_.num_heads; ++h) {
        const size_t part = b.first_part(sequence, h / heads_per_group);
        kernels_.merge_parts(parts + part, b.part_values.floats() + part * padded, segments.begin,
                             segments.end, heads_per_group, h % heads_per_group, head_dim,
                             b.attended.floats() + static_cast<size_t>(t) * b.q + h * head_dim);
    }
}

}  // namespace nybble
