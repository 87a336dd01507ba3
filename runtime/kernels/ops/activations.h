// Quantizing activations, and reading what is kept of them. Included inside the namespace of an instruction
// set.

// Magnitudes, with infinity for NaN, which a maximum may lose.
inline F32 finite_or_infinite(F32 magnitude) {
    const F32 infinity = set1(HUGE_VALF);
    return select_less(magnitude, infinity, magnitude, infinity);
}

// Above it the offset of a scale could overflow.
constexpr float kLargestActivation = 1e33f;

inline float round_up_to_22_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    bits = (bits + 3) & ~3u;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline void quantize(const float* row, int token, Activations out) {
    uint8_t* block = out.block(token / kBlockTokens);
    const int place = token % kBlockTokens;
    for (int s = 0; s < out.slices; ++s, row += kSlice, block += kActivationBytes) {
        F32 a = load(row), b = load(row + 16);
        const float largest = reduce_max(max(finite_or_infinite(abs(a)), finite_or_infinite(abs(b))));
        // Under 1e-30 the reciprocal could overflow; such a slice is nothing.
        float scale = largest > 1e-30f ? round_up_to_22_bits(largest / 127.0f) : 0.0f;
        if (largest > kLargestActivation) {  // no integers stand for it: the scale carries it to every output
            a = b = zero();
            scale = NAN;
        }
        const F32 inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
        const I32 qa = round_to_int(mul(a, inverse)), qb = round_to_int(mul(b, inverse));
        int8_t* q = reinterpret_cast<int8_t*>(block) + place * kSlice;
        store_s8(q, qa);
        store_s8(q + 16, qb);
        const int32_t minus_sum = -reduce_add(add(qa, qb));
        const auto put = [&](int field, auto value) { std::memcpy(block + field + place * 4, &value, 4); };
        put(kActivationScales, scale);
        put(kActivationMinusSums, minus_sum);
        put(kActivationOffsets, -kDotBias * scale);
        put(kActivationStarts8, kDotBiasBits + 8 * minus_sum);
        put(kActivationStarts16, kDotBiasBits + 16 * minus_sum);
        put(kActivationStarts128, kDotBiasBits + 128 * minus_sum);
    }
}

// One token's numbers for a slice.
struct TokenSlice {
    const uint8_t* block;
    int place;

    const int8_t* codes() const { return reinterpret_cast<const int8_t*>(block) + place * kSlice; }
    float scale() const { return number<float>(kActivationScales); }
    float offset() const { return number<float>(kActivationOffsets); }
    int32_t minus_sum() const { return number<int32_t>(kActivationMinusSums); }
    // For the zero points 8, 16 and 128.
    int32_t start8() const { return number<int32_t>(kActivationStarts8); }
    int32_t start16() const { return number<int32_t>(kActivationStarts16); }
    int32_t start128() const { return number<int32_t>(kActivationStarts128); }

  private:
    template <typename Number>
    Number number(int field) const {
        Number x;
        std::memcpy(&x, block + field + place * 4, 4);
        return x;
    }
};
