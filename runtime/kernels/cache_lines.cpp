#include "cache_lines.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace nybble {

#if defined(__x86_64__)

namespace {

bool has_clflushopt() {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (b & bit_CLFLUSHOPT) != 0;
}

__attribute__((target("clflushopt"))) void drop(const uint8_t* data, size_t bytes) {
    constexpr size_t kLine = 64;
    for (size_t at = 0; at < bytes; at += kLine) _mm_clflushopt(const_cast<uint8_t*>(data + at));
    _mm_sfence();
}

}  // namespace

void drop_from_caches(const uint8_t* data, size_t bytes) {
    static const bool possible = has_clflushopt();
    if (possible) drop(data, bytes);
}

#else

void drop_from_caches(const uint8_t*, size_t) {}

#endif

}  // namespace nybble
