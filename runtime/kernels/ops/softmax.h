// Softmax of a row within a segment, and the merging of segments in ascending order. Included inside the
// namespace of an instruction set.

constexpr int kMaxHeadDim = 512;

inline float fma_scalar(float a, float b, float c) {
    alignas(64) float lanes[16];
    store(lanes, fma(set1(a), set1(b), set1(c)));
    return lanes[0];
}

// One row's softmax over pages [page_begin, page_end) of a segment; tokens outside [low, high] are 0. In
// place of page p's 16 exponentials e it leaves weight(p, e).
template <typename Weight>
inline void softmax_row(float* scores, int page_begin, int page_end, int low, int high, float* row_max,
                        float* row_sum, Weight weight) {
    const float kNone = -3.0e38f;
    for (int t = page_begin * kPageTokens; t < low; ++t) scores[t] = kNone;
    for (int t = high + 1; t < page_end * kPageTokens; ++t) scores[t] = kNone;
    F32 largest = set1(kNone);
    for (int p = page_begin; p < page_end; ++p) largest = max(largest, load(scores + p * kPageTokens));
    const float m = reduce_max(largest);
    F32 sum = zero();
    for (int p = page_begin; p < page_end; ++p) {
        const F32 e = exp2_negative(sub(load(scores + p * kPageTokens), set1(m)));
        store(scores + p * kPageTokens, weight(p, e));
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
