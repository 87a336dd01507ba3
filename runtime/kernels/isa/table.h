// The operations in terms of one instruction set, and their table. Each file of this folder includes it after
// defining NYBBLE_ISA (a namespace), NYBBLE_SIMD (the lanes) and NYBBLE_NAME.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "../half.h"
#include "../kernels.h"

namespace nybble {
namespace NYBBLE_ISA {

#include NYBBLE_SIMD

// In the order they use each other.
// clang-format off
#include "../ops/elementwise.h"
#include "../ops/activations.h"
#include "../ops/tiles.h"
#include "../ops/linear_rows.h"
#include "../ops/linear_panel.h"
#include "../ops/linear.h"
#include "../ops/head.h"
#include "../ops/kv_page.h"
#include "../ops/softmax.h"
#include "../ops/attention_products.h"
#include "../ops/attention.h"
#include "../ops/measure.h"
#include "../ops/sampling.h"
#include "../ops/experts.h"
// clang-format on

extern const Kernels kernels;
const Kernels kernels = {
    NYBBLE_NAME,  attention_scratch, panel_scratch, kRowTokens,   quantize,      linear_rows,    linear_panel,
    bound_logits, reaching_tiles,    add_rows,      scale_row,    rms_norm,      rope,           gated,
    softcap,      store_kv,          attend,        merge_parts,  router_logits, expert_shares,  sigmoid,
    weighted_sum, best_logit,        weigh_logits,  weights_from, collect_from,  kDotOperations, dot_loop,
};

}  // namespace NYBBLE_ISA
}  // namespace nybble
