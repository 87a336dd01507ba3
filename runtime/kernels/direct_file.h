// A file that is read past the page cache: what is read once a step would only push out what is read more
// often, and would count as memory in use.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace nybble {

// Offsets, sizes and addresses of direct reads are multiples of it.
constexpr size_t kDirectAlignment = 4096;

class DirectFile {
  public:
    // A descriptor of its own for the file that `descriptor` has open; `name` is for messages. Where the file
    // system has no direct reads, the page cache is told to forget what was read. Throws std::system_error.
    DirectFile(int descriptor, std::string name);
    ~DirectFile();
    DirectFile(const DirectFile&) = delete;
    DirectFile& operator=(const DirectFile&) = delete;

    const std::string& name() const { return name_; }
    int descriptor() const { return descriptor_; }
    bool direct() const { return direct_.load(std::memory_order_relaxed); }

    // Reads all of the bytes, which are aligned; any number of threads at once. Returns what went wrong,
    // which is nothing where it is empty.
    std::string read(int64_t offset, size_t bytes, uint8_t* into) const;

  private:
    const std::string name_;
    int descriptor_;
    mutable std::atomic<bool> direct_;
};

}  // namespace nybble
