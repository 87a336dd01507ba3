// The phases of a layer after attention where it has no mixture of experts: norm, gate and up, activation,
// down.
#include <algorithm>

#include "decoder.h"

namespace nybble {

void Decoder::run_mlp(int thread, const StepRows& rows, const LayerWeights& w, SharedWork* work) {
    StepBuffers& b = buffers_;
    each_row(thread, rows.count, [&](int r) {
        add_residual(thread, rows, r, w.biases[kO], w.after_attention);
        quantize_input(thread, rows, r, w, kGate, 2, normalized(thread, rows, r, w.before_mlp));
    });
    meet();
    linears(thread, rows, w, kGate, 2, b.projected.floats(), b.gate_up, work[0]);
    pool_.barrier();
    activate(thread, rows, w);
    pool_.barrier();
    linears(thread, rows, w, kDown, 1, given(), b.hidden, work[1]);
}

// Makes inputs of `down` of what gate and up gave. Threads have their share of every row where there are few,
// and nothing else needs a row whole.
void Decoder::activate(int thread, const StepRows& rows, const LayerWeights& w) {
    const int inner = buffers_.inner;
    if (rows.count > kernels_.row_tokens || !w.permutations[kDown].empty()) {
        each_token(thread, rows.count, [&](int r) {
            quantize_input(thread, rows, r, w, kDown, 1, gated(thread, r, w, 0, inner));
        });
        return;
    }
    const Activations out = inputs(thread, rows, w, kDown);
    const int threads = pool_.running();
    const int begin = out.slices * thread / threads, end = out.slices * (thread + 1) / threads;
    if (begin == end) return;
    for (int r = 0; r < rows.count; ++r) {
        uint8_t* block = out.block(r / kBlockTokens) + static_cast<size_t>(begin) * kActivationBytes;
        kernels_.quantize(gated(thread, r, w, begin * kSlice, end * kSlice), r % kBlockTokens,
                          {block, kBlockTokens, end - begin});
    }
}

// Elements [begin, end) of a row's activation(gate) * up, whole slices, padded with zeros; valid until the
// thread's next row.
const float* Decoder::gated(int thread, int r, const LayerWeights& layer, int begin, int end) {
    StepBuffers& b = buffers_;
    const int count = std::min(end, round_up(config_.intermediate_size, 16)) - begin;
    float* gate = b.projected.floats() + static_cast<size_t>(r) * b.gate_up + begin;
    float* up = gate + b.inner;
    if (!layer.biases[kGate].empty()) kernels_.add(gate, layer.biases[kGate].data() + begin, count);
    if (!layer.biases[kUp].empty()) kernels_.add(up, layer.biases[kUp].data() + begin, count);
    float* out = b.row(thread);
    kernels_.gated(gate, up, config_.activation, count, out);
    std::fill(out + count, out + end - begin, 0.0f);
    return out;
}

}  // namespace nybble
