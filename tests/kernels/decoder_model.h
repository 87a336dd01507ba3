// A small decoder with random weights, and steps of it: for the decoder's tests.
#pragma once

#include <algorithm>
#include <cmath>
#include <list>
#include <memory>

#include "../../runtime/kernels/decoder.h"
#include "check.h"

namespace kernel_test {

using namespace nybble;

constexpr int kPosition = 320;  // the longest context: over one segment of 256
constexpr int kSequences = 4;
constexpr int kBlocks = kPosition / kPageTokens;
constexpr int kGroups = 2;  // of layers with one window

// Sizes that fill no tile, slice or register; every kind of weight; two windows.
struct Model {
    DecoderConfig config;
    DecoderWeights weights;
    std::list<RandomLinear> storage;

    const PackedLinear& linear(Random& random, int rows, int columns, int bits, WeightKind kind, int group) {
        storage.push_back(random_linear(random, rows, columns, bits, kind, group));
        return storage.back().packed;
    }
};

inline std::vector<float> padded(std::vector<float> values) {
    values.resize(round_up(static_cast<int>(values.size()), kSlice));
    return values;
}

// Experts of which some share the order of their columns between gate and up, and some have none.
inline void add_experts(Random& random, Model& model, LayerWeights& layer) {
    const Mixture& m = model.config.mixture;
    const int hidden = model.config.hidden_size;
    layer.experts.resize(m.all());
    for (int e = 0; e < m.all(); ++e) {
        ExpertWeights& expert = layer.experts[e];
        const int size = m.size_of(e);
        const WeightKind kind = e % 2 == 0 ? WeightKind::kSymmetric : WeightKind::kZeroPoint;
        for (int i = 0; i < kExpertLinears; ++i) {
            const int rows = i == kExpertDown ? hidden : size, columns = i == kExpertDown ? size : hidden;
            expert.linears[i] = model.linear(random, rows, columns, e == 3 ? 8 : 4, kind, 1 + i);
            if (e == 0) continue;
            for (int column : shuffled(random, columns)) expert.permutations[i].push_back(column);
        }
        if (e == 1) expert.permutations[kExpertUp] = expert.permutations[kExpertGate];
    }
    for (int e = 0; e < m.experts; ++e) {
        const std::vector<float> row = padded(random.uniforms(hidden, 0.5f));
        layer.router.insert(layer.router.end(), row.begin(), row.end());
    }
    layer.shared_gate = padded(random.uniforms(hidden, 0.5f));
}

inline Model make_model(Random& random, bool capped) {
    Model model;
    DecoderConfig& c = model.config;
    c.vocab_size = 100;
    c.hidden_size = 72;
    c.intermediate_size = 104;
    c.num_layers = 2;
    c.num_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 20;
    c.max_position = kPosition;
    c.norm_eps = 1e-5f;
    c.activation = capped ? Activation::kGeluTanh : Activation::kSilu;
    c.attention_softcap = capped ? 4.0f : 0.0f;
    c.logit_softcap = capped ? 6.0f : 0.0f;
    c.embedding_scale = capped ? 8.5f : 1.0f;
    c.softmax_scale = 0.25f;
    std::vector<float> frequencies;
    for (float x = 1.0f; frequencies.size() < 8; x *= 0.25f) frequencies.push_back(x);
    c.ropes = {{frequencies, 1.0f}};
    c.rope_of_layer = {0, 0};
    if (capped) {
        c.residual_scale = 0.5f;
        c.qk_norm_per_head = false;
        c.ropes.push_back({{0.7f, 0.1f, 0.02f}, 1.25f});
        c.rope_of_layer = {1, -1};
        c.mixture = {5, 2, 40, 56, true};
        c.is_mixture = {false, true};
    }
    c.window_of_layer = {0, 48};
    c.group_of_layer = {0, 1};
    c.num_groups = kGroups;

    constexpr WeightKind kKinds[] = {WeightKind::kSymmetric, WeightKind::kZeroPoint, WeightKind::kMinimum,
                                     WeightKind::kNf4};
    const int q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    const int rows[] = {q, kv, kv, c.hidden_size, c.intermediate_size, c.intermediate_size, c.hidden_size};
    const int columns[] = {c.hidden_size, c.hidden_size, c.hidden_size,      q,
                           c.hidden_size, c.hidden_size, c.intermediate_size};
    model.weights.layers.resize(c.num_layers);
    int next = 0;
    for (LayerWeights& layer : model.weights.layers) {
        const int layer_index = static_cast<int>(&layer - model.weights.layers.data());
        const bool mixture = c.has_mixture(layer_index);
        if (mixture) add_experts(random, model, layer);
        for (int i = 0; i < (mixture ? kGate : kLinearCount); ++i, ++next) {
            const int bits = next % 5 == 3 ? 8 : 4;
            const WeightKind kind = kKinds[next % (bits == 8 ? 2 : 4)];
            layer.linears[i] = model.linear(random, rows[i], columns[i], bits, kind, 1 + next % 3);
            if (next % 2 == 0) layer.biases[i] = padded(random.uniforms(rows[i], 0.1f));
            if (i == kQ || i == kV || i == kDown) {
                for (int column : shuffled(random, columns[i])) layer.permutations[i].push_back(column);
            }
        }
        // Inputs are shared where permutations are equal, in any order: here by the first and the last.
        if (&layer == &model.weights.layers[1]) layer.permutations[kV] = layer.permutations[kQ];
        layer.before_attention = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
        layer.before_mlp = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
        layer.q_norm = padded(random.uniforms(capped ? q : c.head_dim, 0.3f, 1.0f));
        layer.k_norm = padded(random.uniforms(capped ? kv : c.head_dim, 0.3f, 1.0f));
        if (capped) {
            layer.after_attention = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
            layer.after_mlp = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
        }
    }
    model.weights.embedding = model.linear(random, c.vocab_size, c.hidden_size, 8, WeightKind::kHalves, 2);
    model.weights.head = model.linear(random, c.vocab_size, c.hidden_size, 8, WeightKind::kHalves, 1);
    model.weights.final_norm = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
    return model;
}

struct Chunk {
    int sequence, begin, count;
};

// A decoder and the pages of its sequences, in any order.
class Session {
  public:
    Session(const Model& model, const Kernels& kernels, int threads, KvType type, uint64_t seed,
            std::unique_ptr<WeightStream> stream = nullptr)
        : window_(model.config.window_of_layer),
          decoder_(model.config, model.weights, threads, kernels, std::move(stream)) {
        Random random(seed);
        for (int page : shuffled(random, kGroups * kSequences * kBlocks)) table_.push_back(page);
        decoder_.allocate_kv(kGroups * kSequences * kBlocks, type);
    }

