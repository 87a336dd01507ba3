// Paged attention over the 16 virtual lanes of an instruction set. Included inside its namespace.
//
// Scores of 16 tokens are one vector (a page), summed over the head's elements in ascending order. Softmax is
// per segment of 256 tokens from position 0: exact maximum, then the sum over pages in ascending order and
// the fixed tree over lanes; values are added token by token. Segments merge in ascending order. So a row's
// result depends on its position and on the stored keys and values, not on which rows or threads it was
// computed with.

// With a cache in integers both products are sums of integers: queries are rounded to codes a row, and the
// weights of the values (probability times the value's scale) to up to 15 bits a row and segment.

constexpr int kScratchRows = 192;
constexpr int kChunkPages = 4;
constexpr int kChunkTokens = kChunkPages * kPageTokens;

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

    // For a cache in integers.
    void* query_codes;      // [rows][head_dim rounded up to 4 bytes]
    float* query_scales;    // [rows]
    int32_t* query_starts;  // [rows]
    int16_t* weights;       // [rows][256]
    float* weight_scales;   // [rows]
    float* value_scales;    // [256] of the current segment
    int32_t* sums;          // [rows][padded_dim] of the current segment
    uint8_t* pairs;         // [32][padded_dim] a chunk of values, two tokens of 16 bits

    AttentionScratch(uint8_t* memory, int group, int head_dim) : at_(memory), begin_(memory) {
        const size_t rows = std::max(kScratchRows, group), padded = round_up(head_dim, 16);
        take(scores, rows * kSegmentTokens);
        take(values, rows * padded);
        take(total, rows * padded);
        take(keys, padded * kChunkTokens);
        take(chunk, padded * kChunkTokens);
        for (float** of_rows : {&row_max, &row_sum, &total_max, &total_sum, &weight_scales, &query_scales}) {
            take(*of_rows, rows);
        }
        take(query, rows);
        int16_t* codes;
        take(codes, rows * round_up(head_dim, 4));
        query_codes = codes;
        take(query_starts, rows);
        take(weights, rows * kSegmentTokens);
        take(value_scales, kSegmentTokens);
        take(sums, rows * padded);
        take(pairs, padded * kChunkTokens / 2 * 4);
    }

    size_t bytes() const { return at_ - begin_; }

  private:
    template <typename T>
    void take(T*& array, size_t count) {
        array = reinterpret_cast<T*>(at_);
        at_ += (count * sizeof(T) + 63) / 64 * 64;
    }

    uint8_t *at_, *begin_;
};

inline size_t attention_scratch(int group, int head_dim) {
    return AttentionScratch(nullptr, group, head_dim).bytes();
}

// Asks for memory that is needed soon, some lines in each round of a product: asked for all at once, lines
// beyond those that a core can wait for hold up what it computes. Goes on with the last part when all are
// through.
class Ahead {
  public:
    void add(const uint8_t* part, int bytes) {
        parts_[count_++] = part;
        bytes_ = bytes;
    }
    template <int kLines>
    void lines() {
#pragma GCC unroll 4
        for (int i = 0; i < kLines; ++i) {
            prefetch_far(parts_[index_] + at_);
            at_ += 64;
            if (at_ >= bytes_) {
                at_ = 0;
                index_ += index_ + 1 < count_;
            }
        }
    }

  private:
    static constexpr uint8_t kNothing[64] = {};
    const uint8_t* parts_[kChunkPages] = {kNothing};
    int count_ = 0, bytes_ = 0, index_ = 0, at_ = 0;
};

// The pages of one segment that a task's rows see.
struct SegmentView {
    int base;                  // position of its first token
    int page_begin, page_end;  // pages within the segment
    int tokens;                // from the first one to the last one seen

    int first_page() const { return base / kPageTokens; }
};

template <KvType kType>
class AttentionRun {
  public:
    AttentionRun(const AttentionTask& task, uint8_t* scratch)
        : task_(task),
          s_(scratch, task.group, task.shape.head_dim),
          layout_(task.shape),
          page_bytes_(task.shape.page_bytes()),
          head_pages_(task.pages + static_cast<size_t>(task.head) * task.shape.head_bytes()),
          head_dim_(task.shape.head_dim),
          padded_(task.shape.padded_dim()),
          rows_(task.query_count * task.group),
          // Few rows read pages as they are; many share a chunk converted once.
          direct_(rows_ <= 2 * kRowBlock) {}

