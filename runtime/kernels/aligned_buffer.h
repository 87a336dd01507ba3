// Memory for weights, pages and a step's rows.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace nybble {

// Zeroed memory aligned to pages of the system. What is never written never becomes resident.
class AlignedBuffer {
  public:
    void allocate(size_t bytes);
    uint8_t* data() const { return mapping_.get(); }
    size_t bytes() const { return bytes_; }
    float* floats() const { return reinterpret_cast<float*>(data()); }

  private:
    struct Unmap {
        size_t mapped;
        void operator()(uint8_t* p) const;
    };
    std::unique_ptr<uint8_t, Unmap> mapping_{nullptr, Unmap{0}};
    size_t bytes_ = 0;
};

}  // namespace nybble
