// A row of logits as the sampler looks at it. Included inside the namespace of an instruction set.

// The first of the highest logits; the first that is no number where there is one, as numpy's argmax has it.
int best_logit(const float* logits, int n) {
    float best = -HUGE_VALF;
    int block = 0;
    const auto largest_of = [&](int begin) {
        F32 largest = set1(-HUGE_VALF);
        const int whole = begin + std::min(kSumBlock, n - begin) / 16 * 16;
        for (int i = begin; i < whole; i += 16) largest = max(largest, finite_or_infinite(load(logits + i)));
        float value = reduce_max(largest);
        for (int i = whole; i < std::min(n, begin + kSumBlock); ++i) {
            const float x = logits[i] == logits[i] ? logits[i] : HUGE_VALF;
            value = x > value ? x : value;
        }
        return value;
    };
    for (int begin = 0; begin < n; begin += kSumBlock) {
        const float value = largest_of(begin);
        if (value > best) best = value, block = begin;
    }
    if (best == HUGE_VALF) {  // infinite or no number
        for (int i = block; i < n; ++i) {
            if (logits[i] != logits[i]) return i;
        }
    }
    int i = block;
    while (logits[i] != best && i + 1 < n) ++i;
    return i;
}

// Weights 2^((logit - top) * factor), where `top` is the largest logit; -infinity has none. `weights` is
// filled with zeros to a multiple of 16; `sums` are those of blocks of kSumBlock.
void weigh_logits(const float* logits, int n, float top, float factor, float* weights, double* sums) {
    for (int begin = 0; begin < n; begin += kSumBlock) {
        F32 sum = zero();
        for (int i = begin; i < std::min(n, begin + kSumBlock); i += 16) {
            alignas(64) float rest[16];
            const float* row = logits + i;
            if (n - i < 16) {
                std::fill_n(rest, 16, -HUGE_VALF);
                std::memcpy(rest, row, (n - i) * sizeof(float));
                row = rest;
            }
            const F32 w = exp2_negative(mul(sub(load(row), set1(top)), set1(factor)));
            store(weights + i, w);
            sum = add(sum, w);
        }
        sums[begin / kSumBlock] = reduce_add(sum);
    }
}

// How many weights are at least `least`, which is over 0, and their sum.
WeightTotal weights_from(const float* weights, int n, float least) {
    WeightTotal total{0, 0};
    for (int begin = 0; begin < n; begin += kSumBlock) {
        F32 sum = zero(), count = zero();
        for (int i = begin; i < std::min(n, begin + kSumBlock); i += 16) {
            const F32 w = load(weights + i);
            sum = add(sum, select_less(w, set1(least), zero(), w));
            count = add(count, select_less(w, set1(least), zero(), set1(1.0f)));
        }
        total.sum += reduce_add(sum);
        total.count += static_cast<int>(reduce_add(count));
    }
    return total;
}

// The indices of those weights, ascending; returns how many. `least` is over 0.
int collect_from(const float* weights, int n, float least, int32_t* indices) {
    int count = 0;
    for (int i = 0; i < n; i += 16) {
        if (reduce_max(load(weights + i)) < least) continue;
        for (int k = i; k < std::min(n, i + 16); ++k) {
            if (weights[k] >= least) indices[count++] = k;
        }
    }
    return count;
}
