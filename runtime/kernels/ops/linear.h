// Quantized activations and the matrix products, over the 16 virtual lanes of an instruction set.
// Included inside its namespace.

// Order of every output: per slice, t = float(integer dot) * activation scale; acc = fma(t, weight scale,
// acc); with minima also acc = fma(activation scale * float(sum), minimum, acc). Slices ascend. Nothing else
// enters, so one token or many, one thread or several give the same bits.

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
    int32_t start(bool whole_bytes) const {
        return number<int32_t>(whole_bytes ? kActivationStarts128 : kActivationStarts8);
    }

  private:
    template <typename Number>
    Number number(int field) const {
        Number x;
        std::memcpy(&x, block + field + place * 4, 4);
        return x;
    }
};

struct Header {
    F32 scale;
    I32 zero;     // kZeroPoint
    F32 minimum;  // kMinimum
};

template <WeightKind kKind>
inline Header read_header(const uint8_t* p) {
    Header h{load_f16(reinterpret_cast<const uint16_t*>(p)), {}, {}};
    if constexpr (kKind == WeightKind::kZeroPoint) h.zero = load_u8(p + 32);
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
    return set1(x.start(kWholeBytes<kBits, kKind>));
}

template <WeightKind kKind>
inline F32 accumulate(F32 acc, I32 dot, const TokenSlice& x, const Header& header) {
    acc = fma(unbiased(dot, x.scale(), x.offset()), header.scale, acc);
    if constexpr (kKind == WeightKind::kMinimum) {
        acc = fma(set1(x.scale() * -static_cast<float>(x.minus_sum())), header.minimum, acc);
    }
    return acc;
}

// The weights of inputs 8j .. 8j+3 and 8j+4 .. 8j+7 of a slice.
template <int kBits, WeightKind kKind>
inline void unpack_pair(const uint8_t* p, int j, Bytes (&w)[2]) {
    if constexpr (kBits == 4) {
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
inline void unpack_slice(const uint8_t* p, Bytes (&w)[8]) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        Bytes pair[2];
        unpack_pair<kBits, kKind>(p, j, pair);
        w[2 * j] = pair[0];
        w[2 * j + 1] = pair[1];
    }
}

// The headers and slices of kStreams rows of tiles that lie side by side.
template <WeightKind kKind, int kStreams>
struct TileStreams {
    static constexpr int kPrefetchBytes = 4096;

    TileStreams(const PackedLinear& w, int tile)
        : header_bytes(w.header_bytes()),
          slice_bytes(w.slice_bytes()),
          slices_per_group(w.slices_per_group),
          to_next_run(static_cast<size_t>(kStreams - 1) * w.tile_bytes()) {
        for (int n = 0; n < kStreams; ++n) p[n] = w.tiles + (tile + n) * w.tile_bytes();
        tail = p[0] + w.tile_bytes() - kPrefetchBytes;
    }

    // Goes on to the next slice: `at[n]` is where stream n has it, `header[n]` that of its group.
    void next() {
        if (left == 0) {
            for (int n = 0; n < kStreams; ++n) {
                header[n] = read_header<kKind>(p[n]);
                p[n] += header_bytes;
            }
            left = slices_per_group;
        }
        --left;
        // Near its end a tile is followed by one of the next run.
        const size_t ahead = kPrefetchBytes + (p[0] >= tail ? to_next_run : 0);
#pragma GCC unroll 4
        for (int n = 0; n < kStreams; ++n) {
            at[n] = p[n];
            for (int line = 0; line < slice_bytes; line += 64) prefetch(p[n] + ahead + line);
            p[n] += slice_bytes;
        }
    }

    const uint8_t* at[kStreams];
    Header header[kStreams] = {};

  private:
    const uint8_t* p[kStreams];
    const uint8_t* tail;
    const int header_bytes, slice_bytes, slices_per_group;
    const size_t to_next_run;
    int left = 0;
};

// One token and one row of tiles: weights are unpacked 64 bytes at a time and used at once.
template <int kBits, WeightKind kKind>
inline void one_token(const PackedLinear& w, Activations x, int token, float* y, size_t stride, int tile) {
    TileStreams<kKind, 1> stream(w, tile);
    const int slices = w.slices(), place = token % kBlockTokens;
    const uint8_t* block = x.block(token / kBlockTokens);
    F32 acc = zero();
    for (int s = 0; s < slices; ++s, block += kActivationBytes) {
        stream.next();
        const TokenSlice input{block, place};
        const int8_t* q = input.codes();
        I32 even = initial<kBits, kKind>(input, stream.header[0]), odd = set1(0);
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
            Bytes weights[2];
            unpack_pair<kBits, kKind>(stream.at[0], j, weights);
            even = dot4<kWholeBytes<kBits, kKind>>(even, weights[0], broadcast4(q + j * 8));
            odd = dot4<kWholeBytes<kBits, kKind>>(odd, weights[1], broadcast4(q + j * 8 + 4));
        }
        acc = accumulate<kKind>(acc, add(even, odd), input, stream.header[0]);
    }
    store(y + token * stride + tile * kTileRows, acc);
}

