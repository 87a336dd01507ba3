// The Python face of what benchmarks measure.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <system_error>
#include <utility>

#include "arguments.h"
#include "measure.h"

namespace nybble {
namespace {

using namespace nb::literals;

// Calls the constructor at `place`; threads that the system refuses are an error of the argument.
template <typename Measure, typename... Arguments>
void construct(Measure* place, int threads, Arguments&&... arguments) {
    if (threads < 1 || threads > 1024)
        fail("threads", "is " + std::to_string(threads) + "; expected 1 to 1024");
    try {
        nb::gil_scoped_release release;
        new (place) Measure(std::forward<Arguments>(arguments)...);
    } catch (const std::system_error& error) {
        fail("threads", "is " + std::to_string(threads) + "; the system started fewer: " + error.what());
    }
}

void construct_read(MemoryRead* place, int threads, int64_t bytes) {
    constexpr int64_t kMost = int64_t{1} << 48;
    if (bytes < 1 || bytes > kMost)
        fail("bytes", "is " + std::to_string(bytes) + "; expected 1 to " + std::to_string(kMost));
    construct(place, threads, threads, static_cast<size_t>(bytes));
}

void construct_loop(DotLoop* place, int threads, const std::string& isa) {
    construct(place, threads, select_kernels(isa), threads);
}

// Keeps the arrays that it works on alive.
struct PyLinearProduct {
    const Tiles tiles;
    const FloatsOut y;
    LinearProduct product;

    PyLinearProduct(const Kernels& kernels, int threads, const PackedLinear& linear, const Floats2& x,
                    const Tiles& tiles, const FloatsOut& y)
        : tiles(tiles),
          y(y),
          product(kernels, threads, linear, x.data(), static_cast<int>(x.shape(0)), y.data()) {}

    double run(int repeats) {
        if (repeats < 1) fail("repeats", "is " + std::to_string(repeats) + "; expected at least 1");
        nb::gil_scoped_release release;
        return product.run(repeats);
    }
};

void construct_product(PyLinearProduct* place, int threads, const std::string& isa, const Floats2& x,
                       const Tiles& tiles, int rows, int bits, int kind, int slices_per_group,
                       const FloatsOut& y) {
    if (x.shape(0) < 1 || x.shape(0) > 1 << 20)
        fail("x", "has " + std::to_string(x.shape(0)) + " rows; expected 1 to " + std::to_string(1 << 20));
    const PackedLinear linear =
        packed_linear("tiles", tiles, rows, static_cast<int>(x.shape(1)), bits, kind, slices_per_group);
    if (y.shape(0) != x.shape(0) || y.shape(1) != static_cast<size_t>(round_up(rows, kTileRows)))
        fail("y", "has the wrong shape");
    construct(place, threads, select_kernels(isa), threads, linear, x, tiles, y);
}

double run_loop(DotLoop& loop, int64_t rounds) {
    constexpr int64_t kMost = int64_t{1} << 32;
    if (rounds < 1 || rounds > kMost)
        fail("rounds", "is " + std::to_string(rounds) + "; expected 1 to " + std::to_string(kMost));
    nb::gil_scoped_release release;
    return loop.run(rounds);
}

}  // namespace

void bind_measure(nb::module_& m) {
    nb::class_<MemoryRead>(m, "MemoryRead")
        .def("__init__", &construct_read, "threads"_a, "bytes"_a)
        .def("run", &MemoryRead::run, nb::call_guard<nb::gil_scoped_release>())
        .def_prop_ro("bytes", &MemoryRead::bytes);
    nb::class_<PyLinearProduct>(m, "LinearProduct")
        .def("__init__", &construct_product, "threads"_a, "isa"_a, "x"_a.noconvert(), "tiles"_a.noconvert(),
             "rows"_a, "bits"_a, "kind"_a, "slices_per_group"_a, "y"_a.noconvert())
        .def("run", &PyLinearProduct::run, "repeats"_a);
    nb::class_<DotLoop>(m, "DotLoop")
        .def("__init__", &construct_loop, "threads"_a, "isa"_a)
        .def("run", &run_loop, "rounds"_a)
        .def_prop_ro("operations", &DotLoop::operations);
}

}  // namespace nybble
