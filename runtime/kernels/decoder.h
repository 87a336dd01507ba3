// The whole decoder: one call a step, over a packed batch. Knows sequences' pages, nothing of requests.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "aligned_buffer.h"
#include "crowd_pace.h"
#include "decoder_weights.h"
#include "experts.h"
#include "head_search.h"
#include "kernels.h"
#include "shared_work.h"
#include "step_buffers.h"
#include "step_input.h"
#include "step_plan.h"
#include "stream_pace.h"
#include "thread_pool.h"
#include "weight_stream.h"

namespace nybble {

// Rows of a step that a phase works on: all tokens, or some of them.
struct StepRows {
    float* residual = nullptr;  // [count][hidden]
    int count = 0;
    const int32_t* tokens = nullptr;  // which they are; null is all

    int token(int r) const { return tokens == nullptr ? r : tokens[r]; }
    // Whether one of `size` tokens from `first` is among them.
    bool any_of(int first, int size) const {
        return tokens == nullptr ||
               std::any_of(tokens, tokens + count, [&](int32_t t) { return t >= first && t < first + size; });
    }
};

// Some heads of a token.
struct Heads {
    int begin, end;

    int count() const { return end - begin; }
};

// What is done with each row of logits once it is there, by the thread that has found its highest.
class RowWork {
  public:
    // `logits` may be overwritten. Must not throw. No `thread` is over the number of rows.
    virtual void run_row(int thread, int row, float* logits, int32_t best) = 0;

  protected:
    ~RowWork() = default;
};

class Decoder {
  public:
    // `stream` reads what of the weights is streamed.
    Decoder(DecoderConfig config, DecoderWeights weights, int threads, const Kernels& kernels,
            std::unique_ptr<WeightStream> stream = nullptr);

    void allocate_kv(int num_blocks, KvType type);
    // Buffers for steps of up to `tokens` tokens, `sequences` sequences and `rows` logit rows; grows only.
    void reserve(int tokens, int sequences, int rows);

    // Writes logits [rows][logit_stride()]; allocates nothing when the sizes were reserved. Throws
    // StreamError where streamed weights could not be read: the step's pages and logits then hold anything.
    // Where the input asks for the best only, other logits may be given as -infinity; else `row_work` is run
    // once for each row.
    void step(const StepInput& input, float* logits, RowWork* row_work = nullptr);
    // Of each row of the last step the first of the highest logits.
    const std::vector<int32_t>& best_tokens() const { return best_tokens_; }

    // Bytes of the head that the last step did without.
    size_t skipped_bytes() const { return skipped_bytes_; }

    int logit_stride() const { return round_up(config_.vocab_size, kTileRows); }
    int num_blocks() const { return num_blocks_; }
    const KvShape& kv_shape() const { return kv_shape_; }
    // One layer's pages, [num_blocks][page_bytes].
    uint8_t* pages(int layer) const;
    const DecoderConfig& config() const { return config_; }
    const Kernels& kernels() const { return kernels_; }
    int threads() const { return pool_.size(); }
    size_t step_bytes() const {
        return buffers_.bytes() + experts_.bytes() + (search_ ? search_->bytes() : 0);
    }
    // Of experts that are read when they are chosen.
    ExpertCounts expert_counts() const { return stream_ ? stream_->expert_counts() : ExpertCounts{}; }

