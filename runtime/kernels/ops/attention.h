// Paged attention over the 16 virtual lanes of an instruction set. Included inside its namespace.
//
// Scores of 16 tokens are one vector (a page), summed over the head's elements in ascending order. Softmax is
// per segment of 256 tokens from position 0: exact maximum, then the sum over pages in ascending order and
// the fixed tree over lanes; values are added token by token. Segments merge in ascending order. So a row's
// result depends on its position and on the stored keys and values, not on which rows or threads it was
// computed with.

constexpr int kSegmentPages = kSegmentTokens / kPageTokens;
constexpr int kMaxHeadDim = 512;

inline float fma_scalar(float a, float b, float c) {
    alignas(64) float lanes[16];
    store(lanes, fma(set1(a), set1(b), set1(c)));
    return lanes[0];
}

// Reading and writing a page of one KV head.
template <KvType kType>
struct Page {
    const uint8_t* base;
    const KvShape& shape;

    F32 vector(const uint8_t* p, size_t index) const {
        if constexpr (kType == KvType::kF32) return load(reinterpret_cast<const float*>(p) + index);
        if constexpr (kType == KvType::kF16) return load_f16(reinterpret_cast<const uint16_t*>(p) + index);
        if constexpr (kType == KvType::kInt8)
            return to_float(load_s8(reinterpret_cast<const int8_t*>(p) + index));
    }
    // Element d of the 16 keys; int8 without their scales.
    F32 keys(int d) const { return vector(base, static_cast<size_t>(d) * kPageTokens); }
    // 16 elements of one value; int8 without its scale.
    F32 values(int token, int element) const {
        return vector(base + shape.key_bytes(), static_cast<size_t>(token) * shape.padded_dim() + element);
    }
    const float* key_scales() const {
        return reinterpret_cast<const float*>(base + shape.key_bytes() + shape.value_bytes());
    }
    const float* value_scales() const { return key_scales() + kPageTokens; }
};

// Stored values are finite whatever comes in, so that a stale page can never poison a masked row.
inline float finite(float x, float limit) {
    const float low = x > -limit ? x : -limit;
    return low < limit ? low : limit;
}

// The same for 16 elements, of which `count` exist; the rest are 0.
inline F32 finite16(const float* x, int count, float limit) {
    alignas(64) float lanes[16] = {};
    if (count < 16) x = static_cast<const float*>(std::memcpy(lanes, x, count * sizeof(float)));
    const F32 high = set1(limit), low = set1(-limit), v = load(x);
    const F32 raised = select_less(low, v, v, low);
    return select_less(raised, high, raised, high);
}

