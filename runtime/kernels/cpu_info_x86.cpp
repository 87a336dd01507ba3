// x86-64. Bits and leaves are from Intel's "Architectures Software Developer's Manual", volume 2A, CPUID, and
// AMD's "Architecture Programmer's Manual", volume 3, appendix E.
#include "cpu_info.h"

#if defined(__x86_64__) || defined(_M_X64)

#include <cstring>

#ifdef _MSC_VER
#include <intrin.h>
#else
#include <cpuid.h>
#endif

namespace nybble {
namespace {

struct Registers {
    uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(uint32_t leaf, uint32_t subleaf = 0) {
    Registers r;
#ifdef _MSC_VER
    int values[4];
    __cpuidex(values, static_cast<int>(leaf), static_cast<int>(subleaf));
    std::memcpy(&r, values, sizeof r);
#else
    __cpuid_count(leaf, subleaf, r.eax, r.ebx, r.ecx, r.edx);
#endif
    return r;
}

// XCR0: the register states that the operating system saves. Only valid where CPUID reports OSXSAVE.
uint64_t saved_states() {
#ifdef _MSC_VER
    return _xgetbv(0);
#else
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
#endif
}

constexpr uint64_t kAvxState = 0x6;      // XMM and the upper halves of YMM
constexpr uint64_t kAvx512State = 0xe6;  // and the masks, the upper halves of ZMM, ZMM16..31
constexpr uint64_t kAmxState = 0x60000;  // tile configuration and tile data

std::vector<std::string> instruction_sets(uint32_t max_leaf) {
    const Registers basic = cpuid(1);
    const Registers extended = max_leaf >= 7 ? cpuid(7, 0) : Registers{};
    const Registers more = max_leaf >= 7 && extended.eax >= 1 ? cpuid(7, 1) : Registers{};
    const auto bit = [](uint32_t value, int index) { return (value >> index & 1) != 0; };

    const uint64_t states = bit(basic.ecx, 27) ? saved_states() : 0;
    const bool avx = bit(basic.ecx, 28) && (states & kAvxState) == kAvxState;
    const bool avx512 = avx && bit(extended.ebx, 16) && (states & kAvx512State) == kAvx512State;
    // On Linux a process also asks for AMX (ARCH_REQ_XCOMP_PERM) before its first tile instruction.
    const bool amx = bit(extended.edx, 24) && (states & kAmxState) == kAmxState;

    const struct {
        const char* name;
        bool usable;
    } sets[] = {
        {"sse4.2", bit(basic.ecx, 20)},
        {"avx", avx},
        {"avx2", avx && bit(extended.ebx, 5)},
        {"fma", avx && bit(basic.ecx, 12)},
        {"f16c", avx && bit(basic.ecx, 29)},
        {"avx_vnni", avx && bit(more.eax, 4)},
        {"avx512f", avx512},
        {"avx512bw", avx512 && bit(extended.ebx, 30)},
        {"avx512cd", avx512 && bit(extended.ebx, 28)},
        {"avx512dq", avx512 && bit(extended.ebx, 17)},
        {"avx512vl", avx512 && bit(extended.ebx, 31)},
        {"avx512_vnni", avx512 && bit(extended.ecx, 11)},
        {"avx512_bf16", avx512 && bit(more.eax, 5)},
        {"avx512_fp16", avx512 && bit(extended.edx, 23)},
        {"amx_tile", amx},
        {"amx_int8", amx && bit(extended.edx, 25)},
        {"amx_bf16", amx && bit(extended.edx, 22)},
    };
    std::vector<std::string> names;
    for (const auto& set : sets) {
        if (set.usable) names.emplace_back(set.name);
    }
    return names;
}

std::string brand(uint32_t max_extended) {
    if (max_extended < 0x80000004) return {};
    char text[49] = {};
    for (uint32_t leaf = 0; leaf < 3; ++leaf) {
        const Registers r = cpuid(0x80000002 + leaf);
        std::memcpy(text + 16 * leaf, &r, 16);
    }
    std::string name(text);
    const size_t first = name.find_first_not_of(' '), last = name.find_last_not_of(' ');
    return first == std::string::npos ? std::string() : name.substr(first, last - first + 1);
}

std::vector<Cache> caches(uint32_t max_leaf, uint32_t max_extended) {
    // AMD keeps leaf 4 empty and answers in 0x8000001D, in the same form, where TopologyExtensions is set.
    const bool amd = max_extended >= 0x8000001d && (cpuid(0x80000001).ecx >> 22 & 1) != 0;
    std::vector<Cache> found;
    if (!amd && max_leaf < 4) return sysfs_caches();
    for (uint32_t index = 0; index < 16; ++index) {
        const Registers r = cpuid(amd ? 0x8000001d : 4, index);
        const uint32_t type = r.eax & 31;
        if (type < 1 || type > 3) break;
        const int64_t line = (r.ebx & 0xfff) + 1;
        const int64_t partitions = (r.ebx >> 12 & 0x3ff) + 1, ways = (r.ebx >> 22) + 1;
        const int64_t sets = static_cast<int64_t>(r.ecx) + 1;
        found.push_back({static_cast<int>(r.eax >> 5 & 7),
                         type == 1   ? "data"
                         : type == 2 ? "instruction"
                                     : "unified",
                         line * partitions * ways * sets, static_cast<int>(line),
                         static_cast<int>(r.eax >> 14 & 0xfff) + 1});
    }
    // CPUID counts the ids that could share a cache, absent CPUs included; Linux knows the CPUs that do.
    const std::vector<Cache> linux_caches = sysfs_caches();
    if (found.empty()) return linux_caches;
    for (Cache& cache : found) {
        for (const Cache& known : linux_caches) {
            if (known.level == cache.level && known.type == cache.type && known.shared_by > 0) {
                cache.shared_by = known.shared_by;
            }
        }
    }
    return found;
}

}  // namespace

CpuInfo cpu_info() {
    const uint32_t max_leaf = cpuid(0).eax, max_extended = cpuid(0x80000000).eax;
    return {brand(max_extended), instruction_sets(max_leaf), caches(max_leaf, max_extended)};
}

}  // namespace nybble

#endif
