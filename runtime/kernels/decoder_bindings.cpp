// The decoder's Python face. Every array is checked here; nothing in the kernels checks again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>

#include "arguments.h"
#include "decoder.h"
#include "direct_file.h"
#include "stream_layout.h"
#include "written_pages.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nybble {
namespace {

std::vector<float> padded(const Floats1& values, size_t expected, const char* name) {
    check_size(name, values.size(), expected);
    std::vector<float> result(round_up(static_cast<int>(expected), kSlice), 0.0f);
    std::copy(values.data(), values.data() + expected, result.begin());
    return result;
}

// Collects weights layer by layer from Python, keeping the arrays they point into alive.
class Builder {
  public:
    Builder(const nb::dict& config) {
        const auto integer = [&](const char* key) { return nb::cast<int>(config[key]); };
        const auto real = [&](const char* key) { return nb::cast<float>(config[key]); };
        c_.vocab_size = integer("vocab_size");
        c_.hidden_size = integer("hidden_size");
        c_.intermediate_size = integer("intermediate_size");
        c_.num_layers = integer("num_layers");
        c_.num_heads = integer("num_heads");
        c_.num_kv_heads = integer("num_kv_heads");
        c_.head_dim = integer("head_dim");
        c_.max_position = integer("max_position");
        c_.norm_eps = real("norm_eps");
        c_.activation = static_cast<Activation>(integer("activation"));
        c_.attention_softcap = real("attention_softcap");
        c_.logit_softcap = real("logit_softcap");
        c_.embedding_scale = real("embedding_scale");
        c_.softmax_scale = real("softmax_scale");
        c_.residual_scale = real("residual_scale");
        c_.qk_norm_per_head = nb::cast<bool>(config["qk_norm_per_head"]);
        for (const auto& [inv_freq, factor] :
             nb::cast<std::vector<std::pair<std::vector<float>, float>>>(config["ropes"])) {
            c_.ropes.push_back({inv_freq, factor});
        }
        c_.rope_of_layer = nb::cast<std::vector<int>>(config["rope_of_layer"]);
        c_.window_of_layer = nb::cast<std::vector<int>>(config["window_of_layer"]);
        c_.group_of_layer = nb::cast<std::vector<int>>(config["group_of_layer"]);
        c_.num_groups = integer("num_groups");
        c_.is_mixture = nb::cast<std::vector<bool>>(config["is_mixture"]);
        if (!c_.is_mixture.empty()) read_mixture(nb::cast<nb::dict>(config["mixture"]));
        const int sizes[] = {c_.vocab_size,   c_.hidden_size, c_.num_layers,   c_.num_heads,
                             c_.num_kv_heads, c_.head_dim,    c_.max_position, c_.num_groups};
        for (int size : sizes) {
            if (size < 1) fail("config", "has a size under 1");
        }
        if (c_.num_heads % c_.num_kv_heads != 0) fail("config", "has heads that do not divide into groups");
        if (c_.head_dim > 512) fail("config", "has head_dim over 512");
        for (const Rope& rope : c_.ropes) {
            if (2 * rope.inv_freq.size() > static_cast<size_t>(c_.head_dim))
                fail("ropes", "has one longer than half a head");
        }
        check_size("rope_of_layer", c_.rope_of_layer.size(), c_.num_layers);
        check_range("rope_of_layer", c_.rope_of_layer.data(), c_.rope_of_layer.size(), -1,
                    static_cast<int>(c_.ropes.size()));
        check_size("window_of_layer", c_.window_of_layer.size(), c_.num_layers);
        check_size("group_of_layer", c_.group_of_layer.size(), c_.num_layers);
        check_range("group_of_layer", c_.group_of_layer.data(), c_.group_of_layer.size(), 0, c_.num_groups);
        w_.layers.resize(c_.num_layers);
        for (int layer = 0; layer < c_.num_layers; ++layer) {
            if (c_.has_mixture(layer)) {
                w_.layers[layer].experts.resize(c_.mixture.all());
            } else if (c_.intermediate_size < 1) {
                fail("config", "has a size under 1");
            }
        }
        norms_set_.resize(c_.num_layers);
    }

