// Scores of query rows against keys, and weighted sums of values: one accumulator an element, keys' elements
// and tokens in ascending order. Included inside the namespace of an instruction set.

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
