#include "direct_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

namespace nybble {
namespace {

#ifdef O_DIRECT
constexpr int kDirect = O_DIRECT;
#else
constexpr int kDirect = 0;
#endif

// Opened anew, since direct reading is a property of what is open, and others read it otherwise.
int open_direct(int descriptor) {
    if (kDirect == 0) return -1;
    const std::string path = "/proc/self/fd/" + std::to_string(descriptor);
    return open(path.c_str(), O_RDONLY | O_CLOEXEC | kDirect);
}

}  // namespace

DirectFile::DirectFile(int descriptor, std::string name)
    : name_(std::move(name)), descriptor_(open_direct(descriptor)), direct_(descriptor_ >= 0) {
    if (descriptor_ < 0) descriptor_ = fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
    if (descriptor_ < 0) throw std::system_error(errno, std::generic_category(), name_);
}

DirectFile::~DirectFile() { close(descriptor_); }

std::string DirectFile::read(int64_t offset, size_t bytes, uint8_t* into) const {
    for (size_t done = 0; done < bytes;) {
        const int64_t at = offset + static_cast<int64_t>(done);
        const bool direct = direct_.load(std::memory_order_relaxed);
        const ssize_t count = pread(descriptor_, into + done, bytes - done, at);
        if (count < 0) {
            if (errno == EINTR) continue;
            // Some file systems say only now that they have no direct reads.
            if (errno == EINVAL && direct) {
                direct_.store(false, std::memory_order_relaxed);
                fcntl(descriptor_, F_SETFL, fcntl(descriptor_, F_GETFL) & ~kDirect);
                continue;
            }
            return std::generic_category().message(errno);
        }
        size_t whole = static_cast<size_t>(count);
        if (done + whole < bytes) whole -= whole % kDirectAlignment;
        if (whole == 0) {
            struct stat status{};
            fstat(descriptor_, &status);
            return "only " + std::to_string(count) + " of " + std::to_string(bytes - done) +
                   " bytes could be read at byte " + std::to_string(at) + "; the file has " +
                   std::to_string(status.st_size) + " bytes";
        }
#ifdef POSIX_FADV_DONTNEED
        if (!direct) posix_fadvise(descriptor_, at, static_cast<off_t>(whole), POSIX_FADV_DONTNEED);
#endif
        done += whole;
    }
    return {};
}

}  // namespace nybble
