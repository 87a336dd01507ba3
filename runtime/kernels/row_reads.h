// Single rows of a matrix that lies in a file as tiles.
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

    void rewind() { count_ = taken_ = missing_ = 0; }
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
    static constexpr size_t kBlocks = 4;  // that are read at once

    struct Read {
        int row;
        int32_t id;
        size_t block;     // of `blocks_`
        size_t block_at;  // where that of the matrix begins in it
    };

    size_t free_block() const;  // kBlocks where there is none
    size_t block_memory() const;
    uint8_t* block(size_t index) const { return blocks_.data() + block_memory() * index; }

    const StreamSettings& settings_;
    StreamTrouble& trouble_;
    AlignedBuffer rows_;
    ReadMemory blocks_;
    bool block_used_[kBlocks] = {};
    int32_t ids_[kRowsAtOnce];
    int count_ = 0, taken_ = 0, missing_ = 0;
    Read reads_[ReadQueue::kMost];  // by tag
};

}  // namespace nybble