    void set_linear(int layer, int index, const Tiles& tiles, int bits, int kind, int slices_per_group,
                    const nb::object& bias, const nb::object& permutation) {
        check_range("layer", &layer, 1, 0, c_.num_layers);
        LayerWeights& w = w_.layers[layer];
        check_range("index", &index, 1, 0, w.linear_count());
        const auto [rows, columns] = shape_of(w, index);
        w.linear(index) = packed_linear("tiles", tiles, rows, columns, bits, kind, slices_per_group);
        if (!bias.is_none()) {
            if (index >= kGate && !w.experts.empty()) fail("bias", "is an expert's, which have none");
            w.biases[index] = padded(array_argument<Floats1>(bias, "bias"), rows, "bias");
        }
        if (!permutation.is_none()) {
            const Ints1 p = array_argument<Ints1>(permutation, "permutation");
            check_size("permutation", p.size(), columns);
            check_range("permutation", p.data(), p.size(), 0, columns);
            w.permutation(index).assign(p.data(), p.data() + p.size());
        }
        keep_.push_back(nb::cast(tiles));
    }

    // The router's rows [experts * hidden_size] of a layer's mixture, and the shared expert's gate or None.
    void set_gates(int layer, const Floats1& router, const nb::object& shared_gate) {
        check_range("layer", &layer, 1, 0, c_.num_layers);
        LayerWeights& w = w_.layers[layer];
        if (w.experts.empty()) fail("layer", "has no mixture of experts");
        w.router = padded_rows(router, c_.mixture.experts, "router");
        if (shared_gate.is_none() == c_.mixture.shared()) fail("shared_gate", "is not what the mixture has");
        if (!shared_gate.is_none()) {
            w.shared_gate =
                padded_rows(array_argument<Floats1>(shared_gate, "shared_gate"), 1, "shared_gate");
        }
    }

    // A layer's norms; None where it has none.
    void set_norms(int layer, const nb::object& before_attention, const nb::object& after_attention,
                   const nb::object& before_mlp, const nb::object& after_mlp, const nb::object& q,
                   const nb::object& k) {
        if (layer < 0 || layer >= c_.num_layers) fail("layer", "is out of range");
        LayerWeights& w = w_.layers[layer];
        const auto set = [](std::vector<float>& norm, const nb::object& given, int size, const char* name) {
            if (!given.is_none()) norm = padded(array_argument<Floats1>(given, name), size, name);
        };
        const bool per_head = c_.qk_norm_per_head;
        if (!per_head && (q.is_none() || k.is_none())) fail("q", "and k need norms over all heads");
        set(w.before_attention, before_attention, c_.hidden_size, "before_attention");
        set(w.after_attention, after_attention, c_.hidden_size, "after_attention");
        set(w.before_mlp, before_mlp, c_.hidden_size, "before_mlp");
        set(w.after_mlp, after_mlp, c_.hidden_size, "after_mlp");
        set(w.q_norm, q, c_.head_dim * (per_head ? 1 : c_.num_heads), "q_norm");
        set(w.k_norm, k, c_.head_dim * (per_head ? 1 : c_.num_kv_heads), "k_norm");
        norms_set_[layer] = true;
    }

    void set_ends(const Floats1& norm, const Tiles& embedding, int embedding_slices, const Tiles& head,
                  int head_slices) {
        w_.final_norm = padded(norm, c_.hidden_size, "final_norm");
        w_.embedding =
            packed_linear("embedding", embedding, c_.vocab_size, c_.hidden_size, 8, 0, embedding_slices);
        w_.head = packed_linear("head", head, c_.vocab_size, c_.hidden_size, 8, 0, head_slices);
        keep_.push_back(nb::cast(embedding));
        keep_.push_back(nb::cast(head));
    }

