// Streamed weights: what is read of a file while other threads compute, and the bits of resident weights.
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <string>

#include "../../runtime/kernels/direct_file.h"
#include "../../runtime/kernels/read_threads.h"
#include "../../runtime/kernels/stream_layout.h"
#include "../../runtime/kernels/stream_pace.h"
#include "../../runtime/kernels/tile_rows.h"
#include "../../runtime/kernels/weight_stream.h"
#include "check.h"
#include "decoder_model.h"

namespace kernel_test {

TemporaryFile::TemporaryFile(const std::vector<uint8_t>& content, bool in_memory) {
    char path[] = "/tmp/nybble-kernel-test-XXXXXX";
    descriptor_ = in_memory ? memfd_create("nybble-kernel-test", MFD_CLOEXEC) : mkstemp(path);
    check(descriptor_ >= 0, "a temporary file can be made");
    if (!in_memory) unlink(path);
    write(content);
    fsync(descriptor_);  // what is not on the disk yet is read otherwise
}

TemporaryFile::~TemporaryFile() { close(descriptor_); }

void TemporaryFile::resize(size_t bytes) const {
    check(ftruncate(descriptor_, static_cast<off_t>(bytes)) == 0, "a file can be resized");
}

void TemporaryFile::write(const std::vector<uint8_t>& content) const {
    const ssize_t written = pwrite(descriptor_, content.data(), content.size(), 0);
    check(written == static_cast<ssize_t>(content.size()), "a file can be written");
}

namespace {

constexpr size_t kUnit = kDirectAlignment;
constexpr double kTimeout = 20;  // seconds; no read here takes so long

void check_rows(Random& random) {
    current_case() = "rows of tiles";
    for (int slices_per_group : {1, 2, 3}) {
        const RandomLinear made = random_linear(random, 137, 72, 8, WeightKind::kHalves, slices_per_group);
        const PackedLinear& w = made.packed;
        const TilePlaces places(w);
        std::vector<float> in_tile(w.slices() * kSlice), alone(in_tile);
        std::vector<uint8_t> bytes(row_bytes(w));
        for (int row = 0; row < w.rows; ++row) {
            dequantize_tile_row(w, row, in_tile.data());
            const int tile = row / kTileRows, lane = row % kTileRows;
            copy_upper(w, places.body(tile), lane, bytes.data());
            copy_lower(w, places.lower(tile), lane, bytes.data());
            dequantize_row(w, bytes.data(), alone.data());
            check(same_bits(in_tile.data(), alone.data(), alone.size()),
                  "a row alone is the row of its tile");
            for (int k = 0; k < w.columns; ++k) {
                check(static_cast<double>(alone[k]) == made.dense[row * w.columns + k],
                      "a row is what its integers stand for");
            }
        }
    }
}

// A file of random bytes and ranges of it of different lengths, some over what is read at once.
struct Ranges {
    std::vector<uint8_t> content;
    StreamSettings settings{};

    Ranges(Random& random, int buffers) {
        const size_t sizes[] = {kUnit, 300 * kUnit, 2 * kUnit, 257 * kUnit, kUnit};
        size_t at = kUnit;
        for (size_t bytes : sizes) {
            settings.ranges.push_back({static_cast<int64_t>(at), bytes, "range"});
            at += bytes;
        }
        content.resize(at);
        for (size_t i = 0; i < at; i += 61) content[i] = static_cast<uint8_t>(random.next());
        settings.every_step = 3;
        settings.buffers = buffers;
        settings.buffer_bytes = 300 * kUnit;
        settings.timeout = kTimeout;
    }

