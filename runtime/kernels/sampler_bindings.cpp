// The Python face of choosing a token.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <string>
#include <vector>

#include "arguments.h"
#include "token_rule.h"
#include "token_sampler.h"

namespace nybble {
namespace {

using namespace nb::literals;

void check_filters(double top_p, double min_p) {
    if (!(top_p > 0 && min_p >= 0 && min_p <= 1)) fail("top_p", "or min_p is out of range");
}

// Tokens are not negative here; a vocabulary is checked where one is known.
std::vector<int32_t> token_list(const char* argument, const Ints1& tokens) {
    check_range(argument, tokens.data(), tokens.size(), 0, INT32_MAX);
    return {tokens.data(), tokens.data() + tokens.size()};
}

std::vector<float> number_list(const char* argument, const Floats1& numbers, const Ints1& tokens) {
    check_size(argument, numbers.size(), tokens.size());
    return {numbers.data(), numbers.data() + numbers.size()};
}

void make_rule(TokenRule* rule, double temperature, int top_k, double top_p, double min_p,
               float repetition_penalty, float frequency_penalty, float presence_penalty, uint64_t seed,
               uint64_t index, uint64_t position, const Ints1& biased, const Floats1& bias, const Ints1& seen,
               const Ints1& counted, const Floats1& times) {
    if (!(temperature >= 0)) fail("temperature", "is not 0 or more");
    check_filters(top_p, min_p);
    // A number over 0 may be 0 in float32: then no finite logit is left.
    if (!(repetition_penalty >= 0)) fail("repetition_penalty", "is not 0 or more");
    new (rule) TokenRule{temperature,
                         Filters{top_k, top_p, min_p},
                         seed,
                         index,
                         position,
                         repetition_penalty,
                         frequency_penalty,
                         presence_penalty,
                         token_list("biased", biased),
                         token_list("seen", seen),
                         token_list("counted", counted),
                         number_list("bias", bias, biased),
                         number_list("times", times, counted)};
}

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
        check_filters(top_p, min_p);
        if (!(number >= 0 && number < 1)) fail("number", "is not in [0, 1)");
        return sampler_.draw(logits.data(), static_cast<int>(logits.size()), top, temperature,
                             Filters{top_k, top_p, min_p}, number);
    }

  private:
    TokenSampler sampler_;
};

}  // namespace

void bind_sampler(nb::module_& m) {
    nb::class_<TokenRule>(m, "TokenRule")
        .def("__init__", &make_rule, "temperature"_a, "top_k"_a, "top_p"_a, "min_p"_a, "repetition_penalty"_a,
             "frequency_penalty"_a, "presence_penalty"_a, "seed"_a, "index"_a, "position"_a,
             "biased"_a.noconvert(), "bias"_a.noconvert(), "seen"_a.noconvert(), "counted"_a.noconvert(),
             "times"_a.noconvert());
    nb::class_<PyTokenSampler>(m, "TokenSampler")
        .def(nb::init<const std::string&>(), "isa"_a)
        .def("draw", &PyTokenSampler::draw, "logits"_a.noconvert(), "top"_a, "temperature"_a, "top_k"_a,
             "top_p"_a, "min_p"_a, "number"_a);
}

}  // namespace nybble
