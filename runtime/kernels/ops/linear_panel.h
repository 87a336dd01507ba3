// The matrix product for many tokens. Included inside the namespace of an instruction set.

// A panel of 4 tiles is unpacked, a chunk of slices at a time, into a buffer that stays in
// cache: per slice [8][4 tiles][64] bytes, then per tile the float scales, and 8-bit zero points or minima.
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
    const TilePlaces places(w);
    const size_t group_bytes = w.group_bytes();
    for (int n = 0; n < tiles; ++n) {
        const uint8_t *tile = places.body(tile_begin + n), *lower = places.lower(tile_begin + n);
        for (int s = slice_begin; s < slice_end; ++s) {
            uint8_t* slice = out + static_cast<size_t>(s - slice_begin) * kPanelSlice;
            const int group = s / per_group;
            const uint8_t* header_at = tile + group * group_bytes;
            const uint8_t* p =
                header_at + header_bytes + static_cast<size_t>(s - group * per_group) * slice_bytes;
            Bytes weights[8];
            unpack_slice<kBits, kKind>(p, lower + static_cast<size_t>(s) * slice_bytes, weights);
            const Header header = read_header<kBits, kKind>(header_at);
            centre<kBits, kKind>(header, weights);
            for (int j = 0; j < 8; ++j) store_bytes(slice + (j * kPanelTiles + n) * 64, weights[j]);
            uint8_t* scales = slice + kPanelWeights;
            store(reinterpret_cast<float*>(scales + n * 64), header.scale);
            uint8_t* offsets = scales + kPanelTiles * 64 + n * 64;
            if constexpr (kKind == WeightKind::kZeroPoint && !kCentres<kBits, kKind>) {
                store_int(reinterpret_cast<int32_t*>(offsets), header.zero);
            }
            if constexpr (kKind == WeightKind::kMinimum)
                store(reinterpret_cast<float*>(offsets), header.minimum);
        }
    }
}

// Where a register block's sums are: kept from the chunk of slices before, and to be put after this one.
struct Sums {
    const float* kept;  // [kBlockTokens][kPanelTiles][16]; null before the first chunk
    float* out;
    size_t stride;  // of a token in `out`

    const float* kept_at(int token, int tile) const {
        return kept == nullptr ? nullptr : kept + (token * kPanelTiles + tile) * kTileRows;
    }
    float* out_at(int token, int tile) const { return out + token * stride + tile * kTileRows; }
};

// The register block: kTiles tiles by kTokens tokens of one activation block, over a chunk of slices. `panel`
// and the sums begin at the first tile and token, so that offsets are constants. Arguments are passed in
// registers: a structure of them, written and read back on the stack, would have each block wait for the sums
// of the one before to reach the cache.
template <int kBits, WeightKind kKind, int kTiles, int kTokens>
void micro_kernel(const uint8_t* panel, const uint8_t* block, int token, int slices, const float* kept,
                  float* out, size_t stride) {
    F32 acc[kTokens][kTiles];
#pragma GCC unroll 4
    for (int i = 0; i < kTokens; ++i) {
#pragma GCC unroll 4
        for (int n = 0; n < kTiles; ++n) acc[i][n] = zero();
    }
    if (kept != nullptr) {
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) {
#pragma GCC unroll 4
            for (int n = 0; n < kTiles; ++n) acc[i][n] = load(kept + (i * kPanelTiles + n) * kTileRows);
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
            if constexpr (kKind == WeightKind::kZeroPoint && !kCentres<kBits, kKind>) {
                header[n].zero = load_int(reinterpret_cast<const int32_t*>(offsets));
            }
        }
#pragma GCC unroll 4
        for (int i = 0; i < kTokens; ++i) {
            const TokenSlice input{block, token + i};
#pragma GCC unroll 4
            for (int n = 0; n < kTiles; ++n) dot[i][n] = initial_centred<kBits, kKind>(input, header[n]);
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
#pragma GCC unroll 4
    for (int i = 0; i < kTokens; ++i) {
#pragma GCC unroll 4
        for (int n = 0; n < kTiles; ++n) store(out + i * stride + n * kTileRows, acc[i][n]);
    }
}

template <int kBits, WeightKind kKind, int kTokens>
inline void micro_tiles(const uint8_t* panel, const uint8_t* block, int tiles, int token, int slices,
                        const Sums& sums) {
    int tile = 0;
    for (; tile + kTilesPerBlock <= tiles; tile += kTilesPerBlock) {
        micro_kernel<kBits, kKind, kTilesPerBlock, kTokens>(panel + tile * 64, block, token, slices,
                                                            sums.kept_at(token, tile),
                                                            sums.out_at(token, tile), sums.stride);
    }
    for (; tile < tiles; ++tile) {
        micro_kernel<kBits, kKind, 1, kTokens>(panel + tile * 64, block, token, slices,
                                               sums.kept_at(token, tile), sums.out_at(token, tile),
                                               sums.stride);
    }
}

template <int kBits, WeightKind kKind>
void linear_panel_of(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin,
                     int tile_end, int block_begin, int block_end, uint8_t* scratch) {
    constexpr int kRow = kPanelTiles * kTileRows;
    float* kept = reinterpret_cast<float*>(scratch + static_cast<size_t>(kChunkSlices) * kPanelSlice);
    const int tiles = tile_end - tile_begin, slices = w.slices();
    const int chunks = (slices + kChunkSlices - 1) / kChunkSlices;
    for (int chunk = 0; chunk < chunks; ++chunk) {
        const int begin = slices * chunk / chunks, end = slices * (chunk + 1) / chunks;
        unpack_panel<kBits, kKind>(w, tile_begin, tiles, begin, end, scratch);
        for (int b = block_begin; b < block_end; ++b) {
            const uint8_t* block = x.block(b) + static_cast<size_t>(begin) * kActivationBytes;
            float* own = kept + static_cast<size_t>(b - block_begin) * kBlockTokens * kRow;
            Sums sums{chunk == 0 ? nullptr : own, own, kRow};
            if (chunk + 1 == chunks) {
                sums.out = y + static_cast<size_t>(b) * kBlockTokens * stride + tile_begin * kTileRows;
                sums.stride = stride;
            }
            const int tokens = std::min(kBlockTokens, x.tokens - b * kBlockTokens);
            if (tokens == kBlockTokens) {
                micro_tiles<kBits, kKind, kTokensPerBlock>(scratch, block, tiles, 0, end - begin, sums);
                continue;
            }
            for (int i = 0; i < tokens; ++i) {
                micro_tiles<kBits, kKind, 1>(scratch, block, tiles, i, end - begin, sums);
            }
        }
    }
}
