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
    const Heads queries{0, config_.num_heads}, keys{0, config_.num_kv_heads};
    const bool apart = config_.qk_norm_per_head && config_.head_dim % 16 == 0;
    if (input_->tokens > 1 || !apart) {
        each_token(thread, input_->tokens, [&](int t) { rotate_and_store(thread, layer, t, queries, keys); });
        return;
    }
    // The heads of one token, keys first.
    const int64_t all = keys.end + queries.end, threads = pool_.running();
    const int begin = static_cast<int>(all * thread / threads);
    const int end = static_cast<int>(all * (thread + 1) / threads);
    rotate_and_store(thread, layer, 0, {std::max(begin - keys.end, 0), std::max(end - keys.end, 0)},
                     {std::min(begin, keys.end), std::min(end, keys.end)});
}

void Decoder::rotate_and_store(int thread, int layer, int t, Heads queries, Heads keys) {
    StepBuffers& b = buffers_;
    const LayerWeights& w = weights_.layers[layer];
    const int head_dim = config_.head_dim, rope = config_.rope_of_layer[layer];
    const int half = rope < 0 ? 0 : static_cast<int>(config_.ropes[rope].inv_freq.size());
    const int padded = round_up(head_dim, 16), group = config_.group_of_layer[layer];
    const int32_t slot = input_->slot_mapping[static_cast<size_t>(group) * input_->tokens + t];
    float* row = reinterpret_cast<float*>(b.scratch(thread));
    float* q = b.projected.floats() + static_cast<size_t>(t) * b.qkv;
    float *k = q + b.q, *v = k + b.kv;
    const auto add_bias = [&](float* x, const std::vector<float>& bias, Heads heads) {
        if (bias.empty()) return;
        const int at = heads.begin * head_dim;
        kernels_.add(x + at, bias.data() + at, round_up(heads.count() * head_dim, 16));
    };
    const auto prepare = [&](float* head, const std::vector<float>& norm) {
        if (!norm.empty() && config_.qk_norm_per_head) {
            std::fill_n(row, padded, 0.0f);
            std::memcpy(row, head, head_dim * sizeof(float));
            kernels_.rms_norm(row, norm.data(), config_.norm_eps, head_dim, row);
            std::memcpy(head, row, head_dim * sizeof(float));
        }
        if (rope >= 0) kernels_.rope(head, b.cos_of(t, rope), b.sin_of(t, rope), half);
    };
    add_bias(q, w.biases[kQ], queries);
    add_bias(k, w.biases[kK], keys);
    add_bias(v, w.biases[kV], keys);
    if (!config_.qk_norm_per_head) normalize_heads(w, q, k);
    for (int h = queries.begin; h < queries.end; ++h) prepare(q + h * head_dim, w.q_norm);
    kernels_.scale(q + queries.begin * head_dim,
                   config_.softmax_scale * (config_.attention_softcap > 0 ? 1.0f : kLog2E),
                   round_up(queries.count() * head_dim, 16));
    for (int h = keys.begin; h < keys.end; ++h) {
        prepare(k + h * head_dim, w.k_norm);
        if (slot < 0) continue;
        uint8_t* page = pages(layer) + static_cast<size_t>(slot / kPageTokens) * kv_shape_.page_bytes() +
                        static_cast<size_t>(h) * kv_shape_.head_bytes();
        kernels_.store_kv(kv_shape_, page, slot % kPageTokens, k + h * head_dim, v + h * head_dim);
    }
}

// A token's queries and keys, all heads of each together; their padding is zero.
void Decoder::normalize_heads(const LayerWeights& w, float* q, float* k) {
    const int head_dim = config_.head_dim;
    kernels_.rms_norm(q, w.q_norm.data(), config_.norm_eps, config_.num_heads * head_dim, q);
    kernels_.rms_norm(k, w.k_norm.data(), config_.norm_eps, config_.num_kv_heads * head_dim, k);
}

void Decoder::attend(int thread, int layer, const StepRows& rows, SharedWork& work) {
    StepBuffers& b = buffers_;
    const int group = config_.group_of_layer[layer], head_dim = config_.head_dim;
    const int heads_per_group = config_.num_heads / config_.num_kv_heads, padded = round_up(head_dim, 16);
    const std::vector<AttentionItem>& items = plan_.items(group);
    auto* parts = reinterpret_cast<SoftmaxPart*>(b.parts.data());
    uint8_t* scratch = b.scratch(thread);
    work.run_in_order(static_cast<int>(items.size()), [&](int index) {
        const AttentionItem& item = items[index];
        const int token = input_->cu_seqlens[item.sequence] + item.query_begin;
        if (item.member_count == 0 && !rows.any_of(token, item.query_count)) return;
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

// A token's row of what attention gives, merged where its sequence's attention was split over segments; may
// be the thread's own.
const float* Decoder::attended(int thread, int t, int group) {
    StepBuffers& b = buffers_;
    const int sequence = plan_.sequence_of(t);
    const SegmentRange segments = plan_.parts_of(group, sequence);
    float* row = b.attended.floats() + static_cast<size_t>(t) * b.q;
    if (segments.begin == segments.end) return row;
    if (copies_) {
        row = b.row(thread);
        std::fill(row + config_.num_heads * config_.head_dim, row + b.q, 0.0f);
    }
    const int head_dim = config_.head_dim, padded = round_up(head_dim, 16);
    const int heads_per_group = config_.num_heads / config_.num_kv_heads;
    const auto* parts = reinterpret_cast<const SoftmaxPart*>(b.parts.data());
    for (int h = 0; h < config_.num_heads; ++h) {
        const size_t part = b.first_part(sequence, h / heads_per_group);
        kernels_.merge_parts(parts + part, b.part_values.floats() + part * padded, segments.begin,
                             segments.end, heads_per_group, h % heads_per_group, head_dim,
                             row + h * head_dim);
    }
    return row;
}

}  // namespace nybble
