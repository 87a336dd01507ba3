// The inner loops of rounding a weight while it is quantized (`quant/gptq.py`, `quant/refine.py`). Matrices
// are transposed weights, [columns, outputs] by rows; outputs have nothing to do with one another.
#pragma once

#include <cstddef>
#include <cstdint>

namespace nybble {

// Columns that are rounded in order, [columns, outputs] each, with a row of `scale` and `zero`
// [groups, outputs] for each column.
struct RoundedColumns {
    size_t columns, outputs;
    float* weight;           // used up
    const float* passed_on;  // [columns, columns]: what a column's error takes off each later one
    const float* scale;
    const float* zero;
    const int32_t* group;  // of each column
    float top;             // the largest code
    float* codes;          // out
    float* errors;         // out: the weight, with earlier errors taken off, less its rounded value
};

void round_columns(const RoundedColumns& job);

// Codes that take their best value one after another, [columns, outputs] each.
struct DescendedCodes {
    size_t columns, outputs;
    const float* hessian;  // [columns, columns], its diagonal positive
    float* steps;  // the error's gradient in units of the scale; a row is up to date when its turn comes
    float top;
    float* codes;   // in and out
    float* change;  // out: what was added
};

void descend_codes(const DescendedCodes& job);

}  // namespace nybble
