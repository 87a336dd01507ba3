#include "weight_stream.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <mutex>

#include "aligned_buffer.h"
#include "direct_file.h"
#include "tile_rows.h"

namespace nybble {
namespace {

// While one waits for a processor, the read of the other keeps the disk busy.
constexpr size_t kReaders = 2;
// Of one read: enough to keep a disk busy, and no more pages than it takes at once where none are huge. A row
// that is asked for meanwhile waits for no more than that.
constexpr size_t kPieceBytes = 512 << 10;
constexpr double kOneWait = 0.25;  // seconds
// How long the end of a stream waits for reads that have begun.
constexpr auto kPatience = std::chrono::milliseconds(500);

// Aligned so that huge pages may back it: a disk takes a read into hundreds of scattered pages as several. A
// forked child gets none of it: were a page shared with a child while the disk writes into it, the child
// could end up with the page, and this process with a copy from before.
uint8_t* allocate_for_reads(AlignedBuffer& buffer, size_t bytes) {
    constexpr uintptr_t kHugePage = 2 << 20;
    buffer.allocate(bytes + kHugePage);
    uint8_t* data = buffer.data() + (-reinterpret_cast<uintptr_t>(buffer.data()) & (kHugePage - 1));
#ifdef MADV_HUGEPAGE
    madvise(data, bytes, MADV_HUGEPAGE);
#endif
#ifdef MADV_DONTFORK
    madvise(data, bytes, MADV_DONTFORK);
#endif
    return data;
}

}  // namespace

// What the readers share with the decoder's thread. They keep it alive: a read that is stuck in the kernel
// may return after the stream has gone.
struct WeightStream::Shared {
    // A buffer of the ring.
    struct Slot {
        uint8_t* data = nullptr;
        size_t range = 0;
        size_t missing = 0;   // bytes of its range that have not been read
        int reads = 0;        // that have begun and not ended, those of before a failure included
        std::string problem;  // why its range cannot be read
    };

    // One read.
    struct Read {
        uint64_t epoch;
        Slot* slot;  // null is a row
        size_t range, at, bytes;
        int row;
        int32_t id;
    };

    Shared(int descriptor, const std::string& name, const StreamSettings& s)
        : settings(s), file(descriptor, name), slots(s.buffers) {
        uint8_t* data = allocate_for_reads(ring, settings.buffer_bytes * slots.size());
        for (Slot& slot : slots) {
            slot.data = data;
            data += settings.buffer_bytes;
        }
        if (settings.matrix.rows > 0) {
            rows.allocate(row_bytes(settings.matrix) * kRowsAtOnce);
            tiles = allocate_for_reads(scratch, scratch_bytes() * kReaders);
        }
    }

    // What a tile takes wherever it lies, in whole units.
    size_t scratch_bytes() const {
        const size_t units = settings.matrix.tile_bytes() / kDirectAlignment + 2;
        return settings.matrix.rows > 0 ? units * kDirectAlignment : 0;
    }

    // Reading begins anew where a step does.
    void rewind() {
        ++epoch;
        issued = acquired = released = 0;
        next = taken = 0;
        ahead = true;
        failed = false;
        row_count = rows_taken = rows_missing = 0;
        for (Slot& slot : slots) slot.problem.clear();
        problem.clear();
    }

    // The ranges that the readers may read of the step they are in: of one that has not begun, those that
    // every step uses.
    size_t end_of_step() const { return ahead ? settings.every_step : step_end; }

    // When all of a step has been read, the next one's come.
    void turn() {
        if (!ahead && next == step_end) {
            next = 0;
            ahead = true;
        }
    }

    bool may_read_range() const {
        if (failed || next == end_of_step()) return false;
        return taken > 0 || (issued - released < slots.size() && slots[issued % slots.size()].reads == 0);
    }
    bool has_work() const { return rows_taken < row_count || may_read_range(); }