// A few tokens, the first of a block (or one alone). A slice is unpacked into registers and stays there for
// all tokens; an activation is broadcast once for all streams.
template <int kBits, WeightKind kKind, int kStreams, int kTokens>
inline void few_tokens(const PackedLinear& w, Activations x, int token, float* y, size_t stride, int tile) {
    TileStreams<kKind, kStreams> streams(w, tile);
    const int slices = w.slices();
    const size_t block_stride = static_cast<size_t>(x.slices) * kActivationBytes;
    const uint8_t* block = x.block(token / kBlockTokens);
    F32 acc[kTokens][kStreams];
    for (int i = 0; i < kTokens; ++i) {
        for (int n = 0; n < kStreams; ++n) acc[i][n] = zero();
    }
    for (int s = 0; s < slices; ++s, block += kActivationBytes) {
        streams.next();
        Bytes weights[kStreams][8];
#pragma GCC unroll 4
        for (int n = 0; n < kStreams; ++n) unpack_slice<kBits, kKind>(streams.at[n], weights[n]);
#pragma GCC unroll 8
        for (int i = 0; i < kTokens; ++i) {
            const TokenSlice input{block + i / kBlockTokens * block_stride, i % kBlockTokens};
            const int8_t* q = input.codes();
            I32 dot[kStreams];
#pragma GCC unroll 4
            for (int n = 0; n < kStreams; ++n) {
                dot[n] = initial<kBits, kKind>(input, streams.header[n]);
            }
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                const Bytes activation = broadcast4(q + j * 4);
#pragma GCC unroll 4
                for (int n = 0; n < kStreams; ++n) {
                    dot[n] = dot4<kWholeBytes<kBits, kKind>>(dot[n], weights[n][j], activation);
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < kStreams; ++n) {
                acc[i][n] = accumulate<kKind>(acc[i][n], dot[n], input, streams.header[n]);
            }
        }
    }
    for (int i = 0; i < kTokens; ++i) {
        for (int n = 0; n < kStreams; ++n)
            store(y + (token + i) * stride + (tile + n) * kTileRows, acc[i][n]);
    }
}

template <int kBits, WeightKind kKind, int kStreams>
inline void few_tokens_tiles(const PackedLinear& w, Activations x, float* y, size_t stride, int tile) {
    int token = 0;
    for (; token + kFewTokens <= x.tokens; token += kFewTokens)
        few_tokens<kBits, kKind, kStreams, kFewTokens>(w, x, token, y, stride, tile);
    const int rest = x.tokens - token;
    if constexpr (kFewTokens > 4) {
        if (rest & 4) few_tokens<kBits, kKind, kStreams, 4>(w, x, token, y, stride, tile), token += 4;
    }
    if (rest & 2) few_tokens<kBits, kKind, kStreams, 2>(w, x, token, y, stride, tile), token += 2;
    if (rest & 1) {
        for (int n = 0; n < kStreams; ++n) one_token<kBits, kKind>(w, x, token, y, stride, tile + n);
    }
}

template <int kBits, WeightKind kKind>
void linear_rows_of(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin,
                    int tile_end) {
    int tile = tile_begin;
    if (x.tokens == 1) {
        for (; tile < tile_end; ++tile) one_token<kBits, kKind>(w, x, 0, y, stride, tile);
        return;
    }
    for (; tile + kFewStreams <= tile_end; tile += kFewStreams)
        few_tokens_tiles<kBits, kKind, kFewStreams>(w, x, y, stride, tile);
    for (; tile < tile_end; ++tile) few_tokens_tiles<kBits, kKind, 1>(w, x, y, stride, tile);
}

// Many tokens. A panel of 4 tiles is unpacked, a chunk of slices at a time, into a buffer that stays in
// cache: per slice [8][4 tiles][64] bytes, then per tile the float scales, and zero points or minima.
constexpr int kPanelWeights = 8 * kPanelTiles * 64;
constexpr int kPanelSlice = kPanelWeights + kPanelTiles * 128;
constexpr int kChunkSlices = 18;

