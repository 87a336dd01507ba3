#include "read_part.h"

#include <sys/mman.h>

namespace nybble {
namespace {

constexpr size_t kHugePage = 2 << 20;

}  // namespace

void ReadMemory::allocate(size_t bytes) {
    if (bytes >= kHugePage) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
    buffer_.allocate(bytes + kHugePage);
    data_ = buffer_.data() + (-reinterpret_cast<uintptr_t>(buffer_.data()) & (kHugePage - 1));
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTFORK
    madvise(data_, bytes, MADV_DONTFORK);
#endif
}

}  // namespace nybble