    // A layer whose tiles are read in every step: its section of the file, and where its tiles are in the
    // file. In ascending order, when its linear layers have been set.
    void stream_layer(int layer, int64_t offset, int64_t bytes, const std::vector<int64_t>& tiles) {
        const int first = places_.layers.empty() ? 0 : places_.layers.back().layer + 1;
        check_range("layer", &layer, 1, first, c_.num_layers);
        LayerWeights& w = w_.layers[layer];
        check_size("tiles", tiles.size(), w.linear_count());
        constexpr int64_t kUnit = kDirectAlignment;
        if (offset < 0 || bytes < kUnit || bytes > kMostBytes || offset > kMostBytes || offset % kUnit ||
            bytes % kUnit) {
            fail("section", "is not made of whole units of the file");
        }
        for (int i = 0; i < w.linear_count(); ++i) {
            const int64_t begin = tiles[i] - offset;
            const int64_t size = static_cast<int64_t>(w.linear(i).bytes());
            if (size == 0) fail("layer " + std::to_string(layer), "lacks a linear layer");
            if (begin < 0 || begin > bytes - size) fail("tiles", "are out of their section");
        }
        places_.layers.push_back({layer, offset, static_cast<size_t>(bytes), tiles});
    }

    // Embedding and head, where their tiles are in the file. When they have been set.
    void stream_head(int64_t embedding_tiles, int64_t head_tiles) {
        if (w_.head.rows == 0) fail("head", "has not been set");
        for (int64_t offset : {embedding_tiles, head_tiles}) {
            if (offset < 0 || offset > kMostBytes) fail("tiles", "are out of the file");
        }
        places_.head = true;
        places_.embedding_tiles = embedding_tiles;
        places_.head_tiles = head_tiles;
    }

    const DecoderConfig& config() const { return c_; }

    // Makes the stream of what is streamed, after which `take` gives weights that go with it.
    std::unique_ptr<WeightStream> open_stream(int descriptor, const std::string& file, int buffers,
                                              int64_t buffer_bytes, double timeout) {
        if (buffers < 2 || buffers > 1024) fail("buffers", "is out of range");
        if (!(timeout > 0 && timeout < 1e6)) fail("timeout", "is out of range");
        int64_t least = places_.head ? static_cast<int64_t>(smallest_buffer(w_.head)) : 1;
        for (const StreamPlaces::Layer& layer : places_.layers) {
            least = std::max(least, static_cast<int64_t>(layer.bytes));
        }
        if (buffer_bytes < least || buffer_bytes > kMostBytes) {
            fail("buffer_bytes",
                 "is " + std::to_string(buffer_bytes) + "; expected at least " + std::to_string(least));
        }
        StreamSettings settings =
            stream_weights(w_, places_, buffers, static_cast<size_t>(buffer_bytes), timeout);
        try {
            return std::make_unique<WeightStream>(descriptor, file, std::move(settings));
        } catch (const std::system_error& error) {
            fail("file", error.what());
        }
    }

    DecoderWeights take(std::vector<nb::object>& keep) {
        for (int layer = 0; layer < c_.num_layers; ++layer) {
            LayerWeights& w = w_.layers[layer];
            for (int i = 0; i < w.linear_count(); ++i) {
                if (w.linear(i).rows == 0) fail("layer " + std::to_string(layer), "lacks a linear layer");
            }
            if (!w.experts.empty() && w.router.empty()) {
                fail("layer " + std::to_string(layer), "lacks a router");
            }
        }
        for (bool set : norms_set_) {
            if (!set) fail("norms", "are missing");
        }
        if (w_.final_norm.empty()) fail("final_norm", "is missing");
        keep = std::move(keep_);
        return std::move(w_);
    }

  private:
    static constexpr int64_t kMostBytes = int64_t{1} << 50;  // so that sums of them do not overflow
    static constexpr int kMostExperts = 1 << 16;

    struct Shape {
        int rows, columns;
    };

    void read_mixture(const nb::dict& given) {
        const auto integer = [&](const char* key) { return nb::cast<int>(given[key]); };
        Mixture& m = c_.mixture;
        m.experts = integer("num_experts");
        m.per_token = integer("experts_per_token");
        m.size = integer("intermediate_size");
        m.shared_size = integer("shared_intermediate_size");
        m.normalized = nb::cast<bool>(given["normalized"]);
        if (m.experts < 1 || m.experts > kMostExperts) fail("mixture", "has too few experts, or too many");
        if (m.per_token < 1 || m.per_token > m.experts) fail("mixture", "has too many experts for a token");
        if (m.size < 1 || m.shared_size < 0) fail("mixture", "has a size under 1");
        check_size("is_mixture", c_.is_mixture.size(), c_.num_layers);
    }

