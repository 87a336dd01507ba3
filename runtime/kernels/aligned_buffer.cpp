#include "aligned_buffer.h"

#include <cstdlib>
#include <new>

namespace nybble {

void AlignedBuffer::Free::operator()(uint8_t* p) const { std::free(p); }

// calloc and not memset: of a large cache only the pages that are used become resident.
void AlignedBuffer::allocate(size_t bytes) {
    constexpr size_t kAlignment = 4096;
    allocation_.reset();
    data_ = nullptr;
    bytes_ = 0;
    allocation_.reset(static_cast<uint8_t*>(std::calloc(bytes + kAlignment, 1)));
    if (allocation_ == nullptr) throw std::bad_alloc();
    const uintptr_t address = reinterpret_cast<uintptr_t>(allocation_.get());
    data_ = allocation_.get() + (kAlignment - address % kAlignment) % kAlignment;
    bytes_ = bytes;
}

}  // namespace nybble
