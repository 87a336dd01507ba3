#include "row_reads.h"

#include <algorithm>

#include "tile_rows.h"

namespace nybble {

RowReads::RowReads(const StreamSettings& settings, StreamTrouble& trouble)
    : settings_(settings), trouble_(trouble) {
    if (settings.matrix.rows == 0) return;
    rows_.allocate(row_bytes(settings.matrix) * kRowsAtOnce);
    tiles_.allocate(tile_memory() * kTiles);
}

// What a tile takes wherever it lies, in whole units.
size_t RowReads::tile_memory() const {
    return (settings_.matrix.tile_bytes() / kDirectAlignment + 2) * kDirectAlignment;
}

size_t RowReads::free_tile() const {
    return static_cast<size_t>(std::find(tile_used_, tile_used_ + kTiles, false) - tile_used_);
}

void RowReads::want(const int32_t* ids, int count) {
    std::copy_n(ids, count, ids_);
    count_ = missing_ = count;
    taken_ = 0;
}

bool RowReads::may_read() { return trouble_.problem.empty() && taken_ < count_ && free_tile() < kTiles; }

ReadRequest RowReads::take(uint32_t tag) {
    const size_t index = free_tile(), bytes = settings_.matrix.tile_bytes();
    const int32_t id = ids_[taken_];
    const int64_t begin = settings_.matrix_offset + static_cast<int64_t>(bytes) * (id / kTileRows);
    const size_t at = static_cast<size_t>(begin) % kDirectAlignment;
    const size_t whole = (at + bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    tile_used_[index] = true;
    reads_[tag] = {taken_++, id, index, at};
    return {tag, begin - static_cast<int64_t>(at), whole, tile(index)};
}

void RowReads::finish(uint32_t tag, bool current, const std::string& reason) {
    const Read& read = reads_[tag];
    tile_used_[read.tile] = false;
    if (!current) return;
    if (!reason.empty()) return trouble_.note(name(), reason);
    copy_row(settings_.matrix, tile(read.tile) + read.tile_at, read.id % kTileRows,
             rows_.data() + row_bytes(settings_.matrix) * read.row);
    --missing_;
}

}  // namespace nybble
