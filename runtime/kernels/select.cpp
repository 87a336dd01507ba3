// Which instruction set's kernels to run, asked once.
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cpu_info.h"
#include "kernels.h"

namespace nybble {

#define NYBBLE_DECLARE(isa)       \
    namespace isa {               \
    extern const Kernels kernels; \
    }
#if defined(NYBBLE_WITH_AVX512VNNI)
NYBBLE_DECLARE(avx512vnni)
#endif
#if defined(NYBBLE_WITH_AVX2)
NYBBLE_DECLARE(avx2)
#endif
#if defined(NYBBLE_WITH_AVXVNNI)
NYBBLE_DECLARE(avxvnni)
#endif
#if defined(NYBBLE_WITH_NEONDOT)
NYBBLE_DECLARE(neondot)
#endif
NYBBLE_DECLARE(scalar)
#undef NYBBLE_DECLARE

namespace {

struct Entry {
    const Kernels* kernels;
    std::vector<const char*> needs;
};

// Best first.
const std::vector<Entry>& entries() {
    static const std::vector<Entry> table = {
#if defined(NYBBLE_WITH_AVX512VNNI)
        {&avx512vnni::kernels, {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"}},
#endif
#if defined(NYBBLE_WITH_AVXVNNI)
        {&avxvnni::kernels, {"avx2", "fma", "f16c", "avx_vnni"}},
#endif
#if defined(NYBBLE_WITH_AVX2)
        {&avx2::kernels, {"avx2", "fma", "f16c"}},
#endif
#if defined(NYBBLE_WITH_NEONDOT)
        {&neondot::kernels, {"dotprod"}},
#endif
        {&scalar::kernels, {}},
    };
    return table;
}

bool supported(const Entry& entry) {
    static const CpuInfo info = cpu_info();
    for (const char* need : entry.needs) {
        bool found = false;
        for (const std::string& name : info.isa) found = found || name == need;
        if (!found) return false;
    }
    return true;
}

}  // namespace

std::vector<std::string> supported_kernels() {
    std::vector<std::string> names;
    for (const Entry& entry : entries()) {
        if (supported(entry)) names.emplace_back(entry.kernels->name);
    }
    return names;
}

const Kernels& select_kernels(const std::string& name) {
    for (const Entry& entry : entries()) {
        if (supported(entry) && (name.empty() || name == entry.kernels->name)) return *entry.kernels;
    }
    std::string message = "instruction set '" + name + "' is not available on this CPU; available:";
    for (const std::string& other : supported_kernels()) message += " " + other;
    throw std::invalid_argument(message);
}

}  // namespace nybble
