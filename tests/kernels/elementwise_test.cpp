// Norm, rotary embedding, activations, caps: near the same in double precision.
#include <algorithm>
#include <cmath>

#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

constexpr int kLength = 80, kCounted = 72;  // rows are padded with zeros to whole registers

void check_near(const std::vector<float>& found, const std::vector<double>& expected, double relative,
                double absolute, const char* fact) {
    for (size_t i = 0; i < expected.size(); ++i) {
        check(std::fabs(found[i] - expected[i]) <= relative * std::fabs(expected[i]) + absolute, fact);
    }
}

void test_norm(const Kernels& kernels, Random& random, Results& results) {
    current_case() = "norm";
    std::vector<float> x = random.uniforms(kLength, 3.0f), weight = random.uniforms(kLength, 0.5f, 1.0f);
    std::fill(x.begin() + kCounted, x.end(), 0.0f);
    std::vector<float> out(kLength, NAN);
    kernels.rms_norm(x.data(), weight.data(), 1e-5f, kCounted, out.data());
    double squares = 0;
    for (float v : x) squares += static_cast<double>(v) * v;
    std::vector<double> expected;
    for (int i = 0; i < kLength; ++i)
        expected.push_back(x[i] * weight[i] / std::sqrt(squares / kCounted + 1e-5f));
    check_near(out, expected, 1e-6, 0, "x / sqrt(mean(x^2) + epsilon) * weight");
    results.add(out);
    std::vector<float> in_place = x;
    kernels.rms_norm(in_place.data(), weight.data(), 1e-5f, kCounted, in_place.data());
    check(same_bits(in_place.data(), out.data(), kLength), "in place is the same");
    kernels.add(x.data(), out.data(), kLength);
    results.add(x);
    kernels.scale(x.data(), 0.3f, kLength);
    results.add(x);
}

void test_rope(const Kernels& kernels, Random& random, Results& results) {
    for (int half : {8, 16, 20}) {
        current_case() = "rotation, half " + std::to_string(half);
        std::vector<float> head = random.uniforms(2 * half + 5);
        const std::vector<float> cos = random.uniforms(half), sin = random.uniforms(half), before = head;
        kernels.rope(head.data(), cos.data(), sin.data(), half);
        std::vector<double> expected(before.begin(), before.end());
        for (int i = 0; i < half; ++i) {
            const double a = before[i], b = before[half + i];
            expected[i] = a * cos[i] - b * sin[i];
            expected[half + i] = a * sin[i] + b * cos[i];
        }
        check_near(head, expected, 0, 2.5e-7, "pairs turn, the rest stays");
        results.add(head);
    }
}

void test_gate(const Kernels& kernels, Random& random, Results& results) {
    std::vector<float> gate = random.uniforms(kLength, 12.0f);
    const float edges[] = {0.0f, -0.0f, 1e-30f, -1e-30f, 90.0f, -90.0f, 1e4f, -1e4f, 200.0f, -200.0f};
    std::copy(std::begin(edges), std::end(edges), gate.begin());
    const std::vector<float> up = random.uniforms(kLength);
    const auto silu = [](double x) { return x / (1 + std::exp(-x)); };
    const auto gelu = [](double x) {
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    };
    for (Activation activation : {Activation::kSilu, Activation::kGeluTanh, Activation::kRelu}) {
        current_case() = "activation " + std::to_string(static_cast<int>(activation));
        std::vector<float> out(kLength, NAN);
        kernels.gated(gate.data(), up.data(), activation, kLength, out.data());
        std::vector<double> expected;
        for (int i = 0; i < kLength; ++i) {
            const double g = gate[i];
            expected.push_back(up[i] * (activation == Activation::kSilu       ? silu(g)
                                        : activation == Activation::kGeluTanh ? gelu(g)
                                                                              : std::max(g, 0.0)));
        }
        check_near(out, expected, 2e-6, 2e-6, "activation(gate) * up");
        results.add(out);
    }
    current_case() = "cap";
    std::vector<float> capped = gate;
    kernels.softcap(capped.data(), 7.0f, kLength);
    std::vector<double> expected;
    for (float x : gate) expected.push_back(7.0 * std::tanh(x / 7.0));
    check_near(capped, expected, 1e-6, 7 * 5e-7, "cap * tanh(x / cap)");
    results.add(capped);
}

}  // namespace

void test_elementwise(const Kernels& kernels, Results& results) {
    Random random(2);
    test_norm(kernels, random, results);
    test_rope(kernels, random, results);
    test_gate(kernels, random, results);
}

}  // namespace kernel_test