    // Of a layer's linear layer, in the order that data meets them.
    Shape shape_of(const LayerWeights& w, int index) const {
        const int hidden = c_.hidden_size, q = c_.num_heads * c_.head_dim, kv = c_.num_kv_heads * c_.head_dim;
        const int rows[] = {q, kv, kv, hidden}, columns[] = {hidden, hidden, hidden, q};
        if (index < kGate) return {rows[index], columns[index]};
        const int of_mlp = index - kGate, expert = of_mlp / kExpertLinears;
        const int inner = w.experts.empty() ? c_.intermediate_size : c_.mixture.size_of(expert);
        return of_mlp % kExpertLinears == kExpertDown ? Shape{hidden, inner} : Shape{inner, hidden};
    }

    std::vector<float> padded_rows(const Floats1& values, int rows, const char* name) const {
        const size_t columns = c_.hidden_size, stride = round_up(c_.hidden_size, kSlice);
        check_size(name, values.size(), rows * columns);
        std::vector<float> result(rows * stride, 0.0f);
        for (int i = 0; i < rows; ++i) {
            std::copy_n(values.data() + i * columns, columns, result.begin() + i * stride);
        }
        return result;
    }

    DecoderConfig c_;
    DecoderWeights w_;
    StreamPlaces places_;
    std::vector<bool> norms_set_;
    std::vector<nb::object> keep_;
};

// The file that streamed weights are read from, and how.
struct StreamFile {
    int descriptor;
    std::string file;
    int buffers;
    int64_t buffer_bytes;
    double timeout;  // seconds
};

class PyDecoder {
  public:
    PyDecoder(Builder& builder, int threads, const std::string& isa, const StreamFile* stream) {
        if (threads < 1 || threads > 1024)
            fail("threads", "is " + std::to_string(threads) + "; expected 1 to 1024");
        std::unique_ptr<WeightStream> opened;
        if (stream != nullptr) {
            opened = builder.open_stream(stream->descriptor, stream->file, stream->buffers,
                                         stream->buffer_bytes, stream->timeout);
        }
        DecoderWeights weights = builder.take(keep_);
        const Kernels& kernels = select_kernels(isa);
        try {
            decoder_ = std::make_unique<Decoder>(builder.config(), std::move(weights), threads, kernels,
                                                 std::move(opened));
        } catch (const std::system_error& error) {
            fail("threads", "is " + std::to_string(threads) + "; the system started fewer: " + error.what());
        }
    }

    ~PyDecoder() {
        const nb::gil_scoped_release release;  // threads are waited for
        decoder_.reset();
    }

    void allocate_kv(int num_blocks, int type) {
        constexpr int kMost = INT32_MAX / kPageTokens;  // slots are int32
        if (num_blocks < 1 || num_blocks > kMost) {
            fail("num_blocks",
                 "is " + std::to_string(num_blocks) + "; expected 1 to " + std::to_string(kMost));
        }
        if (type < 0 || type > 2) fail("kv_dtype", "is unknown");
        decoder_->allocate_kv(num_blocks, static_cast<KvType>(type));
        written_.allocate(num_blocks);
    }

    void reserve(int tokens, int sequences, int rows) {
        const int sizes[] = {tokens, sequences, rows};
        check_range("sizes", sizes, 3, 0, 1 << 30);
        decoder_->reserve(tokens, sequences, rows);
    }

