// A mixture of experts: the router's logits, the weights of chosen experts, and what they give together.
// Included inside the namespace of an instruction set.

// kTokens rows with kExperts of the router's: each product is a sum over 16 lanes, whatever it is beside.
template <int kTokens, int kExperts>
inline void router_block(const float* x, size_t stride, const float* router, size_t router_stride, int n,
                         float* logits, size_t logits_stride) {
    F32 sums[kTokens][kExperts];
    for (int t = 0; t < kTokens; ++t) {
        for (int e = 0; e < kExperts; ++e) sums[t][e] = zero();
    }
    for (int i = 0; i < n; i += 16) {
        F32 row[kTokens];
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) row[t] = load(x + t * stride + i);
#pragma GCC unroll 4
        for (int e = 0; e < kExperts; ++e) {
            const F32 weight = load(router + e * router_stride + i);
#pragma GCC unroll 4
            for (int t = 0; t < kTokens; ++t) sums[t][e] = fma(row[t], weight, sums[t][e]);
        }
    }
    for (int t = 0; t < kTokens; ++t) {
        for (int e = 0; e < kExperts; ++e) logits[t * logits_stride + e] = reduce_add(sums[t][e]);
    }
}

template <int kTokens>
inline void router_rows(const float* x, size_t stride, const float* router, size_t router_stride, int experts,
                        int n, float* logits, size_t logits_stride) {
    int e = 0;
    for (; e + 4 <= experts; e += 4) {
        router_block<kTokens, 4>(x, stride, router + e * router_stride, router_stride, n, logits + e,
                                 logits_stride);
    }
    for (; e < experts; ++e) {
        router_block<kTokens, 1>(x, stride, router + e * router_stride, router_stride, n, logits + e,
                                 logits_stride);
    }
}

void router_logits(const float* x, size_t stride, int tokens, const float* router, size_t router_stride,
                   int experts, int n, float* logits, size_t logits_stride) {
    int t = 0;
    for (; t + 2 <= tokens; t += 2) {
        router_rows<2>(x + t * stride, stride, router, router_stride, experts, n, logits + t * logits_stride,
                       logits_stride);
    }
    if (t < tokens) {
        router_rows<1>(x + t * stride, stride, router, router_stride, experts, n, logits + t * logits_stride,
                       logits_stride);
    }
}

void expert_shares(float* logits, int experts, const int32_t* chosen, int count, bool normalized,
                   float* shares) {
    float top = -HUGE_VALF;
    for (int e = 0; e < experts; ++e) top = logits[e] > top ? logits[e] : top;
    std::fill(logits + experts, logits + round_up(experts, 16), -HUGE_VALF);
    F32 sums = zero();
    for (int e = 0; e < experts; e += 16) {
        const F32 w = exp2_negative(mul(sub(load(logits + e), set1(top)), set1(kLog2E)));
        store(logits + e, w);
        sums = add(sums, w);
    }
    const float sum = reduce_add(sums);
    float of_chosen = 0.0f;
    for (int i = 0; i < count; ++i) {
        shares[i] = logits[chosen[i]] / sum;
        of_chosen += shares[i];
    }
    for (int i = 0; normalized && i < count; ++i) shares[i] /= of_chosen;
}

float sigmoid(float x) {
    const F32 all = set1(x), e = exp2_negative(mul(abs(all), set1(-kLog2E)));
    const F32 y = mul(select_less(all, zero(), e, set1(1.0f)), inverse_of_1_plus(e));
    alignas(64) float lanes[16];
    store(lanes, y);
    return lanes[0];
}

void weighted_sum(const float* const* rows, const float* shares, int count, int n, float* out) {
    for (int i = 0; i < n; i += 16) {
        F32 sum = mul(load(rows[0] + i), set1(shares[0]));
        for (int r = 1; r < count; ++r) sum = fma(load(rows[r] + i), set1(shares[r]), sum);
        store(out + i, sum);
    }
}
