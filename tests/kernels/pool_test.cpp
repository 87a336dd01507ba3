#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "../../runtime/kernels/crowd_pace.h"
#include "../../runtime/kernels/thread_pool.h"
#include "check.h"

namespace kernel_test {
namespace {

using nybble::CrowdPace;
using nybble::Patience;
using nybble::ThreadPool;

// Phases in which every thread adds one to a count of its own; after each barrier all counts are the same.
class Phases {
  public:
    explicit Phases(int threads) : pool_(threads), counts_(threads) {}

    // Where `naps`, every thread but the caller's first sleeps for longer than one looks for it.
    void run(int phases, bool naps, int running) {
        phases_ = phases;
        naps_ = naps;
        for (Count& count : counts_) count.value = 0;
        pool_.run([](void* self, int thread) { static_cast<Phases*>(self)->run(thread); }, this, running);
        for (int i = 0; i < pool_.size(); ++i) {
            check(counts_[i].value == (i < running ? phases : 0), "so many threads ran");
        }
    }
    void run(int phases, bool naps) { run(phases, naps, pool_.size()); }
    double seconds_asleep() const { return pool_.seconds_asleep(); }

  private:
    struct alignas(64) Count {
        int value = 0;
    };

    void run(int thread) {
        for (int i = 0; i < phases_; ++i) {
            if (naps_ && thread > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            ++counts_[thread].value;
            pool_.barrier();
            for (int t = 0; t < pool_.running(); ++t)
                check(counts_[t].value == counts_[0].value, "all have arrived");
            pool_.barrier();
        }
    }

    ThreadPool pool_;
    std::vector<Count> counts_;
    int phases_ = 0;
    bool naps_ = false;
};

void check_pool(int threads) {
    current_case() = "pool of " + std::to_string(threads);
    Phases phases(threads);
    for (int steps = 0; steps < 20; ++steps) phases.run(50, false);
    for (int steps = 0; steps < 60; ++steps) phases.run(5, false, 1 + steps * 7 % threads);
    if (threads == 1) {
        check(phases.seconds_asleep() == 0, "nobody sleeps");
        return;
    }
    // Other work may hold the caller up, so that it does not wait.
    int tries = 0;
    do phases.run(8, true);
    while (++tries < 1000 && phases.seconds_asleep() == 0);
    check(phases.seconds_asleep() > 0, "a thread that waits in vain sleeps");
}

void check_patience() {
    current_case() = "patience";
    Patience patience;
    const auto wait = [&](bool asleep) {
        const bool brief = patience.begin();
        if (!brief) patience.note(asleep);
        return brief;
    };
    for (int i = 0; i < 20; ++i) {  // one that is seen in time lets the count begin anew
        check(!wait(i % Patience::kWaitsInVain != 0), "some waits in vain do not count");
    }
    wait(false);
    for (int i = 0; i < Patience::kWaitsInVain; ++i) check(!wait(true), "the first waits are long");
    for (int i = 0; i < Patience::kBriefWaits; ++i)
        check(wait(true), "waits in vain make the next ones brief");
    check(!wait(true), "then one is long again");
    check(wait(true), "in vain again, the next ones are brief");
    for (int i = 1; i < Patience::kBriefWaits; ++i) wait(true);
    check(!wait(false) && !patience.brief(), "a long one that is not in vain ends it");
    check(!wait(true), "and the count begins anew");
}

// Steps on n threads take `seconds[n]` and sleep for a share of it where there are several. Returns on how
// many threads most of `count` steps ran.
int usual(CrowdPace& pace, int tokens, const std::vector<double>& seconds, double share, int count) {
    std::vector<int> ran(seconds.size());
    for (int i = 0; i < count; ++i) {
        const int threads = pace.threads(tokens);
        check(threads >= 1 && threads < static_cast<int>(seconds.size()), "so many threads there are");
        ++ran[threads];
        pace.note(tokens, seconds[threads], threads > 1 ? share * seconds[threads] : 0);
    }
    const int most = static_cast<int>(std::max_element(ran.begin(), ran.end()) - ran.begin());
    check(ran[most] * 10 >= count * 8, "trials are few");
    return most;
}

void check_pace() {
    current_case() = "pace beside other work";
    const std::vector<double> alone = {0, 1.0, 0.6, 0.45, 0.4}, beside_one = {0, 1.0, 0.6, 0.5, 1.2};
    CrowdPace pace(4);
    check(usual(pace, 1, alone, 0.01, 500) == 4, "all threads where nothing else runs");
    check(usual(pace, 1, alone, 0.4, 500) == 4, "all threads where fewer are slower");
    check(usual(pace, 1, beside_one, 0.4, 500) == 3, "one thread less beside one that is busy");
    check(pace.threads(8) == 4 && pace.threads(100) == 4, "steps of other sizes are for themselves");
    check(usual(pace, 1, {0, 1.0, 1.5, 1.6, 2.0}, 0.5, 500) == 1, "one thread where all others are slow");
    check(usual(pace, 1, alone, 0.01, 1000) == 4, "all again when the others are gone");
    check(usual(pace, 33, beside_one, 0.9, 100) == 4, "all threads for many tokens");
    CrowdPace single(1);
    check(usual(single, 1, {0, 1.0}, 0, 10) == 1, "one thread stays one");
}

}  // namespace

void test_pool(const nybble::Kernels&, Results&) {
    for (int threads = 1; threads <= 4; ++threads) check_pool(threads);
    check_patience();
    check_pace();
}

}  // namespace kernel_test
