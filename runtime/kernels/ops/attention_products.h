// Scores of query rows against keys, and weighted sums of values: one accumulator an element, keys' elements
// and tokens in ascending order. Included inside the namespace of an instruction set.

// sums[r][i] = multiply(left(i, k), right(r, k), sums[r][i]) for k from 0 to count; `round` is called for
// each k.
template <int kRows, int kVectors, typename Sum, typename Left, typename Right, typename Multiply,
          typename Round>
inline void product_block(int count, Left left, Right right, Multiply multiply, Round& round,
                          Sum (&sums)[kRows][kVectors]) {
    // A copy, which compilers keep in registers.
    Sum own[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) own[r][i] = sums[r][i];
    }
    for (int k = 0; k < count; ++k) {
        round();
        decltype(left(0, 0)) vectors[kVectors];
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) vectors[i] = left(i, k);
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
            const auto factor = right(r, k);
#pragma GCC unroll 4
            for (int i = 0; i < kVectors; ++i) own[r][i] = multiply(vectors[i], factor, own[r][i]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int i = 0; i < kVectors; ++i) sums[r][i] = own[r][i];
    }
}

// Calls block(rows, first row) for blocks of kRowBlock rows, of 3 and of 1; `rows` is a compile-time
// constant.
template <typename Block>
inline void each_row_block(int rows, Block block) {
    int r = 0;
    for (; r + kRowBlock <= rows; r += kRowBlock) block(std::integral_constant<int, kRowBlock>(), r);
    for (; r + 3 <= rows; r += 3) block(std::integral_constant<int, 3>(), r);
    for (; r < rows; ++r) block(std::integral_constant<int, 1>(), r);
}

// Calls vectors(count, first element) for 4 vectors of elements at a time, and for 1.
template <typename Vectors>
inline void each_vectors(int padded_dim, Vectors vectors) {
    int element = 0;
    for (; element + 64 <= padded_dim; element += 64) vectors(std::integral_constant<int, 4>(), element);
    for (; element < padded_dim; element += 16) vectors(std::integral_constant<int, 1>(), element);
}

// Scores of rows against kPages pages, [rows][256 tokens]; `key(page, d)` gives a vector.
template <int kPages, typename Key, typename Round>
inline void float_scores(Key key, const float* const* query, int rows, int head_dim, float* scores,
                         Round round) {
    each_row_block(rows, [&](auto count, int first) {
        F32 sums[count()][kPages];
        for (auto& row : sums) std::fill(row, row + kPages, zero());
        product_block(
            head_dim, key, [&](int r, int d) { return set1(query[first + r][d]); },
            [](F32 k, F32 q, F32 sum) { return fma(k, q, sum); }, round, sums);
        for (int r = 0; r < count(); ++r) {
            float* out = scores + (first + r) * kSegmentTokens;
            for (int p = 0; p < kPages; ++p) store(out + p * kPageTokens, sums[r][p]);
        }
    });
}

// out[row] += score[row][token] * value[token]; where `first`, from zero.
template <typename Value, typename Round>
inline void float_values(Value value, const float* scores, int rows, int tokens, float* out, int padded_dim,
                         bool first, Round round) {
    each_vectors(padded_dim, [&](auto vectors, int element) {
        each_row_block(rows, [&](auto count, int row) {
            F32 sums[count()][vectors()];
            float* to = out + static_cast<size_t>(row) * padded_dim + element;
            for (int r = 0; r < count(); ++r) {
                for (int i = 0; i < vectors(); ++i)
                    sums[r][i] = first ? zero() : load(to + r * padded_dim + i * 16);
            }
            product_block(
                tokens, [&](int i, int t) { return value(t, element + i * 16); },
                [&](int r, int t) { return set1(scores[(row + r) * kSegmentTokens + t]); },
                [](F32 v, F32 p, F32 sum) { return fma(v, p, sum); }, round, sums);
            for (int r = 0; r < count(); ++r) {
                for (int i = 0; i < vectors(); ++i) store(to + r * padded_dim + i * 16, sums[r][i]);
            }
        });
    });
}

// The same in integers: queries are rounded to codes a row, so that scores are exact integers times two
// scales. `key(page, d)` gives the d-th 4 bytes of 16 keys, `key_scales(page)` their scales.
template <KvType kType>
struct IntegerQueries {
    using Code = typename Codes<kType>::Code;

    Code* codes;      // [rows][stride]
    int stride;       // of as many bytes as a key's codes
    float* scales;    // [rows]
    int32_t* starts;  // [rows] minus what keys have added, times the sum of the codes

    IntegerQueries from(int row) const { return {codes + row * stride, stride, scales + row, starts + row}; }
};

