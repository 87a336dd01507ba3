// Norms, rotary embedding and activations. Our own arithmetic throughout: no libm, no approximate
// instructions. Included inside the namespace of an instruction set.

// 2^x for x <= 0: minimax of degree 5 on [-0.5, 0.5], 2e-7 relative, 1 at 0; exactly 0 under 2^-125.5. NaN
// stays NaN: `max` gives its second operand where one is NaN.
//
// Adding 1.5 * 2^23 rounds x to an integer n and leaves n + 126 in the low bits of the sum. As an exponent
// that is 2^(n - 1), and 0 for n = -126; the polynomial is of twice the result.
inline F32 exp2_negative(F32 x) {
    const F32 magic = set1(12582912.0f + 126.0f), clamped = max(set1(-126.0f), x);
    const F32 biased = add(clamped, magic), f = sub(clamped, sub(biased, magic));
    F32 p = set1(2 * 1.32647273e-3f);
    p = fma(p, f, set1(2 * 9.67151299e-3f));
    p = fma(p, f, set1(2 * 5.55073358e-2f));
    p = fma(p, f, set1(2 * 2.40222424e-1f));
    p = fma(p, f, set1(2 * 6.93147004e-1f));
    p = fma(p, f, set1(2.0f));
    return mul(p, as_exponent(biased));
}

constexpr float kLog2E = 1.44269504f;

// 1 / (1 + e) for 0 <= e <= 1, 1e-7 relative, 1 at 0: a minimax of degree 2, 1/99 off, and two steps of
// Newton's. Dividing 16 numbers takes longer.
inline F32 inverse_of_1_plus(F32 e) {
    const F32 minus = sub(set1(-1.0f), e);
    F32 y = fma(fma(set1(32.0f / 99.0f), minus, set1(144.0f / 99.0f)), minus, set1(210.0f / 99.0f));
    y = fma(fma(minus, y, set1(1.0f)), y, y);
    return fma(fma(minus, y, set1(1.0f)), y, y);
}

// tanh(x) = sign(x) (1 - e) / (1 + e), e = exp(-2|x|).
inline F32 tanh(F32 x) {
    const F32 e = exp2_negative(mul(abs(x), set1(-2.0f * kLog2E)));
    const F32 t = mul(sub(set1(1.0f), e), inverse_of_1_plus(e));
    return select_less(x, zero(), sub(zero(), t), t);
}

// x / (1 + exp(-x)), with the exponential of a negative number only.
inline F32 silu(F32 x) {
    const F32 e = exp2_negative(mul(abs(x), set1(-kLog2E)));
    const F32 numerator = select_less(x, zero(), e, set1(1.0f));
    return mul(x, mul(numerator, inverse_of_1_plus(e)));
}

inline F32 gelu_tanh(F32 x) {
    const F32 cube = mul(mul(x, x), x);
    const F32 inner = mul(set1(0.797884583f), fma(set1(0.044715f), cube, x));
    return mul(mul(set1(0.5f), x), add(set1(1.0f), tanh(inner)));
}

void add_rows(float* x, const float* y, int n) {
    for (int i = 0; i < n; i += 16) store(x + i, add(load(x + i), load(y + i)));
}

void scale_row(float* x, float factor, int n) {
    for (int i = 0; i < n; i += 16) store(x + i, mul(load(x + i), set1(factor)));
}

void rms_norm(const float* x, const float* weight, float epsilon, int n, float* out) {
    F32 squares = zero();
    for (int i = 0; i < n; i += 16) {
        const F32 v = load(x + i);
        squares = fma(v, v, squares);
    }
    const float mean = reduce_add(squares) / static_cast<float>(n);
    const F32 factor = set1(1.0f / std::sqrt(mean + epsilon));
    for (int i = 0; i < n; i += 16) store(out + i, mul(mul(load(x + i), factor), load(weight + i)));
}

inline void rotate16(float* a, float* b, const float* cos, const float* sin) {
    const F32 first = load(a), second = load(b), c = load(cos), s = load(sin);
    store(a, fma(first, c, sub(zero(), mul(second, s))));
    store(b, fma(first, s, mul(second, c)));
}

// What does not fill 16 lanes goes through a padded copy, with the same arithmetic.
void rope(float* head, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + 16 <= half; i += 16) rotate16(head + i, head + half + i, cos + i, sin + i);
    if (i == half) return;
    const size_t bytes = (half - i) * sizeof(float);
    alignas(64) float a[16] = {}, b[16] = {}, c[16] = {}, s[16] = {};
    std::memcpy(a, head + i, bytes);
    std::memcpy(b, head + half + i, bytes);
    std::memcpy(c, cos + i, bytes);
    std::memcpy(s, sin + i, bytes);
    rotate16(a, b, c, s);
    std::memcpy(head + i, a, bytes);
    std::memcpy(head + half + i, b, bytes);
}

void gated(const float* gate, const float* up, Activation activation, int n, float* out) {
    for (int i = 0; i < n; i += 16) {
        const F32 g = load(gate + i);
        const F32 a = activation == Activation::kSilu       ? silu(g)
                      : activation == Activation::kGeluTanh ? gelu_tanh(g)
                                                            : max(zero(), g);
        store(out + i, mul(a, load(up + i)));
    }
}

void softcap(float* x, float cap, int n) {
    for (int i = 0; i < n; i += 16) store(x + i, mul(set1(cap), tanh(mul(load(x + i), set1(1.0f / cap)))));
}
