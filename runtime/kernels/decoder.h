// The whole decoder: one call a step, over a packed batch. Knows sequences' pages, nothing of requests.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace nybble {

struct DecoderConfig {
    int vocab_size = 0;
    int hidden_size = 0;
    int intermediate_size = 0;
    int num_layers = 0;
    int num_heads = 0;
    int num_kv_heads = 0;
    int head_dim = 0;
    int max_position = 0;
    float norm_eps = 0;
    Activation activation = Activation::kSilu;
    float attention_softcap = 0;  // 0 is none
    float logit_softcap = 0;
    float embedding_scale = 1;
    float softmax_scale = 1;
    std::vector<float> inv_freq;  // [rotary_dim / 2]
    float rope_attention_factor = 1;
    std::vector<int> window_of_layer;  // tokens, 0 is all
    std::vector<int> group_of_layer;   // row of block_table and slot_mapping
    int num_groups = 1;
};

enum LinearIndex { kQ, kK, kV, kO, kGate, kUp, kDown, kLinearCount };

// Vectors are zero padded to a multiple of 32; an empty one is absent.
struct LayerWeights {
    PackedLinear linears[kLinearCount];
    std::vector<float> biases[kLinearCount];
    std::vector<int32_t> permutations[kLinearCount];  // stored column j is the input's column permutation[j]
    std::vector<float> input_norm, post_norm, q_norm, k_norm;
};

struct DecoderWeights {
    std::vector<LayerWeights> layers;
    PackedLinear embedding;  // symmetric, 8 bits
    PackedLinear head;       // the embedding again when tied
    std::vector<float> final_norm;
};

// One step's arrays, already checked against the contract in runtime/batch.py.
struct StepInput {
    const int32_t* token_ids;     // [tokens]
    const int32_t* cu_seqlens;    // [sequences + 1]
    const int32_t* past_lens;     // [sequences]
    const int32_t* block_table;   // [groups, sequences, max_blocks]
    const int32_t* slot_mapping;  // [groups, tokens]
    const int32_t* logit_rows;    // [rows]
    int tokens;
    int sequences;
    int max_blocks;
    int rows;
};

// Zeroed memory aligned to pages.
class AlignedBuffer {
  public:
    void allocate(size_t bytes);
    uint8_t* data() const { return data_; }
    float* floats() const { return reinterpret_cast<float*>(data_); }

  private:
    struct Free {
        void operator()(uint8_t* p) const;
    };
    std::unique_ptr<uint8_t, Free> allocation_;
    uint8_t* data_ = nullptr;
};

class Decoder {
  public:
    Decoder(DecoderConfig config, DecoderWeights weights, int threads, const Kernels& kernels);
    ~Decoder();

    void allocate_kv(int num_blocks, KvType type);
    // Buffers for steps of up to `tokens` tokens, `sequences` sequences and `rows` logit rows; grows only.
    void reserve(int tokens, int sequences, int rows);

    // Writes logits [rows][logit_stride()]; allocates nothing when the sizes were reserved.
    void step(const StepInput& input, float* logits);

    int logit_stride() const { return round_up(config_.vocab_size, kTileRows); }
    int num_blocks() const { return num_blocks_; }
    const KvShape& kv_shape() const { return kv_shape_; }
    // One layer's pages, [num_blocks][page_bytes].
    uint8_t* pages(int layer) const;
    const DecoderConfig& config() const { return config_; }
    const Kernels& kernels() const { return kernels_; }
    int threads() const { return pool_.size(); }

  private:
    struct Target;
    struct AttentionItem;
    struct Buffers;

    // The step as one thread sees it: phases with barriers between them.
    void run(int thread);
    void embed(int thread);
    void normalize(int thread, const std::vector<float>& weight);
    static int input_slot(const LayerWeights& layer, LinearIndex first, int i);
    void quantize_inputs(int thread, const LayerWeights& layer, LinearIndex first, int count,
                         const float* rows, int stride);
    void linears(int thread, const LayerWeights& layer, LinearIndex first, int count, float* out, int stride,
                 std::atomic<int>& next);
    void project(int thread, const Target* targets, int count, std::atomic<int>& next);
    void rotate_and_store(int thread, int layer);
    void attend(int thread, int layer, std::atomic<int>& next);
    void finish_attention(int thread, int group);
    void gate(int thread, const LayerWeights& layer);
    void residual(int thread, const LayerWeights& layer, LinearIndex linear);
    void head(int thread, std::atomic<int>& next);

    void plan_attention(int group);
    void locate_tokens();
    template <typename Function>
    void each_token(int thread, int count, Function function);

    const DecoderConfig config_;
    const DecoderWeights weights_;
    const Kernels& kernels_;
    ThreadPool pool_;

    KvShape kv_shape_;
    int num_blocks_ = 0;
    AlignedBuffer kv_;

    std::unique_ptr<Buffers> buffers_;
    const StepInput* input_ = nullptr;
    float* logits_ = nullptr;
};

}  // namespace nybble