    // Arrays of a step over chunks, with the logits of every token asked for.
    void prepare(const std::vector<Chunk>& chunks) {
        ids_.clear(), past_.clear(), slots_.clear(), rows_.clear();
        lengths_.assign(1, 0);
        step_table_.clear();
        for (const Chunk& chunk : chunks) {
            past_.push_back(chunk.begin);
            for (int t = chunk.begin; t < chunk.begin + chunk.count; ++t) {
                rows_.push_back(static_cast<int32_t>(ids_.size()));
                ids_.push_back((t * 37 + t * t % 11 + chunk.sequence * 13) % 100);
            }
            lengths_.push_back(static_cast<int32_t>(ids_.size()));
        }
        for (int group = 0; group < kGroups; ++group) {
            for (const Chunk& chunk : chunks) {
                const int32_t* pages = table_.data() + (group * kSequences + chunk.sequence) * kBlocks;
                // Pages before the window have been given back.
                const int window = window_[group],
                          first = window > 0 ? std::max(0, chunk.begin - window + 1) : 0;
                for (int block = 0; block < kBlocks; ++block) {
                    step_table_.push_back(block < first / kPageTokens ? -1 : pages[block]);
                }
                for (int t = chunk.begin; t < chunk.begin + chunk.count; ++t) {
                    slots_.push_back(pages[t / kPageTokens] * kPageTokens + t % kPageTokens);
                }
            }
        }
        input_ = {ids_.data(),
                  lengths_.data(),
                  past_.data(),
                  step_table_.data(),
                  slots_.data(),
                  rows_.data(),
                  static_cast<int>(ids_.size()),
                  static_cast<int>(chunks.size()),
                  kBlocks,
                  static_cast<int>(rows_.size()),
                  best_only_};
        logits_.assign(rows_.size() * decoder_.logit_stride(), NAN);
    }
    void step() { decoder_.step(input_, logits_.data()); }
    // What `step` runs.
    const StepInput& input() const { return input_; }
    float* logits() { return logits_.data(); }
    // Whether the steps that follow ask for each row's highest logit alone.
    void ask_for_best(bool only) { best_only_ = only; }

    std::vector<float> run(const std::vector<Chunk>& chunks) {
        prepare(chunks);
        step();
        return logits_;
    }

    // The first pages of one sequence become another's too.
    void share(int from, int to, int pages) {
        for (int group = 0; group < kGroups; ++group) {
            const auto of = [&](int s) { return table_.begin() + (group * kSequences + s) * kBlocks; };
            std::copy_n(of(from), pages, of(to));
        }
    }

    size_t stride() const { return decoder_.logit_stride(); }
    Decoder& decoder() { return decoder_; }

  private:
    std::vector<int> window_;  // of each group
    Decoder decoder_;
    std::vector<int32_t> table_, ids_, past_, lengths_, slots_, rows_, step_table_;
    std::vector<float> logits_;
    StepInput input_{};
    bool best_only_ = false;
};

}  // namespace kernel_test
