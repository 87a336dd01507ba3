// What this CPU can do, asked once at start: the instruction sets that kernels are chosen by, and its caches.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nybble {

struct Cache {
    int level;
    std::string type;  // "data", "instruction" or "unified"
    int64_t bytes;
    int line_bytes;
    int shared_by;  // logical CPUs that share one instance
};

struct CpuInfo {
    std::string brand;
    std::vector<std::string> isa;  // sets that the CPU has and the operating system saves the registers of
    std::vector<Cache> caches;
};

CpuInfo cpu_info();

}  // namespace nybble
