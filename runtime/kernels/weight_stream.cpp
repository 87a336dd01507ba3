#include "weight_stream.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <thread>

#include "aligned_buffer.h"
#include "cache_lines.h"
#include "direct_file.h"
#include "read_queue.h"
#include "tile_rows.h"

namespace nybble {
namespace {

// Of one read: enough to keep a disk busy, and no more pages than it takes at once where none are huge.
constexpr size_t kPieceBytes = 512 << 10;
constexpr size_t kEndsAtOnce = ReadQueue::kMost / 4;
constexpr size_t kRowReads = 4;    // rows that are read at once
constexpr double kOneWait = 0.25;  // seconds
constexpr double kPatience = 0.5;  // seconds that the end of a stream waits for reads that have begun
constexpr size_t kHugePage = 2 << 20;

// Aligned, and from one huge page on filled up to whole ones, so that they may back all of it: a disk takes a
// read into hundreds of scattered pages as several. A forked child gets none of it: were a page shared with a
// child while the disk writes into it, the child could end up with the page, and this process with a copy
// from before.
uint8_t* allocate_for_reads(AlignedBuffer& buffer, size_t bytes) {
    if (bytes >= kHugePage) bytes = (bytes + kHugePage - 1) / kHugePage * kHugePage;
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

// All that reads write to or need: it is kept until the last of them has ended.
struct WeightStream::State {
    // A buffer of the ring.
    struct Slot {
        uint8_t* data = nullptr;
        size_t range = 0;
        size_t missing = 0;   // bytes of its range that have not been read
        int reads = 0;        // that have begun and not ended, those of before a failure included
        std::string problem;  // why its range cannot be read
    };

    // One read that is under way; its place among them is its tag.
    struct Read {
        ReadRequest request{};
        bool under_way = false;
        uint64_t epoch = 0, step = 0;
        Slot* slot = nullptr;  // null is a row
        size_t range = 0;
        int row = 0;
        int32_t id = 0;
        size_t tile = 0, tile_at = 0;  // of the tiles that rows are read with; where the tile begins in it
    };

    State(int descriptor, const std::string& name, const StreamSettings& s)
        : settings(s), file(descriptor, name), slots(s.buffers), queue(file) {
        uint8_t* data = allocate_for_reads(ring, settings.buffer_bytes * slots.size());
        for (Slot& slot : slots) {
            slot.data = data;
            data += settings.buffer_bytes;
        }
        if (settings.matrix.rows > 0) {
            rows.allocate(row_bytes(settings.matrix) * kRowsAtOnce);
            tiles = allocate_for_reads(scratch, scratch_bytes() * kRowReads);
        }
    }

    // What a tile takes wherever it lies, in whole units.
    size_t scratch_bytes() const {
        const size_t units = settings.matrix.tile_bytes() / kDirectAlignment + 2;
        return units * kDirectAlignment;
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

    // The ranges that may be read of the step they are in: of one that has not begun, those that every step
    // uses.
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
    bool may_read_row() const {
        return problem.empty() && rows_taken < row_count &&
               std::find(tile_used, tile_used + kRowReads, false) != tile_used + kRowReads;
    }

    // Begins the reads that may begin, rows first.
    void issue() {
        ReadRequest requests[ReadQueue::kMost];
        size_t count = 0;
        for (uint32_t tag = 0; tag < ReadQueue::kMost; ++tag) {
            if (reads[tag].under_way) continue;
            if (may_read_row()) {
                requests[count++] = take_row(tag);
            } else if (may_read_range()) {
                requests[count++] = take_piece(tag);
            } else {
                break;
            }
        }
        if (count > 0) queue.start(requests, count);
    }

    ReadRequest take_row(uint32_t tag) {
        const size_t tile =
            static_cast<size_t>(std::find(tile_used, tile_used + kRowReads, false) - tile_used);
        const int32_t id = ids[rows_taken];
        const size_t bytes = settings.matrix.tile_bytes();
        const int64_t begin = settings.matrix_offset + static_cast<int64_t>(bytes) * (id / kTileRows);
        const size_t at = static_cast<size_t>(begin) % kDirectAlignment;
        const size_t whole = (at + bytes + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
        tile_used[tile] = true;
        const ReadRequest request{tag, begin - static_cast<int64_t>(at), whole,
                                  tiles + scratch_bytes() * tile};
        reads[tag] = {request, true, epoch, step, nullptr, 0, rows_taken++, id, tile, at};
        return request;
    }

    ReadRequest take_piece(uint32_t tag) {
        Slot& slot = slots[issued % slots.size()];
        const FileRange& range = settings.ranges[next];
        if (taken == 0) {
            slot.range = next;
            slot.missing = range.bytes;
        }
        const size_t bytes = std::min(kPieceBytes, range.bytes - taken);
        const ReadRequest request{tag, range.offset + static_cast<int64_t>(taken), bytes, slot.data + taken};
        reads[tag] = {request, true, epoch, step, &slot, next, 0, 0, 0, 0};
        ++slot.reads;
        taken += bytes;
        if (taken == range.bytes) {
            taken = 0;
            ++issued;
            ++next;
            turn();
        }
        return request;
    }

    // Takes note of reads that have ended, of which it waits up to so many seconds for the first `least`;
    // whether there are any.
    bool take_ended(double seconds, size_t least) {
        ReadEnd ends[ReadQueue::kMost];
        const size_t count = queue.take(seconds, least, ends);
        for (size_t i = 0; i < count; ++i) finish(reads[ends[i].tag], ends[i].problem);
        return count > 0;
    }

    void finish(Read& read, const std::string& reason) {
        // What failed while it was read ahead is tried again now that it is needed.
        if (!reason.empty() && read.epoch == epoch && read.step != step) {
            read.step = step;
            return queue.start(&read.request, 1);
        }
        read.under_way = false;
        if (read.slot != nullptr) {
            --read.slot->reads;
        } else {
            tile_used[read.tile] = false;
        }
        if (read.epoch != epoch) return;
        if (read.slot == nullptr) {
            if (!reason.empty()) return fail(problem, "the embedding", reason);
            copy_row(settings.matrix, tiles + scratch_bytes() * read.tile + read.tile_at, read.id % kTileRows,
                     rows.data() + row_bytes(settings.matrix) * read.row);
            --rows_missing;
        } else {
            if (!reason.empty()) return fail(read.slot->problem, settings.ranges[read.range].name, reason);
            read.slot->missing -= read.request.bytes;
        }
    }

    void fail(std::string& into, const std::string& what, const std::string& reason) {
        failed = true;
        into = file.name() + ": reading " + what + ": " + reason;
    }

    // Waits until `ready`, for reads of `what`, of which so many as `missing` says have to end before. False
    // where `trouble` says why it will not be, or no read ends for too long: then the stream's problem is
    // that. Of a wait no more time is counted than was asked for, so that a process that was stopped for a
    // while finds its reads and not a limit that has passed.
    template <typename Ready, typename Missing>
    bool await(const std::string& what, const std::string& trouble, Ready ready, Missing missing) {
        take_ended(0, 0);
        issue();
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
            const auto begin = std::chrono::steady_clock::now();
            const bool any = take_ended(slice, ends_to_wait_for(missing()));
            const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
            waited += passed.count();
            if (any) {
                left = settings.timeout;
                issue();
            } else {
                left -= std::min(slice, passed.count());
            }
        }
        return true;
    }

    // To be woken for each read costs more than many take; where others could begin, some must stay under
    // way.
    size_t ends_to_wait_for(size_t missing) const {
        return may_read_range() || may_read_row() ? std::min(missing, kEndsAtOnce) : missing;
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
    uint8_t* tiles = nullptr;  // scratch_bytes() each: tiles of the matrix that rows are read with
    bool tile_used[kRowReads] = {};

    std::vector<Slot> slots;
    uint64_t issued = 0, acquired = 0, released = 0;  // ranges: read to the end or nearly so, in use, used
    size_t next = 0, taken = 0;                       // the range that is being read, and its bytes so far
    bool ahead = true;                                // that range is of the step after this one
    size_t step_end = 0;                              // ranges that this step uses
    AlignedBuffer rows;
    int32_t ids[kRowsAtOnce];
    int row_count = 0, rows_taken = 0, rows_missing = 0;
    uint64_t step = 0;
    double waited = 0, waited_before = 0;  // seconds of this step and of the last one, for reads
    uint64_t epoch = 0;                    // reads that began before a failure are of an earlier one
    bool failed = false;                   // nothing more is read
    std::string problem;                   // of the step

    Read reads[ReadQueue::kMost];  // by tag
    ReadQueue queue;               // ends before what it reads into
};

WeightStream::WeightStream(int descriptor, const std::string& file, StreamSettings settings)
    : settings_(std::move(settings)),
      state_(std::make_unique<State>(descriptor, file, settings_)),
      pid_(getpid()) {}

WeightStream::~WeightStream() {
    if (pid_ != getpid()) {
        state_.release();
        return;
    }
    const auto begin = std::chrono::steady_clock::now();
    for (double left = kPatience; state_->queue.under_way() > 0 && left > 0;) {
        state_->take_ended(left, 1);
        left = kPatience - std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    }
    if (state_->queue.under_way() == 0) return;
    State* stuck = state_.release();
    try {
        std::thread([stuck] { delete stuck; }).detach();
    } catch (const std::system_error&) {  // no thread can be had: what is stuck stays
    }
}

// After fork the reads and the queue are the parent's: all of it is left as it is.
void WeightStream::after_fork() {
    auto anew = std::make_unique<State>(state_->file.descriptor(), state_->file.name(), settings_);
    state_.release();
    state_ = std::move(anew);
    pid_ = getpid();
    in_step_ = false;
}

void WeightStream::begin_step(bool all) {
    if (pid_ != getpid()) after_fork();
    State& s = *state_;
    if (in_step_ || s.failed) s.rewind();
    in_step_ = true;
    ++s.step;
    s.waited_before = s.waited;
    s.waited = 0;
    s.step_end = all ? settings_.ranges.size() : settings_.every_step;
    s.ahead = false;
    s.turn();
    advance();
}

void WeightStream::end_step() {
    if (!state_->problem.empty()) throw StreamError(state_->problem);
    in_step_ = false;
    advance();
}

void WeightStream::advance() {
    if (state_->queue.under_way() > 0) state_->take_ended(0, 0);
    state_->issue();
}

double WeightStream::seconds_waited() const { return state_->waited; }

const uint8_t* WeightStream::acquire() {
    State& s = *state_;
    if (!s.problem.empty()) return nullptr;
    State::Slot& slot = s.slots[s.acquired % s.slots.size()];
    const size_t range = s.acquired < s.issued ? slot.range : s.next;
    const auto ready = [&] { return s.acquired < s.issued && slot.missing == 0; };
    const auto missing = [&] { return static_cast<size_t>(std::max(1, slot.reads)); };
    if (!s.await(settings_.ranges[range].name, slot.problem, ready, missing)) return nullptr;
    ++s.acquired;
    return slot.data;
}

// Where a virtual disk's data is copied into memory by another core, lines that a core of this process still
// has slow that down by a half. It is worth its time only where that is waited for.
void WeightStream::release() {
    State& s = *state_;
    const State::Slot& slot = s.slots[s.released % s.slots.size()];
    if (s.waited + s.waited_before > 0) drop_from_caches(slot.data, settings_.ranges[slot.range].bytes);
    ++s.released;
}

const uint8_t* WeightStream::rows(const int32_t* ids, int count) {
    State& s = *state_;
    if (!s.problem.empty()) return nullptr;
    std::copy_n(ids, count, s.ids);
    s.row_count = s.rows_missing = count;
    s.rows_taken = 0;
    const auto ready = [&] { return s.rows_missing == 0; };
    if (!s.await("the embedding", s.problem, ready, [] { return size_t{1}; })) return nullptr;
    return s.rows.data();
}

}  // namespace nybble
