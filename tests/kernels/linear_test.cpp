// Matrix products: every way to compute them gives the same bits, near a sum in double precision.
#include <algorithm>
#include <cmath>

#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

constexpr double kRounding = 0x1p-23;

// A positive binary16, its value in `value`: mostly about 1/64, now and then subnormal.
uint16_t random_half(Random& random, double* value) {
    const int exponent = random.below(32) == 0 ? 0 : 8 + random.below(3), mantissa = random.below(1024);
    *value = exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return static_cast<uint16_t>(exponent << 10 | mantissa);
}

struct Shape {
    int rows, columns, slices_per_group;
    bool every_count;  // 1 to 40 tokens, or some of them
};

// Rows and columns that fill no tile or slice, a short last group, one group a row, panels of several chunks.
constexpr Shape kShapes[] = {
    {1, 1, 1, false},   {16, 32, 1, false},   {50, 100, 1, true},  {80, 200, 4, false},
    {33, 96, 3, false}, {130, 640, 2, false}, {24, 72, 64, false},
};

struct Kind {
    int bits;
    WeightKind kind;
    const char* name;
};
constexpr Kind kKinds[] = {
    {4, WeightKind::kSymmetric, "4 bits"},           {4, WeightKind::kZeroPoint, "4 bits with zero points"},
    {4, WeightKind::kMinimum, "4 bits with minima"}, {4, WeightKind::kNf4, "NF4"},
    {8, WeightKind::kSymmetric, "8 bits"},           {8, WeightKind::kZeroPoint, "8 bits with zero points"},
    {8, WeightKind::kHalves, "8 bits in halves"}};

// The published values, of which the layout's bytes are the nearest.
// clang-format off
constexpr double kNf4Values[16] = {
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0};
// clang-format on

constexpr int kTokens = 40;

struct Inputs {
    std::vector<uint8_t> blocks;  // [kTokens / 4][slices] quantized
    std::vector<double> values;   // [kTokens][columns], what the integers stand for
};

// Quantizes rows and checks each element against the row, and each sum of a slice.
Inputs quantized(const Kernels& kernels, Random& random, int columns) {
    const int slices = slices_of(columns);
    Inputs in;
    in.blocks.resize(static_cast<size_t>(kTokens / kBlockTokens) * slices * kActivationBytes);
    const Activations out{in.blocks.data(), kTokens, slices};
    for (int t = 0; t < kTokens; ++t) {
        std::vector<float> row = random.uniforms(columns, std::ldexp(1.0f, random.below(8) - 4));
        if (t == 3) std::fill(row.begin(), row.end(), 0.0f);
        if (t == 5) std::fill(row.begin(), row.end(), 1e-35f);  // nothing, not a division by nearly zero
        row.resize(static_cast<size_t>(slices) * kSlice);
        kernels.quantize(row.data(), t, out);
        for (int s = 0; s < slices; ++s) {
            const uint8_t* block = out.block(t / kBlockTokens) + static_cast<size_t>(s) * kActivationBytes;
            const int place = t % kBlockTokens;
            float scale;
            int32_t minus_sum, expected_sum = 0;
            std::memcpy(&scale, block + kActivationScales + place * 4, 4);
            std::memcpy(&minus_sum, block + kActivationMinusSums + place * 4, 4);
            for (int k = 0; k < kSlice; ++k) {
                const int q = static_cast<int8_t>(block[place * kSlice + k]);
                const double value = static_cast<double>(scale) * q, x = row[s * kSlice + k];
                check(std::fabs(value - x) <= std::max(scale * 0.50001, 1e-30),
                      "an input is rounded to nearest");
                expected_sum += q;
                if (s * kSlice + k < columns) in.values.push_back(value);
            }
            check(minus_sum == -expected_sum, "the stored sum is that of the slice, negated");
        }
    }
    return in;
}

class Product {
  public:
    Product(const Kernels& kernels, const RandomLinear& linear, Inputs& inputs)
        : kernels_(kernels), w_(linear.packed), inputs_(inputs), scratch_(kernels.panel_scratch()) {}

    Activations input(int tokens) const { return {inputs_.blocks.data(), tokens, w_.slices()}; }
    size_t stride() const { return static_cast<size_t>(w_.tile_count()) * kTileRows; }

