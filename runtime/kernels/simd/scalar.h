// 16 virtual lanes in plain C++: the reference every other instruction set equals, bit for bit.
// Included inside the namespace of an instruction set; compiled without floating-point contraction.
constexpr int kLanes = 16;

struct F32 {
    float v[kLanes];
};
struct I32 {
    int32_t v[kLanes];
};
struct Bytes {  // 64 bytes: 4 of each of 16 rows
    uint8_t v[64];
};

constexpr int kTilesPerBlock = 1;
constexpr int kTokensPerBlock = 4;
constexpr int kFewStreams = 1;
constexpr int kFewTokens = 4;
constexpr int kRowTokens = 32;  // up to so many tokens `linear_rows` is faster than `linear_panel`
constexpr int kRowBlock = 1;    // register block of attention: rows
constexpr int kDotChains = 2;

template <typename V, typename Function>
inline V lanes(Function function) {
    V result;
    for (int i = 0; i < kLanes; ++i) result.v[i] = function(i);
    return result;
}

inline F32 load(const float* p) {
    F32 a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
inline void store(float* p, F32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline F32 set1(float x) {
    return lanes<F32>([&](int) { return x; });
}
inline F32 zero() { return set1(0.0f); }
inline F32 add(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] + b.v[i]; });
}
inline F32 sub(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] - b.v[i]; });
}
inline F32 mul(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] * b.v[i]; });
}
inline F32 fma(F32 a, F32 b, F32 c) {
    return lanes<F32>([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
inline F32 max(F32 a, F32 b) {
    return lanes<F32>([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F32 abs(F32 a) {
    return lanes<F32>([&](int i) { return std::fabs(a.v[i]); });
}
inline F32 select_less(F32 a, F32 b, F32 yes, F32 no) {
    return lanes<F32>([&](int i) { return a.v[i] < b.v[i] ? yes.v[i] : no.v[i]; });
}
inline bool any_not_less(F32 a, float x) {
    for (float y : a.v) {
        if (!(y < x)) return true;
    }
    return false;
}

inline I32 load_int(const int32_t* p) {
    I32 a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
inline void store_int(int32_t* p, I32 a) { std::memcpy(p, a.v, sizeof a.v); }
inline I32 set1(int32_t x) {
    return lanes<I32>([&](int) { return x; });
}
inline I32 add(I32 a, I32 b) {
    return lanes<I32>([&](int i) { return a.v[i] + b.v[i]; });
}
inline I32 sub(I32 a, I32 b) {
    return lanes<I32>([&](int i) { return a.v[i] - b.v[i]; });
}
inline I32 mul_16(I32 a, I32 b) {
    return lanes<I32>([&](int i) { return a.v[i] * b.v[i]; });
}
// To nearest, ties to even, by the default rounding mode that each step sets.
inline I32 round_to_int(F32 a) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(std::nearbyint(a.v[i])); });
}
inline F32 to_float(I32 a) {
    return lanes<F32>([&](int i) { return static_cast<float>(a.v[i]); });
}
// (sum - kDotBias's bits) * scale; `offset` is minus kDotBias times the scale, which others add instead.
inline F32 unbiased(I32 sum, float scale, float) {
    return mul(to_float(sub(sum, set1(kDotBiasBits))), set1(scale));
}
inline F32 as_exponent(F32 x) {
    return lanes<F32>([&](int i) {
        uint32_t bits;
        std::memcpy(&bits, x.v + i, 4);
        bits <<= 23;
        float y;
        std::memcpy(&y, &bits, 4);
        return y;
    });
}

inline F32 load_f16(const uint16_t* p) {
    return lanes<F32>([&](int i) { return half_to_float(p[i]); });
}
inline void store_f16(uint16_t* p, F32 a) {
    for (int i = 0; i < kLanes; ++i) p[i] = float_to_half(a.v[i]);
}
inline I32 load_s8(const int8_t* p) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(p[i]); });
}
inline I32 load_u8(const uint8_t* p) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(p[i]); });
}
inline I32 load_u4(const uint8_t* p) {
    return lanes<I32>([&](int i) { return static_cast<int32_t>(p[i % 8] >> i / 8 * 4 & 15); });
}
inline void store_s8(int8_t* p, I32 a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(a.v[i]);
}

