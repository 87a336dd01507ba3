#include "step_plan.h"

#include <algorithm>
#include <cstring>

namespace nybble {
namespace {

constexpr int kRowsPerItem = 192;  // query rows (queries times heads of a group) of one item
constexpr int kFewestQueries = 4;  // of an item, where there are more: each reads the pages anew
constexpr int kSegmentPages = kSegmentTokens / kPageTokens;

}  // namespace

StepPlan::StepPlan(const DecoderConfig& config, int threads)
    : num_kv_heads_(config.num_kv_heads),
      queries_per_item_(std::max(1, kRowsPerItem / (config.num_heads / config.num_kv_heads))),
      pieces_((2 * threads + config.num_kv_heads - 1) / config.num_kv_heads),
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
        candidates_.reserve(sequences);
        covered_.resize(static_cast<size_t>(sequences) * max_segments_);
        const size_t segments = static_cast<size_t>(sequences) * max_segments_;
        members_.reserve(items_.size() * segments);
        runs_.reserve(segments);
        sequences_ = sequences;
    }
    // For each KV head at most an item a query, and one a segment of a sequence.
    const size_t most = tokens + static_cast<size_t>(sequences_) * max_segments_;
    for (std::vector<AttentionItem>& items : items_) items.reserve(num_kv_heads_ * most);
}

void StepPlan::make(const StepInput& input) {
    for (int s = 0; s < input.sequences; ++s) {
        for (int t = input.cu_seqlens[s]; t < input.cu_seqlens[s + 1]; ++t) {
            sequence_of_[t] = s;
            position_of_[t] = input.past_lens[s] + t - input.cu_seqlens[s];
        }
    }
    members_.clear();
    for (size_t group = 0; group < items_.size(); ++group) plan_attention(input, static_cast<int>(group));
}

int StepPlan::low_segment(int group, int position) const {
    const int window = window_of_group_[group];
    return window > 0 ? std::max(0, position - window + 1) / kSegmentTokens : 0;
}

void StepPlan::plan_attention(const StepInput& input, int group) {
    std::vector<AttentionItem>& items = items_[group];
    items.clear();
    find_shared(input, group);
    for (int s = 0; s < input.sequences; ++s) {
        const int count = input.cu_seqlens[s + 1] - input.cu_seqlens[s];
        const int past = input.past_lens[s];
        parts_[static_cast<size_t>(group) * sequences_ + s] = {0, 0};
        if (count == 1) plan_decode(input, group, s);
        if (count < 2) continue;
        const int pieces = std::min(pieces_, (count + kFewestQueries - 1) / kFewestQueries);
        const int most = std::min(queries_per_item_, (count + pieces - 1) / pieces);
        // The last queries see most: they go first.
        for (int first = (count - 1) / most * most; first >= 0; first -= most) {
            const int queries = std::min(most, count - first);
            const int last = past + first + queries - 1;
            for (int head = 0; head < num_kv_heads_; ++head) {
                items.push_back({s, head, first, queries, low_segment(group, past + first),
                                 last / kSegmentTokens + 1, false, 0, 0});
            }
        }
    }
}

// One query. Segments that others read for it leave the rest to be merged too.
void StepPlan::plan_decode(const StepInput& input, int group, int s) {
    std::vector<AttentionItem>& items = items_[group];
    const int past = input.past_lens[s];
    const SegmentRange all{low_segment(group, past), past / kSegmentTokens + 1};
    const uint8_t* shared = runs_.empty() ? nullptr : &covered(s, 0);
    const bool any = shared != nullptr && std::find(shared, shared + all.end, 1) != shared + all.end;
    const bool split = input.sequences <= max_split_ && all.end - all.begin > 1;
    const auto add = [&](SegmentRange segments, bool in_parts) {
        for (int head = 0; head < num_kv_heads_; ++head)
            items.push_back({s, head, 0, 1, segments.begin, segments.end, in_parts, 0, 0});
    };
    if (!any && !split) return add(all, false);
    parts_[static_cast<size_t>(group) * sequences_ + s] = all;
    const int run = split ? std::max(1, (all.end - all.begin) * num_kv_heads_ / split_items_) : all.end;
    for (int begin = all.begin; begin < all.end;) {
        if (any && shared[begin]) {
            ++begin;
            continue;
        }
        int end = begin + 1;
        while (end < std::min(all.end, begin + run) && !(any && shared[end])) ++end;
        add({begin, end}, true);
        begin = end;
    }
}

