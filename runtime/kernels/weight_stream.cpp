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

    // An expert that the step's layer needs.
    struct Needed {
        int expert;
        int slot;
        size_t missing;
    };

    enum class Part { kRange, kRow, kExpert };

    // One read that is under way; its place among them is its tag.
    struct Read {
        ReadRequest request{};
        bool under_way = false;
        uint64_t epoch = 0, step = 0;
        Part part = Part::kRange;
        Slot* slot = nullptr;  // of a range
        size_t range = 0;      // or which of the needed experts
        int row = 0;
        int32_t id = 0;                // of a row, or the expert's slot
        size_t tile = 0, tile_at = 0;  // of the tiles that rows are read with; where the tile begins in it
    };

    State(int descriptor, const std::string& name, const StreamSettings& s)
        : settings(s),
          file(descriptor, name),
          slots(s.ranges.empty() ? 0 : s.buffers),
          experts(s.experts == 0 ? 0 : static_cast<int>(s.expert_ranges.size()) / s.experts, s.experts,
                  s.expert_slots),
          expert_reads(s.expert_slots),
          queue(file) {
        uint8_t* data =
            slots.empty() ? nullptr : allocate_for_reads(ring, settings.buffer_bytes * slots.size());
        for (Slot& slot : slots) {
            slot.data = data;
            data += settings.buffer_bytes;
        }
        if (settings.expert_slots > 0) {
            expert_data = allocate_for_reads(expert_memory, settings.slot_bytes * settings.expert_slots);
            needed.reserve(settings.experts);
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
        // What is still read into a slot holds it until it ends.
        for (size_t i = experts_released; i < needed.size(); ++i) {
            const int slot = needed[i].slot;
            if (slot != ExpertSlots::kNone && expert_reads[slot] == 0) experts.release(slot);
        }
        clear_needed();
    }

    void clear_needed() {
        needed.clear();
        experts_taken = experts_acquired = experts_released = expert_bytes_taken = 0;
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
    // Those in memory need no read: they come first.
    bool may_read_expert() {
        while (experts_taken < needed.size() && needed[experts_taken].missing == 0) ++experts_taken;
        if (!problem.empty() || experts_taken == needed.size()) return false;
        Needed& expert = needed[experts_taken];
        if (expert.slot == ExpertSlots::kNone) expert.slot = experts.take();
        return expert.slot != ExpertSlots::kNone;
    }
    bool may_read_row() const {
        return problem.empty() && rows_taken < row_count &&
               std::find(tile_used, tile_used + kRowReads, false) != tile_used + kRowReads;
    }

    // Begins the reads that may begin: first what is waited for, rows and experts.
    void issue() {
        ReadRequest requests[ReadQueue::kMost];
        size_t count = 0;
        for (uint32_t tag = 0; tag < ReadQueue::kMost; ++tag) {
            if (reads[tag].under_way) continue;
            if (may_read_row()) {
                requests[count++] = take_row(tag);
            } else if (may_read_expert()) {
                requests[count++] = take_expert(tag);
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
        reads[tag] = {request, true, epoch, step, Part::kRow, nullptr, 0, rows_taken++, id, tile, at};
        return request;
    }

    ReadRequest take_expert(uint32_t tag) {
        const Needed& expert = needed[experts_taken];
        const ExpertRange& range = range_of(expert);
        if (expert_bytes_taken == 0) {
            ++counts.read;
            counts.bytes += range.bytes;
        }
        const size_t bytes = std::min(kPieceBytes, range.bytes - expert_bytes_taken);
        const ReadRequest request{tag, range.offset + static_cast<int64_t>(expert_bytes_taken), bytes,
                                  data_of(expert.slot) + expert_bytes_taken};
        reads[tag] = {request, true,        epoch, step, Part::kExpert, nullptr, experts_taken,
                      0,       expert.slot, 0,     0};
        ++expert_reads[expert.slot];
        expert_bytes_taken += bytes;
        if (expert_bytes_taken == range.bytes) {
            expert_bytes_taken = 0;
            ++experts_taken;
        }
        return request;
    }

    const ExpertRange& range_of(const Needed& expert) const {
        return settings.expert_ranges[static_cast<size_t>(layer) * settings.experts + expert.expert];
    }
    uint8_t* data_of(int slot) const { return expert_data + settings.slot_bytes * slot; }

    ReadRequest take_piece(uint32_t tag) {
        Slot& slot = slots[issued % slots.size()];
        const FileRange& range = settings.ranges[next];
        if (taken == 0) {
            slot.range = next;
            slot.missing = range.bytes;
        }
        const size_t bytes = std::min(kPieceBytes, range.bytes - taken);
        const ReadRequest request{tag, range.offset + static_cast<int64_t>(taken), bytes, slot.data + taken};
        reads[tag] = {request, true, epoch, step, Part::kRange, &slot, next, 0, 0, 0, 0};
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
        switch (read.part) {
            case Part::kRow:
                return finish_row(read, reason);
            case Part::kExpert:
                return finish_expert(read, reason);
            case Part::kRange:
                return finish_range(read, reason);
        }
    }

    void finish_row(const Read& read, const std::string& reason) {
        tile_used[read.tile] = false;
        if (read.epoch != epoch) return;
        if (!reason.empty()) return fail(problem, "the embedding", reason);
        copy_row(settings.matrix, tiles + scratch_bytes() * read.tile + read.tile_at, read.id % kTileRows,
                 rows.data() + row_bytes(settings.matrix) * read.row);
        --rows_missing;
    }

    void finish_range(const Read& read, const std::string& reason) {
        --read.slot->reads;
        if (read.epoch != epoch) return;
        if (!reason.empty()) return fail(read.slot->problem, settings.ranges[read.range].name, reason);
        read.slot->missing -= read.request.bytes;
    }

    // Only an expert that has been read whole is one that is there.
    void finish_expert(const Read& read, const std::string& reason) {
        --expert_reads[read.id];
        if (read.epoch != epoch) {
            if (expert_reads[read.id] == 0) experts.release(read.id);
            return;
        }
        Needed& expert = needed[read.range];
        if (!reason.empty()) return fail(problem, name_of(expert), reason);
        expert.missing -= read.request.bytes;
        if (expert.missing == 0) experts.fill(expert.slot, layer, expert.expert);
    }

    std::string name_of(const Needed& expert) const {
        return "expert " + std::to_string(expert.expert) + " of layer " + std::to_string(layer);
    }

    void fail(std::string& into, const std::string& what, const std::string& reason) {
        failed = true;
        into = file.name() + ": reading " + what + ": " + reason;
    }

    // Waits until `ready`, for reads of what `name` says, of which so many as `missing` says have to end
    // before. False where `trouble` says why it will not be, or no read ends for too long: then the stream's
    // problem is that. Of a wait no more time is counted than was asked for, so that a process that was
    // stopped for a while finds its reads and not a limit that has passed.
    template <typename Name, typename Ready, typename Missing>
    bool await(Name name, const std::string& trouble, Ready ready, Missing missing) {
        take_ended(0, 0);
        issue();
        double left = settings.timeout;
        while (!ready()) {
            if (!trouble.empty()) {
                problem = trouble;
                return false;
            }
            if (left <= 0) {
                fail(problem, name(), "no read has ended for " + seconds(settings.timeout));
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
    size_t ends_to_wait_for(size_t missing) {
        const bool more = may_read_range() || may_read_row() || may_read_expert();
        return more ? std::min(missing, kEndsAtOnce) : missing;
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
    ExpertSlots experts;
    AlignedBuffer expert_memory;
    uint8_t* expert_data = nullptr;
    std::vector<int> expert_reads;  // into each slot, that have begun and not ended
    int layer = 0;                  // whose experts are needed
    std::vector<Needed> needed;
    size_t experts_taken = 0, expert_bytes_taken = 0;  // the one that is being read, and its bytes so far
    size_t experts_acquired = 0, experts_released = 0;
    ExpertCounts counts;
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

void WeightStream::begin_step(bool all, int tokens) {
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
    s.experts.age(tokens);
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
    const auto name = [&] { return settings_.ranges[range].name; };
    if (!s.await(name, slot.problem, ready, missing)) return nullptr;
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
    const auto name = [] { return std::string("the embedding"); };
    if (!s.await(name, s.problem, ready, [] { return size_t{1}; })) return nullptr;
    return s.rows.data();
}

const int32_t* WeightStream::expert_slots(int layer) const { return state_->experts.of_layer(layer); }

void WeightStream::begin_experts(int layer) {
    state_->clear_needed();
    state_->layer = layer;
}

void WeightStream::need_expert(int expert, int tokens) {
    State& s = *state_;
    s.experts.use(s.layer, expert, tokens);
    ++s.counts.needed;
    const int slot = s.experts.of_layer(s.layer)[expert];
    if (slot != ExpertSlots::kNone) s.experts.hold(slot);
    s.needed.push_back({expert, slot, 0});
    if (slot == ExpertSlots::kNone) s.needed.back().missing = s.range_of(s.needed.back()).bytes;
}

int WeightStream::acquire_experts(bool wait) {
    State& s = *state_;
    if (!s.problem.empty()) return 0;
    const size_t next = s.experts_acquired;
    if (next == s.needed.size()) return 0;
    const State::Needed& first = s.needed[next];
    if (wait) {
        const auto missing = [&] {
            return static_cast<size_t>(
                first.slot == ExpertSlots::kNone ? 1 : std::max(1, s.expert_reads[first.slot]));
        };
        const auto ready = [&] { return first.missing == 0; };
        if (!s.await([&] { return s.name_of(first); }, s.problem, ready, missing)) return 0;
    } else {
        advance();
    }
    while (s.experts_acquired < s.needed.size() && s.needed[s.experts_acquired].missing == 0) {
        ++s.experts_acquired;
    }
    return static_cast<int>(s.experts_acquired - next);
}

const uint8_t* WeightStream::expert(int i) const { return state_->data_of(state_->needed[i].slot); }

void WeightStream::release_experts() {
    State& s = *state_;
    for (; s.experts_released < s.experts_acquired; ++s.experts_released) {
        s.experts.release(s.needed[s.experts_released].slot);
    }
}

const ExpertCounts& WeightStream::expert_counts() const { return state_->counts; }

}  // namespace nybble
