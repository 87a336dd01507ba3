// The matrix product for one token or a few: weights are read once. Included inside the namespace of an
// instruction set.

// The headers and slices of kStreams rows of tiles that lie side by side.
template <int kBits, WeightKind kKind, int kStreams>
struct TileStreams {
    static constexpr bool kHalved = kKind == WeightKind::kHalves;
    // So many bytes before they are read, weights are asked for into the second cache, for which a core waits
    // for more lines at a time than for the first, and from there into the first.
    static constexpr size_t kFar = (kStreams == 1 ? 8192 : 16384) / (kHalved ? 2 : 1);  // of each half
    static constexpr size_t kNear = kHalved ? 512 : 1024;

    TileStreams(const PackedLinear& w, const TilePlaces& places, int tile)
        : header_bytes(w.header_bytes()),
          slice_bytes(w.slice_bytes()),
          slices_per_group(w.slices_per_group),
          far(kStreams == 1 ? kFar : std::min(kFar, places.body_bytes)),
          to_next_run(places.body(tile + kStreams) - places.body(tile) - places.body_bytes),
          to_next_lower(kHalved ? places.lower(tile + kStreams) - places.lower(tile) - places.lower_bytes
                                : 0) {
        for (int n = 0; n < kStreams; ++n) {
            p[n] = places.body(tile + n);
            if constexpr (kHalved) lower[n] = places.lower(tile + n);
        }
        tail = p[0] + places.body_bytes - far;
        if constexpr (kHalved) lower_tail = lower[0] + places.lower_bytes - far;
    }

    // Goes on to the next slice: `at[n]` is where stream n has it, `lower_at[n]` where its lower half is,
    // `header[n]` that of its group.
    void next() {
        // Near its end a tile is followed by one of the next run.
        const size_t ahead = far + (p[0] >= tail ? to_next_run : 0);
        if (left == 0) {
            for (int n = 0; n < kStreams; ++n) {
                header[n] = read_header<kBits, kKind>(p[n]);
                ask_for(p[n], header_bytes, ahead);
                p[n] += header_bytes;
            }
            left = slices_per_group;
        }
        --left;
#pragma GCC unroll 4
        for (int n = 0; n < kStreams; ++n) {
            at[n] = p[n];
            ask_for(p[n], slice_bytes, ahead);
            p[n] += slice_bytes;
            if constexpr (kHalved) {
                lower_at[n] = lower[n];
                ask_for(lower[n], slice_bytes, far + (lower[0] >= lower_tail ? to_next_lower : 0));
                lower[n] += slice_bytes;
            }
        }
    }

    const uint8_t* at[kStreams];
    const uint8_t* lower_at[kStreams] = {};
    Header header[kStreams] = {};

  private:
    static void ask_for(const uint8_t* from, int bytes, size_t ahead) {
        for (int line = 0; line < bytes; line += 64) {
            prefetch_far(from + ahead + line);
            prefetch(from + kNear + line);
        }
    }

    const uint8_t* p[kStreams];
    const uint8_t* lower[kStreams] = {};
    const uint8_t *tail, *lower_tail = nullptr;
    const int header_bytes, slice_bytes, slices_per_group;
    const size_t far, to_next_run, to_next_lower;
    int left = 0;
};

// One token and one row of tiles: weights are unpacked 64 bytes at a time and used at once.
template <int kBits, WeightKind kKind>
inline void one_token(const PackedLinear& w, const TilePlaces& places, Activations x, int token, float* y,
                      size_t stride, int tile) {
    TileStreams<kBits, kKind, 1> stream(w, places, tile);
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
            unpack_pair<kBits, kKind>(stream.at[0], stream.lower_at[0], j, weights);
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
inline void few_tokens(const PackedLinear& w, const TilePlaces& places, Activations x, int token, float* y,
                       size_t stride, int tile) {
    constexpr bool kCentred = kTokens > 4;  // for fewer it costs more than it saves
    TileStreams<kBits, kKind, kStreams> streams(w, places, tile);
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
        for (int n = 0; n < kStreams; ++n) {
            unpack_slice<kBits, kKind>(streams.at[n], streams.lower_at[n], weights[n]);
            if constexpr (kCentred) centre<kBits, kKind>(streams.header[n], weights[n]);
        }
#pragma GCC unroll 8
        for (int i = 0; i < kTokens; ++i) {
            const TokenSlice input{block + i / kBlockTokens * block_stride, i % kBlockTokens};
            const int8_t* q = input.codes();
            I32 dot[kStreams];
#pragma GCC unroll 4
            for (int n = 0; n < kStreams; ++n) {
                dot[n] = kCentred ? initial_centred<kBits, kKind>(input, streams.header[n])
                                  : initial<kBits, kKind>(input, streams.header[n]);
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
inline void few_tokens_tiles(const PackedLinear& w, const TilePlaces& places, Activations x, float* y,
                             size_t stride, int tile) {
    int token = 0;
    for (; token + kFewTokens <= x.tokens; token += kFewTokens)
        few_tokens<kBits, kKind, kStreams, kFewTokens>(w, places, x, token, y, stride, tile);
    const int rest = x.tokens - token;
    if constexpr (kFewTokens > 4) {
        if (rest & 4) few_tokens<kBits, kKind, kStreams, 4>(w, places, x, token, y, stride, tile), token += 4;
    }
    if (rest & 2) few_tokens<kBits, kKind, kStreams, 2>(w, places, x, token, y, stride, tile), token += 2;
    if (rest & 1) {
        for (int n = 0; n < kStreams; ++n) one_token<kBits, kKind>(w, places, x, token, y, stride, tile + n);
    }
}

template <int kBits, WeightKind kKind>
void linear_rows_of(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin,
                    int tile_end) {
    const TilePlaces places(w);
    int tile = tile_begin;
    if (x.tokens == 1) {
        for (; tile < tile_end; ++tile) one_token<kBits, kKind>(w, places, x, 0, y, stride, tile);
        return;
    }
    for (; tile + kFewStreams <= tile_end; tile += kFewStreams)
        few_tokens_tiles<kBits, kKind, kFewStreams>(w, places, x, y, stride, tile);
    for (; tile < tile_end; ++tile) few_tokens_tiles<kBits, kKind, 1>(w, places, x, y, stride, tile);
}