inline float int8_scale(const float* row, int n) {
    float largest = 0.0f;
    for (int d = 0; d < n; ++d) {
        const float magnitude = std::fabs(finite(row[d], 3.0e38f));
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest > 1e-30f ? largest / 127.0f : 0.0f;
}

inline int8_t int8_element(float x, float inverse) {
    return static_cast<int8_t>(std::nearbyint(finite(x * inverse, 127.0f)));
}

void store_kv(const KvShape& shape, uint8_t* page, int slot, const float* key, const float* value) {
    const int n = shape.head_dim, padded = shape.padded_dim();
    uint8_t* values = page + shape.key_bytes();
    if (shape.type == KvType::kF32) {
        float* k = reinterpret_cast<float*>(page);
        float* v = reinterpret_cast<float*>(values) + static_cast<size_t>(slot) * padded;
        for (int d = 0; d < n; ++d) k[d * kPageTokens + slot] = finite(key[d], 3.0e38f);
        for (int d = 0; d < n; ++d) v[d] = finite(value[d], 3.0e38f);
    } else if (shape.type == KvType::kF16) {
        uint16_t* k = reinterpret_cast<uint16_t*>(page);
        uint16_t* v = reinterpret_cast<uint16_t*>(values) + static_cast<size_t>(slot) * padded;
        alignas(64) uint16_t halves[16];
        for (int begin = 0; begin < padded; begin += 16) {
            const int count = std::min(16, n - begin);
            store_f16(halves, finite16(key + begin, count, 65504.0f));
            for (int d = 0; d < count; ++d) k[(begin + d) * kPageTokens + slot] = halves[d];
            store_f16(v + begin, finite16(value + begin, count, 65504.0f));
        }
    } else {
        int8_t* k = reinterpret_cast<int8_t*>(page);
        int8_t* v = reinterpret_cast<int8_t*>(values) + static_cast<size_t>(slot) * padded;
        float* scales = reinterpret_cast<float*>(values + shape.value_bytes());
        const float ks = int8_scale(key, n), vs = int8_scale(value, n);
        scales[slot] = ks;
        scales[kPageTokens + slot] = vs;
        const float ki = ks > 0.0f ? 1.0f / ks : 0.0f, vi = vs > 0.0f ? 1.0f / vs : 0.0f;
        for (int d = 0; d < n; ++d) k[d * kPageTokens + slot] = int8_element(key[d], ki);
        for (int d = 0; d < n; ++d) v[d] = int8_element(value[d], vi);
    }
}

// Scratch of one thread, for up to `rows` rows (queries times heads of a group).
struct AttentionScratch {
    float* scores;        // [rows][256]
    float* values;        // [rows][padded_dim] of the current segment
    float* total;         // [rows][padded_dim] merged
    float* keys;          // [head_dim][64] a chunk of keys in float32
    float* chunk;         // [64][padded_dim] a chunk of values in float32
    float* row_max;       // [rows]
    float* row_sum;       // [rows]
    float* total_max;     // [rows]
    float* total_sum;     // [rows]
    const float** query;  // [rows]
};

constexpr int kScratchRows = 192;
constexpr int kChunkPages = 4;
constexpr int kChunkTokens = kChunkPages * kPageTokens;

inline size_t attention_scratch(int group, int head_dim) {
    const size_t rows = std::max(kScratchRows, group), padded = round_up(head_dim, 16);
    return sizeof(float) * (rows * (kSegmentTokens + 2 * padded + 4) + 2 * padded * kChunkTokens) +
           rows * sizeof(float*) + 1024;
}

inline AttentionScratch carve(uint8_t* p, int group, int head_dim) {
    const size_t rows = std::max(kScratchRows, group), padded = round_up(head_dim, 16);
    AttentionScratch s;
    float* at = reinterpret_cast<float*>(p);
    const auto take = [&](size_t count) {
        float* result = at;
        at += (count + 15) / 16 * 16;
        return result;
    };
    s.scores = take(rows * kSegmentTokens);
    s.values = take(rows * padded);
    s.total = take(rows * padded);
    s.keys = take(padded * kChunkTokens);
    s.chunk = take(padded * kChunkTokens);
    s.row_max = take(rows);
    s.row_sum = take(rows);
    s.total_max = take(rows);
    s.total_sum = take(rows);
    s.query = reinterpret_cast<const float**>(at);
    return s;
}

// Scores of kRows rows against kPages pages; `key(page, d)` gives a vector.
template <int kRows, int kPages, typename Key>
inline void scores_block(Key key, const float* const* query, int head_dim, float* scores) {
    F32 acc[kRows][kPages];
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPages; ++p) acc[r][p] = zero();
    }
    for (int d = 0; d < head_dim; ++d) {
        F32 k[kPages];
#pragma GCC unroll 4
        for (int p = 0; p < kPages; ++p) k[p] = key(p, d);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const F32 q = set1(query[r][d]);
#pragma GCC unroll 4
            for (int p = 0; p < kPages; ++p) acc[r][p] = fma(k[p], q, acc[r][p]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int p = 0; p < kPages; ++p) store(scores + r * kSegmentTokens + p * kPageTokens, acc[r][p]);
    }
}

// values[row] += score[row][token] * value[token], for kRows rows and kVectors vectors, tokens ascending.
template <int kRows, int kVectors, typename Value>
inline void values_block(Value value, const float* scores, int tokens, float* out, size_t stride,
                         bool first) {
    F32 acc[kRows][kVectors];
    for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kVectors; ++i) acc[r][i] = first ? zero() : load(out + r * stride + i * 16);
    }
    for (int t = 0; t < tokens; ++t) {
        F32 v[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) v[i] = value(t, i);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const F32 p = set1(scores[r * kSegmentTokens + t]);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) acc[r][i] = fma(v[i], p, acc[r][i]);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        for (int i = 0; i < kVectors; ++i) store(out + r * stride + i * 16, acc[r][i]);
    }
}

