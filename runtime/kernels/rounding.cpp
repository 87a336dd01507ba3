#include "rounding.h"

#include <algorithm>

namespace nybble {
namespace {

constexpr size_t kOutputs = 64;  // at a time: what 64 columns of them take stays in the L1 cache

// The nearest integer, ties to even, of a number below 2**22.
inline float nearest(float x) {
    constexpr float kShift = 12582912.0f;  // 1.5 * 2**23: its last digit counts ones
    return (x + kShift) - kShift;
}

inline float within(float x, float low, float high) {
    const float raised = x > low ? x : low;
    return raised < high ? raised : high;
}

// y += factor * x
inline void add(float* y, float factor, const float* x, size_t count) {
    for (size_t i = 0; i < count; ++i) y[i] += factor * x[i];
}

}  // namespace

void round_columns(const RoundedColumns& job) {
    for (size_t begin = 0; begin < job.outputs; begin += kOutputs) {
        const size_t count = std::min(kOutputs, job.outputs - begin);
        for (size_t column = 0; column < job.columns; ++column) {
            const size_t at = column * job.outputs + begin;
            const size_t group = static_cast<size_t>(job.group[column]) * job.outputs + begin;
            const float *weight = job.weight + at, *scale = job.scale + group, *zero = job.zero + group;
            float *codes = job.codes + at, *errors = job.errors + at;
            const float top = job.top;
            for (size_t i = 0; i < count; ++i) {
                const float code = nearest(within(weight[i] / scale[i], -zero[i], top - zero[i]));
                codes[i] = code + zero[i];
                errors[i] = weight[i] - code * scale[i];
            }
            const float* share = job.passed_on + column * job.columns;
            for (size_t later = column + 1; later < job.columns; ++later)
                add(job.weight + later * job.outputs + begin, -share[later], errors, count);
        }
    }
}

void descend_codes(const DescendedCodes& job) {
    for (size_t begin = 0; begin < job.outputs; begin += kOutputs) {
        const size_t count = std::min(kOutputs, job.outputs - begin);
        for (size_t column = 0; column < job.columns; ++column) {
            const size_t at = column * job.outputs + begin;
            const float* row = job.hessian + column * job.columns;
            const float share = 1.0f / row[column], top = job.top;
            const float* steps = job.steps + at;
            float *codes = job.codes + at, *change = job.change + at;
            for (size_t i = 0; i < count; ++i) {
                const float best = nearest(within(codes[i] - share * steps[i], 0.0f, top));
                change[i] = best - codes[i];
                codes[i] = best;
            }
            for (size_t later = column + 1; later < job.columns; ++later)
                add(job.steps + later * job.outputs + begin, row[later], change, count);
        }
    }
}

}  // namespace nybble
