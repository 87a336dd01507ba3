#include "tile_rows.h"

#include <cstring>

#include "half.h"

namespace nybble {
namespace {

constexpr int kTogether = 4;  // inputs of a row that lie side by side
constexpr int kScaleBytes = 2;

// Calls visit(scale, slice, codes, step) for every slice of row `lane` of `lanes` that lie in one another:
// `codes` are four bytes, and the next four are `step` bytes on.
template <typename Visit>
void each_slice(const PackedLinear& w, const uint8_t* rows, int lane, int lanes, Visit visit) {
    const size_t slice_bytes = static_cast<size_t>(lanes) * kSlice;
    for (int s = 0; s < w.slices();) {
        const uint8_t* scale = rows + kScaleBytes * lane;
        rows += static_cast<size_t>(kScaleBytes) * lanes;
        for (int i = 0; i < w.slices_per_group && s < w.slices(); ++i, ++s, rows += slice_bytes) {
            visit(scale, s, rows + kTogether * lane, kTogether * lanes);
        }
    }
}

void dequantize(const PackedLinear& w, const uint8_t* rows, int lane, int lanes, float* out) {
    each_slice(w, rows, lane, lanes, [&](const uint8_t* scale, int s, const uint8_t* codes, int step) {
        uint16_t half;
        std::memcpy(&half, scale, sizeof half);
        const float factor = half_to_float(half);
        for (int k = 0; k < kSlice; ++k) {
            const int code = codes[k / kTogether * step + k % kTogether];
            out[s * kSlice + k] = static_cast<float>(code - 128) * factor;
        }
    });
}

}  // namespace

size_t row_bytes(const PackedLinear& w) { return w.tile_bytes() / kTileRows; }

void copy_row(const PackedLinear& w, const uint8_t* tile, int lane, uint8_t* out) {
    each_slice(w, tile, lane, kTileRows, [&](const uint8_t* scale, int s, const uint8_t* codes, int step) {
        if (s % w.slices_per_group == 0) {
            std::memcpy(out, scale, kScaleBytes);
            out += kScaleBytes;
        }
        for (int k = 0; k < kSlice; k += kTogether, out += kTogether) {
            std::memcpy(out, codes + k / kTogether * step, kTogether);
        }
    });
}

void dequantize_tile_row(const PackedLinear& w, const uint8_t* tile, int lane, float* out) {
    dequantize(w, tile, lane, kTileRows, out);
}

void dequantize_row(const PackedLinear& w, const uint8_t* row, float* out) { dequantize(w, row, 0, 1, out); }

}  // namespace nybble