    void step(const Ints1& token_ids, const Ints1& cu_seqlens, const Ints1& past_lens,
              const Ints3& block_table, const Ints2& slot_mapping, const Ints1& logit_rows,
              const FloatsOut& logits) {
        const DecoderConfig& c = decoder_->config();
        if (decoder_->num_blocks() == 0) fail("cache", "has not been allocated");
        StepInput in{};
        in.tokens = static_cast<int>(token_ids.size());
        in.sequences = static_cast<int>(past_lens.size());
        in.rows = static_cast<int>(logit_rows.size());
        in.max_blocks = static_cast<int>(block_table.shape(2));
        check_size("cu_seqlens", cu_seqlens.size(), past_lens.size() + 1);
        check_range("cu_seqlens", cu_seqlens.data(), cu_seqlens.size(), 0, in.tokens + 1);
        check_range("token_ids", token_ids.data(), token_ids.size(), 0, c.vocab_size);
        if (block_table.shape(0) != static_cast<size_t>(c.num_groups) ||
            block_table.shape(1) != past_lens.size()) {
            fail("block_table", "has the wrong number of groups or sequences");
        }
        if (slot_mapping.shape(0) != static_cast<size_t>(c.num_groups) ||
            slot_mapping.shape(1) != token_ids.size()) {
            fail("slot_mapping", "has the wrong number of groups or tokens");
        }
        check_range("block_table", block_table.data(), block_table.size(), -1, decoder_->num_blocks());
        check_range("slot_mapping", slot_mapping.data(), slot_mapping.size(), -1,
                    decoder_->num_blocks() * kPageTokens);
        check_range("logit_rows", logit_rows.data(), logit_rows.size(), 0, in.tokens);
        check_range("past_lens", past_lens.data(), past_lens.size(), 0, c.max_position);
        check_sequences(c, cu_seqlens.data(), past_lens.data(), block_table.data(), in);
        check_slots(cu_seqlens.data(), slot_mapping.data(), in);
        if (logits.shape(0) < logit_rows.size() ||
            logits.shape(1) != static_cast<size_t>(decoder_->logit_stride())) {
            fail("logits", "has the wrong shape");
        }
        in.token_ids = token_ids.data();
        in.cu_seqlens = cu_seqlens.data();
        in.past_lens = past_lens.data();
        in.block_table = block_table.data();
        in.slot_mapping = slot_mapping.data();
        in.logit_rows = logit_rows.data();
        nb::gil_scoped_release release;
        decoder_->step(in, logits.data());
    }

    // Pages of a window group: page p of another group's layers is another page.
    void copy_blocks(const Ints1& src, const Ints1& dst, int group) {
        const std::vector<int> layers = layers_of(group);
        check_size("dst", dst.size(), src.size());
        check_range("src", src.data(), src.size(), 0, decoder_->num_blocks());
        check_range("dst", dst.data(), dst.size(), 0, decoder_->num_blocks());
        const size_t bytes = decoder_->kv_shape().page_bytes();
        for (int layer : layers) {
            uint8_t* pages = decoder_->pages(layer);
            for (size_t i = 0; i < src.size(); ++i) {
                std::memmove(pages + dst.data()[i] * bytes, pages + src.data()[i] * bytes, bytes);
            }
        }
    }

    // Page after page, each with the group's layers in order.
    nb::bytes read_blocks(const Ints1& ids, int group) const {
        const std::vector<int> layers = layers_of(group);
        check_range("ids", ids.data(), ids.size(), 0, decoder_->num_blocks());
        const size_t bytes = decoder_->kv_shape().page_bytes();
        std::string data(ids.size() * layers.size() * bytes, '\0');
        char* out = data.data();
        for (size_t i = 0; i < ids.size(); ++i) {
            for (int layer : layers) {
                std::memcpy(out, decoder_->pages(layer) + ids.data()[i] * bytes, bytes);
                out += bytes;
            }
        }
        return nb::bytes(data.data(), data.size());
    }

    void write_blocks(const Ints1& ids, const nb::bytes& data, int group) {
        const std::vector<int> layers = layers_of(group);
        check_range("ids", ids.data(), ids.size(), 0, decoder_->num_blocks());
        const size_t bytes = decoder_->kv_shape().page_bytes();
        check_size("data", data.size(), ids.size() * layers.size() * bytes);
        const char* in = data.c_str();
        for (size_t i = 0; i < ids.size(); ++i) {
            for (int layer : layers) {
                std::memcpy(decoder_->pages(layer) + ids.data()[i] * bytes, in, bytes);
                in += bytes;
            }
        }
    }

    std::vector<int32_t> best_tokens() const { return decoder_->best_tokens(); }
    int logit_stride() const { return decoder_->logit_stride(); }
    size_t page_bytes() const { return decoder_->kv_shape().page_bytes(); }
    std::string isa() const { return decoder_->kernels().name; }
    int threads() const { return decoder_->threads(); }
    size_t step_bytes() const { return decoder_->step_bytes(); }

  private:
    std::vector<int> layers_of(int group) const {
        const DecoderConfig& c = decoder_->config();
        check_range("group", &group, 1, 0, c.num_groups);
        std::vector<int> layers;
        for (int layer = 0; layer < c.num_layers; ++layer) {
            if (c.group_of_layer[layer] == group) layers.push_back(layer);
        }
        return layers;
    }

