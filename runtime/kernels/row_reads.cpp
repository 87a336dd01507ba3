#include "row_reads.h"

#include <algorithm>

#include "tile_rows.h"

namespace nybble {

RowReads::RowReads(const StreamSettings& settings, StreamTrouble& trouble)
    : settings_(settings), trouble_(trouble) {
    if (settings.matrix.rows == 0) return;
    rows_.allocate(row_bytes(settings.matrix) * kRowsAtOnce);
    places_.allocate(place_bytes() * kPlaces);
}

// What a half takes wherever it lies, in whole units; the upper ones have headers.
size_t RowReads::place_bytes() const {
    return (settings_.matrix.body_bytes() / kDirectAlignment + 2) * kDirectAlignment;
}

size_t RowReads::free_place() const {
    return static_cast<size_t>(std::find(place_used_, place_used_ + kPlaces, false) - place_used_);
}

void RowReads::want(const int32_t* ids, int count) {
    std::copy_n(ids, count, ids_);
    reads_wanted_ = missing_ = 2 * count;
    taken_ = 0;
}

bool RowReads::may_read() {
    return trouble_.problem.empty() && taken_ < reads_wanted_ && free_place() < kPlaces;
}

ReadRequest RowReads::take(uint32_t tag) {
    const size_t index = free_place();
    const int row = taken_ / 2, tile = ids_[row] / kTileRows;
    const bool lower = taken_ % 2 != 0;
    const TilePlaces places(settings_.matrix);
    const size_t bytes = lower ? places.lower_bytes : places.body_bytes;
    const size_t offset = lower ? places.lower_at(tile) : places.body_at(tile);
    const int64_t begin = settings_.matrix_offset + static_cast<int64_t>(offset);
    const size_t at = static_cast<size_t>(begin) % kDirectAlignment;
    const size_t whole = (at + bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
    place_used_[index] = true;
    reads_[tag] = {row, ids_[row], lower, index, at};
    ++taken_;
    return {tag, begin - static_cast<int64_t>(at), whole, place(index)};
}

void RowReads::finish(uint32_t tag, bool current, const std::string& reason) {
    const Read& read = reads_[tag];
    place_used_[read.place] = false;
    if (!current) return;
    if (!reason.empty()) return trouble_.note(name(), reason);
    const uint8_t* half = place(read.place) + read.begin_at;
    uint8_t* row = rows_.data() + row_bytes(settings_.matrix) * read.row;
    (read.lower ? copy_lower : copy_upper)(settings_.matrix, half, read.id % kTileRows, row);
    --missing_;
}

}  // namespace nybble