inline Bytes load_bytes(const uint8_t* p) {
    Bytes a;
    std::memcpy(a.v, p, sizeof a.v);
    return a;
}
inline void store_bytes(uint8_t* p, Bytes a) { std::memcpy(p, a.v, sizeof a.v); }
inline Bytes low_nibbles(Bytes a) {
    for (uint8_t& x : a.v) x &= 15;
    return a;
}
inline Bytes high_nibbles(Bytes a) {
    for (uint8_t& x : a.v) x >>= 4;
    return a;
}
inline Bytes join_low_nibbles(Bytes upper, Bytes lower) {
    for (int i = 0; i < 64; ++i) upper.v[i] = static_cast<uint8_t>(upper.v[i] << 4 | (lower.v[i] & 15));
    return upper;
}
inline Bytes join_high_nibbles(Bytes upper, Bytes lower) {
    for (int i = 0; i < 64; ++i) upper.v[i] = static_cast<uint8_t>((upper.v[i] & 240) | lower.v[i] >> 4);
    return upper;
}
inline Bytes sub_bytes(Bytes a, Bytes b) {
    for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(a.v[i] - b.v[i]);
    return a;
}
inline Bytes spread_bytes(I32 x) {
    Bytes a;
    for (int i = 0; i < 64; ++i) a.v[i] = static_cast<uint8_t>(x.v[i / 4]);
    return a;
}
inline Bytes look_up(const uint8_t (&table)[16], Bytes codes) {
    for (uint8_t& x : codes.v) x = table[x];
    return codes;
}
inline Bytes broadcast4(const int8_t* p) {
    Bytes a;
    for (int i = 0; i < 64; i += 4) std::memcpy(a.v + i, p, 4);
    return a;
}
template <bool kEightBits>
inline I32 dot4(I32 acc, Bytes weights, Bytes activations) {
    for (int i = 0; i < 64; ++i) acc.v[i / 4] += weights.v[i] * static_cast<int8_t>(activations.v[i]);
    return acc;
}

inline Bytes widen_pairs(const int8_t* p) {
    Bytes a;
    for (int i = 0; i < 32; ++i) {
        const int16_t x = p[i];
        std::memcpy(a.v + 2 * i, &x, 2);
    }
    return a;
}
inline void store_s16(int16_t* p, I32 a) {
    for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int16_t>(a.v[i]);
}
inline Bytes broadcast_pair(const int16_t* p) { return broadcast4(reinterpret_cast<const int8_t*>(p)); }
inline I32 dot2(I32 acc, Bytes a, Bytes b) {
    for (int i = 0; i < 32; ++i) {
        int16_t x, y;
        std::memcpy(&x, a.v + 2 * i, 2);
        std::memcpy(&y, b.v + 2 * i, 2);
        acc.v[i / 2] += x * y;
    }
    return acc;
}

// Keeps the compiler from knowing what the bytes are.
inline void forget(Bytes& b) { asm("" : "+m"(b)); }

inline float reduce_add(F32 a) {
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) a.v[i] = a.v[i] + a.v[i + step];
    }
    return a.v[0];
}
inline float reduce_max(F32 a) {
    for (int step = 8; step > 0; step /= 2) {
        for (int i = 0; i < step; ++i) a.v[i] = a.v[i] > a.v[i + step] ? a.v[i] : a.v[i + step];
    }
    return a.v[0];
}
inline int32_t reduce_add(I32 a) {
    int32_t sum = 0;
    for (int32_t x : a.v) sum += x;
    return sum;
}

inline void prefetch(const void*) {}
inline void prefetch_far(const void*) {}
