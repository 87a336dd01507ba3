#include "tile_rows.h"

#include <cstring>

#include "half.h"

namespace nybble {
namespace {

constexpr int kTogether = 4;  // inputs of a row that lie side by side, and in the other nibbles as many more
constexpr int kScaleBytes = 2;

// Takes a row's half of a slice out of those of `kTileRows` rows.
void copy_slice(const uint8_t* slice, int lane, uint8_t* out) {
    for (int k = 0; k < kSlice / 2; k += kTogether) {
        std::memcpy(out + k, slice + k * kTileRows + kTogether * lane, kTogether);
    }
}

// Row `lane` of `lanes` that lie in one another, the upper halves with their scales and the lower ones.
void dequantize(const PackedLinear& w, const uint8_t* upper, const uint8_t* lower, int lane, int lanes,
                float* out) {
    const size_t step = static_cast<size_t>(kTogether) * lanes;
    const size_t slice_bytes = static_cast<size_t>(lanes) * kSlice / 2;
    float factor = 0;
    for (int s = 0; s < w.slices(); ++s, out += kSlice, upper += slice_bytes, lower += slice_bytes) {
        if (s % w.slices_per_group == 0) {
            uint16_t half;
            std::memcpy(&half, upper + kScaleBytes * lane, sizeof half);
            factor = half_to_float(half);
            upper += static_cast<size_t>(kScaleBytes) * lanes;
        }
        for (int k = 0; k < kSlice; ++k) {
            const size_t at = k / (2 * kTogether) * step + kTogether * lane + k % kTogether;
            const int shift = k / kTogether % 2 * 4;
            const int code = (upper[at] >> shift & 15) << 4 | (lower[at] >> shift & 15);
            out[k] = static_cast<float>(code - 128) * factor;
        }
    }
}

size_t upper_bytes(const PackedLinear& w) { return w.body_bytes() / kTileRows; }

}  // namespace

size_t row_bytes(const PackedLinear& w) { return w.tile_bytes() / kTileRows; }

void copy_upper(const PackedLinear& w, const uint8_t* body, int lane, uint8_t* out) {
    for (int s = 0; s < w.slices(); ++s, body += w.slice_bytes(), out += kSlice / 2) {
        if (s % w.slices_per_group == 0) {
            std::memcpy(out, body + kScaleBytes * lane, kScaleBytes);
            body += w.header_bytes();
            out += kScaleBytes;
        }
        copy_slice(body, lane, out);
    }
}

void copy_lower(const PackedLinear& w, const uint8_t* lower, int lane, uint8_t* out) {
    out += upper_bytes(w);
    for (int s = 0; s < w.slices(); ++s, lower += w.slice_bytes(), out += kSlice / 2) {
        copy_slice(lower, lane, out);
    }
}

void dequantize_tile_row(const PackedLinear& w, int row, float* out) {
    const TilePlaces places(w);
    const int tile = row / kTileRows;
    dequantize(w, w.tiles + places.body_at(tile), w.tiles + places.lower_at(tile), row % kTileRows, kTileRows,
               out);
}

void dequantize_row(const PackedLinear& w, const uint8_t* row, float* out) {
    dequantize(w, row, row + upper_bytes(w), 0, 1, out);
}

}  // namespace nybble
