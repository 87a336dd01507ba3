// A KV head's part of a page: read as lanes of floats, and written token by token. Included inside the
// namespace of an instruction set.

// Where a KV head's part of a page has what; worked out once, not for every page.
struct PageLayout {
    explicit PageLayout(const KvShape& shape)
        : values(shape.key_bytes()), scales(values + shape.value_bytes()), padded_dim(shape.padded_dim()) {}

    size_t values, scales;  // bytes from its beginning
    size_t padded_dim;
};

// Reading a page of one KV head.
template <KvType kType>
struct Page {
    const uint8_t* base;
    PageLayout layout;

    F32 vector(const uint8_t* p, size_t index) const {
        if constexpr (kType == KvType::kF32) return load(reinterpret_cast<const float*>(p) + index);
        if constexpr (kType == KvType::kF16) return load_f16(reinterpret_cast<const uint16_t*>(p) + index);
    }
    // Element d of the 16 keys.
    F32 keys(int d) const { return vector(base, static_cast<size_t>(d) * kPageTokens); }
    // 16 elements of one value.
    F32 values(int token, int element) const {
        return vector(base + layout.values, token * layout.padded_dim + element);
    }
};

// What integer caches differ in.
template <KvType kType>
struct Codes;

template <>
struct Codes<KvType::kInt8> {
    using Code = int8_t;
    static constexpr float kLargest = 127.0f;
    static constexpr int kKeyOffset = 128;  // added to those of keys
};

template <>
struct Codes<KvType::kInt16> {
    using Code = int16_t;
    static constexpr float kLargest = 8191.0f;
    static constexpr int kKeyOffset = 0;
};

template <KvType kType>
    requires(in_integers(kType))
struct Page<kType> {
    using Code = typename Codes<kType>::Code;

    const uint8_t* base;
    PageLayout layout;

    // The d-th 4 bytes of each of the 16 keys.
    Bytes keys(int d) const { return load_bytes(base + d * 64); }
    // 16 elements of two values, 16 bits each.
    Bytes values(int pair, int element) const {
        const uint8_t* at = base + layout.values + 2 * (pair * layout.padded_dim + element) * sizeof(Code);
        if constexpr (kType == KvType::kInt16)
            return load_bytes(at);
        else
            return widen_pairs(reinterpret_cast<const int8_t*>(at));
    }
    F32 key_scales() const { return load(scales()); }
    F32 value_scales() const { return load(scales() + kPageTokens); }

  private:
    const float* scales() const { return reinterpret_cast<const float*>(base + layout.scales); }
};

// Stored values are finite whatever comes in, so that a stale page can never poison a masked row.
inline float finite(float x, float limit) {
    const float low = x > -limit ? x : -limit;
    return low < limit ? low : limit;
}

// 16 elements, of which `count` exist; the rest are 0.
inline F32 load_some(const float* x, int count) {
    alignas(64) float lanes[16] = {};
    if (count < 16) x = static_cast<const float*>(std::memcpy(lanes, x, count * sizeof(float)));
    return load(x);
}

inline F32 finite(F32 x, float limit) {
    const F32 high = set1(limit), low = set1(-limit), raised = select_less(low, x, x, low);
    return select_less(raised, high, raised, high);
}

inline float code_scale(const float* row, int n, float largest_code) {
    F32 largest = zero();
    for (int begin = 0; begin < n; begin += 16) {
        largest = max(largest, abs(finite(load_some(row + begin, n - begin), 3.0e38f)));
    }
    const float magnitude = reduce_max(largest);
    return magnitude > 1e-30f ? magnitude / largest_code : 0.0f;
}

// 16 elements over their scale.
inline I32 codes_of(const float* x, int count, float scale, float largest_code) {
    const F32 inverse = set1(scale > 0.0f ? 1.0f / scale : 0.0f);
    return round_to_int(finite(mul(load_some(x, count), inverse), largest_code));
}

template <KvType kType>
void store_codes(const KvShape& shape, uint8_t* page, int slot, const float* key, const float* value) {
    using Code = typename Codes<kType>::Code;
    constexpr float kLargest = Codes<kType>::kLargest;
    constexpr int kTogether = 4 / sizeof(Code);
    const int n = shape.head_dim, padded = shape.padded_dim();
    uint8_t* values = page + shape.key_bytes();
    float* scales = reinterpret_cast<float*>(values + shape.value_bytes());
    Code* k = reinterpret_cast<Code*>(page) + slot * kTogether;
    Code* v = reinterpret_cast<Code*>(values) + static_cast<size_t>(slot / 2) * padded * 2 + slot % 2;
    const float key_scale = code_scale(key, n, kLargest), value_scale = code_scale(value, n, kLargest);
    scales[slot] = key_scale;
    scales[kPageTokens + slot] = value_scale;
    alignas(64) int32_t codes[16];
    for (int begin = 0; begin < n; begin += 16) {
        const int count = std::min(16, n - begin);
        store_int(codes,
                  add(codes_of(key + begin, count, key_scale, kLargest), set1(Codes<kType>::kKeyOffset)));
        for (int d = begin; d < begin + count; ++d) {
            k[d / kTogether * kPageTokens * kTogether + d % kTogether] = static_cast<Code>(codes[d - begin]);
        }
        store_int(codes, codes_of(value + begin, count, value_scale, kLargest));
        for (int d = 0; d < count; ++d) v[2 * (begin + d)] = static_cast<Code>(codes[d]);
    }
}

void store_kv(const KvShape& shape, uint8_t* page, int slot, const float* key, const float* value) {
    const int n = shape.head_dim, padded = shape.padded_dim();
    uint8_t* values = page + shape.key_bytes();
    if (shape.type == KvType::kF32) {
        float* k = reinterpret_cast<float*>(page);
        float* v = reinterpret_cast<float*>(values) + static_cast<size_t>(slot) * padded;
        for (int d = 0; d < n; ++d) k[d * kPageTokens + slot] = finite(key[d], 3.0e38f);
        for (int d = 0; d < n; ++d) v[d] = finite(value[d], 3.0e38f);
    } else if (shape.type == KvType::kF16) {
        uint16_t* k = reinterpret_cast<uint16_t*>(page);
        uint16_t* v = reinterpret_cast<uint16_t*>(values) + static_cast<size_t>(slot) * padded;
        alignas(64) uint16_t halves[16];
        for (int begin = 0; begin < padded; begin += 16) {
            const int count = std::min(16, n - begin);
            store_f16(halves, finite(load_some(key + begin, count), 65504.0f));
            for (int d = 0; d < count; ++d) k[(begin + d) * kPageTokens + slot] = halves[d];
            store_f16(v + begin, finite(load_some(value + begin, count), 65504.0f));
        }
    } else if (shape.type == KvType::kInt8) {
        store_codes<KvType::kInt8>(shape, page, slot, key, value);
    } else {
        store_codes<KvType::kInt16>(shape, page, slot, key, value);
    }
}