    // Each token as a block of its own, one token long.
    std::vector<float> alone() {
        std::vector<float> y(kTokens * stride());
        std::vector<uint8_t> block(static_cast<size_t>(w_.slices()) * kActivationBytes);
        const Activations one{block.data(), 1, w_.slices()};
        for (int t = 0; t < kTokens; ++t) {
            const int place = t % kBlockTokens;
            for (int s = 0; s < w_.slices(); ++s) {
                const uint8_t* from = input(kTokens).block(t / kBlockTokens) + s * kActivationBytes;
                uint8_t* to = block.data() + s * kActivationBytes;
                std::memcpy(to, from + place * kSlice, kSlice);
                for (int field = kActivationScales; field < kActivationBytes; field += kBlockTokens * 4) {
                    std::memcpy(to + field, from + field + place * 4, 4);
                }
            }
            kernels_.linear_rows(w_, one, y.data() + t * stride(), stride(), 0, w_.tile_count());
        }
        return y;
    }
    // Runs of `tiles` tiles.
    std::vector<float> rows(int tokens, int tiles) {
        std::vector<float> y(tokens * stride(), NAN);
        for (int tile = 0; tile < w_.tile_count(); tile += tiles) {
            kernels_.linear_rows(w_, input(tokens), y.data(), stride(), tile,
                                 std::min(tile + tiles, w_.tile_count()));
        }
        return y;
    }
    // Panels, `blocks` blocks of tokens at a time.
    std::vector<float> panels(int tokens, int blocks) {
        std::vector<float> y(tokens * stride(), NAN);
        const int all = input(tokens).blocks();
        for (int block = 0; block < all; block += blocks) {
            for (int tile = 0; tile < w_.tile_count(); tile += kPanelTiles) {
                kernels_.linear_panel(w_, input(tokens), y.data(), stride(), tile,
                                      std::min(tile + kPanelTiles, w_.tile_count()), block,
                                      std::min(block + blocks, all), scratch_.data());
            }
        }
        return y;
    }

  private:
    const Kernels& kernels_;
    const PackedLinear& w_;
    Inputs& inputs_;
    std::vector<uint8_t> scratch_;
};

void check_values(const RandomLinear& linear, const Inputs& inputs, const std::vector<float>& y) {
    const PackedLinear& w = linear.packed;
    const size_t stride = static_cast<size_t>(w.tile_count()) * kTileRows;
    for (int t = 0; t < kTokens; ++t) {
        for (int row = 0; row < w.rows; ++row) {
            const double* x = inputs.values.data() + static_cast<size_t>(t) * w.columns;
            const double* dense = linear.dense.data() + static_cast<size_t>(row) * w.columns;
            const double* spread = linear.spread.data() + static_cast<size_t>(row) * w.columns;
            double sum = 0, magnitude = 0;
            for (int k = 0; k < w.columns; ++k) {
                sum += x[k] * dense[k];
                magnitude += std::fabs(x[k]) * spread[k];
            }
            check(std::fabs(y[t * stride + row] - sum) <= (2 * w.slices() + 2) * kRounding * magnitude,
                  "an output is the sum in double precision, within rounding");
        }
        for (size_t row = w.rows; row < stride; ++row) {
            check(y[t * stride + row] == 0.0f, "an output of padding is 0");
        }
    }
}

// The loop that benchmarks count operations of does as many as it says.
void check_dot_loop(const Kernels& kernels, Random& random) {
    uint8_t weights[64];
    int8_t activations[64];
    int64_t dot = 0;
    for (int i = 0; i < 64; ++i) {
        weights[i] = static_cast<uint8_t>(random.below(16));
        activations[i] = static_cast<int8_t>(random.below(255) - 127);
        dot += weights[i] * activations[i];
    }
    for (const int rounds : {1, 7}) {
        const int64_t dots = rounds * kernels.dot_operations / 128;
        check(kernels.dot_loop(rounds, weights, activations) == dots * dot, "every dot product is computed");
    }
}

}  // namespace

