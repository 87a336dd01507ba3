#include "async_reads.h"

#ifdef __linux__
#include <linux/aio_abi.h>
#include <linux/fs.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <cerrno>
#include <system_error>

namespace nybble {

#if defined(__linux__) && defined(RWF_NOWAIT)

std::unique_ptr<AsyncReads> AsyncReads::open(const DirectFile& file, ReadThreads& others) {
    aio_context_t context = 0;
    if (!file.direct() || syscall(SYS_io_setup, kMostReads, &context) != 0) return nullptr;
    return std::unique_ptr<AsyncReads>(new AsyncReads(file, others, context));
}

AsyncReads::~AsyncReads() { syscall(SYS_io_destroy, context_); }

void AsyncReads::start(const ReadRequest* requests, size_t count) {
    iocb blocks[kMostReads] = {};
    iocb* list[kMostReads];
    for (size_t i = 0; i < count; ++i) {
        requests_[requests[i].tag] = requests[i];
        blocks[i].aio_data = requests[i].tag;
        blocks[i].aio_lio_opcode = IOCB_CMD_PREAD;
        // Where the file's blocks are not known yet, or too much waits for the disk: an end, and no wait
        // here.
        blocks[i].aio_rw_flags = RWF_NOWAIT;
        blocks[i].aio_fildes = static_cast<uint32_t>(file_.descriptor());
        blocks[i].aio_buf = reinterpret_cast<uintptr_t>(requests[i].into);
        blocks[i].aio_nbytes = requests[i].bytes;
        blocks[i].aio_offset = requests[i].offset;
        list[i] = &blocks[i];
    }
    long begun = 0;
    if (possible_) begun = syscall(SYS_io_submit, context_, count, list);
    if (begun < 0) {
        possible_ = errno == EAGAIN;
        begun = 0;
    }
    under_way_ += static_cast<size_t>(begun);
    for (auto i = static_cast<size_t>(begun); i < count; ++i) others_.start(requests[i]);
}

size_t AsyncReads::take(double seconds, size_t least, ReadEnd* ends) {
    io_event events[kMostReads];
    const double whole = static_cast<double>(static_cast<time_t>(seconds));
    timespec wait{static_cast<time_t>(whole), static_cast<long>((seconds - whole) * 1e9)};
    const long needed = seconds > 0 ? static_cast<long>(std::min(least, under_way_)) : 0;
    const long found =
        syscall(SYS_io_getevents, context_, needed, static_cast<long>(kMostReads), events, &wait);
    size_t count = 0;
    for (long i = 0; i < found; ++i) {
        const auto tag = static_cast<uint32_t>(events[i].data);
        const ReadRequest& request = requests_[tag];
        const auto read = static_cast<int64_t>(events[i].res);
        --under_way_;
        if (read == static_cast<int64_t>(request.bytes)) {
            ends[count++] = {tag, {}};
        } else if (read >= 0) {
            const auto done = static_cast<size_t>(read) / kDirectAlignment * kDirectAlignment;
            others_.start({tag, request.offset + static_cast<int64_t>(done), request.bytes - done,
                           request.into + done});
        } else if (read == -EAGAIN || read == -EINVAL || read == -EOPNOTSUPP) {
            if (read != -EAGAIN) possible_ = false;
            others_.start(request);
        } else {
            ends[count++] = {tag, std::generic_category().message(static_cast<int>(-read))};
        }
    }
    return count;
}

#else

std::unique_ptr<AsyncReads> AsyncReads::open(const DirectFile&, ReadThreads&) { return nullptr; }
AsyncReads::~AsyncReads() = default;
void AsyncReads::start(const ReadRequest*, size_t) {}
size_t AsyncReads::take(double, size_t, ReadEnd*) { return 0; }

#endif

}  // namespace nybble
