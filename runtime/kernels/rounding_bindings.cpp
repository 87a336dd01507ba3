// The Python face of rounding.
#include <nanobind/nanobind.h>

#include <cmath>
#include <string>

#include "arguments.h"
#include "rounding.h"

namespace nybble {
namespace {

using namespace nb::literals;

template <typename Array>
void check_shape(const char* name, const Array& array, size_t rows, size_t columns) {
    if (array.shape(0) != rows || array.shape(1) != columns)
        fail(name, "has shape [" + std::to_string(array.shape(0)) + ", " + std::to_string(array.shape(1)) +
                       "]; expected [" + std::to_string(rows) + ", " + std::to_string(columns) + "]");
}

void check_bits(int bits) {
    if (bits < 1 || bits > 8) fail("bits", "is " + std::to_string(bits) + "; expected 1 to 8");
}

void round_columns_of(const FloatsOut& weight, const Floats2& passed_on, const Floats2& scale,
                      const Floats2& zero, const Ints1& group, int bits, const FloatsOut& codes,
                      const FloatsOut& errors) {
    const size_t columns = weight.shape(0), outputs = weight.shape(1);
    check_shape("passed_on", passed_on, columns, columns);
    check_shape("scale", scale, scale.shape(0), outputs);
    check_shape("zero", zero, scale.shape(0), outputs);
    check_shape("codes", codes, columns, outputs);
    check_shape("errors", errors, columns, outputs);
    check_size("group", group.size(), columns);
    check_range("group", group.data(), columns, 0, static_cast<int>(scale.shape(0)));
    check_bits(bits);
    const nb::gil_scoped_release release;
    round_columns({columns, outputs, weight.data(), passed_on.data(), scale.data(), zero.data(), group.data(),
                   static_cast<float>((1 << bits) - 1), codes.data(), errors.data()});
}

void descend_codes_of(const Floats2& hessian, const FloatsOut& steps, int bits, const FloatsOut& codes,
                      const FloatsOut& change) {
    const size_t columns = steps.shape(0), outputs = steps.shape(1);
    check_shape("hessian", hessian, columns, columns);
    check_shape("codes", codes, columns, outputs);
    check_shape("change", change, columns, outputs);
    check_bits(bits);
    for (size_t i = 0; i < columns; ++i)
        if (!(hessian.data()[i * columns + i] > 0)) fail("hessian", "has no positive diagonal");
    const nb::gil_scoped_release release;
    descend_codes({columns, outputs, hessian.data(), steps.data(), static_cast<float>((1 << bits) - 1),
                   codes.data(), change.data()});
}

}  // namespace

void bind_rounding(nb::module_& m) {
    m.def("round_columns", &round_columns_of, "weight"_a.noconvert(), "passed_on"_a.noconvert(),
          "scale"_a.noconvert(), "zero"_a.noconvert(), "group"_a.noconvert(), "bits"_a, "codes"_a.noconvert(),
          "errors"_a.noconvert());
    m.def("descend_codes", &descend_codes_of, "hessian"_a.noconvert(), "steps"_a.noconvert(), "bits"_a,
          "codes"_a.noconvert(), "change"_a.noconvert());
}

}  // namespace nybble
