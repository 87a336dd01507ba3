// Round to nearest, subnormals kept, exceptions masked: set for a step and put back after it.
#pragma once

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace nybble {

class FloatControl {
  public:
    FloatControl() : saved_(read()) { write(kDefault); }
    ~FloatControl() { write(saved_); }
    FloatControl(const FloatControl&) = delete;
    FloatControl& operator=(const FloatControl&) = delete;

  private:
#if defined(__x86_64__)
    static constexpr uint64_t kDefault = 0x1f80;
    static uint64_t read() { return _mm_getcsr(); }
    static void write(uint64_t word) { _mm_setcsr(static_cast<unsigned>(word)); }
#elif defined(__aarch64__)
    static constexpr uint64_t kDefault = 0;
    static uint64_t read() {
        uint64_t word;
        asm volatile("mrs %0, fpcr" : "=r"(word));
        return word;
    }
    static void write(uint64_t word) { asm volatile("msr fpcr, %0" : : "r"(word)); }
#else
    static constexpr uint64_t kDefault = 0;
    static uint64_t read() { return 0; }
    static void write(uint64_t) {}
#endif
    uint64_t saved_;
};

}  // namespace nybble
