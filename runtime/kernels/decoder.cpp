#include "decoder.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>

#include "float_control.h"
#include "half.h"
#include "rotary.h"

namespace nybble {
namespace {

constexpr int kFewTokens = 16;      // up to here weights are unpacked in registers, once for all tokens
constexpr int kRowsPerItem = 192;   // query rows (queries times heads of a group) of one attention item
constexpr int kPhasesPerLayer = 5;  // phases that deal work from a counter: qkv, attention, o, gate/up, down
constexpr float kLog2E = 1.44269504f;

struct alignas(64) Counter {
    std::atomic<int> next{0};
};

}  // namespace

void AlignedBuffer::Free::operator()(uint8_t* p) const { std::free(p); }

// calloc and not memset: of a large cache only the pages that are used become resident.
void AlignedBuffer::allocate(size_t bytes) {
    constexpr size_t kAlignment = 4096;
    allocation_.reset();
    data_ = nullptr;
    allocation_.reset(static_cast<uint8_t*>(std::calloc(bytes + kAlignment, 1)));
    if (allocation_ == nullptr) throw std::bad_alloc();
    const uintptr_t address = reinterpret_cast<uintptr_t>(allocation_.get());
    data_ = allocation_.get() + (kAlignment - address % kAlignment) % kAlignment;
}

struct Decoder::Target {
    const PackedLinear* linear;
    Activations input;
    float* out;
    size_t stride;
};

struct Decoder::AttentionItem {
    int sequence;
    int head;
    int query_begin;  // within the sequence's new tokens
    int query_count;
    int segment_begin;
    int segment_end;
    int part;  // index of the sequence's parts, -1 to write finished rows
};

// Everything a step writes, sized by `reserve`.
struct Decoder::Buffers {
    int tokens = 0, sequences = 0, rows = 0;
    int hidden = 0, inner = 0, q = 0, kv = 0, qkv = 0, gate_up = 0;  // strides, padded
    AlignedBuffer residual, normed, projected, attended, gated, activations[3], head_activations, picked;
    AlignedBuffer scratch;
    size_t scratch_bytes = 0;
    std::vector<int> sequence_of, position_of;      // [tokens]
    std::vector<float> cos, sin;                    // [tokens][rotary_dim / 2]
    std::vector<std::vector<AttentionItem>> items;  // [groups]
    std::vector<int> part_segments;                 // [groups][sequences] * 2: begin, end
    int max_parts = 0, max_segments = 0;
    std::vector<SoftmaxPart> parts;
    AlignedBuffer part_values;
    std::vector<Counter> counters;
};

Decoder::Decoder(DecoderConfig config, DecoderWeights weights, int threads, const Kernels& kernels)
    : config_(std::move(config)),
      weights_(std::move(weights)),
      kernels_(kernels),
      pool_(threads),
      buffers_(std::make_unique<Buffers>()) {
    Buffers& b = *buffers_;
    b.hidden = round_up(config_.hidden_size, kSlice);
    b.inner = round_up(config_.intermediate_size, kSlice);
    b.q = round_up(config_.num_heads * config_.head_dim, kSlice);
    b.kv = round_up(config_.num_kv_heads * config_.head_dim, kSlice);
    b.qkv = b.q + 2 * b.kv;
    b.gate_up = 2 * b.inner;
    b.counters = std::vector<Counter>(static_cast<size_t>(config_.num_layers) * kPhasesPerLayer + 1);
    b.items.resize(config_.num_groups);
    const int group = config_.num_heads / config_.num_kv_heads;
    const size_t permuted_row = static_cast<size_t>(std::max({b.hidden, b.q, b.inner})) * sizeof(float);
    const size_t scratch = std::max(
        {kernels_.attention_scratch(group, config_.head_dim), kernels_.panel_scratch(), permuted_row});
    b.scratch_bytes = (scratch + 4095) / 4096 * 4096;
    b.scratch.allocate(b.scratch_bytes * threads);
    reserve(1, 1, 1);
}

Decoder::~Decoder() = default;

void Decoder::allocate_kv(int num_blocks, KvType type) {
    kv_shape_ = KvShape{config_.num_kv_heads, config_.head_dim, type};
    num_blocks_ = 0;  // what stays where memory runs out
    kv_.allocate(kv_shape_.page_bytes() * num_blocks * config_.num_layers);
    num_blocks_ = num_blocks;
}

uint8_t* Decoder::pages(int layer) const {
    return kv_.data() + kv_shape_.page_bytes() * num_blocks_ * static_cast<size_t>(layer);
}

// A size counts only once all its buffers are there: after a failure the next step makes them again.
void Decoder::reserve(int tokens, int sequences, int rows) {
    Buffers& b = *buffers_;
    if (tokens > b.tokens) {
        const size_t t = round_up(tokens, kBlockTokens);
        b.tokens = 0;
        b.residual.allocate(t * b.hidden * 4);
        b.normed.allocate(t * std::max({b.hidden, b.q, b.inner}) * 4);
        b.projected.allocate(t * std::max({b.hidden, b.qkv, b.gate_up}) * 4);
        b.attended.allocate(t * b.q * 4);
        const int slices = slices_of(std::max({b.hidden, b.q, b.inner}));
        for (AlignedBuffer& a : b.activations) a.allocate(t * slices * (kActivationBytes / kBlockTokens));
        const size_t half = config_.inv_freq.size();
        b.cos.resize(t * half);
        b.sin.resize(t * half);
        b.sequence_of.resize(t);
        b.position_of.resize(t);
        b.tokens = static_cast<int>(t);
    }
    if (rows > b.rows) {
        const size_t r = round_up(rows, kBlockTokens);
        b.rows = 0;
        b.picked.allocate(r * b.hidden * 4);
        b.head_activations.allocate(r * slices_of(b.hidden) * (kActivationBytes / kBlockTokens));
        b.rows = static_cast<int>(r);
    }
    if (sequences > b.sequences) {
        b.part_segments.resize(static_cast<size_t>(config_.num_groups) * sequences * 2);
        b.sequences = sequences;
    }
    if (b.max_parts == 0) {
        // Only so many sequences are split over segments as threads could otherwise go without work.
        b.max_parts = std::max(1, 4 * pool_.size() / config_.num_kv_heads);
        b.max_segments = (config_.max_position + kSegmentTokens - 1) / kSegmentTokens;
        const size_t parts = static_cast<size_t>(b.max_parts) * b.max_segments;
        b.parts.resize(parts * config_.num_heads);
        b.part_values.allocate(parts * config_.num_heads * round_up(config_.head_dim, 16) * 4);
    }
    const size_t blocks = b.tokens / kBlockTokens + b.sequences;
    for (std::vector<AttentionItem>& items : b.items) {
        items.reserve(config_.num_kv_heads *
                      (blocks * kBlockTokens + static_cast<size_t>(b.max_parts) * b.max_segments));
    }
}

void Decoder::step(const StepInput& input, float* logits) {
    input_ = &input;
    logits_ = logits;
    reserve(input.tokens, input.sequences, input.rows);
    for (Counter& counter : buffers_->counters) counter.next.store(0, std::memory_order_relaxed);
    locate_tokens();
    for (int group = 0; group < config_.num_groups; ++group) plan_attention(group);
    pool_.run([](void* self, int thread) { static_cast<Decoder*>(self)->run(thread); }, this);
}

void Decoder::locate_tokens() {
    Buffers& b = *buffers_;
    for (int s = 0; s < input_->sequences; ++s) {
        for (int t = input_->cu_seqlens[s]; t < input_->cu_seqlens[s + 1]; ++t) {
            b.sequence_of[t] = s;
            b.position_of[t] = input_->past_lens[s] + t - input_->cu_seqlens[s];
        }
    }
}

void Decoder::plan_attention(int group) {
    Buffers& b = *buffers_;
    std::vector<AttentionItem>& items = b.items[group];
    items.clear();
    int window = 0;
    for (int layer = 0; layer < config_.num_layers; ++layer) {
        if (config_.group_of_layer[layer] == group) window = config_.window_of_layer[layer];
    }
    const int heads_per_group = config_.num_heads / config_.num_kv_heads;
    const int queries_per_item = std::max(1, kRowsPerItem / heads_per_group);
    const bool split = input_->sequences <= b.max_parts;
    for (int s = 0; s < input_->sequences; ++s) {
        const int count = input_->cu_seqlens[s + 1] - input_->cu_seqlens[s];
        const int past = input_->past_lens[s];
        const auto low_segment = [&](int position) {
            return window > 0 ? std::max(0, position - window + 1) / kSegmentTokens : 0;
        };
        int* segments = &b.part_segments[(static_cast<size_t>(group) * b.sequences + s) * 2];
        segments[0] = segments[1] = 0;
        if (count == 0) continue;
        const int begin = low_segment(past), end = past / kSegmentTokens + 1;
        if (count == 1 && split && end - begin > 1) {
            segments[0] = begin;
            segments[1] = end;
            for (int segment = begin; segment < end; ++segment) {
                for (int head = 0; head < config_.num_kv_heads; ++head) {
                    items.push_back({s, head, 0, 1, segment, segment + 1, s});
                }
            }
            continue;
        }
        // The last queries see most: they go first.
        for (int first = (count - 1) / queries_per_item * queries_per_item; first >= 0;
             first -= queries_per_item) {
            const int queries = std::min(queries_per_item, count - first);
            const int last = past + first + queries - 1;
            for (int head = 0; head < config_.num_kv_heads; ++head) {
                items.push_back(
                    {s, head, first, queries, low_segment(past + first), last / kSegmentTokens + 1, -1});
            }
        }
    }
}

template <typename Function>
void Decoder::each_token(int thread, int count, Function function) {
    // Whole activation blocks, so that no two threads write to one.
    const int blocks = (count + kBlockTokens - 1) / kBlockTokens, threads = pool_.size();
    const int begin = blocks * thread / threads * kBlockTokens;
    const int end = std::min(count, blocks * (thread + 1) / threads * kBlockTokens);
    for (int t = begin; t < end; ++t) function(t);
}

void Decoder::run(int thread) {
    const FloatControl control;
    Buffers& b = *buffers_;
    Counter* counters = b.counters.data();
    if (input_->tokens == 0) return;
    embed(thread);
    for (int layer = 0; layer < config_.num_layers; ++layer) {
        const LayerWeights& w = weights_.layers[layer];
        Counter* next = counters + static_cast<size_t>(layer) * kPhasesPerLayer;
        normalize(thread, w.input_norm);
        quantize_inputs(thread, w, kQ, 3, b.normed.floats(), b.hidden);
        pool_.barrier();
        linears(thread, w, kQ, 3, b.projected.floats(), b.qkv, next[0].next);
        pool_.barrier();
        rotate_and_store(thread, layer);
        pool_.barrier();
        attend(thread, layer, next[1].next);
        pool_.barrier();
        finish_attention(thread, config_.group_of_layer[layer]);
        quantize_inputs(thread, w, kO, 1, b.attended.floats(), b.q);
        pool_.barrier();
        linears(thread, w, kO, 1, b.projected.floats(), b.hidden, next[2].next);
        pool_.barrier();
        residual(thread, w, kO);
        normalize(thread, w.post_norm);
        quantize_inputs(thread, w, kGate, 2, b.normed.floats(), b.hidden);
        pool_.barrier();
        linears(thread, w, kGate, 2, b.projected.floats(), b.gate_up, next[3].next);
        pool_.barrier();
        gate(thread, w);
        quantize_inputs(thread, w, kDown, 1, b.normed.floats(), b.inner);
        pool_.barrier();
        linears(thread, w, kDown, 1, b.projected.floats(), b.hidden, next[4].next);
        pool_.barrier();
        residual(thread, w, kDown);
    }
    if (input_->rows == 0) return;
    pool_.barrier();
    head(thread, counters[static_cast<size_t>(config_.num_layers) * kPhasesPerLayer].next);
}

// A row of a packed linear layer in float32: what the integers stand for.
static void dequantize_row(const PackedLinear& w, int row, float* out) {
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

void Decoder::embed(int thread) {
    Buffers& b = *buffers_;
    const size_t half = config_.inv_freq.size();
    each_token(thread, input_->tokens, [&](int t) {
        float* row = b.residual.floats() + static_cast<size_t>(t) * b.hidden;
        dequantize_row(weights_.embedding, input_->token_ids[t], row);
        // What pads the last slice stands for no weight, and norms read whole lanes.
        std::fill(row + config_.hidden_size, row + b.hidden, 0.0f);
        if (config_.embedding_scale != 1.0f) kernels_.scale(row, config_.embedding_scale, b.hidden);
        const float position = static_cast<float>(b.position_of[t]);
        for (size_t i = 0; i < half; ++i) {
            const float angle = position * config_.inv_freq[i];
            const SinCos value = sin_cos(angle);
            b.cos[t * half + i] = static_cast<float>(value.cos) * config_.rope_attention_factor;
            b.sin[t * half + i] = static_cast<float>(value.sin) * config_.rope_attention_factor;
        }
    });
}

// normed = RMSNorm(residual). The buffer holds rows of other widths too, so the padding is cleared each time.
void Decoder::normalize(int thread, const std::vector<float>& weight) {
    Buffers& b = *buffers_;
    const int n = round_up(config_.hidden_size, 16);
    each_token(thread, input_->tokens, [&](int t) {
        float* out = b.normed.floats() + static_cast<size_t>(t) * b.hidden;
        kernels_.rms_norm(b.residual.floats() + static_cast<size_t>(t) * b.hidden, weight.data(),
                          config_.norm_eps, config_.hidden_size, out);
        std::fill(out + n, out + b.hidden, 0.0f);
    });
}

// Which activations the i-th linear layer from `first` takes: the earliest with the same permutation.
int Decoder::input_slot(const LayerWeights& layer, LinearIndex first, int i) {
    for (int j = 0; j < i; ++j) {
        if (layer.permutations[first + j] == layer.permutations[first + i]) return j;
    }
    return i;
}

// Quantizes rows as the inputs of `count` linear layers from `first`; those with the same permutation share.
void Decoder::quantize_inputs(int thread, const LayerWeights& layer, LinearIndex first, int count,
                              const float* rows, int stride) {
    Buffers& b = *buffers_;
    const int columns = layer.linears[first].columns;
    for (int i = 0; i < count; ++i) {
        const std::vector<int32_t>& permutation = layer.permutations[first + i];
        if (input_slot(layer, first, i) != i) continue;
        const Activations out{b.activations[i].data(), input_->tokens, slices_of(columns)};
        if (permutation.empty()) {
            each_token(thread, input_->tokens,
                       [&](int t) { kernels_.quantize(rows + static_cast<size_t>(t) * stride, t, out); });
        } else {
            float* permuted = reinterpret_cast<float*>(b.scratch.data() + b.scratch_bytes * thread);
            std::fill_n(permuted, round_up(columns, kSlice), 0.0f);
            each_token(thread, input_->tokens, [&](int t) {
                const float* row = rows + static_cast<size_t>(t) * stride;
                for (int k = 0; k < columns; ++k) permuted[k] = row[permutation[k]];
                kernels_.quantize(permuted, t, out);
            });
        }
    }
}

void Decoder::linears(int thread, const LayerWeights& layer, LinearIndex first, int count, float* out,
                      int stride, std::atomic<int>& next) {
    Buffers& b = *buffers_;
    Target targets[3];
    for (int i = 0; i < count; ++i) {
        const PackedLinear& w = layer.linears[first + i];
        const Activations input{b.activations[input_slot(layer, first, i)].data(), input_->tokens,
                                w.slices()};
        targets[i] = {&w, input, out, static_cast<size_t>(stride)};
        out += round_up(w.rows, kSlice);
    }
    project(thread, targets, count, next);
}

// Deals the products of a phase: for few tokens runs of tiles, for many panels of 4 tiles by blocks of
// tokens.
void Decoder::project(int thread, const Target* targets, int count, std::atomic<int>& next) {
    Buffers& b = *buffers_;
    const int threads = pool_.size(), tokens = targets[0].input.tokens;
    uint8_t* scratch = b.scratch.data() + b.scratch_bytes * thread;
    int total = 0;
    for (int i = 0; i < count; ++i) total += targets[i].linear->tile_count();
    if (tokens <= kFewTokens) {
        // Long runs first, single tiles last, so that threads end together whatever their speeds.
        const int tail = std::min(total, 4 * threads), runs = (total - tail) / 4,
                  items = runs + total - 4 * runs;
        for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;) {
            int begin = item < runs ? item * 4 : runs * 4 + item - runs;
            int end = item < runs ? begin + 4 : begin + 1;
            for (int i = 0; i < count && begin < end; ++i) {
                const Target& t = targets[i];
                const int tiles = t.linear->tile_count();
                if (begin < tiles) {
                    kernels_.linear_rows(*t.linear, t.input, t.out, t.stride, begin, std::min(end, tiles));
                }
                begin = std::max(0, begin - tiles);
                end -= tiles;
            }
        }
        return;
    }
    const int blocks = targets[0].input.blocks();
    const int ranges = (blocks + kPanelBlocks - 1) / kPanelBlocks;
    int panels = 0;
    for (int i = 0; i < count; ++i)
        panels += (targets[i].linear->tile_count() + kPanelTiles - 1) / kPanelTiles;
    // Panels that do not divide among the threads are split by tokens instead.
    const int whole = panels / threads * threads, pieces = (panels - whole) * threads, items = whole + pieces;
    for (int item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items * ranges;) {
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
            const Target& t = targets[i];
            const int own = (t.linear->tile_count() + kPanelTiles - 1) / kPanelTiles;
            if (panel < own) {
                const int tile = panel * kPanelTiles;
                kernels_.linear_panel(*t.linear, t.input, t.out, t.stride, tile,
                                      std::min(tile + kPanelTiles, t.linear->tile_count()), block_begin,
                                      block_end, scratch);
                break;
            }
            panel -= own;
        }
    }
}

