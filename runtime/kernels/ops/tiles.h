// Reading tiles of weights, and what a slice of them adds to an output. Included inside the namespace of an
// instruction set.

// Order of every output: per slice, t = float(integer dot) * activation scale; acc = fma(t, weight scale,
// acc); with minima also acc = fma(activation scale * float(sum), minimum, acc). Slices ascend. Nothing else
// enters, so one token or many, one thread or several give the same bits.

struct Header {
    F32 scale;
    I32 zero;     // kZeroPoint
    F32 minimum;  // kMinimum
};

template <int kBits, WeightKind kKind>
inline Header read_header(const uint8_t* p) {
    Header h{load_f16(reinterpret_cast<const uint16_t*>(p)), {}, {}};
    if constexpr (kKind == WeightKind::kZeroPoint) h.zero = kBits == 4 ? load_u4(p + 32) : load_u8(p + 32);
    if constexpr (kKind == WeightKind::kMinimum)
        h.minimum = load_f16(reinterpret_cast<const uint16_t*>(p + 32));
    if constexpr (kKind == WeightKind::kNf4) h.scale = mul(h.scale, set1(1.0f / 127.0f));
    return h;
}

// Whether unpacked weights take all 8 bits of a byte.
template <int kBits, WeightKind kKind>
constexpr bool kWholeBytes = kBits == 8 || kKind == WeightKind::kNf4;

// What the integer accumulator starts from: the bias, minus zero point times the sum of the activations.
template <int kBits, WeightKind kKind>
inline I32 initial(const TokenSlice& x, const Header& header) {
    if constexpr (kKind == WeightKind::kMinimum) return set1(kDotBiasBits);
    if constexpr (kKind == WeightKind::kZeroPoint) {
        return add(mul_16(header.zero, set1(x.minus_sum())), set1(kDotBiasBits));
    }
    return set1(kWholeBytes<kBits, kKind> ? x.start128() : x.start8());
}

// Weights that many tokens share can be made to have one zero point, 16, which costs less than to take each
// row's off for every token.
template <int kBits, WeightKind kKind>
constexpr bool kCentres = kBits == 4 && kKind == WeightKind::kZeroPoint;

template <int kBits, WeightKind kKind>
inline void centre(const Header& header, Bytes (&w)[8]) {
    if constexpr (kCentres<kBits, kKind>) {
        const Bytes excess = spread_bytes(add(header.zero, set1(-16)));
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) w[j] = sub_bytes(w[j], excess);
    }
}

// `initial` for centred weights.
template <int kBits, WeightKind kKind>
inline I32 initial_centred(const TokenSlice& x, const Header& header) {
    if constexpr (kCentres<kBits, kKind>) return set1(x.start16());
    return initial<kBits, kKind>(x, header);
}

template <WeightKind kKind>
inline F32 accumulate(F32 acc, I32 dot, const TokenSlice& x, const Header& header) {
    acc = fma(unbiased(dot, x.scale(), x.offset()), header.scale, acc);
    if constexpr (kKind == WeightKind::kMinimum) {
        acc = fma(set1(x.scale() * -static_cast<float>(x.minus_sum())), header.minimum, acc);
    }
    return acc;
}

// The weights of inputs 8j .. 8j+3 and 8j+4 .. 8j+7 of a slice; `lower` has the lower halves of kHalves.
template <int kBits, WeightKind kKind>
inline void unpack_pair(const uint8_t* p, const uint8_t* lower, int j, Bytes (&w)[2]) {
    if constexpr (kKind == WeightKind::kHalves) {
        const Bytes high = load_bytes(p + j * 64), low = load_bytes(lower + j * 64);
        w[0] = join_low_nibbles(high, low);
        w[1] = join_high_nibbles(high, low);
    } else if constexpr (kBits == 4) {
        const Bytes packed = load_bytes(p + j * 64);
        w[0] = low_nibbles(packed);
        w[1] = high_nibbles(packed);
        if constexpr (kKind == WeightKind::kNf4) {
            w[0] = look_up(kNf4Bytes, w[0]);
            w[1] = look_up(kNf4Bytes, w[1]);
        }
    } else {
        w[0] = load_bytes(p + j * 128);
        w[1] = load_bytes(p + j * 128 + 64);
    }
}

template <int kBits, WeightKind kKind>
inline void unpack_slice(const uint8_t* p, const uint8_t* lower, Bytes (&w)[8]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        Bytes pair[2];
        unpack_pair<kBits, kKind>(p, lower, j, pair);
        w[2 * j] = pair[0];
        w[2 * j + 1] = pair[1];
    }
}
