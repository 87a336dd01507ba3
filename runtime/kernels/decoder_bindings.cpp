// The decoder's Python face. Every array is checked here; nothing in the kernels checks again.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "arguments.h"
#include "decode_run.h"
#include "decoder.h"
#include "decoder_builder.h"
#include "written_pages.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace nybble {
namespace {

// The file that streamed weights are read from, and how.
struct StreamFile {
    int descriptor;
    std::string file;
    int buffers;
    int64_t buffer_bytes;
    int expert_slots;
    int64_t slot_bytes;
    double timeout;  // seconds
};

class PyDecoder {
  public:
    PyDecoder(Builder& builder, int threads, const std::string& isa, const StreamFile* stream) {
        if (threads < 1 || threads > 1024)
            fail("threads", "is " + std::to_string(threads) + "; expected 1 to 1024");
        std::unique_ptr<WeightStream> opened;
        if (stream != nullptr) {
            opened =
                builder.open_stream(stream->descriptor, stream->file, stream->buffers, stream->buffer_bytes,
                                    stream->expert_slots, stream->slot_bytes, stream->timeout);
        }
        DecoderWeights weights = builder.take(keep_);
        const Kernels& kernels = select_kernels(isa);
        try {
            decoder_ = std::make_unique<Decoder>(builder.config(), std::move(weights), threads, kernels,
                                                 std::move(opened));
            run_ = std::make_unique<DecodeRun>(*decoder_);
        } catch (const std::system_error& error) {
            fail("threads", "is " + std::to_string(threads) + "; the system started fewer: " + error.what());
        }
    }

    ~PyDecoder() {
        const nb::gil_scoped_release release;  // threads are waited for
        run_.reset();
        decoder_.reset();
    }

    void allocate_kv(int num_blocks, int type) {
        constexpr int kMost = INT32_MAX / kPageTokens;  // slots are int32
        if (num_blocks < 1 || num_blocks > kMost) {
            fail("num_blocks",
                 "is " + std::to_string(num_blocks) + "; expected 1 to " + std::to_string(kMost));
        }
        if (type < 0 || type > static_cast<int>(KvType::kInt16)) fail("kv_dtype", "is unknown");
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
              const FloatsOut& logits, bool best_only) {
        StepInput in =
            checked_input(token_ids, cu_seqlens, past_lens, block_table, slot_mapping, logit_rows, 0);
        in.best_only = best_only;
        check_slots(in, in.slot_mapping, 1);
        check_logits(logits, in);
        nb::gil_scoped_release release;
        decoder_->step(in, logits.data());
        skipped_bytes_ = decoder_->skipped_bytes();
    }

    // Steps of one token a sequence, fed with what was chosen from the step before: what each of them chose.
    // Of each sequence by its rule; without rules the highest.
    std::vector<std::vector<int32_t>> decode(const Ints1& token_ids, const Ints1& cu_seqlens,
                                             const Ints1& past_lens, const Ints3& block_table,
                                             const Ints2& slot_mapping, const Ints1& logit_rows,
                                             const FloatsOut& logits, int steps, std::vector<int32_t> ends,
                                             double seconds, std::vector<TokenRule> rules) {
        check_range("steps", &steps, 1, 1, decoder_->config().max_position + 1);
        StepInput in =
            checked_input(token_ids, cu_seqlens, past_lens, block_table, slot_mapping, logit_rows, steps - 1);
        in.best_only = rules.empty();
        if (in.tokens < 1) fail("token_ids", "has no tokens");
        check_size("token_ids", token_ids.size(), past_lens.size());
        check_size("logit_rows", logit_rows.size(), past_lens.size());
        for (int s = 0; s < in.sequences; ++s) {
            if (in.cu_seqlens[s] != s) fail("cu_seqlens", "does not give each sequence one token");
            if (in.logit_rows[s] != s) fail("logit_rows", "does not ask for each sequence's row");
        }
        check_logits(logits, in);
        check_rules(rules, in);
        run_->begin(in, steps, std::move(rules));
        check_slots(in, run_->slots(0), steps);
        const DecodeRun::Limits limits{steps, std::move(ends), seconds};
        std::vector<int32_t> tokens(static_cast<size_t>(steps) * in.sequences);
        std::vector<std::vector<int32_t>> chosen;
        {
            nb::gil_scoped_release release;
            chosen.resize(run_->run(limits, logits.data(), tokens.data()));
        }
        skipped_bytes_ = run_->skipped_bytes();
        const int32_t* of_step = tokens.data();
        for (std::vector<int32_t>& row : chosen) {
            row.assign(of_step, of_step + in.sequences);
            of_step += in.sequences;
        }
        return chosen;
    }

