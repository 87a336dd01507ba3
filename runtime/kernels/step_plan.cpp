#include "step_plan.h"

#include <algorithm>

namespace nybble {
namespace {

constexpr int kRowsPerItem = 192;  // query rows (queries times heads of a group) of one item

}  // namespace

StepPlan::StepPlan(const DecoderConfig& config, int threads)
    : num_kv_heads_(config.num_kv_heads),
      queries_per_item_(std::max(1, kRowsPerItem / (config.num_heads / config.num_kv_heads))),
      max_split_(std::max(1, 4 * threads / config.num_kv_heads)),
      split_items_(8 * threads),
      max_segments_((config.max_position - 1) / kSegmentTokens + 1),
      window_of_group_(config.num_groups),
      items_(config.num_groups) {
    for (int layer = 0; layer < config.num_layers; ++layer) {
        window_of_group_[config.group_of_layer[layer]] = config.window_of_layer[layer];
    }
}

void StepPlan::reserve(int tokens, int sequences) {
    if (static_cast<size_t>(tokens) > position_of_.size()) {
        sequence_of_.resize(tokens);
        position_of_.resize(tokens);
    }
    if (sequences > sequences_) {
        parts_.resize(items_.size() * sequences);
        sequences_ = sequences;
    }
    // For each KV head at most an item a query, and one a segment of what is split.
    const size_t most = tokens + static_cast<size_t>(max_split_) * max_segments_;
    for (std::vector<AttentionItem>& items : items_) items.reserve(num_kv_heads_ * most);
}

void StepPlan::make(const StepInput& input) {
    for (int s = 0; s < input.sequences; ++s) {
        for (int t = input.cu_seqlens[s]; t < input.cu_seqlens[s + 1]; ++t) {
            sequence_of_[t] = s;
            position_of_[t] = input.past_lens[s] + t - input.cu_seqlens[s];
        }
    }
    for (size_t group = 0; group < items_.size(); ++group) plan_attention(input, static_cast<int>(group));
}

void StepPlan::plan_attention(const StepInput& input, int group) {
    std::vector<AttentionItem>& items = items_[group];
    items.clear();
    const int window = window_of_group_[group];
    const auto low_segment = [&](int position) {
        return window > 0 ? std::max(0, position - window + 1) / kSegmentTokens : 0;
    };
    const bool split = input.sequences <= max_split_;
    for (int s = 0; s < input.sequences; ++s) {
        const int count = input.cu_seqlens[s + 1] - input.cu_seqlens[s];
        const int past = input.past_lens[s];
        SegmentRange& parts = parts_[static_cast<size_t>(group) * sequences_ + s];
        parts = {0, 0};
        if (count == 0) continue;
        const int begin = low_segment(past), end = past / kSegmentTokens + 1;
        if (count == 1 && split && end - begin > 1) {
            parts = {begin, end};
            const int run = std::max(1, (end - begin) * num_kv_heads_ / split_items_);
            for (int segment = begin; segment < end; segment += run) {
                for (int head = 0; head < num_kv_heads_; ++head) {
                    items.push_back({s, head, 0, 1, segment, std::min(end, segment + run), true});
                }
            }
            continue;
        }
        // The last queries see most: they go first.
        for (int first = (count - 1) / queries_per_item_ * queries_per_item_; first >= 0;
             first -= queries_per_item_) {
            const int queries = std::min(queries_per_item_, count - first);
            const int last = past + first + queries - 1;
            for (int head = 0; head < num_kv_heads_; ++head) {
                items.push_back(
                    {s, head, first, queries, low_segment(past + first), last / kSegmentTokens + 1, false});
            }
        }
    }
}

}  // namespace nybble
