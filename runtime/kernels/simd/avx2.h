// 16 virtual lanes on AVX2: two registers. With NYBBLE_AVX_VNNI its dot product does in one instruction what
// otherwise takes three; the integers are the same. Included inside the namespace of an instruction set.

struct F32 {
    __m256 a, b;
};
struct I32 {
    __m256i a, b;
};
struct Bytes {  // 64 bytes: 4 of each of 16 rows
    __m256i a, b;
};

constexpr int kTilesPerBlock = 1;
constexpr int kTokensPerBlock = 4;
constexpr int kFewStreams = 1;
constexpr int kFewTokens = 8;
constexpr int kRowTokens = 32;  // up to so many tokens `linear_rows` is faster than `linear_panel`
constexpr int kRowBlock = 3;    // register block of attention: rows
constexpr int kDotChains = 5;

inline F32 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F32 x) {
    _mm256_storeu_ps(p, x.a);
    _mm256_storeu_ps(p + 8, x.b);
}
inline F32 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F32 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline F32 add(F32 x, F32 y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F32 sub(F32 x, F32 y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F32 mul(F32 x, F32 y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F32 fma(F32 x, F32 y, F32 z) {
    return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
inline F32 max(F32 x, F32 y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F32 abs(F32 x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F32 select_less(F32 x, F32 y, F32 yes, F32 no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}
inline bool any_not_less(F32 y, float x) {
    const __m256 all = _mm256_set1_ps(x);
    const __m256 a = _mm256_cmp_ps(y.a, all, _CMP_NLT_UQ), b = _mm256_cmp_ps(y.b, all, _CMP_NLT_UQ);
    return _mm256_movemask_ps(_mm256_or_ps(a, b)) != 0;
}

inline __m256i load_half(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
inline I32 load_int(const int32_t* p) { return {load_half(p), load_half(p + 8)}; }
inline void store_int(int32_t* p, I32 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 8), x.b);
}
inline I32 set1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline I32 add(I32 x, I32 y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
inline I32 mul_16(I32 x, I32 y) { return {_mm256_madd_epi16(x.a, y.a), _mm256_madd_epi16(x.b, y.b)}; }
inline I32 round_to_int(F32 x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
inline F32 to_float(I32 x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline F32 unbiased(I32 x, float scale, float offset) {
    return fma({_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}, set1(scale), set1(offset));
}
inline F32 as_exponent(F32 x) {
    return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.a), 23)),
            _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(x.b), 23))};
}

inline F32 load_f16(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_f16(uint16_t* p, F32 x) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline I32 load_s8(const int8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepi8_epi32(x), _mm256_cvtepi8_epi32(_mm_srli_si128(x, 8))};
}
inline I32 load_u8(const uint8_t* p) {
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
inline I32 load_u4(const uint8_t* p) {
    constexpr int64_t kLow = 0x0F0F0F0F0F0F0F0F;
    int64_t x;
    std::memcpy(&x, p, 8);
    return {_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(x & kLow)),
            _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(x >> 4 & kLow))};
}
// Values fit in 8 bits: saturation never acts.
inline void store_s8(int8_t* p, I32 x) {
    const __m128i low = _mm_packs_epi32(_mm256_castsi256_si128(x.a), _mm256_extracti128_si256(x.a, 1));
    const __m128i high = _mm_packs_epi32(_mm256_castsi256_si128(x.b), _mm256_extracti128_si256(x.b, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(low, high));
}

inline Bytes load_bytes(const uint8_t* p) { return {load_half(p), load_half(p + 32)}; }
inline void store_bytes(uint8_t* p, Bytes x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), x.b);
}
inline Bytes low_nibbles(Bytes x) {
    const __m256i mask = _mm256_set1_epi8(15);
    return {_mm256_and_si256(x.a, mask), _mm256_and_si256(x.b, mask)};
}
inline Bytes high_nibbles(Bytes x) {
    return low_nibbles({_mm256_srli_epi16(x.a, 4), _mm256_srli_epi16(x.b, 4)});
}
inline __m256i join_half(__m256i upper, __m256i lower) {
    const __m256i mask = _mm256_set1_epi8(15);
    return _mm256_or_si256(_mm256_andnot_si256(mask, upper), _mm256_and_si256(mask, lower));
}
inline Bytes join_low_nibbles(Bytes upper, Bytes lower) {
    return {join_half(_mm256_slli_epi16(upper.a, 4), lower.a),
            join_half(_mm256_slli_epi16(upper.b, 4), lower.b)};
}
inline Bytes join_high_nibbles(Bytes upper, Bytes lower) {
    return {join_half(upper.a, _mm256_srli_epi16(lower.a, 4)),
            join_half(upper.b, _mm256_srli_epi16(lower.b, 4))};
}
inline Bytes sub_bytes(Bytes x, Bytes y) { return {_mm256_sub_epi8(x.a, y.a), _mm256_sub_epi8(x.b, y.b)}; }
inline Bytes spread_bytes(I32 x) {
    const __m128i lowest = _mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const __m256i all = _mm256_broadcastsi128_si256(lowest);
    return {_mm256_shuffle_epi8(x.a, all), _mm256_shuffle_epi8(x.b, all)};
}
inline Bytes look_up(const uint8_t (&table)[16], Bytes codes) {
    const __m256i all = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(all, codes.a), _mm256_shuffle_epi8(all, codes.b)};
}
inline Bytes broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return {_mm256_set1_epi32(four), _mm256_set1_epi32(four)};
}

