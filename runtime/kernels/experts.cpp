#include "experts.h"

#include <algorithm>

#include "linear_jobs.h"

namespace nybble {
namespace {

constexpr size_t kRowActivation = kActivationBytes / kBlockTokens;  // bytes of a row and slice

int tiles_of(int rows) { return (rows + kTileRows - 1) / kTileRows; }
int blocks_of(int rows) { return (rows + kBlockTokens - 1) / kBlockTokens; }

}  // namespace

ExpertRows::ExpertRows(const DecoderConfig& config, bool separate_up)
    : mixture_(config.mixture),
      hidden_size_(config.hidden_size),
      hidden_(round_up(config.hidden_size, kSlice)),
      hidden_slices_(slices_of(config.hidden_size)),
      stride_(round_up(mixture_.experts, 16)),
      separate_up_(separate_up),
      row_stride_(stride_of_expert(0)) {}

int ExpertRows::stride_of_expert(int expert) const {
    return std::max(hidden_, 2 * round_up(mixture_.size_of(expert), kSlice));
}

// Of experts that are not shared, each filled up to whole blocks.
size_t ExpertRows::rows_of(size_t tokens) const {
    const size_t rows = tokens * mixture_.per_token;
    return rows + (kBlockTokens - 1) * std::min(rows, static_cast<size_t>(mixture_.experts));
}

void ExpertRows::reserve(int tokens) {
    if (mixture_.experts == 0 || tokens <= tokens_) return;
    const size_t t = round_up(tokens, kBlockTokens);
    const size_t rows = (rows_of(t) + kBlockTokens - 1) / kBlockTokens * kBlockTokens;
    const size_t shared = mixture_.shared() ? t : 0;
    const size_t all = rows + shared;
    tokens_ = 0;
    logits_.resize(t * stride_);
    shares_.resize(t * count());
    experts_.resize(t * count());
    rows_.resize(t * count());
    token_of_row_.resize(all);
    fill_.resize(mixture_.experts);
    groups_.reserve(mixture_.all());
    block_ends_.reserve(mixture_.all() + 1);
    gate_up_ends_.reserve(mixture_.all() + 1);
    down_ends_.reserve(mixture_.all() + 1);
    const size_t shared_stride = mixture_.shared() ? stride_of_expert(mixture_.experts) : 0;
    output_.allocate((rows * row_stride_ + shared * shared_stride) * sizeof(float));
    const size_t slices = std::max(hidden_slices_, slices_of(mixture_.size));
    const size_t shared_slices = std::max(hidden_slices_, slices_of(mixture_.shared_size));
    activations_[0].allocate((rows * slices + shared * shared_slices) * kRowActivation);
    if (separate_up_) activations_[1].allocate(all * hidden_slices_ * kRowActivation);
    tokens_ = static_cast<int>(t);
}

size_t ExpertRows::bytes() const {
    const size_t numbers =
        logits_.size() + shares_.size() + experts_.size() + rows_.size() + token_of_row_.size();
    return numbers * sizeof(float) + output_.bytes() + activations_[0].bytes() + activations_[1].bytes();
}

void ExpertRows::choose(int token) {
    const float* logits = this->logits(token);
    int32_t* chosen = experts(token);
    const int count = mixture_.per_token;
    // The best so far in falling order; one that equals comes behind those that came before it.
    int filled = 0;
    for (int e = 0; e < mixture_.experts; ++e) {
        if (filled == count && !(logits[e] > logits[chosen[count - 1]])) continue;
        int place = filled < count ? filled++ : count - 1;
        for (; place > 0 && logits[e] > logits[chosen[place - 1]]; --place) chosen[place] = chosen[place - 1];
        chosen[place] = e;
    }
    std::sort(chosen, chosen + count);
    if (mixture_.shared()) chosen[count] = mixture_.experts;
}

void ExpertRows::group(const Kernels& kernels, int tokens, const int32_t* slots) {
    std::fill(fill_.begin(), fill_.end(), 0);
    for (int t = 0; t < tokens; ++t) {
        const int32_t* chosen = experts(t);
        for (int i = 0; i < mixture_.per_token; ++i) ++fill_[chosen[i]];
    }
    groups_.clear();
    for (std::vector<int>* ends : {&block_ends_, &gate_up_ends_, &down_ends_}) ends->assign(1, 0);
    const auto add = [&](int expert, int first_row, int rows) {
        groups_.push_back({expert, first_row, rows});
        block_ends_.push_back(block_ends_.back() + blocks_of(rows));
        gate_up_ends_.push_back(gate_up_ends_.back() +
                                linear_pieces(kernels, 2, tiles_of(mixture_.size_of(expert)), rows));
        down_ends_.push_back(down_ends_.back() + linear_pieces(kernels, 1, tiles_of(hidden_size_), rows));
    };
    int shared_row = 0;
    for (int rows : fill_) shared_row += blocks_of(rows) * kBlockTokens;
    if (mixture_.shared()) add(mixture_.experts, shared_row, tokens);
    int first_row = 0;
    for (bool there : {true, false}) {
        for (int e = 0; e < mixture_.experts; ++e) {
            if ((slots == nullptr || slots[e] >= 0) != there) continue;
            const int rows = fill_[e];
            fill_[e] = first_row;  // where the expert's next row is
            if (rows > 0) add(e, first_row, rows);
            first_row += blocks_of(rows) * kBlockTokens;
        }
    }
    for (int t = 0; t < tokens; ++t) {
        const int32_t* chosen = experts(t);
        int32_t* rows = rows_.data() + static_cast<size_t>(t) * count();
        for (int i = 0; i < count(); ++i) {
            rows[i] = i < mixture_.per_token ? fill_[chosen[i]]++ : shared_row + t;
            token_of_row_[rows[i]] = t;
        }
    }
    begin_rounds();
    next_round(static_cast<int>(groups_.size()));
}

Activations ExpertRows::activations(const AlignedBuffer& buffer, const ExpertGroup& g, int slices) const {
    return {buffer.data() + g.first_row * (slices * kRowActivation), g.rows, slices};
}

// The shared expert's come behind all others', whatever its own size is.
Activations ExpertRows::down_input(const ExpertGroup& g) const {
    Activations result = activations(activations_[0], g, slices_of(mixture_.size));
    result.slices = slices_of(mixture_.size_of(g.expert));
    return result;
}

int ExpertRows::inner_of(const ExpertGroup& g) const { return round_up(mixture_.size_of(g.expert), kSlice); }

void ExpertRows::outputs_of(int token, const float** rows) const {
    const int32_t* of_token = rows_.data() + static_cast<size_t>(token) * count();
    for (int i = 0; i < mixture_.per_token; ++i) rows[i] = output_.floats() + of_token[i] * row_stride_;
    if (!mixture_.shared()) return;
    const ExpertGroup& shared = groups_.front();
    const size_t row = of_token[mixture_.per_token] - shared.first_row;
    rows[mixture_.per_token] = output(shared) + row * stride_of(shared);
}

ExpertRows::Piece ExpertRows::find(const std::vector<int>& ends, int piece) const {
    piece += ends[round_begin_];
    const auto end = std::upper_bound(ends.begin(), ends.end(), piece);
    const size_t group = end - ends.begin() - 1;
    return {&groups_[group], piece - ends[group]};
}

}  // namespace nybble