    // A step that must go well.
    void step(WeightStream& stream, bool all) const {
        stream.begin_step(all);
        for (size_t i = 0; i < (all ? settings.ranges.size() : settings.every_step); ++i) {
            const FileRange& range = settings.ranges[i];
            const uint8_t* found = stream.acquire();
            check(found != nullptr, "a range is read");
            check(std::memcmp(found, content.data() + range.offset, range.bytes) == 0,
                  "a range is the file's");
            stream.release();
        }
        stream.end_step();
    }
};

bool fails(WeightStream& stream, size_t ranges, const std::string& what) {
    stream.begin_step(true);
    for (size_t i = 0; i < ranges && stream.acquire() != nullptr; ++i) stream.release();
    check(stream.acquire() == nullptr, "after a failure there are no ranges");
    try {
        stream.end_step();
    } catch (const StreamError& error) {
        return std::string(error.what()).find(what) != std::string::npos;
    }
    return false;
}

// A file in memory has no asynchronous reads.
void check_ranges(Random& random, int buffers, bool in_memory) {
    current_case() =
        "ranges through " + std::to_string(buffers) + " buffers" + (in_memory ? ", in memory" : "");
    const Ranges ranges(random, buffers);
    const TemporaryFile file(ranges.content, in_memory);
    WeightStream stream(file.descriptor(), "the file", ranges.settings);
    for (int step = 0; step < 12; ++step) ranges.step(stream, random.below(2) == 0);

    // A step that is left before its end is followed by a whole one.
    stream.begin_step(true);
    stream.acquire();
    ranges.step(stream, true);

    file.resize(ranges.settings.ranges[3].offset);
    check(fails(stream, 4, "the file: reading range: only 0 of "), "a range past the end is an error");
    check(fails(stream, 4, "the file: reading range: only 0 of "), "so it is in the next step");
    file.write(ranges.content);
    for (int step = 0; step < 4; ++step) ranges.step(stream, true);

    // What fails while it is read ahead is read again when it is needed.
    stream.begin_step(false);
    for (size_t i = 0; i < ranges.settings.every_step; ++i) {
        check(stream.acquire() != nullptr, "a range is read");
        if (i + 1 == ranges.settings.every_step) file.resize(0);
        stream.release();
    }
    stream.end_step();
    usleep(20000);
    file.write(ranges.content);
    ranges.step(stream, true);
}

void check_ends(Random& random) {
    current_case() = "streams that end";
    const Ranges ranges(random, 3);
    const TemporaryFile file(ranges.content);
    for (int i = 0; i < 50; ++i) {
        WeightStream stream(file.descriptor(), "the file", ranges.settings);
        if (i % 4 == 1) stream.begin_step(true);
        if (i % 4 == 2) ranges.step(stream, true);
        if (i % 4 == 3) {
            stream.begin_step(true);
            stream.acquire();
        }
    }
}

void check_pace() {
    current_case() = "threads of a step";
    StreamPace pace(4);
    const auto runs = [&](int tokens, int steps, double waited_alone, double waited_together) {
        int alone = 0;
        for (int i = 0; i < steps; ++i) {
            const bool one = pace.alone(tokens);
            pace.note(tokens, one, 1.0, one ? waited_alone : waited_together);
            alone += one;
        }
        return alone;
    };
    check(runs(1, 20, 0.5, 0.8) == 20, "one thread is enough as long as it waits for the disk");
    check(runs(2, 20, 0.01, 0.1) == 1, "all threads run where one does not wait");
    check(runs(1, 20, 0.5, 0.8) == 20, "steps of other sizes do not matter");
    check(runs(2, 100, 0.01, 0.8) > 2 && runs(2, 100, 0.01, 0.8) < 10,
          "where all threads wait one is tried now and then");
    check(runs(2, 100, 0.5, 0.8) > 80, "and runs alone where it waits as well");
    check(runs(33, 20, 0.9, 0.9) == 0, "many tokens are computed by all threads");
    StreamPace single(1);
    check(!single.alone(1), "one thread is all there is");
}

// The tiles of a model in a file, some of them streamed: experts where there are slots for them.
class StreamedModel {
  public:
    StreamedModel(const Model& model, uint32_t streamed_layers, bool head, int slots = 0) : model_(model) {
        std::vector<uint8_t> content(kUnit);
        const auto add = [&](const PackedLinear& linear) {
            content.resize((content.size() + 63) / 64 * 64);
            const int64_t begin = static_cast<int64_t>(content.size());
            content.insert(content.end(), linear.tiles, linear.tiles + linear.bytes());
            return begin;
        };
        const auto end_section = [&] { content.resize((content.size() + kUnit - 1) / kUnit * kUnit); };
        StreamPlaces places;
        places.head = head;
        places.embedding_tiles = add(model.weights.embedding);
        places.head_tiles = add(model.weights.head);
        end_section();
        size_t largest = smallest_buffer(model.weights.head), largest_expert = 0;
        for (int layer = 0; layer < model.config.num_layers; ++layer) {
            StreamPlaces::Layer place{layer, static_cast<int64_t>(content.size()), 0, {}};
            LayerWeights& weights = model_.weights.layers[layer];
            const bool by_use = slots > 0 && model.config.has_mixture(layer);
            weights.experts_by_use = by_use ? model.config.mixture.experts : 0;
            for (int i = 0; i < weights.linear_count(); ++i) {
                if (!weights.by_use(i)) place.tiles.push_back(add(weights.linear(i)));
            }
            const size_t end = (content.size() + kUnit - 1) / kUnit * kUnit;
            place.bytes = end - static_cast<size_t>(place.offset);
            largest = std::max(largest, place.bytes);
            StreamPlaces::Experts experts{layer, {}};
            for (int i = 0; i < weights.linear_count(); ++i) {
                if (weights.by_use(i)) experts.tiles.push_back(add(weights.linear(i)));
            }
            end_section();
            for (int e = 0; e < weights.experts_by_use; ++e) {
                const ExpertRange range =
                    range_of_expert(weights.experts[e], &experts.tiles[e * kExpertLinears]);
                largest_expert = std::max(largest_expert, range.bytes);
            }
            if (by_use) places.experts.push_back(experts);
            if (streamed_layers >> layer & 1) places.layers.push_back(place);
        }
        file_ = std::make_unique<TemporaryFile>(content);
        settings_ = stream_weights(model_.weights, places, {2, largest, slots, largest_expert}, kTimeout);
    }