RandomLinear random_linear(Random& random, int rows, int columns, int bits, WeightKind kind,
                           int slices_per_group) {
    RandomLinear linear;
    linear.packed = {nullptr, rows, columns, bits, kind, slices_per_group};
    PackedLinear& w = linear.packed;
    linear.tiles.resize(w.bytes());
    w.tiles = linear.tiles.data();
    for (uint8_t& byte : linear.tiles) byte = static_cast<uint8_t>(random.next());
    const TilePlaces places(w);
    const auto written = [&](const uint8_t* at) { return linear.tiles.data() + (at - w.tiles); };
    const bool halves = kind == WeightKind::kHalves;
    size_t bytes = 0;
    linear.dense.resize(static_cast<size_t>(rows) * columns);
    linear.spread.resize(linear.dense.size());
    for (int tile = 0; tile < w.tile_count(); ++tile) {
        uint8_t* out = written(places.body(tile));
        const uint8_t* lower = halves ? places.lower(tile) : nullptr;
        for (int group = 0; group < w.groups(); ++group) {
            double scales[kTileRows] = {}, minima[kTileRows] = {};
            int zeros[kTileRows] = {};
            uint8_t* header = out;
            std::memset(header, 0, w.header_bytes());
            for (int r = 0; r < std::min(kTileRows, rows - tile * kTileRows); ++r) {
                const uint16_t scale = random_half(random, scales + r);
                std::memcpy(header + 2 * r, &scale, 2);
                zeros[r] = 1 << (bits - 1);
                if (kind == WeightKind::kZeroPoint) {
                    zeros[r] = random.below(1 << bits);
                    if (bits == 8) header[32 + r] = zeros[r];
                    if (bits == 4) header[32 + r % 8] |= zeros[r] << r / 8 * 4;
                }
                if (kind == WeightKind::kMinimum) {
                    const uint16_t minimum = random_half(random, minima + r) | 0x8000u;
                    std::memcpy(header + 32 + 2 * r, &minimum, 2);
                    minima[r] = -minima[r];
                    zeros[r] = 0;
                }
            }
            out += w.header_bytes();
            const int end = std::min((group + 1) * slices_per_group, w.slices());
            for (int s = group * slices_per_group; s < end; ++s, out += w.slice_bytes()) {
                for (int r = 0; r < std::min(kTileRows, rows - tile * kTileRows); ++r) {
                    for (int k = 0; k < std::min(kSlice, columns - s * kSlice); ++k) {
                        const auto half = [&](const uint8_t* slice) {
                            const int pair = slice[k / 8 * 64 + 4 * r + k % 4];
                            return k / 4 % 2 == 0 ? pair & 15 : pair >> 4;
                        };
                        const int code = halves      ? half(out) << 4 | half(lower + s * w.slice_bytes())
                                         : bits == 8 ? out[k / 4 * 64 + 4 * r + k % 4]
                                                     : half(out);
                        const size_t at =
                            static_cast<size_t>(tile * kTileRows + r) * columns + s * kSlice + k;
                        const double value = kind == WeightKind::kNf4
                                                 ? std::round(127 * kNf4Values[code]) / 127
                                                 : code - zeros[r];
                        linear.dense[at] = value * scales[r] + minima[r];
                        linear.spread[at] = std::fabs(value) * scales[r] + std::fabs(minima[r]);
                    }
                }
            }
        }
        bytes += static_cast<size_t>(out - places.body(tile)) + w.lower_bytes();
    }
    check(bytes == linear.tiles.size(), "the layout is as long as it says");
    return linear;
}

void test_linear(const Kernels& kernels, Results& results) {
    Random random(1);
    current_case() = "dot products on registers";
    check_dot_loop(kernels, random);
    for (const Shape& shape : kShapes) {
        for (const Kind& kind : kKinds) {
            current_case() = "product " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns) +
                             ", " + kind.name;
            const RandomLinear linear = random_linear(random, shape.rows, shape.columns, kind.bits, kind.kind,
                                                      shape.slices_per_group);
            Inputs inputs = quantized(kernels, random, shape.columns);
            Product product(kernels, linear, inputs);
            const std::vector<float> alone = product.alone();
            check_values(linear, inputs, alone);
            for (int tokens = 1; tokens <= kTokens; ++tokens) {
                if (!shape.every_count && tokens != 1 && tokens % 13 > 2) continue;
                const size_t n = tokens * product.stride();
                check(same_bits(product.rows(tokens, 1 << 30).data(), alone.data(), n), "all rows at once");
                check(same_bits(product.rows(tokens, 3).data(), alone.data(), n), "three tiles at a time");
                check(same_bits(product.panels(tokens, kPanelBlocks).data(), alone.data(), n), "panels");
                check(same_bits(product.panels(tokens, 3).data(), alone.data(), n), "panels by blocks");
            }
            results.add(alone);
        }
    }
}

}  // namespace kernel_test
