// The phases of a layer that has a mixture of experts: route, sort rows by expert, gate/up and down of each.
// Where experts are read when they are chosen, the last two are done in rounds: first for those in memory,
// then for those that have come meanwhile. What experts give is added up in their order at the end, whatever
// the rounds.
#include <algorithm>

#include "decoder.h"
#include "linear_jobs.h"

namespace nybble {
namespace {

constexpr int kMixturePhases = 5;  // that deal work: the router, and those of a round
constexpr int kRouterRows = 16;    // of the router, multiplied with a block of tokens at a time

}  // namespace

// A token's row as the experts read it: where attention's output was, until the experts' is summed up there.
float* Decoder::expert_row(int t) const {
    return buffers_.projected.floats() + static_cast<size_t>(t) * buffers_.hidden;
}

bool Decoder::run_experts(int thread, int layer, SharedWork* work) {
    const LayerWeights& w = weights_.layers[layer];
    StepBuffers& b = buffers_;
    const int tokens = input_->tokens, experts = config_.mixture.experts;
    each_token(thread, tokens, [&](int t) {
        add_residual(thread, all_, t, w.biases[kO], w.after_attention);
        std::copy_n(normalized(thread, all_, t, w.before_mlp), b.hidden, expert_row(t));
    });
    pool_.barrier();
    const int parts = (experts + kRouterRows - 1) / kRouterRows;
    const int blocks = (tokens + kBlockTokens - 1) / kBlockTokens;
    work[0].run(thread, blocks * parts, [&](int item) {
        const int t = item / parts * kBlockTokens, e = item % parts * kRouterRows;
        kernels_.router_logits(expert_row(t), b.hidden, std::min(kBlockTokens, tokens - t),
                               w.router.data() + static_cast<size_t>(e) * b.hidden, b.hidden,
                               std::min(kRouterRows, experts - e), round_up(config_.hidden_size, 16),
                               experts_.logits(t) + e, experts_.logits_stride());
    });
    pool_.barrier();
    each_token(thread, tokens, [&](int t) { choose_experts(t, w); });
    pool_.barrier();
    if (thread == 0) group_experts(layer);
    pool_.barrier();
    for (;;) {
        if (experts_.round_begin() == experts_.round_end()) return false;
        run_expert_round(thread, w, work);
        if (experts_.is_last_round()) return true;
        pool_.barrier();
        if (thread == 0) {
            stream_->release_experts();
            for (int phase = 1; phase < kMixturePhases; ++phase) work[phase].reset();
            fetch_experts(weights_.layers[layer]);
        }
        pool_.barrier();
    }
}

// Of thread 0, which sees no other at work.
void Decoder::group_experts(int layer) {
    LayerWeights& w = weights_.layers[layer];
    if (w.experts_by_use == 0) return experts_.group(kernels_, input_->tokens);
    experts_.group(kernels_, input_->tokens, stream_->expert_slots(layer));
    stream_->begin_experts(layer);
    for (const ExpertGroup& group : experts_.groups()) {
        if (group.expert < w.experts_by_use) stream_->need_expert(group.expert, group.rows);
    }
    experts_.begin_rounds();
    fetch_experts(w);
}

// The next round: all experts that are there. The first has the shared one, for which it does not wait for
// others.
void Decoder::fetch_experts(LayerWeights& w) {
    const int shared = config_.mixture.shared(), first = std::max(experts_.round_end(), shared);
    const int end = first + stream_->acquire_experts(experts_.round_end() > 0 || shared == 0);
    for (int group = first; group < end; ++group) {
        ExpertWeights& expert = w.experts[experts_.groups()[group].expert];
        const uint8_t* bytes = stream_->expert(group - shared);
        for (int i = 0; i < kExpertLinears; ++i) expert.linears[i].tiles = bytes + expert.places[i];
    }
    experts_.next_round(end);
}

void Decoder::run_expert_round(int thread, const LayerWeights& w, SharedWork* work) {
    StepBuffers& b = buffers_;
    const auto each_row = [&](SharedWork& shared, auto function) {
        shared.run(thread, experts_.blocks(), [&](int block) {
            const auto [group, index] = experts_.block(block);
            const int first = group->first_row + index * kBlockTokens;
            for (int row = first; row < std::min(first + kBlockTokens, group->first_row + group->rows);
                 ++row) {
                function(*group, row);
            }
        });
    };
    each_row(work[1], [&](const ExpertGroup& g, int row) { quantize_expert_input(thread, w, g, row); });
    pool_.barrier();
    keep_reading(thread);
    work[2].run(thread, experts_.gate_up_pieces(), [&](int index) {
        const auto [group, piece] = experts_.gate_up_piece(index);
        const ExpertWeights& expert = w.experts[group->expert];
        float* out = experts_.output(*group);
        const size_t stride = experts_.stride_of(*group);
        const Activations input = experts_.gate_input(*group);
        const LinearJob jobs[] = {
            {&expert.linears[kExpertGate], input, out, stride},
            {&expert.linears[kExpertUp], expert.separate_up ? experts_.up_input(*group) : input,
             out + experts_.inner_of(*group), stride},
        };
        run_linear_piece(kernels_, jobs, 2, piece, b.scratch(thread));
    });
    pool_.barrier();
    each_row(work[3], [&](const ExpertGroup& g, int row) { quantize_expert_inner(thread, w, g, row); });
    pool_.barrier();
    keep_reading(thread);
    work[4].run(thread, experts_.down_pieces(), [&](int index) {
        const auto [group, piece] = experts_.down_piece(index);
        const LinearJob job{&w.experts[group->expert].linears[kExpertDown], experts_.down_input(*group),
                            experts_.output(*group), static_cast<size_t>(experts_.stride_of(*group))};
        run_linear_piece(kernels_, &job, 1, piece, b.scratch(thread));
    });
}

void Decoder::choose_experts(int t, const LayerWeights& w) {
    const Mixture& m = config_.mixture;
    experts_.choose(t);
    float* shares = experts_.shares(t);
    kernels_.expert_shares(experts_.logits(t), m.experts, experts_.experts(t), m.per_token, m.normalized,
                           shares);
    if (!m.shared()) return;
    float logit;
    kernels_.router_logits(expert_row(t), 0, 1, w.shared_gate.data(), 0, 1, round_up(config_.hidden_size, 16),
                           &logit, 0);
    shares[m.per_token] = kernels_.sigmoid(logit);
}

void Decoder::quantize_expert_input(int thread, const LayerWeights& w, const ExpertGroup& group, int row) {
    const ExpertWeights& expert = w.experts[group.expert];
    const float* input = expert_row(experts_.token_of_row(row));
    const int token = row - group.first_row, columns = config_.hidden_size;
    quantize_row(thread, input, expert.permutations[kExpertGate], columns, token, experts_.gate_input(group));
    if (!expert.separate_up) return;
    quantize_row(thread, input, expert.permutations[kExpertUp], columns, token, experts_.up_input(group));
}

void Decoder::quantize_expert_inner(int thread, const LayerWeights& w, const ExpertGroup& group, int row) {
    const int token = row - group.first_row, inner = experts_.inner_of(group);
    const int size = config_.mixture.size_of(group.expert), lanes = round_up(size, 16);
    const float* gate = experts_.output(group) + static_cast<size_t>(token) * experts_.stride_of(group);
    float* out = buffers_.row(thread);
    kernels_.gated(gate, gate + inner, config_.activation, lanes, out);
    std::fill(out + lanes, out + inner, 0.0f);
    quantize_row(thread, out, w.experts[group.expert].permutations[kExpertDown], size, token,
                 experts_.down_input(group));
}

// What a token's experts gave, in ascending order and the shared one's last, to where an MLP's output is.
void Decoder::combine_experts(int thread, int t) {
    const float** rows = expert_outputs_.data() + static_cast<size_t>(thread) * experts_.count();
    experts_.outputs_of(t, rows);
    kernels_.weighted_sum(rows, experts_.shares(t), experts_.count(), round_up(config_.hidden_size, 16),
                          buffers_.projected.floats() + static_cast<size_t>(t) * buffers_.hidden);
}

}  // namespace nybble
