// Weights as Python hands them over, layer by layer. Every array is checked here; nothing in the kernels
// checks again.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "arguments.h"
#include "decoder.h"
#include "direct_file.h"
#include "stream_layout.h"

namespace nybble {

inline std::vector<float> padded(const Floats1& values, size_t expected, const char* name) {
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
        constexpr int kHalves = static_cast<int>(WeightKind::kHalves);
        w_.final_norm = padded(norm, c_.hidden_size, "final_norm");
        w_.embedding = packed_linear("embedding", embedding, c_.vocab_size, c_.hidden_size, 8, kHalves,
                                     embedding_slices);
        w_.head = packed_linear("head", head, c_.vocab_size, c_.hidden_size, 8, kHalves, head_slices);
        keep_.push_back(nb::cast(embedding));
        keep_.push_back(nb::cast(head));
    }

    // A layer whose experts are read when they are chosen: where the tiles of each expert's gate, up and down
    // are in the file, without the shared one's. In ascending order, when its linear layers have been set,
    // and before `stream_layer` of it.
    void stream_experts(int layer, const std::vector<int64_t>& tiles) {
        const int first = places_.experts.empty() ? 0 : places_.experts.back().layer + 1;
        check_range("layer", &layer, 1, first, c_.num_layers);
        LayerWeights& w = w_.layers[layer];
        if (w.experts.empty()) fail("layer", "has no mixture of experts");
        if (!places_.layers.empty() && places_.layers.back().layer >= layer) fail("layer", "is streamed");
        check_size("tiles", tiles.size(), static_cast<size_t>(c_.mixture.experts) * kExpertLinears);
        for (int e = 0; e < c_.mixture.experts; ++e) {
            int64_t end = 0;
            for (int i = 0; i < kExpertLinears; ++i) {
                const PackedLinear& linear = w.experts[e].linears[i];
                const int64_t begin = tiles[static_cast<size_t>(e) * kExpertLinears + i];
                if (linear.rows == 0) fail("layer " + std::to_string(layer), "lacks a linear layer");
                if (begin < end || begin > kMostBytes) fail("tiles", "do not follow each other in the file");
                end = begin + static_cast<int64_t>(linear.bytes());
            }
        }
        w.experts_by_use = c_.mixture.experts;
        places_.experts.push_back({layer, tiles});
    }

    // A layer whose tiles are read in every step: its section of the file, or the part before experts that
    // are read when they are chosen, and where its tiles are in the file, without those experts'. In
    // ascending order, when its linear layers have been set.
    void stream_layer(int layer, int64_t offset, int64_t bytes, const std::vector<int64_t>& tiles) {
        const int first = places_.layers.empty() ? 0 : places_.layers.back().layer + 1;
        check_range("layer", &layer, 1, first, c_.num_layers);
        LayerWeights& w = w_.layers[layer];
        check_size("tiles", tiles.size(), w.linear_count() - kExpertLinears * w.experts_by_use);
        constexpr int64_t kUnit = kDirectAlignment;
        if (offset < 0 || bytes < kUnit || bytes > kMostBytes || offset > kMostBytes || offset % kUnit ||
            bytes % kUnit) {
            fail("section", "is not made of whole units of the file");
        }
        const int64_t* place = tiles.data();
        for (int i = 0; i < w.linear_count(); ++i) {
            if (w.by_use(i)) continue;
            const int64_t begin = *place++ - offset;
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
                                              int64_t buffer_bytes, int expert_slots, int64_t slot_bytes,
                                              double timeout) {
        if (buffers < 2 || buffers > 1024) fail("buffers", "is out of range");
        if (!(timeout > 0 && timeout < 1e6)) fail("timeout", "is out of range");
        int64_t least = places_.head ? static_cast<int64_t>(smallest_buffer(w_.head)) : 0, least_slot = 0;
        for (const StreamPlaces::Layer& layer : places_.layers) {
            least = std::max(least, static_cast<int64_t>(layer.bytes));
        }
        for (const StreamPlaces::Experts& place : places_.experts) {
            for (int e = 0; e < c_.mixture.experts; ++e) {
                const int64_t* tiles = place.tiles.data() + static_cast<size_t>(e) * kExpertLinears;
                const ExpertRange range = range_of_expert(w_.layers[place.layer].experts[e], tiles);
                least_slot = std::max(least_slot, static_cast<int64_t>(range.bytes));
            }
        }
        check_buffer("buffer_bytes", buffer_bytes, least);
        check_buffer("slot_bytes", slot_bytes, least_slot);
        if (expert_slots < (places_.experts.empty() ? 0 : 2) || expert_slots > kMostSlots) {
            fail("expert_slots", "is out of range");
        }
        StreamSettings settings = stream_weights(
            w_, places_,
            {buffers, static_cast<size_t>(buffer_bytes), expert_slots, static_cast<size_t>(slot_bytes)},
            timeout);
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
    static constexpr int kMostSlots = 1 << 24;

    static void check_buffer(const char* name, int64_t bytes, int64_t least) {
        if (bytes >= least && bytes <= kMostBytes && bytes % static_cast<int64_t>(kDirectAlignment) == 0)
            return;
        fail(name, "is " + std::to_string(bytes) + "; expected at least " + std::to_string(least) +
                       ", in whole units of the file");
    }

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

}  // namespace nybble
