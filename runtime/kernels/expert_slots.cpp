#include "expert_slots.h"

#include <cmath>

namespace nybble {
namespace {

// After 23 tokens a choice counts half of what a new one does.
constexpr double kGrowth = 1.03;
constexpr double kMostWeight = 1e100;

}  // namespace

ExpertSlots::ExpertSlots(int layers, int experts, int slots)
    : experts_(experts),
      slots_(slots),
      slot_of_(static_cast<size_t>(layers) * experts, kNone),
      score_(slot_of_.size(), 0.0) {}

// In place of all older ones becoming less the new ones become more.
void ExpertSlots::age(int tokens) {
    weight_ *= std::pow(kGrowth, tokens);
    if (weight_ < kMostWeight) return;
    for (double& score : score_) score /= weight_;
    weight_ = 1;
}

int ExpertSlots::take() {
    int least = kNone;
    double least_score = 0;
    for (int slot = 0; slot < static_cast<int>(slots_.size()); ++slot) {
        const auto& [key, held] = slots_[slot];
        if (held) continue;
        const double score = key == kNone ? -1 : score_[key];
        if (least != kNone && score >= least_score) continue;
        least = slot;
        least_score = score;
    }
    if (least == kNone) return kNone;
    if (int32_t& key = slots_[least].key; key != kNone) {
        slot_of_[key] = kNone;
        key = kNone;
    }
    slots_[least].held = true;
    return least;
}

void ExpertSlots::fill(int slot, int layer, int expert) {
    const int32_t key = key_of(layer, expert);
    slots_[slot].key = key;
    slot_of_[key] = slot;
}

}  // namespace nybble
