// 16 virtual lanes on AVX-512: one register. Included inside the namespace of an instruction set.
struct F32 {
    __m512 v;
};
struct I32 {
    __m512i v;
};
struct Bytes {  // 64 bytes: 4 of each of 16 rows
    __m512i v;
};

constexpr int kTilesPerBlock = 4;  // register block of the matrix product: tiles of 16 rows
constexpr int kTokensPerBlock = 4;
constexpr int kFewStreams = 2;  // rows of tiles that a few tokens are multiplied with together
constexpr int kFewTokens = 8;   // tokens whose sums are kept together: 4 or 8
constexpr int kRowTokens = 16;  // up to so many tokens `linear_rows` is faster than `linear_panel`
constexpr int kRowBlock = 6;    // register block of attention: rows
constexpr int kDotChains = 16;  // sums that hide the dot product's latency

inline F32 load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F32 a) { _mm512_storeu_ps(p, a.v); }
inline F32 set1(float x) { return {_mm512_set1_ps(x)}; }
inline F32 zero() { return {_mm512_setzero_ps()}; }
inline F32 add(F32 a, F32 b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F32 sub(F32 a, F32 b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F32 mul(F32 a, F32 b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F32 fma(F32 a, F32 b, F32 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F32 max(F32 a, F32 b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F32 abs(F32 a) { return {_mm512_abs_ps(a.v)}; }
inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
    return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ), no.v, yes.v)};
}
// Whether an element is not under x: at least x, or no number.
inline bool any_not_less(F32 a, float x) {
    return _mm512_cmp_ps_mask(a.v, _mm512_set1_ps(x), _CMP_NLT_UQ) != 0;
}

inline I32 load_int(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_int(int32_t* p, I32 a) { _mm512_storeu_si512(p, a.v); }
inline I32 set1(int32_t x) { return {_mm512_set1_epi32(x)}; }
inline I32 add(I32 a, I32 b) { return {_mm512_add_epi32(a.v, b.v)}; }
// Products whose factors fit in 16 bits.
inline I32 mul_16(I32 a, I32 b) { return {_mm512_madd_epi16(a.v, b.v)}; }
inline I32 round_to_int(F32 a) { return {_mm512_cvtps_epi32(a.v)}; }
inline F32 to_float(I32 a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline F32 unbiased(I32 a, float scale, float offset) {
    return fma({_mm512_castsi512_ps(a.v)}, set1(scale), set1(offset));
}
// The float whose exponent field is the low 8 bits of x's pattern, where the ninth is 0.
inline F32 as_exponent(F32 x) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(x.v), 23))};
}

inline F32 load_f16(const uint16_t* p) {
    return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_f16(uint16_t* p, F32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_cvtps_ph(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
inline I32 load_s8(const int8_t* p) {
    return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
inline I32 load_u8(const uint8_t* p) {
    return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
// Of each of 8 bytes the low nibble, then of each the high one.
inline I32 load_u4(const uint8_t* p) {
    constexpr int64_t kLow = 0x0F0F0F0F0F0F0F0F;
    int64_t x;
    std::memcpy(&x, p, 8);
    return {_mm512_cvtepu8_epi32(_mm_set_epi64x(x >> 4 & kLow, x & kLow))};
}
inline void store_s8(int8_t* p, I32 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}

inline Bytes load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
inline void store_bytes(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a.v); }
inline Bytes low_nibbles(Bytes a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
inline Bytes high_nibbles(Bytes a) { return low_nibbles({_mm512_srli_epi16(a.v, 4)}); }
// Bytes of a nibble of `upper` over one of `lower`: both their low ones, or both their high ones.
inline Bytes join_low_nibbles(Bytes upper, Bytes lower) {
    return {_mm512_ternarylogic_epi64(_mm512_slli_epi16(upper.v, 4), lower.v, _mm512_set1_epi8(15), 0xD8)};
}
inline Bytes join_high_nibbles(Bytes upper, Bytes lower) {
    return {_mm512_ternarylogic_epi64(upper.v, _mm512_srli_epi16(lower.v, 4), _mm512_set1_epi8(15), 0xD8)};
}
inline Bytes sub_bytes(Bytes a, Bytes b) { return {_mm512_sub_epi8(a.v, b.v)}; }
// The lowest byte of each lane in all four of it.
inline Bytes spread_bytes(I32 a) {
    const __m512i lowest = _mm512_broadcast_i32x4(_mm_set_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0));
    return {_mm512_shuffle_epi8(a.v, lowest)};
}
// table[code], for codes under 16.
inline Bytes look_up(const uint8_t (&table)[16], Bytes codes) {
    const __m512i all = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm512_shuffle_epi8(all, codes.v)};
}
inline Bytes broadcast4(const int8_t* p) {
    int32_t four;
    std::memcpy(&four, p, 4);
    return {_mm512_set1_epi32(four)};
}
// acc[row] += sum over 4 of weight (unsigned) * activation (signed).
template <bool kEightBits>
inline I32 dot4(I32 acc, Bytes weights, Bytes activations) {
    return {_mm512_dpbusd_epi32(acc.v, weights.v, activations.v)};
}

// 32 signed bytes as 16-bit integers: two of each of 16 lanes.
inline Bytes widen_pairs(const int8_t* p) {
    return {_mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
// Values fit in 16 bits.
inline void store_s16(int16_t* p, I32 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a.v));
}
inline Bytes broadcast_pair(const int16_t* p) { return broadcast4(reinterpret_cast<const int8_t*>(p)); }
// acc[lane] += sum over 2 of 16-bit products.
inline I32 dot2(I32 acc, Bytes a, Bytes b) { return {_mm512_dpwssd_epi32(acc.v, a.v, b.v)}; }

// Keeps the compiler from knowing what the bytes are.
inline void forget(Bytes& b) { asm("" : "+v"(b.v)); }

// Reductions: lanes i and i + 8, then + 4, + 2, + 1.
inline float reduce_add(F32 a) {
    __m256 x = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_add_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_add_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline float reduce_max(F32 a) {
    __m256 x = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_shuffle_ps(y, y, 1)));
}
inline int32_t reduce_add(I32 a) { return _mm512_reduce_add_epi32(a.v); }

inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
// Into the next cache alone.
inline void prefetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
