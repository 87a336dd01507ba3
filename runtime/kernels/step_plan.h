// What is worked out of a step before its threads run: where each token stands, and how its attention is cut
// into items that threads take one after another.
#pragma once

#include <vector>

#include "decoder_weights.h"
#include "step_input.h"

namespace nybble {

// Some queries of one sequence, for the query heads that share one KV head, over segments in ascending order.
struct AttentionItem {
    int sequence;
    int head;         // KV head
    int query_begin;  // within the sequence's new tokens
    int query_count;
    int segment_begin;
    int segment_end;
    bool in_parts;  // segments of one query, which are merged with its others later
};

struct SegmentRange {
    int begin;
    int end;
};

class StepPlan {
  public:
    StepPlan(const DecoderConfig& config, int threads);

    // Room for steps of up to `tokens` tokens of `sequences` sequences.
    void reserve(int tokens, int sequences);
    void make(const StepInput& input);

    // Of each token: its sequence in the step, and its position in that.
    int sequence_of(int token) const { return sequence_of_[token]; }
    int position_of(int token) const { return position_of_[token]; }

    // Attention in the layers of one group, whose windows are equal.
    const std::vector<AttentionItem>& items(int group) const { return items_[group]; }
    // The segments that a sequence's items leave to be merged: none where they finish their rows.
    SegmentRange parts_of(int group, int sequence) const {
        return parts_[static_cast<size_t>(group) * sequences_ + sequence];
    }

    // Only so many sequences are split over segments as threads could otherwise go without work. Those of a
    // step that is split are numbered from 0.
    int max_split_sequences() const { return max_split_; }
    int max_segments() const { return max_segments_; }

  private:
    void plan_attention(const StepInput& input, int group);

    const int num_kv_heads_, queries_per_item_;
    const int max_split_;
    const int split_items_;  // that a split sequence has at least, where it has as many segments
    const int max_segments_;
    std::vector<int> window_of_group_;  // tokens, 0 is all
    int sequences_ = 0;
    std::vector<int> sequence_of_, position_of_;     // [tokens]
    std::vector<std::vector<AttentionItem>> items_;  // [groups]
    std::vector<SegmentRange> parts_;                // [groups][sequences]
};

}  // namespace nybble
