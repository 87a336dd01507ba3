#include "tile_rows.h"

#include <cstring>

#include "half.h"

namespace nybble {
namespace {

constexpr int kTogether = 4;  // inputs of a row that lie side by side, and in the other nibbles as many more
constexpr int kScaleBytes = 2;

// Where a slice of a row is, and how far from some of its codes to the next.
struct RowSlice {
    const uint8_t* scale;
    const uint8_t* upper;
    const uint8_t* lower;
    size_t step;
};

// Calls visit(slice, place) for every slice of row `lane` of `lanes` that lie in one another.
template <typename Visit>
void each_slice(const PackedLinear& w, const uint8_t* rows, const uint8_t* lower, int lane, int lanes,
                Visit visit) {
    const size_t slice_bytes = static_cast<size_t>(lanes) * kSlice / 2;
    lower += kTogether * lane;
    for (int s = 0; s < w.slices();) {
        const uint8_t* scale = rows + kScaleBytes * lane;
        rows += static_cast<size_t>(kScaleBytes) * lanes;
        for (int i = 0; i < w.slices_per_group && s < w.slices(); ++i, ++s) {
            visit(s, RowSlice{scale, rows + kTogether * lane, lower, static_cast<size_t>(kTogether) * lanes});
            rows += slice_bytes;
            lower += slice_bytes;
        }
    }
}

void dequantize(const PackedLinear& w, const uint8_t* rows, const uint8_t* lower, int lane, int lanes,
                float* out) {
    each_slice(w, rows, lower, lane, lanes, [&](int s, const RowSlice& place) {
        uint16_t half;
        std::memcpy(&half, place.scale, sizeof half);
        const float factor = half_to_float(half);
        for (int k = 0; k < kSlice; ++k) {
            const size_t at = k / (2 * kTogether) * place.step + k % kTogether;
            const int shift = k / kTogether % 2 * 4;
            const int code = (place.upper[at] >> shift & 15) << 4 | (place.lower[at] >> shift & 15);
            out[s * kSlice + k] = static_cast<float>(code - 128) * factor;
        }
    });
}

}  // namespace

size_t row_bytes(const PackedLinear& w) { return w.tile_bytes() / kTileRows; }

void copy_row(const PackedLinear& w, int row, uint8_t* out) {
    uint8_t* lower = out + w.body_bytes() / kTileRows;
    const TilePlaces places(w);
    const int tile = row / kTileRows;
    each_slice(w, places.body(tile), places.lower(tile), row % kTileRows, kTileRows,
               [&](int s, const RowSlice& place) {
                   if (s % w.slices_per_group == 0) {
                       std::memcpy(out, place.scale, kScaleBytes);
                       out += kScaleBytes;
                   }
                   for (size_t at = 0; at < kSlice / 2 / kTogether * place.step; at += place.step) {
                       std::memcpy(out, place.upper + at, kTogether);
                       std::memcpy(lower, place.lower + at, kTogether);
                       out += kTogether;
                       lower += kTogether;
                   }
               });
}

void dequantize_tile_row(const PackedLinear& w, int row, float* out) {
    const TilePlaces places(w);
    const int tile = row / kTileRows;
    dequantize(w, places.body(tile), places.lower(tile), row % kTileRows, kTileRows, out);
}

void dequantize_row(const PackedLinear& w, const uint8_t* row, float* out) {
    dequantize(w, row, row + w.body_bytes() / kTileRows, 0, 1, out);
}

}  // namespace nybble