    void run() {
        for (int r = 0; r < rows_; ++r) {
            s_.query[r] = task_.queries + token_of(r) * task_.query_stride + r % task_.group * head_dim_;
            if constexpr (kIntegers) quantize_query(s_.query[r], head_dim_, queries(), r);
            s_.total_sum[r] = 0.0f;
        }
        for (int segment = task_.segment_begin; segment < task_.segment_end; ++segment) {
            const SegmentView view = view_of(segment);
            for (int p = view.page_begin; p < view.page_end; p += kChunkPages) scores(view, p);
            if constexpr (kIntegers) {
                for (int p = view.page_begin; p < view.page_end; ++p)
                    store(s_.value_scales + p * kPageTokens, page(view, p).value_scales());
            }
            for (int r = 0; r < rows_; ++r) softmax(view, r);
            for (int p = view.page_begin; p < view.page_end; p += kChunkPages) values(view, p);
            for (int r = 0; r < rows_; ++r) finish(segment, r);
        }
        if (task_.parts == nullptr) write();
    }

  private:
    static constexpr bool kIntegers = in_integers(kType);

    auto queries() const {
        using Code = typename Codes<kType>::Code;
        return IntegerQueries<kType>{static_cast<Code*>(s_.query_codes), task_.shape.key_elements(),
                                     s_.query_scales, s_.query_starts};
    }

    size_t sequence_of(int r) const {
        return task_.members != nullptr ? task_.members[r / task_.group] : task_.sequence;
    }
    size_t token_of(int r) const {
        return task_.members != nullptr ? task_.cu_seqlens[sequence_of(r)]
                                        : task_.first_token + r / task_.group;
    }
    int low_of(int position) const { return task_.window > 0 ? std::max(0, position - task_.window + 1) : 0; }

    SegmentView view_of(int segment) const {
        const int base = segment * kSegmentTokens, last = task_.first_position + task_.query_count - 1;
        const int low = std::max(low_of(task_.first_position), base) - base;
        const int high = std::min(last - base, kSegmentTokens - 1);
        return {base, low / kPageTokens, high / kPageTokens + 1, high + 1};
    }

    Page<kType> page(const SegmentView& view, int index) const {
        return {head_pages_ + task_.block_table[view.first_page() + index] * page_bytes_, layout_};
    }

    // Rows whose last token lies before page p see nothing of it.
    int rows_before(const SegmentView& view, int p) const {
        const int first_query = std::max(0, view.base + p * kPageTokens - task_.first_position);
        return std::min(first_query, task_.query_count) * task_.group;
    }

    // A few rows wait for memory more than they compute. What comes after the keys of the chunk at p: those
    // of the next one, or the segment's first values.
    Ahead after_keys(const SegmentView& view, int p) const {
        return p + kChunkPages < view.page_end ? keys_ahead(view, p + kChunkPages)
                                               : values_ahead(view, view.page_begin);
    }
    // After the values of the chunk at p: those of the next one, or the next segment's first keys.
    Ahead after_values(const SegmentView& view, int p) const {
        if (p + kChunkPages < view.page_end) return values_ahead(view, p + kChunkPages);
        const int segment = view.base / kSegmentTokens + 1;
        if (segment == task_.segment_end) return {};
        const SegmentView next = view_of(segment);
        return keys_ahead(next, next.page_begin);
    }
    Ahead keys_ahead(const SegmentView& view, int p) const {
        Ahead ahead;
        for (int i = p; i < std::min(p + kChunkPages, view.page_end); ++i)
            ahead.add(page(view, i).base, task_.shape.key_bytes());
        return ahead;
    }
    Ahead values_ahead(const SegmentView& view, int p) const {
        Ahead ahead;
        for (int i = p; i < std::min(p + kChunkPages, view.page_end); ++i)
            ahead.add(page(view, i).base + layout_.values, task_.shape.value_bytes());
        return ahead;
    }

    // Scores of a chunk of pages from p.
    void scores(const SegmentView& view, int p) {
        const int pages = std::min(kChunkPages, view.page_end - p);
        const int skipped = direct_ ? 0 : rows_before(view, p);
        if constexpr (!kIntegers) {
            if (!direct_) {
                for (int i = 0; i < pages; ++i) {
                    const Page<kType> from = page(view, p + i);
                    for (int d = 0; d < head_dim_; ++d)
                        store(s_.keys + d * kChunkTokens + i * kPageTokens, from.keys(d));
                }
            }
        }
        if (pages == kChunkPages) {
            scores_of<kChunkPages>(view, p, 0, skipped);
        } else {
            for (int i = 0; i < pages; ++i) scores_of<1>(view, p, i, skipped);
        }
    }