    void hurry(bool wanted) { run_->hurry(wanted); }

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
    size_t skipped_bytes() const { return skipped_bytes_; }
    int logit_stride() const { return decoder_->logit_stride(); }
    size_t page_bytes() const { return decoder_->kv_shape().page_bytes(); }
    std::string isa() const { return decoder_->kernels().name; }
    int threads() const { return decoder_->threads(); }
    size_t step_bytes() const { return decoder_->step_bytes(); }
    std::vector<uint64_t> expert_counts() const {
        const ExpertCounts counts = decoder_->expert_counts();
        return {counts.needed, counts.read, counts.bytes};
    }

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

    // Arrays that keep the contract, for `more` tokens of each sequence besides its own; but for slots.
    StepInput checked_input(const Ints1& token_ids, const Ints1& cu_seqlens, const Ints1& past_lens,
                            const Ints3& block_table, const Ints2& slot_mapping, const Ints1& logit_rows,
                            int more) const {
        const DecoderConfig& c = decoder_->config();
        if (decoder_->num_blocks() == 0) fail("cache", "has not been allocated");
        StepInput in{};
        in.tokens = static_cast<int>(token_ids.size());
        in.sequences = static_cast<int>(past_lens.size());
        in.rows = static_cast<int>(logit_rows.size());
        in.max_blocks = static_cast<int>(block_table.shape(2));
        in.token_ids = token_ids.data();
        in.cu_seqlens = cu_seqlens.data();
        in.past_lens = past_lens.data();
        in.block_table = block_table.data();
        in.slot_mapping = slot_mapping.data();
        in.logit_rows = logit_rows.data();
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
        check_sequences(c, in, more);
        return in;
    }

    void check_logits(const FloatsOut& logits, const StepInput& in) const {
        if (logits.shape(0) < static_cast<size_t>(in.rows) ||
            logits.shape(1) != static_cast<size_t>(decoder_->logit_stride())) {
            fail("logits", "has the wrong shape");
        }
    }

    void check_rules(const std::vector<TokenRule>& rules, const StepInput& in) const {
        if (rules.empty()) return;
        check_size("rules", rules.size(), in.sequences);
        for (const TokenRule& rule : rules) {
            for (const std::vector<int32_t>* tokens : {&rule.biased, &rule.seen, &rule.counted}) {
                check_range("rules", tokens->data(), tokens->size(), 0, decoder_->config().vocab_size);
            }
        }
    }

    // Each sequence has tokens in ascending order, and with `more` after them stays in the context and has
    // every page it reads mapped.
    void check_sequences(const DecoderConfig& c, const StepInput& in, int more) const {
        const int32_t *cu = in.cu_seqlens, *past = in.past_lens;
        if (cu[0] != 0 || cu[in.sequences] != in.tokens)
            fail("cu_seqlens", "does not run from 0 to the tokens");
        for (int s = 0; s < in.sequences; ++s) {
            if (cu[s + 1] < cu[s]) fail("cu_seqlens", "falls at index " + std::to_string(s + 1));
            const int64_t end = static_cast<int64_t>(past[s]) + cu[s + 1] - cu[s] + more;
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
                const int32_t* row =
                    in.block_table + (static_cast<size_t>(group) * in.sequences + s) * in.max_blocks;
                for (int page = first; page < (end + kPageTokens - 1) / kPageTokens; ++page) {
                    if (row[page] < 0) {
                        fail("block_table",
                             "has no page " + std::to_string(page) + " for sequence " + std::to_string(s));
                    }
                }
            }
        }
    }