    // Each sequence has tokens in ascending order, stays in the context, and has every page it reads mapped.
    void check_sequences(const DecoderConfig& c, const int32_t* cu, const int32_t* past, const int32_t* table,
                         const StepInput& in) const {
        if (cu[0] != 0 || cu[in.sequences] != in.tokens)
            fail("cu_seqlens", "does not run from 0 to the tokens");
        for (int s = 0; s < in.sequences; ++s) {
            if (cu[s + 1] < cu[s]) fail("cu_seqlens", "falls at index " + std::to_string(s + 1));
            const int64_t end = static_cast<int64_t>(past[s]) + cu[s + 1] - cu[s];
            if (end > c.max_position) {
                fail("past_lens", "plus new tokens is " + std::to_string(end) + " for sequence " +
                                      std::to_string(s) + "; the context is " +
                                      std::to_string(c.max_position));
            }
            if (end > static_cast<int64_t>(in.max_blocks) * kPageTokens) {
                fail("block_table", "is too narrow for sequence " + std::to_string(s));
            }
            for (int layer = 0; layer < c.num_layers; ++layer) {
                const int group = c.group_of_layer[layer], window = c.window_of_layer[layer];
                if (layer > 0 && group == c.group_of_layer[layer - 1]) continue;
                const int first = window > 0 ? std::max(0, past[s] - window + 1) / kPageTokens : 0;
                const int32_t* row = table + (static_cast<size_t>(group) * in.sequences + s) * in.max_blocks;
                for (int page = first; page < (end + kPageTokens - 1) / kPageTokens; ++page) {
                    if (row[page] < 0) {
                        fail("block_table",
                             "has no page " + std::to_string(page) + " for sequence " + std::to_string(s));
                    }
                }
            }
        }
    }

    // No slot of a group is written twice, and no page for two sequences.
    void check_slots(const int32_t* cu, const int32_t* slots, const StepInput& in) {
        for (int group = 0; group < decoder_->config().num_groups; ++group, slots += in.tokens) {
            written_.begin();
            for (int s = 0; s < in.sequences; ++s) {
                for (int t = cu[s]; t < cu[s + 1]; ++t) {
                    if (slots[t] >= 0) check_slot(slots[t], s, group);
                }
            }
        }
    }

    void check_slot(int32_t slot, int sequence, int group) {
        const WrittenPages::Conflict conflict = written_.write(slot, sequence);
        if (conflict == WrittenPages::Conflict::kNone) return;
        const std::string of_group = " of group " + std::to_string(group);
        if (conflict == WrittenPages::Conflict::kSlotTwice) {
            fail("slot_mapping", "writes slot " + std::to_string(slot) + of_group + " twice");
        }
        fail("slot_mapping", "writes page " + std::to_string(slot / kPageTokens) + of_group +
                                 " for sequences " + std::to_string(written_.writer(slot)) + " and " +
                                 std::to_string(sequence));
    }

    std::vector<nb::object> keep_;
    std::unique_ptr<Decoder> decoder_;
    WrittenPages written_;
};

// A matrix product alone, for tests and benchmarks: y = x Wᵀ as the decoder computes it.
void multiply(const Floats2& x, const Tiles& tiles, int rows, int bits, int kind, int slices_per_group,
              const std::string& isa, bool panel, const FloatsOut& y) {
    const int tokens = static_cast<int>(x.shape(0)), columns = static_cast<int>(x.shape(1));
    const PackedLinear w = packed_linear("tiles", tiles, rows, columns, bits, kind, slices_per_group);
    if (y.shape(0) != x.shape(0) || y.shape(1) != static_cast<size_t>(round_up(rows, kTileRows))) {
        fail("y", "has the wrong shape");
    }
    const Kernels& kernels = select_kernels(isa);
    AlignedBuffer row, activations, scratch;
    row.allocate(static_cast<size_t>(round_up(columns, kSlice)) * 4);
    activations.allocate(static_cast<size_t>(round_up(tokens, kBlockTokens)) * w.slices() *
                         (kActivationBytes / kBlockTokens));
    scratch.allocate(kernels.panel_scratch());
    const Activations input{activations.data(), tokens, w.slices()};
    for (int t = 0; t < tokens; ++t) {
        std::copy_n(x.data() + static_cast<size_t>(t) * columns, columns, row.floats());
        kernels.quantize(row.floats(), t, input);
    }
    const int count = w.tile_count();
    if (!panel) return kernels.linear_rows(w, input, y.data(), y.shape(1), 0, count);
    for (int block = 0; block < input.blocks(); block += kPanelBlocks) {
        for (int tile = 0; tile < count; tile += kPanelTiles) {
            kernels.linear_panel(w, input, y.data(), y.shape(1), tile, std::min(tile + kPanelTiles, count),
                                 block, std::min(block + kPanelBlocks, input.blocks()), scratch.data());
        }
    }
}

}  // namespace

