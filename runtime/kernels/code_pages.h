// Code and constants of the libraries in this process, as memory.
#pragma once

#include <cstddef>

namespace nybble {

// Takes them out of this process's resident memory: Linux maps sixteen pages or a large one where one is
// used, and what imports and loading used is not used again. What is comes back by itself, out of the
// system's page cache. Pages that were written to stay. Returns the bytes of what was resident; 0 elsewhere
// than on Linux.
size_t drop_code_pages();

}  // namespace nybble
