// The matrix products of one phase, dealt to threads in small pieces. A piece is whole output rows: no sum is
// divided.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"
#include "shared_work.h"

namespace nybble {

struct LinearJob {
    const PackedLinear* linear;
    Activations input;  // of equally many tokens in all jobs of a phase
    float* out;         // [tokens][stride]
    size_t stride;
};

// One thread's part. `scratch` has `panel_scratch` bytes.
void run_linear_jobs(const Kernels& kernels, const LinearJob* jobs, int count, int thread, SharedWork& work,
                     uint8_t* scratch);

// The same where a phase has many groups of jobs, each with tokens of its own: into how many pieces a group
// of `count` jobs is cut, with as many tiles each, and one of these.
int linear_pieces(const Kernels& kernels, int count, int tiles, int tokens);
void run_linear_piece(const Kernels& kernels, const LinearJob* jobs, int count, int piece, uint8_t* scratch);

}  // namespace nybble
