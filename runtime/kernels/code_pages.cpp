#include "code_pages.h"

#if defined(__linux__)

#include <fcntl.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace nybble {
namespace {

// https://docs.kernel.org/admin-guide/mm/pagemap.html
constexpr uint64_t kPresent = uint64_t{1} << 63, kSwapped = uint64_t{1} << 62, kOfFile = uint64_t{1} << 61;
constexpr size_t kPagesAtOnce = 256;

struct Dropping {
    int pagemap;
    size_t page;     // bytes
    size_t dropped;  // bytes
};

void drop_range(Dropping& dropping, uintptr_t first, size_t pages) {
    uint64_t entries[kPagesAtOnce];
    const size_t bytes = pages * sizeof(uint64_t);
    const off_t at = static_cast<off_t>(first / dropping.page * sizeof(uint64_t));
    if (pread(dropping.pagemap, entries, bytes, at) != static_cast<ssize_t>(bytes)) return;
    size_t resident = 0;
    for (size_t i = 0; i < pages; ++i) {
        const bool present = (entries[i] & kPresent) != 0;
        // A page that a debugger or a patch has written to is this process's own, and not in the file.
        if ((entries[i] & kSwapped) != 0 || (present && (entries[i] & kOfFile) == 0)) return;
        resident += present;
    }
    if (resident > 0 && madvise(reinterpret_cast<void*>(first), pages * dropping.page, MADV_DONTNEED) == 0) {
        dropping.dropped += resident * dropping.page;
    }
}

// The loader's lock is held: no library is unloaded meanwhile.
int drop_library(dl_phdr_info* library, size_t, void* context) {
    Dropping& dropping = *static_cast<Dropping*>(context);
    constexpr char kOfKernel[] = "linux-";  // its own page of code has no file
    if (std::strncmp(library->dlpi_name, kOfKernel, sizeof kOfKernel - 1) == 0) return 0;
    for (int i = 0; i < library->dlpi_phnum; ++i) {
        const auto& segment = library->dlpi_phdr[i];
        if (segment.p_type != PT_LOAD || (segment.p_flags & PF_W) != 0) continue;
        // Whole pages of this segment alone.
        const uintptr_t begin = library->dlpi_addr + segment.p_vaddr, end = begin + segment.p_filesz;
        const uintptr_t last = end / dropping.page * dropping.page;
        uintptr_t first = (begin + dropping.page - 1) / dropping.page * dropping.page;
        while (first < last) {
            const size_t pages = std::min(kPagesAtOnce, (last - first) / dropping.page);
            drop_range(dropping, first, pages);
            first += pages * dropping.page;
        }
    }
    return 0;
}

}  // namespace

size_t drop_code_pages() {
    const long page = sysconf(_SC_PAGESIZE);
    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    if (page <= 0 || pagemap < 0) return 0;
    Dropping dropping{pagemap, static_cast<size_t>(page), 0};
    dl_iterate_phdr(drop_library, &dropping);
    close(pagemap);
    return dropping.dropped;
}

}  // namespace nybble

#else

namespace nybble {

size_t drop_code_pages() { return 0; }

}  // namespace nybble

#endif
