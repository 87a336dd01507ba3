#include <chrono>
#include <thread>
#include <vector>

#include "../../runtime/kernels/thread_pool.h"
#include "check.h"

namespace kernel_test {
namespace {

using nybble::ThreadPool;

// Phases in which every thread adds one to a count of its own; after each barrier all counts are the same.
class Phases {
  public:
    explicit Phases(int threads) : pool_(threads), counts_(threads) {}

    // Where `naps`, every thread but the caller's first sleeps for longer than one looks for it.
    void run(int phases, bool naps) {
        phases_ = phases;
        naps_ = naps;
        pool_.run([](void* self, int thread) { static_cast<Phases*>(self)->run(thread); }, this);
    }
    bool crowded() const { return pool_.crowded(); }

  private:
    struct alignas(64) Count {
        int value = 0;
    };

    void run(int thread) {
        for (int i = 0; i < phases_; ++i) {
            if (naps_ && thread > 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
            ++counts_[thread].value;
            pool_.barrier();
            for (const Count& count : counts_) check(count.value == counts_[0].value, "all have arrived");
            pool_.barrier();
        }
    }

    ThreadPool pool_;
    std::vector<Count> counts_;
    int phases_ = 0;
    bool naps_ = false;
};

}  // namespace

void test_pool(const nybble::Kernels&, Results&) {
    for (int threads = 1; threads <= 4; ++threads) {
        current_case() = "pool of " + std::to_string(threads);
        Phases phases(threads);
        for (int steps = 0; steps < 20; ++steps) phases.run(50, false);
        if (threads == 1) {
            check(!phases.crowded(), "nobody waits");
            continue;
        }
        // Other work may hold the caller up, so that it does not wait.
        for (int tries = 0; tries < 1000 && !phases.crowded(); ++tries) phases.run(8, true);
        check(phases.crowded(), "waits in vain make the next ones brief");
        for (int tries = 0; tries < 1000 && phases.crowded(); ++tries) phases.run(1, false);
        check(!phases.crowded(), "after brief waits one is long again");
    }
}

}  // namespace kernel_test