    // `slots` [steps][groups][tokens]: no slot of a group is written twice, and no page for two sequences.
    void check_slots(const StepInput& in, const int32_t* slots, int steps) {
        const int groups = decoder_->config().num_groups;
        for (int group = 0; group < groups; ++group) {
            written_.begin();
            for (int i = 0; i < steps; ++i) {
                const int32_t* of_step = slots + (static_cast<size_t>(i) * groups + group) * in.tokens;
                for (int s = 0; s < in.sequences; ++s) {
                    for (int t = in.cu_seqlens[s]; t < in.cu_seqlens[s + 1]; ++t) {
                        if (of_step[t] >= 0) check_slot(of_step[t], s, group);
                    }
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
    std::unique_ptr<DecodeRun> run_;
    WrittenPages written_;
    size_t skipped_bytes_ = 0;  // in the last call
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
        .def("stream_experts", &Builder::stream_experts, "layer"_a, "tiles"_a)
        .def("stream_layer", &Builder::stream_layer, "layer"_a, "offset"_a, "bytes"_a, "tiles"_a)
        .def("stream_head", &Builder::stream_head, "embedding_tiles"_a, "head_tiles"_a);
    nb::class_<StreamFile>(m, "StreamFile")
        .def(nb::init<int, std::string, int, int64_t, int, int64_t, double>(), "descriptor"_a, "file"_a,
             "buffers"_a, "buffer_bytes"_a, "expert_slots"_a, "slot_bytes"_a, "timeout"_a);
    nb::class_<PyDecoder>(m, "Decoder")
        .def(nb::init<Builder&, int, const std::string&, const StreamFile*>(), "builder"_a, "threads"_a,
             "isa"_a, "stream"_a.none() = nb::none())
        .def("allocate_kv", &PyDecoder::allocate_kv, "num_blocks"_a, "kv_type"_a)
        .def("reserve", &PyDecoder::reserve, "tokens"_a, "sequences"_a, "rows"_a)
        .def("step", &PyDecoder::step, "token_ids"_a.noconvert(), "cu_seqlens"_a.noconvert(),
             "past_lens"_a.noconvert(), "block_table"_a.noconvert(), "slot_mapping"_a.noconvert(),
             "logit_rows"_a.noconvert(), "logits"_a.noconvert(), "best_only"_a = false)
        .def("decode", &PyDecoder::decode, "token_ids"_a.noconvert(), "cu_seqlens"_a.noconvert(),
             "past_lens"_a.noconvert(), "block_table"_a.noconvert(), "slot_mapping"_a.noconvert(),
             "logit_rows"_a.noconvert(), "logits"_a.noconvert(), "steps"_a, "ends"_a, "seconds"_a, "rules"_a)
        .def("hurry", &PyDecoder::hurry, "wanted"_a)
        .def("copy_blocks", &PyDecoder::copy_blocks, "src"_a.noconvert(), "dst"_a.noconvert(),
             "group"_a.noconvert())
        .def("read_blocks", &PyDecoder::read_blocks, "ids"_a.noconvert(), "group"_a.noconvert())
        .def("write_blocks", &PyDecoder::write_blocks, "ids"_a.noconvert(), "data"_a, "group"_a.noconvert())
        .def_prop_ro("best_tokens", &PyDecoder::best_tokens)
        .def_prop_ro("skipped_bytes", &PyDecoder::skipped_bytes)
        .def_prop_ro("logit_stride", &PyDecoder::logit_stride)
        .def_prop_ro("page_bytes", &PyDecoder::page_bytes)
        .def_prop_ro("isa", &PyDecoder::isa)
        .def_prop_ro("threads", &PyDecoder::threads)
        .def_prop_ro("step_bytes", &PyDecoder::step_bytes)
        .def_prop_ro("expert_counts", &PyDecoder::expert_counts);
}

}  // namespace nybble
