// Steps of few tokens by how many they have, for what is learned of each size while it runs.
#pragma once

namespace nybble {

constexpr int kFewStepTokens = 32;  // with more of them every thread computes for long
constexpr int kStepSizes = 6;       // up to 1, 2, 4, 8, 16, 32 tokens

inline int step_size(int tokens) {
    int size = 0;
    while (1 << size < tokens) ++size;
    return size;
}

}  // namespace nybble
