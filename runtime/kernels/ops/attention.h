// Paged attention over the 16 virtual lanes of an instruction set. Included inside its namespace.
//
// Scores of 16 tokens are one vector (a page), summed over the head's elements in ascending order. Softmax is
// per segment of 256 tokens from position 0: exact maximum, then the sum over pages in ascending order and
// the fixed tree over lanes; values are added token by token. Segments merge in ascending order. So a row's
// result depends on its position and on the stored keys and values, not on which rows or threads it was
// computed with.

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
