#include "expert_reads.h"

#include <algorithm>

namespace nybble {
namespace {

int layers_of(const StreamSettings& settings) {
    return settings.experts == 0 ? 0 : static_cast<int>(settings.expert_ranges.size()) / settings.experts;
}

}  // namespace

ExpertReads::ExpertReads(const StreamSettings& settings, StreamTrouble& trouble)
    : settings_(settings),
      trouble_(trouble),
      slots_(layers_of(settings), settings.experts, settings.expert_slots),
      slot_reads_(settings.expert_slots) {
    if (settings.expert_slots == 0) return;
    memory_.allocate(settings.slot_bytes * settings.expert_slots);
    needed_.reserve(settings.experts);
}

// What is still read into a slot holds it until it ends.
void ExpertReads::rewind() {
    for (size_t i = released_; i < needed_.size(); ++i) {
        const int slot = needed_[i].slot;
        if (slot != ExpertSlots::kNone && slot_reads_[slot] == 0) slots_.release(slot);
    }
    clear();
}

void ExpertReads::clear() {
    needed_.clear();
    taken_ = bytes_taken_ = acquired_ = released_ = 0;
}

void ExpertReads::begin(int layer) {
    clear();
    layer_ = layer;
}

void ExpertReads::need(int expert, int tokens) {
    slots_.use(layer_, expert, tokens);
    ++counts_.needed;
    const int slot = slots_.of_layer(layer_)[expert];
    if (slot != ExpertSlots::kNone) slots_.hold(slot);
    needed_.push_back({expert, slot, 0});
    if (slot == ExpertSlots::kNone) needed_.back().missing = range_of(needed_.back()).bytes;
}

// Those in memory need no read: they come first.
bool ExpertReads::may_read() {
    while (taken_ < needed_.size() && needed_[taken_].missing == 0) ++taken_;
    if (!trouble_.problem.empty() || taken_ == needed_.size()) return false;
    Needed& expert = needed_[taken_];
    if (expert.slot == ExpertSlots::kNone) expert.slot = slots_.take();
    return expert.slot != ExpertSlots::kNone;
}

ReadRequest ExpertReads::take(uint32_t tag) {
    const Needed& expert = needed_[taken_];
    const ExpertRange& range = range_of(expert);
    if (bytes_taken_ == 0) {
        ++counts_.read;
        counts_.bytes += range.bytes;
    }
    const size_t bytes = std::min(kPieceBytes, range.bytes - bytes_taken_);
    const ReadRequest request{tag, range.offset + static_cast<int64_t>(bytes_taken_), bytes,
                              data_of(expert.slot) + bytes_taken_};
    reads_[tag] = {taken_, expert.slot, bytes};
    ++slot_reads_[expert.slot];
    bytes_taken_ += bytes;
    if (bytes_taken_ == range.bytes) {
        bytes_taken_ = 0;
        ++taken_;
    }
    return request;
}

// Only an expert that has been read whole is one that is there.
void ExpertReads::finish(uint32_t tag, bool current, const std::string& reason) {
    const Read& read = reads_[tag];
    --slot_reads_[read.slot];
    if (!current) {
        if (slot_reads_[read.slot] == 0) slots_.release(read.slot);
        return;
    }
    Needed& expert = needed_[read.needed];
    if (!reason.empty()) return trouble_.note(name_of(expert), reason);
    expert.missing -= read.bytes;
    if (expert.missing == 0) slots_.fill(expert.slot, layer_, expert.expert);
}

std::string ExpertReads::name_of(const Needed& expert) const {
    return "expert " + std::to_string(expert.expert) + " of layer " + std::to_string(layer_);
}

size_t ExpertReads::missing_reads() const {
    const int slot = needed_[acquired_].slot;
    return slot == ExpertSlots::kNone ? 1 : std::max(1, slot_reads_[slot]);
}

int ExpertReads::acquire() {
    const size_t first = acquired_;
    while (!all_acquired() && is_ready()) ++acquired_;
    return static_cast<int>(acquired_ - first);
}

void ExpertReads::release() {
    for (; released_ < acquired_; ++released_) slots_.release(needed_[released_].slot);
}

}  // namespace nybble