    Read take() {
        if (rows_taken < row_count) {
            const int row = rows_taken++;
            return {epoch, nullptr, 0, 0, 0, row, ids[row]};
        }
        Slot& slot = slots[issued % slots.size()];
        const FileRange& range = settings.ranges[next];
        if (taken == 0) {
            slot.range = next;
            slot.missing = range.bytes;
        }
        const Read read{epoch, &slot, next, taken, std::min(kPieceBytes, range.bytes - taken), 0, 0};
        ++slot.reads;
        taken += read.bytes;
        if (taken == range.bytes) {
            taken = 0;
            ++issued;
            ++next;
            turn();
        }
        return read;
    }

    // Reads without the lock.
    std::string perform(const Read& read, uint8_t* tile, size_t& tile_at) const {
        if (read.slot != nullptr) {
            return file.read(settings.ranges[read.range].offset + static_cast<int64_t>(read.at), read.bytes,
                             read.slot->data + read.at);
        }
        const size_t bytes = settings.matrix.tile_bytes();
        const int64_t begin = settings.matrix_offset + static_cast<int64_t>(bytes) * (read.id / kTileRows);
        tile_at = static_cast<size_t>(begin) % kDirectAlignment;
        const size_t whole = (tile_at + bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
        return file.read(begin - static_cast<int64_t>(tile_at), whole, tile);
    }

    void finish(const Read& read, const std::string& reason, const uint8_t* tile) {
        ++progress;
        if (read.slot != nullptr) --read.slot->reads;
        if (read.epoch != epoch) return work.notify_all();  // its buffer may have been waited for
        if (read.slot == nullptr) {
            if (!reason.empty()) return fail(problem, "the embedding", reason);
            copy_row(settings.matrix, tile, read.id % kTileRows,
                     rows.data() + row_bytes(settings.matrix) * read.row);
            if (--rows_missing == 0) done.notify_one();
        } else {
            if (!reason.empty()) return fail(read.slot->problem, settings.ranges[read.range].name, reason);
            read.slot->missing -= read.bytes;
            if (read.slot->missing == 0) done.notify_one();
        }
    }

    void fail(std::string& into, const std::string& what, const std::string& reason) {
        failed = true;
        into = file.name() + ": reading " + what + ": " + reason;
        done.notify_one();
    }

    // Waits until `ready`, for reads of `what`. False where `trouble` says why it will not be, or no read
    // ends for too long: then the stream's problem is that. Time is counted in short waits, so that a process
    // that was stopped for a while finds its reads and not a limit that has passed.
    template <typename Ready>
    bool await(std::unique_lock<std::mutex>& lock, const std::string& what, const std::string& trouble,
               Ready ready) {
        using Seconds = std::chrono::duration<double>;
        uint64_t seen = progress;
        double left = settings.timeout;
        while (!ready()) {
            if (!trouble.empty()) {
                problem = trouble;
                return false;
            }
            if (left <= 0) {
                fail(problem, what, "no read has ended for " + seconds(settings.timeout));
                return false;
            }
            const double slice = std::min(left, kOneWait);
            if (done.wait_for(lock, Seconds(slice)) == std::cv_status::timeout) left -= slice;
            if (progress != seen) {
                seen = progress;
                left = settings.timeout;
            }
        }
        return true;
    }

    static std::string seconds(double value) {
        std::string text = std::to_string(value);  // "30.000000"
        text.erase(text.find_last_not_of('0') + 1);
        if (text.back() == '.') text.pop_back();
        return text + " s";
    }

    const StreamSettings settings;
    const DirectFile file;
    AlignedBuffer ring, scratch;
    uint8_t* tiles = nullptr;  // of each reader scratch_bytes(): a tile of the matrix

    std::mutex mutex;  // guards what follows
    std::condition_variable work, done;
    std::vector<Slot> slots;
    uint64_t issued = 0, acquired = 0, released = 0;  // ranges: read to the end or nearly so, in use, used
    size_t next = 0, taken = 0;                       // the range that is being read, and its bytes so far
    bool ahead = true;                                // that range is of the step after this one
    size_t step_end = 0;                              // ranges that this step uses
    AlignedBuffer rows;
    int32_t ids[kRowsAtOnce];
    int row_count = 0, rows_taken = 0, rows_missing = 0;
    uint64_t epoch = 0;     // reads that began before a failure are of an earlier one
    uint64_t progress = 0;  // reads that have ended
    bool failed = false;    // nothing more is read
    std::string problem;    // of the step
    bool stop = false;
    size_t running = 0;  // readers
};

WeightStream::WeightStream(int descriptor, const std::string& file, StreamSettings settings)
    : settings_(std::move(settings)),
      shared_(std::make_shared<Shared>(descriptor, file, settings_)),
      pid_(getpid()) {}

WeightStream::~WeightStream() {
    if (pid_ != getpid()) {
        abandon();
        return;
    }
    bool ended;
    {
        std::unique_lock lock(shared_->mutex);
        shared_->stop = true;
        shared_->work.notify_all();
        ended = shared_->done.wait_for(lock, kPatience, [&] { return shared_->running == 0; });
    }
    for (std::thread& reader : readers_) {
        if (ended) {
            reader.join();
        } else {
            reader.detach();
        }
    }
}

// After fork the readers are the parent's, and one of them may have held the lock: all of it is left as it
// is.
void WeightStream::abandon() {
    new std::shared_ptr<Shared>(std::move(shared_));
    new std::vector<std::thread>(std::move(readers_));
    readers_.clear();
}

void WeightStream::start() {
    if (pid_ != getpid()) {
        auto anew = std::make_shared<Shared>(shared_->file.descriptor(), shared_->file.name(), settings_);
        abandon();
        shared_ = std::move(anew);
        pid_ = getpid();
        in_step_ = false;
    }
    while (readers_.size() < kReaders) {
        const auto read = [shared = shared_, reader = readers_.size()] {
            uint8_t* tile = shared->tiles + shared->scratch_bytes() * reader;
            std::unique_lock lock(shared->mutex);
            for (;;) {
                shared->work.wait(lock, [&] { return shared->stop || shared->has_work(); });
                if (shared->stop) break;
                const Shared::Read read = shared->take();
                size_t tile_at = 0;
                lock.unlock();
                const std::string reason = shared->perform(read, tile, tile_at);
                lock.lock();
                shared->finish(read, reason, tile + tile_at);
            }
            --shared->running;
            shared->done.notify_one();
        };
        const std::lock_guard lock(shared_->mutex);
        readers_.emplace_back(read);
        ++shared_->running;
    }
}

void WeightStream::begin_step(bool all) {
    start();
    const std::lock_guard lock(shared_->mutex);
    Shared& s = *shared_;
    // What was read ahead and failed is tried again.
    if (in_step_ || s.failed) s.rewind();
    in_step_ = true;
    s.step_end = all ? settings_.ranges.size() : settings_.every_step;
    s.ahead = false;
    s.turn();
    s.work.notify_all();
}

void WeightStream::end_step() {
    const std::lock_guard lock(shared_->mutex);
    if (!shared_->problem.empty()) throw StreamError(shared_->problem);
    in_step_ = false;
}

const uint8_t* WeightStream::acquire() {
    Shared& s = *shared_;
    std::unique_lock lock(s.mutex);
    if (!s.problem.empty()) return nullptr;
    Shared::Slot& slot = s.slots[s.acquired % s.slots.size()];
    const size_t range = s.acquired < s.issued ? slot.range : s.next;
    const auto ready = [&] { return s.acquired < s.issued && slot.missing == 0; };
    if (!s.await(lock, settings_.ranges[range].name, slot.problem, ready)) return nullptr;
    ++s.acquired;
    return slot.data;
}

void WeightStream::release() {
    const std::lock_guard lock(shared_->mutex);
    ++shared_->released;
    shared_->work.notify_one();
}

const uint8_t* WeightStream::rows(const int32_t* ids, int count) {
    Shared& s = *shared_;
    std::unique_lock lock(s.mutex);
    if (!s.problem.empty()) return nullptr;
    std::copy_n(ids, count, s.ids);
    s.row_count = s.rows_missing = count;
    s.rows_taken = 0;
    s.work.notify_all();
    if (!s.await(lock, "the embedding", s.problem, [&] { return s.rows_missing == 0; })) return nullptr;
    return s.rows.data();
}

}  // namespace nybble
