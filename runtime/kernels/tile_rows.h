// Single rows of a matrix of kHalves, as embeddings are.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace nybble {

// A row by itself: for every group its scale, f16, then the upper halves of its codes; after all of them the
// lower ones.
size_t row_bytes(const PackedLinear& w);
// Takes row `lane` out of a row of tiles: what is in its body, and what is in its lower halves.
void copy_upper(const PackedLinear& w, const uint8_t* body, int lane, uint8_t* out);
void copy_lower(const PackedLinear& w, const uint8_t* lower, int lane, uint8_t* out);

// What the integers stand for, [slices * kSlice]: of a row of the tiles, or of a row by itself.
void dequantize_tile_row(const PackedLinear& w, int row, float* out);
void dequantize_row(const PackedLinear& w, const uint8_t* row, float* out);

}  // namespace nybble
