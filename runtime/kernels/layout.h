// The packed layouts that the decoder, the packer in Python and every instruction set agree on.
// docs/kernels.md has the picture.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace nybble {

constexpr int kTileRows = 16;        // output rows of a tile; one lane each
constexpr int kSlice = 32;           // inputs of a slice: what one activation scale covers
constexpr int kBlockTokens = 4;      // tokens of an activation block
constexpr int kBlockTiles = 4;       // rows of tiles whose halves lie together, of kHalves
constexpr int kPanelTiles = 4;       // tiles that the large matrix product unpacks together
constexpr int kPanelBlocks = 128;    // blocks of tokens that a panel's results are kept for
constexpr int kPageTokens = 16;      // tokens of a KV page; one lane each
constexpr int kSumBlock = 512;       // logits whose weights are summed together
constexpr int kSegmentTokens = 256;  // tokens whose softmax is computed together, from position 0

constexpr int round_up(int n, int multiple) { return (n + multiple - 1) / multiple * multiple; }
constexpr int slices_of(int columns) { return (columns + kSlice - 1) / kSlice; }

enum class WeightKind : int32_t {
    kSymmetric = 0,  // the zero point is 2^(bits - 1)
    kZeroPoint = 1,  // one a row and group, of as many bits as a code
    kMinimum = 2,    // one f16 a row and group: weight = code * scale + minimum; 4 bits
    kNf4 = 3,        // the code is an index into kNf4Bytes: weight = (byte - 128) / 127 * scale; 4 bits
    kHalves = 4,     // symmetric, the upper and the lower halves of codes apart; 8 bits
};

// The values of NF4 (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, appendix E), in [-1, 1], as
// bytes: round(127 * value) + 128.
constexpr uint8_t kNf4Bytes[16] = {1, 40, 61, 78, 92, 105, 116, 128, 138, 148, 159, 171, 184, 199, 220, 255};

// One linear layer. Tiles of 16 rows, each row of tiles contiguous: for every group a header (16 f16 scales,
// then 16 zero points or 16 f16 minima), then its slices. Zero points of 4 bits are 8 bytes: low nibbles are
// rows 0 .. 7, high ones 8 .. 15. A 4-bit slice is 256 bytes: for j in 0..3, 64
// bytes with 4 of each row; low nibbles are inputs 8j .. 8j+3, high nibbles 8j+4 .. 8j+7. An 8-bit slice is
// 512 bytes: for j in 0..7, 64 bytes with inputs 4j .. 4j+3 of each row. Of kHalves, four rows of tiles (at
// the end fewer) are those of the upper halves, as of a matrix of 4 bits, and after them those of the lower
// halves, arranged alike but without headers.
struct PackedLinear {
    const uint8_t* tiles = nullptr;
    int rows = 0;
    int columns = 0;
    int bits = 4;
    WeightKind kind = WeightKind::kSymmetric;
    int slices_per_group = 1;
    bool upper_only = false;  // a 4-bit matrix that is the upper halves of one of kHalves

    int tile_count() const { return (rows + kTileRows - 1) / kTileRows; }
    int slices() const { return slices_of(columns); }
    int groups() const { return (slices() + slices_per_group - 1) / slices_per_group; }
    int header_bytes() const {
        constexpr int kScales = kTileRows * 2;
        if (kind == WeightKind::kZeroPoint) return kScales + kTileRows * bits / 8;
        return kind == WeightKind::kMinimum ? 2 * kScales : kScales;
    }
    // What follows a header together; the lower halves have a place of their own.
    int slice_bytes() const { return bits == 4 || kind == WeightKind::kHalves ? 256 : 512; }
    size_t group_bytes() const {
        return header_bytes() + static_cast<size_t>(slices_per_group) * slice_bytes();
    }
    // Headers and slices of a row of tiles, and the lower halves' slices of it.
    size_t body_bytes() const {
        return static_cast<size_t>(groups()) * header_bytes() + static_cast<size_t>(slices()) * slice_bytes();
    }
    size_t lower_bytes() const {
        const bool halves = kind == WeightKind::kHalves || upper_only;
        return halves ? static_cast<size_t>(slices()) * slice_bytes() : 0;
    }
    size_t tile_bytes() const { return body_bytes() + lower_bytes(); }
    size_t bytes() const { return tile_bytes() * tile_count(); }

