// Paged attention: any chunking gives the same bits, near a softmax in double precision.
#include <algorithm>
#include <cmath>

#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

constexpr int kHeads = 2;       // KV heads
constexpr int kLength = 530;    // tokens: over two segments of 256
constexpr int kMostRows = 192;  // query rows that a thread's scratch holds, as the decoder gives them

struct Setting {
    KvType type;
    int head_dim, group, window;
    float softcap;
};

// Head sizes that are and are not whole registers; one, some and many query heads a KV head.
constexpr Setting kSettings[] = {
    {KvType::kF32, 64, 3, 0, 0.0f},   {KvType::kF32, 20, 1, 40, 5.0f},    {KvType::kF16, 64, 2, 0, 0.0f},
    {KvType::kF16, 80, 3, 100, 0.0f}, {KvType::kInt8, 20, 7, 0, 8.0f},    {KvType::kInt8, 64, 4, 300, 0.0f},
    {KvType::kInt16, 18, 7, 0, 8.0f}, {KvType::kInt16, 64, 4, 300, 0.0f},
};

// First query and count: a prompt, one that crosses into the second segment, the last tokens.
constexpr int kRanges[][2] = {{0, 19}, {244, 30}, {505, 25}};

// The cache of one layer and one sequence, its pages shuffled, and the keys and values that it then holds.
struct Cache {
    KvShape shape;
    std::vector<uint8_t> pages;
    std::vector<int32_t> table;
    std::vector<double> keys, values;  // [kHeads][kLength][head_dim]

    uint8_t* page(int position, int head) {
        return pages.data() + table[position / kPageTokens] * shape.page_bytes() +
               static_cast<size_t>(head) * shape.head_bytes();
    }
};

double half_value(uint16_t half) {
    const int exponent = half >> 10 & 31, mantissa = half & 1023;
    const double magnitude =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return half & 0x8000 ? -magnitude : magnitude;
}

// An element of a page as layout.h describes it, times its scale; keys in int8 have `added` to them.
double stored(KvType type, const uint8_t* elements, size_t index, const uint8_t* scale_at, int added) {
    if (type == KvType::kF16) {
        uint16_t half;
        std::memcpy(&half, elements + index * 2, 2);
        return half_value(half);
    }
    float x;
    std::memcpy(&x, type == KvType::kF32 ? elements + index * 4 : scale_at, 4);
    if (type == KvType::kF32) return x;
    if (type == KvType::kInt8) return static_cast<double>(x) * static_cast<int8_t>(elements[index] - added);
    int16_t code;
    std::memcpy(&code, elements + index * 2, 2);
    return static_cast<double>(x) * code;
}

// A query as it enters the products: with a cache in integers rounded to codes, of 8 bits, or of up to 16
// that together are at most 261,000.
std::vector<double> rounded_query(KvType type, const float* query, int n) {
    std::vector<double> result(query, query + n);
    if (!in_integers(type)) return result;
    float largest = 0, together = 0;
    for (int d = 0; d < n; ++d) {
        largest = std::max(largest, std::fabs(query[d]));
        together += std::fabs(query[d]);
    }
    const float scale =
        type == KvType::kInt8 ? largest / 127.0f : std::max(largest / 32767.0f, together / 261000.0f);
    const float inverse = 1.0f / scale;
    for (int d = 0; d < n; ++d) result[d] = static_cast<double>(scale) * std::nearbyint(query[d] * inverse);
    return result;
}

Cache filled(const Kernels& kernels, Random& random, const Setting& setting) {
    Cache cache;
    const KvShape& shape = cache.shape = {kHeads, setting.head_dim, setting.type};
    const int pages = (kLength + kPageTokens - 1) / kPageTokens + 2;
    cache.pages.resize(shape.page_bytes() * pages);
    // What earlier sequences left: finite, as everything that was stored.
    for (int page = 0; page < pages; ++page) {
        for (int slot = 0; slot < kPageTokens; ++slot) {
            const std::vector<float> junk = random.uniforms(setting.head_dim, 50.0f);
            for (int head = 0; head < kHeads; ++head) {
                kernels.store_kv(shape,
                                 cache.pages.data() + page * shape.page_bytes() + head * shape.head_bytes(),
                                 slot, junk.data(), junk.data());
            }
        }
    }
    for (int page : shuffled(random, pages)) cache.table.push_back(page);
    for (int head = 0; head < kHeads; ++head) {
        for (int t = 0; t < kLength; ++t) {
            const std::vector<float> key = random.uniforms(setting.head_dim);
            const std::vector<float> value = random.uniforms(setting.head_dim, t % 50 == 0 ? 10.0f : 1.0f);
            uint8_t* page = cache.page(t, head);
            const int slot = t % kPageTokens;
            kernels.store_kv(shape, page, slot, key.data(), value.data());
            const uint8_t* values = page + shape.key_bytes();
            const uint8_t* scales = values + shape.value_bytes();
            const auto near = [&](double found, float expected, const uint8_t* scale_at) {
                float scale = 0;
                if (in_integers(setting.type)) std::memcpy(&scale, scale_at, 4);
                const double tolerance = setting.type == KvType::kF32 ? 0
                                         : setting.type == KvType::kF16
                                             ? std::fabs(expected) * 0x1p-11 + 0x1p-25
                                             : scale * 0.502;
                check(std::fabs(found - expected) <= tolerance, "what is stored is what came, rounded");
                return found;
            };
            for (int d = 0; d < setting.head_dim; ++d) {
                const uint8_t* key_scale = scales + slot * 4;
                const uint8_t* value_scale = scales + (kPageTokens + slot) * 4;
                const bool integers = in_integers(shape.type);
                const int together = integers ? 4 / shape.element_bytes() : 1;
                const int at = (d / together * kPageTokens + slot) * together + d % together;
                const int padded = shape.padded_dim();
                const int value_at = integers ? (slot / 2 * padded + d) * 2 + slot % 2 : slot * padded + d;
                cache.keys.push_back(
                    near(stored(shape.type, page, at, key_scale, shape.type == KvType::kInt8 ? 128 : 0),
                         key[d], key_scale));
                cache.values.push_back(
                    near(stored(shape.type, values, value_at, value_scale, 0), value[d], value_scale));
            }
        }
    }
    return cache;
}

