// AArch64 on Linux. Capability bits are from https://docs.kernel.org/arch/arm64/elf_hwcaps.html; the kernel
// reports a set only where it saves its registers.
#include "cpu_info.h"

#if defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#include <cstdio>
#include <fstream>
#include <utility>

namespace nybble {
namespace {

// Written out, since the headers of an old toolchain lack the newer ones.
constexpr uint64_t kAsimd = 1u << 1, kCpuid = 1u << 11;                        // HWCAP
constexpr uint64_t kAsimdHp = 1u << 10, kAsimdDp = 1u << 20, kSve = 1u << 22;  // HWCAP
constexpr uint64_t kSve2 = 1u << 1, kI8mm = 1u << 13, kBf16 = 1u << 14;        // HWCAP2

std::vector<std::string> instruction_sets(uint64_t hwcap, uint64_t hwcap2) {
    const struct {
        const char* name;
        bool usable;
    } sets[] = {
        {"neon", (hwcap & kAsimd) != 0},      {"fp16", (hwcap & kAsimdHp) != 0},
        {"dotprod", (hwcap & kAsimdDp) != 0}, {"i8mm", (hwcap2 & kI8mm) != 0},
        {"bf16", (hwcap2 & kBf16) != 0},      {"sve", (hwcap & kSve) != 0},
        {"sve2", (hwcap2 & kSve2) != 0},
    };
    std::vector<std::string> names;
    for (const auto& set : sets) {
        if (set.usable) names.emplace_back(set.name);
    }
    return names;
}

// MIDR_EL1's implementer (bits 31..24) and part (15..4); names as in Linux's
// arch/arm64/include/asm/cputype.h.
std::string core_name(uint64_t midr) {
    static const struct {
        uint32_t implementer, part;
        const char* name;
    } kCores[] = {
        {0x41, 0xd03, "Cortex-A53"},  {0x41, 0xd04, "Cortex-A35"},   {0x41, 0xd05, "Cortex-A55"},
        {0x41, 0xd07, "Cortex-A57"},  {0x41, 0xd08, "Cortex-A72"},   {0x41, 0xd09, "Cortex-A73"},
        {0x41, 0xd0a, "Cortex-A75"},  {0x41, 0xd0b, "Cortex-A76"},   {0x41, 0xd0c, "Neoverse-N1"},
        {0x41, 0xd0d, "Cortex-A77"},  {0x41, 0xd0e, "Cortex-A76AE"}, {0x41, 0xd40, "Neoverse-V1"},
        {0x41, 0xd41, "Cortex-A78"},  {0x41, 0xd42, "Cortex-A78AE"}, {0x41, 0xd44, "Cortex-X1"},
        {0x41, 0xd46, "Cortex-A510"}, {0x41, 0xd47, "Cortex-A710"},  {0x41, 0xd48, "Cortex-X2"},
        {0x41, 0xd49, "Neoverse-N2"}, {0x41, 0xd4b, "Cortex-A78C"},  {0x41, 0xd4d, "Cortex-A715"},
        {0x41, 0xd4e, "Cortex-X3"},   {0x41, 0xd4f, "Neoverse-V2"},  {0x41, 0xd80, "Cortex-A520"},
        {0x41, 0xd81, "Cortex-A720"}, {0x41, 0xd82, "Cortex-X4"},    {0x41, 0xd84, "Neoverse-V3"},
        {0x41, 0xd85, "Cortex-X925"}, {0x41, 0xd87, "Cortex-A725"},  {0x41, 0xd8e, "Neoverse-N3"},
        {0x4e, 0x003, "Denver 2"},    {0x4e, 0x004, "Carmel"},       {0x51, 0x001, "Oryon"},
        {0xc0, 0xac3, "Ampere-1"},    {0xc0, 0xac4, "Ampere-1a"},
    };
    const uint32_t implementer = midr >> 24 & 0xff, part = midr >> 4 & 0xfff;
    for (const auto& core : kCores) {
        if (core.implementer == implementer && core.part == part) return core.name;
    }
    char text[48];
    std::snprintf(text, sizeof text, "implementer 0x%02x part 0x%03x", implementer, part);
    return text;
}

// Big and small cores differ, so each is asked: "4x Cortex-A76 + 4x Cortex-A55".
std::string brand(bool readable_midr) {
    std::vector<std::pair<std::string, int>> kinds;
    for (int cpu = 0; cpu < 1024; ++cpu) {
        std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                           "/regs/identification/midr_el1");
        uint64_t midr = 0;
        if (!(file >> std::hex >> midr)) break;
        const std::string name = core_name(midr);
        if (kinds.empty() || kinds.back().first != name) kinds.emplace_back(name, 0);
        ++kinds.back().second;
    }
    std::string text;
    for (const auto& [name, count] : kinds) {
        text += (text.empty() ? "" : " + ") + std::to_string(count) + "x " + name;
    }
    if (text.empty() && readable_midr) {  // the kernel answers the instruction for us
        uint64_t midr;
        __asm__("mrs %0, midr_el1" : "=r"(midr));
        text = core_name(midr);
    }
    return text;
}

}  // namespace

CpuInfo cpu_info() {
    const uint64_t hwcap = getauxval(AT_HWCAP), hwcap2 = getauxval(AT_HWCAP2);
    return {brand((hwcap & kCpuid) != 0), instruction_sets(hwcap, hwcap2), sysfs_caches()};
}

}  // namespace nybble

#endif
