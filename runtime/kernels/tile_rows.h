// Single rows of a matrix in tiles: 8 bits, symmetric, as embeddings are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace nybble {

// A row by itself: for every group its scale, f16, then its codes.
size_t row_bytes(const PackedLinear& w);
// Takes row `lane` out of a row of tiles.
void copy_row(const PackedLinear& w, const uint8_t* tile, int lane, uint8_t* out);

// What the integers stand for, [slices * kSlice]: of row `lane` of a row of tiles, or of a row by itself.
void dequantize_tile_row(const PackedLinear& w, const uint8_t* tile, int lane, float* out);
void dequantize_row(const PackedLinear& w, const uint8_t* row, float* out);

}  // namespace nybble
