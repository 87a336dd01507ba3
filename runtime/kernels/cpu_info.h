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
    int shared_by;  // logical CPUs that share one instance; 0 where it isn't known
};

struct CpuInfo {
    std::string brand;             // empty where the CPU doesn't tell
    std::vector<std::string> isa;  // sets that the CPU has and the operating system saves the registers of
    std::vector<Cache> caches;     // as the core that asked sees them, nearest first
};

// Never fails: on an architecture it doesn't know, every field is empty.
CpuInfo cpu_info();

// The caches of CPU 0 in Linux's /sys; empty elsewhere.
std::vector<Cache> sysfs_caches();

}  // namespace nybble
