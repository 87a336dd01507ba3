// Preloaded into a process: reads of one file that wait, fall short or fail, as another file says at the
// time.
//
// FAULTY_FILE is the end of the path of the file whose reads are faulty, FAULTY_HOW the file that says how:
// "fail ERRNO", "short BYTES", "stall" until it says otherwise; anything else is no fault.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string_view>

namespace {

struct Fault {
    char kind[16];
    long amount;
};

Fault fault_now() {
    Fault fault{"", 0};
    const char* path = std::getenv("FAULTY_HOW");
    if (path == nullptr) return fault;
    if (std::FILE* file = std::fopen(path, "r")) {
        if (std::fscanf(file, "%15s %ld", fault.kind, &fault.amount) < 1) fault.kind[0] = '\0';
        std::fclose(file);
    }
    return fault;
}

bool is_faulty(int descriptor) {
    const char* end = std::getenv("FAULTY_FILE");
    char link[64], path[4096];
    std::snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    const ssize_t length = readlink(link, path, sizeof path);
    return end != nullptr && length > 0 && std::string_view(path, length).ends_with(end);
}

bool is(const Fault& fault, const char* kind) { return std::strcmp(fault.kind, kind) == 0; }

// Calls read(bytes) unless the fault is that it fails.
template <typename Read>
ssize_t with_faults(int descriptor, size_t bytes, Read read) {
    if (!is_faulty(descriptor)) return read(bytes);
    Fault fault = fault_now();
    for (; is(fault, "stall"); fault = fault_now()) usleep(5000);
    if (is(fault, "fail")) {
        errno = static_cast<int>(fault.amount);
        return -1;
    }
    const ssize_t count = read(bytes);
    return is(fault, "short") ? std::min<ssize_t>(count, fault.amount) : count;
}

template <typename Function>
Function real(const char* name) {
    return reinterpret_cast<Function>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

ssize_t pread(int descriptor, void* into, size_t bytes, off_t offset) {
    static const auto next = real<ssize_t (*)(int, void*, size_t, off_t)>("pread");
    return with_faults(descriptor, bytes, [&](size_t n) { return next(descriptor, into, n, offset); });
}

ssize_t pread64(int descriptor, void* into, size_t bytes, off64_t offset) {
    static const auto next = real<ssize_t (*)(int, void*, size_t, off64_t)>("pread64");
    return with_faults(descriptor, bytes, [&](size_t n) { return next(descriptor, into, n, offset); });
}
}
