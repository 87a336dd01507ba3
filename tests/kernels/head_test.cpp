// The highest logit found with a part of the head's bytes: token and bits as all logits have them.
#include <algorithm>
#include <cmath>

#include "../../runtime/kernels/float_control.h"
#include "../../runtime/kernels/head_search.h"
#include "../../runtime/kernels/thread_pool.h"
#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

// A head, and both ways to its highest logit.
class Heads {
  public:
    Heads(const Kernels& kernels, RandomLinear head, int threads)
        : head_(std::move(head)),
          kernels_(kernels),
          search_(kernels, head_.packed, threads),
          pool_(threads),
          work_{SharedWork(threads), SharedWork(threads)},
          all_(head_.packed.tile_count() * kTileRows),
          found_(all_.size()) {}

    int slices() const { return head_.packed.slices(); }

    // Whether it was searched for; checks what was found.
    bool search(const std::vector<float>& row) {
        const PackedLinear& w = head_.packed;
        std::vector<uint8_t> quantized(static_cast<size_t>(slices()) * kActivationBytes);
        input_ = {quantized.data(), 1, slices()};
        kernels_.quantize(row.data(), 0, input_);
        kernels_.linear_rows(w, input_, all_.data(), all_.size(), 0, w.tile_count());
        if (!search_.begin()) return false;
        for (SharedWork& work : work_) work.reset();
        usable_ = true;
        pool_.run([](void* self, int thread) { static_cast<Heads*>(self)->run(thread); }, this);
        if (!usable_) return false;
        const int best = kernels_.best_logit(all_.data(), w.rows);
        check(search_.best() == best, "the token is the first of the highest");
        check(same_bits(&found_[best], &all_[best], 1), "its logit has the bits of any step");
        for (int i = 0; i < w.rows; ++i) {
            computed_ += found_[i] != -HUGE_VALF;
            check(found_[i] == -HUGE_VALF || same_bits(&found_[i], &all_[i], 1),
                  "a logit that is given has them, too");
        }
        return true;
    }

    int64_t computed() const { return computed_; }
    int best() const { return search_.best(); }
    const std::vector<float>& logits() const { return all_; }

  private:
    void run(int thread) {
        const FloatControl control;
        if (!search_.prepare(thread, input_)) {
            if (thread == 0) usable_ = false;
            return;
        }
        search_.bound(thread, found_.data(), work_[0]);
        pool_.barrier();
        search_.settle(thread, input_, found_.data());
        pool_.barrier();
        search_.search(thread, pool_.running(), input_, found_.data(), work_[1]);
    }

    const RandomLinear head_;
    const Kernels& kernels_;
    HeadSearch search_;
    ThreadPool pool_;
    SharedWork work_[2];
    Activations input_;
    std::vector<float> all_, found_;
    bool usable_ = true;
    int64_t computed_ = 0;
};

RandomLinear head_of(Random& random, int rows, int columns, int slices_per_group) {
    return random_linear(random, rows, columns, 8, WeightKind::kHalves, slices_per_group);
}

std::vector<float> padded_row(std::vector<float> row, int slices) {
    row.resize(static_cast<size_t>(slices) * kSlice);
    return row;
}

// The scale of a row in its first group.
uint8_t* scale_of(RandomLinear& head, int row) {
    const size_t at = static_cast<size_t>(TilePlaces(head.packed).body(row / kTileRows) - head.packed.tiles);
    return head.tiles.data() + at + row % kTileRows * 2;
}

void set_scale(RandomLinear& head, int row, uint16_t half) {
    std::memcpy(scale_of(head, row), &half, sizeof half);
}

void check_shapes(const Kernels& kernels, Random& random, Results& results) {
    struct Shape {
        int rows, columns, slices_per_group;
    };
    constexpr Shape kShapes[] = {{1, 1, 1},    {16, 32, 1},   {37, 72, 2},
                                 {70, 640, 1}, {3000, 96, 1}, {2051, 200, 4}};
    for (const Shape& shape : kShapes) {
        for (int threads : {1, 2, 3}) {
            current_case() = "head of " + std::to_string(shape.rows) + " x " + std::to_string(shape.columns);
            Heads heads(kernels, head_of(random, shape.rows, shape.columns, shape.slices_per_group), threads);
            for (int i = 0; i < 12; ++i) {
                const float size = std::ldexp(1.0f, random.below(8) - 4);
                std::vector<float> row = random.uniforms(shape.columns, size, i % 3 * 0.3f * size);
                // As models have it: a few inputs are far larger than the rest.
                if (i % 2 == 0) row[random.below(shape.columns)] *= 30;
                heads.search(padded_row(std::move(row), heads.slices()));
                results.add(heads.logits());
            }
        }
    }
}

// Rows that are like the input are far ahead of others: few logits are computed.
void check_few(const Kernels& kernels, Random& random) {
    current_case() = "a head with one logit far ahead";
    constexpr int kRows = 8000, kColumns = 96;
    RandomLinear head = head_of(random, kRows, kColumns, 1);
    const size_t best = 4321;
    std::vector<float> row(kColumns);
    for (int k = 0; k < kColumns; ++k) row[k] = static_cast<float>(head.dense[best * kColumns + k]);
    for (int s = 0; s < kColumns / kSlice; ++s) {  // twice as far as any other can be
        const uint16_t one = 0x3c00;
        std::memcpy(scale_of(head, static_cast<int>(best)) + s * head.packed.group_bytes(), &one, sizeof one);
    }
    Heads heads(kernels, std::move(head), 2);
    check(heads.search(row), "it is searched for");
    check(heads.computed() <= 4 * kTileRows, "few logits are computed");
}