inline size_t panel_scratch() {
    const size_t results =
        static_cast<size_t>(kPanelBlocks) * kBlockTokens * kPanelTiles * kTileRows * sizeof(float);
    return static_cast<size_t>(kChunkSlices) * kPanelSlice + results;
}

template <int kBits, WeightKind kKind>
void unpack_panel(const PackedLinear& w, int tile_begin, int tiles, int slice_begin, int slice_end,
                  uint8_t* out) {
    const int per_group = w.slices_per_group, header_bytes = w.header_bytes(), slice_bytes = w.slice_bytes();
    for (int n = 0; n < tiles; ++n) {
        const uint8_t* tile = w.tiles + (tile_begin + n) * w.tile_bytes();
        for (int s = slice_begin; s < slice_end; ++s) {
            uint8_t* slice = out + static_cast<size_t>(s - slice_begin) * kPanelSlice;
            const int group = s / per_group;
            const uint8_t* header_at =
                tile +
                static_cast<size_t>(group) * (header_bytes + static_cast<size_t>(per_group) * slice_bytes);
            const uint8_t* p =
                header_at + header_bytes + static_cast<size_t>(s - group * per_group) * slice_bytes;
            Bytes weights[8];
            unpack_slice<kBits, kKind>(p, weights);
            for (int j = 0; j < 8; ++j) store_bytes(slice + (j * kPanelTiles + n) * 64, weights[j]);
            const Header header = read_header<kKind>(header_at);
            uint8_t* scales = slice + kPanelWeights;
            store(reinterpret_cast<float*>(scales + n * 64), header.scale);
            uint8_t* offsets = scales + kPanelTiles * 64 + n * 64;
            if constexpr (kKind == WeightKind::kZeroPoint) {
                store_int(reinterpret_cast<int32_t*>(offsets), header.zero);
            }
            if constexpr (kKind == WeightKind::kMinimum)
                store(reinterpret_cast<float*>(offsets), header.minimum);
        }
    }
}

