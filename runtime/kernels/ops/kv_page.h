// A KV head's part of a page: read as lanes of floats, and written token by token. Included inside the
// namespace of an instruction set.

// Reading and writing a page of one KV head.
template <KvType kType>
struct Page {
    const uint8_t* base;
    const KvShape& shape;

    F32 vector(const uint8_t* p, size_t index) const {
        if constexpr (kType == KvType::kF32) return load(reinterpret_cast<const float*>(p) + index);
        if constexpr (kType == KvType::kF16) return load_f16(reinterpret_cast<const uint16_t*>(p) + index);
        if constexpr (kType == KvType::kInt8)
            return to_float(load_s8(reinterpret_cast<const int8_t*>(p) + index));
    }
    // Element d of the 16 keys; int8 without their scales.
    F32 keys(int d) const { return vector(base, static_cast<size_t>(d) * kPageTokens); }
    // 16 elements of one value; int8 without its scale.
    F32 values(int token, int element) const {
        return vector(base + shape.key_bytes(), static_cast<size_t>(token) * shape.padded_dim() + element);
    }
    const float* key_scales() const {
        return reinterpret_cast<const float*>(base + shape.key_bytes() + shape.value_bytes());
    }
    const float* value_scales() const { return key_scales() + kPageTokens; }
};

// Stored values are finite whatever comes in, so that a stale page can never poison a masked row.
inline float finite(float x, float limit) {
    const float low = x > -limit ? x : -limit;
    return low < limit ? low : limit;
}

// The same for 16 elements, of which `count` exist; the rest are 0.
inline F32 finite16(const float* x, int count, float limit) {
    alignas(64) float lanes[16] = {};
    if (count < 16) x = static_cast<const float*>(std::memcpy(lanes, x, count * sizeof(float)));
    const F32 high = set1(limit), low = set1(-limit), v = load(x);
    const F32 raised = select_less(low, v, v, low);
    return select_less(raised, high, raised, high);
}

inline float int8_scale(const float* row, int n) {
    float largest = 0.0f;
    for (int d = 0; d < n; ++d) {
        const float magnitude = std::fabs(finite(row[d], 3.0e38f));
        largest = magnitude > largest ? magnitude : largest;
    }
    return largest > 1e-30f ? largest / 127.0f : 0.0f;
}

inline int8_t int8_element(float x, float inverse) {
    return static_cast<int8_t>(std::nearbyint(finite(x * inverse, 127.0f)));
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
            store_f16(halves, finite16(key + begin, count, 65504.0f));
            for (int d = 0; d < count; ++d) k[(begin + d) * kPageTokens + slot] = halves[d];
            store_f16(v + begin, finite16(value + begin, count, 65504.0f));
        }
    } else {
        int8_t* k = reinterpret_cast<int8_t*>(page);
        int8_t* v = reinterpret_cast<int8_t*>(values) + static_cast<size_t>(slot) * padded;
        float* scales = reinterpret_cast<float*>(values + shape.value_bytes());
        const float ks = int8_scale(key, n), vs = int8_scale(value, n);
        scales[slot] = ks;
        scales[kPageTokens + slot] = vs;
        const float ki = ks > 0.0f ? 1.0f / ks : 0.0f, vi = vs > 0.0f ? 1.0f / vs : 0.0f;
        for (int d = 0; d < n; ++d) k[d * kPageTokens + slot] = int8_element(key[d], ki);
        for (int d = 0; d < n; ++d) v[d] = int8_element(value[d], vi);
    }
}