// Lower halves that are as much as halves can be make a row the highest that the upper ones alone do not.
void check_bounds(const Kernels& kernels, Random& random) {
    current_case() = "a head whose lower halves decide";
    constexpr int kRows = 2000, kColumns = 128, kBest = 1234, kOther = 77;
    RandomLinear head = head_of(random, kRows, kColumns, 1);
    std::vector<float> row(kColumns);
    for (float& x : row) x = random.uniform() < 0 ? -1.0f : 1.0f;
    const TilePlaces places(head.packed);
    const auto set_halves = [&](int r, int k, int upper, int lower) {
        const int s = k / kSlice, shift = k / 4 % 2 * 4, tile = r / kTileRows;
        const size_t in_slice = k % kSlice / 8 * 64 + r % kTileRows * 4 + k % 4;
        const auto set = [&](const uint8_t* slice, int half) {
            uint8_t& byte = head.tiles[slice + in_slice - head.packed.tiles];
            byte = static_cast<uint8_t>((byte & ~(15 << shift)) | half << shift);
        };
        set(places.body(tile) + s * head.packed.group_bytes() + head.packed.header_bytes(), upper);
        set(places.lower(tile) + s * head.packed.slice_bytes(), lower);
    };
    constexpr uint16_t kOne = 0x3c00;
    for (int r = 0; r < kRows; ++r) {
        for (int s = 0; s < kColumns / kSlice; ++s) {
            std::memcpy(scale_of(head, r) + s * head.packed.group_bytes(), &kOne, sizeof kOne);
        }
        for (int k = 0; k < kColumns; ++k) {
            const bool up = row[k] > 0;
            // Of 16 for each input, the other row's upper halves are 6.25 ahead, and the best's lower
            // ones 7.5.
            const int more = r == kOther && k % 32 < 12.5 ? 1 : 0;
            set_halves(r, k, up ? 8 + more : 8 - more, r == kBest ? (up ? 15 : 0) : 7);
        }
    }
    Heads heads(kernels, std::move(head), 2);
    check(heads.search(row), "it is searched for");
    check(heads.best() == kBest, "the row that was made so is the highest");
}

void check_ties(const Kernels& kernels, Random& random) {
    current_case() = "a head with ties";
    Heads zeros(kernels, head_of(random, 100, 64, 1), 2);
    zeros.search(std::vector<float>(64, 0.0f));  // every logit is 0: the first token
    RandomLinear same = head_of(random, 200, 64, 1);
    std::fill(same.tiles.begin(), same.tiles.end(), 0x3c);  // scales and codes are those of any row
    Heads equal(kernels, std::move(same), 3);
    equal.search(random.uniforms(64));
}

// What pads the last tile has the logit 0, and is no token.
void check_negative(const Kernels& kernels, Random& random) {
    current_case() = "a head with negative logits alone";
    for (int rows : {1, 17, 250}) {
        RandomLinear head = head_of(random, rows, 32, 1);
        const TilePlaces places(head.packed);
        for (int tile = 0; tile < head.packed.tile_count(); ++tile) {  // codes of 0 to 15, of at most -113
            const auto at = places.body(tile) - head.packed.tiles + head.packed.header_bytes();
            std::fill_n(head.tiles.data() + at, head.packed.slice_bytes(), 0);
        }
        Heads heads(kernels, std::move(head), 2);
        std::vector<float> row(32);
        for (float& x : row) x = 1.0f + random.uniform() / 2;
        check(heads.search(row), "it is searched for");
    }
}

void check_no_numbers(const Kernels& kernels, Random& random) {
    for (const uint16_t half : {uint16_t{0x7c00}, uint16_t{0xfc00}, uint16_t{0x7e00}, uint16_t{0xbc00}}) {
        current_case() = "a head with a scale of " + std::to_string(half);
        RandomLinear head = head_of(random, 90, 64, 1);
        set_scale(head, 33, half);
        set_scale(head, 70, half);
        Heads heads(kernels, std::move(head), 2);
        check(heads.search(random.uniforms(64)), "it is searched for");
    }
    current_case() = "a row that has no number";
    for (const float x : {NAN, HUGE_VALF, 9e32f}) {
        Heads heads(kernels, head_of(random, 90, 64, 1), 2);
        std::vector<float> row = random.uniforms(64);
        row[40] = x;
        check(!heads.search(row), "no bounds are made of it");
    }
}

// Logits near each other have most of the head read: some steps then compute all of it.
void check_pauses(const Kernels& kernels, Random& random) {
    current_case() = "a head whose logits are near each other";
    RandomLinear head = head_of(random, 640, 64, 1);
    for (int tile = 0; tile < head.packed.tile_count(); ++tile) {
        const auto at = TilePlaces(head.packed).body(tile) - head.packed.tiles;
        for (int s = 0; s < 2; ++s) {
            std::fill_n(head.tiles.data() + at + s * head.packed.group_bytes() + 32, 256, 0x88);
        }
    }
    Heads heads(kernels, std::move(head), 2);
    int searched = 0;
    constexpr int kSteps = 300;
    for (int i = 0; i < kSteps; ++i) searched += heads.search(random.uniforms(64));
    check(searched > 0 && searched < kSteps / 4, "most steps go without a search");
}

}  // namespace

void test_head(const Kernels& kernels, Results& results) {
    Random random(8);
    check_shapes(kernels, random, results);
    check_few(kernels, random);
    check_bounds(kernels, random);
    check_ties(kernels, random);
    check_negative(kernels, random);
    check_no_numbers(kernels, random);
    check_pauses(kernels, random);
}

}  // namespace kernel_test