// Of which codes may not exceed `largest_code`, and their magnitudes together not kMostTogether: with the
// values' or keys' codes under 2^13 their sums then fit in 32 bits.
constexpr float kMostTogether = 261000.0f;

inline float scale_of_codes(float largest, float together, float largest_code) {
    return std::max(largest / largest_code, together / kMostTogether);
}

inline void store(int8_t* p, I32 codes) { store_s8(p, codes); }
inline void store(int16_t* p, I32 codes) { store_s16(p, codes); }

inline Bytes broadcast_codes(const int8_t* four) { return broadcast4(four); }
inline Bytes broadcast_codes(const int16_t* two) { return broadcast_pair(two); }

template <KvType kType>
inline void quantize_query(const float* row, int head_dim, const IntegerQueries<kType>& out, int index) {
    F32 largest = zero(), together = zero();
    for (int d = 0; d < head_dim; d += 16) {
        const F32 magnitudes = finite_or_infinite(abs(load_some(row + d, head_dim - d)));
        largest = max(largest, magnitudes);
        together = add(together, magnitudes);
    }
    const float magnitude = reduce_max(largest);
    float scale = 0.0f;
    if (magnitude > 1e-30f) {
        scale = kType == KvType::kInt8 ? magnitude / 127.0f
                                       : scale_of_codes(magnitude, reduce_add(together), 32767.0f);
    }
    if (scale == HUGE_VALF) scale = NAN;  // carried to every score
    const F32 inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    I32 sum = set1(0);
    auto* codes = out.codes + index * out.stride;
    for (int d = 0; d < head_dim; d += 16) {
        const F32 x = scale == scale ? load_some(row + d, head_dim - d) : zero();
        const I32 q = round_to_int(mul(x, inverse));
        sum = add(sum, q);
        if (d + 16 <= out.stride) {
            store(codes + d, q);
        } else {
            alignas(64) typename Codes<kType>::Code rest[16];
            store(rest, q);
            std::memcpy(codes + d, rest, (out.stride - d) * sizeof rest[0]);
        }
    }
    out.scales[index] = scale;
    out.starts[index] = -Codes<kType>::kKeyOffset * reduce_add(sum);
}

template <int kPages, KvType kType, typename Key, typename KeyScales, typename Round>
inline void integer_scores(Key key, KeyScales key_scales, const IntegerQueries<kType>& queries, int rows,
                           float* scores, Round round) {
    each_row_block(rows, [&](auto count, int row) {
        I32 sums[count()][kPages];
        for (int r = 0; r < count(); ++r) {
            std::fill(sums[r], sums[r] + kPages, set1(queries.starts[row + r]));
        }
        constexpr int kTogether = 4 / sizeof queries.codes[0];
        product_block(
            queries.stride / kTogether, key,
            [&](int r, int d) {
                return broadcast_codes(queries.codes + (row + r) * queries.stride + kTogether * d);
            },
            [](Bytes k, Bytes q, I32 sum) {
                if constexpr (kType == KvType::kInt8)
                    return dot4<true>(sum, k, q);
                else
                    return dot2(sum, k, q);
            },
            round, sums);
        for (int p = 0; p < kPages; ++p) {
            const F32 scales = key_scales(p);
            for (int r = 0; r < count(); ++r) {
                store(scores + (row + r) * kSegmentTokens + p * kPageTokens,
                      mul(mul(to_float(sums[r][p]), set1(queries.scales[row + r])), scales));
            }
        }
    });
}

// Sums of a segment's values in integers of 32 bits. `value(pair, element)` gives 16 elements of two tokens.
template <typename Value, typename Round>
inline void integer_values(Value value, const int16_t* weights, int rows, int pairs, int32_t* out,
                           int padded_dim, bool first, Round round) {
    each_vectors(padded_dim, [&](auto vectors, int element) {
        each_row_block(rows, [&](auto count, int row) {
            I32 sums[count()][vectors()];
            int32_t* to = out + static_cast<size_t>(row) * padded_dim + element;
            for (int r = 0; r < count(); ++r) {
                for (int i = 0; i < vectors(); ++i)
                    sums[r][i] = first ? set1(0) : load_int(to + r * padded_dim + i * 16);
            }
            product_block(
                pairs, [&](int i, int pair) { return value(pair, element + i * 16); },
                [&](int r, int pair) {
                    return broadcast_pair(weights + (row + r) * kSegmentTokens + 2 * pair);
                },
                [](Bytes v, Bytes p, I32 sum) { return dot2(sum, v, p); }, round, sums);
            for (int r = 0; r < count(); ++r) {
                for (int i = 0; i < vectors(); ++i) store_int(to + r * padded_dim + i * 16, sums[r][i]);
            }
        });
    });
}
