// Tests of the kernels that need no Python, so that they also run under sanitizers and emulators.
//
// Without arguments: every instruction set this CPU has, what must hold in it, and the same bits as scalar.
// --list: their names, best first.
// --digest NAME [PART...]: a digest of one set's results, to compare between machines. Parts are those of
// kParts; where none is named, all.
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <new>

#include "check.h"

namespace {

std::atomic<int> allocations{0};
std::atomic<bool> counting{false};

void count_allocation() {
    if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1, std::memory_order_relaxed);
}

void* allocate(size_t bytes, size_t alignment) {
    count_allocation();
    void* p = nullptr;
    if (posix_memalign(&p, alignment, bytes) != 0) throw std::bad_alloc();
    return p;
}

}  // namespace

// The linker is told to put these before malloc, calloc and mmap (--wrap).
extern "C" {
void* __real_malloc(size_t bytes);
void* __real_calloc(size_t count, size_t bytes);
void* __real_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset);
void* __wrap_mmap(void* at, size_t bytes, int protection, int flags, int file, off_t offset) {
    count_allocation();
    return __real_mmap(at, bytes, protection, flags, file, offset);
}
void* __wrap_malloc(size_t bytes) {
    count_allocation();
    return __real_malloc(bytes);
}
void* __wrap_calloc(size_t count, size_t bytes) {
    count_allocation();
    return __real_calloc(count, bytes);
}
}

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
    return allocate(bytes, static_cast<size_t>(alignment));
}
void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
    return allocate(bytes, alignof(std::max_align_t));
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }
void operator delete(void* p, std::align_val_t) noexcept { std::free(p); }
void operator delete(void* p, size_t, std::align_val_t) noexcept { std::free(p); }

namespace kernel_test {
namespace {

using Part = void (*)(const nybble::Kernels&, Results&);
struct {
    const char* name;
    Part run;
} constexpr kParts[] = {
    {"elementwise", test_elementwise}, {"linear", test_linear},   {"head", test_head},
    {"attention", test_attention},     {"decoder", test_decoder}, {"experts", test_experts},
    {"sampler", test_sampler},         {"stream", test_stream},   {"pool", test_pool}};

// The named parts, or all where none is named.
Results run(const std::string& name, const std::vector<std::string>& parts = {}) {
    const nybble::Kernels& kernels = nybble::select_kernels(name);
    Results results;
    size_t found = 0;
    for (const auto& part : kParts) {
        if (parts.empty() || std::find(parts.begin(), parts.end(), part.name) != parts.end()) {
            part.run(kernels, results);
            ++found;
        }
    }
    check(parts.empty() || found == parts.size(), "every part named is one, and is named once");
    return results;
}

int print_digest(const std::string& name, const std::vector<std::string>& parts) {
    Digest digest;
    for (const Results::Case& result : run(name, parts).cases)
        digest.add(&result.digest, sizeof result.digest);
    std::printf("%016llx\n", static_cast<unsigned long long>(digest.value()));
    return 0;
}

int compare_all() {
    const Results expected = run("scalar");
    for (const std::string& name : nybble::supported_kernels()) {
        const Results found = name == "scalar" ? expected : run(name);
        check(found.cases.size() == expected.cases.size(), "every set has the same cases");
        for (size_t i = 0; i < found.cases.size(); ++i) {
            current_case() = name + ", " + found.cases[i].name;
            check(found.cases[i].digest == expected.cases[i].digest, "the same bits as scalar");
        }
        std::printf("%s: %zu cases\n", name.c_str(), found.cases.size());
    }
    return 0;
}

}  // namespace

AllocationCount::AllocationCount() {
    allocations = 0;
    counting = true;
}
AllocationCount::~AllocationCount() { counting = false; }
int AllocationCount::count() const { return allocations; }

}  // namespace kernel_test

int main(int argc, char** argv) {
    const std::string option = argc > 1 ? argv[1] : "";
    if (option == "--list") {
        for (const std::string& name : nybble::supported_kernels()) std::printf("%s\n", name.c_str());
        return 0;
    }
    if (option == "--digest" && argc > 2) return kernel_test::print_digest(argv[2], {argv + 3, argv + argc});
    if (option.empty()) return kernel_test::compare_all();
    std::fprintf(stderr, "usage: kernel_test [--list | --digest NAME [PART...]]\n");
    return 2;
}
