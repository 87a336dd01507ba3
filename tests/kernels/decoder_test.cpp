// A whole small decoder: the same bits however its tokens are run, and no allocation in a step.
#include "../../runtime/kernels/decoder.h"

#include <algorithm>
#include <cmath>
#include <list>
#include <thread>

#include "check.h"

namespace kernel_test {
namespace {

using namespace nybble;

constexpr int kPosition = 320;  // the longest context: over one segment of 256
constexpr int kSequences = 4;
constexpr int kBlocks = kPosition / kPageTokens;
constexpr int kGroups = 2;  // of layers with one window

// Sizes that fill no tile, slice or register; every kind of weight; two windows.
struct Model {
    DecoderConfig config;
    DecoderWeights weights;
    std::list<RandomLinear> storage;

    const PackedLinear& linear(Random& random, int rows, int columns, int bits, WeightKind kind, int group) {
        storage.push_back(random_linear(random, rows, columns, bits, kind, group));
        return storage.back().packed;
    }
};

std::vector<float> padded(std::vector<float> values) {
    values.resize(round_up(static_cast<int>(values.size()), kSlice));
    return values;
}

Model make_model(Random& random, bool capped) {
    Model model;
    DecoderConfig& c = model.config;
    c.vocab_size = 100;
    c.hidden_size = 72;
    c.intermediate_size = 104;
    c.num_layers = 2;
    c.num_heads = 4;
    c.num_kv_heads = 2;
    c.head_dim = 20;
    c.max_position = kPosition;
    c.norm_eps = 1e-5f;
    c.activation = capped ? Activation::kGeluTanh : Activation::kSilu;
    c.attention_softcap = capped ? 4.0f : 0.0f;
    c.logit_softcap = capped ? 6.0f : 0.0f;
    c.embedding_scale = capped ? 8.5f : 1.0f;
    c.softmax_scale = 0.25f;
    for (float frequency = 1.0f; c.inv_freq.size() < 8; frequency *= 0.25f) c.inv_freq.push_back(frequency);
    c.window_of_layer = {0, 48};
    c.group_of_layer = {0, 1};
    c.num_groups = kGroups;

    constexpr WeightKind kKinds[] = {WeightKind::kSymmetric, WeightKind::kZeroPoint, WeightKind::kMinimum,
                                     WeightKind::kNf4};
    const int q = c.num_heads * c.head_dim, kv = c.num_kv_heads * c.head_dim;
    const int rows[] = {q, kv, kv, c.hidden_size, c.intermediate_size, c.intermediate_size, c.hidden_size};
    const int columns[] = {c.hidden_size, c.hidden_size, c.hidden_size,      q,
                           c.hidden_size, c.hidden_size, c.intermediate_size};
    model.weights.layers.resize(c.num_layers);
    int next = 0;
    for (LayerWeights& layer : model.weights.layers) {
        for (int i = 0; i < kLinearCount; ++i, ++next) {
            const int bits = next % 5 == 3 ? 8 : 4;
            const WeightKind kind = kKinds[next % (bits == 8 ? 2 : 4)];
            layer.linears[i] = model.linear(random, rows[i], columns[i], bits, kind, 1 + next % 3);
            if (next % 2 == 0) layer.biases[i] = padded(random.uniforms(rows[i], 0.1f));
            if (i == kQ || i == kV || i == kDown) {
                for (int column : shuffled(random, columns[i])) layer.permutations[i].push_back(column);
            }
        }
        // Inputs are shared where permutations are equal, in any order: here by the first and the last.
        if (&layer == &model.weights.layers[1]) layer.permutations[kV] = layer.permutations[kQ];
        layer.input_norm = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
        layer.post_norm = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
        if (!capped) layer.q_norm = padded(random.uniforms(c.head_dim, 0.3f, 1.0f));
        if (!capped) layer.k_norm = padded(random.uniforms(c.head_dim, 0.3f, 1.0f));
    }
    model.weights.embedding = model.linear(random, c.vocab_size, c.hidden_size, 8, WeightKind::kSymmetric, 2);
    model.weights.head = model.linear(random, c.vocab_size, c.hidden_size, 8, WeightKind::kSymmetric, 1);
    model.weights.final_norm = padded(random.uniforms(c.hidden_size, 0.3f, 1.0f));
    return model;
}

struct Chunk {
    int sequence, begin, count;
};

// A decoder and the pages of its sequences, in any order.
class Session {
  public:
    Session(const Model& model, const Kernels& kernels, int threads, KvType type, uint64_t seed)
        : window_(model.config.window_of_layer), decoder_(model.config, model.weights, threads, kernels) {
        Random random(seed);
        for (int page : shuffled(random, kGroups * kSequences * kBlocks)) table_.push_back(page);
        decoder_.allocate_kv(kGroups * kSequences * kBlocks, type);
    }