// Whole segments whose pages several decoding sequences share are read once for all of these. Every query
// sees the whole of them, unless there is a window.
void StepPlan::find_shared(const StepInput& input, int group) {
    runs_.clear();
    if (window_of_group_[group] > 0) return;
    const auto whole_segments = [&](int s) {
        return input.cu_seqlens[s + 1] - input.cu_seqlens[s] == 1 ? (input.past_lens[s] + 1) / kSegmentTokens
                                                                  : 0;
    };
    const auto pages = [&](int s, int segment) {
        return input.block_table + (static_cast<size_t>(group) * input.sequences + s) * input.max_blocks +
               segment * kSegmentPages;
    };
    constexpr size_t kPageBytes = kSegmentPages * sizeof(int32_t);
    int decodes = 0, last = 0;
    for (int s = 0; s < input.sequences; ++s) {
        const int whole = whole_segments(s);
        decodes += whole > 0;
        last = std::max(last, whole);
        std::fill_n(&covered(s, 0), whole + 1 < max_segments_ ? whole + 1 : max_segments_, uint8_t{0});
    }
    if (decodes < 2) return;
    for (int segment = 0; segment < last; ++segment) {
        candidates_.clear();
        for (int s = 0; s < input.sequences; ++s) {
            if (whole_segments(s) > segment) candidates_.push_back(s);
        }
        std::sort(candidates_.begin(), candidates_.end(), [&](int a, int b) {
            const int order = std::memcmp(pages(a, segment), pages(b, segment), kPageBytes);
            return order != 0 ? order < 0 : a < b;
        });
        for (size_t i = 0; i < candidates_.size();) {
            const int members_begin = static_cast<int>(members_.size());
            const int32_t* of_first = pages(candidates_[i], segment);
            while (i < candidates_.size() &&
                   static_cast<int>(members_.size()) - members_begin < queries_per_item_ &&
                   std::memcmp(of_first, pages(candidates_[i], segment), kPageBytes) == 0) {
                members_.push_back(candidates_[i++]);
            }
            add_shared(segment, members_begin);
        }
    }
    for (const SharedRun& run : runs_) {
        const int count = run.segments.end - run.segments.begin;
        const int step = std::max(1, count * num_kv_heads_ / split_items_);
        for (int begin = run.segments.begin; begin < run.segments.end; begin += step) {
            for (int head = 0; head < num_kv_heads_; ++head) {
                items_[group].push_back({members_[run.members_begin], head, 0, run.member_count, begin,
                                         std::min(run.segments.end, begin + step), true, run.members_begin,
                                         run.member_count});
            }
        }
    }
}

// The last members share a segment: those of the segment before go on, or a run begins.
void StepPlan::add_shared(int segment, int members_begin) {
    const int count = static_cast<int>(members_.size()) - members_begin;
    if (count < 2) return members_.resize(members_begin);
    const int32_t* members = members_.data() + members_begin;
    for (int i = 0; i < count; ++i) covered(members[i], segment) = 1;
    for (SharedRun& run : runs_) {
        if (run.segments.end == segment && run.member_count == count &&
            std::equal(members, members + count, members_.data() + run.members_begin)) {
            run.segments.end = segment + 1;
            return members_.resize(members_begin);
        }
    }
    runs_.push_back({members_begin, count, {segment, segment + 1}});
}

}  // namespace nybble
