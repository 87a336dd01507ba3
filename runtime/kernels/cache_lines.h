#pragma once

#include <cstddef>
#include <cstdint>

namespace nybble {

// Takes memory out of the caches of all cores; it still holds what it did. Does nothing where there is no
// such instruction.
void drop_from_caches(const uint8_t* data, size_t bytes);

}  // namespace nybble