    // Of kHalves the upper halves alone, as a matrix of 4 bits; a sixteenth of what the codes stand for.
    PackedLinear upper_halves() const {
        return {tiles, rows, columns, 4, WeightKind::kSymmetric, slices_per_group, true};
    }
    // Of kHalves, how many times rows of tiles lie together, and the bytes of those that do.
    int block_count() const { return (tile_count() + kBlockTiles - 1) / kBlockTiles; }
    size_t block_bytes() const { return tile_bytes() * std::min(kBlockTiles, tile_count()); }
};

// Where a matrix's rows of tiles are; worked out once for many of them.
struct TilePlaces {
    explicit TilePlaces(const PackedLinear& w)
        : tiles(w.tiles), body_bytes(w.body_bytes()), lower_bytes(w.lower_bytes()), count(w.tile_count()) {}

    const uint8_t* body(int tile) const { return tiles + body_at(tile); }
    const uint8_t* lower(int tile) const { return tiles + lower_at(tile); }
    size_t body_at(int tile) const {
        return tile * body_bytes + tile / kBlockTiles * (kBlockTiles * lower_bytes);
    }
    size_t lower_at(int tile) const {
        return std::min((tile / kBlockTiles + 1) * kBlockTiles, count) * body_bytes + tile * lower_bytes;
    }

    const uint8_t* tiles;
    size_t body_bytes, lower_bytes;
    int count;
};

// Quantized activations: per block of 4 tokens and slice, 224 bytes: s8 [4][32], f32 scale [4], i32 minus the
// sum of the slice [4], and what spares the matrix product work: f32 minus kDotBias times the scale [4], and
// what an integer accumulator starts from, kDotBias's bits minus the zero point times the sum, i32 [4], for
// the zero points 8, 16 and 128.
constexpr int kActivationScales = kBlockTokens * kSlice;
constexpr int kActivationMinusSums = kActivationScales + kBlockTokens * 4;
constexpr int kActivationOffsets = kActivationMinusSums + kBlockTokens * 4;
constexpr int kActivationStarts8 = kActivationOffsets + kBlockTokens * 4;
constexpr int kActivationStarts16 = kActivationStarts8 + kBlockTokens * 4;
constexpr int kActivationStarts128 = kActivationStarts16 + kBlockTokens * 4;
constexpr int kActivationBytes = kActivationStarts128 + kBlockTokens * 4;

// Integer sums begin at the bits of 1.5 * 2^23: as a float those of a sum under 2^22 are kDotBias + sum, with
// no conversion. Times a scale of at most 22 bits kDotBias is exact, so that one fused multiply-add gives the
// sum times the scale, rounded once.
constexpr float kDotBias = 12582912.0f;
constexpr int32_t kDotBiasBits = 0x4B400000;

struct Activations {
    uint8_t* data = nullptr;
    int tokens = 0;
    int slices = 0;

    int blocks() const { return (tokens + kBlockTokens - 1) / kBlockTokens; }
    uint8_t* block(int index) const { return data + static_cast<size_t>(index) * slices * kActivationBytes; }
};

enum class KvType : int32_t { kF32 = 0, kF16 = 1, kInt8 = 2, kInt16 = 3 };

// Whether products with a cache are sums of integers.
constexpr bool in_integers(KvType type) { return type == KvType::kInt8 || type == KvType::kInt16; }

// A layer's cache: pages of 16 tokens, in each page one part a KV head. In f32 and f16 K is [head_dim][16]
// and V [16][head_dim rounded up to 16]. In int8 and int16 both are in the order of integer products,
// followed by f32 scales of the 16 keys and of the 16 values: V is [8][head_dim rounded up to 16][2 tokens],
// K in int8, with 128 added, [head_dim / 4, rounded up][16][4 elements], in int16 [head_dim / 2, rounded
// up][16][2 elements]. int16 codes go to 8191, so that sums of their products fit in 32 bits.
struct KvShape {
    int heads = 0;
    int head_dim = 0;
    KvType type = KvType::kF16;

    int padded_dim() const { return round_up(head_dim, 16); }
    int element_bytes() const { return type == KvType::kF32 ? 4 : type == KvType::kInt8 ? 1 : 2; }
    int key_elements() const {
        return in_integers(type) ? round_up(head_dim, 4 / element_bytes()) : head_dim;
    }
    int key_bytes() const { return key_elements() * kPageTokens * element_bytes(); }
    int value_bytes() const { return padded_dim() * kPageTokens * element_bytes(); }
    int head_bytes() const {
        return round_up(key_bytes() + value_bytes() + (in_integers(type) ? 2 * kPageTokens * 4 : 0), 64);
    }
    size_t page_bytes() const { return static_cast<size_t>(head_bytes()) * heads; }
};

}  // namespace nybble
