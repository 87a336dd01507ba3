// What the parts of kernel_test share: checks, random numbers that are the same on every machine, digests.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <source_location>
#include <string>
#include <vector>

#include "../../runtime/kernels/kernels.h"

namespace kernel_test {

inline std::string& current_case() {
    static std::string name;
    return name;
}

// Stops the program where a fact does not hold.
inline void check(bool holds, const char* fact,
                  const std::source_location& where = std::source_location::current()) {
    if (holds) return;
    std::fprintf(stderr, "%s:%u: %s: not so: %s\n", where.file_name(), static_cast<unsigned>(where.line()),
                 current_case().c_str(), fact);
    std::exit(1);
}

// xorshift64*, Vigna 2016 (https://arxiv.org/abs/1402.6246).
class Random {
  public:
    explicit Random(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
    uint32_t next() {
        state_ ^= state_ >> 12;
        state_ ^= state_ << 25;
        state_ ^= state_ >> 27;
        return static_cast<uint32_t>((state_ * 0x2545f4914f6cdd1du) >> 32);
    }
    int below(int n) { return static_cast<int>(next() % static_cast<uint32_t>(n)); }
    // In [-1, 1), a multiple of 2^-23.
    float uniform() { return static_cast<float>(next() >> 8) * 0x1p-23f - 1.0f; }
    std::vector<float> uniforms(size_t n, float scale = 1.0f, float offset = 0.0f) {
        std::vector<float> values(n);
        for (float& x : values) x = uniform() * scale + offset;
        return values;
    }

  private:
    uint64_t state_;
};

inline std::vector<int> shuffled(Random& random, int n) {
    std::vector<int> order(n);
    for (int i = 0; i < n; ++i) order[i] = i;
    for (int i = n - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
    return order;
}

inline bool same_bits(const float* a, const float* b, size_t n) {
    return std::memcmp(a, b, n * sizeof(float)) == 0;
}

// FNV-1a, 64 bits.
class Digest {
  public:
    void add(const void* data, size_t bytes) {
        const auto* p = static_cast<const uint8_t*>(data);
        for (size_t i = 0; i < bytes; ++i) value_ = (value_ ^ p[i]) * 0x100000001b3u;
    }
    uint64_t value() const { return value_; }

  private:
    uint64_t value_ = 0xcbf29ce484222325u;
};

// One instruction set's results: a digest for each case, so that a difference has a name.
struct Results {
    struct Case {
        std::string name;
        uint64_t digest;
    };
    std::vector<Case> cases;

    void add(const std::vector<float>& values) {
        Digest digest;
        digest.add(values.data(), values.size() * sizeof(float));
        cases.push_back({current_case(), digest.value()});
    }
};

// A linear layer with random weights in the packed layout, and what the weights stand for.
struct RandomLinear {
    nybble::PackedLinear packed;
    std::vector<uint8_t> tiles;  // exactly as long as the layout says: reading past it is an error
    std::vector<double> dense;   // [rows][columns]
    std::vector<double> spread;  // [rows][columns], the magnitudes of what is added up for a weight
};
RandomLinear random_linear(Random& random, int rows, int columns, int bits, nybble::WeightKind kind,
                           int slices_per_group);

// A file that is gone with it: on a disk, or in memory.
class TemporaryFile {
  public:
    explicit TemporaryFile(const std::vector<uint8_t>& content, bool in_memory = false);
    ~TemporaryFile();
    int descriptor() const { return descriptor_; }
    void resize(size_t bytes) const;
    void write(const std::vector<uint8_t>& content) const;

  private:
    int descriptor_;
};

// Heap allocations by any thread while one of these lives.
class AllocationCount {
  public:
    AllocationCount();
    ~AllocationCount();
    int count() const;
};

// Each runs its cases on one instruction set, checks what must hold within it, and adds the results.
void test_elementwise(const nybble::Kernels& kernels, Results& results);
void test_linear(const nybble::Kernels& kernels, Results& results);
void test_head(const nybble::Kernels& kernels, Results& results);
void test_attention(const nybble::Kernels& kernels, Results& results);
void test_decoder(const nybble::Kernels& kernels, Results& results);
void test_experts(const nybble::Kernels& kernels, Results& results);
void test_sampler(const nybble::Kernels& kernels, Results& results);
void test_stream(const nybble::Kernels& kernels, Results& results);
void test_pool(const nybble::Kernels& kernels, Results& results);

}  // namespace kernel_test