template <int kPages, typename Key>
inline void scores_rows(Key key, const float* const* query, int rows, int head_dim, float* scores) {
    int r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) {
        scores_block<kRowBlock, kPages>(key, query + r, head_dim, scores + r * kSegmentTokens);
    }
    for (; r + 3 <= rows; r += 3)
        scores_block<3, kPages>(key, query + r, head_dim, scores + r * kSegmentTokens);
    for (; r < rows; ++r) scores_block<1, kPages>(key, query + r, head_dim, scores + r * kSegmentTokens);
}

template <int kVectors, typename Value>
inline void values_rows(Value value, const float* scores, int rows, int tokens, float* out, size_t stride,
                        bool first) {
    int r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) {
        values_block<kRowBlock, kVectors>(value, scores + r * kSegmentTokens, tokens, out + r * stride,
                                          stride, first);
    }
    for (; r + 3 <= rows; r += 3) {
        values_block<3, kVectors>(value, scores + r * kSegmentTokens, tokens, out + r * stride, stride,
                                  first);
    }
    for (; r < rows; ++r) {
        values_block<1, kVectors>(value, scores + r * kSegmentTokens, tokens, out + r * stride, stride,
                                  first);
    }
}

template <typename Value>
inline void values_all(Value value, const float* scores, int rows, int tokens, float* out, int padded,
                       bool first) {
    int element = 0;
    for (; element + 64 <= padded; element += 64) {
        values_rows<4>([&](int t, int i) { return value(t, element + i * 16); }, scores, rows, tokens,
                       out + element, padded, first);
    }
    for (; element < padded; element += 16) {
        values_rows<1>([&](int t, int) { return value(t, element); }, scores, rows, tokens, out + element,
                       padded, first);
    }
}

// One row's softmax over pages [page_begin, page_end) of a segment, in place; tokens outside [low, high] are
// 0.
inline void softmax_row(float* scores, int page_begin, int page_end, int low, int high, float* row_max,
                        float* row_sum) {
    const float kNone = -3.0e38f;
    for (int t = page_begin * kPageTokens; t < low; ++t) scores[t] = kNone;
    for (int t = high + 1; t < page_end * kPageTokens; ++t) scores[t] = kNone;
    F32 largest = set1(kNone);
    for (int p = page_begin; p < page_end; ++p) largest = max(largest, load(scores + p * kPageTokens));
    const float m = reduce_max(largest);
    F32 sum = zero();
    for (int p = page_begin; p < page_end; ++p) {
        const F32 e = exp2_negative(sub(load(scores + p * kPageTokens), set1(m)));
        store(scores + p * kPageTokens, e);
        sum = add(sum, e);
    }
    *row_max = m;
    *row_sum = reduce_add(sum);
}

inline void merge_row(float* max_a, float* sum_a, float* values_a, float max_b, float sum_b,
                      const float* values_b, int padded) {
    const float m = *max_a > max_b ? *max_a : max_b;
    alignas(64) float exponents[16] = {*max_a - m, max_b - m};
    store(exponents, exp2_negative(load(exponents)));
    const float a = exponents[0], b = exponents[1];
    for (int i = 0; i < padded; i += 16) {
        store(values_a + i, fma(load(values_b + i), set1(b), mul(load(values_a + i), set1(a))));
    }
    *sum_a = fma_scalar(sum_b, b, *sum_a * a);
    *max_a = m;
}