    const Model& model() const { return model_; }
    std::unique_ptr<WeightStream> open() const {
        return std::make_unique<WeightStream>(file_->descriptor(), "the file", settings_);
    }

  private:
    Model model_;
    std::unique_ptr<TemporaryFile> file_;
    StreamSettings settings_{};
};

void check_no_thread(Random& random) {
    current_case() = "a system without another thread";
    const Ranges ranges(random, 2);
    const TemporaryFile file(ranges.content, false);
    const DirectFile opened(file.descriptor(), "the file");
    AlignedBuffer into;
    into.allocate(kUnit);
    ReadThreads threads(opened);
    pthread_attr_t usual, huge;
    pthread_getattr_default_np(&usual);
    pthread_attr_init(&huge);
    pthread_attr_setstacksize(&huge, size_t{1} << 50);  // no address space has room for that
    pthread_setattr_default_np(&huge);
    ReadEnd ends[kMostReads];
    threads.start({3, static_cast<int64_t>(kUnit), kUnit, into.data()});
    check(threads.take(kTimeout, 1, ends) == 1 && ends[0].tag == 3, "a read ends that no thread can take");
    check(ends[0].problem.find("no thread") == 0, "it ends with what is wrong");
    pthread_setattr_default_np(&usual);
    threads.start({4, static_cast<int64_t>(kUnit), kUnit, into.data()});
    check(threads.take(kTimeout, 1, ends) == 1 && ends[0].problem.empty(), "the next is read");
    check(std::memcmp(into.data(), ranges.content.data() + kUnit, kUnit) == 0, "what is read is the file's");
    pthread_attr_destroy(&huge);
    pthread_attr_destroy(&usual);
}

void check_decoder(Random& random, const Kernels& kernels, Results& results) {
    const Model model = make_model(random, false);
    const std::vector<std::vector<Chunk>> steps = {
        {{0, 0, 90}, {1, 0, 3}}, {{0, 90, 1}, {1, 3, 1}, {2, 0, 1}}, {{1, 4, 40}}, {{0, 91, 1}}};
    Session resident(model, kernels, 1, KvType::kF16, 1);
    std::vector<std::vector<float>> expected;
    for (const std::vector<Chunk>& chunks : steps) expected.push_back(resident.run(chunks));
    for (uint32_t layers = 0; layers < 4; ++layers) {
        for (bool head : {false, true}) {
            current_case() = "streamed decoder " + std::to_string(layers) + (head ? " with head" : "");
            const StreamedModel streamed(model, layers, head);
            const int threads = 1 + static_cast<int>((layers + 2 * head) % 4);
            Session session(streamed.model(), kernels, threads, KvType::kF16, 2, streamed.open());
            for (size_t i = 0; i < steps.size(); ++i) {
                check(same_bits(session.run(steps[i]).data(), expected[i].data(), expected[i].size()),
                      "streamed weights give the bits of resident ones");
            }
            session.prepare(steps[3]);
            const AllocationCount allocations;
            session.step();
            check(allocations.count() == 0, "a step with streamed weights allocates nothing");
        }
    }
    for (const std::vector<float>& logits : expected) results.add(logits);
}

// A mixture whose experts are read when they are chosen, in as many rounds as the slots make of them.
void check_experts(Random& random, const Kernels& kernels) {
    const Model model = make_model(random, true);
    std::vector<std::vector<Chunk>> steps = {{{0, 0, 90}, {1, 0, 3}}, {{0, 90, 1}, {1, 3, 1}, {2, 0, 1}}};
    for (int t = 4; t < 30; ++t) steps.push_back({{1, t, 1}});
    current_case() = "experts in memory";
    Session resident(model, kernels, 1, KvType::kF16, 1);
    std::vector<std::vector<float>> expected;
    for (const std::vector<Chunk>& chunks : steps) expected.push_back(resident.run(chunks));
    const int experts = model.config.mixture.experts;
    for (int slots = 2; slots <= experts; ++slots) {
        for (uint32_t layers : {0u, 2u, 3u}) {
            current_case() =
                "experts in " + std::to_string(slots) + " slots, layers " + std::to_string(layers);
            const StreamedModel streamed(model, layers, layers == 3, slots);
            Session session(streamed.model(), kernels, 1 + slots % 4, KvType::kF16, 2, streamed.open());
            for (size_t i = 0; i < steps.size(); ++i) {
                check(same_bits(session.run(steps[i]).data(), expected[i].data(), expected[i].size()),
                      "streamed experts give the bits of resident ones");
                if (i > 0) continue;
                const ExpertCounts first = session.decoder().expert_counts();
                check(first.needed == static_cast<uint64_t>(experts) && first.read == first.needed,
                      "a step reads each of the experts that it needs once");
            }
            const ExpertCounts counts = session.decoder().expert_counts();
            check(slots < experts
                      ? counts.read > static_cast<uint64_t>(experts) && counts.read < counts.needed
                      : counts.read == static_cast<uint64_t>(experts),
                  "what is in memory is not read again");
            session.prepare(steps.back());
            const AllocationCount allocations;
            session.step();
            check(allocations.count() == 0, "a step with streamed experts allocates nothing");
        }
    }
}

}  // namespace

void test_stream(const Kernels& kernels, Results& results) {
    Random random(8);
    check_rows(random);
    for (int buffers : {2, 3, 7}) {
        for (bool in_memory : {false, true}) check_ranges(random, buffers, in_memory);
    }
    check_ends(random);
    check_no_thread(random);
    check_pace();
    check_decoder(random, kernels, results);
    check_experts(random, kernels);
}

}  // namespace kernel_test
