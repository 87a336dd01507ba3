#include "weight_stream.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <system_error>
#include <thread>

#include "cache_lines.h"
#include "direct_file.h"
#include "range_ring.h"
#include "read_queue.h"

namespace nybble {
namespace {

constexpr size_t kEndsAtOnce = ReadQueue::kMost / 4;
constexpr double kOneWait = 0.25;  // seconds
constexpr double kPatience = 0.5;  // seconds that the end of a stream waits for reads that have begun

}  // namespace

// All that reads write to or need: it is kept until the last of them has ended.
struct WeightStream::State {
    // One read that is under way; its place among them is its tag.
    struct Read {
        ReadRequest request{};
        ReadPart* part = nullptr;  // null where none is under way
        uint64_t epoch = 0, step = 0;
    };

    State(int descriptor, const std::string& name, const StreamSettings& s)
        : settings(s),
          file(descriptor, name),
          trouble{name},
          rows(settings, trouble),
          experts(settings, trouble),
          ranges(settings, trouble),
          queue(file) {}

    // Reading begins anew where a step does.
    void rewind() {
        ++epoch;
        trouble.clear();
        for_each_part([](auto& part) { part.rewind(); });
    }

    // First what is waited for, rows and experts.
    template <typename Function>
    void for_each_part(Function function) {
        function(rows);
        function(experts);
        function(ranges);
    }

    // Begins the reads that may begin.
    void issue() {
        ReadRequest requests[ReadQueue::kMost];
        size_t count = 0;
        for (uint32_t tag = 0; tag < ReadQueue::kMost; ++tag) {
            if (reads[tag].part != nullptr) continue;
            ReadPart* const part = next_part();
            if (part == nullptr) break;
            requests[count] = part->take(tag);
            reads[tag] = {requests[count++], part, epoch, step};
        }
        if (count > 0) queue.start(requests, count);
    }

    // Of which a read may begin; null where there is none.
    ReadPart* next_part() {
        ReadPart* found = nullptr;
        for_each_part([&](ReadPart& part) {
            if (found == nullptr && part.may_read()) found = &part;
        });
        return found;
    }

    // Takes note of reads that have ended, of which it waits up to so many seconds for the first `least`;
    // whether there are any.
    bool take_ended(double seconds, size_t least) {
        ReadEnd ends[ReadQueue::kMost];
        const size_t count = queue.take(seconds, least, ends);
        for (size_t i = 0; i < count; ++i) finish(ends[i].tag, ends[i].problem);
        return count > 0;
    }

    void finish(uint32_t tag, const std::string& reason) {
        Read& read = reads[tag];
        // What failed while it was read ahead is tried again now that it is needed.
        if (!reason.empty() && read.epoch == epoch && read.step != step) {
            read.step = step;
            return queue.start(&read.request, 1);
        }
        ReadPart* const part = read.part;
        read.part = nullptr;
        part->finish(tag, read.epoch == epoch, reason);
    }

    // Waits until `ready`, for reads of what `name` says, of which so many as `missing` says have to end
    // before. False where `problem` says why it will not be, or no read ends for too long: then the stream's
    // problem is that. Of a wait no more time is counted than was asked for, so that a process that was
    // stopped for a while finds its reads and not a limit that has passed.
    template <typename Name, typename Ready, typename Missing>
    bool await(Name name, const std::string& problem, Ready ready, Missing missing) {
        take_ended(0, 0);
        issue();
        double left = settings.timeout;
        while (!ready()) {
            if (!problem.empty()) {
                trouble.problem = problem;
                return false;
            }
            if (left <= 0) {
                trouble.note(name(), "no read has ended for " + seconds(settings.timeout));
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
        return next_part() != nullptr ? std::min(missing, kEndsAtOnce) : missing;
    }

    static std::string seconds(double value) {
        std::string text = std::to_string(value);  // "30.000000"
        text.erase(text.find_last_not_of('0') + 1);
        if (text.back() == '.') text.pop_back();
        return text + " s";
    }

    const StreamSettings settings;
    const DirectFile file;
    StreamTrouble trouble;
    RowReads rows;
    ExpertReads experts;
    RangeRing ranges;
    uint64_t step = 0;
    double waited = 0, waited_before = 0;  // seconds of this step and of the last one, for reads
    uint64_t epoch = 0;                    // reads that began before a failure are of an earlier one
    Read reads[ReadQueue::kMost];          // by tag
    ReadQueue queue;                       // ends before what it reads into
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
    if (in_step_ || s.trouble.failed) s.rewind();
    in_step_ = true;
    ++s.step;
    s.waited_before = s.waited;
    s.waited = 0;
    s.ranges.begin_step(all);
    s.experts.age(tokens);
    advance();
}

void WeightStream::end_step() {
    if (!state_->trouble.problem.empty()) throw StreamError(state_->trouble.problem);
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
    if (!s.trouble.problem.empty()) return nullptr;
    const auto name = [&] { return s.ranges.name(); };
    const auto ready = [&] { return s.ranges.is_ready(); };
    const auto missing = [&] { return s.ranges.missing_reads(); };
    return s.await(name, s.ranges.problem(), ready, missing) ? s.ranges.acquire() : nullptr;
}

// Where a virtual disk's data is copied into memory by another core, lines that a core of this process still
// has slow that down by a half. It is worth its time only where that is waited for.
void WeightStream::release() {
    State& s = *state_;
    if (s.waited + s.waited_before > 0) {
        const RangeRing::Memory used = s.ranges.in_use();
        drop_from_caches(used.data, used.bytes);
    }
    s.ranges.release();
}

const uint8_t* WeightStream::rows(const int32_t* ids, int count) {
    State& s = *state_;
    if (!s.trouble.problem.empty()) return nullptr;
    s.rows.want(ids, count);
    const auto ready = [&] { return s.rows.is_ready(); };
    const auto one = [] { return size_t{1}; };
    return s.await(RowReads::name, s.trouble.problem, ready, one) ? s.rows.rows() : nullptr;
}

const int32_t* WeightStream::expert_slots(int layer) const { return state_->experts.of_layer(layer); }

void WeightStream::begin_experts(int layer) { state_->experts.begin(layer); }

void WeightStream::need_expert(int expert, int tokens) { state_->experts.need(expert, tokens); }

int WeightStream::acquire_experts(bool wait) {
    State& s = *state_;
    if (!s.trouble.problem.empty() || s.experts.all_acquired()) return 0;
    if (wait) {
        const auto name = [&] { return s.experts.name(); };
        const auto ready = [&] { return s.experts.is_ready(); };
        const auto missing = [&] { return s.experts.missing_reads(); };
        if (!s.await(name, s.trouble.problem, ready, missing)) return 0;
    } else {
        advance();
    }
    return s.experts.acquire();
}

const uint8_t* WeightStream::expert(int i) const { return state_->experts.expert(i); }

void WeightStream::release_experts() { state_->experts.release(); }

const ExpertCounts& WeightStream::expert_counts() const { return state_->experts.counts(); }

}  // namespace nybble
