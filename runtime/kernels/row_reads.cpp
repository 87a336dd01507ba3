#include "row_reads.h"

#include <algorithm>

#include "tile_rows.h"

namespace nybble {
namespace {

constexpr int kBlockRows = kBlockTiles * kTileRows;

}  // namespace

RowReads::RowReads(const StreamSettings& settings, StreamTrouble& trouble)
    : settings_(settings), trouble_(trouble) {
    if (settings.matrix.rows == 0) return;
    rows_.allocate(row_bytes(settings.matrix) * kRowsAtOnce);
    blocks_.allocate(block_memory() * kBlocks);
}

// What a block takes wherever it lies, in whole units.
size_t RowReads::block_memory() const {
    return (settings_.matrix.block_bytes() / kDirectAlignment + 2) * kDirectAlignment;
}

size_t RowReads::free_block() const {
    return static_cast<size_t>(std::find(block_used_, block_used_ + kBlocks, false) - block_used_);
}

void RowReads::want(const int32_t* ids, int count) {
    std::copy_n(ids, count, ids_);
    count_ = missing_ = count;
    taken_ = 0;
}

bool RowReads::may_read() { return trouble_.problem.empty() && taken_ < count_ && free_block() < kBlocks; }

ReadRequest RowReads::take(uint32_t tag) {
    const size_t index = free_block();
    const int32_t id = ids_[taken_];
    const PackedLinear& matrix = settings_.matrix;
    const int number = id / kBlockRows;
    const size_t bytes = matrix.block(number, nullptr).bytes();
    const int64_t begin = settings_.matrix_offset + static_cast<int64_t>(matrix.block_bytes()) * number;
    const size_t at = static_cast<size_t>(begin) % kDirectAlignment;
    const size_t whole = (at + bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    block_used_[index] = true;
    reads_[tag] = {taken_++, id, index, at};
    return {tag, begin - static_cast<int64_t>(at), whole, block(index)};
}

void RowReads::finish(uint32_t tag, bool current, const std::string& reason) {
    const Read& read = reads_[tag];
    block_used_[read.block] = false;
    if (!current) return;
    if (!reason.empty()) return trouble_.note(name(), reason);
    const PackedLinear& matrix = settings_.matrix;
    const PackedLinear held = matrix.block(read.id / kBlockRows, block(read.block) + read.block_at);
    copy_row(held, read.id % kBlockRows, rows_.data() + row_bytes(matrix) * read.row);
    --missing_;
}

}  // namespace nybble