template <KvType kType>
void attend_of(const AttentionTask& task, uint8_t* scratch_bytes) {
    const KvShape& shape = task.shape;
    const int head_dim = shape.head_dim, padded = shape.padded_dim(), group = task.group;
    const int rows = task.query_count * group;
    AttentionScratch s = carve(scratch_bytes, group, head_dim);
    for (int i = 0; i < task.query_count; ++i) {
        for (int g = 0; g < group; ++g)
            s.query[i * group + g] = task.queries + i * task.query_stride + g * head_dim;
    }
    const auto page_at = [&](int page) {
        return Page<kType>{task.pages + task.block_table[page] * shape.page_bytes() +
                               static_cast<size_t>(task.head) * shape.head_bytes(),
                           shape};
    };
    const int last = task.first_position + task.query_count - 1;
    const auto low_of = [&](int position) {
        return task.window > 0 ? std::max(0, position - task.window + 1) : 0;
    };
    // Few rows read pages as they are; many share a chunk converted once.
    const bool direct = rows <= 2 * kRowBlock;
    bool merged_any = false;
    for (int segment = task.segment_begin; segment < task.segment_end; ++segment) {
        const int base = segment * kSegmentTokens;
        const int seen_low = std::max(low_of(task.first_position), base);
        const int seen_high = std::min(last, base + kSegmentTokens - 1);
        const int page_begin = (seen_low - base) / kPageTokens,
                  page_end = (seen_high - base) / kPageTokens + 1;
        const int first_page = base / kPageTokens;

        for (int p = page_begin; p < page_end; p += kChunkPages) {
            const int pages = std::min(kChunkPages, page_end - p);
            float* scores = s.scores + p * kPageTokens;
            if (direct) {
                if (pages == kChunkPages) {
                    const Page<kType> page[kChunkPages] = {
                        page_at(first_page + p), page_at(first_page + p + 1), page_at(first_page + p + 2),
                        page_at(first_page + p + 3)};
                    scores_rows<kChunkPages>([&](int i, int d) { return page[i].keys(d); }, s.query, rows,
                                             head_dim, scores);
                } else {
                    for (int i = 0; i < pages; ++i) {
                        const Page<kType> page = page_at(first_page + p + i);
                        scores_rows<1>([&](int, int d) { return page.keys(d); }, s.query, rows, head_dim,
                                       scores + i * kPageTokens);
                    }
                }
            } else {
                for (int i = 0; i < pages; ++i) {
                    const Page<kType> page = page_at(first_page + p + i);
                    for (int d = 0; d < head_dim; ++d)
                        store(s.keys + d * kChunkTokens + i * kPageTokens, page.keys(d));
                }
                // Rows whose last token lies before this chunk have nothing in it.
                const int first_query = std::max(0, base + p * kPageTokens - task.first_position);
                const int skipped = std::min(first_query, task.query_count) * group;
                if (pages == kChunkPages) {
                    scores_rows<kChunkPages>(
                        [&](int i, int d) { return load(s.keys + d * kChunkTokens + i * kPageTokens); },
                        s.query + skipped, rows - skipped, head_dim, scores + skipped * kSegmentTokens);
                } else {
                    for (int i = 0; i < pages; ++i) {
                        scores_rows<1>(
                            [&](int, int d) { return load(s.keys + d * kChunkTokens + i * kPageTokens); },
                            s.query + skipped, rows - skipped, head_dim,
                            scores + skipped * kSegmentTokens + i * kPageTokens);
                    }
                }
            }
        }

        for (int r = 0; r < rows; ++r) {
            const int position = task.first_position + r / group;
            float* scores = s.scores + r * kSegmentTokens;
            const int low = std::max(low_of(position), base) - base;
            const int high = std::min(position, base + kSegmentTokens - 1) - base;
            s.row_sum[r] = 0.0f;
            if (low > high) {  // nothing of this segment is seen
                std::memset(scores + page_begin * kPageTokens, 0,
                            (page_end - page_begin) * kPageTokens * sizeof(float));
                continue;
            }
            const int begin = low / kPageTokens, end = high / kPageTokens + 1;
            for (int p = begin; p < end; ++p) {
                float* at = scores + p * kPageTokens;
                if constexpr (kType == KvType::kInt8) {
                    store(at, mul(load(at), load(page_at(first_page + p).key_scales())));
                }
                if (task.softcap > 0.0f) {
                    const F32 capped = tanh(mul(load(at), set1(1.0f / task.softcap)));
                    store(at, mul(set1(task.softcap * kLog2E), capped));
                }
            }
            softmax_row(scores, begin, end, low, high, s.row_max + r, s.row_sum + r);
            if constexpr (kType == KvType::kInt8) {
                for (int p = begin; p < end; ++p) {
                    float* at = scores + p * kPageTokens;
                    store(at, mul(load(at), load(page_at(first_page + p).value_scales())));
                }
            }
            std::memset(scores + page_begin * kPageTokens, 0,
                        (begin - page_begin) * kPageTokens * sizeof(float));
            std::memset(scores + end * kPageTokens, 0, (page_end - end) * kPageTokens * sizeof(float));
        }

        for (int p = page_begin; p < page_end; p += kChunkPages) {
            const int pages = std::min(kChunkPages, page_end - p);
            const int tokens = std::min(pages * kPageTokens, seen_high - base - p * kPageTokens + 1);
            const float* scores = s.scores + p * kPageTokens;
            const bool first = p == page_begin;
            if (direct) {
                for (int i = 0; i * kPageTokens < tokens; ++i) {
                    const Page<kType> page = page_at(first_page + p + i);
                    values_all([&](int t, int element) { return page.values(t, element); },
                               scores + i * kPageTokens, rows,
                               std::min(kPageTokens, tokens - i * kPageTokens), s.values, padded,
                               first && i == 0);
                }
            } else {
                for (int i = 0; i < pages; ++i) {
                    const Page<kType> page = page_at(first_page + p + i);
                    for (int t = 0; t < kPageTokens; ++t) {
                        for (int e = 0; e < padded; e += 16) {
                            store(s.chunk + (i * kPageTokens + t) * padded + e, page.values(t, e));
                        }
                    }
                }
                const int first_query = std::max(0, base + p * kPageTokens - task.first_position);
                const int skipped = first ? 0 : std::min(first_query, task.query_count) * group;
                values_all([&](int t, int element) { return load(s.chunk + t * padded + element); },
                           scores + skipped * kSegmentTokens, rows - skipped, tokens,
                           s.values + skipped * padded, padded, first);
            }
        }

        for (int r = 0; r < rows; ++r) {
            float* values = s.values + r * padded;
            if (task.parts != nullptr) {
                task.parts[segment * group + r] = {s.row_sum[r] > 0.0f ? s.row_max[r] : 0.0f, s.row_sum[r]};
                std::memcpy(task.part_values + (static_cast<size_t>(segment) * group + r) * padded, values,
                            padded * sizeof(float));
                continue;
            }
            float* total = s.total + r * padded;
            if (!merged_any) s.total_sum[r] = 0.0f;
            if (s.row_sum[r] == 0.0f) continue;
            if (s.total_sum[r] == 0.0f) {
                std::memcpy(total, values, padded * sizeof(float));
                s.total_max[r] = s.row_max[r];
                s.total_sum[r] = s.row_sum[r];
            } else {
                merge_row(s.total_max + r, s.total_sum + r, total, s.row_max[r], s.row_sum[r], values,
                          padded);
            }
        }
        merged_any = true;
    }
    if (task.parts != nullptr) return;
    for (int r = 0; r < rows; ++r) {
        float* total = s.total + r * padded;
        const F32 inverse = set1(1.0f / s.total_sum[r]);
        for (int e = 0; e < padded; e += 16) store(total + e, mul(load(total + e), inverse));
        float* out = task.output + r / group * task.output_stride + r % group * head_dim;
        std::memcpy(out, total, head_dim * sizeof(float));
    }
}