// The register block: kTiles tiles by kTokens tokens of one activation block, over a chunk of slices. `panel`
// and `out` begin at the first tile and token, so that every offset is a constant.
template <int kBits, WeightKind kKind, int kTiles, int kTokens>
void micro_kernel(const uint8_t* panel, const uint8_t* block, int token, int slices, float* out, bool first) {
    F32 acc[kTokens][kTiles];
    for (int i = 0; i < kTokens; ++i) {
        for (int n = 0; n < kTiles; ++n) {
            acc[i][n] = first ? zero() : load(out + (i * kPanelTiles + n) * kTileRows);
        }
    }
    for (int s = 0; s < slices; ++s, panel += kPanelSlice, block += kActivationBytes) {
        const int8_t* q = reinterpret_cast<const int8_t*>(block) + token * kSlice;
        const uint8_t* scales = panel + kPanelWeights;
        Header header[kTiles] = {};
        I32 dot[kTokens][kTiles];
#pragma GCC unroll 4
        for (int n = 0; n < kTiles; ++n) {
            const uint8_t* offsets = scales + kPanelTiles * 64 + n * 64;
            if constexpr (kKind == WeightKind::kZeroPoint) {
                header[n].zero = load_int(reinterpret_cast<const int32_t*>(offsets));
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) {
            const TokenSlice input{block, token + i};
#pragma GCC unroll 4
            for (int n = 0; n < kTiles; ++n) dot[i][n] = initial<kBits, kKind>(input, header[n]);
        }
#pragma GCC unroll 8
        for (int j = 0; j < 8; ++j) {
            Bytes weights[kTiles];
#pragma GCC unroll 4
            for (int n = 0; n < kTiles; ++n) weights[n] = load_bytes(panel + (j * kPanelTiles + n) * 64);
#pragma GCC unroll 4
            for (int i = 0; i < kTokens; ++i) {
                const Bytes activation = broadcast4(q + i * kSlice + j * 4);
#pragma GCC unroll 4
                for (int n = 0; n < kTiles; ++n) {
                    dot[i][n] = dot4<kWholeBytes<kBits, kKind>>(dot[i][n], weights[n], activation);
                }
            }
        }
#pragma GCC unroll 4
        for (int n = 0; n < kTiles; ++n) {
            header[n].scale = load(reinterpret_cast<const float*>(scales + n * 64));
            if constexpr (kKind == WeightKind::kMinimum) {
                header[n].minimum = load(reinterpret_cast<const float*>(scales + kPanelTiles * 64 + n * 64));
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) {
            const TokenSlice input{block, token + i};
#pragma GCC unroll 4
            for (int n = 0; n < kTiles; ++n) {
                acc[i][n] = accumulate<kKind>(acc[i][n], dot[i][n], input, header[n]);
            }
        }
    }
    for (int i = 0; i < kTokens; ++i) {
        for (int n = 0; n < kTiles; ++n) store(out + (i * kPanelTiles + n) * kTileRows, acc[i][n]);
    }
}

template <int kBits, WeightKind kKind, int kTokens>
inline void micro_tiles(const uint8_t* panel, const uint8_t* block, int tiles, int token, int slices,
                        float* results, bool first) {
    float* out = results + token * kPanelTiles * kTileRows;
    int tile = 0;
    for (; tile + kTilesPerBlock <= tiles; tile += kTilesPerBlock) {
        micro_kernel<kBits, kKind, kTilesPerBlock, kTokens>(panel + tile * 64, block, token, slices,
                                                            out + tile * kTileRows, first);
    }
    for (; tile < tiles; ++tile) {
        micro_kernel<kBits, kKind, 1, kTokens>(panel + tile * 64, block, token, slices,
                                               out + tile * kTileRows, first);
    }
}

template <int kBits, WeightKind kKind>
void linear_panel_of(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin,
                     int tile_end, int block_begin, int block_end, uint8_t* scratch) {
    constexpr int kResults = kBlockTokens * kPanelTiles * kTileRows;
    float* results = reinterpret_cast<float*>(scratch + static_cast<size_t>(kChunkSlices) * kPanelSlice);
    const int tiles = tile_end - tile_begin, slices = w.slices();
    const int chunks = (slices + kChunkSlices - 1) / kChunkSlices;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int begin = slices * chunk / chunks, end = slices * (chunk + 1) / chunks;
        unpack_panel<kBits, kKind>(w, tile_begin, tiles, begin, end, scratch);
        for (int b = block_begin; b < block_end; ++b) {
            const uint8_t* block = x.block(b) + static_cast<size_t>(begin) * kActivationBytes;
            float* out = results + static_cast<size_t>(b - block_begin) * kResults;
            const int tokens = std::min(kBlockTokens, x.tokens - b * kBlockTokens);
            if (tokens == kBlockTokens) {
                micro_tiles<kBits, kKind, kTokensPerBlock>(scratch, block, tiles, 0, end - begin, out,
                                                           chunk == 0);
            } else {
                for (int i = 0; i < tokens; ++i) {
                    micro_tiles<kBits, kKind, 1>(scratch, block, tiles, i, end - begin, out, chunk == 0);
                }
            }
            if (chunk + 1 < chunks) continue;
            for (int i = 0; i < tokens; ++i) {
                float* row =
                    y + (static_cast<size_t>(b) * kBlockTokens + i) * stride + tile_begin * kTileRows;
                for (int n = 0; n < tiles; ++n) {
                    store(row + n * kTileRows, load(out + (i * kPanelTiles + n) * kTileRows));
                }
            }
        }
    }
}

// Calls the instance of a template for a layer's bits and kind; minima (GGUF's Q4_1) and NF4 have 4 bits.
#define NYBBLE_DISPATCH(function, w, ...)                                               \
    switch ((w).kind) {                                                                 \
        case WeightKind::kSymmetric:                                                    \
            return (w).bits == 4 ? function<4, WeightKind::kSymmetric>(w, __VA_ARGS__)  \
                                 : function<8, WeightKind::kSymmetric>(w, __VA_ARGS__); \
        case WeightKind::kZeroPoint:                                                    \
            return (w).bits == 4 ? function<4, WeightKind::kZeroPoint>(w, __VA_ARGS__)  \
                                 : function<8, WeightKind::kZeroPoint>(w, __VA_ARGS__); \
        case WeightKind::kMinimum:                                                      \
            return function<4, WeightKind::kMinimum>(w, __VA_ARGS__);                   \
        case WeightKind::kNf4:                                                          \
            return function<4, WeightKind::kNf4>(w, __VA_ARGS__);                       \
    }

void linear_rows(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin,
                 int tile_end) {
    NYBBLE_DISPATCH(linear_rows_of, w, x, y, stride, tile_begin, tile_end)
}

void linear_panel(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin, int tile_end,
                  int block_begin, int block_end, uint8_t* scratch) {
    NYBBLE_DISPATCH(linear_panel_of, w, x, y, stride, tile_begin, tile_end, block_begin, block_end, scratch)
}
#undef NYBBLE_DISPATCH