class Attention {
  public:
    Attention(const Kernels& kernels, const Setting& setting, Cache& cache, std::vector<float> queries)
        : kernels_(kernels),
          s_(setting),
          cache_(cache),
          row_(static_cast<size_t>(setting.group) * setting.head_dim),
          queries_(std::move(queries)),
          scratch_(kernels.attention_scratch(setting.group, setting.head_dim)) {}

    size_t row() const { return row_; }

    // Queries [first, first + count) of a head, at most `chunk` at a time: [count][group][head_dim].
    std::vector<float> run(int head, int first, int count, int chunk) {
        std::vector<float> out(count * row_, NAN);
        chunk = std::min(chunk, std::max(1, kMostRows / s_.group));
        for (int at = 0; at < count; at += chunk) {
            AttentionTask task = queries(head, first + at, std::min(chunk, count - at));
            task.segment_begin = low(first + at) / kSegmentTokens;
            task.segment_end = (first + at + task.query_count - 1) / kSegmentTokens + 1;
            task.output = out.data() + at * row_;
            kernels_.attend(task, scratch_.data());
        }
        return out;
    }

    // Each query's segments apart, then merged.
    std::vector<float> merged(int head, int first, int count) {
        std::vector<float> out(count * row_, NAN);
        const int segments = (kLength + kSegmentTokens - 1) / kSegmentTokens,
                  padded = cache_.shape.padded_dim();
        std::vector<SoftmaxPart> parts(segments * s_.group);
        std::vector<float> values(static_cast<size_t>(segments) * s_.group * padded, NAN);
        for (int i = 0; i < count; ++i) {
            const int begin = low(first + i) / kSegmentTokens, end = (first + i) / kSegmentTokens + 1;
            for (int segment = end - 1; segment >= begin; --segment) {
                AttentionTask task = queries(head, first + i, 1);
                task.segment_begin = segment;
                task.segment_end = segment + 1;
                task.parts = parts.data();
                task.part_values = values.data();
                kernels_.attend(task, scratch_.data());
            }
            for (int row = 0; row < s_.group; ++row) {
                kernels_.merge_parts(parts.data(), values.data(), begin, end, s_.group, row, s_.head_dim,
                                     out.data() + i * row_ + row * s_.head_dim);
            }
        }
        return out;
    }

    void check_values(int head, int first, int count, const std::vector<float>& found) const {
        // With a cache in integers the weights of the values, up to 10 here, are rounded to 15 bits at most.
        const double tolerance = in_integers(s_.type) ? 1e-3 : 2e-5;
        for (int i = 0; i < count; ++i) {
            for (int g = 0; g < s_.group; ++g) {
                const std::vector<double> expected = reference(head, first + i, g);
                for (int d = 0; d < s_.head_dim; ++d) {
                    check(std::fabs(found[i * row_ + g * s_.head_dim + d] - expected[d]) <= tolerance,
                          "a row is the softmax in double precision, within rounding");
                }
            }
        }
    }

  private:
    int low(int position) const { return s_.window > 0 ? std::max(0, position - s_.window + 1) : 0; }
    const float* query(int head, int position) const {
        return queries_.data() + (static_cast<size_t>(position) * kHeads + head) * row_;
    }

    AttentionTask queries(int head, int first, int count) const {
        AttentionTask task{};
        task.shape = cache_.shape;
        task.pages = cache_.pages.data();
        task.block_table = cache_.table.data();
        task.head = head;
        task.group = s_.group;
        task.queries = query(head, first);
        task.query_stride = kHeads * row_;
        task.query_count = count;
        task.first_position = first;
        task.window = s_.window;
        task.softcap = s_.softcap;
        task.output_stride = row_;
        return task;
    }