    // Arrays of a step over chunks, with the logits of every token asked for.
    void prepare(const std::vector<Chunk>& chunks) {
        ids_.clear(), past_.clear(), slots_.clear(), rows_.clear();
        lengths_.assign(1, 0);
        step_table_.clear();
        for (const Chunk& chunk : chunks) {
            past_.push_back(chunk.begin);
            for (int t = chunk.begin; t < chunk.begin + chunk.count; ++t) {
                rows_.push_back(static_cast<int32_t>(ids_.size()));
                ids_.push_back((t * 37 + t * t % 11 + chunk.sequence * 13) % 100);
            }
            lengths_.push_back(static_cast<int32_t>(ids_.size()));
        }
        for (int group = 0; group < kGroups; ++group) {
            for (const Chunk& chunk : chunks) {
                const int32_t* pages = table_.data() + (group * kSequences + chunk.sequence) * kBlocks;
                // Pages before the window have been given back.
                const int window = window_[group],
                          first = window > 0 ? std::max(0, chunk.begin - window + 1) : 0;
                for (int block = 0; block < kBlocks; ++block) {
                    step_table_.push_back(block < first / kPageTokens ? -1 : pages[block]);
                }
                for (int t = chunk.begin; t < chunk.begin + chunk.count; ++t) {
                    slots_.push_back(pages[t / kPageTokens] * kPageTokens + t % kPageTokens);
                }
            }
        }
        input_ = {ids_.data(),
                  lengths_.data(),
                  past_.data(),
                  step_table_.data(),
                  slots_.data(),
                  rows_.data(),
                  static_cast<int>(ids_.size()),
                  static_cast<int>(chunks.size()),
                  kBlocks,
                  static_cast<int>(rows_.size())};
        logits_.assign(rows_.size() * decoder_.logit_stride(), NAN);
    }
    void step() { decoder_.step(input_, logits_.data()); }

    std::vector<float> run(const std::vector<Chunk>& chunks) {
        prepare(chunks);
        step();
        return logits_;
    }

    // The first pages of one sequence become another's too.
    void share(int from, int to, int pages) {
        for (int group = 0; group < kGroups; ++group) {
            const auto of = [&](int s) { return table_.begin() + (group * kSequences + s) * kBlocks; };
            std::copy_n(of(from), pages, of(to));
        }
    }

    size_t stride() const { return decoder_.logit_stride(); }
    Decoder& decoder() { return decoder_; }

