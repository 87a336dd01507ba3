// Single rows of a matrix that lies in a file as tiles of kHalves. A row takes two reads: of the upper halves
// of its row of tiles, and of the lower ones.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "read_part.h"
#include "stream_settings.h"

namespace nybble {

class RowReads final : public ReadPart {
  public:
    static constexpr int kRowsAtOnce = 64;

    RowReads(const StreamSettings& settings, StreamTrouble& trouble);

    void rewind() { reads_wanted_ = taken_ = missing_ = 0; }
    // These rows, at most kRowsAtOnce, are wanted.
    void want(const int32_t* ids, int count);

    bool may_read() override;
    ReadRequest take(uint32_t tag) override;
    void finish(uint32_t tag, bool current, const std::string& reason) override;

    bool is_ready() const { return missing_ == 0; }
    static std::string name() { return "the embedding"; }
    // As tiles of one row.
    const uint8_t* rows() const { return rows_.data(); }

  private:
    static constexpr size_t kPlaces = 8;  // for halves of rows of tiles, that are read at once

    struct Read {
        int row;
        int32_t id;
        bool lower;
        size_t place;     // of `places_`
        size_t begin_at;  // where what is wanted begins in it
    };

    size_t free_place() const;  // kPlaces where there is none
    size_t place_bytes() const;
    uint8_t* place(size_t index) const { return places_.data() + place_bytes() * index; }

    const StreamSettings& settings_;
    StreamTrouble& trouble_;
    AlignedBuffer rows_;
    ReadMemory places_;
    bool place_used_[kPlaces] = {};
    int32_t ids_[kRowsAtOnce];
    int reads_wanted_ = 0, taken_ = 0, missing_ = 0;  // two a row
    Read reads_[ReadQueue::kMost];                    // by tag
};

}  // namespace nybble
