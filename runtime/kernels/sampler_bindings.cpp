// The Python face of choosing a token.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <string>

#include "arguments.h"
#include "token_sampler.h"

namespace nybble {
namespace {

using namespace nb::literals;

class PyTokenSampler {
  public:
    explicit PyTokenSampler(const std::string& isa) : sampler_(select_kernels(isa)) {}

    // With the GIL held: it takes less time than to give that away, and so there is one caller at a time.
    int draw(const Floats1& logits, float top, double temperature, int top_k, double top_p, double min_p,
             double number) {
        if (logits.size() < 1 || logits.size() > 1 << 30)
            fail("logits", "has " + std::to_string(logits.size()) + " entries; expected 1 to 2**30");
        if (!std::isfinite(top)) fail("top", "is no finite number");
        if (!(temperature > 0)) fail("temperature", "is not over 0");
        if (!(top_p > 0 && min_p >= 0 && min_p <= 1)) fail("top_p", "or min_p is out of range");
        if (!(number >= 0 && number < 1)) fail("number", "is not in [0, 1)");
        return sampler_.draw(logits.data(), static_cast<int>(logits.size()), top, temperature,
                             Filters{top_k, top_p, min_p}, number);
    }

  private:
    TokenSampler sampler_;
};

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<PyTokenSampler>(m, "TokenSampler")
        .def(nb::init<const std::string&>(), "isa"_a)
        .def("draw", &PyTokenSampler::draw, "logits"_a.noconvert(), "top"_a, "temperature"_a, "top_k"_a,
             "top_p"_a, "min_p"_a, "number"_a);
}

}  // namespace nybble