  private:
    std::vector<int> window_;  // of each group
    Decoder decoder_;
    std::vector<int32_t> table_, ids_, past_, lengths_, slots_, rows_, step_table_;
    std::vector<float> logits_;
    StepInput input_{};
};

// Every sequence in random chunks beside the others, each against its logits when it ran alone at once.
void check_batches(Session& session, Random& random, const std::vector<std::vector<float>>& whole) {
    int done[kSequences] = {};
    for (bool left = true; left;) {
        std::vector<Chunk> chunks;
        left = false;
        for (int s = 0; s < kSequences; ++s) {
            const int length = static_cast<int>(whole[s].size() / session.stride());
            const int most = random.below(3) == 0 ? 1 : random.below(2) == 0 ? 9 : 70;
            const int count = std::min(length - done[s], 1 + random.below(most));
            left = left || done[s] < length;
            if (count > 0 && random.below(4) > 0) chunks.push_back({s, done[s], count});
        }
        std::reverse(chunks.begin(), chunks.end());
        const std::vector<float> logits = session.run(chunks);
        const float* at = logits.data();
        for (const Chunk& chunk : chunks) {
            const size_t n = chunk.count * session.stride();
            check(same_bits(at, whole[chunk.sequence].data() + chunk.begin * session.stride(), n),
                  "chunks in a batch give the bits of the whole alone");
            at += n;
            done[chunk.sequence] += chunk.count;
        }
    }
}

// Sequences that share a segment read it together when they decode.
void check_shared(Session& session, Random& random) {
    constexpr int kCount = 12;
    session.run({{0, 0, kSegmentTokens + 7}});
    int begin[kSequences];
    std::vector<std::vector<float>> alone;
    for (int s = 0; s < kSequences; ++s) {
        session.share(0, s, kSegmentTokens / kPageTokens);
        begin[s] = s == 0 ? kSegmentTokens + 7 : kSegmentTokens;
        alone.push_back(session.run({{s, begin[s], kCount}}));
    }
    int done[kSequences] = {};
    for (int step = 0; step < 2 * kCount; ++step) {
        std::vector<Chunk> chunks;
        for (int s = 0; s < kSequences; ++s) {
            if (done[s] < kCount && random.below(4) > 0) chunks.push_back({s, begin[s] + done[s], 1});
        }
        if (chunks.empty()) continue;
        const std::vector<float> logits = session.run(chunks);
        const float* at = logits.data();
        for (const Chunk& chunk : chunks) {
            check(same_bits(at, alone[chunk.sequence].data() + done[chunk.sequence]++ * session.stride(),
                            session.stride()),
                  "pages read for several sequences at once give the bits of one alone");
            at += session.stride();
        }
    }
}

// Two decoders of one process in threads of their own.
void check_together(const Model& model, const Kernels& kernels,
                    const std::vector<std::vector<float>>& whole) {
    const auto steps = [&](int sequence) {
        Session session(model, kernels, 3, KvType::kF16, 20 + sequence);
        const int length = static_cast<int>(whole[sequence].size() / session.stride());
        for (int t = 0; t < length; ++t) {
            check(same_bits(session.run({{sequence, t, 1}}).data(),
                            whole[sequence].data() + t * session.stride(), session.stride()),
                  "a decoder beside another gives the bits of one alone");
        }
    };
    std::thread other(steps, 1);
    steps(3);
    other.join();
}

void check_allocations(Session& session) {
    session.decoder().reserve(64, kSequences, 64);
    std::vector<Chunk> prompts = {{0, 0, 24}, {1, 0, 30}, {2, 0, 9}, {3, 0, 1}};
    session.prepare(prompts);
    {
        const AllocationCount allocations;
        session.step();
        check(allocations.count() == 0, "a prefill of reserved size allocates nothing");
    }
    for (Chunk& chunk : prompts) chunk = {chunk.sequence, chunk.count, 1};
    session.prepare(prompts);
    {
        const AllocationCount allocations;
        session.step();
        check(allocations.count() == 0, "a decode allocates nothing");
    }
    session.prepare({{0, 25, 200}});
    const AllocationCount allocations;
    session.step();
    check(allocations.count() > 0, "a step over what was reserved allocates, and that is counted");
}

}  // namespace

void test_decoder(const Kernels& kernels, Results& results) {
    constexpr int kLengths[kSequences] = {280, 40, 17, 70};
    for (bool capped : {false, true}) {
        Random random(capped ? 5 : 4);
        const Model model = make_model(random, capped);
        for (KvType type : {KvType::kF32, KvType::kF16, KvType::kInt8}) {
            if (capped && type == KvType::kF32) continue;
            current_case() = std::string("decoder") + (capped ? " with caps" : "") + ", cache type " +
                             std::to_string(static_cast<int>(type));
            std::vector<std::vector<float>> whole;
            Session first(model, kernels, 1, type, 1);
            for (int s = 0; s < kSequences; ++s) whole.push_back(first.run({{s, 0, kLengths[s]}}));
            for (float x : whole[0]) check(std::isfinite(x), "logits are finite");
            // Every number of threads for one of the cache types, one number for the others.
            const bool all = type == KvType::kF16 && !capped;
            for (int threads = 1; threads <= 4; ++threads) {
                if (!all && threads != 2 + capped) continue;
                Session session(model, kernels, threads, type, 1 + threads);
                check_batches(session, random, whole);
            }
            // One by one: from token 256 on, a row's segments are computed apart.
            Session single(model, kernels, 4, type, 9);
            single.run({{0, 0, 250}});
            for (int t = 250; t < kLengths[0]; ++t) {
                check(same_bits(single.run({{0, t, 1}}).data(), whole[0].data() + t * single.stride(),
                                single.stride()),
                      "a token alone gives the bits of the whole");
            }
            Session shared(model, kernels, 3, type, 7);
            check_shared(shared, random);
            if (all) check_together(model, kernels, whole);
            for (const std::vector<float>& logits : whole) results.add(logits);
        }
        current_case() = "allocations";
        for (int threads : {1, 3}) {
            Session session(model, kernels, threads, KvType::kF16, 1);
            check_allocations(session);
        }
    }
}

}  // namespace kernel_test
