// What is worked out of a step before its threads run: where each token stands, and how its attention is cut
// into items that threads take one after another.
#pragma once

#include <cstdint>
#include <vector>

#include "decoder_weights.h"
#include "step_input.h"

namespace nybble {

// Some queries, for the query heads that share one KV head, over segments in ascending order: of one sequence
// in a row, or one of each of several sequences whose pages of these segments are the same.
struct AttentionItem {
    int sequence;
    int head;         // KV head
    int query_begin;  // within the sequence's new tokens
    int query_count;
    int segment_begin;
    int segment_end;
    bool in_parts;  // its segments are merged with the queries' others later
    // Of `members()`, the sequences that share; of one sequence there are none.
    int members_begin;
    int member_count;
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
    const int32_t* members(const AttentionItem& item) const { return members_.data() + item.members_begin; }
    // The segments that a sequence's items leave to be merged: none where they finish their rows.
    SegmentRange parts_of(int group, int sequence) const {
        return parts_[static_cast<size_t>(group) * sequences_ + sequence];
    }

    int max_segments() const { return max_segments_; }

  private:
    // Segments whose pages several sequences share.
    struct SharedRun {
        int members_begin;
        int member_count;
        SegmentRange segments;
    };

    void plan_attention(const StepInput& input, int group);
    void plan_decode(const StepInput& input, int group, int sequence);
    void find_shared(const StepInput& input, int group);
    void add_shared(int segment, int members_begin);
    int low_segment(int group, int position) const;
    uint8_t& covered(int sequence, int segment) {
        return covered_[static_cast<size_t>(sequence) * max_segments_ + segment];
    }

    const int num_kv_heads_, queries_per_item_;
    const int pieces_;     // that a chunk is cut into at least, so that every thread has some
    const int max_split_;  // only so many sequences are split over segments as threads could go without work
    const int split_items_;  // that what is split has at least, where it has as many segments
    const int max_segments_;
    std::vector<int> window_of_group_;  // tokens, 0 is all
    int sequences_ = 0;
    std::vector<int> sequence_of_, position_of_;     // [tokens]
    std::vector<std::vector<AttentionItem>> items_;  // [groups]
    std::vector<SegmentRange> parts_;                // [groups][sequences]
    // Of the group that is being planned.
    std::vector<int32_t> members_, candidates_;
    std::vector<SharedRun> runs_;
    std::vector<uint8_t> covered_;  // [sequences][segments]: a shared run has it
};

}  // namespace nybble
