// 16 virtual lanes on NEON with the dot-product extension: four registers. Included inside the namespace of
// an instruction set.

struct F32 {
    float32x4_t v[4];
};
struct I32 {
    int32x4_t v[4];
};
struct Bytes {  // 64 bytes: 4 of each of 16 rows
    uint8x16_t v[4];
};

constexpr int kTilesPerBlock = 1;
constexpr int kTokensPerBlock = 4;
constexpr int kFewStreams = 1;
constexpr int kFewTokens = 4;
constexpr int kRowTokens = 32;  // up to so many tokens `linear_rows` is faster than `linear_panel`
constexpr int kRowBlock = 3;    // register block of attention: rows
constexpr int kDotChains = 5;

template <typename V, typename Function>
inline V quarters(Function function) {
    return {{function(0), function(1), function(2), function(3)}};
}

inline F32 load(const float* p) {
    return quarters<F32>([&](int i) { return vld1q_f32(p + 4 * i); });
}
inline void store(float* p, F32 x) {
    for (int i = 0; i < 4; ++i) vst1q_f32(p + 4 * i, x.v[i]);
}
inline F32 set1(float x) {
    return quarters<F32>([&](int) { return vdupq_n_f32(x); });
}
inline F32 zero() { return set1(0.0f); }
inline F32 add(F32 x, F32 y) {
    return quarters<F32>([&](int i) { return vaddq_f32(x.v[i], y.v[i]); });
}
inline F32 sub(F32 x, F32 y) {
    return quarters<F32>([&](int i) { return vsubq_f32(x.v[i], y.v[i]); });
}
inline F32 mul(F32 x, F32 y) {
    return quarters<F32>([&](int i) { return vmulq_f32(x.v[i], y.v[i]); });
}
inline F32 fma(F32 x, F32 y, F32 z) {
    return quarters<F32>([&](int i) { return vfmaq_f32(z.v[i], x.v[i], y.v[i]); });
}
// x > y ? x : y, as x86 has it for equal and unordered operands too.
inline float32x4_t max_quarter(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
inline F32 max(F32 x, F32 y) {
    return quarters<F32>([&](int i) { return max_quarter(x.v[i], y.v[i]); });
}
inline F32 abs(F32 x) {
    return quarters<F32>([&](int i) { return vabsq_f32(x.v[i]); });
}
inline F32 select_less(F32 x, F32 y, F32 yes, F32 no) {
    return quarters<F32>([&](int i) { return vbslq_f32(vcltq_f32(x.v[i], y.v[i]), yes.v[i], no.v[i]); });
}
inline bool any_not_less(F32 y, float x) {
    uint32x4_t less = vcltq_f32(y.v[0], vdupq_n_f32(x));
    for (int i = 1; i < 4; ++i) less = vandq_u32(less, vcltq_f32(y.v[i], vdupq_n_f32(x)));
    return vminvq_u32(less) == 0;
}

inline I32 load_int(const int32_t* p) {
    return quarters<I32>([&](int i) { return vld1q_s32(p + 4 * i); });
}
inline void store_int(int32_t* p, I32 x) {
    for (int i = 0; i < 4; ++i) vst1q_s32(p + 4 * i, x.v[i]);
}
inline I32 set1(int32_t x) {
    return quarters<I32>([&](int) { return vdupq_n_s32(x); });
}
inline I32 add(I32 x, I32 y) {
    return quarters<I32>([&](int i) { return vaddq_s32(x.v[i], y.v[i]); });
}
inline I32 mul_16(I32 x, I32 y) {
    return quarters<I32>([&](int i) { return vmulq_s32(x.v[i], y.v[i]); });
}
inline I32 round_to_int(F32 x) {
    return quarters<I32>([&](int i) { return vcvtnq_s32_f32(x.v[i]); });
}
inline F32 to_float(I32 x) {
    return quarters<F32>([&](int i) { return vcvtq_f32_s32(x.v[i]); });
}
inline F32 unbiased(I32 x, float scale, float offset) {
    const F32 biased = quarters<F32>([&](int i) { return vreinterpretq_f32_s32(x.v[i]); });
    return fma(biased, set1(scale), set1(offset));
}
inline F32 as_exponent(F32 x) {
    return quarters<F32>(
        [&](int i) { return vreinterpretq_f32_s32(vshlq_n_s32(vreinterpretq_s32_f32(x.v[i]), 23)); });
}

inline F32 load_f16(const uint16_t* p) {
    return quarters<F32>([&](int i) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))); });
}
inline void store_f16(uint16_t* p, F32 x) {
    for (int i = 0; i < 4; ++i) vst1_u16(p + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(x.v[i])));
}
inline I32 load_s8(const int8_t* p) {
    const int8x16_t bytes = vld1q_s8(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(bytes)), high = vmovl_s8(vget_high_s8(bytes));
    return {{vmovl_s16(vget_low_s16(low)), vmovl_s16(vget_high_s16(low)), vmovl_s16(vget_low_s16(high)),
             vmovl_s16(vget_high_s16(high))}};
}
inline I32 widened(uint8x16_t bytes) {
    const uint16x8_t low = vmovl_u8(vget_low_u8(bytes)), high = vmovl_u8(vget_high_u8(bytes));
    return {{vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(low))),
             vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(high))),
             vreinterpretq_s32_u32(vmovl_u16(vget_high_u16(high)))}};
}
inline I32 load_u8(const uint8_t* p) { return widened(vld1q_u8(p)); }
inline I32 load_u4(const uint8_t* p) {
    const uint8x8_t pairs = vld1_u8(p);
    return widened(vcombine_u8(vand_u8(pairs, vdup_n_u8(15)), vshr_n_u8(pairs, 4)));
}
// Values fit in 8 bits.
inline void store_s8(int8_t* p, I32 x) {
    const int16x8_t low = vcombine_s16(vmovn_s32(x.v[0]), vmovn_s32(x.v[1]));
    const int16x8_t high = vcombine_s16(vmovn_s32(x.v[2]), vmovn_s32(x.v[3]));
    vst1q_s8(p, vcombine_s8(vmovn_s16(low), vmovn_s16(high)));
}

