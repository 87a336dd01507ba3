// The Python face of the C++ code: module `nybble._kernels`.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "code_pages.h"
#include "cpu_info.h"

namespace nb = nanobind;

namespace nybble {
void bind_decoder(nb::module_& m);
void bind_measure(nb::module_& m);
void bind_rounding(nb::module_& m);
void bind_sampler(nb::module_& m);
}  // namespace nybble

static nb::dict cpu_info_dict() {
    const nybble::CpuInfo info = nybble::cpu_info();
    nb::list isa, caches;
    for (const std::string& name : info.isa) isa.append(name);
    for (const nybble::Cache& cache : info.caches) {
        nb::dict entry;
        entry["level"] = cache.level;
        entry["type"] = cache.type;
        entry["bytes"] = cache.bytes;
        entry["line_bytes"] = cache.line_bytes;
        entry["shared_by"] = cache.shared_by;
        caches.append(entry);
    }
    nb::dict result;
    result["brand"] = info.brand;
    result["isa"] = isa;
    result["caches"] = caches;
    return result;
}

NB_MODULE(_kernels, m) {
    m.doc() = "Nybble's C++ code.";
    // The sampler of a process lives until its end, when nanobind would call it leaked.
    nb::set_leak_warnings(false);
    m.def("cpu_info", &cpu_info_dict, "What this CPU is: its brand, usable instruction sets and caches.");
    m.def("drop_code_pages", &nybble::drop_code_pages,
          "Takes the libraries' code out of resident memory; what is used comes back. Returns the bytes.");
    nybble::bind_decoder(m);
    nybble::bind_measure(m);
    nybble::bind_rounding(m);
    nybble::bind_sampler(m);
}