void attend(const AttentionTask& task, uint8_t* scratch) {
    switch (task.shape.type) {
        case KvType::kF32:
            return attend_of<KvType::kF32>(task, scratch);
        case KvType::kF16:
            return attend_of<KvType::kF16>(task, scratch);
        case KvType::kInt8:
            return attend_of<KvType::kInt8>(task, scratch);
    }
}

void merge_parts(const SoftmaxPart* parts, const float* values, int segment_begin, int segment_end, int group,
                 int row, int head_dim, float* out) {
    const int padded = round_up(head_dim, 16);
    alignas(64) float total[kMaxHeadDim];
    float total_max = 0.0f, total_sum = 0.0f;
    for (int segment = segment_begin; segment < segment_end; ++segment) {
        const SoftmaxPart part = parts[segment * group + row];
        const float* part_values = values + (static_cast<size_t>(segment) * group + row) * padded;
        if (part.sum == 0.0f) continue;
        if (total_sum == 0.0f) {
            std::memcpy(total, part_values, padded * sizeof(float));
            total_max = part.max;
            total_sum = part.sum;
        } else {
            merge_row(&total_max, &total_sum, total, part.max, part.sum, part_values, padded);
        }
    }
    const F32 inverse = set1(1.0f / total_sum);
    for (int e = 0; e < padded; e += 16) store(total + e, mul(load(total + e), inverse));
    std::memcpy(out, total, head_dim * sizeof(float));
}
