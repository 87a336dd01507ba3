#include "range_ring.h"

#include <algorithm>

namespace nybble {

RangeRing::RangeRing(const StreamSettings& settings, StreamTrouble& trouble)
    : settings_(settings), trouble_(trouble), slots_(settings.ranges.empty() ? 0 : settings.buffers) {
    if (slots_.empty()) return;
    memory_.allocate(settings.buffer_bytes * slots_.size());
    uint8_t* data = memory_.data();
    for (Slot& slot : slots_) {
        slot.data = data;
        data += settings.buffer_bytes;
    }
}

void RangeRing::rewind() {
    issued_ = acquired_ = released_ = 0;
    next_ = taken_ = 0;
    ahead_ = true;
    for (Slot& slot : slots_) slot.problem.clear();
}

void RangeRing::begin_step(bool all) {
    step_end_ = all ? settings_.ranges.size() : settings_.every_step;
    ahead_ = false;
    turn();
}

// When all of a step has been read, the next one's come.
void RangeRing::turn() {
    if (!ahead_ && next_ == step_end_) {
        next_ = 0;
        ahead_ = true;
    }
}

bool RangeRing::may_read() {
    if (trouble_.failed || next_ == end_of_step()) return false;
    return taken_ > 0 || (issued_ - released_ < slots_.size() && slots_[issued_ % slots_.size()].reads == 0);
}

ReadRequest RangeRing::take(uint32_t tag) {
    Slot& slot = slots_[issued_ % slots_.size()];
    const FileRange& range = settings_.ranges[next_];
    if (taken_ == 0) {
        slot.range = next_;
        slot.missing = range.bytes;
    }
    const size_t bytes = std::min(kPieceBytes, range.bytes - taken_);
    const ReadRequest request{tag, range.offset + static_cast<int64_t>(taken_), bytes, slot.data + taken_};
    reads_[tag] = {&slot, next_, bytes};
    ++slot.reads;
    taken_ += bytes;
    if (taken_ == range.bytes) {
        taken_ = 0;
        ++issued_;
        ++next_;
        turn();
    }
    return request;
}

void RangeRing::finish(uint32_t tag, bool current, const std::string& reason) {
    const Read& read = reads_[tag];
    --read.slot->reads;
    if (!current) return;
    if (!reason.empty()) {
        return trouble_.note(read.slot->problem, settings_.ranges[read.range].name, reason);
    }
    read.slot->missing -= read.bytes;
}

size_t RangeRing::missing_reads() const { return std::max(1, at_acquired().reads); }

const std::string& RangeRing::name() const {
    return settings_.ranges[acquired_ < issued_ ? at_acquired().range : next_].name;
}

const uint8_t* RangeRing::acquire() {
    const uint8_t* data = at_acquired().data;
    ++acquired_;
    return data;
}

RangeRing::Memory RangeRing::in_use() const {
    const Slot& slot = slots_[released_ % slots_.size()];
    return {slot.data, settings_.ranges[slot.range].bytes};
}

}  // namespace nybble
