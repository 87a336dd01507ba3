// What the bindings take from Python, and how they refuse it: a ValueError that names the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <string>

#include "layout.h"

namespace nybble {

namespace nb = nanobind;

using Ints1 = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ints2 = nb::ndarray<const int32_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ints3 = nb::ndarray<const int32_t, nb::ndim<3>, nb::c_contig, nb::device::cpu>;
using Floats1 = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Floats2 = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using FloatsOut = nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Tiles = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

[[noreturn]] inline void fail(const std::string& argument, const std::string& problem) {
    throw nb::value_error((argument + " " + problem).c_str());
}

inline void check_range(const char* argument, const int32_t* values, size_t count, int low, int high) {
    for (size_t i = 0; i < count; ++i) {
        if (values[i] < low || values[i] >= high) {
            fail(argument, "holds " + std::to_string(values[i]) + " at index " + std::to_string(i) +
                               "; expected " + std::to_string(low) + " to " + std::to_string(high - 1));
        }
    }
}

inline void check_size(const char* argument, size_t found, size_t expected) {
    if (found != expected) {
        fail(argument, "has " + std::to_string(found) + " entries; expected " + std::to_string(expected));
    }
}

// Whether there are tiles of a kind with so many bits.
inline bool has_bits(int kind, int bits) {
    switch (static_cast<WeightKind>(kind)) {
        case WeightKind::kSymmetric:
        case WeightKind::kZeroPoint:
            return bits == 4 || bits == 8;
        case WeightKind::kMinimum:
        case WeightKind::kNf4:
            return bits == 4;
        case WeightKind::kHalves:
            return bits == 8;
    }
    return false;
}

inline PackedLinear packed_linear(const char* name, const Tiles& tiles, int rows, int columns, int bits,
                                  int kind, int slices_per_group) {
    constexpr int kMost = 1 << 30;  // rounding up to tiles or groups must not overflow
    if (rows < 1 || rows > kMost || columns < 1 || slices_per_group > kMost || slices_per_group < 1 ||
        !has_bits(kind, bits)) {
        fail(name, "has a shape or kind that no tile expresses");
    }
    PackedLinear w{tiles.data(), rows, columns, bits, static_cast<WeightKind>(kind), slices_per_group};
    check_size(name, tiles.size(), w.bytes());
    return w;
}

// An argument that may be None. Nothing is converted: another dtype or stride is an error.
template <typename Array>
Array array_argument(const nb::object& value, const char* name) {
    Array array;
    if (!nb::try_cast<Array>(value, array, false)) fail(name, "is no contiguous array of its dtype");
    return array;
}

}  // namespace nybble
