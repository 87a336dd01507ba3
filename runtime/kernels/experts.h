// Which tokens of a step go through which experts of a mixture, and the rows that they have there. A row is a
// token with one of its experts: rows are sorted by expert, and each expert's begin a block of activations.
// Experts are computed in rounds: all of them in one, or those that are in memory before those that are not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "aligned_buffer.h"
#include "decoder_weights.h"
#include "kernels.h"

namespace nybble {

struct ExpertGroup {
    int expert;
    int first_row;  // of all rows, a multiple of kBlockTokens
    int rows;
};

class ExpertRows {
  public:
    // `separate_up`: whether gate and up of some expert read their inputs in different orders.
    ExpertRows(const DecoderConfig& config, bool separate_up);

    // Room for steps of up to `tokens` tokens; grows only.
    void reserve(int tokens);
    // What all of it takes. devices/cpu_memory.py predicts it.
    size_t bytes() const;

    // The router's logits of a token, with room for a multiple of 16.
    float* logits(int token) { return logits_.data() + static_cast<size_t>(token) * stride_; }
    int logits_stride() const { return stride_; }
    // A token's experts, ascending, the shared one last; and the weights of what they give.
    int count() const { return mixture_.per_token + mixture_.shared(); }
    int32_t* experts(int token) { return experts_.data() + static_cast<size_t>(token) * count(); }
    float* shares(int token) { return shares_.data() + static_cast<size_t>(token) * count(); }

    // Takes a token's experts with the highest logits, of equal ones the lowest.
    void choose(int token);
    // When all tokens' experts are chosen, on one thread. The shared expert's group comes first, then the
    // others ascending; where `slots` are given those with one, then those whose slot is negative. They are
    // one round.
    void group(const Kernels& kernels, int tokens, const int32_t* slots = nullptr);

    const std::vector<ExpertGroup>& groups() const { return groups_; }
    int token_of_row(int row) const { return token_of_row_[row]; }

    // The groups that are computed now, from the end of the last round to before `end`.
    void next_round(int end) {
        round_begin_ = round_end_;
        round_end_ = end;
    }
    // Before the first of several rounds.
    void begin_rounds() { round_begin_ = round_end_ = 0; }
    int round_begin() const { return round_begin_; }
    int round_end() const { return round_end_; }
    bool is_last_round() const { return round_end_ == static_cast<int>(groups_.size()); }

    // What the phases of a round are dealt in, group after group: blocks of rows, and pieces of the two
    // matrix products.
    struct Piece {
        const ExpertGroup* group;
        int index;
    };
    int blocks() const { return count(block_ends_); }
    int gate_up_pieces() const { return count(gate_up_ends_); }
    int down_pieces() const { return count(down_ends_); }
    Piece block(int block) const { return find(block_ends_, block); }
    Piece gate_up_piece(int piece) const { return find(gate_up_ends_, piece); }
    Piece down_piece(int piece) const { return find(down_ends_, piece); }

    // Quantized inputs of a group's products, and their outputs, [rows][stride_of(group)].
    Activations gate_input(const ExpertGroup& g) const {
        return activations(activations_[0], g, hidden_slices_);
    }
    Activations up_input(const ExpertGroup& g) const {
        return activations(activations_[1], g, hidden_slices_);
    }
    Activations down_input(const ExpertGroup& g) const;
    float* output(const ExpertGroup& g) const { return output_.floats() + g.first_row * row_stride_; }
    int stride_of(const ExpertGroup& g) const { return stride_of_expert(g.expert); }
    // Elements of an expert's inner rows, padded to whole slices; up follows gate in an output row.
    int inner_of(const ExpertGroup& g) const;

    // What the experts gave a token, for `Kernels::weighted_sum`: count() rows.
    void outputs_of(int token, const float** rows) const;

  private:
    Activations activations(const AlignedBuffer& buffer, const ExpertGroup& g, int slices) const;
    int stride_of_expert(int expert) const;
    int count(const std::vector<int>& ends) const { return ends[round_end_] - ends[round_begin_]; }
    Piece find(const std::vector<int>& ends, int piece) const;
    size_t rows_of(size_t tokens) const;

    const Mixture mixture_;
    const int hidden_size_, hidden_, hidden_slices_, stride_;
    const bool separate_up_;
    const size_t row_stride_;  // floats of a row of an expert that is not shared
    int tokens_ = 0;
    std::vector<float> logits_, shares_;        // [tokens][stride_], [tokens][count()]
    std::vector<int32_t> experts_, rows_;       // [tokens][count()]: of each the expert and the row
    std::vector<int32_t> token_of_row_, fill_;  // [rows], [experts]
    std::vector<ExpertGroup> groups_;
    std::vector<int> block_ends_, gate_up_ends_, down_ends_;  // of 0 and each group, counted over all
    int round_begin_ = 0, round_end_ = 0;
    AlignedBuffer output_, activations_[2];
};

}  // namespace nybble