  private:
    // The step as one thread sees it: phases with barriers between them.
    void run(int thread);
    bool embed(int thread);
    void begin_token(int thread, int t);
    const float* normalized(int thread, const StepRows& rows, int r, const std::vector<float>& weight);
    void quantize_input(int thread, const StepRows& rows, int r, const LayerWeights& layer, LinearIndex first,
                        int count, const float* row);
    void quantize_row(int thread, const float* row, const std::vector<int32_t>& permutation, int columns,
                      int token, Activations out);
    Activations inputs(int thread, const StepRows& rows, const LayerWeights& layer, LinearIndex linear) const;
    void linears(int thread, const StepRows& rows, const LayerWeights& layer, LinearIndex first, int count,
                 float* out, int stride, SharedWork& work);
    void rotate_and_store(int thread, int layer);
    void rotate_and_store(int thread, int layer, int t, Heads queries, Heads keys);
    void normalize_heads(const LayerWeights& w, float* q, float* k);
    void attend(int thread, int layer, const StepRows& rows, SharedWork& work);
    const float* attended(int thread, int t, int group);
    // The phases between attention and the next layer, decoder_mlp.cpp.
    void run_mlp(int thread, const StepRows& rows, const LayerWeights& layer, SharedWork* work);
    void activate(int thread, const StepRows& rows, const LayerWeights& layer);
    const float* gated(int thread, int r, const LayerWeights& layer, int begin, int end);
    // The phases of a mixture of experts, decoder_experts.cpp; what it gives is summed up by combine_experts.
    // False where experts could not be read.
    bool run_experts(int thread, int layer, SharedWork* work);
    void run_expert_round(int thread, const LayerWeights& layer, SharedWork* work);
    void choose_experts(int t, const LayerWeights& layer);
    void quantize_expert_input(int thread, const LayerWeights& layer, const ExpertGroup& group, int row);
    void quantize_expert_inner(int thread, const LayerWeights& layer, const ExpertGroup& group, int row);
    void combine_experts(int thread, int t);
    float* expert_row(int t) const;
    void add_residual(int thread, const StepRows& rows, int r, const std::vector<float>& bias,
                      const std::vector<float>& norm);
    void head(int thread);
    void search_head(int thread, Activations input);
    // Of thread 0, before a barrier: streamed weights are there for all threads after it.
    void fetch_layer(LayerWeights& layer);
    void fetch_head_piece(HeadPiece& piece);
    void group_experts(int layer);
    void fetch_experts(LayerWeights& layer);
    void keep_reading(int thread);
    void step_with_stream();
    static void run_of(void* self, int thread);

    // Calls function(t) for this thread's share of [0, count).
    template <typename Function>
    void each_token(int thread, int count, Function function);
    // The same for rows that products read next, which are there for all threads after `meet`: where each
    // has a copy of the one row it makes all of it, and waits for nobody.
    template <typename Function>
    void each_row(int thread, int count, Function function);
    void meet() {
        if (!copies_) pool_.barrier();
    }
    float* residual(int thread, const StepRows& rows, int r) const {
        if (copies_) return buffers_.copied_residual(thread);
        return rows.residual + static_cast<size_t>(r) * buffers_.hidden;
    }
    // What attention and MLP give, [tokens][hidden]; of one row not where the products before it wrote, since
    // other threads may read it when the next product begins.
    float* given() const { return buffers_.projected.floats() + (copies_ ? buffers_.projected_width() : 0); }

    const DecoderConfig config_;
    DecoderWeights weights_;  // of which the places of streamed tiles change
    const std::unique_ptr<WeightStream> stream_;
    const uint8_t* rows_ = nullptr;  // of the embedding, where it is read by row
    const Kernels& kernels_;
    ThreadPool pool_;
    StreamPace pace_;
    CrowdPace crowd_pace_;

    KvShape kv_shape_;
    int num_blocks_ = 0;
    AlignedBuffer kv_;

    StepPlan plan_;
    StepBuffers buffers_;
    ExpertRows experts_;
    std::vector<const float*> expert_outputs_;  // [threads][experts of a token]
    std::vector<SharedWork> work_;  // one a phase that deals work, last the head's pieces or a search's two
    const StepInput* input_ = nullptr;
    // In a step of one token every thread has its residual and quantizes the inputs of products for itself:
    // that takes less time than to wait for another that does.
    bool copies_ = false;
    // Whether the last layer goes on after attention with the rows whose logits are wanted alone.
    bool picks_ = false;
    StepRows all_, wanted_;
    float* logits_ = nullptr;
    RowWork* row_work_ = nullptr;
    std::vector<int32_t> best_tokens_;    // [rows]
    std::unique_ptr<HeadSearch> search_;  // where the head stays in memory and nothing is done to logits
    bool searches_ = false;
    size_t skipped_bytes_ = 0;
};

template <typename Function>
void Decoder::each_token(int thread, int count, Function function) {
    // Whole activation blocks, so that no two threads write to one.
    const int blocks = (count + kBlockTokens - 1) / kBlockTokens, threads = pool_.running();
    const int begin = blocks * thread / threads * kBlockTokens;
    const int end = std::min(count, blocks * (thread + 1) / threads * kBlockTokens);
    for (int t = begin; t < end; ++t) function(t);
}

template <typename Function>
void Decoder::each_row(int thread, int count, Function function) {
    if (copies_) return function(0);
    each_token(thread, count, function);
}

}  // namespace nybble
