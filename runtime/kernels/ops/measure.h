// What an instruction set's dot product can do at most, for benchmarks. Included inside its namespace.

// Operations of a round of `dot_loop`: a multiplication and an addition for each of 64 bytes.
constexpr int kDotsPerRound = 4 * kDotChains;
constexpr int kDotOperations = kDotsPerRound * 128;

// `rounds` rounds of dot products of the same 64 bytes with each other, in chains enough to hide the
// instruction's latency. Returns the sum over all rounds, chains and lanes.
inline int32_t dot_loop(int64_t rounds, const uint8_t* weights, const int8_t* activations) {
    const Bytes a = load_bytes(reinterpret_cast<const uint8_t*>(activations));
    Bytes w = load_bytes(weights);
    I32 sums[kDotChains];
    for (I32& sum : sums) sum = set1(0);
    for (int64_t round = 0; round < rounds; ++round) {
#pragma GCC unroll 64
        for (int n = 0; n < kDotsPerRound; ++n) {
            forget(w);  // otherwise what the chains share is computed once
            sums[n % kDotChains] = dot4<false>(sums[n % kDotChains], w, a);
        }
    }
    for (int n = 1; n < kDotChains; ++n) sums[0] = add(sums[0], sums[n]);
    return reduce_add(sums[0]);
}