void bind_decoder(nb::module_& m) {
    m.def("supported_kernels", &supported_kernels);
    m.def("multiply", &multiply, "x"_a.noconvert(), "tiles"_a.noconvert(), "rows"_a, "bits"_a, "kind"_a,
          "slices_per_group"_a, "isa"_a, "panel"_a, "y"_a.noconvert());
    nb::class_<Builder>(m, "DecoderBuilder")
        .def(nb::init<const nb::dict&>(), "config"_a)
        .def("set_linear", &Builder::set_linear, "layer"_a, "index"_a, "tiles"_a.noconvert(), "bits"_a,
             "kind"_a, "slices_per_group"_a, "bias"_a.none(), "permutation"_a.none())
        .def("set_gates", &Builder::set_gates, "layer"_a, "router"_a.noconvert(), "shared_gate"_a.none())
        .def("set_norms", &Builder::set_norms, "layer"_a, "before_attention"_a.none(),
             "after_attention"_a.none(), "before_mlp"_a.none(), "after_mlp"_a.none(), "q"_a.none(),
             "k"_a.none())
        .def("set_ends", &Builder::set_ends, "norm"_a.noconvert(), "embedding"_a.noconvert(),
             "embedding_slices"_a, "head"_a.noconvert(), "head_slices"_a)
        .def("stream_layer", &Builder::stream_layer, "layer"_a, "offset"_a, "bytes"_a, "tiles"_a)
        .def("stream_head", &Builder::stream_head, "embedding_tiles"_a, "head_tiles"_a);
    nb::class_<StreamFile>(m, "StreamFile")
        .def(nb::init<int, std::string, int, int64_t, double>(), "descriptor"_a, "file"_a, "buffers"_a,
             "buffer_bytes"_a, "timeout"_a);
    nb::class_<PyDecoder>(m, "Decoder")
        .def(nb::init<Builder&, int, const std::string&, const StreamFile*>(), "builder"_a, "threads"_a,
             "isa"_a, "stream"_a.none() = nb::none())
        .def("allocate_kv", &PyDecoder::allocate_kv, "num_blocks"_a, "kv_type"_a)
        .def("reserve", &PyDecoder::reserve, "tokens"_a, "sequences"_a, "rows"_a)
        .def("step", &PyDecoder::step, "token_ids"_a.noconvert(), "cu_seqlens"_a.noconvert(),
             "past_lens"_a.noconvert(), "block_table"_a.noconvert(), "slot_mapping"_a.noconvert(),
             "logit_rows"_a.noconvert(), "logits"_a.noconvert())
        .def("copy_blocks", &PyDecoder::copy_blocks, "src"_a.noconvert(), "dst"_a.noconvert(),
             "group"_a.noconvert())
        .def("read_blocks", &PyDecoder::read_blocks, "ids"_a.noconvert(), "group"_a.noconvert())
        .def("write_blocks", &PyDecoder::write_blocks, "ids"_a.noconvert(), "data"_a, "group"_a.noconvert())
        .def_prop_ro("best_tokens", &PyDecoder::best_tokens)
        .def_prop_ro("logit_stride", &PyDecoder::logit_stride)
        .def_prop_ro("page_bytes", &PyDecoder::page_bytes)
        .def_prop_ro("isa", &PyDecoder::isa)
        .def_prop_ro("threads", &PyDecoder::threads)
        .def_prop_ro("step_bytes", &PyDecoder::step_bytes);
}

}  // namespace nybble