template <bool kEightBits>
inline __m256i dot4_half(__m256i acc, __m256i weights, __m256i activations) {
#if defined(NYBBLE_AVX_VNNI)
    return _mm256_dpbusd_avx_epi32(acc, weights, activations);
#else
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (!kEightBits) {  // 2 * 31 * 127 fits in 16 bits
        return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(weights, activations), ones));
    } else {
        // 2 * 255 * 127 does not: the even and the odd bytes are widened and multiplied apart.
        const __m256i even_w = _mm256_and_si256(weights, _mm256_set1_epi16(255));
        const __m256i odd_w = _mm256_srli_epi16(weights, 8);
        const __m256i even_a = _mm256_srai_epi16(_mm256_slli_epi16(activations, 8), 8);
        const __m256i odd_a = _mm256_srai_epi16(activations, 8);
        const __m256i sum =
            _mm256_add_epi32(_mm256_madd_epi16(even_w, even_a), _mm256_madd_epi16(odd_w, odd_a));
        return _mm256_add_epi32(acc, sum);
    }
#endif
}
template <bool kEightBits>
inline I32 dot4(I32 acc, Bytes weights, Bytes activations) {
    return {dot4_half<kEightBits>(acc.a, weights.a, activations.a),
            dot4_half<kEightBits>(acc.b, weights.b, activations.b)};
}

inline Bytes widen_pairs(const int8_t* p) {
    return {_mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
// Values fit in 16 bits: saturation never acts.
inline void store_s16(int16_t* p, I32 x) {
    const __m256i mixed = _mm256_packs_epi32(x.a, x.b);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(mixed, 0xd8));
}
inline Bytes broadcast_pair(const int16_t* p) { return broadcast4(reinterpret_cast<const int8_t*>(p)); }
inline I32 dot2(I32 acc, Bytes x, Bytes y) {
    return {_mm256_add_epi32(acc.a, _mm256_madd_epi16(x.a, y.a)),
            _mm256_add_epi32(acc.b, _mm256_madd_epi16(x.b, y.b))};
}

// Keeps the compiler from knowing what the bytes are.
inline void forget(Bytes& b) { asm("" : "+x"(b.a), "+x"(b.b)); }

// Reductions: lanes i and i + 8, then + 4, + 2, + 1.
inline float reduce_add(F32 x) {
    const __m256 s = _mm256_add_ps(x.a, x.b);
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline float reduce_max(F32 x) {
    const __m256 s = _mm256_max_ps(x.a, x.b);
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline int32_t reduce_add(I32 x) {
    const __m256i s = _mm256_add_epi32(x.a, x.b);
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(s), _mm256_extracti128_si256(s, 1));
    y = _mm_add_epi32(y, _mm_shuffle_epi32(y, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 0xb1)));
}

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the next cache alone.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
