// Preloaded into a process: reads of one file that wait, fall short or fail, as another file says at the
// time. Of plain reads and of Linux's asynchronous ones.
//
// FAULTY_FILE is the end of the path of the file whose reads are faulty, FAULTY_HOW the file that says how:
// "fail ERRNO", "short BYTES", "stall" until it says otherwise; anything else is no fault. Where
// FAULTY_SYNCHRONOUS is set the system has no asynchronous reads. Where a read was asynchronous there is a file
// beside FAULTY_HOW with ".asynchronous" after its name.
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <list>
#include <mutex>
#include <string>
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

long real_syscall(long number, long a, long b, long c, long d, long e, long f) {
    static const auto next = real<long (*)(long, ...)>("syscall");
    return next(number, a, b, c, d, e, f);
}

void note_asynchronous() {
    static const bool once = [] {
        const std::string path = std::string(std::getenv("FAULTY_HOW")) + ".asynchronous";
        close(creat(path.c_str(), 0644));
        return true;
    }();
    static_cast<void>(once);
}

// Asynchronous reads of the faulty file, which the system never hears of.
struct Held {
    aio_context_t context;
    iocb block;
};

std::list<Held>& held() {
    static std::list<Held> list;
    return list;
}

std::mutex& guard() {
    static std::mutex mutex;
    return mutex;
}

long submit(aio_context_t context, long count, iocb** blocks) {
    for (long i = 0; i < count; ++i) {
        if (is_faulty(static_cast<int>(blocks[i]->aio_fildes))) {
            note_asynchronous();
            const std::lock_guard lock(guard());
            held().push_back({context, *blocks[i]});
            continue;
        }
        const auto one = reinterpret_cast<long>(blocks + i);
        const long begun = real_syscall(SYS_io_submit, static_cast<long>(context), 1, one, 0, 0, 0);
        if (begun != 1) return i > 0 ? i : begun;
    }
    return count;
}

// Ends held reads, unless they stall.
long end_held(aio_context_t context, io_event* events, long most) {
    const Fault fault = fault_now();
    if (is(fault, "stall")) return 0;
    const std::lock_guard lock(guard());
    long count = 0;
    for (auto one = held().begin(); one != held().end() && count < most;) {
        if (one->context != context) {
            ++one;
            continue;
        }
        const iocb& block = one->block;
        const auto into = reinterpret_cast<void*>(block.aio_buf);
        long result = -fault.amount;
        if (!is(fault, "fail")) {
            static const auto next = real<ssize_t (*)(int, void*, size_t, off64_t)>("pread64");
            result = next(static_cast<int>(block.aio_fildes), into, block.aio_nbytes, block.aio_offset);
            if (result < 0) result = -errno;
            if (is(fault, "short")) result = std::min(result, fault.amount);
        }
        events[count++] = {block.aio_data, 0, result, 0};
        one = held().erase(one);
    }
    return count;
}

bool holds(aio_context_t context) {
    const std::lock_guard lock(guard());
    return std::any_of(held().begin(), held().end(), [&](const Held& one) { return one.context == context; });
}

long get_events(aio_context_t context, long least, long most, io_event* events, const timespec* timeout) {
    const auto of_system = [&](long at_least, const timespec* wait, long count) {
        return real_syscall(SYS_io_getevents, static_cast<long>(context), at_least, most - count,
                            reinterpret_cast<long>(events + count), reinterpret_cast<long>(wait), 0);
    };
    if (!holds(context)) return of_system(least, timeout, 0);
    const timespec no_time{0, 0};
    long milliseconds = timeout->tv_sec * 1000 + timeout->tv_nsec / 1000000;
    for (;; --milliseconds) {
        const long count = end_held(context, events, most);
        const long more = of_system(0, &no_time, count);
        if (more < 0) return count > 0 ? count : more;
        if (count + more >= least || milliseconds <= 0) return count + more;
        usleep(1000);
    }
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

long syscall(long number, ...) {
    std::va_list list;
    va_start(list, number);
    long a[6];
    for (long& each : a) each = va_arg(list, long);
    va_end(list);
    const auto context = static_cast<aio_context_t>(a[0]);
    switch (number) {
        case SYS_io_setup:
            if (std::getenv("FAULTY_SYNCHRONOUS") == nullptr) break;
            errno = ENOSYS;
            return -1;
        case SYS_io_submit:
            return submit(context, a[1], reinterpret_cast<iocb**>(a[2]));
        case SYS_io_getevents:
            return get_events(context, a[1], a[2], reinterpret_cast<io_event*>(a[3]),
                              reinterpret_cast<const timespec*>(a[4]));
        case SYS_io_destroy:
            while (holds(context) && is(fault_now(), "stall")) usleep(5000);
            break;
        default:
            break;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
}