// Bias, q/k norm and rotary embedding; keys and values go to the cache, queries are scaled for the softmax.
void Decoder::rotate_and_store(int thread, int layer) {
    Buffers& b = *buffers_;
    const LayerWeights& w = weights_.layers[layer];
    const int head_dim = config_.head_dim, half = static_cast<int>(config_.inv_freq.size());
    const int padded = round_up(head_dim, 16), group = config_.group_of_layer[layer];
    const int32_t* slots = input_->slot_mapping + static_cast<size_t>(group) * input_->tokens;
    const float scale = config_.softmax_scale * (config_.attention_softcap > 0 ? 1.0f : kLog2E);
    uint8_t* layer_pages = pages(layer);
    float* row = reinterpret_cast<float*>(b.scratch.data() + b.scratch_bytes * thread);
    std::fill_n(row, padded, 0.0f);
    const auto prepare = [&](float* head, const std::vector<float>& norm, int t) {
        if (!norm.empty()) {
            std::memcpy(row, head, head_dim * sizeof(float));
            kernels_.rms_norm(row, norm.data(), config_.norm_eps, head_dim, row);
            std::memcpy(head, row, head_dim * sizeof(float));
        }
        kernels_.rope(head, b.cos.data() + static_cast<size_t>(t) * half,
                      b.sin.data() + static_cast<size_t>(t) * half, half);
    };
    each_token(thread, input_->tokens, [&](int t) {
        float* q = b.projected.floats() + static_cast<size_t>(t) * b.qkv;
        float* k = q + b.q;
        float* v = k + b.kv;
        if (!w.biases[kQ].empty()) kernels_.add(q, w.biases[kQ].data(), b.q);
        if (!w.biases[kK].empty()) kernels_.add(k, w.biases[kK].data(), b.kv);
        if (!w.biases[kV].empty()) kernels_.add(v, w.biases[kV].data(), b.kv);
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

void Decoder::attend(int thread, int layer, std::atomic<int>& next) {
    Buffers& b = *buffers_;
    const int group = config_.group_of_layer[layer], head_dim = config_.head_dim;
    const int heads_per_group = config_.num_heads / config_.num_kv_heads, padded = round_up(head_dim, 16);
    const std::vector<AttentionItem>& items = b.items[group];
    uint8_t* scratch = b.scratch.data() + b.scratch_bytes * thread;
    const int count = static_cast<int>(items.size());
    for (int index; (index = next.fetch_add(1, std::memory_order_relaxed)) < count;) {
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
        task.queries = b.projected.floats() + static_cast<size_t>(token) * b.qkv + offset;
        task.query_stride = b.qkv;
        task.query_count = item.query_count;
        task.first_position = b.position_of[token];
        task.window = config_.window_of_layer[layer];
        task.softcap = config_.attention_softcap;
        task.segment_begin = item.segment_begin;
        task.segment_end = item.segment_end;
        task.output = b.attended.floats() + static_cast<size_t>(token) * b.q + offset;
        task.output_stride = b.q;
        if (item.part >= 0) {
            const size_t part = (static_cast<size_t>(item.part) * config_.num_kv_heads + item.head) *
                                b.max_segments * heads_per_group;
            task.parts = b.parts.data() + part;
            task.part_values = b.part_values.floats() + part * padded;
        }
        kernels_.attend(task, scratch);
    }
}

// Merges the rows of sequences whose attention was split over segments.
void Decoder::finish_attention(int thread, int group) {
    Buffers& b = *buffers_;
    const int head_dim = config_.head_dim, padded = round_up(head_dim, 16);
    const int heads_per_group = config_.num_heads / config_.num_kv_heads;
    each_token(thread, input_->tokens, [&](int t) {
        const int sequence = b.sequence_of[t];
        const int* segments = &b.part_segments[(static_cast<size_t>(group) * b.sequences + sequence) * 2];
        if (segments[0] == segments[1]) return;
        for (int h = 0; h < config_.num_heads; ++h) {
            const size_t part = (static_cast<size_t>(sequence) * config_.num_kv_heads + h / heads_per_group) *
                                b.max_segments * heads_per_group;
            kernels_.merge_parts(b.parts.data() + part, b.part_values.floats() + part * padded, segments[0],
                                 segments[1], heads_per_group, h % heads_per_group, head_dim,
                                 b.attended.floats() + static_cast<size_t>(t) * b.q + h * head_dim);
        }
    });
}

void Decoder::gate(int thread, const LayerWeights& layer) {
    Buffers& b = *buffers_;
    const int inner = round_up(config_.intermediate_size, 16);
    each_token(thread, input_->tokens, [&](int t) {
        float* gate = b.projected.floats() + static_cast<size_t>(t) * b.gate_up;
        float* up = gate + b.inner;
        if (!layer.biases[kGate].empty()) kernels_.add(gate, layer.biases[kGate].data(), inner);
        if (!layer.biases[kUp].empty()) kernels_.add(up, layer.biases[kUp].data(), inner);
        float* out = b.normed.floats() + static_cast<size_t>(t) * b.inner;
        kernels_.gated(gate, up, config_.activation, inner, out);
        std::fill(out + inner, out + b.inner, 0.0f);
    });
}

// residual += projection (+ bias)
void Decoder::residual(int thread, const LayerWeights& layer, LinearIndex linear) {
    Buffers& b = *buffers_;
    each_token(thread, input_->tokens, [&](int t) {
        float* y = b.projected.floats() + static_cast<size_t>(t) * b.hidden;
        const int n = round_up(config_.hidden_size, 16);
        if (!layer.biases[linear].empty()) kernels_.add(y, layer.biases[linear].data(), n);
        kernels_.add(b.residual.floats() + static_cast<size_t>(t) * b.hidden, y, n);
    });
}

void Decoder::head(int thread, std::atomic<int>& next) {
    Buffers& b = *buffers_;
    const Activations input{b.head_activations.data(), input_->rows, slices_of(config_.hidden_size)};
    each_token(thread, input_->rows, [&](int r) {
        float* row = b.picked.floats() + static_cast<size_t>(r) * b.hidden;
        kernels_.rms_norm(b.residual.floats() + static_cast<size_t>(input_->logit_rows[r]) * b.hidden,
                          weights_.final_norm.data(), config_.norm_eps, config_.hidden_size, row);
        kernels_.quantize(row, r, input);
    });
    pool_.barrier();
    const Target target{&weights_.head, input, logits_, static_cast<size_t>(logit_stride())};
    project(thread, &target, 1, next);
    if (config_.logit_softcap <= 0) return;
    pool_.barrier();
    each_token(thread, input_->rows, [&](int r) {
        kernels_.softcap(logits_ + static_cast<size_t>(r) * logit_stride(), config_.logit_softcap,
                         logit_stride());
    });
}

}  // namespace nybble
