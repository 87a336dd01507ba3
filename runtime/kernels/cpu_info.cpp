#include "cpu_info.h"

#include <fstream>

namespace nybble {

#if !defined(__x86_64__) && !defined(_M_X64) && !(defined(__aarch64__) && defined(__linux__))
CpuInfo cpu_info() { return {{}, {}, sysfs_caches()}; }
#endif

namespace {

std::string first_word(const std::string& path) {
    std::ifstream file(path);
    std::string word;
    file >> word;
    return word;
}

// Digits before anything else; 0 where there are none. Nine digits hold every figure /sys has for a cache.
int64_t leading_number(const std::string& text) {
    int64_t value = 0;
    for (size_t i = 0; i < text.size() && i < 9 && text[i] >= '0' && text[i] <= '9'; ++i) {
        value = value * 10 + (text[i] - '0');
    }
    return value;
}

// CPUs in a mask written in hexadecimal, such as "00000000,0000000f".
int count_mask(const std::string& mask) {
    int count = 0;
    for (char c : mask) {
        const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : 0;
        for (int bit = 1; bit < 16; bit <<= 1) count += (digit & bit) != 0;
    }
    return count;
}

}  // namespace

// https://docs.kernel.org/admin-guide/cputopology.html and
// Documentation/ABI/testing/sysfs-devices-system-cpu.
std::vector<Cache> sysfs_caches() {
    std::vector<Cache> caches;
    for (int index = 0; index < 16; ++index) {
        const std::string folder = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/";
        const std::string size = first_word(folder + "size"), type = first_word(folder + "type");
        if (size.empty() || type.empty()) break;
        const int64_t unit = size.back() == 'K' ? 1024 : size.back() == 'M' ? 1024 * 1024 : 1;
        const char* name = type == "Data" ? "data" : type == "Instruction" ? "instruction" : "unified";
        caches.push_back({static_cast<int>(leading_number(first_word(folder + "level"))), name,
                          leading_number(size) * unit,
                          static_cast<int>(leading_number(first_word(folder + "coherency_line_size"))),
                          count_mask(first_word(folder + "shared_cpu_map"))});
    }
    return caches;
}

}  // namespace nybble
