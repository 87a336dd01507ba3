// One step's arrays, as the bindings hand them to the decoder.
#pragma once

#include <cstdint>

namespace nybble {

// Already checked against the contract in runtime/batch.py.
struct StepInput {
    const int32_t* token_ids;     // [tokens]
    const int32_t* cu_seqlens;    // [sequences + 1]
    const int32_t* past_lens;     // [sequences]
    const int32_t* block_table;   // [groups, sequences, max_blocks]
    const int32_t* slot_mapping;  // [groups, tokens]
    const int32_t* logit_rows;    // [rows]
    int tokens;
    int sequences;
    int max_blocks;
    int rows;
    bool best_only;  // of a row only the highest logit is wanted, and where it is
};

}  // namespace nybble