    // Of kPages pages, from the i-th of the chunk at p on.
    template <int kPages>
    void scores_of(const SegmentView& view, int p, int i, int skipped) {
        const uint8_t* bases[kPages];
        for (int j = 0; j < kPages; ++j) bases[j] = page(view, p + i + j).base;
        const auto of = [&](int j) { return Page<kType>{bases[j], layout_}; };
        float* out = s_.scores + skipped * kSegmentTokens + (p + i) * kPageTokens;
        const auto scores = [&](auto key, auto round) {
            if constexpr (kIntegers) {
                integer_scores<kPages>(
                    key, [&](int j) { return of(j).key_scales(); }, queries().from(skipped), rows_ - skipped,
                    out, round);
            } else {
                float_scores<kPages>(key, s_.query + skipped, rows_ - skipped, head_dim_, out, round);
            }
        };
        const auto stored = [&](int j, int d) { return of(j).keys(d); };
        if (direct_) {
            Ahead ahead = after_keys(view, p);
            scores(stored, [&] { ahead.template lines<kType == KvType::kF16 ? 2 : 4>(); });
        } else if constexpr (kIntegers) {
            scores(stored, [] {});
        } else {
            scores([&](int j, int d) { return load(s_.keys + d * kChunkTokens + (i + j) * kPageTokens); },
                   [] {});
        }
    }

    // A row's scores become the weights of its values, with an int8 cache times their scales; those that it
    // does not see have none.
    void softmax(const SegmentView& view, int r) {
        const int position = task_.first_position + r / task_.group;
        const int low = std::max(low_of(position), view.base) - view.base;
        const int high = std::min(position - view.base, kSegmentTokens - 1);
        float* scores = s_.scores + r * kSegmentTokens;
        int begin = view.page_end, end = view.page_end;
        [[maybe_unused]] F32 largest = zero(), together = zero();
        s_.row_sum[r] = 0.0f;
        if (low <= high) {
            begin = low / kPageTokens;
            end = high / kPageTokens + 1;
            if (task_.softcap > 0.0f) {
                for (int p = begin; p < end; ++p) {
                    float* at = scores + p * kPageTokens;
                    const F32 capped = tanh(mul(load(at), set1(1.0f / task_.softcap)));
                    store(at, mul(set1(task_.softcap * kLog2E), capped));
                }
            }
            softmax_row(scores, begin, end, low, high, s_.row_max + r, s_.row_sum + r, [&](int p, F32 e) {
                if constexpr (kIntegers) {
                    const F32 weight = mul(e, load(s_.value_scales + p * kPageTokens));
                    largest = max(largest, weight);
                    if constexpr (kType == KvType::kInt16) together = add(together, weight);
                    return weight;
                } else {
                    return e;
                }
            });
        }
        if constexpr (kIntegers) {
            const float most = reduce_max(largest);
            round_weights(view, r, begin, end,
                          kType == KvType::kInt8 ? most / 32767.0f
                                                 : scale_of_codes(most, reduce_add(together), 32767.0f));
        } else {
            clear(scores, view, begin, end);
        }
    }

    // Zeros for the pages that other rows see.
    template <typename T>
    static void clear(T* row, const SegmentView& view, int begin, int end) {
        std::fill(row + view.page_begin * kPageTokens, row + begin * kPageTokens, T{});
        std::fill(row + end * kPageTokens, row + view.page_end * kPageTokens, T{});
    }

    // Rounds a row's weights over `scale`, which makes them 15 bits at most.
    void round_weights(const SegmentView& view, int r, int begin, int end, float scale) {
        const float* scores = s_.scores + r * kSegmentTokens;
        int16_t* weights = s_.weights + r * kSegmentTokens;
        s_.weight_scales[r] = scale > 3e-35f ? scale : 0.0f;
        const F32 inverse = set1(scale > 3e-35f ? 1.0f / scale : 0.0f);
        for (int p = begin; p < end; ++p) {
            store_s16(weights + p * kPageTokens, round_to_int(mul(load(scores + p * kPageTokens), inverse)));
        }
        clear(weights, view, begin, end);
    }