inline Bytes load_bytes(const uint8_t* p) {
    return quarters<Bytes>([&](int i) { return vld1q_u8(p + 16 * i); });
}
inline void store_bytes(uint8_t* p, Bytes x) {
    for (int i = 0; i < 4; ++i) vst1q_u8(p + 16 * i, x.v[i]);
}
inline Bytes low_nibbles(Bytes x) {
    return quarters<Bytes>([&](int i) { return vandq_u8(x.v[i], vdupq_n_u8(15)); });
}
inline Bytes high_nibbles(Bytes x) {
    return quarters<Bytes>([&](int i) { return vshrq_n_u8(x.v[i], 4); });
}
inline Bytes join_low_nibbles(Bytes upper, Bytes lower) {
    return quarters<Bytes>([&](int i) { return vsliq_n_u8(lower.v[i], upper.v[i], 4); });
}
inline Bytes join_high_nibbles(Bytes upper, Bytes lower) {
    return quarters<Bytes>([&](int i) { return vsriq_n_u8(upper.v[i], lower.v[i], 4); });
}
inline Bytes sub_bytes(Bytes x, Bytes y) {
    return quarters<Bytes>([&](int i) { return vsubq_u8(x.v[i], y.v[i]); });
}
inline Bytes spread_bytes(I32 x) {
    const uint32x4_t ones = vdupq_n_u32(0x01010101);
    return quarters<Bytes>([&](int i) {
        const uint32x4_t lowest = vandq_u32(vreinterpretq_u32_s32(x.v[i]), vdupq_n_u32(255));
        return vreinterpretq_u8_u32(vmulq_u32(lowest, ones));
    });
}
inline Bytes look_up(const uint8_t (&table)[16], Bytes codes) {
    return quarters<Bytes>([&](int i) { return vqtbl1q_u8(vld1q_u8(table), codes.v[i]); });
}
inline Bytes broadcast4(const int8_t* p) {
    uint32_t four;
    std::memcpy(&four, p, 4);
    const uint8x16_t all = vreinterpretq_u8_u32(vdupq_n_u32(four));
    return {{all, all, all, all}};
}
// The dot product takes signed bytes. 8-bit codes are centred first: (w - 128) . a + 128 * (1 . a) = w . a.
template <bool kEightBits>
inline I32 dot4(I32 acc, Bytes weights, Bytes activations) {
    return quarters<I32>([&](int i) {
        const int8x16_t a = vreinterpretq_s8_u8(activations.v[i]);
        if constexpr (!kEightBits) return vdotq_s32(acc.v[i], vreinterpretq_s8_u8(weights.v[i]), a);
        const int8x16_t centred = vreinterpretq_s8_u8(veorq_u8(weights.v[i], vdupq_n_u8(128)));
        const int32x4_t sum = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), a);
        return vaddq_s32(vdotq_s32(acc.v[i], centred, a), vshlq_n_s32(sum, 7));
    });
}

inline Bytes widen_pairs(const int8_t* p) {
    return quarters<Bytes>([&](int i) { return vreinterpretq_u8_s16(vmovl_s8(vld1_s8(p + 8 * i))); });
}
inline void store_s16(int16_t* p, I32 x) {
    for (int i = 0; i < 4; ++i) vst1_s16(p + 4 * i, vmovn_s32(x.v[i]));
}
inline Bytes broadcast_pair(const int16_t* p) { return broadcast4(reinterpret_cast<const int8_t*>(p)); }
inline I32 dot2(I32 acc, Bytes x, Bytes y) {
    return quarters<I32>([&](int i) {
        const int16x8_t a = vreinterpretq_s16_u8(x.v[i]), b = vreinterpretq_s16_u8(y.v[i]);
        const int32x4_t low = vmull_s16(vget_low_s16(a), vget_low_s16(b));
        return vaddq_s32(acc.v[i], vpaddq_s32(low, vmull_s16(vget_high_s16(a), vget_high_s16(b))));
    });
}

// Keeps the compiler from knowing what the bytes are.
inline void forget(Bytes& b) { asm("" : "+w"(b.v[0]), "+w"(b.v[1]), "+w"(b.v[2]), "+w"(b.v[3])); }

// Reductions: lanes i and i + 8, then + 4, + 2, + 1.
inline float reduce_add(F32 x) {
    const float32x4_t s = vaddq_f32(vaddq_f32(x.v[0], x.v[2]), vaddq_f32(x.v[1], x.v[3]));
    const float32x2_t y = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(y, 0) + vget_lane_f32(y, 1);
}
inline float reduce_max(F32 x) {
    const float32x4_t s = max_quarter(max_quarter(x.v[0], x.v[2]), max_quarter(x.v[1], x.v[3]));
    float lanes[4];
    vst1q_f32(lanes, s);
    const float a = lanes[0] > lanes[2] ? lanes[0] : lanes[2], b = lanes[1] > lanes[3] ? lanes[1] : lanes[3];
    return a > b ? a : b;
}
inline int32_t reduce_add(I32 x) {
    return vaddvq_s32(vaddq_s32(vaddq_s32(x.v[0], x.v[1]), vaddq_s32(x.v[2], x.v[3])));
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }
// Into the next cache alone.
inline void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