    std::vector<double> reference(int head, int position, int g) const {
        const std::vector<double> q =
            rounded_query(s_.type, query(head, position) + g * s_.head_dim, s_.head_dim);
        std::vector<double> out(s_.head_dim);
        double sum = 0;
        for (int t = low(position); t <= position; ++t) {
            const size_t at = (static_cast<size_t>(head) * kLength + t) * s_.head_dim;
            double score = 0;
            for (int d = 0; d < s_.head_dim; ++d) score += q[d] * cache_.keys[at + d];
            // Queries come times log2(e), but with a cap.
            const double weight =
                s_.softcap > 0 ? std::exp(s_.softcap * std::tanh(score / s_.softcap)) : std::exp2(score);
            sum += weight;
            for (int d = 0; d < s_.head_dim; ++d) out[d] += weight * cache_.values[at + d];
        }
        for (double& x : out) x /= sum;
        return out;
    }

    const Kernels& kernels_;
    const Setting& s_;
    Cache& cache_;
    const size_t row_;
    const std::vector<float> queries_;
    std::vector<uint8_t> scratch_;
};

// The largest sums that a cache in integers makes fit in 32 bits: elements that all have the largest code,
// and 256 tokens of the same weight.
void check_largest_sums(const Kernels& kernels, Random& random, KvType type, int head_dim) {
    current_case() = "attention, largest sums, cache type " + std::to_string(static_cast<int>(type)) +
                     ", head of " + std::to_string(head_dim);
    const Setting setting{type, head_dim, 1, 0, 0.0f};
    Cache cache = filled(kernels, random, setting);
    for (int t = 0; t < kSegmentTokens; ++t) {
        const bool wanted = t < kSegmentTokens / 2;
        const std::vector<float> key(head_dim, wanted ? 3.0f : -3.0f), value(head_dim, wanted ? 5.0f : -7.0f);
        for (int head = 0; head < kHeads; ++head) {
            kernels.store_kv(cache.shape, cache.page(t, head), t % kPageTokens, key.data(), value.data());
        }
    }
    // The scores of the first half are as high as they are low in the second; or all are zero.
    for (const auto& [query, expected] : {std::pair{2.0f, 5.0f}, {-2.0f, -7.0f}, {0.0f, -1.0f}}) {
        Attention attention(kernels, setting, cache,
                            std::vector<float>(static_cast<size_t>(kLength) * kHeads * head_dim, query));
        for (float x : attention.run(1, kSegmentTokens - 1, 1, 1)) {
            check(std::fabs(x - expected) < 1e-2, "sums do not overflow");
        }
    }
    const std::vector<float> same(head_dim, 5.0f);
    for (int t = 0; t < kSegmentTokens; ++t) {
        kernels.store_kv(cache.shape, cache.page(t, 1), t % kPageTokens, same.data(), same.data());
    }
    Attention attention(kernels, setting, cache,
                        std::vector<float>(static_cast<size_t>(kLength) * kHeads * head_dim, 1.0f));
    for (float x : attention.run(1, kSegmentTokens - 1, 1, 1)) {
        check(std::fabs(x - 5.0f) < 1e-2, "sums of values do not overflow");
    }
}

}  // namespace

void test_attention(const Kernels& kernels, Results& results) {
    Random random(3), others(4);
    for (int head_dim : {16, 64, 256, 512}) {
        for (KvType type : {KvType::kInt8, KvType::kInt16})
            check_largest_sums(kernels, others, type, head_dim);
    }
    for (const Setting& setting : kSettings) {
        const std::string name = "attention, cache type " + std::to_string(static_cast<int>(setting.type)) +
                                 ", head of " + std::to_string(setting.head_dim) + ", group of " +
                                 std::to_string(setting.group) + ", window " + std::to_string(setting.window);
        current_case() = name;
        Cache cache = filled(kernels, random, setting);
        Attention attention(
            kernels, setting, cache,
            random.uniforms(static_cast<size_t>(kLength) * kHeads * setting.group * setting.head_dim));
        for (const auto& [first, count] : kRanges) {
            for (int head = 0; head < kHeads; ++head) {
                current_case() = name + ", from " + std::to_string(first);
                const std::vector<float> whole = attention.run(head, first, count, count);
                attention.check_values(head, first, count, whole);
                for (int chunk : {1, 7, 16}) {
                    check(same_bits(attention.run(head, first, count, chunk).data(), whole.data(),
                                    whole.size()),
                          "any chunks give the same bits");
                }
                check(same_bits(attention.merged(head, first, count).data(), whole.data(), whole.size()),
                      "segments merged give the same bits");
                results.add(whole);
            }
        }
    }
}

}  // namespace kernel_test
