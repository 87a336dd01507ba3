// What a decoder is made of: its sizes, and its weights in packed form.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "layout.h"

namespace nybble {

// A rotary embedding: radians per position of each rotated pair, and what multiplies cosines and sines.
struct Rope {
    std::vector<float> inv_freq;  // [rotary_dim / 2]
    float attention_factor = 1;
};

// A mixture of experts: each token goes through the `per_token` experts with the highest logits of the
// router.
struct Mixture {
    int experts = 0;
    int per_token = 0;
    int size = 0;             // of an expert's activations
    int shared_size = 0;      // of the expert's that all tokens share; 0 is none
    bool normalized = false;  // whether the weights of chosen experts sum to 1

    bool shared() const { return shared_size > 0; }
    int all() const { return experts + shared(); }
    int size_of(int expert) const { return expert < experts ? size : shared_size; }
};

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
    float residual_scale = 1;      // of what attention and MLP give
    bool qk_norm_per_head = true;  // else over all heads of a token together
    std::vector<Rope> ropes;
    std::vector<int> rope_of_layer;    // -1 is none
    std::vector<int> window_of_layer;  // tokens, 0 is all
    std::vector<int> group_of_layer;   // row of block_table and slot_mapping
    int num_groups = 1;
    Mixture mixture;
    std::vector<bool> is_mixture;  // of each layer, whether it has the mixture for an MLP; empty is none

    bool has_mixture(int layer) const { return !is_mixture.empty() && is_mixture[layer]; }
};

enum LinearIndex { kQ, kK, kV, kO, kGate, kUp, kDown, kLinearCount };

enum ExpertIndex { kExpertGate, kExpertUp, kExpertDown, kExpertLinears };

struct ExpertWeights {
    PackedLinear linears[kExpertLinears];
    std::vector<int32_t> permutations[kExpertLinears];
    size_t places[kExpertLinears] = {};
    bool separate_up = false;  // whether gate's and up's permutations differ; the decoder sets it
};

// Vectors are zero padded to a multiple of 32; an empty one is absent.
struct LayerWeights {
    PackedLinear linears[kLinearCount];
    std::vector<float> biases[kLinearCount];
    std::vector<int32_t> permutations[kLinearCount];  // stored column j is the input's column permutation[j]
    // On what attention and MLP read, and on what they give.
    std::vector<float> before_attention, after_attention, before_mlp, after_mlp;
    std::vector<float> q_norm, k_norm;
    // Which of their phase's quantized inputs they read: the earliest of an equal permutation, counted from
    // the phase's first. The decoder fills them.
    int input_slots[kLinearCount] = {};
    // A streamed layer's tiles are where it was read to, at these places in it; null where it was not.
    bool streamed = false;
    size_t places[kLinearCount] = {};
    // A mixture of experts in place of gate, up and down: the experts, the shared one last; the router's rows
    // and the shared expert's gate, each padded.
    std::vector<ExpertWeights> experts;
    std::vector<float> router, shared_gate;
    // So many experts, the first, are read when they are chosen: the others come with the layer.
    int experts_by_use = 0;

    // The linear layers in the order that data meets them: an expert's follow each other.
    int linear_count() const {
        return experts.empty() ? kLinearCount : kGate + kExpertLinears * static_cast<int>(experts.size());
    }
    PackedLinear& linear(int i) { return is_expert(i) ? expert(i).linears[expert_index(i)] : linears[i]; }
    std::vector<int32_t>& permutation(int i) {
        return is_expert(i) ? expert(i).permutations[expert_index(i)] : permutations[i];
    }
    size_t& place(int i) { return is_expert(i) ? expert(i).places[expert_index(i)] : places[i]; }

    bool by_use(int i) const { return i >= kGate && i < kGate + kExpertLinears * experts_by_use; }

  private:
    bool is_expert(int i) const { return i >= kGate && !experts.empty(); }
    ExpertWeights& expert(int i) { return experts[(i - kGate) / kExpertLinears]; }
    static int expert_index(int i) { return (i - kGate) % kExpertLinears; }
};

// Rows of the head that are there together: all of it, or a part of a streamed one.
struct HeadPiece {
    PackedLinear linear;
    int first_row;
    size_t place;  // of a streamed one's tiles in what is read
};

struct DecoderWeights {
    std::vector<LayerWeights> layers;
    PackedLinear embedding;  // kHalves
    PackedLinear head;       // the embedding again when tied
    std::vector<float> final_norm;
    // With a streamed head the embedding has no tiles either: its rows are read.
    bool streamed_head = false;
    std::vector<HeadPiece> head_pieces;  // the decoder makes the one of a resident head
};

}  // namespace nybble