    // Adds the values of a chunk of pages from p.
    void values(const SegmentView& view, int p) {
        const int pages = std::min(kChunkPages, view.page_end - p);
        const int tokens = std::min(pages * kPageTokens, view.tokens - p * kPageTokens);
        const bool first = p == view.page_begin;
        if (direct_) {
            Ahead ahead = after_values(view, p);
            const auto round = [&] {
                ahead.template lines<kType == KvType::kF32 || kType == KvType::kInt16 ? 4 : 2>();
            };
            for (int i = 0; i * kPageTokens < tokens; ++i) {
                const Page<kType> from = page(view, p + i);
                values_of([&](int t, int element) { return from.values(t, element); }, (p + i) * kPageTokens,
                          std::min(kPageTokens, tokens - i * kPageTokens), 0, first && i == 0, round);
            }
            return;
        }
        const int steps = kIntegers ? kPageTokens / 2 : kPageTokens;
        for (int i = 0; i < pages; ++i) {
            const Page<kType> from = page(view, p + i);
            for (int t = 0; t < steps; ++t) {
                for (int e = 0; e < padded_; e += 16) put(i * steps + t, e, from.values(t, e));
            }
        }
        const int skipped = first ? 0 : rows_before(view, p);
        values_of([&](int t, int element) { return get(t, element); }, p * kPageTokens, tokens, skipped,
                  first, [] {});
    }

    // `tokens` tokens from the `begin`-th of the segment, for rows from `skipped` on.
    template <typename Value, typename Round>
    void values_of(Value value, int begin, int tokens, int skipped, bool first, Round round) {
        const size_t weights = static_cast<size_t>(skipped) * kSegmentTokens + begin;
        const size_t to = static_cast<size_t>(skipped) * padded_;
        if constexpr (kIntegers) {
            integer_values(value, s_.weights + weights, rows_ - skipped, (tokens + 1) / 2, s_.sums + to,
                           padded_, first, round);
        } else {
            float_values(value, s_.scores + weights, rows_ - skipped, tokens, s_.values + to, padded_, first,
                         round);
        }
    }

    // A chunk of values, as the products take them.
    auto get(int step, int element) const {
        if constexpr (kIntegers) {
            return load_bytes(s_.pairs + (static_cast<size_t>(step) * padded_ + element) * 4);
        } else {
            return load(s_.chunk + static_cast<size_t>(step) * padded_ + element);
        }
    }
    template <typename Vector>
    void put(int step, int element, Vector vector) {
        if constexpr (kIntegers) {
            store_bytes(s_.pairs + (static_cast<size_t>(step) * padded_ + element) * 4, vector);
        } else {
            store(s_.chunk + static_cast<size_t>(step) * padded_ + element, vector);
        }
    }

    // Leaves a row's part of the segment where it is merged later, or merges it.
    void finish(int segment, int r) {
        float* values = s_.values + r * padded_;
        if constexpr (kIntegers) {
            const F32 scale = set1(s_.weight_scales[r]);
            for (int e = 0; e < padded_; e += 16)
                store(values + e, mul(to_float(load_int(s_.sums + r * padded_ + e)), scale));
        }
        const size_t bytes = padded_ * sizeof(float);
        if (task_.parts != nullptr) {
            const size_t part = sequence_of(r) * task_.parts_of_sequence +
                                static_cast<size_t>(segment) * task_.group + r % task_.group;
            task_.parts[part] = {s_.row_sum[r] > 0.0f ? s_.row_max[r] : 0.0f, s_.row_sum[r]};
            std::memcpy(task_.part_values + part * padded_, values, bytes);
            return;
        }
        if (s_.row_sum[r] == 0.0f) return;
        float* total = s_.total + r * padded_;
        if (s_.total_sum[r] == 0.0f) {
            std::memcpy(total, values, bytes);
            s_.total_max[r] = s_.row_max[r];
            s_.total_sum[r] = s_.row_sum[r];
        } else {
            merge_row(s_.total_max + r, s_.total_sum + r, total, s_.row_max[r], s_.row_sum[r], values,
                      padded_);
        }
    }

    void write() const {
        for (int r = 0; r < rows_; ++r) {
            float* total = s_.total + r * padded_;
            const F32 inverse = set1(1.0f / s_.total_sum[r]);
            for (int e = 0; e < padded_; e += 16) store(total + e, mul(load(total + e), inverse));
            float* out = task_.output + token_of(r) * task_.output_stride + r % task_.group * head_dim_;
            std::memcpy(out, total, head_dim_ * sizeof(float));
        }
    }

    const AttentionTask& task_;
    AttentionScratch s_;
    const PageLayout layout_;
    const size_t page_bytes_;
    const uint8_t* const head_pages_;
    const int head_dim_, padded_, rows_;
    const bool direct_;
};

void attend(const AttentionTask& task, uint8_t* scratch) {
    switch (task.shape.type) {
        case KvType::kF32:
            return AttentionRun<KvType::kF32>(task, scratch).run();
        case KvType::kF16:
            return AttentionRun<KvType::kF16>(task, scratch).run();
        case KvType::kInt8:
            return AttentionRun<KvType::kInt8>(task, scratch).run();
        case KvType::kInt16:
            return AttentionRun<KvType::kInt16>(task, scratch).run();
    }
}
