// Which experts of a model's mixtures are in memory: slots for experts of all layers, kept by those that most
// tokens chose of late. Knows no file; where an expert is to be read to is said here.
#pragma once

#include <cstdint>
#include <vector>

namespace nybble {

class ExpertSlots {
  public:
    static constexpr int kNone = -1;

    ExpertSlots(int layers, int experts, int slots);

    // So many tokens have come: what was chosen before them counts less.
    void age(int tokens);
    // So many tokens chose an expert.
    void use(int layer, int expert, int tokens) { score_[key_of(layer, expert)] += weight_ * tokens; }

    // The slot of each of a layer's experts, kNone where it is not in memory.
    const int32_t* of_layer(int layer) const { return slot_of_.data() + key_of(layer, 0); }

    // The slot whose expert was chosen least, of those that nobody holds: it is held, and its expert is gone.
    // kNone where all are held.
    int take();
    // A held slot has an expert.
    void fill(int slot, int layer, int expert);
    // A slot that is held keeps its expert.
    void hold(int slot) { slots_[slot].held = true; }
    void release(int slot) { slots_[slot].held = false; }

  private:
    struct Slot {
        int32_t key = kNone;  // of the expert that is in it
        bool held = false;
    };

    int32_t key_of(int layer, int expert) const { return layer * experts_ + expert; }

    const int experts_;
    std::vector<Slot> slots_;
    std::vector<int32_t> slot_of_;  // by key
    std::vector<double> score_;     // by key: tokens that chose it, the latest at `weight_`
    double weight_ = 1;
};

}  // namespace nybble
