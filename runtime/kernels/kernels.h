// The interface between the decoder and an instruction set. Every implementation gives the same integers and
// the same floats, bit for bit: integer sums are exact, and float steps have one order over 16 virtual lanes.
#pragma once

#include <string>
#include <vector>

#include "layout.h"

namespace nybble {

enum class Activation : int32_t { kSilu = 0, kGeluTanh = 1, kRelu = 2 };

// Running softmax of one query row over segments: maximum (base 2), sum, weighted values.
struct SoftmaxPart {
    float max;
    float sum;
};

// Of the weights that the sampler looks at.
struct WeightTotal {
    double sum;
    int count;
};

// What the lower halves of a slice of the head add, for a token, to what was taken for them: `scale` times
// their dot product with its activations and `start`, and `bound` at most; both times the weights' scale.
struct HeadSlice {
    int32_t slice;
    int32_t start;
    float scale;
    float bound;
};

// What a token's highest logit is at least, and the tile that has it.
struct HeadFloor {
    float value;
    int tile;
};

struct AttentionTask {
    KvShape shape;
    const uint8_t* pages;        // the layer's pages
    const int32_t* block_table;  // the sequence's pages, in order
    int head;                    // KV head
    int group;                   // query heads that share it
    // All tokens' heads of this group, [tokens][query_stride], already times the softmax scale, and times
    // log2(e) unless there is a softcap.
    const float* queries;
    size_t query_stride;
    int query_count;
    // The queries are tokens of one sequence from `first_token` on; or, where `members` is set, the first
    // tokens of these sequences, which all see the whole of the segments.
    int sequence;
    int first_token;
    int first_position;  // of the first query
    const int32_t* members;
    const int32_t* cu_seqlens;
    int window;     // tokens attended to, the query included; 0 is all
    float softcap;  // scores become cap * tanh(score / cap); 0 is none
    int segment_begin;
    int segment_end;
    // Where results go: finished rows (`output`), or parts for a later merge where `parts` is set.
    float* output;  // [tokens][output_stride]: heads of this group side by side
    size_t output_stride;
    SoftmaxPart* parts;  // from one sequence to the next `parts_of_sequence`, in it [segments][group]
    float* part_values;  // the same, [padded_dim] each
    size_t parts_of_sequence;
};

struct Kernels {
    const char* name;

    // Bytes of scratch one thread needs for `attend` and `linear_panel`.
    size_t (*attention_scratch)(int group, int head_dim);
    size_t (*panel_scratch)();
    // Up to so many tokens `linear_rows` is faster than `linear_panel`.
    int row_tokens;

    // One token's row [columns], zero padded to whole slices, to its place in `out`.
    void (*quantize)(const float* row, int token, Activations out);
    // y[token][row] for the tiles' rows and all tokens: for few tokens, weights read once. `y` rows are
    // padded.
    void (*linear_rows)(const PackedLinear&, Activations, float* y, size_t stride, int tile_begin,
                        int tile_end);
    // The same for many: a panel of up to 4 tiles unpacked once for blocks of tokens.
    void (*linear_panel)(const PackedLinear&, Activations, float* y, size_t stride, int tile_begin,
                         int tile_end, int block_begin, int block_end, uint8_t* scratch);

    // For finding a token's highest logit, ops/head.h.
    void (*bound_logits)(const PackedLinear&, const float* bounds, float* y, int tile_begin, int tile_end,
                         HeadFloor* floor);
    uint64_t (*reaching_tiles)(const PackedLinear&, Activations, const HeadSlice* slices, int count,
                               int tile_begin, int tile_end, const float* upper, float least, int64_t* read);

    void (*add)(float* x, const float* y, int n);
    void (*scale)(float* x, float factor, int n);
    // n counts what is averaged; rows are padded with zeros to a multiple of 16.
    void (*rms_norm)(const float* x, const float* weight, float epsilon, int n, float* out);
    // Rotates the first 2 * half elements in place; cos and sin are [half].
    void (*rope)(float* head, const float* cos, const float* sin, int half);
    void (*gated)(const float* gate, const float* up, Activation, int n, float* out);
    void (*softcap)(float* x, float cap, int n);

    void (*store_kv)(const KvShape&, uint8_t* page_head, int slot, const float* key, const float* value);
    void (*attend)(const AttentionTask&, uint8_t* scratch);
    // Merges a row's parts in ascending order into out [head_dim].
    void (*merge_parts)(const SoftmaxPart* parts, const float* values, int segment_begin, int segment_end,
                        int group, int row, int head_dim, float* out);

    // For mixtures of experts, ops/experts.h. Logits [token][expert] of rows of x with rows of the router; n
    // elements, padded with zeros to a multiple of 16.
    void (*router_logits)(const float* x, size_t stride, int tokens, const float* router,
                          size_t router_stride, int experts, int n, float* logits, size_t logits_stride);
    // The softmax over a token's logits at the chosen experts, divided by its sum over them if `normalized`.
    // Overwrites the logits, which have room for a multiple of 16.
    void (*expert_shares)(float* logits, int experts, const int32_t* chosen, int count, bool normalized,
                          float* shares);
    float (*sigmoid)(float x);
    // out = shares[0] * rows[0] + shares[1] * rows[1] + ..., in this order.
    void (*weighted_sum)(const float* const* rows, const float* shares, int count, int n, float* out);

    // The first of the highest of a row's logits; of those that are no number, if there are any.
    int (*best_logit)(const float* logits, int n);
    // For the sampler, ops/sampling.h: weights of a row of logits, and a look at those from one on.
    void (*weigh_logits)(const float* logits, int n, float top, float factor, float* weights, double* sums);
    WeightTotal (*weights_from)(const float* weights, int n, float least);
    int (*collect_from)(const float* weights, int n, float least, int32_t* indices);

    // For benchmarks: the dot product on registers alone, ops/measure.h.
    int64_t dot_operations;  // of a round
    int32_t (*dot_loop)(int64_t rounds, const uint8_t* weights, const int8_t* activations);
};

// Names of the sets built and supported by this CPU, best first.
std::vector<std::string> supported_kernels();
// The named set, or the best for an empty name. Throws std::invalid_argument for one that is not there.
const Kernels& select_kernels(const std::string& name);

}  // namespace nybble
