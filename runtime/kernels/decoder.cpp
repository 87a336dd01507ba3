#include "decoder.h"

#include <algorithm>
#include <chrono>

#include "float_control.h"
#include "linear_jobs.h"
#include "rotary.h"
#include "tile_rows.h"

namespace nybble {
namespace {

// Phases that deal work from a counter: qkv, attention, o, then gate/up and down, or those of a mixture:
// router, its inputs, gate/up, activations, down.
constexpr int kPhasesPerLayer = 8;

size_t scratch_of_thread(const DecoderConfig& config, const Kernels& kernels) {
    const int group = config.num_heads / config.num_kv_heads;
    return std::max(kernels.attention_scratch(group, config.head_dim), kernels.panel_scratch());
}

std::vector<SharedWork> work_of_phases(int phases, int threads) {
    std::vector<SharedWork> work;
    for (int i = 0; i < phases; ++i) work.emplace_back(threads);
    return work;
}

// Input slots once for all steps: comparing permutations takes longer than a phase.
DecoderWeights completed(DecoderWeights weights) {
    constexpr LinearIndex kFirstOfPhase[] = {kQ, kQ, kQ, kO, kGate, kGate, kDown};
    for (LayerWeights& layer : weights.layers) {
        for (int i = 0; i < kLinearCount; ++i) {
            int j = kFirstOfPhase[i];
            while (layer.permutations[j] != layer.permutations[i]) ++j;
            layer.input_slots[i] = j - kFirstOfPhase[i];
        }
        for (ExpertWeights& expert : layer.experts) {
            expert.separate_up = expert.permutations[kExpertGate] != expert.permutations[kExpertUp];
        }
    }
    if (!weights.streamed_head) weights.head_pieces = {{weights.head, 0, 0}};
    return weights;
}

bool separate_up(const DecoderWeights& weights) {
    for (const LayerWeights& layer : weights.layers) {
        for (const ExpertWeights& expert : layer.experts) {
            if (expert.separate_up) return true;
        }
    }
    return false;
}

}  // namespace

Decoder::Decoder(DecoderConfig config, DecoderWeights weights, int threads, const Kernels& kernels,
                 std::unique_ptr<WeightStream> stream)
    : config_(std::move(config)),
      weights_(completed(std::move(weights))),
      stream_(std::move(stream)),
      kernels_(kernels),
      pool_(threads, stream_ != nullptr),
      pace_(threads),
      crowd_pace_(threads),
      plan_(config_, threads),
      buffers_(config_, plan_, threads, scratch_of_thread(config_, kernels)),
      experts_(config_, separate_up(weights_)),
      expert_outputs_(static_cast<size_t>(threads) * experts_.count()),
      work_(work_of_phases(
          config_.num_layers * kPhasesPerLayer + static_cast<int>(weights_.head_pieces.size()) + 1,
          threads)) {
    if (!weights_.streamed_head && config_.logit_softcap == 0) {
        search_ = std::make_unique<HeadSearch>(kernels_, weights_.head, threads);
    }
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
    experts_.reserve(buffers_.tokens());
    best_tokens_.reserve(rows);
}

void Decoder::step(const StepInput& input, float* logits, RowWork* row_work) {
    input_ = &input;
    logits_ = logits;
    row_work_ = row_work;
    reserve(input.tokens, input.sequences, input.rows);
    for (SharedWork& work : work_) work.reset();
    best_tokens_.resize(input.rows);
    plan_.make(input);
    copies_ = input.tokens == 1 && input.rows <= 1 && stream_ == nullptr && config_.is_mixture.empty();
    picks_ = input.rows < input.tokens && stream_ == nullptr && weights_.layers.back().experts.empty();
    skipped_bytes_ = 0;
    // Beside other tokens the head is a small part of a step, and for many rows a search takes longer.
    searches_ =
        input.best_only && input.tokens == 1 && input.rows == 1 && search_ != nullptr && search_->begin();
    all_ = {buffers_.residual.floats(), input.tokens, nullptr};
    wanted_ = {buffers_.picked.floats(), input.rows, input.logit_rows};
    if (input.tokens == 0) return;
    if (stream_ != nullptr) return step_with_stream();
    const auto begin = std::chrono::steady_clock::now();
    pool_.run(run_of, this, crowd_pace_.threads(input.tokens));
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    crowd_pace_.note(input.tokens, passed.count(), pool_.seconds_asleep());
}

void Decoder::step_with_stream() {
    const bool alone = pace_.alone(input_->tokens);
    const auto begin = std::chrono::steady_clock::now();
    stream_->begin_step(input_->rows > 0, input_->tokens);
    pool_.run(run_of, this, alone ? 1 : pool_.size());
    stream_->end_step();
    const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
    pace_.note(input_->tokens, alone, passed.count(), stream_->seconds_waited());
}

void Decoder::run_of(void* self, int thread) { static_cast<Decoder*>(self)->run(thread); }

void Decoder::run(int thread) {
    const FloatControl control;
    StepBuffers& b = buffers_;
    const StepRows& last = picks_ ? wanted_ : all_;
    const auto add_mlp = [&](const StepRows& rows, int r, const LayerWeights& w) {
        if (!w.experts.empty()) combine_experts(thread, r);
        add_residual(thread, rows, r, w.biases[kDown], w.after_mlp);
    };
    if (!embed(thread)) return;
    for (int layer = 0; layer < config_.num_layers; ++layer) {
        LayerWeights& w = weights_.layers[layer];
        SharedWork* work = work_.data() + static_cast<size_t>(layer) * kPhasesPerLayer;
        each_row(thread, input_->tokens, [&](int t) {
            if (layer > 0) add_mlp(all_, t, weights_.layers[layer - 1]);
            quantize_input(thread, all_, t, w, kQ, 3, normalized(thread, all_, t, w.before_attention));
        });
        if (w.streamed && thread == 0) fetch_layer(w);
        meet();
        if (w.linears[kQ].tiles == nullptr) return;
        linears(thread, all_, w, kQ, 3, b.projected.floats(), b.qkv, work[0]);
        pool_.barrier();
        rotate_and_store(thread, layer);
        // The last layer's keys and values are those of all tokens; what comes after is of those asked for.
        const StepRows& rows = layer + 1 == config_.num_layers ? last : all_;
        if (rows.count == 0) return;
        pool_.barrier();
        attend(thread, layer, rows, work[1]);
        pool_.barrier();
        each_row(thread, rows.count, [&](int r) {
            const int t = rows.token(r);
            if (rows.tokens != nullptr) {
                std::copy_n(residual(thread, all_, t), b.hidden, residual(thread, rows, r));
            }
            quantize_input(thread, rows, r, w, kO, 1, attended(thread, t, config_.group_of_layer[layer]));
        });
        meet();
        linears(thread, rows, w, kO, 1, given(), b.hidden, work[2]);
        pool_.barrier();
        if (w.experts.empty()) {
            run_mlp(thread, rows, w, work + 3);
        } else {
            if (!run_experts(thread, layer, work + 3)) return;
        }
        pool_.barrier();
        if (w.streamed && thread == 0) stream_->release();
        if (w.experts_by_use > 0 && thread == 0) stream_->release_experts();
    }
    each_row(thread, last.count, [&](int r) { add_mlp(last, r, weights_.layers.back()); });
    if (input_->rows == 0) return;
    meet();
    head(thread);
}

// False where rows of the embedding could not be read.
bool Decoder::embed(int thread) {
    const PackedLinear& embedding = weights_.embedding;
    if (!weights_.streamed_head) {
        each_row(thread, input_->tokens, [&](int t) {
            const int id = input_->token_ids[t];
            dequantize_tile_row(embedding, id, residual(thread, all_, t));
            begin_token(thread, t);
        });
        return true;
    }
    const size_t row_size = row_bytes(embedding);
    for (int first = 0; first < input_->tokens; first += WeightStream::kRowsAtOnce) {
        const int count = std::min(WeightStream::kRowsAtOnce, input_->tokens - first);
        if (thread == 0) rows_ = stream_->rows(input_->token_ids + first, count);
        pool_.barrier();
        if (rows_ == nullptr) return false;
        for (int i = thread; i < count; i += pool_.running()) {
            dequantize_row(embedding, rows_ + row_size * i, residual(thread, all_, first + i));
            begin_token(thread, first + i);
        }
        pool_.barrier();
    }
    return true;
}

// What a token begins with, once its row of the embedding is there: its scale and its angles of each RoPE.
void Decoder::begin_token(int thread, int t) {
    StepBuffers& b = buffers_;
    float* row = residual(thread, all_, t);
    // What pads the last slice stands for no weight, and norms read whole lanes.
    std::fill(row + config_.hidden_size, row + b.hidden, 0.0f);
    if (config_.embedding_scale != 1.0f) kernels_.scale(row, config_.embedding_scale, b.hidden);
    if (copies_ && thread > 0) return;
    const float position = static_cast<float>(plan_.position_of(t));
    for (size_t rope = 0; rope < config_.ropes.size(); ++rope) {
        const auto& [inv_freq, attention_factor] = config_.ropes[rope];
        float* cos = b.cos_of(t, static_cast<int>(rope));
        float* sin = b.sin_of(t, static_cast<int>(rope));
        for (size_t i = 0; i < inv_freq.size(); ++i) {
            const float angle = position * inv_freq[i];
            const SinCos value = sin_cos(angle);
            cos[i] = static_cast<float>(value.cos) * attention_factor;
            sin[i] = static_cast<float>(value.sin) * attention_factor;
        }
    }
}

// RMSNorm of a row's residual, or the residual itself where there is no weight; padded with zeros, and valid
// until the thread's next row.
const float* Decoder::normalized(int thread, const StepRows& rows, int r, const std::vector<float>& weight) {
    StepBuffers& b = buffers_;
    const float* row = residual(thread, rows, r);
    if (weight.empty()) return row;
    float* out = b.row(thread);
    kernels_.rms_norm(row, weight.data(), config_.norm_eps, config_.hidden_size, out);
    std::fill(out + round_up(config_.hidden_size, 16), out + b.hidden, 0.0f);
    return out;
}

// Quantizes a row as the input of `count` linear layers from `first`; those with the same permutation share
// it. The row may be the thread's own.
void Decoder::quantize_input(int thread, const StepRows& rows, int r, const LayerWeights& layer,
                             LinearIndex first, int count, const float* row) {
    const int columns = layer.linears[first].columns;
    for (int i = 0; i < count; ++i) {
        const LinearIndex linear = static_cast<LinearIndex>(first + i);
        if (layer.input_slots[linear] != i) continue;
        quantize_row(thread, row, layer.permutations[linear], columns, r,
                     inputs(thread, rows, layer, linear));
    }
}

// What a linear layer reads.
Activations Decoder::inputs(int thread, const StepRows& rows, const LayerWeights& layer,
                            LinearIndex linear) const {
    const int slices = layer.linears[linear].slices(), slot = layer.input_slots[linear];
    // Inputs of `down` are made while others read those of gate and up.
    if (linear == kDown) return {buffers_.activations[2].data(), rows.count, slices};
    uint8_t* data = copies_ ? buffers_.copied_inputs(thread, slot) : buffers_.activations[slot].data();
    return {data, rows.count, slices};
}

// A row in the order that a linear layer has its columns in, quantized as one of its tokens.
void Decoder::quantize_row(int thread, const float* row, const std::vector<int32_t>& permutation, int columns,
                           int token, Activations out) {
    if (permutation.empty()) return kernels_.quantize(row, token, out);
    float* permuted = buffers_.permuted(thread);
    for (int k = 0; k < columns; ++k) permuted[k] = row[permutation[k]];
    std::fill(permuted + columns, permuted + round_up(columns, kSlice), 0.0f);
    kernels_.quantize(permuted, token, out);
}

void Decoder::linears(int thread, const StepRows& rows, const LayerWeights& layer, LinearIndex first,
                      int count, float* out, int stride, SharedWork& work) {
    keep_reading(thread);
    LinearJob jobs[3];
    for (int i = 0; i < count; ++i) {
        const LinearIndex linear = static_cast<LinearIndex>(first + i);
        const PackedLinear& w = layer.linears[linear];
        jobs[i] = {&w, inputs(thread, rows, layer, linear), out, static_cast<size_t>(stride)};
        out += round_up(w.rows, kSlice);
    }
    run_linear_jobs(kernels_, jobs, count, thread, work, buffers_.scratch(thread));
}

// A row's residual += its projection (+ bias), normalized and scaled where the model does.
void Decoder::add_residual(int thread, const StepRows& rows, int r, const std::vector<float>& bias,
                           const std::vector<float>& norm) {
    StepBuffers& b = buffers_;
    float* y = given() + static_cast<size_t>(r) * b.hidden;
    const int n = round_up(config_.hidden_size, 16);
    if (copies_) {  // other threads read it as well
        std::copy_n(y, n, b.row(thread));
        y = b.row(thread);
    }
    if (!bias.empty()) kernels_.add(y, bias.data(), n);
    if (!norm.empty()) kernels_.rms_norm(y, norm.data(), config_.norm_eps, config_.hidden_size, y);
    if (config_.residual_scale != 1.0f) kernels_.scale(y, config_.residual_scale, n);
    kernels_.add(residual(thread, rows, r), y, n);
}

void Decoder::head(int thread) {
    StepBuffers& b = buffers_;
    uint8_t* quantized = copies_ ? b.copied_inputs(thread, 0) : b.head_activations.data();
    const Activations input{quantized, input_->rows, slices_of(config_.hidden_size)};
    each_row(thread, input_->rows, [&](int r) {
        const float* row = picks_ ? normalized(thread, wanted_, r, weights_.final_norm)
                                  : normalized(thread, all_, input_->logit_rows[r], weights_.final_norm);
        kernels_.quantize(row, r, input);
    });
    std::vector<HeadPiece>& pieces = weights_.head_pieces;
    const bool fetches = weights_.streamed_head && thread == 0;
    if (fetches) fetch_head_piece(pieces[0]);
    meet();
    if (searches_ && search_->prepare(thread, input)) return search_head(thread, input);
    SharedWork* work = work_.data() + static_cast<size_t>(config_.num_layers) * kPhasesPerLayer;
    for (size_t i = 0; i < pieces.size(); ++i) {
        if (pieces[i].linear.tiles == nullptr) return;
        keep_reading(thread);
        const LinearJob job{&pieces[i].linear, input, logits_ + pieces[i].first_row,
                            static_cast<size_t>(logit_stride())};
        run_linear_jobs(kernels_, &job, 1, thread, work[i], b.scratch(thread));
        if (fetches && i + 1 < pieces.size()) fetch_head_piece(pieces[i + 1]);
        pool_.barrier();
        if (fetches) stream_->release();
    }
    for (int r = thread; r < input_->rows; r += pool_.running()) {
        float* logits = logits_ + static_cast<size_t>(r) * logit_stride();
        if (config_.logit_softcap > 0) kernels_.softcap(logits, config_.logit_softcap, logit_stride());
        best_tokens_[r] = kernels_.best_logit(logits, config_.vocab_size);
        if (row_work_ != nullptr) row_work_->run_row(thread, r, logits, best_tokens_[r]);
    }
}

void Decoder::search_head(int thread, Activations input) {
    SharedWork* work = work_.data() + static_cast<size_t>(config_.num_layers) * kPhasesPerLayer;
    keep_reading(thread);
    search_->bound(thread, logits_, work[0]);
    pool_.barrier();
    search_->settle(thread, input, logits_);
    pool_.barrier();
    keep_reading(thread);
    search_->search(thread, pool_.running(), input, logits_, work[1]);
    pool_.barrier();
    if (thread > 0) return;
    best_tokens_[0] = search_->best();
    skipped_bytes_ = search_->skipped_bytes();
}

// At the beginning of a part whose work is shared out while it goes on: the other threads take what this one
// does not come to.
void Decoder::keep_reading(int thread) {
    if (stream_ != nullptr && thread == 0) stream_->advance();
}

void Decoder::fetch_layer(LayerWeights& layer) {
    const uint8_t* bytes = stream_->acquire();
    for (int i = 0; i < layer.linear_count(); ++i) {
        if (layer.by_use(i)) continue;
        layer.linear(i).tiles = bytes == nullptr ? nullptr : bytes + layer.place(i);
    }
}

void Decoder::fetch_head_piece(HeadPiece& piece) {
    const uint8_t* bytes = stream_->acquire();
    piece.linear.tiles = bytes == nullptr ? nullptr : bytes + piece.place;
}

}  // namespace nybble
