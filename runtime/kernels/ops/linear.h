// The matrix products for every kind of weights. Included inside the namespace of an instruction set.

// Calls the instance of a template for a layer's bits and kind; minima (GGUF's Q4_1) and NF4 have 4 bits.
#define NYBBLE_DISPATCH(function, w, ...)                                               \
    switch ((w).kind) {                                                                 \
        case WeightKind::kSymmetric:                                                    \
            return (w).bits == 4 ? function<4, WeightKind::kSymmetric>(w, __VA_ARGS__)  \
                                 : function<8, WeightKind::kSymmetric>(w, __VA_ARGS__); \
        case WeightKind::kZeroPoint:                                                    \
            return (w).bits == 4 ? function<4, WeightKind::kZeroPoint>(w, __VA_ARGS__)  \
                                 : function<8, WeightKind::kZeroPoint>(w, __VA_ARGS__); \
        case WeightKind::kMinimum:                                                      \
            return function<4, WeightKind::kMinimum>(w, __VA_ARGS__);                   \
        case WeightKind::kNf4:                                                          \
            return function<4, WeightKind::kNf4>(w, __VA_ARGS__);                       \
        case WeightKind::kHalves:                                                       \
            return function<8, WeightKind::kHalves>(w, __VA_ARGS__);                    \
    }

void linear_rows(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin,
                 int tile_end) {
    NYBBLE_DISPATCH(linear_rows_of, w, x, y, stride, tile_begin, tile_end)
}

void linear_panel(const PackedLinear& w, Activations x, float* y, size_t stride, int tile_begin, int tile_end,
                  int block_begin, int block_end, uint8_t* scratch) {
    NYBBLE_DISPATCH(linear_panel_of, w, x, y, stride, tile_begin, tile_end, block_begin, block_end, scratch)
}
#undef NYBBLE_DISPATCH
