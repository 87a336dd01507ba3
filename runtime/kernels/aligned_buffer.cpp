#include "aligned_buffer.h"

#include <sys/mman.h>

#include <new>

namespace nybble {

void AlignedBuffer::Unmap::operator()(uint8_t* p) const { munmap(p, mapped); }

// Mapped, and not from the heap: after a process has freed some megabytes, calloc clears memory that it had
// before, and all of that is resident.
void AlignedBuffer::allocate(size_t bytes) {
    constexpr size_t kSlack = 4096;  // whole lanes may be read at the end
    mapping_.reset();
    bytes_ = 0;
    void* mapped = mmap(nullptr, bytes + kSlack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    mapping_ = {static_cast<uint8_t*>(mapped), Unmap{bytes + kSlack}};
    bytes_ = bytes;
}

}  // namespace nybble
